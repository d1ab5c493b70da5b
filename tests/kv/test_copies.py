"""Copies and pickles of every cache class are values: changing one never changes the other."""

import copy
import pickle
import threading

import numpy as np
import pytest
from kv_model import ALL_DTYPES, assert_same_bits, dtype_of, random_bits

from mlstate import CapacityError, _core
from mlstate.coreml import FakeMLState
from mlstate.kv import (
    CacheEntry,
    CacheSpec,
    CacheState,
    CombinedStrategy,
    ContextLadder,
    KVState,
    RollingKVState,
    StateTransitionManager,
)


def pickled(protocol):
    return lambda thing: pickle.loads(pickle.dumps(thing, protocol))


VALUES = [copy.copy, copy.deepcopy, *(pickled(protocol) for protocol in (2, 4, 5))]
COPIES = [lambda thing: thing.copy(), *VALUES]


class Added:
    """Attributes that the constructor of a subclass requires, and a slot."""

    __slots__ = ()

    def add(self, values):
        self.label, self.values = "a", values
        return self


class NamedKVState(Added, KVState):
    __slots__ = ("__dict__", "label")

    def __init__(self, label):
        super().__init__((1, 2, 8, 4), 16, np.float32)
        self.add([label])


class NamedRolling(Added, RollingKVState):
    def __init__(self, label):
        super().__init__((1, 2, 8, 4), dtype=np.float32, sinks=1)
        self.add([label])


class NamedCache(Added, CacheState):
    def __init__(self, label):
        spec = CacheSpec([CacheEntry("k", "sliding", (1, 4, 1), "float32", next_slot=1)])
        super().__init__(spec, {"k": np.ones((1, 4, 1), np.float32)}, 9)
        self.add([label])


class NamedSpec(Added, CacheSpec):
    def __init__(self, label):
        super().__init__([CacheEntry("k", "sliding", (1, 4, 1), "float32", next_slot=1)])
        self.add([label])


class NamedManager(StateTransitionManager):
    pass


# ---- KVState ----


@pytest.mark.parametrize("make", COPIES)
def test_a_kv_state_is_copied_by_value(make):
    state = KVState((2, 3, 8, 5), 16, np.float16)
    state.array[...] = 7
    state.resize(6)
    other = make(state)
    assert (other.shape, other.capacity, other.seq_axis) == ((2, 3, 6, 5), 16, 2)
    assert other.dtype == state.dtype and (other.array == 7).all()
    other.array[...] = 1
    other.resize(12, 2)
    other.reserve(40)
    assert state.shape == (2, 3, 6, 5) and state.capacity == 16 and (state.array == 7).all()
    state.array[...] = 3
    state.reserve(20)  # the copy holds no view of it
    assert (other.array[:, :, :2] == 1).all() and not other.array[:, :, 2:].any()


@pytest.mark.parametrize("name", ALL_DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 3])
def test_caches_of_any_dtype_and_axis_are_copied_bit_by_bit(name, axis):
    shape = (2, 3, 4, 5)
    state = KVState.from_array(random_bits(shape, dtype_of(name), 1), 9, seq_axis=axis)
    ring = RollingKVState(shape, None, dtype_of(name), seq_axis=axis)
    ring.append(random_bits((*shape[:axis], 6, *shape[axis + 1 :]), dtype_of(name), 2))
    for make in COPIES:
        for thing in (state, ring):
            assert_same_bits(make(thing).array, thing.array)
        assert (make(ring).positions() == ring.positions()).all()


@pytest.mark.parametrize("make", COPIES)
def test_empty_and_byte_swapped_caches_are_copied(make):
    empty = make(KVState((2, 0, 4), 6, ">f4"))
    assert empty.shape == (2, 0, 4) and empty.capacity == 6 and empty.dtype == np.dtype(">f4")
    ring = RollingKVState((1, 3, 1), None, ">i2")
    ring.append(np.arange(4, dtype=">i2").reshape(1, 4, 1))
    other = make(ring)
    assert other.dtype == np.dtype(">i2") and other.ordered().ravel().tolist() == [1, 2, 3]


def test_copies_while_another_thread_resizes_are_whole():
    state, stop = KVState((4, 8, 4), 64, np.int32), threading.Event()
    state.array[...] = 5

    def resize():
        while not stop.is_set():
            for length in (1, 64, 8):
                state.resize(length)

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        for _ in range(200):
            other = state.copy()
            assert other.capacity == 64 and other.seq_length in (1, 8, 64)
            assert set(np.unique(other.array)) <= {0, 5}
    finally:
        stop.set()
        thread.join()


# ---- RollingKVState ----


