"""Plans, the command, functions, managers and `CacheState` agree on every kind of state."""

import random
from typing import NamedTuple

import numpy as np
import pytest
from fake_states import FakeArray, fake_model, use_fake_arrays
from mlpackage_writer import spec_bytes, state, write_package
from tries import tries

from mlstate import coreai, coreml
from mlstate.cli import main
from mlstate.coreml import FakeMLState, StateSpec, compact_coreml_state, transition_coreml_state
from mlstate.errors import CapacityError, CompatibilityError, MLStateError
from mlstate.kv import CacheEntry, CacheSpec, CacheState

pytestmark = pytest.mark.filterwarnings("ignore::mlstate.coreml.StateShapeWarning")

F16, I32 = np.dtype(np.float16), np.dtype(np.int32)
REFUSALS = (CapacityError, CompatibilityError)
INT32_CODE = 131104  # of Core ML's ArrayFeatureType


class State(NamedTuple):
    """A state in the source and in the target model, and the entry of a cache like it."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: np.dtype = F16
    entry: str | None = None  # kind of the entry; None: no cache holds such a state
    window: int | None = None

    def spec(self, which, name):
        return StateSpec(name, self.shapes[which], self.dtype)


def specs_of(states, which):
    return {name: state.spec(which, name) for name, (state, _) in states.items()}


def full(small, large):
    return State(((2, 1, small, 3), (2, 1, large, 3)), entry="full")


def window(size, contexts):
    lengths = [min(size, context) for context in contexts]
    return State(tuple((2, 3, n, 2) for n in lengths), entry="sliding", window=size)


def whole(*shape, dtype=F16, entry="recurrent"):
    return State((shape, shape), dtype, entry)


def outcome(states, position):
    """The names and arrays that a transition writes, from a formula; None if it refuses."""
    written = {}
    for name, (spec, value) in states.items():
        source, target = spec.shapes
        if source == target:
            written[name] = value
            continue
        pairs = list(zip(source, target, strict=False))
        differing = [axis for axis, lengths in enumerate(pairs) if lengths[0] != lengths[1]]
        if len(source) != len(target) or differing != [2] or position > min(pairs[2]):
            return None
        written[name] = np.zeros(target, spec.dtype)
        written[name][:, :, :position] = value[:, :, :position]
    return written


def attempt(function):
    """The arrays that a function returns, or None if it refuses."""
    try:
        return function()
    except REFUSALS:
        return None


# ---- every way to move states ----


def by_plan(module):
    def plan(states, contexts, position):
        specs = [specs_of(states, which) for which in (0, 1)]
        if module is coreai:
            specs = [
                {n: coreai.StateSpec(*spec) for n, spec in specs_by_name.items()}
                for specs_by_name in specs
            ]
        result = module.plan_transition(*specs, position)
        assert result.fits == (not result.problems)
        for move in result.moves if result.fits else ():
            specs_by_name = states[move.name][0]
            size = np.prod(specs_by_name.shapes[1], dtype=int) * specs_by_name.dtype.itemsize
            assert move.copied_bytes + move.zeroed_bytes == size
            if specs_by_name.shapes[0] == specs_by_name.shapes[1]:
                assert (move.direction, move.zeroed_bytes) == ("same", 0)
        return result.fits

    return plan


def by_functions(states, contexts, position):
    specs = [specs_of(states, which) for which in (0, 1)]
    source, target = map(FakeMLState, specs)
    for name, (spec, value) in states.items():
        source.write_state(name, np.require(value, writable(spec), ["C", "W"]))
    move = transition_coreml_state if contexts[0] < contexts[1] else compact_coreml_state
    refused = False
    for name in states:
        before = target.read_state(name)
        try:
            move(source, target, name, position, specs=specs[1])
        except REFUSALS as error:
            assert str(error).startswith(f"{name}: ")
            assert np.array_equal(target.read_state(name), before)
            refused = True
    return None if refused else {name: target.read_state(name) for name in states}


def writable(spec):
    return I32 if spec.dtype == I32 else np.float32


def moved_by(manager, contexts, position):
    if contexts[0] < contexts[1]:
        return manager.grow_if_needed(position, contexts[1] - position).action == "grow"
    return manager.shrink(position, contexts[1]).action == "shrink"


def by_coreml_manager(states, contexts, position):
    def move():
        models = {
            context: fake_model(specs_of(states, which)) for which, context in enumerate(contexts)
        }
        manager = coreml.StateManager(dict(sorted(models.items())))
        manager.grow_if_needed(0, contexts[0])
        source = manager.state
        for name, (spec, value) in states.items():
            source.write_state(name, np.require(value, writable(spec), ["C", "W"]))
        try:
            assert moved_by(manager, contexts, position)
        except REFUSALS:
            assert manager.state is source and manager.size == contexts[0]
            raise
        return {name: manager.state.read_state(name) for name in states}

    return attempt(move)


def by_coreai_manager(states, contexts, position):
    def model(which):
        return {n: coreai.StateSpec(*s.spec(which, n)) for n, (s, _) in states.items()}

    def move():
        models = {context: model(which) for which, context in enumerate(contexts)}
        manager = coreai.StateManager(dict(sorted(models.items())))
        manager.grow_if_needed(0, contexts[0])
        for name, (_, value) in states.items():
            manager.state[name] = FakeArray(value)
        assert moved_by(manager, contexts, position)
        return {name: array.numpy() for name, array in manager.state.items()}

    return attempt(move)


def by_cache(states, contexts, position):
    def move():
        entries = [
            CacheEntry(name, spec.entry, spec.shapes[0], spec.dtype, window=spec.window)
            for name, (spec, _) in states.items()
        ]
        arrays = {name: value.copy() for name, (_, value) in states.items()}
        cache = CacheState(CacheSpec(entries), arrays, position)
        cache.resize(contexts[1])
        return cache.arrays

    return attempt(move)


@pytest.fixture
def fake_arrays(monkeypatch):
    use_fake_arrays(monkeypatch)


# ---- random sets of states ----


def odd_state(rng, contexts):
    """A state that no transition may move."""
    small, large = contexts
    return rng.choice(
        [
            State(((2, 1, small, 3), (2, 1, large, 4))),  # another head dimension
            State(((2, 1, small, 3), (2, 2, large, 3))),
            State(((2, 1, small, 3), (2, 1, small, 4))),
            State(((2, 1, small, 3), (2, small, 3))),
            State(((5,), (6,))),
            State(((2, 3), (2, 4))),
            State(((), (1,))),
            State(((2, small, 3, 2), (2, large, 3, 2))),  # the sequence at another axis
        ]
    )


def random_states(rng):
    contexts = tuple(rng.sample([4, 8, 12, 16, 32], 2))
    kinds = [
        lambda: full(*contexts),
        lambda: window(rng.choice([2, 3, 4, 6, 8, 20, 40]), contexts),
        lambda: whole(2, 5, 3, entry="conv"),
        lambda: whole(2, 3, 8, 8),  # as many as a context, by coincidence
        lambda: whole(7),
        lambda: whole(),
        lambda: whole(2, 1, dtype=I32),
        lambda: whole(*range(1, 4), 1, 1, 1, 1, 1, 2),
    ]
    chosen = [full(*contexts), *(rng.choice(kinds)() for _ in range(rng.randint(0, 5)))]
    if rng.random() < 0.3:
        chosen.append(odd_state(rng, contexts))
    rng.shuffle(chosen)
    states = {}
    for number, spec in enumerate(chosen):
        value = np.asarray(rng.randint(1, 50) + np.arange(np.prod(spec.shapes[0], dtype=int)))
        states[f"s{number}"] = spec, value.reshape(spec.shapes[0]).astype(spec.dtype)
    position = rng.choice([0, 1, 3, min(contexts), min(contexts) + 1, max(contexts), 70])
    return states, contexts, position


@pytest.mark.parametrize("seed", range(tries(300)))
def test_every_way_to_move_states_agrees(seed, fake_arrays):
    states, contexts, position = random_states(random.Random(seed))
    expected = outcome(states, position)
    for plan in (by_plan(coreml), by_plan(coreai)):
        # Core AI's plan raises if no axis explains the difference of two shapes
        assert bool(attempt(lambda plan=plan: plan(states, contexts, position))) == (
            expected is not None
        )
    ways = [by_functions, by_coreml_manager, by_coreai_manager]
    if all(spec.entry for spec, _ in states.values()):
        ways.append(by_cache)
    for move in ways:
        written = move(states, contexts, position)
        assert (written is None) == (expected is None), move.__name__
        for name in expected or ():
            assert np.array_equal(written[name], expected[name]), (move.__name__, name)


@pytest.mark.parametrize("seed", range(20))
def test_the_command_agrees_with_the_functions(seed, tmp_path, capsys):
    states, _, position = random_states(random.Random(seed))
    # the reader of packages refuses states without dimensions
    states = {name: pair for name, pair in states.items() if all(pair[0].shapes)}
    packages = []
    for which in (0, 1):
        declared = [
            state(name, spec.shapes[which], *([INT32_CODE] if spec.dtype == I32 else []))
            for name, (spec, _) in states.items()
        ]
        packages.append(str(write_package(tmp_path / f"{which}.mlpackage", spec_bytes(*declared))))
    status = main(["coreml", "plan", *packages, "--at", str(position)])
    assert status == (outcome(states, position) is None), capsys.readouterr().out


# ---- single kinds ----


def test_growth_copies_full_windows_unchanged():
    def shapes(context):
        return {"local": (10, 1, 512, 256), "global": (2, 1, context, 256)}

    for module in (coreml, coreai):
        plan = module.plan_transition(shapes(1024), shapes(2048), 700)
        assert plan.fits
        local, cache = plan.moves
        assert (local.direction, local.copied_bytes) == ("same", 10 * 512 * 256 * 2)
        assert (cache.direction, cache.copied_bytes) == ("expand", 2 * 700 * 256 * 2)


def test_wrapped_window_refuses_a_new_length():
    def shapes(context):
        return {"local": (1, 1, min(512, context), 32), "global": (1, 1, context, 32)}

    for module in (coreml, coreai):
        assert module.plan_transition(shapes(256), shapes(1024), 256).fits
        plan = module.plan_transition({"local": (1, 1, 256, 32)}, {"local": (1, 1, 512, 32)}, 300)
        assert "A window that has wrapped cannot move to 512 positions" in plan.problems[0]


@pytest.mark.parametrize(
    ("lengths", "is_window"),
    [((8, 16), False), ((512, 1024), False), ((128, 64), False), ((256, 300), True)],
)
def test_length_unrelated_to_the_context_is_refused(lengths, is_window):
    """Scales of blocks, two positions for a token, a window that shrinks while the cache grows."""
    source, target = ({"kv": (2, 1, n, 32), "s": (2, 1, m, 32)} for n, m in
                      zip((256, 512), lengths, strict=True))  # fmt: skip
    for module in (coreml, coreai):
        plan = module.plan_transition(source, target, 5)
        assert plan.fits == is_window
        if max(lengths) < 512:  # else `kv` follows from the greater context no more
            assert is_window or "s: " in plan.problems[0]
        models = {256: source, 512: target}
        if module is coreml:
            models = {size: fake_model(specs) for size, specs in models.items()}
        if is_window:
            module.StateManager(models)
            continue
        with pytest.raises(CompatibilityError, match="pass the lengths of axis -2 as the sizes"):
            module.StateManager(models)


@pytest.mark.parametrize("move", [transition_coreml_state, compact_coreml_state])
@pytest.mark.parametrize("shape", [(2, 1, 3, 4), (3, 4), (5,), (), (1,) * 9 + (2,)])
@pytest.mark.parametrize("position", [0, 2, 1000])
def test_a_state_of_one_shape_is_copied_whole_at_any_position(move, shape, position):
    source, target = FakeMLState({"s": shape}), FakeMLState({"s": shape})
    value = np.full(shape, 3, np.float32)
    source.write_state("s", value)
    for specs in (None, {"s": shape}, {"s": StateSpec("s", shape, F16)}):
        target.write_state("s", np.zeros(shape, np.float32))
        move(source, target, "s", position, specs=specs)
        assert np.array_equal(target.read_state("s"), value)


def test_integers_are_not_written_into_a_state_of_floats():
    count = StateSpec("n", (2, 1), I32)
    source, target = FakeMLState({"n": count}), FakeMLState({"n": (2, 1)})
    for specs in (None, {"n": StateSpec("n", (2, 1), F16)}):
        for states in ((source, target), (target, source)):
            target_specs = specs and {"n": count if states[1] is source else specs["n"]}
            with pytest.raises(CompatibilityError, match="use models with the same dtype"):
                transition_coreml_state(*states, "n", 1, specs=target_specs)
    assert source.writes == target.writes == 0


def test_whole_states_of_a_manager_are_kept_at_position_0(fake_arrays):
    """An encoder's states are filled before the first token."""

    def shapes(size):
        return {"kv": (1, 1, size, 4), "cross": (1, 1, 6, 4)}

    manager = coreml.StateManager({size: fake_model(shapes(size)) for size in (8, 16)})
    manager.state.write_state("cross", np.ones((1, 1, 6, 4), np.float32))
    manager.state.write_state("kv", np.ones((1, 1, 8, 4), np.float32))
    manager.grow_if_needed(0, 16)
    assert manager.state.read_state("cross").all() and not manager.state.read_state("kv").any()
    manager.shrink(0)
    assert manager.state.read_state("cross").all()
    manager = coreai.StateManager({8: shapes(8), 16: shapes(16)})
    cross = manager.state["cross"] = FakeArray(np.ones((1, 1, 6, 4), np.float16))
    manager.state["kv"] = FakeArray(np.ones((1, 1, 8, 4), np.float16))
    manager.grow_if_needed(0, 16)
    assert manager.state["cross"] is cross and not manager.state["kv"].numpy().any()


