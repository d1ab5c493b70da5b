"""The state of models with several context sizes: growing, shrinking, refilling, errors."""

import random
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from mlpackage_writer import spec_bytes, state, write_package
from traced_memory import traced

import mlstate
from mlstate.coreml import FakeMLState, StateManager, StateSpec, state_specs
from mlstate.errors import CapacityError, CompatibilityError, MLStateError


class Model:
    """A model whose states are named by keywords; `kv` of its size by default."""

    def __init__(self, size, make=FakeMLState, **shapes):
        self.shapes = shapes or {"kv": (2, 1, size, 8)}
        self.make = make

    def get_spec(self):
        return self.shapes

    def make_state(self):
        return self.make(self.shapes)


class Loader:
    """A callable that returns a new model, and counts its calls."""

    def __init__(self, size, **shapes):
        self.arguments = (size, shapes)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        size, shapes = self.arguments
        return Model(size, **shapes)


def fill(state, name="kv", seed=0):
    """Write random float16 values into a state; return them as read."""
    shape = state.read_state(name).shape
    value = np.random.default_rng(seed).random(shape, np.float32)
    state.write_state(name, value)
    state.reads = state.writes = 0
    return value.astype(np.float16).astype(np.float32)


def managed(*sizes, **options):
    return StateManager({size: Model(size) for size in sizes}, **options)


# ---- moves ----


@pytest.mark.parametrize(("position", "new_tokens", "size"), [(8, 1, 16), (5, 20, 32)])
def test_a_state_grows_with_one_read_and_one_write(position, new_tokens, size):
    manager = managed(8, 16, 32)
    source = manager.state
    before = fill(source)
    assert manager.grow_if_needed(7).action == "stay" and manager.state is source
    step = manager.grow_if_needed(position, new_tokens)
    assert (step.action, step.size, manager.size) == ("grow", size, size)
    target = manager.state
    assert (source.reads, source.writes, target.reads, target.writes) == (1, 0, 0, 1)
    after = target.read_state("kv")
    assert np.array_equal(after[:, :, :position], before[:, :, :position])
    assert not after[:, :, position:].any()


def test_every_state_is_read_and_written_once():
    shapes = {size: {"k": (2, 1, size, 8), "v": (2, 3, size, 4)} for size in (8, 16)}
    manager = StateManager({size: Model(size, **shapes[size]) for size in shapes})
    source = manager.state
    keys, values = fill(source, "k", 1), fill(source, "v", 2)
    manager.grow_if_needed(8)
    target = manager.state
    assert (source.reads, source.writes, target.reads, target.writes) == (2, 0, 0, 2)
    assert np.array_equal(target.read_state("k")[:, :, :8], keys)
    assert np.array_equal(target.read_state("v")[:, :, :8], values)


def test_state_shrinks_to_the_smallest_fitting_size():
    manager = managed(8, 16, 32)
    manager.grow_if_needed(0, new_tokens=32)
    source = manager.state
    before = fill(source)
    assert manager.shrink(9).action == "shrink" and manager.size == 16
    assert (source.reads, source.writes, manager.state.writes) == (1, 0, 1)
    assert np.array_equal(manager.state.read_state("kv")[:, :, :9], before[:, :, :9])
    assert not manager.state.read_state("kv")[:, :, 9:].any()
    same = manager.state
    assert manager.shrink(9).action == "stay" and manager.state is same
    assert manager.shrink(3, size=8).size == manager.size == 8


def test_states_of_the_same_shape_are_copied_whole():
    def shapes(size):
        return {"kv": (2, 1, size, 8), "window": (2, 1, 8, 8), "conv": (5,), "count": COUNT}

    manager = StateManager({size: Model(size, **shapes(size)) for size in (8, 16)})
    source = manager.state
    window, conv = fill(source, "window", 1), fill(source, "conv", 2)
    source.write_state("count", np.array([[7], [9]], np.int32))
    fill(source)
    manager.grow_if_needed(8)
    target = manager.state
    assert (source.reads, target.writes) == (4, 4)
    assert np.array_equal(target.read_state("window"), window)
    assert np.array_equal(target.read_state("conv"), conv)
    assert target.read_state("count").tolist() == [[7], [9]]
    manager.shrink(2)
    assert np.array_equal(manager.state.read_state("window"), window)


