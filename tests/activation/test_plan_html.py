"""The HTML view of a plan: phases that join steps, and each step below its phase."""

import numpy as np
import pytest

from mlstate.activation import Chain, Plan, plan
from mlstate.activation._plan_html import Phase, find_phases


def uniform(blocks, names=None):
    return Chain([1] * blocks, [2] * blocks, [10] * (blocks + 1), [40] * blocks, names=names)


def test_steps_of_a_block_and_equal_neighbours_are_a_phase():
    steps = [("forward", 0), ("forward", 1), ("drop", 1), ("forward", 2), ("drop", 2), ("save", 3)]
    steps += [("backward", 3), ("save", 2), ("backward", 2), ("save", 1), ("backward", 1)]
    assert find_phases(steps) == [
        Phase(("forward",), 0, 0, 0, 0),
        Phase(("forward", "drop"), 1, 2, 1, 4),
        Phase(("save", "backward"), 3, 1, 5, 10),
    ]
    assert find_phases([]) == []
    steps = [(kind, block) for block in (2, 1) for kind in ("save", "backward", "drop")]
    assert find_phases(steps) == [Phase(("save", "backward", "drop"), 2, 1, 0, 5)]


@pytest.mark.parametrize("blocks", [[0, 2], [0, 1, 0], [2, 1, 2]], ids=["gap", "back", "forth"])
def test_only_blocks_in_one_direction_are_joined(blocks):
    phases = find_phases([("forward", block) for block in blocks])
    assert len(phases) == 2 and phases[0].first_block == blocks[0]
    assert phases[-1].last_block == blocks[-1]


@pytest.mark.parametrize("blocks", [1, 2, 7, 40])
def test_phases_cover_every_step_once(blocks):
    chain = uniform(blocks)
    for share in (1, 0.8, 0.6):
        budget = int(chain.plain_peak_bytes * share)
        try:
            steps = plan(chain, budget).steps()
        except ValueError:
            continue
        places = [range(p.first_step, p.last_step + 1) for p in find_phases(steps)]
        assert [i for place in places for i in place] == list(range(len(steps)))


def test_a_page_has_phases_with_sums_and_every_step():
    chain = uniform(40)
    schedule = Plan(
        chain, [("save", i) for i in range(40)] + [("backward", i) for i in range(39, -1, -1)]
    )
    page = schedule._repr_html_()
    run = schedule.simulate()
    top, _, single = page.partition("<details><summary>all 80 steps</summary>")
    assert top.count("<tr>") == 1 + 2 and single.count("<tr>") == 1 + 80
    assert "<td>save</td><td>0 … 39</td>" in top and "<td>backward</td><td>39 … 0</td>" in top
    assert ">40 s</td>" in top and ">80 s</td>" in top
    assert f"{int(run.peak_bytes.max()) / 1024:.2f} KiB" in top
    assert page.count("<style>") == 1 and np.isclose(run.seconds.sum(), 120)


def test_names_are_escaped_and_a_short_plan_has_one_table():
    schedule = Plan(uniform(1, names=["<i>"]), [("save", 0), ("backward", 0)])
    page = schedule._repr_html_()
    assert "<i>" not in page and "&lt;i&gt;" in page
    two = Plan(uniform(2), [("save", 0), ("save", 1), ("backward", 1), ("backward", 0)])
    assert "all 4 steps" in two._repr_html_()
