"""Interrupts of moves and uses of tiered states, and of their ends."""

import signal
import threading

import numpy as np
import pytest
from interruption import raise_once, signal_once, split_condition

from mlstate.checkpoint import Tier, TieredState
from mlstate.checkpoint._folder.writer_lock import WriterLock
from mlstate.checkpoint._tiers import moves
from mlstate.checkpoint._tiers.policy import TierPolicy
from mlstate.checkpoint._tiers.unit_file import Part
from mlstate.checkpoint._tiers.unit_handle import TieredUnit

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def tiers(tmp_path):
    weights = {name: np.full(8, number, np.float32) for number, name in enumerate("abc")}
    adam = {f"{name}.m": array + 1 for name, array in weights.items()}
    with TieredState(weights, adam, tmp_path / "tiers", warm_budget_bytes=200) as state:
        yield state


def check(tiers):
    """Use and move every unit; each has its values."""
    for number, name in enumerate("abc"):
        with tiers.use(name) as unit:
            assert (unit.parameter == number).all() and (unit.states["m"] == number + 1).all()
        tiers.demote(name, to=Tier.COLD)
    assert [total for total, _ in tiers._policy.totals().values()] == [0, 0, 192]
    tiers.close()


@pytest.mark.parametrize("to", [Tier.COLD, Tier.WARM])
@pytest.mark.parametrize(
    "step", [(moves, "arrays_in"), (Part, "change_to"), (TieredState, "_end_move")]
)
def test_a_unit_is_usable_after_its_move_was_interrupted_twice(tiers, monkeypatch, to, step):
    if to == Tier.WARM:
        tiers.demote("a", to=Tier.COLD)
    signal_once(monkeypatch, *step)
    if step[1] != "_end_move":
        signal_once(monkeypatch, TieredState, "_end_move")
    with pytest.raises(KeyboardInterrupt):
        (tiers.demote if to == Tier.COLD else tiers.promote)("a", to=to)
    assert tiers._units["a"].move is None
    check(tiers)


@pytest.mark.parametrize(
    "owner, step", [(TieredUnit, "__init__"), (TieredState, "_take_back_arrays")]
)
def test_a_unit_is_not_in_use_after_its_use_was_interrupted(tiers, monkeypatch, owner, step):
    raise_once(monkeypatch, owner, step)
    with pytest.raises(KeyboardInterrupt), tiers.use("a"):
        pass
    tiers.demote("a", to=Tier.COLD)
    check(tiers)


def test_states_are_not_in_use_after_an_interrupt(tiers, monkeypatch):
    raise_once(monkeypatch, Part, "shard")
    with pytest.raises(KeyboardInterrupt):
        tiers.state_dicts()
    check(tiers)


def test_a_unit_is_usable_after_an_error_at_the_begin_of_its_move(tiers, monkeypatch):
    raise_once(monkeypatch, TierPolicy, "begin")
    with pytest.raises(KeyboardInterrupt):
        tiers.demote("a", to=Tier.COLD)
    assert tiers._units["a"].move is None and not tiers._policy["a"].is_pinned
    check(tiers)


def use(tiers):
    """Use a unit, and add a state to it."""
    with tiers.use("a") as unit:
        unit.states["v"] = np.ones(4, np.float32)


@pytest.mark.parametrize(
    "step, call",
    [
        ("add", lambda tiers: tiers.add({"d": np.ones(4), "e": np.ones(4)})),
        ("remove", lambda tiers: tiers.remove("b")),
        ("hold", use),
        ("resize", use),
        ("hold", TieredState.state_dicts),
        ("begin", lambda tiers: tiers.demote("a", to=Tier.COLD)),
        ("end", lambda tiers: tiers.demote("a", to=Tier.COLD)),
    ],
)
def test_a_signal_does_not_separate_a_unit_from_its_place(tiers, monkeypatch, step, call):
    function = getattr(TierPolicy, step)

    def signalled(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        function(*arguments, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TierPolicy, step, signalled)
    with pytest.raises(KeyboardInterrupt):
        call(tiers)
    monkeypatch.undo()
    assert tiers._units.keys() == tiers._policy._units.keys()
    assert len(tiers) in {3, 2 if step == "remove" else 5}
    for name, unit in tiers._units.items():
        place = tiers._policy[name]
        assert (place.nbytes, place.tier, place.moving_to) == (unit.nbytes, unit.tier, None)
        assert unit.move is None and not place.is_pinned
        tiers.demote(name, to=Tier.COLD)
    nbytes = sum(unit.nbytes for unit in tiers._units.values())
    assert [total for total, _ in tiers._policy.totals().values()] == [0, 0, nbytes]


def test_other_threads_move_units_after_an_interrupted_call(tiers, monkeypatch):
    with split_condition(monkeypatch):
        tiers.tier("a")
    thread = threading.Thread(target=tiers.demote, args=["a"], daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    check(tiers)


def test_a_signal_handler_cannot_wait_for_the_move_that_it_interrupts(tiers, monkeypatch):
    arrays_in, errors = moves.arrays_in, []

    def move_again(*arguments):
        for call in (tiers.demote, tiers.promote):
            try:
                call("a")
            except BufferError as error:
                errors.append(str(error))
        return arrays_in(*arguments)

    monkeypatch.setattr(moves, "arrays_in", move_again)
    tiers.demote("a", to=Tier.COLD)
    assert errors == ["unit 'a' is moving in this thread"] * 2
    monkeypatch.undo()
    check(tiers)


@pytest.mark.parametrize(
    "make", [lambda folder: TieredState({}, {}, folder), TieredState.open], ids=["new", "open"]
)
def test_an_interrupted_constructor_leaves_no_lock(tmp_path, monkeypatch, make):
    raise_once(monkeypatch, WriterLock, "_write")
    with pytest.raises(KeyboardInterrupt) as kept:  # with the frames of its traceback
        make(tmp_path)
    make(tmp_path).close()
    assert kept.value.__traceback__ is not None


def test_an_interrupted_constructor_leaves_no_file(tmp_path, monkeypatch):
    arrays_in = moves.arrays_in

    def write_and_interrupt(*arguments):
        arrays_in(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(moves, "arrays_in", write_and_interrupt)
    weights = {name: np.ones(8) for name in "abc"}
    with pytest.raises(KeyboardInterrupt):
        TieredState(weights, {}, tmp_path, warm_budget_bytes=100)
    assert not list(tmp_path.glob("*.safetensors"))