COUNT = StateSpec("count", (2, 1), np.dtype(np.int32))


def test_a_sequence_may_be_at_any_axis():
    models = {size: Model(size, k=(2, 1, 8, 1, size)) for size in (8, 16)}
    manager = StateManager(models, seq_axis=-1)
    before = fill(manager.state, "k")
    manager.grow_if_needed(8)
    assert np.array_equal(manager.state.read_state("k")[..., :8], before)
    with pytest.raises(CompatibilityError, match=r"no state of 8 positions at axis -2"):
        StateManager(models)


def test_an_empty_state_is_replaced_without_reads_and_writes():
    manager = managed(8, 16)
    source = manager.state
    assert manager.grow_if_needed(0, new_tokens=16).action == "grow"
    assert (source.reads, manager.state.writes, manager.size) == (0, 0, 16)
    fill(manager.state)
    manager.reset()
    assert manager.size == 8 and not manager.state.read_state("kv").any()


def test_full_ladder_stops_without_moving_the_state():
    manager = managed(8, 16)
    manager.grow_if_needed(0, new_tokens=16)
    full = manager.state
    assert manager.grow_if_needed(16).action == "stop"
    assert manager.state is full and (full.reads, full.writes) == (0, 0)


def test_move_needs_memory_for_one_state_at_a_time():
    def shapes(size):
        return {f"kv_{i}": (4, 2, size, 64) for i in range(6)}

    manager = StateManager({size: Model(size, **shapes(size)) for size in (128, 256)})
    for i in range(6):
        fill(manager.state, f"kv_{i}")
    small, large = 4 * 2 * 128 * 64, 4 * 2 * 256 * 64  # elements of a state
    with traced() as trace:
        manager.grow_if_needed(128)
    assert trace.peak < 6 * 2 * large + 4 * small + 4 * large + 100_000


# ---- models ----


def test_models_are_loaded_when_they_are_needed_and_released_on_request():
    loaders = {size: Loader(size) for size in (8, 16, 32)}
    manager = StateManager(loaders)
    assert manager.loaded == ()
    fill(manager.state)
    assert manager.loaded == (8,)
    manager.grow_if_needed(8)
    assert manager.loaded == (8, 16)
    assert manager.release() == (8,) and manager.loaded == (16,)
    assert manager.release() == manager.release(32) == ()
    assert isinstance(manager.model, Model) and manager.size == 16
    manager.shrink(8)
    assert [loader.calls for loader in loaders.values()] == [2, 1, 0]
    assert manager.release(16) == (16,)
    with pytest.raises(ValueError, match="the model of 8 positions is in use"):
        manager.release(8)
    with pytest.raises(ValueError, match="size 9 is unknown; the sizes are 8, 16, 32"):
        manager.release(9)


def test_models_that_were_passed_as_objects_are_kept():
    manager = StateManager({8: Model(8), 16: Loader(16)})
    manager.grow_if_needed(0, 16)
    assert manager.loaded == (8, 16) and manager.release() == ()
    with pytest.raises(ValueError, match="8 positions cannot be loaded again: pass a callable"):
        manager.release(8)


@pytest.mark.parametrize("load", [list, tuple])
def test_chunk_models_share_one_state(load):
    def chunks(size):
        return load([Model(size, none=(1, 1, size, 8)), Model(size, none=(1, 1, size, 8))])

    manager = StateManager({8: chunks(8), 16: lambda: chunks(16)})
    assert isinstance(manager.state, FakeMLState) and len(manager.model) == 2
    before = fill(manager.state, "none")
    manager.grow_if_needed(8)
    assert manager.state.writes == 1
    assert np.array_equal(manager.state.read_state("none")[:, :, :8], before)


def test_first_stateful_chunk_creates_the_shared_state():
    def chunks(size):
        stateless = Model(size)
        stateless.shapes = {}
        return [stateless, Model(size)]

    manager = StateManager({8: chunks(8), 16: chunks(16)})
    fill(manager.state)
    assert manager.grow_if_needed(8).action == "grow"
    manager = StateManager({8: chunks(8), 16: chunks(16)}, shared_state=False)
    assert manager.state[0] is None and isinstance(manager.state[1], FakeMLState)


