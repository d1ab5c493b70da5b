"""Notebook view of a plan: phases of the schedule, which unfold to their steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .._common.report import Table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._plan import Plan

_COLUMNS = ["steps", "blocks", "before [B]", "peak [B]", "after [B]", "time [s]"]


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


def plan_html(steps: Table, plan: Plan) -> str:
    """Return the phases of a plan as HTML, which unfold to its `steps`."""
    before, peak, after, seconds = plan.simulate()
    names = [*plan.chain.names, "output"]  # a drop frees the input of this block, or the output

    def row(phase: Phase) -> tuple[object, ...]:
        """Return the values of a phase in `_COLUMNS`."""
        part = slice(phase.first_step, phase.last_step + 1)
        ends = dict.fromkeys((names[phase.first_block], names[phase.last_block]))
        memory = before[phase.first_step], peak[part].max(), after[phase.last_step]
        return ", ".join(phase.kinds), " … ".join(ends), *memory, seconds[part].sum()

    phases = find_phases(plan.steps())
    page = Table(steps.lines, _COLUMNS, [*map(row, phases)]).html()
    if len(phases) == steps.total:
        return page
    steps.lines = []
    inner = steps.html(style=False)
    return f"{page}<details><summary>all {steps.total:,} steps</summary>{inner}</details>"
