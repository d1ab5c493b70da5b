"""A restored cache equals one that never went ahead, and it is restored whole or not at all."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kv_model import assert_refused, assert_same_bits, dtype_of
from tries import tries

from mlstate import CapacityError, CompatibilityError
from mlstate.kv import CacheEntry, CacheSpec, CacheState
from mlstate.kv._snapshot import History
from mlstate.kv.records import Snapshot

FULL = CacheEntry("full", "full", (2, 24, 1), "int64")
CODES = CacheEntry("codes", "quantized", (24, 8), "float32", 0, bits=8, group=8)
RING = CacheEntry("ring", "sliding", (6, 2), "int64", 0, sinks=2)
ROTATED = CacheEntry("rotated", "sliding", (2, 5, 1), "int64", sinks=1, next_slot=3)
LONG = CacheEntry("long", "sliding", (9, 1), "int64", 0, window=6)
YOUNG = CacheEntry("young", "sliding", (24, 1), "int64", 0, window=40, sinks=3)
RECURRENT = CacheEntry("recurrent", "recurrent", (3,), "int64")
CONV = CacheEntry("conv", "conv", (4,), "int64")
BLOB = CacheEntry("blob", "opaque", (16,), "uint8")
CROPPED, RESIZED = [FULL, CODES, YOUNG], [FULL, CODES, RING, ROTATED, LONG, YOUNG, RECURRENT, CONV]


def folded(tokens):
    """A state that every token changes."""
    value = 1
    for token in tokens:
        value = (value * 31 + token) % (1 << 40)
    return value


class Model:
    """A model that writes recognisable tokens to the arrays of a `CacheState`."""

    def __init__(self, entries, length=0):
        spec = CacheSpec(entries)
        arrays = {
            name: np.zeros(shape, dtype)
            for entry in spec
            for name, (shape, dtype) in entry.arrays.items()
        }
        self.state = CacheState(spec, arrays, 0)
        self.tokens = []
        self._write_constant_states()
        self.run(range(1, length + 1))

    def _write_constant_states(self):
        value = folded(self.tokens)
        for entry in self.state.spec:
            array = self.state.arrays[entry.name]
            if entry.kind == "recurrent":
                array[...] = value
            elif entry.kind == "conv":
                array[...] = ([0] * 4 + self.tokens)[-4:]
            elif entry.kind == "opaque":
                array[...] = np.frombuffer(f"{value:016d}".encode(), np.uint8)

    def run(self, tokens):
        """Write tokens, and count them."""
        for token in tokens:
            for entry in self.state.spec:
                if entry.kind == "sliding":
                    slot = self.state.next_slot(entry.name)
                elif entry.seq_axis is not None:
                    slot = self.state.length
                else:
                    continue
                at = (slice(None),) * entry.seq_axis + (slot,)
                for name in entry.arrays:
                    self.state.arrays[name][at] = token
            self.tokens.append(token)
            self._write_constant_states()
            self.state.advance(1)

    def check(self):
        """Each position has its token; the windows have all that they need."""
        assert self.state.length == len(self.tokens)
        for entry in self.state.spec:
            if entry.seq_axis is None:
                continue
            positions = self.state.positions(entry.name)
            stored = set(positions[positions >= 0].tolist())
            for name in entry.arrays:
                slots = np.moveaxis(self.state.arrays[name], entry.seq_axis, 0)
                for slot in np.flatnonzero(positions >= 0):
                    assert (slots[slot] == self.tokens[positions[slot]]).all(), (name, slot)
            length, window = len(self.tokens), entry.window or len(self.tokens)
            newest = range(max(length - (window - entry.sinks), 0), length)
            assert stored >= set(range(min(length, entry.sinks))) | set(newest)
        content = {n: array.copy() for n, array in self.state.arrays.items()}
        self._write_constant_states()
        for name, array in self.state.arrays.items():
            np.testing.assert_array_equal(array, content[name])


class Interleavings(RuleBasedStateMachine):
    """Any sequence of operations against a list of tokens."""

    @initialize(
        entries=st.sampled_from([CROPPED, RESIZED, [*RESIZED, BLOB]]).flatmap(
            lambda choice: st.lists(st.sampled_from(choice), min_size=1, unique=True)
        ),
        length=st.integers(0, 12),
    )
    def create(self, entries, length):
        self.model, self.token, self.snapshots = Model(entries, length), 100, []
        self.has_full = any(entry.kind in ("full", "quantized") for entry in entries)

    def attempt(self, *call):
        """Call the state; on an error nothing has changed."""
        model = self.model
        before = (model.state.spec, model.state.length, dict(model.state.arrays))
        content = {name: array.copy() for name, array in model.state.arrays.items()}
        operation, *arguments = call
        try:
            getattr(model.state, operation)(*arguments)
        except (CapacityError, CompatibilityError) as error:
            assert (model.state.spec, model.state.length) == before[:2]
            for name, array in model.state.arrays.items():
                assert array is before[2][name]
                assert_same_bits(array, content[name])
            return error
        return None

    @rule(count=st.integers(1, 9))
    def write(self, count):
        limits = [e.seq_length for e in self.model.state.spec if e.seq_length is not None
                  and not (e.window is not None and e.window <= e.seq_length)]  # fmt: skip
        room = min([count, *(limit - self.model.state.length for limit in limits)])
        self.model.run(range(self.token, self.token + room))
        self.token += 100

    @rule(operation=st.sampled_from(["trim", "crop"]), count=st.integers(0, 9))
    def go_back(self, operation, count):
        length = len(self.model.tokens)
        remaining = length - count if operation == "trim" else max(length - count, 0)
        if self.attempt(operation, count if operation == "trim" else remaining) is None:
            del self.model.tokens[remaining:]
            for snapshot in self.snapshots:
                snapshot["lowest"] = min(snapshot["lowest"], remaining)

    @rule(capacity=st.integers(1, 40))
    def resize(self, capacity):
        arrays = dict(self.model.state.arrays)
        self.attempt("resize", capacity)
        if any(array is not arrays[name] for name, array in self.model.state.arrays.items()):
            for snapshot in self.snapshots:
                snapshot["replaced"] = True

    @rule()
    def take(self):
        tokens = list(self.model.tokens)
        state = {"tokens": tokens, "lowest": len(tokens), "replaced": False}
        self.snapshots.append({**state, "snapshot": self.model.state.snapshot()})

    @rule(number=st.integers(0, 5))
    def restore(self, number):
        if not self.snapshots:
            return
        record = self.snapshots[number % len(self.snapshots)]
        refused = self.attempt("restore", record["snapshot"])
        fell = self.has_full and record["lowest"] < len(record["tokens"])
        assert (refused is not None) == (record["replaced"] or fell)
        if refused is None:
            self.model.tokens = list(record["tokens"])
            for other in self.snapshots:
                other["lowest"] = min(other["lowest"], len(record["tokens"]))

    @rule(chance=st.integers(0, 3))
    def go_on_with_a_copy(self, chance):
        """The copy is another state: it refuses the snapshots of this one."""
        if chance:
            return
        original, self.model.state = self.model.state, self.model.state.copy()
        for array in original.arrays.values():
            array[...] = 0
        for record in self.snapshots:
            assert "another CacheState" in str(self.attempt("restore", record["snapshot"]))
        self.snapshots.clear()

    @invariant()
    def tokens_are_in_their_positions(self):
        self.model.check()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=tries(120), stateful_step_count=25, deadline=None
)


@settings(max_examples=tries(300), deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=12))
def test_the_lowest_length_since_each_snapshot_is_known(events):
    """An event is a snapshot (None) or a length."""
    history, snapshots, lengths = History(), {}, []
    for event in events:
        if event is None:
            snapshots[history.take()] = len(lengths)
        else:
            lengths.append(event)
            history.note_length(event)
        for number, start in snapshots.items():
            assert history.lowest_since(number) == min(lengths[start:], default=None)


# ---- what a snapshot holds ----


def test_rollback_of_a_hybrid_cache_restores_its_state():
    """Caches of hybrids elsewhere kept the keys and lost the recurrent state."""
    entries = [FULL, RING, ROTATED, RECURRENT, CONV, BLOB]
    model, straight = Model(entries, 12), Model(entries, 12)
    before = model.state.snapshot()
    for draft in (range(500, 507), range(900, 904)):  # twice from one snapshot
        model.run(draft)
        model.state.restore(before)
        del model.tokens[12:]
    for each in (model, straight):
        each.run(range(50, 57))
        each.check()
    for name in model.state.arrays:
        assert_same_bits(model.state.arrays[name][..., :19, :] if name == "full" else
                         model.state.arrays[name],
                         straight.state.arrays[name][..., :19, :] if name == "full" else
                         straight.state.arrays[name])  # fmt: skip
    assert model.state.next_slot("rotated") == straight.state.next_slot("rotated")


def test_only_the_arrays_that_later_tokens_overwrite_are_copied():
    state = Model([FULL, RING, RECURRENT], 3).state
    before = state.snapshot()
    assert before.length == 3 and before.nbytes == RING.nbytes + RECURRENT.nbytes
    assert repr(before) == "Snapshot(3 tokens, 2 arrays copied: 120 B)"


def test_an_array_under_two_names_is_copied_once():
    shared = np.zeros((6, 2), np.int64)
    entries = [CacheEntry(name, "sliding", (6, 2), "int64", 0) for name in ("a", "b")]
    state = CacheState(CacheSpec(entries), dict.fromkeys(("a", "b"), shared), 0)
    before = state.snapshot()
    assert len({id(array) for array in before._arrays.values()}) == 1
    shared[...] = 3
    state.restore(before)
    assert not shared.any()
    other = state.copy()
    assert other.arrays["a"] is other.arrays["b"] is not shared


# ---- refused ----


def test_a_length_that_fell_below_the_snapshot_is_refused():
    model = Model([FULL, YOUNG], 10)
    state, before = model.state, model.state.snapshot()
    state.trim(2)
    text = "full: the cache had only 8 tokens since the snapshot of 10"
    error = assert_refused(state, CompatibilityError, text, "restore", before)
    assert (error.name, error.expected, error.got) == ("full", "10 or more", "8")
    state.advance(5)  # of other tokens
    assert_refused(state, CompatibilityError, text, "restore", before)
    later = state.snapshot()
    state.advance(2)
    state.restore(later)
    assert state.length == 13


def test_going_back_to_an_earlier_snapshot_ends_a_later_one():
    state = Model([FULL], 4).state
    early = state.snapshot()
    state.advance(3)
    late = state.snapshot()
    state.restore(early)
    assert_refused(state, CompatibilityError, "only 4 tokens since", "restore", late)
    state.restore(early)


def test_window_without_full_entries_survives_any_trim():
    model = Model([YOUNG, RING], 5)
    before = model.state.snapshot()
    model.state.trim(4)
    del model.tokens[1:]
    model.run([70, 71])
    model.state.restore(before)
    model.tokens = [1, 2, 3, 4, 5]
    model.check()


@pytest.mark.parametrize(
    "replace",
    [
        lambda state: state.resize(48),
        lambda state: (state.resize(48), state.resize(24)),
        lambda state: state.quantize(group=8, names=["keys"]),
        lambda state: (state.quantize(group=8, names=["keys"]), state.dequantize(names=["keys"])),
    ],
)
def test_replaced_arrays_are_refused(replace):
    keys = CacheEntry("keys", "full", (24, 8), "float32", 0)
    state = Model([keys, RECURRENT], 5).state
    before = state.snapshot()
    replace(state)
    assert_refused(state, CompatibilityError, "the arrays were replaced", "restore", before)


def test_a_snapshot_of_another_state_is_refused():
    state, other = Model([FULL, RECURRENT], 5).state, Model([FULL, RECURRENT], 5).state
    before = state.snapshot()
    assert_refused(other, CompatibilityError, "of another CacheState", "restore", before)
    same_arrays = CacheState(state.spec, state.arrays, state.length)
    assert_refused(same_arrays, CompatibilityError, "of another CacheState", "restore", before)
    assert_refused(state, TypeError, "must be a Snapshot, got CacheState", "restore", other)


def test_read_only_array_is_refused_before_any_write():
    model = Model([RING, RECURRENT], 5)
    before = model.state.snapshot()
    model.run([70])
    model.state.arrays["recurrent"].flags.writeable = False
    error = assert_refused(model.state, CompatibilityError, "is read-only", "restore", before)
    assert error.name == "recurrent"
    model.state.arrays["recurrent"].flags.writeable = True
    model.state.restore(before)
    del model.tokens[5:]
    model.check()


def test_a_snapshot_is_neither_created_nor_copied_by_others():
    before = Model([RECURRENT], 1).state.snapshot()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="belongs to one CacheState"):
            attempt(before)
    with pytest.raises(TypeError, match=r"created by CacheState\.snapshot"):
        Snapshot()


# ---- arrays of any kind ----


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "complex64", ">f4", "bool"])
def test_arrays_of_any_dtype_and_stride_are_restored(dtype):
    dtype = np.dtype(dtype) if dtype[0] == ">" else dtype_of(dtype)
    array = np.ones((4, 6), dtype)[::2, ::-2]
    name = "float32" if dtype.kind == "f" and dtype.itemsize == 4 else dtype.name
    state = CacheState(CacheSpec([CacheEntry("r", "recurrent", (2, 3), name)]), {"r": array}, 1)
    before = state.snapshot()
    array[...] = 0
    state.restore(before)
    assert (array == 1).all() and array.dtype == dtype
    other = state.copy().arrays["r"]
    assert_same_bits(np.ascontiguousarray(other), np.ascontiguousarray(array))


@pytest.mark.parametrize("kind", ["plain", "leaf", "inference", "bfloat16", "strided"])
def test_torch_tensors_are_restored_in_place(kind):
    torch = pytest.importorskip("torch")
    with torch.inference_mode(kind == "inference"):
        tensor = torch.ones(6, 4, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    tensor = tensor[::2].T if kind == "strided" else tensor.requires_grad_(kind == "leaf")
    entry = CacheEntry("r", "recurrent", tensor.shape, tensor.dtype)
    state = CacheState(CacheSpec([entry]), {"r": tensor}, 1)
    before = state.snapshot()
    with torch.inference_mode():
        tensor.zero_()
    state.restore(before)
    assert (tensor == 1).all() and state.arrays["r"] is tensor
    assert tensor.requires_grad == (kind == "leaf")


def test_torch_tensor_with_overlapping_elements_is_refused():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(1, 4).expand(3, 4)
    entries = [CacheEntry("a", "conv", (2,), "int64"), CacheEntry("b", "conv", (3, 4), "float32")]
    state = CacheState(CacheSpec(entries), {"a": np.ones(2, np.int64), "b": tensor}, 1)
    before = state.snapshot()
    state.arrays["a"][...] = 2
    with pytest.raises(CompatibilityError, match="b: elements of the tensor share memory"):
        state.restore(before)
    assert (state.arrays["a"] == 2).all()