def test_chunk_models_may_have_one_state_each():
    def chunks(size):
        return [Model(size), Model(size, kv=(3, 1, size, 8))]

    manager = StateManager({8: chunks(8), 16: chunks(16)}, shared_state=False)
    sources = manager.state
    before = [fill(source, seed=seed) for seed, source in enumerate(sources)]
    manager.grow_if_needed(8)
    for source, target, value in zip(sources, manager.state, before, strict=True):
        assert (source.reads, source.writes, target.reads, target.writes) == (1, 0, 0, 1)
        assert np.array_equal(target.read_state("kv")[:, :, :8], value)
    with pytest.raises(CompatibilityError, match=r"chunk models 0 and 1 of 8 positions declare"):
        StateManager({8: chunks(8)})


def test_states_are_read_from_packages_and_compiled_models(tmp_path):
    package = write_package(tmp_path / "m.mlpackage", spec_bytes(state("kv", (2, 1, 64, 32))))

    def compiled(path, size=64):
        make = lambda: FakeMLState({"kv": (2, 1, size, 32)})  # noqa: E731
        return SimpleNamespace(path_or_asset=path, function_name="", make_state=make)

    assert state_specs(compiled(str(package)))["kv"].shape == (2, 1, 64, 32)
    assert StateManager({64: compiled(str(package))}).state.writes == 0
    opaque = {64: compiled(None), 128: compiled(None, 128)}
    with pytest.raises(TypeError, match="source must be a path"):
        StateManager(opaque)
    manager = StateManager(opaque, specs={64: package, 128: {"kv": (2, 1, 128, 32)}})
    fill(manager.state)
    assert manager.grow_if_needed(64).size == 128
    with pytest.raises(TypeError, match=r"specs must be a mapping of context sizes .* got list"):
        StateManager(opaque, specs=[package])
    with pytest.raises(ValueError, match="size 65 is unknown; the sizes are 64, 128"):
        StateManager(opaque, specs={65: package})


def test_a_manager_shows_its_sizes_and_models():
    manager = StateManager({8: Model(8), 16: Loader(16)})
    text = "StateManager(sizes 8, 16; loaded 8; state of 8 positions, empty)"
    assert repr(manager) == text
    html = manager._repr_html_()
    assert text in html and "kv (2, 1, 8, 8)" in html and "256 B" in html
    assert "loaded, current" in html and "?" in html


# ---- refills ----


def refilled(sizes=(8, 16), **options):
    settings = {"overflow": "shift_refill", "batch_size": 4, "reserve_batches": 1} | options
    manager = managed(*sizes, **settings)
    manager.grow_if_needed(0, new_tokens=max(sizes))
    return manager


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_refill_prefills_the_kept_tokens_into_a_new_state(kind):
    manager = refilled(prompt_tokens=2)
    full = manager.state
    calls = []

    def prefill(tokens, position, state):
        assert state is manager.state is not full and manager.size == 16
        assert isinstance(tokens, np.ndarray if kind is np.array else list)
        calls.append((list(tokens), position))

    assert manager.grow_if_needed(16).action == "refill" and manager.state is full
    step = manager.refill(kind(range(100, 117)), prefill)
    assert (step.action, step.kept_tokens) == ("refill", 12)
    assert [position for _, position in calls] == [0, 4, 8]
    expected = [100, 101, *range(107, 117)]
    assert [token for tokens, _ in calls for token in tokens] == expected
    assert manager.state is not full and full.reads == full.writes == 0


def test_a_refill_can_move_to_another_size():
    manager = refilled()
    sizes = []
    step = manager.refill(range(12), lambda *_: sizes.append(manager.size), size=8)
    assert (step.size, manager.size, sizes) == (8, 8, [8])
    assert manager.refill(range(12), lambda *_: sizes.append(manager.size)).size == 16


def test_refill_without_dropped_tokens_keeps_the_state():
    manager = refilled()
    full = manager.state
    assert manager.refill(range(12), pytest.fail).action == "stop" and manager.state is full


