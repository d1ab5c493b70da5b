"""The tables of docs/benchmarks.md, from the stored results.

``python benchmarks/summary.py`` prints them; ``--write`` puts them into the page, between the
markers. Each processor has a column. A cell shows mlstate's median, and how many times faster it is
than the alternative, both from the processor's newest stored run.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stored

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
NONE = "-"


@dataclass(frozen=True)
class Key:
    """One line of the summary: mlstate's row, and the row to compare it with."""

    label: str
    benchmark: str
    table: str  # start of the table's title
    ours: str
    other: str
    named: str  # the alternative's name in the label


PEER, BACK = "NumPy peer: full + astype + copy", "NumPy peer: zeros + astype + copy"
EXPAND = "expand float16, (28, 8, 2048, 128) -> 4096"
CONVERT = "expand float32 -> float16, (28, 8, 512, 128)"
COMPACT = "compact float16, (28, 8, 4096, 128)"
OUT, FRESH, LOW = (f"mlstate {how}, 2 threads" for how in ("out=", "fresh", "fresh, low_memory"))
LOADED = "load_into, 1 GB in 1,008 tensors, 1 thread"
DIFFERENCES = "differences of two states of 1 GB, float32, 1 thread"
MEMCMP = "reading both (memcmp)"
SYNCED, TENSORS = "safetensors + fsync", "safetensors"
SAVE_FILE, SAVE = (f"mlstate.{name} (durable, checksums)" for name in ("save_file", "save"))
DIRECT = "raw: one file, O_DIRECT + fsync"
STAGED, COPY = "mlstate.save_async, staging 100 %", "memcpy, touched memory"
BLOCKED = "time that a save blocks training"
FLOAT32, BFLOAT16 = (
    f"reduce-scatter: 148 parameters, 124 M elements, {dtype}" for dtype in ("f32", "bf16")
)
HOOK, SHARED = "mlstate LocalGroup: hook", "limit: C add, memory that is shared"
SUM, CLONES = "mlstate.fsdp.GradientAccumulator", "clone per micro-batch (torch)"
PLAN, NUMPY_PLAN = "mlstate, 2 threads, budget at 0.2", "NumPy, budget at 0.2"
FUSED, MEMCPY = "core: copy with CRC32C", "memcpy, 1 thread"

KEYS = (
    Key("expand a 112 MiB cache, `out=`", "kv", EXPAND, OUT, PEER, "NumPy"),
    Key("the same, new result", "kv", EXPAND, FRESH, PEER, "NumPy"),
    Key("the same, `low_memory`", "kv", EXPAND, LOW, PEER, "NumPy"),
    Key("expand f32 to f16, 56 MiB, `out=`", "kv", CONVERT, OUT, PEER, "NumPy"),
    Key("compact 224 to 112 MiB, `out=`", "kv", COMPACT, OUT, BACK, "NumPy"),
    Key("`load_into`, 1 GB, 1 thread", "state", LOADED, "load_into", "memcpy", "memcpy"),
    Key(
        "`diff`, 1 GB of f32, 1 thread", "state", DIFFERENCES, "diff, all changed", MEMCMP,
        "reading both",
    ),
    Key("`save_file`, 256 MiB, durable", "file", "save: 16", SAVE_FILE, SYNCED, TENSORS),
    Key("`load_file`, 256 MiB, verified", "file", "load", "mlstate.load_file", TENSORS, TENSORS),
    Key("copy with CRC32C, 64 MiB", "checkpoint", "CRC32C of 64 MiB", FUSED, MEMCPY, "memcpy"),
    Key(
        "`save`, 996 MB in 296 arrays", "checkpoint", "A: save, disk", SAVE, DIRECT,
        "one O_DIRECT file",
    ),
    Key("`save`, 665 MB in 20,000 arrays", "checkpoint", "B: save, disk", SAVE, SYNCED, TENSORS),
    Key("`load`, 996 MB, verified", "checkpoint", "A: load", "mlstate.load", TENSORS, TENSORS),
    Key("`save_async`, until staged, 2 ranks", "training", BLOCKED, STAGED, COPY, "memcpy"),
    Key("reduce-scatter, 498 MB of f32, 2 ranks", "dist", FLOAT32, HOOK, SHARED, "adding in place"),
    Key("the same, 249 MB of bf16", "dist", BFLOAT16, HOOK, SHARED, "adding in place"),
    Key("gradients of 4 micro-batches, 124 M f32", "dist", "4 micro", SUM, CLONES, "clones"),
    Key("activation plan, 100 blocks", "activation", "planning, 100", PLAN, NUMPY_PLAN, "NumPy"),
)  # fmt: skip


def title_of(processor: dict[str, str]) -> str:
    """Name a processor in the head of a table."""
    name = re.sub(r"\((R|TM)\)", "", processor["name"]).replace(" Processor", "")
    if "family" in processor:
        name += f", family {processor['family']} model {processor['model']}"
    return f"{name}, {processor['short']}" if "short" in processor else name


def show(value: float) -> str:
    """Show three significant digits at most."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def newest(documents: list[dict[str, Any]]) -> dict[str, dict[str, tuple[str, Any]]]:
    """Return the newest run of each benchmark, with its date, by processor slug."""
    runs_by_processor: dict[str, dict[str, tuple[str, Any]]] = {}
    for document in sorted(documents, key=lambda d: d["date"]):
        runs = runs_by_processor.setdefault(document["processor"]["slug"], {})
        runs |= {name: (document["date"], run) for name, run in document["benchmarks"].items()}
    return runs_by_processor


def row_of(run: dict[str, Any], table: str, name: str) -> dict[str, Any] | None:
    """Find a row by the start of its table's title and by its name."""
    for run_table in run["tables"]:
        if run_table["title"].startswith(table):
            for row in run_table["rows"]:
                if row["name"] == name:
                    return row | {"unit": run_table["unit"]}
    return None


