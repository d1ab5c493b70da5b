"""KV caches among the named states of a checkpoint."""

import json
import operator

import numpy as np
import pytest

import mlstate
from mlstate import CompatibilityError, FormatError
from mlstate.checkpoint import save_async
from mlstate.checkpoint._states import tree
from mlstate.kv import CacheEntry, CacheSpec, CacheState, KVState, RollingKVState


def grown_cache():
    cache = KVState((2, 1, 256, 4), capacity=1024)
    cache.array[:] = np.random.default_rng(1).random(cache.shape)
    cache.resize(512)
    return cache


def rolling_cache(tokens=11):
    cache = RollingKVState((2, 1, 8, 4), dtype=np.float32, sinks=1)
    cache.append(np.arange(8 * tokens, dtype=np.float32).reshape(2, 1, tokens, 4))
    return cache


def hybrid_cache(length=12):
    spec = CacheSpec(
        [
            CacheEntry("0.keys", "full", (1, 2, 16, 4), "float16", layer=0, role="keys"),
            CacheEntry("1.keys", "sliding", (1, 2, 8, 4), "float32", sinks=1, next_slot=3),
            CacheEntry("2.keys", "quantized", (1, 2, 16, 64), "float16", bits=8, group=64),
            CacheEntry("3.state", "recurrent", (1, 2, 3), "float32"),
        ]
    )
    fill = np.random.default_rng(2)
    arrays = {
        name: (fill.random(shape) * 100).astype(dtype)
        for entry in spec
        for name, (shape, dtype) in entry.arrays.items()
    }
    return CacheState(spec, arrays, length)


def facts(cache):
    """Everything that two equal caches have in common."""
    if isinstance(cache, CacheState):
        ring = cache.next_slot("1.keys"), cache.positions("1.keys").tolist()
        arrays = {name: array.tobytes() for name, array in cache.arrays.items()}
        return cache.spec, cache.length, ring, arrays
    if isinstance(cache, KVState):
        return cache.shape, cache.seq_axis, cache.dtype, cache.array.tobytes()
    counts = cache.length, cache.evicted, cache.next_position, cache.positions().tolist()
    return cache.shape, cache.seq_axis, cache.sinks, counts, cache.array.tobytes()


CACHES = {"grown": grown_cache, "rolling": rolling_cache, "hybrid": hybrid_cache}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_caches_load_as_the_same_kind_with_their_positions(tmp_path, make):
    cache = make()
    states = {"kv": cache, "run": {"caches": {"a": cache}, "position": 200}}
    mlstate.save(tmp_path / "c", states=states)
    loaded = mlstate.load(tmp_path / "c").states
    for copy in (loaded["kv"], loaded["run"]["caches"]["a"]):
        assert type(copy) is type(cache)
        assert facts(copy) == facts(cache)
    assert getattr(loaded["kv"], "capacity", None) == getattr(cache, "capacity", None)


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_targets_are_filled_in_place_and_continue(tmp_path, make):
    cache = make()
    expected = facts(cache)
    save_async(tmp_path / "c", states={"kv": cache, "run": {"kv": cache, "n": 1}}).wait()
    arrays = cache.arrays if isinstance(cache, CacheState) else {"": cache.array}
    for array in arrays.values():
        array[...] = 0
    if isinstance(cache, KVState):
        cache.resize(64)
    elif isinstance(cache, RollingKVState):
        cache.trim(3)
    else:
        cache.advance(2)
    mlstate.load(tmp_path / "c", into={"states": {"kv": cache, "run": {"kv": cache, "n": 0}}})
    assert facts(cache) == expected
    after = cache.arrays if isinstance(cache, CacheState) else {"": cache.array}
    assert all(np.shares_memory(arrays[name], after[name]) for name in arrays)