def test_refills_and_shrinks_of_random_ladders_keep_the_newest_token():
    rng, refills = random.Random(5), 0
    for _ in range(200):
        sizes = sorted(rng.sample(range(2, 40), 2))
        prompt = rng.choice([0, 1, rng.randint(0, 40)])
        manager = managed(
            *sizes,
            overflow="shift_refill",
            batch_size=rng.randint(1, 12),
            reserve_batches=rng.randint(0, 4),
            prompt_tokens=prompt,
        )
        former, written = manager.state, []
        history = list(range(sizes[1] + rng.randint(1, 9)))
        try:
            step = manager.refill(history, lambda tokens, *_: written.extend(tokens))  # noqa: B023
        except CapacityError as error:
            assert error.name == "prompt_tokens" and not written and manager.state is former
            continue
        refills += 1
        assert step.action == "refill" and len(written) == step.kept_tokens < len(history)
        assert written[-1] == history[-1] and written[:prompt] == history[:prompt]
        step = manager.shrink(min(sizes[0], len(written)))
        assert step.indices[-1] == min(sizes[0], len(written)) - 1
    assert refills > 100


def test_prompt_without_room_keeps_the_state():
    manager = refilled(prompt_tokens=13)
    full = manager.state
    for move in (
        lambda: manager.grow_if_needed(16),
        lambda: manager.refill(range(17), pytest.fail),
    ):
        with pytest.raises(CapacityError, match="pass prompt_tokens of at most 12") as caught:
            move()
        assert caught.value.name == "prompt_tokens" and manager.state is full


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_prefill_leaves_the_former_state(error):
    manager = refilled()
    full = manager.state
    before = fill(full)

    def prefill(tokens, position, state):
        if tokens[-1] == 16:
            raise error("no memory")

    for size in (8, 16):
        with pytest.raises(error, match="no memory"):
            manager.refill(range(17), prefill, size=size)
        assert manager.state is full and manager.size == 16
        assert np.array_equal(full.read_state("kv"), before)
    assert manager.refill(range(17), lambda *_: None).action == "refill"


@pytest.mark.parametrize(
    ("tokens", "prefill", "text"),
    [
        (range(20), None, r"prefill must be a callable \(tokens, position, state\), got NoneType"),
        (20, print, "tokens must be a sequence or one-dimensional array .* got int"),
        (np.zeros((1, 20)), print, r"got ndarray of shape \(1, 20\)"),
    ],
)
def test_wrong_arguments_of_a_refill_are_refused(tokens, prefill, text):
    manager = refilled()
    full = manager.state
    with pytest.raises(TypeError, match=text):
        manager.refill(tokens, prefill)
    assert manager.state is full


# ---- errors ----


class Failing(FakeMLState):
    """A state whose last read or write fails, as Core ML would on a machine without memory."""

    def __init__(self, states, *, fail):
        super().__init__(states)
        self.fail = fail

    def read_state(self, name):
        if name == [*self._states][-1] and self.fail == "read":
            raise RuntimeError("out of memory")
        return super().read_state(name)

    def write_state(self, name, value):
        if name == [*self._states][-1] and self.fail == "write":
            self._states[name][:] = 1  # half written
            raise RuntimeError("out of memory")
        super().write_state(name, value)


