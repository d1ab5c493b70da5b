"""Notebook pages of checkpoints, managers, saves, loaded states, tiers, reports of `verify`."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from ..._common.report import TABLE_STYLE, Table
from ..._common.text import bytes_text, count_text, first_by_number, listed, shorten
from .table import Group, Parameter, columns_of, groups_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .._checkpoint.save_async import SaveTimes
    from .._loaded_state import LoadedState
    from .._records import TensorRecord
    from .._report import VerifyReport
    from .._store.manifest import Manifest
    from .._tiers.report import TierReport

MOST_BYTES = 30_000
ROWS = 160  # of parameters, in total
GROUPS = (48, 4)  # layers shown at the start and at the end
_LIST = 20  # files listed by name
_STEPS = 50  # steps of a run

# Text inherits its colours; bars and marks are visible in light and dark themes.
_COLOURS = ("#3b82c4", "#e08a2e", "#3fa66b", "#a06cc9", "#d0576b", "#8a8f98", "#5aa9a9")
_STYLE = (
    ".mlstate-ckpt{font:13px/1.5 system-ui,sans-serif}"
    ".mlstate-ckpt p{margin:0 0 .3em}"
    ".mlstate-ckpt .mlstate{margin-left:1.2em}"
    ".mlstate-ckpt summary{cursor:pointer;white-space:nowrap}"
    ".mlstate-ckpt code{background:none;color:inherit;font:12px ui-monospace,monospace}"
    ".mlstate-ckpt em{font-style:normal;opacity:.7;margin-left:1em}"
    ".mlstate-ckpt s{display:inline-block;height:.75em;text-decoration:none}"
    ".mlstate-ckpt u{display:inline-block;width:160px;margin-right:.8em;text-decoration:none;"
    "line-height:1;font-size:13px;background:#8882}"
    ".mlstate-ckpt .good{color:#2f9e5b}.mlstate-ckpt .bad{color:#d64550}"
    + "".join(f".mlstate-ckpt .c{i}{{background:{c}}}" for i, c in enumerate(_COLOURS))
)


def _page(content: str) -> str:
    return f"<div class=mlstate-ckpt><style>{TABLE_STYLE}{_STYLE}</style>{content}</div>"


def _fit_page(make: Callable[[int], str], rows: int) -> str:
    """Return a page with as many rows as fit the limit of `MOST_BYTES`.

    `make`: returns the page with a number of rows. `rows`: number to begin with; it is halved until
    the page fits, and 0 always fits.
    """
    while True:
        page = make(rows)
        if rows == 0 or len(page.encode("utf-8", "replace")) < MOST_BYTES:
            return page
        rows //= 2


def _name(text: str, limit: int = 80) -> str:
    return f"<code>{escape(shorten(text, limit))}</code>"


def _bar(parts: Iterable[tuple[int, float]]) -> str:
    """Return an HTML bar; each part has a colour, an index of `_COLOURS`, and a share up to 1."""
    spans = (f'<s class=c{colour} style="width:{100 * share:.1f}%"></s>' for colour, share in parts)
    return f"<u>{''.join(spans)}</u>"


# ---- a checkpoint ----


def _layer_bar(nbytes: dict[str, int], columns: list[str], largest: int) -> str:
    """Return an HTML bar of a layer's bytes, one colour for each state.

    `nbytes`: by column. `columns`: names, whose places determine the colours. `largest`: bytes of a
    bar of full length.
    """
    sizes = ((place, nbytes.get(column, 0)) for place, column in enumerate(columns))
    return _bar((place, size / largest) for place, size in sizes if size)


def _row(parameter: Parameter, layer: str, columns: list[str]) -> tuple[object, ...]:
    """Return a table row: name, dtype, shape, bytes by column, shards, version of a parameter.

    `layer`: the name of its layer, which the shown name omits. `columns`: parameter and state
    names.
    """
    name = shorten(parameter.name[len(layer) + 1 :] if layer else parameter.name, 60)
    sizes = map(parameter.nbytes.get, columns)
    return name, parameter.dtype, parameter.shape, *sizes, parameter.shards, parameter.version


def _layer(group: Group, columns: list[str], largest: int, rows: int, unfolded: bool) -> str:
    """Return a foldable layer: bar of bytes, and a table of its first `rows` parameters.

    `columns`: of the table. `largest`: bytes of the largest layer, whose bar has full length.
    `unfolded`: show the table at first.
    """
    label = _name(group.name) if group.name else "<em>without a layer</em>"
    sizes = f"{bytes_text(group.total)}, {count_text(group.count, 'tensor')}"
    summary = f"{_layer_bar(group.nbytes, columns, largest)}{label}<em>{sizes}"
    first = first_by_number(group.records, str, rows)
    state_headers = [f"{column} [B]" for column in columns]
    headers = ["tensor", "dtype", "shape", *state_headers, "shards [n]", "version [n]"]
    cells = [_row(group.parameter(name, columns), group.name, columns) for name in first]
    table = Table("", headers, cells, total=len(group.records)).html(style=False, limit=len(cells))
    is_open = " open" if unfolded else ""
    return f"<details{is_open}><summary>{summary}</em></summary>{table}</details>"


def _hidden_layers(groups: Sequence[Group]) -> str:
    """Return the line that counts the layers that a page leaves out, with bytes and tensors."""
    size = bytes_text(sum(group.total for group in groups))
    layers = count_text(len(groups), "layer")
    count = sum(group.count for group in groups)
    return f"<p>… {layers} more<em>{size}, {count_text(count, 'tensor')}</em>"


def checkpoint_html(title: str, records: Sequence[TensorRecord]) -> str:
    """Return the page of a checkpoint: layers with bars of bytes, which unfold to parameters.

    `title`: the first line. `records`: its tensors.
    """
    columns = columns_of(records)
    groups = groups_of(records, columns)
    count = len(groups)
    largest = max((group.total for group in groups), default=0) or 1
    legend = "".join(
        f"<s class=c{i} style='width:.75em;margin:0 .4em 0 0'></s>{escape(shorten(column, 20))}"
        "&ensp;"
        for i, column in enumerate(columns)
    )
    head = f"<p>{escape(title)}</p><p>{legend}</p>"

    def make(rows: int) -> str:
        """Return the page with about `rows` parameters; 0: only layers, and 8 of them at most."""
        first, last = GROUPS if rows else (8, 0)
        if count <= first + last + 1:  # a line that counts one layer would save nothing
            first, last = count, 0
        hidden, visible = groups[first : count - last], groups[:first] + groups[count - last :]
        layer_rows = max(3, rows // max(1, len(visible))) if rows else 0
        layers = [_layer(group, columns, largest, layer_rows, count == 1) for group in visible]
        if hidden:
            layers.insert(first, _hidden_layers(hidden))
        return _page(head + "".join(layers))

    return _fit_page(make, ROWS)


# ---- a verification report ----


def _files(label: str, names: Sequence[str]) -> str:
    """Return a foldable list of the first 20 file names, "" if there are none.

    `label`: which files these are.
    """
    if not names:
        return ""
    rows = [[shorten(name, 120)] for name in names]
    table = Table("", [""], rows).html(style=False, limit=_LIST)
    return f"<details><summary>{count_text(len(names), 'file')} {label}</summary>{table}</details>"


def report_html(report: VerifyReport) -> str:
    """Return the page of a verification: whether the checkpoint is good, its problems by file."""
    mark = "<b class=good>✓</b>" if report else "<b class=bad>✗</b>"
    table = report._table()
    head = "</p><p>".join(escape(shorten(line, 600)) for line in table.lines if line)
    rows = [[shorten(cell, 240) for cell in row] for row in table.texts()]
    problems = Table("", table.headers, rows)

    def make(rows: int) -> str:
        """Return the page with the first `rows` problems; 0: without problems and files."""
        listed = problems.html(style=False, limit=rows) if report.problems else ""
        files = _files("left over", report.leftover) + _files(
            "that mlstate did not write", report.strange
        )
        return _page(f"<p>{mark} {head}</p>{listed}{files if rows else ''}")

    return _fit_page(make, 50)


# ---- a running save ----


def _seconds(seconds: float) -> str:
    """Return a duration in milliseconds or seconds."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _durations(times: SaveTimes, now: float, failed: bool) -> Sequence[str]:
    """Return texts for the phases of an asynchronous save, and for the time of the caller's waits.

    `now`: `perf_counter`. `failed`: the save ended with an error; then the time until it only.
    """
    since = now - times.began
    if times.staged is None:
        return [f"staging for {_seconds(since)}"]
    if failed and times.ended is not None:
        return [f"failed after {_seconds(times.ended - times.began)}"]
    phases = [f"state free after {_seconds(times.staged - times.began)}"]
    if times.ended is None:
        phases.append(f"writing since, {_seconds(since)} in all")
    else:
        phases.append(f"on the disk after {_seconds(times.ended - times.began)}")
    return [*phases, f"the caller waited {_seconds(times.blocked_seconds)}"]


