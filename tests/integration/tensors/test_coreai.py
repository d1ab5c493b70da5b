"""Models made by coreai-torch and run by Core AI: their states survive every move."""

import hashlib
import itertools
import shutil

import numpy as np
import pytest
from coreai_models import (
    BASE,
    HEAD_DIM,
    HEADS,
    LAYERS,
    AIModelAsset,
    NDArray,
    decode,
    save_decoder,
    save_mixed,
    session,
)

from mlstate.cli import main
from mlstate.coreai import StateManager, plan_transition, state_specs, verify
from mlstate.errors import CompatibilityError, FormatError
from mlstate.kv import RollingKVState, rotate_keys

pytestmark = [pytest.mark.coreai, pytest.mark.torch]

DTYPES = ("float32", "float16")
SIZES = (64, 128, 256, 512)
# Of keys that were rotated to new positions, and of the logits computed with them.
ROLLED_KEYS = {"float32": 2e-6, "float16": 5e-3}
ROLLED_LOGITS = {"float32": 5e-6, "float16": 1e-2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coreai")
    paths = {name: folder / f"{name}.aimodel" for name in (*DTYPES, "static", "mixed")}
    save_decoder(paths["float32"], "float32")
    save_decoder(paths["float16"], "float16", paths["static"], (64, 128))
    save_mixed(paths["mixed"])
    return {name: str(path) for name, path in paths.items()}


@pytest.fixture(scope="module", params=DTYPES)
def decoder(models, request):
    with session(models[request.param]) as loaded:
        loaded.dtype = request.param
        yield loaded


def some_tokens(count):
    return np.random.default_rng(7).integers(0, 32, count)


def arrays(state):
    return {name: array.numpy() for name, array in state.items()}


def assert_same_states(first, second, positions=None):
    for (name, a), b in zip(arrays(first).items(), arrays(second).values(), strict=True):
        assert a[..., :positions, :].tobytes() == b[..., :positions, :].tobytes(), name


# ---- states of models ----


def test_every_form_of_a_model_has_the_same_states(models):
    path = models["mixed"]
    specs = state_specs(path)
    assert {name: (s.shape, s.dtype.name, s.seq_axis) for name, s in specs.items()} == {
        "rows": ((2, 1, 6, 1, None), "bfloat16", 4),
        "columns": ((2, 3, None, 4), "int8", 2),
        "window": ((2, 4, 3), "float32", None),
        "steps": ((1,), "int32", None),
    }
    with session(path) as loaded:
        asset = AIModelAsset.load(path)
        for form in (asset, loaded.model, loaded.functions["main"]):
            assert state_specs(form) == specs


def test_static_model_functions_have_fixed_states(models):
    path = models["static"]
    with pytest.raises(CompatibilityError, match="2 functions and names no default"):
        state_specs(path)
    small = state_specs(path, function="main_s64")
    assert small["k_cache"].shape == (LAYERS, 1, HEADS, 64, HEAD_DIM)
    assert small["k_cache"].seq_axis is None
    assert state_specs(small, state_specs(path, function="main_s128"))["k_cache"].seq_axis == 3


def test_command_line_reads_models(models, capsys):
    assert main(["coreai", "states", models["float16"]]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "main",
        "  k_cache  float16  2x1x2x?x8  ?",
        "  v_cache  float16  2x1x2x?x8  ?",
    ]
    arguments = ["coreai", "plan", models["static"], models["float16"], "--at", "60"]
    sizes = ["--source-function", "main_s64", "--target-size", "128"]
    assert main([*arguments, *sizes]) == 0
    assert "60 tokens: fits" in capsys.readouterr().out
    assert main([*arguments, *sizes[:3], "32"]) == 1
    assert main(["coreai", "verify", models["static"]]) == 0


# ---- moves ----


def decode_with_fixed_cache(decoder, tokens):
    """Decode with a growing and a fixed cache; every step must have the same bits."""
    growing = StateManager(decoder.functions["main"], SIZES)
    fixed = StateManager(decoder.functions["main"], SIZES[-1:])
    grown = []
    for position, token in enumerate(tokens):
        step = growing.grow_if_needed(position)
        grown += [(position, step.size)] if step.action == "grow" else []
        logits = decoder.step(growing, token, position)
        assert logits.dtype == decoder.dtype
        assert logits.tobytes() == decoder.step(fixed, token, position).tobytes(), position
    assert grown == [(size, larger) for size, larger in itertools.pairwise(SIZES)]
    assert_same_states(growing.state, fixed.state)
    return growing, fixed


def test_growing_cache_has_the_bits_of_a_fixed_cache_at_every_step(decoder):
    decode_with_fixed_cache(decoder, some_tokens(260))


@pytest.mark.long
def test_full_cache_shrinks_and_grows_again_without_a_change(decoder):
    tokens = some_tokens(512)
    growing, fixed = decode_with_fixed_cache(decoder, tokens)
    assert growing.grow_if_needed(512).action == "stop"
    with pytest.raises(ValueError, match="512 tokens do not fit into 256 positions"):
        growing.shrink(512, 256)
    for token_count in (256, 200, 64, 3):  # keep fewer tokens, and decode on
        growing.shrink(token_count)
        assert_same_states(growing.state, fixed.state, token_count)
        for position in range(token_count, min(token_count + 70, 512)):
            growing.grow_if_needed(position)
            logits = decoder.step(growing, tokens[position], position)
            expected = decoder.step(fixed, tokens[position], position)
            assert logits.tobytes() == expected.tobytes(), (token_count, position)


def test_one_model_for_each_size_continues_the_other(models):
    with session(models["static"]) as static, session(models["float16"]) as dynamic:
        functions = {n: static.functions[f"main_s{n}"] for n in (64, 128)}
        manager = StateManager(functions)
        expected = StateManager(dynamic.functions["main"], (128,))
        for position, token in enumerate(some_tokens(80)):
            manager.grow_if_needed(position)
            assert manager.model is functions[manager.size]
            logits = static.step(manager, token, position)
            assert logits.tobytes() == dynamic.step(expected, token, position).tobytes()


def test_states_of_every_dtype_and_layout_move(models):
    with session(models["mixed"]) as loaded:
        manager = StateManager(loaded.functions["main"], (8, 16))

        def step():
            loaded.run(manager.model({"x": NDArray(np.ones(1, np.float32))}, manager.state))

        def expect(name, shape, dtype, axis, used, newest):
            array = manager.state[name].numpy()
            assert (array.shape, array.dtype.name) == (shape, dtype)
            expected = np.full(shape, newest, np.float32)
            if axis is not None:
                expected[(slice(None),) * axis + (slice(used, None),)] -= newest
            assert (array.astype(np.float32) == expected).all()

        for _ in range(3):
            step()
        assert manager.grow_if_needed(8).action == "grow"
        expect("rows", (2, 1, 6, 1, 16), "bfloat16", 4, 8, 3)
        expect("columns", (2, 3, 16, 4), "int8", 2, 8, 3)
        expect("window", (2, 4, 3), "float32", None, None, 3)
        step()
        manager.shrink(5)
        expect("rows", (2, 1, 6, 1, 8), "bfloat16", 4, 5, 4)
        expect("columns", (2, 3, 8, 4), "int8", 2, 5, 4)
        expect("window", (2, 4, 3), "float32", None, None, 4)
        expect("steps", (1,), "int32", None, None, 4)


# ---- dropping tokens ----


def test_refilled_cache_has_the_bits_of_a_cache_of_the_kept_tokens(decoder):
    tokens = some_tokens(81)
    function = decoder.functions["main"]
    settings = {"overflow": "shift_refill", "batch_size": 8, "prompt_tokens": 4}
    manager = StateManager(function, (32, 64), **settings)
    for position in range(64):
        manager.grow_if_needed(position)
        decoder.step(manager, tokens[position], position)

    async def prefill(batch, start, state):
        for position, token in enumerate(batch, start):
            await decode(function, state, token, position)

    assert manager.grow_if_needed(64).action == "refill"
    step = decoder.run(manager.refill_async(tokens[:65], prefill))
    kept_tokens = tokens[step.indices]
    assert (step.indices[:4], step.indices[-1]) == ([0, 1, 2, 3], 64)
    fresh = StateManager(function, (64,))
    for position, token in enumerate(kept_tokens):
        decoder.step(fresh, token, position)
    assert_same_states(manager.state, fresh.state)
    for position, token in enumerate(tokens[65:], len(kept_tokens)):
        logits = decoder.step(manager, token, position)
        assert logits.tobytes() == decoder.step(fresh, token, position).tobytes()


def test_rolled_cache_is_near_a_cache_of_the_kept_tokens(decoder):
    tokens, function = some_tokens(96), decoder.functions["main"]
    manager = StateManager(function, (64,), overflow="roll")
    for position in range(64):
        decoder.step(manager, tokens[position], position)
    assert manager.grow_if_needed(64).action == "roll"
    rings = {}
    for name, array in arrays(manager.state).items():
        rings[name] = RollingKVState(array.shape, 32, array.dtype, sinks=4)
        rings[name].append(array)
    positions = np.sort(rings["k_cache"].positions())
    shifts = np.arange(32) - positions
    rolled = {name: ring.ordered() for name, ring in rings.items()}
    rolled["k_cache"] = rotate_keys(rolled["k_cache"], shifts, base=BASE)
    manager.reset()
    for name, tokens_of_state in rolled.items():
        array = np.zeros(manager.state[name].shape, decoder.dtype)
        array[..., :32, :] = tokens_of_state
        manager.state[name] = NDArray(array)

    fresh = StateManager(function, (64,))
    for position, token in enumerate(tokens[positions]):
        decoder.step(fresh, token, position)
    keys, expected_keys = (arrays(m.state)["k_cache"] for m in (manager, fresh))
    assert 0 < np.abs(keys - expected_keys).max() <= ROLLED_KEYS[decoder.dtype]
    assert arrays(manager.state)["v_cache"].tobytes() == arrays(fresh.state)["v_cache"].tobytes()
    for position, token in enumerate(tokens[64:], 32):
        logits = decoder.step(manager, token, position)
        expected = decoder.step(fresh, token, position)
        assert np.abs(logits - expected).max() <= ROLLED_LOGITS[decoder.dtype]


# ---- bad input ----


def test_invalid_sizes_and_axes_raise_before_running(models):
    path = models["static"]
    small = state_specs(path, function="main_s64")
    with pytest.raises(CompatibilityError, match=r"no state of 128 positions at axis -2"):
        StateManager(small, (64, 128))
    with pytest.raises(CompatibilityError, match=r"source_size is 128, but .* have 64 positions"):
        other = state_specs(path, function="main_s128")
        plan_transition(small, other, 5, source_size=128)
    with pytest.raises(CompatibilityError, match=r"the target model is dynamic \(2x1x2x\?x8\)"):
        plan_transition(small, models["float16"], 5)
    with pytest.raises(CompatibilityError, match=r"int8.*float32|'rows'|has no state"):
        StateManager({64: small, 128: models["mixed"]})


def test_truncated_program_with_valid_hash_is_named(models, tmp_path):
    copy = tmp_path / "cut.aimodel"
    shutil.copytree(models["float16"], copy)
    data = (copy / "main.mlirb").read_bytes()
    for length in (0, 1, 100, len(data) // 2, len(data) - 1):
        (copy / "main.mlirb").write_bytes(data[:length])
        (copy / "main.hash").write_bytes(hashlib.sha256(data[:length]).digest())
        for checked in (True, False):
            with pytest.raises(FormatError, match=r"cut\.aimodel") as caught:
                state_specs(copy, verify=checked)
            assert caught.value.path == str(copy)


def test_damaged_copies_never_reach_the_reader(models, tmp_path):
    """Truncated and altered files: the exception names the file."""
    random = np.random.default_rng(3)
    source = models["float16"]
    assert verify(source) == verify(shutil.copytree(source, tmp_path / "good.aimodel"))
    for number in range(60):
        copy = tmp_path / f"{number}.aimodel"
        shutil.copytree(source, copy)
        name = ("main.mlirb", "main.hash")[number % 2]
        data = bytearray((copy / name).read_bytes())
        if number % 3:
            data[random.integers(len(data))] ^= 1 << random.integers(8)
        else:
            del data[random.integers(len(data)) :]
        (copy / name).write_bytes(data)
        for read in (verify, state_specs, lambda path: StateManager(path, SIZES)):
            with pytest.raises(ValueError, match=rf"{number}\.aimodel/main\.(mlirb|hash): "):
                read(copy)
        shutil.rmtree(copy)