@pytest.mark.parametrize("fail", ["read", "write"])
@pytest.mark.parametrize("shrinks", [False, True])
def test_a_failed_move_leaves_the_manager_unchanged(fail, shrinks):
    fails = {}

    def model(size):
        shapes = {"k": (1, 1, size, 8), "v": (1, 1, size, 8)}

        return Model(size, lambda states: Failing(states, fail=fails.get(size)), **shapes)

    manager = StateManager({8: model(8), 16: model(16)})
    old, new = (16, 8) if shrinks else (8, 16)
    manager.grow_if_needed(0, new_tokens=old)
    source = manager.state
    before = {name: fill(source, name) for name in ("k", "v")}
    move = manager.shrink if shrinks else manager.grow_if_needed
    if fail == "read":
        source.fail = "read"
    else:
        fails[new] = "write"
    with pytest.raises(MLStateError) as caught:
        move(8)
    assert str(caught.value) == (
        f"state 'v' was not moved from {old} to {new} positions: out of memory. The new state of "
        f"{new} positions is unusable and was dropped; the state of {old} positions is unchanged"
    )
    assert caught.value.name == "v" and isinstance(caught.value.__cause__, RuntimeError)
    assert manager.state is source and manager.size == old
    source.fail = None
    fails.clear()
    assert all(np.array_equal(source.read_state(name), before[name]) for name in before)
    assert move(8).size == manager.size == new
    after = manager.state.read_state("v")
    assert np.array_equal(after[:, :, :8], before["v"][:, :, :8]) and not after[:, :, 8:].any()


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            {"kv": (3, 1, 16, 8)},
            r"the models of 8 and 16 positions do not match: state 'kv' is float16 \(2, 1, 8, 8\) "
            r"and float16 \(3, 1, 16, 8\): only the sequence, axis -2, may differ; convert them",
        ),
        ({"kv": (2, 4, 16, 8)}, r"only the sequence, axis -2, may differ"),
        ({"kv": (2, 1, 16, 4)}, r"only the sequence, axis -2, may differ"),
        ({"kv": (2, 16, 8)}, r"only the sequence, axis -2, may differ"),
        ({"kv": (2, 1, 12, 8), "x": (2, 1, 16, 8)}, r"the model of 8 has no state 'x'; there"),
        ({"kv_1": (2, 1, 16, 8)}, r"the model of 16 has no state 'kv'; did you mean 'kv_1'"),
        ({"kv": (2, 1, 12, 8)}, r"of 16 positions has no state of 16 positions at axis -2; its"),
        ({"kv": StateSpec("kv", (2, 1, 16, 8), np.dtype(np.int32))}, r"int32 .*the same dtype"),
    ],
)
def test_models_with_different_states_are_refused_before_a_move(shapes, text):
    with pytest.raises(CompatibilityError, match=text):
        StateManager({8: Model(8), 16: Model(16, **shapes)})
    manager = StateManager({8: Loader(8), 16: Loader(16, **shapes)})
    source = manager.state
    before = fill(source)
    with pytest.raises(CompatibilityError, match=text):
        manager.grow_if_needed(8)
    assert manager.state is source and manager.size == 8 and manager.loaded == (8,)
    assert (source.reads, source.writes) == (0, 0)
    assert np.array_equal(source.read_state("kv"), before)


def test_each_state_must_have_the_positions_of_its_model():
    def models(small, large):
        shapes = {8: {"k": (2, 1, 8, 8), "v": (2, 1, small, 8)}}
        shapes[16] = {"k": (2, 1, 16, 8), "v": (2, 1, large, 8)}
        return {size: Model(size, **shapes[size]) for size in shapes}

    for lengths in ((4, 12), (1, 2), (12, 16), (8, 17), (8, 7)):
        with pytest.raises(
            CompatibilityError, match=r"'v' is .* pass the lengths of axis -2 as the sizes"
        ):
            StateManager(models(*lengths))
    StateManager(models(8, 12))  # a window of 12 positions


def test_numbers_of_chunk_models_with_own_states_must_be_equal():
    models = {8: [Model(8)] * 2, 16: [Model(16)] * 3}
    with pytest.raises(CompatibilityError, match="8 and 16 positions do not match: 2 and 3 chunk"):
        StateManager(models, shared_state=False)


def test_a_released_model_is_compared_again():
    manager = StateManager({8: Loader(8), 16: Loader(16)})
    fill(manager.state)
    manager.grow_if_needed(8)
    manager.release()
    manager._given[8].arguments = (8, {"kv": (5, 1, 8, 8)})
    with pytest.raises(CompatibilityError, match="8 positions was loaded again with other states"):
        manager.shrink(3)
    assert manager.size == 16


@pytest.mark.parametrize(
    ("models", "error", "text"),
    [
        ({16: 0, 8: 0}, ValueError, r"sizes must rise, but sizes\[0\] is 16 and sizes\[1\] is 8"),
        ({}, ValueError, "sizes is empty"),
        ({"8": 0}, TypeError, r"sizes\[0\] must be an integer, got str"),
        ({0: 0}, CapacityError, r"sizes\[0\] must be at least 1, got 0"),
        ([Model(8)], TypeError, "models must be a mapping of context sizes to models, .* got list"),
        ({8: "m.mlpackage"}, TypeError, "the model of 8 positions has no make_state: .* got str"),
        ({8: []}, TypeError, "the model of 8 positions is an empty sequence of chunk models"),
    ],
)
def test_wrong_models_are_refused(models, error, text):
    with pytest.raises(error, match=text):
        StateManager(models)


