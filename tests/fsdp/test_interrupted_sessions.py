"""Reductions after one whose clean-up was interrupted."""

import contextlib
import signal

import numpy as np
import pytest
from interruption import signal_once

from mlstate.collectives import SingleGroup
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit, _backward_hook, _pass, _reducer

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def hook():
    with FSDPBackwardHook(FSDP(SingleGroup())) as hook:
        yield hook


def check(hook, units):
    """Reduce in a pass and without one."""
    for name in units:
        hook.add_gradient(name, np.full(2, 3.0))
    hook.finish()
    hook.scatter_gradient(units["a"], np.full(2, 4.0))
    parts = [unit.local_gradient.tolist() for unit in units.values()]
    assert parts == [[4.0, 4.0], [3.0, 3.0]]


@pytest.mark.parametrize(
    "steps",
    [
        [(_reducer.Reducer, "reduce_entries"), (_reducer.Session, "close")],
        [(_reducer.Session, "finish"), (_reducer.Session, "close")],
        [(_pass.BackwardPass, "finish"), (_reducer.Session, "close")],
        [(_pass.BackwardPass, "finish"), (_backward_hook, "perf_counter")],
        [(_pass.BackwardPass, "add")],
        [(_pass.BackwardPass, "finish"), (_pass.BackwardPass, "fail_others")],
    ],
    ids=lambda steps: "-".join(name for _, name in steps),
)
def test_gradients_are_reduced_after_an_interrupted_reduction(hook, monkeypatch, steps):
    units = {name: FSDPShardingUnit(name, (2,), "float64", 0) for name in "ab"}
    hook.use_units(units)
    for owner, name in steps:
        signal_once(monkeypatch, owner, name)
    with contextlib.suppress(KeyboardInterrupt):
        hook.scatter_gradient(units["a"], np.ones(2))
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            hook.add_gradient("b", np.ones(2))
            hook.add_gradient("a", np.ones(2))
            hook.finish()
            break
    monkeypatch.undo()
    check(hook, units)


def test_gradients_are_reduced_after_an_interrupted_begin_of_a_pass(hook, monkeypatch):
    units = {name: FSDPShardingUnit(name, (2,), "float64", 0) for name in "ab"}
    hook.use_units(units)
    begin = _pass.BackwardPass.__init__

    def begin_and_interrupt(*arguments):
        begin(*arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(_pass.BackwardPass, "__init__", begin_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        hook.add_gradient("b", np.ones(2))
    monkeypatch.undo()
    check(hook, units)
