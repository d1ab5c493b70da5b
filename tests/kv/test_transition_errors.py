"""Invalid transitions raise one clear exception before anything changes."""

import re

import numpy as np
import pytest
from kv_model import assert_same_bits, cache, expand
from numpy.lib.stride_tricks import as_strided

from mlstate import CapacityError, CompatibilityError
from mlstate.kv import compact_kv_state, create_attention_size_mask, transition_kv_state

# Arguments after the source, then the error with its text and attributes.
BAD_EXPANSIONS = [
    ((7,), CapacityError, "target_seq_length 7 is smaller than the source's 8: use compact_kv",
     ("at least 8", "7")),
    ((7, 2), CapacityError, "target_seq_length 7 is smaller", ("at least 8", "7")),
    ((0,), CapacityError, "target_seq_length 0 is smaller", ("at least 8", "0")),
    ((-1,), CapacityError, "target_seq_length -1 is negative", (None, None)),
    ((12, -1), CapacityError, "current_position -1 is outside 0..8", ("0..8", "-1")),
    ((12, 9), CapacityError, "current_position 9 is outside 0..8", ("0..8", "9")),
    ((8, 9), CapacityError, "current_position 9 is outside 0..8", ("0..8", "9")),
    ((2**64, 3), CapacityError, "target_seq_length does not fit into 64 bits", (None, None)),
    ((12, -(2**64)), CapacityError, "current_position does not fit", (None, None)),
    ((2**62,), CapacityError, "larger than memory", (None, None)),
    ((2**63 - 1,), CapacityError, "larger than memory", (None, None)),
]  # fmt: skip
BAD_COMPACTIONS = [
    ((4, 5), CapacityError, "5 tokens do not fit into 4 positions: pass a target_seq_length of "
     "at least 5", ("0..4", "5")),
    ((0, 1), CapacityError, "1 tokens do not fit into 0", ("0..0", "1")),
    ((4, -1), CapacityError, "current_position -1 is outside 0..8", ("0..8", "-1")),
    ((4, 9), CapacityError, "current_position 9 is outside 0..8", ("0..8", "9")),
    ((-4, 2), CapacityError, "target_seq_length -4 is negative", (None, None)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("move", "arguments", "error", "text", "facts"),
    [(transition_kv_state, *case) for case in BAD_EXPANSIONS]
    + [(compact_kv_state, *case) for case in BAD_COMPACTIONS],
)
def test_invalid_moves_are_refused(move, arguments, error, text, facts):
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        move(cache(), *arguments)
    assert type(caught.value) is error
    assert (caught.value.expected, caught.value.got) == facts


def test_lengths_that_no_memory_holds():
    source = np.zeros((1, 1, 1, 1), np.float16)
    for length in (2**45, 2**60, 2**62, 2**63 - 1):
        with pytest.raises((MemoryError, CapacityError)):
            transition_kv_state(source, length)
        with pytest.raises((MemoryError, CapacityError)):
            compact_kv_state(source, length, 1, np.float64, low_memory=True)


@pytest.mark.parametrize(
    "source",
    [None, 3, [[[[1.0]]]], "cache", b"cache", object()],
    ids=lambda value: type(value).__name__,
)
def test_non_array_source_is_refused(source):
    with pytest.raises(TypeError, match="source_state must be a NumPy array or a torch tensor"):
        transition_kv_state(source, 12)


@pytest.mark.parametrize("length", [8.0, "8", None, 1j, [8], np.float64(8), np.zeros(2)], ids=repr)
def test_non_integer_length_is_refused(length):
    source = cache(4)
    with pytest.raises(TypeError, match="target_seq_length must be an integer, got"):
        transition_kv_state(source, length)
    with pytest.raises(TypeError, match="target_seq_length must be an integer, got"):
        compact_kv_state(source, length, 2)
    if length is not None:
        with pytest.raises(TypeError, match="current_position must be an integer, got"):
            transition_kv_state(source, 12, length)
        with pytest.raises(TypeError, match="current_position must be an integer, got"):
            compact_kv_state(source, 4, length)


def test_errors_of_index_propagate():
    class Odd:
        def __index__(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        transition_kv_state(cache(), Odd())


# ---- out ----


def refuses(error, text, source, length, position=None, *, out, **options):
    """The call raises, and changes neither `out` nor the source."""
    before, source_before = out.copy(), source.copy()
    with pytest.raises(error, match=text) as caught:
        transition_kv_state(source, length, position, out=out, **options)
    assert_same_bits(out, before)
    assert_same_bits(source, source_before)
    return caught.value


@pytest.mark.parametrize(
    "shape",
    [(2, 3, 11, 5), (2, 3, 13, 5), (2, 3, 12, 4), (1, 3, 12, 5), (2, 12, 3, 5), (2, 3, 12), (360,)],
)
def test_out_of_another_shape(shape):
    error = refuses(CompatibilityError, "out: ", cache(), 12, out=np.full(shape, 7, np.float16))
    assert (error.expected, error.got) == ("(2, 3, 12, 5)", str(shape))


def test_out_of_a_dtype_that_does_not_convert():
    error = refuses(
        CompatibilityError, "float16 does not convert to bool", cache(), 12,
        out=np.full((2, 3, 12, 5), True),
    )  # fmt: skip
    assert (error.expected, error.got) == ("float16", "bool")


def test_out_and_dtype_must_agree():
    out = np.full((2, 3, 12, 5), 7, np.float32)
    refuses(
        CompatibilityError, "out is float32, but dtype asks for float64", cache(), 12, out=out,
        dtype=np.float64,
    )  # fmt: skip
    assert transition_kv_state(cache(), 12, dtype="float32", out=out) is out
    assert_same_bits(out, expand(cache(), 12, None, 0, np.float32))
    # bfloat16 is another dtype, with or without ml_dtypes
    refuses(CompatibilityError, "asks for bfloat16", cache(), 12, out=out, dtype="bfloat16")


def test_a_read_only_out():
    out = np.full((2, 3, 12, 5), 7, np.float16)
    out.flags.writeable = False
    refuses(ValueError, "out is read-only: pass a writable array", cache(), 12, out=out)


def test_a_pad_that_out_cannot_hold():
    out = np.full((2, 3, 12, 5), 7, np.float16)
    refuses(ValueError, "1e\\+06 is beyond the range of float16", cache(), 12, out=out,
            pad_value=1e6)  # fmt: skip


def test_out_that_shares_memory_with_the_source():
    room = np.arange(2 * 3 * 12 * 5, dtype=np.float16).reshape(2, 3, 12, 5)
    text = "out shares memory with source_state: pass another buffer, or use KVState"
    refuses(ValueError, text, room[:, :, :8], 12, out=room)
    refuses(ValueError, text, room[:, :, 4:], 12, out=room)
    refuses(ValueError, text, room, 12, 5, out=room)
    refuses(ValueError, text, room[::-1], 12, 5, out=room)
    refuses(ValueError, text, room, 12, 5, out=room.view(np.float16)[:, :, ::-1])
    with pytest.raises(ValueError, match=text):
        compact_kv_state(room, 4, 3, out=room[:, :, 4:8])


OVERLAPPING = {  # of shape (2, 3, 12, 5)
    "a broadcast layer": (0, 60, 5, 1),
    "broadcast heads": (180, 0, 5, 1),
    "layers that are windows": (60, 60, 5, 1),
    "rows that are windows": (180, 60, 4, 1),
    "windows backwards": (-7, 60, 5, 1),
}


@pytest.mark.parametrize("strides", OVERLAPPING.values(), ids=OVERLAPPING)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_out_with_overlapping_elements_is_refused(strides, dtype):
    memory = np.full(2000, 7, dtype)
    out = as_strided(memory[900:], (2, 3, 12, 5), [n * memory.itemsize for n in strides])
    for call in (transition_kv_state, compact_kv_state):
        with pytest.raises(ValueError, match="out: its elements share memory with one another"):
            call(cache(), 12, 4, out=out)
    assert (memory == 7).all()


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("step", [1, -1])
def test_out_that_interleaves_with_the_source(axis, step):
    room = np.zeros([2 * n if i == axis else n for i, n in enumerate((2, 3, 8, 5))], np.float16)
    even = tuple(slice(None, None, 2 if i == axis else 1) for i in range(4))
    odd = tuple(slice(1, None, 2) if i == axis else slice(None, None, step) for i in range(4))
    room[even] = cache()
    for call in (transition_kv_state, compact_kv_state):
        assert (call(room[even], 8, 5, out=room[odd]) == call(cache(), 8, 5, out=cache())).all()
        assert (room[even] == cache()).all()


@pytest.mark.parametrize("strides", [(0, 0, 6, 1), (0, 0, 3, 1), (0, 0, 0, 1)])
def test_mask_out_with_overlapping_rows_is_refused(strides):
    out = as_strided(np.ones(99, np.float16), (1, 1, 4, 6), [2 * n for n in strides])
    if strides[2] == 6:
        assert create_attention_size_mask(6, 3, 1, rows=(0, 4), out=out) is out
        return
    with pytest.raises(ValueError, match="its elements share memory"):
        create_attention_size_mask(6, 3, 1, rows=(0, 4), out=out)


def test_out_adjacent_to_the_source_in_one_allocation():
    room = np.zeros((4, 3, 12, 5), np.float16)
    room[:2, :, :8] = cache()
    # the padding of the first half would overwrite `out`
    source = room[:2]
    assert transition_kv_state(source, 12, 8, out=room[2:]) is not None
    assert_same_bits(room[2:].copy(), expand(source, 12, 8))


def test_empty_out_overlaps_no_source():
    room = np.zeros((2, 3, 8, 5), np.float16)
    out = room[:0]
    assert transition_kv_state(room[:0], 8, 3, out=out) is out


def test_non_array_out_is_refused():
    for out in ([], "out", 3, object(), bytearray(10)):
        with pytest.raises(TypeError, match="out must be a NumPy array or a torch tensor, got"):
            transition_kv_state(cache(), 12, out=out)


def test_bad_numbers_are_refused_before_out_is_looked_at():
    out = np.full((2, 3, 12, 5), 7, np.float16)
    refuses(CapacityError, "current_position 9", cache(), 12, 9, out=out)
    refuses(CapacityError, "does not fit", cache(), 2**70, 2, out=out)
    with pytest.raises(CapacityError):
        transition_kv_state(cache(), 4, out="nonsense")


def test_an_exporter_that_is_not_in_main_memory():
    class Elsewhere:
        def __dlpack__(self, **options):
            raise BufferError("this lies on a device")

    with pytest.raises(BufferError, match="device"):
        transition_kv_state(cache(), 12, out=Elsewhere())

    class Odd:
        def __dlpack__(self, **options):
            return "no capsule"

    with pytest.raises(TypeError, match="capsule"):
        transition_kv_state(cache(), 12, out=Odd())


@pytest.mark.parametrize("name", ["float16", "float32", "int8", "bool", "complex64"])
def test_out_through_dlpack(name):
    """Any exporter works: the old form of the protocol, and the versioned one."""
    dtype = np.dtype(name)
    target = np.ones((2, 3, 12, 5), dtype)

    class Old:
        def __dlpack__(self):
            return target.__dlpack__()

    class New:
        def __dlpack__(self, *, max_version=None):
            assert max_version == (1, 1)
            return target.__dlpack__()

    for kind in (Old, New):
        out = kind()
        target[...] = 1
        assert transition_kv_state(cache(dtype=dtype), 12, 5, out=out) is out
        assert_same_bits(target, expand(cache(dtype=dtype), 12, 5))


@pytest.mark.parametrize("pad_value", [2**53 + 1, -(2**62) - 1, np.int64(2**53 + 1)])
@pytest.mark.parametrize("kind", ["array", "out", "torch"])
def test_padding_that_a_float_would_round_is_refused_for_integers(kind, pad_value):
    source, out = np.ones((1, 1, 2, 1), np.int64), None
    if kind == "torch":
        source = pytest.importorskip("torch").from_numpy(source)
    elif kind == "out":
        out = np.zeros((1, 1, 4, 1), np.int64)
    with pytest.raises(ValueError, match=f"pad_value {pad_value} is not exactly a float"):
        transition_kv_state(source, 4, 1, pad_value, out=out)
    assert out is None or not out.any()
    assert transition_kv_state(source, 4, 1, 2**60)[0, 0, 3, 0] == 2**60


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
def test_an_error_of_the_padding_reaches_the_caller(error):
    class Padding(float):
        def __index__(self):
            raise error

    with pytest.raises(error):
        transition_kv_state(np.ones((1, 1, 2, 1), np.int64), 4, 1, Padding(1.0))