@pytest.mark.parametrize("returned", [None, "m.mlpackage", [None], []])
def test_loader_without_a_model_is_refused_before_a_move(returned):
    manager = StateManager({8: Model(8), 16: lambda: returned})
    source = manager.state
    fill(source)
    with pytest.raises(
        TypeError, match=r"the model of 16 positions (has no make_state|is an empty)"
    ):
        manager.grow_if_needed(8)
    assert manager.state is source and manager.loaded == (8,)
    assert (source.reads, source.writes) == (0, 0)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m: m.grow_if_needed(17), CapacityError, "position 17 is beyond the 8 positions"),
        (lambda m: m.grow_if_needed(9), CapacityError, "position 9 is beyond the 8 positions"),
        (lambda m: m.grow_if_needed(-1), CapacityError, "position must be at least 0, got -1"),
        (lambda m: m.grow_if_needed(8.0), TypeError, "position must be an integer, got float"),
        (lambda m: m.grow_if_needed(8, 0), CapacityError, "new_tokens must be at least 1, got 0"),
        (lambda m: m.shrink(17), CapacityError, "position 17 is beyond the 8 positions of the st"),
        (lambda m: m.shrink(5, 4), CapacityError, "5 tokens do not fit into 4 positions: pass siz"),
        (lambda m: m.shrink(5, 16), ValueError, "size 16 is larger than the 8 .*grow_if_needed"),
        (lambda m: m.shrink(5, 9), ValueError, "size 9 is unknown; the sizes are 4, 8, 16"),
        (lambda m: m.refill(range(20), print), ValueError, "the ladder has no batch_size"),
    ],
)
def test_invalid_positions_and_sizes_keep_the_state(call, error, text):
    manager = managed(4, 8, 16)
    manager.grow_if_needed(0, new_tokens=8)
    source = manager.state
    fill(source)
    with pytest.raises(error, match=text):
        call(manager)
    assert manager.state is source and (source.reads, source.writes) == (0, 0)


def test_tokens_in_a_state_that_was_never_created_are_refused():
    manager = managed(8, 16)
    with pytest.raises(CapacityError, match="position is 8, but the state is empty: write tokens"):
        manager.grow_if_needed(8)
    assert manager.size == 8


@pytest.mark.parametrize("version", ["8.3.0", None])
def test_an_old_coremltools_is_named_with_its_version(monkeypatch, version):
    if version is None:
        monkeypatch.delitem(sys.modules, "coremltools", raising=False)
    else:
        module = SimpleNamespace(__version__=version)
        monkeypatch.setitem(sys.modules, "coremltools", module)
    manager = StateManager({8: Model(8, lambda shapes: object())})
    version_text = version or "an unknown version"
    text = f"coremltools 9.0 or newer is needed to move states, found {version_text}"
    with pytest.raises(CompatibilityError, match=f"the state has no read_state: {text}"):
        manager.state  # noqa: B018
    old = type("MLModel", (), {"__module__": "coremltools.models.model"})
    with pytest.raises(CompatibilityError, match=f"the model has no make_state: {text}"):
        StateManager({8: old()})


# ---- save and restore ----


@pytest.mark.parametrize("sizes", [(8, 16), (16, 32)])
def test_a_saved_manager_continues_in_another_one_with_its_size(tmp_path, sizes):
    manager = managed(8, 16)
    fill(manager.state)
    manager.grow_if_needed(8)
    before = fill(manager.state, seed=1)
    mlstate.save(tmp_path / "session", states={"kv": manager, "position": 12})
    new, other = managed(*sizes), managed(*sizes)
    mlstate.load(tmp_path / "session", into={"states": {"kv": new}})
    assert new.size == 16 and np.array_equal(new.state.read_state("kv"), before)
    saved = mlstate.load(tmp_path / "session").states
    assert saved["position"] == 12 and saved["kv"]["states"][0]["kv"].dtype == np.float16
    other.load_state_dict(saved["kv"])
    assert other.size == 16 and np.array_equal(other.state.read_state("kv"), before)


