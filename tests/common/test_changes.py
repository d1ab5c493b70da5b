"""One rule for changes in place: after an exception an object is unchanged, or reports no token."""

import signal
from functools import partial

import numpy as np
import pytest
from fake_states import fake_model
from injected_errors import half_changed
from toy_caches import HYBRID, TOKENS, empty_state, prefill, spec_of, store_at

import mlstate
from mlstate._common.changes import UndoLog, exchange
from mlstate.checkpoint import TieredState
from mlstate.coreml import FakeMLState, StateManager, transition_coreml_state
from mlstate.errors import MLStateError
from mlstate.follow import Follower, Publisher
from mlstate.kv import KVState, RollingKVState

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


def content_of(state):
    """Length and elements of a CacheState; None if it has no token."""
    if not state.length:
        return None
    views = [
        state.arrays[e.name] if e.seq_axis is None else state.ordered(e.name) for e in state.spec
    ]
    return state.length, [view.tobytes() for view in views]


def snapshot_case(tmp_path):
    snapshots = {}

    def make():
        state = empty_state(HYBRID)
        prefill(state, TOKENS[:40])
        snapshots[id(state)] = state, state.snapshot()
        prefill(state, TOKENS[:60])
        return state

    return make, lambda state: state.restore(snapshots[id(state)][1]), content_of


def checkpoint_case(tmp_path):
    def filled(count):
        state = empty_state(HYBRID)
        prefill(state, TOKENS[:count])
        return state

    mlstate.save(tmp_path / "saved", {}, states={"cache": filled(50)})
    cache = mlstate.load(tmp_path / "saved").states["cache"]
    from mlstate.kv._stored import overwrite_cache

    return partial(filled, 30), lambda state: overwrite_cache(state, cache), content_of


def kv_case(tmp_path):
    from mlstate.kv._stored import overwrite_cache

    def filled(value, length):
        return KVState.from_array(np.full((1, 2, length, 4), value), 64)

    cache = filled(2.0, 50)
    content = lambda state: state.array.tobytes() or None  # noqa: E731
    return partial(filled, 1.0, 30), lambda state: overwrite_cache(state, cache), content


def prompt_case(tmp_path, spec=HYBRID):
    store = store_at(tmp_path)
    state = empty_state(spec)
    prefill(state, TOKENS[:70])
    store.put(TOKENS[:70], state)

    def make():
        state = empty_state(spec)
        prefill(state, TOKENS[5:30])
        return state

    def operate(state):
        with store.match(TOKENS) as match:
            assert store.restore(match, into=state) == 70

    return make, operate, content_of


def full_prompt_case(tmp_path):
    return prompt_case(tmp_path, spec_of("full", "full"))


def kv_prompt_case(tmp_path):
    store = store_at(tmp_path)
    store.put(TOKENS[:70], KVState.from_array(np.full((1, 2, 70, 4), 2.0)))

    def operate(state):
        with store.match(TOKENS) as match:
            store.restore(match, into=state)

    def make():
        return KVState.from_array(np.full((1, 2, 30, 4), 1.0), 128)

    return make, operate, lambda state: state.array.tobytes() or None


def ring_prompt_case(tmp_path):
    def filled(value, count):
        cache = RollingKVState((1, 2, 16, 4), dtype="f4", sinks=2)
        cache.append(np.full((1, 2, count, 4), value, "f4"))
        return cache

    store = store_at(tmp_path)
    store.put(TOKENS[:70], filled(2.0, 70))

    def operate(cache):
        with store.match(TOKENS) as match:
            store.restore(match, into=cache)

    content = lambda cache: (cache.next_position, cache.ordered().tobytes())  # noqa: E731
    return partial(filled, 1.0, 30), operate, content


SHAPES = [{"k": (2, 1, n, 8), "v": (2, 1, n, 8)} for n in (32, 64)]


def states_of(*states):
    return [array.tobytes() for state in states for array in state._states.values()]


def filled_state(shapes, value):
    state = FakeMLState(shapes)
    for name, shape in shapes.items():
        state.write_state(name, np.full(shape, value, np.float32))
    return state


def chunk_case(tmp_path):
    def make():
        return [filled_state(SHAPES[1], 5) for _ in range(2)]

    def operate(targets):
        sources = [filled_state(SHAPES[0], number) for number in (1, 2)]
        transition_coreml_state(sources, targets, ["k", "v"], 20)

    return make, operate, lambda targets: states_of(*targets)


def manager_case(tmp_path):
    def make():
        manager = StateManager({32: fake_model(SHAPES[0]), 64: fake_model(SHAPES[1])})
        for name, shape in SHAPES[0].items():
            manager.state.write_state(name, np.full(shape, 3, np.float32))
        return manager

    def content(manager):
        length = manager.size
        assert manager.state.read_state("k").shape[2] == length
        return length, states_of(manager.state)

    return make, lambda manager: manager.grow_if_needed(32) and manager.grow_if_needed(32), content


def restored_manager_case(tmp_path):
    make, _, content = manager_case(tmp_path)
    other = make()
    other.state.write_state("v", np.full(SHAPES[0]["v"], 9, np.float32))
    other.grow_if_needed(32)
    saved = other.state_dict()
    return make, lambda manager: manager.load_state_dict(saved), content


CASES = [
    snapshot_case,
    checkpoint_case,
    kv_case,
    full_prompt_case,
    prompt_case,
    kv_prompt_case,
    ring_prompt_case,
    chunk_case,
    manager_case,
    restored_manager_case,
]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_an_error_at_any_line_leaves_no_mixture(tmp_path, case):
    raised, wrong = half_changed(*case(tmp_path))
    assert raised > 10 and not wrong


def test_an_error_at_any_line_leaves_a_follower_at_a_version(tmp_path):
    model = {name: np.zeros(20) for name in "abc"}
    publisher = Publisher(tmp_path / "weights")
    publisher.publish(0, model)
    first = {name: array.copy() for name, array in model.items()}
    for array in model.values():
        array[3:9] = 7
    publisher.publish(1, model)

    def make():
        into = {name: np.ones(20) for name in "abc"}
        follower = Follower(publisher.path, into=into)
        follower.advance(0)
        return follower

    def content(follower):
        arrays, expected = follower.state, first if follower.version == 0 else model
        assert all((arrays[name] == expected[name]).all() for name in model)
        return follower.version

    raised, wrong = half_changed(make, lambda follower: follower.advance(1), content)
    assert raised > 20 and not wrong


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