def cell(runs: dict[str, tuple[str, Any]], key: Key) -> str:
    """Format one figure, or a mark that it was not measured."""
    if key.benchmark not in runs:
        return NONE
    run = runs[key.benchmark][1]
    mlstate_row, other = row_of(run, key.table, key.ours), row_of(run, key.table, key.other)
    if mlstate_row is None or other is None:
        return NONE
    ratio = other["median"] / mlstate_row["median"]
    text = f"{show(mlstate_row['median'])} {mlstate_row['unit']}, {ratio:.3g}x"
    return f"**{text}**" if ratio < 0.95 else text


def guard_rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the guard's run."""
    return [row for table in run["tables"] for row in table["rows"]]


def guard_cell(runs: dict[str, tuple[str, Any]]) -> str:
    """Show how many rows of the guard passed."""
    if "guard" not in runs:
        return NONE
    rows = guard_rows(runs["guard"][1])
    slow = sum(row["verdict"] == "SLOW" for row in rows)
    return f"{len(rows) - slow} of {len(rows)} rows"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """Make a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def summary(documents: list[dict[str, Any]]) -> str:
    """Return the summary table, with a column for each processor."""
    runs = newest(documents)
    names = {d["processor"]["slug"]: title_of(d["processor"]) for d in documents}
    rows = [
        [f"{key.label} ({key.named})", *(cell(runs[slug], key) for slug in names)] for key in KEYS
    ]
    rows.append(["guard: as fast as the simple way", *(guard_cell(runs[slug]) for slug in names)])
    return markdown(["operation (compared with)", *names.values()], rows)


def losses(documents: list[dict[str, Any]]) -> str:
    """Return the operations that the guard found slower, with a column for each processor."""
    names = {d["processor"]["slug"]: title_of(d["processor"]) for d in documents}
    runs = {slug: some["guard"][1] for slug, some in newest(documents).items() if "guard" in some}
    if not runs:
        return "No run of the guard is stored yet.\n"
    cells: dict[str, dict[str, str]] = {}
    for slug, run in runs.items():
        slow: dict[str, list[dict[str, Any]]] = {}
        for row in guard_rows(run):
            if row["verdict"] == "SLOW":
                slow.setdefault(row["name"], []).append(row)
        for name, rows in slow.items():
            sizes = ", ".join(dict.fromkeys(row["size"] for row in rows))
            lowest = min(row["ratio"] for row in rows)
            cells.setdefault(name, {})[slug] = f"{lowest:.2g}x: {sizes}"
    if not cells:
        return "The newest runs of the guard found no slower operation.\n"
    lines = [[f"`{name}`", *(by.get(slug, "-") for slug in runs)] for name, by in cells.items()]
    return markdown(["operation", *(names[slug] for slug in runs)], lines)


def copies(documents: list[dict[str, Any]]) -> str:
    """Return the times of each store instruction, with a column for each processor."""
    ways = ("auto", "NumPy", "plain", "loop", "stream1")
    names = {d["processor"]["slug"]: title_of(d["processor"]) for d in documents}
    stored_runs = {slug: runs for slug, runs in newest(documents).items() if "copy" in runs}
    if not stored_runs:
        return "No run of `bench_copy.py` is stored yet.\n"
    cells: dict[str, dict[str, str]] = {}
    for slug, runs in stored_runs.items():
        for table in runs["copy"][1]["tables"]:
            medians = {row["name"]: row["median"] for row in table["rows"]}
            cells.setdefault(table["title"], {})[slug] = " / ".join(
                show(medians[w]) if w in medians else NONE for w in ways
            )
    lines = [[title, *(by.get(slug, NONE) for slug in stored_runs)] for title, by in cells.items()]
    return markdown([f"ms: {' / '.join(ways)}", *(names[slug] for slug in stored_runs)], lines)


def sources(documents: list[dict[str, Any]]) -> str:
    """Return the list of stored results, with links."""
    rows = []
    for document in documents:
        slug, date = document["processor"]["slug"], document["date"]
        runs = document["benchmarks"].values()
        about = next(iter(runs))["machine"]
        link = f"[{date}](../benchmarks/results/{slug}/{date}.json)"
        note = document["processor"].get("note")
        name = document["processor"]["name"] + (f" ({note})" if note else "")
        names = ", ".join(document["benchmarks"])
        rows.append([name, link, names, about["system"], about["software"]])
    return markdown(["processor", "results", "benchmarks", "system", "software"], rows)


TABLES = {"summary": summary, "copies": copies, "losses": losses, "sources": sources}


def filled_in(page: str, documents: list[dict[str, Any]]) -> str:
    """Return the page with new tables."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name}: made by benchmarks/summary.py -->\n", "<!-- end -->"
        before, separator, rest = page.partition(start)
        if not separator:
            raise ValueError(f"{PAGE.name} has no marker for the table {name!r}")
        page = before + start + "\n" + table(documents) + "\n" + end + rest.partition(end)[2]
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables to the page")
    options = parser.parse_args()
    documents = stored.stored_files()
    if options.write:
        PAGE.write_text(filled_in(PAGE.read_text(encoding="utf-8"), documents), encoding="utf-8")
        return
    print("\n".join(table(documents) for table in TABLES.values()), end="")


if __name__ == "__main__":
    main()