def test_restore_names_the_size_that_the_manager_lacks(tmp_path):
    manager = managed(8)
    fill(manager.state)
    mlstate.save(tmp_path / "session", states={"kv": manager})
    new = managed(16)
    before = fill(new.state, seed=1)
    with pytest.raises(CompatibilityError, match="has 8 positions, and the manager has models of"):
        mlstate.load(tmp_path / "session", into={"states": {"kv": new}})
    assert np.array_equal(new.state.read_state("kv"), before)


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (
            {"size": 8, "states": [{"kv": np.zeros((2, 1, 8, 8), np.float32)}]},
            CompatibilityError,
            "the saved state has float32",
        ),
        ({"size": 8, "states": [{"k": np.zeros(1)}]}, CompatibilityError, "has no such state"),
        (
            {"size": 8, "states": [{"kv": np.zeros((2, 1, 8, 8), np.float16), "x": np.ones(1)}]},
            CompatibilityError,
            "'x': the saved state has float64",
        ),
        ({"size": 8, "states": [None, None]}, CompatibilityError, "2 state objects"),
        ({"size": 8, "states": [3]}, TypeError, "a result of state_dict"),
        ({"kv": np.zeros(1)}, TypeError, "dict with 'kv'"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_other_saved_states_are_refused_before_a_change(state, error, text):
    manager = managed(8, 16)
    before = fill(manager.state)
    with pytest.raises(error, match=text):
        manager.load_state_dict(state)
    assert manager.size == 8 and np.array_equal(manager.state.read_state("kv"), before)


def test_an_empty_state_and_separate_chunk_states_are_restored():
    bias = Model(8, bias=(3,))
    manager = StateManager({8: [Model(8), bias], 16: [Model(16), bias]}, shared_state=False)
    manager.grow_if_needed(0, 9)
    empty = manager.state_dict()
    assert empty == {"size": 16, "states": None}
    expected = [fill(manager.state[0]), fill(manager.state[1], "bias")]
    saved = manager.state_dict()
    manager.reset()
    manager.load_state_dict(saved)
    assert np.array_equal(manager.state[0].read_state("kv"), expected[0])
    assert np.array_equal(manager.state[1].read_state("bias"), expected[1])
    manager.reset()
    manager.load_state_dict(empty)
    assert manager.size == 16 and not manager.state[0].read_state("kv").any()


@pytest.mark.parametrize("size", [16.0, np.int64(16)])
def test_a_saved_size_of_another_number_type_is_restored_as_an_int(size):
    manager = managed(8, 16)
    manager.load_state_dict({"size": size, "states": None})
    assert type(manager.size) is int
    assert manager.grow_if_needed(0, 16).action == "stay"


def test_a_failed_write_keeps_the_former_state():
    saved = managed(8, 16)
    fill(saved.state)
    saved.grow_if_needed(8)
    manager = StateManager({8: Model(8), 16: Model(16, partial(Failing, fail="write"))})
    before = fill(manager.state)
    with pytest.raises(MLStateError, match="'kv' of 16 positions was not restored: out of memory"):
        manager.load_state_dict(saved.state_dict())
    assert manager.size == 8 and np.array_equal(manager.state.read_state("kv"), before)


def test_a_bare_state_names_the_manager_and_its_arrays(tmp_path):
    manager = managed(8)
    with pytest.raises(TypeError, match=r"pass its mlstate.coreml.StateManager, or its arrays"):
        mlstate.save(tmp_path / "session", states={"kv": manager.state})
    mlstate.save(tmp_path / "session", states={"kv": manager})
    with pytest.raises(TypeError, match=r"pass its mlstate.coreml.StateManager, or take"):
        mlstate.load(tmp_path / "session", into={"states": {"kv": manager.state}})


def test_a_move_of_an_empty_state_names_the_call_for_it():
    manager = managed(8, 16)
    with pytest.raises(CapacityError, match=r"grow_if_needed\(0, new_tokens=9\)"):
        manager.grow_if_needed(8)
    assert manager.grow_if_needed(0, new_tokens=9).size == 16
    with pytest.raises(CapacityError, match=r"shrink\(0, size=8\)"):
        manager.shrink(8)
    assert manager.shrink(0, size=8).size == 8
