"""`mlstate.coreai.StateManager` with an array that imitates Core AI's, so that it runs anywhere."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from fake_states import FakeArray, use_fake_arrays

import mlstate
from mlstate.coreai import StateManager, state_specs
from mlstate.errors import CompatibilityError

DYNAMIC = {"k": (2, 1, 2, None, 4), "rows": (2, 1, 8, 1, None), "window": (2, 3)}


@pytest.fixture(autouse=True)
def fake_arrays(monkeypatch):
    use_fake_arrays(monkeypatch)


class Function:
    """Looks like an InferenceFunction."""

    def __init__(self, shapes, dtype="float16"):
        descriptors = {
            name: SimpleNamespace(shape=[-1 if n is None else n for n in shape], dtype=dtype)
            for name, shape in shapes.items()
        }
        self.desc = SimpleNamespace(
            name="main", state_names=list(shapes), state_descriptor=descriptors.__getitem__
        )

    def __call__(self):
        raise AssertionError("a function is not a loader")


def static(length):
    return {"k": (2, 1, 2, length, 4), "rows": (2, 1, 8, 1, length), "window": (2, 3)}


def fill(manager, seed=0):
    """Replace the arrays of the state by random ones; return them."""
    random = np.random.default_rng(seed)
    for name, array in manager.state.items():
        manager.state[name] = FakeArray(random.standard_normal(array.shape).astype(np.float16))
    return {name: array.numpy() for name, array in manager.state.items()}


def part(array, name, positions):
    return array[..., :positions, :] if name == "k" else array[..., :positions]


@pytest.mark.parametrize(
    "make",
    [
        lambda: StateManager(Function(DYNAMIC), (8, 16, 32)),
        lambda: StateManager(lambda: Function(DYNAMIC), (8, 16, 32)),
        lambda: StateManager(state_specs(DYNAMIC), (8, 16, 32)),
        lambda: StateManager({n: Function(static(n)) for n in (8, 16, 32)}),
        lambda: StateManager({n: lambda n=n: Function(static(n)) for n in (8, 16, 32)}),
        lambda: StateManager(
            {n: object() for n in (8, 16, 32)}, specs=dict.fromkeys((8, 16, 32), DYNAMIC)
        ),
    ],
    ids=["dynamic", "loader", "specs", "sizes", "loaders", "given"],
)
def test_states_move_by_the_numpy_formula(make):
    manager = make()
    before = fill(manager)
    window = manager.state["window"]
    assert manager.grow_if_needed(7).action == "stay"
    assert manager.grow_if_needed(8, 9).size == manager.size == 32
    for name in ("k", "rows"):
        grown = manager.state[name].numpy()
        assert grown.shape == static(32)[name]
        assert (part(grown, name, 8) == before[name]).all()
        assert np.count_nonzero(grown) == before[name].size
    assert manager.state["window"] is window
    manager.shrink(5)
    assert manager.size == 8
    for name in ("k", "rows"):
        small = manager.state[name].numpy()
        assert (part(small, name, 5) == part(before[name], name, 5)).all()
        assert np.count_nonzero(small) == part(before[name], name, 5).size


def test_axis_can_be_given_for_other_layouts():
    manager = StateManager({8: {"k": (8, 2, 4)}, 16: {"k": (16, 2, 4)}}, seq_axis=0)
    before = fill(manager)["k"]
    manager.grow_if_needed(8)
    assert (manager.state["k"].numpy()[:8] == before).all()
    with pytest.raises(CompatibilityError, match=r"no state of 8 positions at axis -2"):
        StateManager({8: {"k": (8, 2, 4)}, 16: {"k": (16, 2, 4)}})


def test_dynamic_loader_is_called_once():
    calls = []

    def load():
        calls.append(1)
        return Function(DYNAMIC)

    manager = StateManager(load, (8, 16))
    assert not calls
    assert manager.state["k"].shape == (2, 1, 2, 8, 4)
    model = manager.model
    fill(manager)
    manager.grow_if_needed(8)
    assert manager.release() == (8,)
    manager.shrink(3)
    assert manager.model is model
    assert len(calls) == 1


def test_replaced_array_of_another_shape_is_refused():
    manager = StateManager(Function(DYNAMIC), (8, 16))
    fill(manager)
    manager.state["rows"] = FakeArray(np.zeros((2, 1, 8, 1, 16), np.float16))
    with pytest.raises(CompatibilityError, match=r"rows: .* 1, 16\), expected .* 1, 8\)"):
        manager.grow_if_needed(8)
    assert manager.size == 8


@pytest.mark.parametrize("shared_state", [True, False])
def test_chunk_models_share_or_separate_states(shared_state):
    chunks = [Function(DYNAMIC), Function({}), Function(DYNAMIC)]
    manager = StateManager(chunks, (8, 16), shared_state=shared_state)
    states = [manager.state] if shared_state else [manager.state[0], manager.state[2]]
    for state in states:
        state["k"] = FakeArray(np.ones((2, 1, 2, 8, 4), np.float16))
    manager.grow_if_needed(8)
    assert manager.model is chunks
    if not shared_state:
        assert manager.state[1] is None
        assert manager.state[0] is not manager.state[2]
    for state in [manager.state] if shared_state else [manager.state[0], manager.state[2]]:
        assert state["k"].numpy().sum() == 2 * 2 * 8 * 4


# ---- refill ----


def test_refill_awaits_every_batch():
    manager = StateManager(
        Function(DYNAMIC), (8, 16), overflow="shift_refill", batch_size=4, prompt_tokens=2
    )
    manager.grow_if_needed(0, 16)
    former = dict(manager.state)
    seen = []

    async def prefill(tokens, position, state):
        await asyncio.sleep(0)
        assert state is manager.state
        seen.append((list(tokens), position))

    step = asyncio.run(manager.refill_async(range(17), prefill))
    assert (step.action, step.kept_tokens) == ("refill", 8)
    assert seen == [([0, 1, 11, 12], 0), ([13, 14, 15, 16], 4)]
    assert manager.state["k"] is not former["k"]
    assert asyncio.run(manager.refill_async(range(5), prefill)).action == "stop"
    assert len(seen) == 2


@pytest.mark.parametrize("awaits", [False, True])
def test_refill_with_a_full_prompt_appends_the_newest_token(awaits):
    manager = StateManager(Function(DYNAMIC), (16,), batch_size=4, prompt_tokens=11)
    written = []

    def prefill(tokens, position, state):
        written.extend(tokens)

    async def prefill_async(tokens, position, state):
        prefill(tokens, position, state)

    if awaits:
        step = asyncio.run(manager.refill_async(range(17), prefill_async))
    else:
        step = manager.refill(range(17), prefill)
    assert step.indices == written == [*range(11), 16]


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_failed_refill_restores_the_state(error):
    manager = StateManager(Function(DYNAMIC), (8,), batch_size=4)
    former = dict(manager.state)

    async def prefill(tokens, position, state):
        state["k"] = None
        raise error("stop")

    with pytest.raises(error, match="stop"):
        asyncio.run(manager.refill_async(range(9), prefill))
    assert manager.state == former


@pytest.mark.filterwarnings("error")  # a coroutine that was never awaited
def test_refill_refuses_a_coroutine_function():
    manager = StateManager(Function(DYNAMIC), (8,), batch_size=4)
    former = dict(manager.state)

    async def prefill(tokens, position, state):
        raise AssertionError

    with pytest.raises(TypeError, match="use refill_async"):
        manager.refill(range(9), prefill)
    assert manager.state == former
    assert manager.refill(range(9), lambda *batch: None).action == "refill"
    for call in (manager.refill, lambda *arguments: asyncio.run(manager.refill_async(*arguments))):
        with pytest.raises(TypeError, match="prefill must be a callable"):
            call(range(9), None)
        with pytest.raises(TypeError, match="tokens must be"):
            call(9, print)


# ---- bad input ----


@pytest.mark.parametrize(
    ("models", "error", "text"),
    [
        ({8: DYNAMIC, 16: {**DYNAMIC, "k": (2, 1, 2, None, 8)}}, ValueError, "sequence, axis 3"),
        ({8: DYNAMIC, 16: Function(DYNAMIC, "int8")}, ValueError, "with the same dtype"),
        ({8: static(8), 16: static(8)}, ValueError, "no state of 16 positions at axis -2"),
        ({8: {"k": (2, None, 2, None, 4)}}, ValueError, r"dimensions \[1, 3\] of 2x\?x2x\?x4"),
        ({8: Function(DYNAMIC, "int4")}, ValueError, "dtype int4 are not supported"),
        ({8: {"window": (2, 3)}}, ValueError, "no state of 8 positions"),
        ({8: {}}, ValueError, "no state of 8 positions"),
        ({8: 3}, TypeError, r"source must be a path to an \.aimodel"),
    ],
)
def test_models_that_do_not_match(models, error, text):
    with pytest.raises(error, match=text):
        StateManager(models)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((DYNAMIC, (16, 8)), ValueError, "16"),
        ((Function(DYNAMIC),), TypeError, "sizes is missing"),
        (({8: DYNAMIC}, (8, 16)), TypeError, "sizes is for a single model"),
        ((static(8), (8, 16)), ValueError, "no state of 16 positions"),
        ((3, (8, 16)), TypeError, r"source must be a path to an \.aimodel"),
    ],
)
def test_sizes_that_the_model_cannot_take(arguments, error, text):
    with pytest.raises(error, match=text):
        StateManager(*arguments)


def test_without_core_ai_a_state_names_the_extra(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "coreai.runtime", None)
    manager = StateManager(DYNAMIC, (8, 16))
    assert manager.grow_if_needed(0, 9).action == "grow"
    with pytest.raises(ImportError, match=r"mlstate\[coreai\]"):
        manager.state  # noqa: B018


def test_a_saved_manager_continues_in_another_one(tmp_path, fake_arrays):
    manager = StateManager({"k": (2, 1, 2, None, 8), "conv": (5,)}, sizes=(8, 16))
    fill(manager)
    manager.grow_if_needed(8)
    before = {name: array.numpy().copy() for name, array in manager.state.items()}
    mlstate.save(tmp_path / "session", states={"kv": manager, "position": 8})
    new = StateManager({"k": (2, 1, 2, None, 8), "conv": (5,)}, sizes=(8, 16))
    mlstate.load(tmp_path / "session", into={"states": {"kv": new}})
    assert new.size == 16 and new.state.keys() == before.keys()
    for name, array in before.items():
        assert np.array_equal(new.state[name].numpy(), array)