def save_html(
    path: str,
    state: str,
    progress: tuple[int, int],
    times: SaveTimes,
    now: float,
    error: BaseException | None,
) -> str:
    """Return a page on an asynchronous save, for notebooks.

    `path`: of the checkpoint. `state`: text such as "writing". `progress`: bytes done, of all.
    `now`: `perf_counter`. `error`: why the save failed, or None.
    """
    done, total = progress
    saved = times.ended is not None and error is None
    share = done / total if total else float(saved)
    # colour: of the bar, an index of _COLOURS
    mark, colour, why = "<b class=good>✓</b> " if saved else "", 0, ""
    if error is not None:
        mark, colour = "<b class=bad>✗</b> ", 4
        why = f"<p class=bad>{type(error).__name__}: {escape(shorten(str(error), 600))}</p>"
    return _page(
        f"<p>{mark}{state}: {_name(path, 120)}</p>"
        f"<p>{_bar([(colour, share)])}{bytes_text(done)} of {bytes_text(total)}"
        f"<em>{', '.join(_durations(times, now, error is not None))}</em></p>{why}"
    )


# ---- the steps of a run, and a loaded state ----


def _metadata(metadata: Mapping[str, object], limit: int) -> str:
    """Return the first 20 entries of metadata as one line, cut at about `limit` characters."""
    entries = [f"{key}: {value!r}" for key, value in list(metadata.items())[:20]]
    more = len(metadata) - len(entries)
    return listed(entries, limit, more)