def histories():
    """Rings after appends and trims that leave every kind of counter."""
    for sinks in (0, 1, 3):
        for steps in ([3], [9, -2], [9, -9], [9, -6, 2], [40, -1], [2, -2], [9, -7, 1]):
            ring = RollingKVState((2, 5, 3), dtype=np.float32, sinks=sinks)
            for count in steps:
                if count > 0:
                    first = ring.next_position
                    tokens = np.arange(first, first + count, dtype=np.float32) + 1
                    ring.append(np.ones((2, count, 3), np.float32) * tokens[:, None])
                else:
                    ring.trim(min(-count, ring.length))
            yield ring


@pytest.mark.parametrize("make", COPIES)
def test_copied_rolling_cache_continues_identically(make):
    for ring in histories():
        other = make(ring)
        for step in range(4):
            for name in ("length", "evicted", "next_position", "sinks", "capacity", "seq_axis"):
                assert getattr(other, name) == getattr(ring, name), name
            assert_same_bits(other.array, ring.array)
            assert_same_bits(other.ordered(), ring.ordered())
            assert (other.positions() == ring.positions()).all()
            for each in (ring, other):
                each.append(np.full((2, 2, 3), step + 50, np.float32))
                each.trim(1)
        before = ring.array.copy()
        other.append(np.full((2, 4, 3), -1, np.float32))
        other.array[...] = -2
        assert_same_bits(ring.array, before)


def test_a_damaged_pickle_of_a_rolling_cache_is_refused():
    ring = _core.RollingBuffer((1, 4, 1), None, "f4", 1, 1)
    slots = np.zeros((1, 4, 1), np.float32)
    for counters in [(0, 3, 0), (9, 3, 8), (1, 40, 0), (1, 2**63 - 1, 0), (2**62, 3, 2**62)]:
        with pytest.raises(CapacityError, match="cannot have evicted"):
            ring.fill(slots, *counters)
    with pytest.raises(CapacityError, match="oldest -1 is negative"):
        ring.fill(slots, -1, 3, 0)
    for wrong in (slots[:, :3], slots[0], slots.astype("f8"), ring.view()):
        with pytest.raises(ValueError, match=r"slots|tokens"):
            ring.fill(wrong, 1, 3, 0)
    with pytest.raises(TypeError):
        ring.fill("text", 1, 3, 0)
    assert ring.counts() == (0, 0, 0, 1)


# ---- CacheState, CacheSpec, CacheEntry ----


def cache_state():
    entries = [
        CacheEntry("full", "full", (2, 8, 4), "float32"),
        CacheEntry("ring", "sliding", (2, 6, 4), "float16", sinks=1, next_slot=3),
        CacheEntry("state", "recurrent", (5,), "float32"),
        CacheEntry("blob", "opaque", (9,), "uint8"),
    ]
    arrays = {e.name: random_bits(e.shape, e.dtype, i) for i, e in enumerate(entries)}
    return CacheState(CacheSpec(entries), arrays, 8)


@pytest.mark.parametrize("make", COPIES)
def test_a_cache_state_is_copied_by_value(make):
    state = cache_state()
    content = {name: array.copy() for name, array in state.arrays.items()}
    state.trim(0)
    other = make(state)
    assert (other.length, other.spec, other.next_slot("ring")) == (8, state.spec, 3)
    assert other.positions("ring").tolist() == state.positions("ring").tolist()
    for name, array in other.arrays.items():
        assert_same_bits(array, content[name])
        array[...] = 0
        assert_same_bits(state.arrays[name], content[name])
    other.arrays["full"].setflags(write=False)
    wider = CacheState(other.spec, other.arrays, other.length)
    assert wider.next_slot("ring") == 3


@pytest.mark.parametrize("make", COPIES)
def test_the_slot_of_a_copied_ring_is_the_current_one(make):
    ring = CacheEntry("k", "sliding", (1, 6, 1), "float32", sinks=1, next_slot=3)
    state = CacheState(CacheSpec([ring]), {"k": np.zeros((1, 6, 1), np.float32)}, 20)
    state.advance(4)
    other = make(state)
    assert other.next_slot("k") == state.next_slot("k") == 2
    other.advance(1)
    assert (state.next_slot("k"), other.next_slot("k"), state.length) == (2, 3, 24)
    assert other.positions("k").tolist() == [0, 23, 24, 20, 21, 22]


@pytest.mark.parametrize("make", COPIES)
def test_torch_tensors_of_a_cache_state_are_copied(make):
    torch = pytest.importorskip("torch")
    base = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    with torch.inference_mode():
        frozen = torch.ones(3)
    arrays = {"k": base[:, :, ::2].transpose(0, 1), "r": frozen}
    entries = [
        CacheEntry("k", "full", arrays["k"].shape, base.dtype),
        CacheEntry("r", "recurrent", (3,), "float32"),
    ]
    state = CacheState(CacheSpec(entries), arrays, 1)
    other = make(state)
    assert torch.equal(other.arrays["k"], arrays["k"]) and type(other.arrays["k"]) is type(base)
    base.zero_()
    assert other.arrays["k"].any()
    with torch.inference_mode():
        other.arrays["r"].zero_()
    assert frozen.all()