@pytest.mark.parametrize(
    ("make", "target", "text"),
    [
        (grown_cache, KVState((2, 1, 256, 4)), r"call reserve\(512\) before.* room for 256"),
        (grown_cache, KVState((3, 1, 512, 4)), r"the shape \[3, 1, 'any', 4\]"),
        (grown_cache, KVState((2, 1, 512, 4), dtype=np.float32), "dtype float32.* float16"),
        (grown_cache, rolling_cache(), "class RollingKVState.* KVState"),
        (rolling_cache, RollingKVState((2, 1, 8, 4), dtype=np.float32), "the sinks 0.* 1"),
        (hybrid_cache, grown_cache(), "class KVState.* CacheState"),
    ],
)
def test_other_layouts_are_refused_before_any_change(tmp_path, make, target, text):
    mlstate.save(tmp_path / "c", {"w": np.ones(3)}, states={"kv": make()})
    before, model = facts(target), {"w": np.zeros(3)}
    with pytest.raises(CompatibilityError, match=text):
        mlstate.load(tmp_path / "c", into={"model": model, "states": {"kv": target}})
    assert facts(target) == before
    assert not model["w"].any()


def test_caches_in_lists_are_filled_in_place(tmp_path):
    caches = [make() for make in CACHES.values()]
    expected = [facts(cache) for cache in caches]
    mlstate.save(tmp_path / "c", states={"kv": caches, "run": {"kv": [[caches[0]], 7]}})
    caches[0].array[:] = 0
    caches[1].trim(2)
    caches[2].advance(1)
    changed = [facts(cache) for cache in caches]
    for wrong in (caches[:2], [*caches[:2], caches[0]]):
        with pytest.raises(CompatibilityError, match=r"states\['kv'\]"):
            mlstate.load(tmp_path / "c", into={"states": {"kv": list(wrong)}})
        assert [facts(cache) for cache in caches] == changed
    target, inner = list(caches), grown_cache()
    inner.resize(100)
    run = {"kv": [[inner], 0]}
    mlstate.load(tmp_path / "c", into={"states": {"kv": target, "run": run}})
    assert all(map(operator.is_, target, caches)) and run["kv"][0][0] is inner
    assert [facts(cache) for cache in caches] == expected
    assert facts(inner) == expected[0] and run["kv"][1] == 7


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("places", [("['a']", "['b']"), ("['a'][0]", "['a'][1]['x']")])
def test_a_cache_that_is_the_target_of_two_names_is_refused(tmp_path, make, places):
    """Without the error, the last name would win."""
    is_nested = places[0] != "['a']"

    def states_of(first, second):
        return {"a": [first, {"x": second}]} if is_nested else {"a": first, "b": second}

    stored, target = make(), make()
    arrays = target.arrays if isinstance(target, CacheState) else {"": target.array}
    next(iter(arrays.values()))[...] = 7
    mlstate.save(tmp_path / "c", states=states_of(stored, target))
    before = facts(target)
    with pytest.raises(CompatibilityError) as caught:
        mlstate.load(tmp_path / "c", into={"states": states_of(target, target)})
    first, second = (f"states{place}" for place in places)
    assert str(caught.value).startswith(f"{second}: the target is also that of {first}, and the")
    assert caught.value.name == second and facts(target) == before
    mlstate.save(tmp_path / "c", states=states_of(stored, stored))
    mlstate.load(tmp_path / "c", into={"states": states_of(target, target)})
    assert facts(target) == facts(stored)


@pytest.mark.parametrize("kind", ["generator", "object", "dict", "list"])
def test_an_object_that_is_the_target_of_two_values_is_refused(tmp_path, kind):
    class Counter:
        count = 0

        def state_dict(self):
            return {"count": self.count, "array": np.full(3, self.count)}

        def load_state_dict(self, state):
            self.count = state["count"]

    values = {
        "generator": np.random.default_rng(),
        "object": Counter(),
        "dict": {"x": "y"},
        "list": [True],
    }
    others = {"generator": np.random.default_rng(3), "object": Counter(), "dict": {"x": None}}
    others["object"].count = 1
    mlstate.save(tmp_path / "c", states={"a": values[kind], "b": others.get(kind, [1])})
    target = {"a": values[kind], "b": values[kind]}
    with pytest.raises(CompatibilityError, match=r"^states\['b'\]: .* that of states\['a'\]"):
        mlstate.load(tmp_path / "c", into={"states": target})
    mlstate.save(tmp_path / "c", states=target, overwrite=True)
    mlstate.load(tmp_path / "c", into={"states": target})