def test_a_whole_state_of_another_dtype_is_converted(fake_arrays):
    def specs(size, dtype):
        return {
            name: coreai.StateSpec(name, shape, np.dtype(dtype))
            for name, shape in {"kv": (1, 1, size, 4), "s": (3,), "n": ()}.items()
        }

    manager = coreai.StateManager({8: specs(8, "f4"), 16: specs(16, "f2")})
    manager.state["s"] = FakeArray(np.array([0.5, 3, 9], np.float32))
    manager.state["n"] = FakeArray(np.float32(7))
    manager.grow_if_needed(8)
    for name, value in (("s", [0.5, 3, 9]), ("n", 7.0)):
        array = manager.state[name].numpy()
        assert array.dtype == np.float16 and array.tolist() == value
    manager = coreai.StateManager({8: specs(8, "i4"), 16: specs(16, "i1")})
    source = manager.state
    source["s"] = FakeArray(np.array([1, 2, 300], np.int32))
    with pytest.raises(MLStateError, match=r"state 's' was not moved .* out of the range of int8"):
        manager.grow_if_needed(8)
    assert manager.state is source and manager.size == 8


def test_state_of_another_shape_is_refused_by_the_model(fake_arrays):
    def shapes(size):
        return {"kv": (1, 1, size, 4), "s": (2, 3)}

    for actual in ({"kv": (1, 1, 16, 4), "s": (2, 3)}, {"kv": (1, 1, 8, 4), "s": (3, 2)}):
        manager = coreml.StateManager(
            {8: fake_model(shapes(8), actual), 16: fake_model(shapes(16))}
        )
        source = manager.state
        with pytest.raises(CompatibilityError, match=r"source state has the shape .* declares"):
            manager.grow_if_needed(8)
        assert manager.state is source
    manager = coreai.StateManager({8: shapes(8), 16: shapes(16)})
    manager.state["s"] = FakeArray(np.zeros((3, 2), np.float16))
    with pytest.raises(CompatibilityError, match=r"s: the array .* \(3, 2\), expected \(2, 3\)"):
        manager.grow_if_needed(8)


