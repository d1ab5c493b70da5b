"""Notebook view of a plan: phases of the schedule, which unfold to their steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._common.text import bytes_text, table_html

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .._types import NDArray

_HEADERS = ["steps", "blocks", "before", "peak", "after", "time"]


class Phase(NamedTuple):
    """Equal steps for consecutive blocks. Numbers count from 0; the last ones are included."""

    kinds: tuple[str, ...]  # step kinds of each block, such as forward and drop
    first_block: int
    last_block: int
    first_step: int
    last_step: int


def find_phases(steps: Iterable[tuple[str, int]]) -> list[Phase]:
    """Return the phases of a schedule, in order.

    Merges consecutive steps of one block, then consecutive blocks with equal kinds of steps.
    `steps`: (kind, index) pairs as in `Plan.steps`. A drop of activation k counts as a step of
    block k, whose input it is.
    """
    blocks: list[Phase] = []  # phases of one block each
    for number, (kind, block) in enumerate(steps):
        last = blocks[-1] if blocks else None
        # The backward step of the last saved block begins a new phase if the block before was saved
        # too: so the saves of both blocks merge.
        ends_saves = len(blocks) > 1 and blocks[-2].kinds == ("save",) and kind == "backward"
        if last and last.first_block == block and not ends_saves:
            blocks[-1] = last._replace(kinds=(*last.kinds, kind), last_step=number)
        else:
            blocks.append(Phase((kind,), block, block, number, number))
    phases: list[Phase] = []
    for phase in blocks:
        last = phases[-1] if phases else None
        if last and last.kinds == phase.kinds and _is_next_block(last, phase.first_block):
            phases[-1] = last._replace(last_block=phase.last_block, last_step=phase.last_step)
        else:
            phases.append(phase)
    return phases


def _is_next_block(phase: Phase, block: int) -> bool:
    """Return whether `block` is the next one after a phase, in the phase's direction.

    A phase of one block has no direction yet.
    """
    step = block - phase.last_block
    if abs(step) != 1:
        return False
    return phase.first_block == phase.last_block or (step > 0) == (
        phase.last_block > phase.first_block
    )


def plan_html(
    title: str,
    steps: Sequence[tuple[str, int]],
    names: Sequence[str],
    nbytes: tuple[NDArray, NDArray, NDArray],
    seconds: NDArray,
) -> str:
    """Return an HTML table of a plan's phases, which unfolds to its steps.

    `title`: text above the table. `steps`: (kind, index) pairs. `names`: of the blocks. `nbytes`:
    arrays with the memory before, at the peak of and after each step, in bytes. `seconds`: time of
    each step.
    """
    before, peak, after = nbytes
    names = [*names, "output"]  # a drop frees the input of the block with this name, or the output

    def row(phase: Phase) -> list[str]:
        """Return the table row of a phase, as texts in the columns `_HEADERS`."""
        part = slice(phase.first_step, phase.last_step + 1)
        ends = [names[phase.first_block]]
        if phase.last_block != phase.first_block:
            ends.append(names[phase.last_block])
        return [
            ", ".join(phase.kinds),
            " … ".join(ends),
            bytes_text(int(before[phase.first_step])),
            bytes_text(int(peak[part].max())),
            bytes_text(int(after[phase.last_step])),
            f"{seconds[part].sum():.4g} s",
        ]

    phases = find_phases(steps)
    table = table_html(title, _HEADERS, [row(phase) for phase in phases])
    if len(phases) == len(steps):
        return table
    step_rows = [
        row(Phase((kind,), block, block, number, number))
        for number, (kind, block) in enumerate(steps)
    ]
    step_table = table_html("", _HEADERS, step_rows, style=False)
    return f"{table}<details><summary>all {len(steps):,} steps</summary>{step_table}</details>"
