"""The demo's model and fixtures: NumPy equals torch; cache length does not change bits."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_model import LAYOUTS
from tries import tries

safetensors = pytest.importorskip("safetensors", reason="reads the fixture independently of us")

import mlstate.demo  # noqa: E402
from mlstate.demo.model import CharModel  # noqa: E402
from mlstate.kv import create_attention_size_mask, create_decode_mask  # noqa: E402

DATA = Path(mlstate.demo.__file__).parent / "data"
TOOLS = Path(__file__).resolve().parents[2] / "tools"
PACKAGES = {
    "model_256.mlpackage": {"main": {"kv_cache": (8, 2, 256, 32)}},
    "model_512.mlpackage": {"main": {"kv_cache": (8, 2, 512, 32)}},
    "model_multi.mlpackage": {
        "decode_256": {"kv_cache": (8, 2, 256, 32)},
        "prefill_512": {"kv_cache": (8, 2, 512, 32)},
    },
}


def read_fixture() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safetensors.safe_open(DATA / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def size_of(path: Path) -> int:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sum(file.stat().st_size for file in files)


def import_tool(name: str):
    if not (TOOLS / f"{name}.py").is_file():
        pytest.skip("the tools that made the fixtures are in a checkout only")
    sys.path.insert(0, str(TOOLS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings during the imports of coremltools and torch
            return importlib.import_module(name)
    finally:
        sys.path.remove(str(TOOLS))


@functools.cache
def shared_model() -> CharModel:
    return CharModel(*read_fixture())


@pytest.fixture(scope="module")
def model() -> CharModel:
    return shared_model()


@pytest.fixture(scope="module")
def prompt() -> str:
    return (DATA / "prompt.txt").read_text(encoding="ascii")


@pytest.fixture(scope="module")
def torch_models(torch):
    tool = import_tool("demo_torch_model")
    arrays, metadata = read_fixture()
    peer = tool.CharTransformer(tool.Config(**json.loads(metadata["config"]))).eval()
    peer.load_state_dict({k: torch.from_numpy(v.astype(np.float32)) for k, v in arrays.items()})
    return torch, tool, peer


@pytest.fixture(scope="module")
def package_tool():
    pytest.importorskip("torch", reason="the packages were converted from torch")
    if importlib.util.find_spec("coremltools") is None:
        pytest.skip("coremltools reads the packages here")
    return import_tool("make_demo_packages")


# -- the NumPy model against torch ---------------------------------------------------


@pytest.mark.torch
def test_steps_give_the_logits_of_torch(model, prompt, torch_models):
    torch, _, peer = torch_models
    tokens = model.encode(prompt)
    with torch.no_grad():
        expected = peer(torch.tensor([tokens]))[0].numpy()
    cache = model.new_cache(256)
    got = [model.step(token, place, cache) for place, token in enumerate(tokens)]
    # The cache rounds keys and values to float16; torch's pass over the whole sequence does not.
    np.testing.assert_allclose(got, expected, rtol=0.02, atol=0.06)
    assert (np.argmax(got, axis=1) == expected.argmax(axis=1)).mean() > 0.98


@pytest.mark.torch
@pytest.mark.parametrize(("context", "length"), [(256, 1), (512, 64)])
def test_the_module_behind_the_packages_agrees_with_numpy(
    model, prompt, torch_models, context, length
):
    torch, tool, peer = torch_models
    stateful = tool.StatefulTransformer(peer, context, length)
    tokens = model.encode(prompt)[: 128 if length > 1 else 40]  # a step takes a tenth of a second
    cache = model.new_cache(context)
    for begin in range(0, len(tokens), length):
        part = tokens[begin : begin + length]
        with torch.no_grad():
            expected = stateful(
                torch.tensor([part], dtype=torch.int32), torch.tensor([begin], dtype=torch.int32)
            )[0, -1].numpy()
        got = model.prefill(part, cache, position=begin)
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=1e-2)
    state = stateful.kv_cache.numpy()
    assert state.shape == cache.shape
    np.testing.assert_allclose(cache, state, rtol=5e-3, atol=5e-3)


def test_prefill_agrees_with_single_steps(model, prompt):
    tokens = model.encode(prompt)
    full_cache, split, single = (model.new_cache(512) for _ in range(3))
    at_once = model.prefill(tokens, full_cache)
    model.prefill(tokens[:100], split)
    in_two = model.prefill(np.array(tokens[100:]), split, position=100)
    for place, token in enumerate(tokens):
        stepped = model.step(token, place, single)
    np.testing.assert_allclose(at_once, stepped, rtol=2e-3, atol=1e-2)
    np.testing.assert_allclose(in_two, stepped, rtol=2e-3, atol=1e-2)
    np.testing.assert_allclose(full_cache, single, rtol=5e-3, atol=5e-3)
    assert not full_cache[:, :, len(tokens) :].any()


@pytest.mark.parametrize(("size", "sinks"), [(0, 0), (1, 3), (20, 0), (20, 4), (500, 4)])
def test_a_window_agrees_with_its_mask(model, prompt, size, sinks):
    """Reading the window alone, a mask in each step, and the rows of a mask in one prefill."""
    tokens = model.encode(prompt)[:60]
    windowed, masked, full_cache = (model.new_cache(64) for _ in range(3))
    rows = create_attention_size_mask(64, size, 0, sinks=sinks, rows=(0, 60), dtype=np.float32)
    at_once = model.prefill(tokens, full_cache, mask=rows, every=True)
    for place, token in enumerate(tokens):
        mask = create_decode_mask(64, size, place, sinks=sinks)
        expected = model.step(token, place, masked, mask=mask)
        got = model.step(token, place, windowed, attention_size=size, sinks=sinks)
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=1e-2)
        np.testing.assert_allclose(at_once[place], expected, rtol=2e-3, atol=1e-2)
    full = model.prefill(tokens, model.new_cache(64))
    assert np.allclose(got, full, rtol=2e-3, atol=1e-2) == (size == 500)


# -- bits ----------------------------------------------------------------------------


def layouts(cache: np.ndarray):
    """The same values in memory of other lengths, strides and alignments, followed by junk."""
    shape, room = cache.shape, cache.shape[2]
    for context in (room, room + 1, 300, 512):
        longer = np.full((*shape[:2], max(context, room), shape[3]), 7.5, np.float16)
        longer[:, :, :room] = cache
        yield longer
    yield from (make(cache) for name, make in LAYOUTS.items() if name != "swapped")
    for shift in (2, 6, 14, 30, 62):
        raw = np.empty(cache.nbytes + 64, np.uint8)
        shifted = raw[shift : shift + cache.nbytes].view(np.float16).reshape(shape)
        shifted[...] = cache
        yield shifted


@pytest.mark.parametrize("position", [0, 1, 7, 63, 128, 180, 255])
def test_logits_have_the_same_bits_in_any_cache(model, prompt, position):
    tokens = (model.encode(prompt) * 2)[: position + 1]
    cache = model.new_cache(256)
    if position:
        model.prefill(tokens[:-1], cache)
    fillers = []  # so that temporaries of the next call have other addresses
    expected = model.step(tokens[-1], position, cache.copy())
    for other in layouts(cache):
        fillers.append(np.empty(len(fillers) * 24 + 8, np.uint8))
        got = model.step(tokens[-1], position, other)
        assert got.tobytes() == expected.tobytes()
        again = model.prefill(tokens[-1:], other, position=position)
        assert again.tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=tries(25))
@given(contexts=st.lists(st.integers(40, 512), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_generation_has_the_same_bits_at_any_context(contexts, seed):
    model = shared_model()
    tokens = np.random.default_rng(seed).integers(96, size=30).tolist()
    results = set()
    for context in contexts:
        cache = model.new_cache(context)
        out = [model.prefill(tokens, cache).tobytes()]
        out += [model.step(token, 30 + k, cache).tobytes() for k, token in enumerate(tokens[:10])]
        results.add(b"".join(out) + cache[:, :, :40].tobytes())
    assert len(results) == 1


def test_step_writes_only_its_position(model):
    cache = np.full(model.new_cache(64).shape, 3.25, np.float16)
    model.step(5, 20, cache)
    assert (np.delete(cache, 20, axis=2) == 3.25).all()
    assert not (cache[:, :, 20] == 3.25).all()


# -- text ----------------------------------------------------------------------------


def test_the_prompt_fits_the_story(model, prompt):
    tokens = model.encode(prompt)
    assert 170 <= len(tokens) <= 190
    assert model.decode(tokens) == prompt


def test_the_model_knows_python(model, prompt):
    """It predicts the next character of unseen code well above chance."""
    tokens, cache = model.encode(prompt), model.new_cache(256)
    hits = 0
    for place, (token, following) in enumerate(itertools.pairwise(tokens)):
        hits += int(model.step(token, place, cache).argmax()) == following
    assert hits / len(tokens) > 0.5


def test_sampling_is_deterministic_and_greedy_at_zero(model, prompt):
    logits = model.prefill(model.encode(prompt), model.new_cache(256))
    runs = []
    for _ in range(2):
        generator = np.random.default_rng(3)
        runs.append([model.sample(logits, generator, temperature=1.0) for _ in range(50)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1
    assert model.sample(logits, generator, temperature=0) == logits.argmax()
    assert model.sample(logits, generator, temperature=1e-6) == logits.argmax()


def test_sampling_follows_the_chances(model):
    logits = np.full(96, -np.inf, np.float32)
    logits[[3, 90]] = np.log([0.25, 0.75])
    generator = np.random.default_rng(0)
    drawn = [model.sample(logits, generator, temperature=1.0) for _ in range(2000)]
    assert set(drawn) == {3, 90}
    assert 0.70 < drawn.count(90) / 2000 < 0.80


# -- bad input -----------------------------------------------------------------------

ROWS = np.zeros((1, 1, 1, 32))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda m, c: m.encode("a\tb"), ValueError, r"'\\t' at index 1"),
        (lambda m, c: m.decode([0, 96]), ValueError, "96 at index 1"),
        (lambda m, c: m.decode([0.5]), ValueError, "float64"),
        (lambda m, c: m.new_cache(0), ValueError, "expected 1 to 512"),
        (lambda m, c: m.new_cache(513), ValueError, "expected 1 to 512"),
        (lambda m, c: m.step(-1, 0, c), ValueError, "-1 at index 0"),
        (lambda m, c: m.step(0, 32, c), ValueError, "position 32 do not fit its 32"),
        (lambda m, c: m.step(0, -1, c), ValueError, "position -1"),
        (lambda m, c: m.prefill([], c), ValueError, "at least one"),
        (lambda m, c: m.prefill([[1]], c), ValueError, "flat sequence"),
        (lambda m, c: m.prefill([1] * 33, c), ValueError, "33 token"),
        (lambda m, c: m.step(0, 0, c.astype(np.float32)), TypeError, "float32"),
        (lambda m, c: m.step(0, 0, c.tolist()), TypeError, "list"),
        (lambda m, c: m.step(0, 0, c[:7]), ValueError, r"\(7, 2, 32, 32\)"),
        (lambda m, c: m.step(0, 0, c[0]), ValueError, r"expected \(8, 2, context, 32\)"),
        (lambda m, c: m.sample(np.zeros(96, np.float32), None, temperature=-1), ValueError, "-1"),
        (lambda m, c: m.step(1, 5, c, mask=ROWS[..., :5]), ValueError, "mask: got .* at least 6"),
        (lambda m, c: m.step(1, 5, c, mask=ROWS[0, 0]), ValueError, "mask: got shape"),
        (lambda m, c: m.prefill([1, 2], c, mask=ROWS), ValueError, "mask: got shape"),
        (lambda m, c: m.step(1, 5, c, mask=ROWS, attention_size=2), ValueError, "exclude each"),
        (
            lambda m, c: m.step_in_slot(1, 900, c, slot=32, slots=32),
            ValueError,
            "do not fit its 32",
        ),
        (lambda m, c: m.step_in_slot(1, 900, c, slot=0, slots=33), ValueError, "do not fit its 32"),
        (lambda m, c: m.step_in_slot(1, 900, c, slot=0, slots=0), ValueError, "do not fit its 32"),
    ],
)
def test_invalid_calls_keep_the_cache(model, call, error, text):
    cache = model.new_cache(32)
    with pytest.raises(error, match=text):
        call(model, cache)
    assert not cache.any()


# -- the fixtures --------------------------------------------------------------------


def test_fixtures_are_small():
    sizes = {path.name: size_of(path) for path in DATA.iterdir()}
    assert set(sizes) == {"model.safetensors", "prompt.txt", *PACKAGES}
    assert sizes["model.safetensors"] < 2**20
    assert all(sizes[name] < 700 * 1024 for name in PACKAGES)
    assert sum(sizes.values()) < 2.5 * 2**20


def test_weights_file_records_its_origin():
    arrays, metadata = read_fixture()
    assert {"config", "vocabulary", "python_version", "training_text", "seed"} <= set(metadata)
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float16)}
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert 200_000 <= sum(array.size for array in arrays.values()) <= 250_000


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_name_no_machine(name):
    for path in (DATA / name).rglob("*"):
        if path.is_file() and path.name != "weight.bin":
            content = path.read_bytes()
            assert not any(word in content for word in (b"/root/", b"/home/", b"/tmp/", b"/work/"))


@pytest.mark.coremltools
@pytest.mark.parametrize("name", PACKAGES)
def test_coremltools_reads_the_expected_states(package_tool, name):
    assert package_tool.reported_states(DATA / name) == PACKAGES[name]


@pytest.mark.coremltools
@pytest.mark.parametrize("name", PACKAGES)
def test_packages_hold_the_weights_of_the_file(package_tool, name):
    peer = package_tool.load_model(DATA / "model.safetensors")
    package_tool.check_weights(DATA / name, peer)
    damaged = package_tool.load_model(DATA / "model.safetensors")
    damaged.layers[3].down.weight.data[0, 0] += 1
    with pytest.raises(SystemExit, match=r"layers\.3\.down"):
        package_tool.check_weights(DATA / name, damaged)


@pytest.mark.long
def test_texts_that_the_model_has_not_seen_are_code_of_other_files(model):
    tool = import_tool("demo_text")
    texts = tool.load_unseen(20, 300)
    seen, _ = tool.load_text()
    assert len(set(texts)) == 20 and {len(text) for text in texts} == {300}
    assert all(model.decode(model.encode(text)) == text for text in texts)
    assert not [text for text in texts if text in seen]