def test_two_models_that_name_other_sequence_axes_are_refused():
    """Lengths that are equal by coincidence do not show that the layout changed."""
    models = [
        {"k": coreai.StateSpec("k", (2, 64, 64, 8), F16, axis)} for axis in (1, 2)
    ]  # the sequence first, or the heads
    with pytest.raises(CompatibilityError, match=r"k: the sequence is axis 1 of .* and axis 2"):
        coreai.plan_transition(*models, 5)
    caches = [{"kv": coreai.StateSpec("kv", (2, 1, size, 8), F16)} for size in (64, 128)]
    with pytest.raises(CompatibilityError, match=r"k: the sequence is axis 1 of .* and axis 2"):
        coreai.StateManager({64: caches[0] | models[0], 128: caches[1] | models[1]})
    coreai.StateManager({64: caches[0] | models[0], 128: caches[1] | models[0]})
    assert coreai.plan_transition(models[0], models[0], 5).fits


def test_roll_below_the_largest_size_moves_the_state():
    models = {size: fake_model({"kv": (1, 1, size, 4)}) for size in (4, 8)}
    manager = coreml.StateManager(models, overflow="roll")
    manager.state.write_state("kv", np.ones((1, 1, 4, 4), np.float32))
    step = manager.grow_if_needed(4, 6)
    assert (step.action, step.size, manager.size) == ("roll", 8, 8)
    assert manager.state.read_state("kv")[:, :, :4].all()
    same = manager.state
    assert manager.grow_if_needed(10).action == "roll" and manager.state is same