def test_cache_states_with_other_entries_are_refused(tmp_path):
    cache = hybrid_cache()
    mlstate.save(tmp_path / "c", states={"kv": cache, "n": 1})
    first = cache.spec[0]
    shorter = CacheState(CacheSpec([first]), {first.name: cache.arrays[first.name]}, 12)
    with pytest.raises(CompatibilityError, match="another number of entries"):
        mlstate.load(tmp_path / "c", into={"states": {"kv": shorter}})
    arrays = {name: array.copy() for name, array in cache.arrays.items()}
    arrays["3.state"].flags.writeable = False
    with pytest.raises(CompatibilityError, match="read-only"):
        mlstate.load(tmp_path / "c", into={"states": {"kv": CacheState(cache.spec, arrays, 3)}})
    with pytest.raises(CompatibilityError, match="the target is a KVState"):
        mlstate.load(tmp_path / "c", into={"states": {"n": grown_cache()}})


def test_a_later_refusal_returns_the_caches(tmp_path):
    class Refusing:
        def load_state_dict(self, state):
            raise RuntimeError("another dataset")

    caches = {name: make() for name, make in CACHES.items()}
    mlstate.save(tmp_path / "c", states={**caches, "loader": {"at": 3}})
    caches["grown"].resize(100)
    caches["rolling"].trim(2)
    caches["hybrid"].advance(1)
    before = {name: facts(cache) for name, cache in caches.items()}
    with pytest.raises(CompatibilityError, match="another dataset"):
        mlstate.load(tmp_path / "c", into={"states": {**caches, "loader": Refusing()}})
    assert {name: facts(cache) for name, cache in caches.items()} == before


def test_snapshots_before_a_load_do_not_restore_its_tokens(tmp_path):
    cache = hybrid_cache()
    mlstate.save(tmp_path / "c", states={"kv": cache})
    snapshot = cache.snapshot()
    mlstate.load(tmp_path / "c", into={"states": {"kv": cache}})
    with pytest.raises(CompatibilityError, match="had only 0 tokens since"):
        cache.restore(snapshot)