def manager_html(title: str, manifests: Sequence[Manifest]) -> str:
    """Return the steps of a run as a table, newest first; the first 50 are shown.

    `title`: the first line. `manifests`: oldest first.
    """
    columns = ["step [n]", "saved", "ranks [n]", "bytes [B]", "metadata"]
    rows = [
        (
            "?" if manifest.step is None else manifest.step,
            manifest.created,
            manifest.world_size,
            sum(record.data_bytes for record in manifest.indexes),
            _metadata(manifest.metadata, 200),
        )
        for manifest in manifests[: -_STEPS - 1 : -1]  # the last ones, in reverse order
    ]
    older = len(manifests) - len(rows)
    count = count_text(len(manifests), "step") + (f", the newest {_STEPS}" if older else "")
    return Table(f"{title}: {count}", columns, rows).html()


def loaded_html(loaded: LoadedState) -> str:
    """Return the page of a loaded state: step, metadata, and the trees of model and optimizer."""
    step = "no step" if loaded.step is None else f"step {loaded.step:,}"
    parts = [f"<p>LoadedState: {step}</p>"]
    if loaded.metadata:
        parts.append(f"<p>metadata<em>{escape(_metadata(loaded.metadata, 600))}</em></p>")
    for name in ("model", "optimizer"):
        state = getattr(loaded, name)
        if state is None:
            parts.append(f"<p>{name}<em>not saved</em></p>")
            continue
        write = getattr(state, "_repr_html_", None)
        kind = escape(shorten(type(state).__name__, 80))
        inner = write() if write else f"<p>{kind}</p>"
        parts.append(f"<details open><summary>{name}<em>{kind}</em></summary>{inner}</details>")
    return _page("".join(parts))


# ---- the tiers of a state ----

_TIER_COLOURS = {"hot": 4, "warm": 1, "cold": 0}  # indices of _COLOURS


def tiers_html(report: TierReport) -> str:
    """Return the page of a report: tiers with bars, moves, and the units, the most used first.

    A bar is the used share of the budget, or without a budget of the bytes of the largest tier.
    """
    largest = max((nbytes for nbytes, _ in report.totals.values()), default=0) or 1
    lines = [f"<p>{escape(report.summary)}</p>"]
    for tier, (nbytes, budget) in report.totals.items():
        bar = _bar([(_TIER_COLOURS[tier], min(nbytes / (budget or largest), 1))])
        count = count_text(sum(unit.tier == tier for unit in report.units), "unit")
        limit = ", no limit" if budget is None else f" of {bytes_text(budget)}"
        size = bytes_text(nbytes) + ("" if tier == "cold" else limit)
        lines.append(f"<p>{bar}{tier}<em>{count}, {size}</em></p>")
    lines += [f"<p>{move}</p>" for move in report._moves()]
    table = report._table(sorted(report.units, key=lambda unit: -unit.lately))
    unfolded = " open" if table.total <= 20 else ""

    def make(rows: int) -> str:
        """Return the page with the first `rows` units."""
        units = (
            f"<summary>units, the most used first</summary>{table.html(style=False, limit=rows)}"
        )
        details = f"<details{unfolded}>{units}</details>" if table.total else ""
        return _page("".join(lines) + details)

    return _fit_page(make, ROWS)