@pytest.mark.parametrize("window_size", [3, 4, 6, 8, 11, 40])
def test_growth_keeps_states_of_all_kinds(window_size):
    """After each token, it holds the states of a model with the largest context from the start."""

    def shapes(context):
        local = min(window_size, context)
        return {
            "local": (1, 1, local, 4),
            "global": (1, 1, context, 4),
            "sum": (1,),
            "conv": (3, 1),
        }

    def decode(state, token):
        for name in ("local", "global"):
            cache = state.read_state(name)
            cache[:, :, token % cache.shape[2]] = token + 1
            state.write_state(name, cache)
        state.write_state("sum", (state.read_state("sum") * 3 + token) % 997)
        conv = np.roll(state.read_state("conv"), -1, axis=0)
        conv[-1] = token
        state.write_state("conv", conv)

    manager = coreml.StateManager({size: fake_model(shapes(size)) for size in (4, 8, 16, 32)})
    fixed, sizes = FakeMLState(shapes(32)), set()
    for token in range(32):
        assert manager.grow_if_needed(token).action != "stop"
        sizes.add(manager.size)
        decode(manager.state, token)
        decode(fixed, token)
        for name in shapes(32):
            actual = manager.state.read_state(name)
            expected = fixed.read_state(name)
            if name in ("local", "global"):
                expected = expected[:, :, : actual.shape[2]]
            assert np.array_equal(actual, expected), (token, name)
    assert sizes == {4, 8, 16, 32}
