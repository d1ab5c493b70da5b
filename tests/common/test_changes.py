"""One rule for changes in place: after an exception an object is unchanged, or reports no token."""

import signal
from functools import partial

import numpy as np
import pytest
from changed_objects import CASES, MLX, TRANSFORMERS
from fake_states import use_fake_arrays
from injected_errors import half_changed
from needs import needs

import mlstate
from mlstate._common.changes import UndoLog, exchange
from mlstate.checkpoint import TieredState
from mlstate.errors import MLStateError

pytestmark = pytest.mark.timeout(300)


class Thing:
    pass


def test_changes_run_in_order():
    thing, numbers = Thing(), []
    exchange([partial(vars(thing).update, a=1), partial(numbers.append, 5)])
    assert thing.a == 1 and numbers == [5]


def test_values_are_restored_in_reverse_order():
    log, order = UndoLog(), []

    def change():
        for number in range(3):
            log.note(str(number), partial(order.append, number))
        raise ValueError("third")

    with pytest.raises(ValueError, match="third"):
        log.run(change)
    assert order == [2, 1, 0]


@pytest.mark.parametrize("first", [ValueError("first"), KeyboardInterrupt("first")])
def test_a_signal_during_the_restoration_is_handled_after_it(first):
    log, restored = UndoLog(), []

    def restore(value):
        signal.raise_signal(signal.SIGINT)
        restored.append(value)

    def change():
        for value in "ab":
            log.note(value, partial(restore, value))
        raise first

    with pytest.raises(KeyboardInterrupt) as caught:
        log.run(change)
    assert restored == ["b", "a"] and caught.value.__context__ is first


@pytest.mark.parametrize("first", [ValueError("first"), KeyboardInterrupt("first")])
def test_values_that_cannot_be_restored_are_named(first):
    log, restored = UndoLog("nothing moved", "Make new states"), []

    def change():
        log.note("the first value", lambda: restored.append(1))
        log.note("the second value", lambda: 1 / 0)
        raise first

    expected = MLStateError if isinstance(first, ValueError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        log.run(change)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "the second value: division by zero. Make new states" in text
    assert restored == [1]


# ---- every user, with an error at every line ----


def cases_with(cases, *modules):
    """Return cases that need modules as parameters of a test."""
    return [pytest.param(case, id=case.__name__, marks=needs(*modules)) for case in cases]


@pytest.fixture
def fake_arrays(monkeypatch):
    use_fake_arrays(monkeypatch)


@pytest.mark.usefixtures("fake_arrays")
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.__name__) for case in CASES),
        *cases_with(TRANSFORMERS, "torch", "transformers"),
        *cases_with(MLX, "mlx", "mlx_lm"),
    ],
)
def test_an_error_at_any_line_leaves_no_mixture(tmp_path, case):
    raised, wrong = half_changed(*case(tmp_path))
    assert raised > 10 and not wrong


class Counted:
    """An object with a state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_an_error_at_any_line_leaves_objects_with_their_states(tmp_path):
    def make():
        return {"a": Counted(1), "b": Counted(2)}

    saved = {"a": Counted(3), "b": Counted(4)}
    mlstate.save(tmp_path / "ckpt", {"w": np.ones(3)}, states=saved)

    def operate(objects):
        mlstate.load(tmp_path / "ckpt", into={"states": objects})

    content = lambda objects: [each.value for each in objects.values()]  # noqa: E731
    raised, wrong = half_changed(make, operate, content, files=("load.py", "restore.py"))
    assert raised > 10 and not wrong


@pytest.mark.parametrize("operation", ["promote", "demote", "use"])
def test_an_error_at_any_line_leaves_a_unit_with_its_arrays(tmp_path, operation):
    folders = iter(range(1 << 20))

    def make():
        weights, adam = {"w": np.ones(8, "f4")}, {"w.m": np.full(8, 2, "f4")}
        tiers = TieredState(weights, adam, tmp_path / str(next(folders)))
        if operation == "promote":
            tiers.demote("w", to="cold")
        return tiers

    def operate(tiers):
        if operation == "promote":
            tiers.promote("w", to="warm")
        elif operation == "demote":
            tiers.demote("w", to="cold")
        else:
            with tiers.use("w") as unit:
                unit.parameter, unit.states["m"] = np.full(8, 3, "f4"), np.full(8, 4, "f4")

    def content(tiers):
        tier = str(tiers.tier("w"))
        arrays = [shard.array for states in tiers.state_dicts() for shard in states.values()]
        return tier, [array.tobytes() for array in arrays]

    files = ("unit_file.py", "unit_handle.py", "changes.py")  # moves.py has other tests
    raised, wrong = half_changed(make, operate, content, most=100, files=files)
    assert raised > 5 and not wrong