def test_caches_of_torch_tensors_load_as_tensors_into_their_cache(tmp_path):
    torch = pytest.importorskip("torch")
    entry = CacheEntry("0.keys", "full", (1, 2, 16, 4), "bfloat16")
    cache = CacheState(CacheSpec([entry]), {"0.keys": torch.randn(entry.shape).bfloat16()}, 5)
    expected = cache.arrays["0.keys"].clone()
    mlstate.save(tmp_path / "c", states={"kv": cache})
    cache.arrays["0.keys"].zero_()
    mlstate.load(tmp_path / "c", into={"states": {"kv": cache}})
    assert torch.equal(cache.arrays["0.keys"], expected)
    assert mlstate.load(tmp_path / "c").states["kv"].length == 5
    on_device = mlstate.load(tmp_path / "c", device="cpu").states["kv"]
    assert torch.equal(on_device.arrays["0.keys"], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_caches_of_arrays_and_of_tensors_fill_each_other(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    from mlstate.integrations.torch._tensors.state import arrays_of

    entry = CacheEntry("0.keys", "full", (1, 2, 16, 4), dtype)
    tensor = torch.arange(128).reshape(entry.shape).to(getattr(torch, dtype))
    array = arrays_of({"": tensor})[""].copy()
    for source in (array, tensor):
        cache = CacheState(CacheSpec([entry]), {"0.keys": source}, 5)
        mlstate.save(tmp_path / "c", states={"kv": cache})
        for target in (np.zeros_like(array), torch.zeros_like(tensor)):
            other = CacheState(CacheSpec([entry]), {"0.keys": target}, 9)
            mlstate.load(tmp_path / "c", into={"states": {"kv": other}})
            assert other.arrays["0.keys"] is target and other.length == 5
            got = target if isinstance(target, np.ndarray) else arrays_of({"": target})[""]
            assert got.tobytes() == array.tobytes()


def test_a_cache_as_a_model_names_the_call_to_use(tmp_path):
    for model in ({"kv": grown_cache()}, {"kv": hybrid_cache()}, rolling_cache()):
        with pytest.raises(TypeError, match=r"pass (the|a) cache as states="):
            mlstate.save(tmp_path / "c", model)
    with pytest.raises(TypeError, match="from_array"):
        KVState(np.ones((1, 1, 8, 4)))


class OwnCache(KVState):
    """A subclass, whose attributes mlstate does not know."""


def test_diff_compares_the_content_of_caches(tmp_path):
    caches = {name: make() for name, make in CACHES.items()}
    mlstate.save(tmp_path / "a", states=caches)
    assert mlstate.diff(tmp_path / "a", tmp_path / "a").identical
    caches["grown"].array[0, 0, 3, 1] += 1
    caches["hybrid"].arrays["0.keys"][0, 0, 3, 1] += 1
    mlstate.save(tmp_path / "b", states=caches)
    different = mlstate.diff(tmp_path / "a", tmp_path / "b").changes
    assert sorted(each.name for each in different) == [
        "states.grown.array",
        "states.hybrid.arrays.0.keys",
    ]


def test_subclasses_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"states\['kv'\] is a .*OwnCache, which cannot be stored"):
        mlstate.save(tmp_path / "c", states={"kv": OwnCache((2, 1, 8, 4))})


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_malformed_descriptions_raise_format_errors(make):
    encoded = tree.encode(make(), "kv")
    node = json.loads(encoded.text)
    wrong = [{**node, "class": "dict"}, {**node, "values": []}, {**node, "values": {}}]
    for name in node["values"]:
        for value in (None, -1, 1 << 50, 1 << 70, "x", [], {}, [{}], {"$": "float", "value": "a"}):
            wrong.append({**node, "values": {**node["values"], name: value}})
    refused = 0
    for each in wrong:
        arrays = tree.whole_arrays(encoded)
        header = tree.pack_header(tree.Tree(json.dumps(each).encode(), {}), arrays)
        packed = b"".join([header, *(array.tobytes() for array in arrays.values())])
        try:
            tree.unpacked(np.frombuffer(packed, np.uint8), "kv")
        except (FormatError, MemoryError):
            refused += 1
    assert refused >= len(wrong) - 4  # some numbers are valid, such as another axis


def ring_cache(tokens, length, next_slot):
    entry = CacheEntry("keys", "sliding", (1, 1, 4, 1), "float32", next_slot=next_slot)
    array = np.array(tokens, np.float32).reshape(entry.shape)
    return CacheState(CacheSpec([entry]), {"keys": array}, length)


@pytest.mark.parametrize("slot", [None, 0, 3])
@pytest.mark.parametrize("loaded_slot", [None, 1])
def test_a_snapshot_from_before_a_load_restores_the_order_of_the_ring(tmp_path, slot, loaded_slot):
    cache = ring_cache([10, 11, 12, 13], 14, slot)
    ordered, next_slot = cache.ordered("keys"), cache.next_slot("keys")
    before = cache.snapshot()
    mlstate.save(tmp_path / "c", states={"kv": ring_cache([5, 6, 3, 4], 7, loaded_slot)})
    mlstate.load(tmp_path / "c", into={"states": {"kv": cache}})
    cache.restore(before)
    for state in (cache, cache.copy()):
        assert state.length == 14
        assert state.next_slot("keys") == next_slot
        np.testing.assert_array_equal(state.ordered("keys"), ordered)


def two_entries(keys, values):
    spec = CacheSpec([CacheEntry(name, "full", (1, 1, 4, 2), "float32") for name in ("k", "v")])
    return CacheState(spec, {"k": keys, "v": values}, 4)


def filled(value):
    return np.full((1, 1, 4, 2), value, np.float32)


@pytest.mark.parametrize("kind", ["same", "view", "overlapping", "torch"])
def test_a_load_refuses_arrays_of_a_cache_that_share_memory(tmp_path, kind):
    memory = np.zeros((1, 1, 6, 2), np.float32)
    keys = memory[:, :, :4]
    values = {"same": keys, "view": keys[:], "overlapping": memory[:, :, 2:]}.get(kind)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        keys, values = torch.from_numpy(keys), torch.from_numpy(memory)[:, :, 1:5]
    target = two_entries(keys, values)
    target.trim(1)
    mlstate.save(tmp_path / "c", states={"kv": two_entries(filled(1), filled(2))})
    with pytest.raises(CompatibilityError, match="k: it shares elements with 'v', so it"):
        mlstate.load(tmp_path / "c", into={"states": {"kv": target}})
    assert not memory.any() and target.length == 3


def test_arrays_of_the_same_elements_load_equal_values(tmp_path):
    keys = filled(0)
    mlstate.save(tmp_path / "c", states={"kv": two_entries(filled(1), filled(1))})
    mlstate.load(tmp_path / "c", into={"states": {"kv": two_entries(keys, keys[:])}})
    np.testing.assert_array_equal(keys, filled(1))


def test_a_load_refuses_caches_that_share_memory_with_one_another(tmp_path):
    memory = np.zeros((1, 1, 6, 2), np.float32)
    targets = {
        "a": two_entries(memory[:, :, :4], filled(0)),
        "b": [two_entries(filled(0), memory[:, :, 2:])],
    }
    stored = {"a": two_entries(filled(1), filled(2)), "b": [two_entries(filled(3), filled(4))]}
    mlstate.save(tmp_path / "c", states=stored)
    with pytest.raises(ValueError, match=r"\['a'\]\['k'\] and .*\['b'\]\[0\]\['v'\] share memory"):
        mlstate.load(tmp_path / "c", into={"states": targets})
    assert not memory.any() and not targets["a"].arrays["v"].any()


@pytest.mark.parametrize("other", ["cache", "model"])
def test_caches_over_the_memory_of_another_target_are_refused(tmp_path, other):
    first, second = hybrid_cache(), hybrid_cache(11)
    name, array = next(iter(first.arrays.items()))
    mlstate.save(tmp_path, {"w": array}, states={"a": first, "b": second})
    target = hybrid_cache(5)
    before = facts(target)
    into = {"states": {"a": target, "b": CacheState(target.spec, dict(target.arrays), 5)}}
    if other == "model":
        into = {"model": {"w": target.arrays[name]}, "states": {"a": target}}
    with pytest.raises(ValueError, match=r"share memory, .* copy of one"):
        mlstate.load(tmp_path, into=into)
    assert facts(target) == before
    mlstate.save(tmp_path, {"w": array}, states={"a": first, "b": first})
    mlstate.load(tmp_path, into={"states": {"a": target, "b": target}})
    assert facts(target) == facts(first)


@pytest.mark.parametrize("make", [grown_cache, rolling_cache])
def test_targets_over_the_memory_of_a_growing_or_rolling_cache_are_refused(tmp_path, make):
    target = make()
    array = target.array
    spec = CacheSpec([CacheEntry("k", "recurrent", array.shape, array.dtype.name)])
    over = CacheState(spec, {"k": array}, 5)
    mlstate.save(tmp_path, {"w": array * 0}, states={"c": over, "k": make()})
    before = array.copy()
    for into in (
        {"states": {"c": over, "k": target}},
        {"states": {"k": target}, "model": {"w": array}},
    ):
        with pytest.raises(ValueError, match=r"share memory"):
            mlstate.load(tmp_path, into=into)
        assert (target.array == before).all()
    mlstate.load(tmp_path, into={"states": {"k": target}})