@pytest.mark.parametrize("make", COPIES)
def test_layers_that_share_their_keys_share_them_in_a_copy(make):
    keys = np.zeros((1, 4, 1), np.float32)
    spec = CacheSpec(CacheEntry(f"{i}.k", "full", (1, 4, 1), "float32") for i in range(3))
    state = CacheState(spec, {"0.k": keys, "1.k": keys[:], "2.k": keys.copy()}, 0)
    other = make(state)
    other.arrays["0.k"][...] = 1
    assert other.arrays["1.k"].all() and not other.arrays["2.k"].any() and not keys.any()


@pytest.mark.parametrize("make", COPIES)
def test_tensors_of_a_graph_are_copied(make):
    torch = pytest.importorskip("torch")
    keys = torch.ones(1, 4, 1, requires_grad=True) * 2
    entry = CacheEntry("k", "full", (1, 4, 1), "float32")
    other = make(CacheState(CacheSpec([entry]), {"k": keys}, 0))
    assert (other.arrays["k"] == 2).all() and not other.arrays["k"].requires_grad


def test_a_deep_copy_keeps_a_model_and_its_state_together():
    array = np.zeros((1, 4, 1), np.float32)
    spec = CacheSpec([CacheEntry("k", "full", (1, 4, 1), "float32")])
    pair = {"layer": array, "state": CacheState(spec, {"k": array}, 0)}
    other = copy.deepcopy(pair)
    assert other["state"].arrays["k"] is other["layer"] is not array


@pytest.mark.parametrize("make", VALUES)
def test_entries_and_specs_are_copied_with_their_slot(make):
    entry = CacheEntry("k", "sliding", (1, 4, 1), "float32", next_slot=1, layer=3, role="keys")
    assert make(entry) == entry and make(entry).next_slot == 1
    spec = make(CacheSpec([entry]))
    assert spec == CacheSpec([entry]) and spec["k"].next_slot == 1


def test_an_entry_of_an_earlier_version_has_no_slot():
    entry = CacheEntry("k", "sliding", (1, 4, 1), "float32")
    state = {name: value for name, value in vars(entry).items() if name != "next_slot"}
    old = object.__new__(CacheEntry)
    old.__setstate__(state)
    assert vars(old) == vars(entry)


# ---- subclasses ----


@pytest.mark.parametrize("make", VALUES)
@pytest.mark.parametrize("cls", [NamedKVState, NamedRolling, NamedCache, NamedSpec])
def test_a_subclass_keeps_its_class_and_attributes(cls, make):
    thing = cls("b")
    other = make(thing)
    assert type(other) is cls and (other.label, other.values) == ("a", ["b"])
    assert (other.values is thing.values) == (make is copy.copy)
    other.label = "c"
    assert thing.label == "a"
    if cls is NamedCache:
        assert other.next_slot("k") == 1 and other.arrays["k"] is not thing.arrays["k"]
        assert not np.shares_memory(other.arrays["k"], thing.arrays["k"])
    elif cls is not NamedSpec:
        assert not np.shares_memory(other.array, thing.array)


# ---- the other classes ----


@pytest.mark.parametrize("make", VALUES)
def test_managers_and_strategies_are_independent(make):
    manager = NamedManager()
    manager.register_model("small", 256)
    other = make(manager)
    other.register_model("large", 512)
    other.models["small"]["num_layers"] = 9
    assert type(other) is NamedManager and list(manager.models) == ["small"]
    assert manager.models["small"]["num_layers"] is None
    for thing in (ContextLadder([8, 16]), CombinedStrategy(prefill=16, generate=(8, 4))):
        assert make(thing) == thing


@pytest.mark.parametrize("make", VALUES)
def test_a_fake_state_is_independent(make):
    state = FakeMLState({"k": (1, 1, 2, 2)})
    other = make(state)
    other.write_state("k", np.ones((1, 1, 2, 2), np.float32))
    assert not state.read_state("k").any() and (state.writes, other.writes) == (0, 1)


class Model:
    """A model with one state."""

    def make_state(self):
        raise AssertionError("no state is needed")


def manager_of(kind):
    package = pytest.importorskip(f"mlstate.{kind}")
    shapes = {size: (1, 1, size, 4) for size in (8, 16)}
    specs = {
        size: {"k": package.StateSpec("k", shape, np.dtype("float16"))}
        for size, shape in shapes.items()
    }
    return package.StateManager(dict.fromkeys(specs, Model()), specs=specs)


@pytest.mark.parametrize("kind", ["coreml", "coreai"])
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_that_owns_a_state_refuses_to_be_copied(kind, make):
    with pytest.raises(TypeError, match="StateManager cannot be copied or pickled"):
        make(manager_of(kind))
