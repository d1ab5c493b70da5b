"""The bindings of reductions: all or nothing, and errors that name the gradient."""

import numpy as np
import pytest

from mlstate import _core
from mlstate.errors import CompatibilityError

FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def random_array(seed, length, dtype):
    return np.random.default_rng(seed).standard_normal(length).__mul__(9).astype(dtype)


# ---- reduce ----


def test_a_mean_is_divided_once():
    sources = [np.full(100, x, np.float32) for x in (1, 2, 4)]
    out = np.empty(100, np.float32)
    squares, _ = _core.reduce(sources, out, "sum", 3.0)
    assert (out == np.float32(7) / np.float32(3)).all()
    assert squares == pytest.approx(100 * float(out[0]) ** 2, rel=1e-14)


def test_narrow_sources_may_become_float32():
    sources = [np.full(50, 2048, np.float16), np.ones(50, np.float16)]
    out = np.zeros(50, np.float32)
    _core.reduce(sources, out, "sum", 1.0)
    assert (out == 2049).all()
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 and 8-bit floats in NumPy")
    for name in ("bfloat16", "float8_e5m2", "float8_e4m3fn"):
        _core.reduce([np.full(50, 1.5, getattr(ml_dtypes, name))] * 3, out, "sum", 1.0)
        assert (out == 4.5).all()


def test_the_output_may_be_a_source():
    a, b = np.arange(100.0), np.ones(100)
    _core.reduce((a, b, a), b, "sum", 1.0)
    assert (b == 2 * np.arange(100.0) + 1).all()
    for op, step in (("min", np.minimum), ("max", np.maximum)):
        expected = step(a, b[::-1])
        _core.reduce((a, b[::-1].copy()), a, op, 1.0)
        assert (a == expected).all()


@pytest.mark.parametrize(
    ("sources", "out", "op", "divisor", "error", "match"),
    [
        ([], np.ones(2), "sum", 1.0, ValueError, "at least one source"),
        ([np.ones(2), np.ones(3)], np.ones(2), "sum", 1.0, CompatibilityError, r"sources\[1\] has"),
        ([np.ones(2)], np.ones(3), "sum", 1.0, CompatibilityError, "out has 3 elements"),
        ([np.ones(2, bool)], np.ones(2, bool), "sum", 1.0, CompatibilityError, "sum of bool"),
        ([np.ones(4)[::2]], np.ones(2), "sum", 1.0, CompatibilityError, "C-contiguous"),
        ([np.ones(2)], np.ones(2), "prod", 1.0, ValueError, "op must be"),
        ([np.ones(2)], np.ones(2), 3, 1.0, TypeError, "op must be a str"),
        ([np.ones(2)], np.ones(2), "sum", 0.0, ValueError, "divided by 0"),
        ([np.ones(2)], np.ones(2), "max", 2.0, ValueError, "divided by 2"),
        ([object()], np.ones(2), "sum", 1.0, TypeError, r"sources\[0\]"),
    ],
)
def test_invalid_reductions_are_refused(sources, out, op, divisor, error, match):
    before = out.tobytes()
    with pytest.raises(error, match=match):
        _core.reduce(sources, out, op, divisor)
    assert out.tobytes() == before


def test_half_an_overlap_is_refused():
    memory = np.arange(11.0)
    with pytest.raises(ValueError, match=r"out and sources\[1\] share memory"):
        _core.reduce([np.ones(10), memory[1:]], memory[:10], "sum", 1.0)
    frozen = np.ones(10)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out"):
        _core.reduce([np.ones(10)], frozen, "sum", 1.0)
    assert memory.tolist() == list(range(11))


# ---- accumulate ----


def test_norm_partials_are_the_same_by_any_way():
    x = random_array(5, 200_001, np.float32)
    total = np.zeros_like(x)
    (added,) = _core.accumulate(["w"], [total], [x], 1.0, True)
    assert [added] == _core.norm_partials(["w"], [x]) == [_core.reduce([x], total, "sum", 1.0)]
    assert [added] == _core.norm_partials(["w"], [np.stack([x, x], 1)[:, 1]])
    x[[5, 10_000, 200_000]] = np.nan
    ((squares, nonfinite),) = _core.norm_partials(["w"], [x])
    assert np.isnan(squares) and nonfinite == 3


def test_scale_and_clear():
    a, b = np.ones((3, 4), np.float16), np.full(5, 2 - 1j, np.complex64)
    assert _core.scale(["a", "b"], [a[:, ::2], b], 0.5) is False
    assert a.tolist() == [[0.5, 1, 0.5, 1]] * 3 and b.tolist() == [1 - 0.5j] * 5
    assert _core.scale(["a", "b"], [a[:, 3:], a[:, :2]], 1.0)  # interleaved: may share memory
    _core.clear(["a", "b"], [a[1:], b])
    assert a.tolist() == [[0.5, 1, 0.5, 1], [0] * 4, [0] * 4] and not b.any()
    with pytest.raises(CompatibilityError, match="'n': int64 cannot be scaled") as caught:
        _core.scale(["a", "n"], [a, np.ones(2, np.int64)], 2.0)
    assert caught.value.name == "n" and a[0, 0] == 0.5


@pytest.mark.parametrize(
    ("target", "source", "scale", "error", "match"),
    [
        (np.ones(3, "f4"), np.ones(2, "f4"), 1.0, CompatibilityError, r"'w': .*\(2,\).*\(3,\)"),
        (np.ones(3, "f4"), np.ones(3, "i4"), 1.0, CompatibilityError, "'w': int32 cannot be added"),
        (np.ones(3, "i4"), np.ones(3, "i4"), 2.0, ValueError, "'w': int32 cannot be scaled"),
        (np.ones(3, "f4"), np.ones(3, "f4"), np.nan, ValueError, "a scale of nan"),
        (np.ones(3, "f4"), [1.0] * 3, 1.0, TypeError, "'w'"),
        (np.ones(3, "f4"), np.ones(3, "f4"), "x", TypeError, "scale must be a number"),
    ],
)
def test_one_bad_pair_leaves_all_as_they_were(target, source, scale, error, match):
    other, before = np.ones(4, np.float32), target.tobytes()
    with pytest.raises(error, match=match) as caught:
        _core.accumulate(["a", "w"], [other, target], [np.ones(4, "f4"), source], scale, True)
    if error is CompatibilityError:
        assert caught.value.name == "w" and caught.value.expected and caught.value.got
    assert other.tolist() == [1] * 4 and target.tobytes() == before


def test_targets_must_be_writable_and_not_shared():
    frozen, memory = np.ones(4), np.arange(5.0)
    frozen.flags.writeable = False
    repeated = np.lib.stride_tricks.as_strided(np.ones(1), (4,), (0,))
    for target, source in ((frozen, np.ones(4)), (memory[1:], memory[:-1]), (repeated, np.ones(4))):
        with pytest.raises(ValueError, match="'w'"):
            _core.accumulate(["w"], [target], [source], 1.0, False)
    with pytest.raises(ValueError, match="1 names for 2 arrays"):
        _core.accumulate(["w"], [memory, memory], [memory], 1.0, False)
    with pytest.raises(TypeError, match="parameter name must be a str"):
        _core.accumulate([3], [memory], [memory], 1.0, False)
    with pytest.raises(TypeError, match="takes 5 arguments"):
        _core.accumulate([3], [memory])
    assert memory.tolist() == list(range(5))


def test_names_changed_during_views_stay_in_bounds():
    class Array:
        """An array that shortens its caller's list when asked for its memory."""

        def __init__(self, names):
            self.names, self.array = names, np.ones(4, np.float32)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __dlpack__(self, **keywords):
            self.names.pop()
            sources.pop()
            return self.array.__dlpack__(**keywords)

    names = ["a", "b"]
    targets = [np.ones(4, np.float32), Array(names)]
    sources = [np.ones(4, np.float32) for _ in "ab"]
    with pytest.raises(RuntimeError, match="names changed"):
        _core.accumulate(names, targets, sources, 1.0, False)
    assert targets[0].tolist() == [1] * 4


def test_an_op_is_its_whole_name():
    for op in ("sum\0x", "su", "mean"):
        with pytest.raises(ValueError, match="op must be sum, min or max"):
            _core.reduce([np.ones(3)], np.ones(3), op, 1.0)


def test_torch_parameters_are_added_to_in_place(torch):
    parameter = torch.nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    _core.accumulate(["p"], [parameter], [torch.arange(6.0)], 2.0, False)
    assert parameter.tolist() == [1, 3, 5, 7, 9, 11]
    with pytest.raises(CompatibilityError, match="'p'"):
        _core.accumulate(["p"], [torch.ones(2, device="meta")], [torch.ones(2)], 1.0, False)


# ---- arrays that a bucket uses in place ----


def _read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "dtype", "shape", "reads", "writes"),
    [
        (np.ones((2, 3), np.float32), "float32", (2, 3), True, True),
        (np.ones((), np.float32), "float32", (), True, True),
        (np.ones((2, 0)), "float64", (2, 0), True, True),
        (_read_only(np.ones(3)), "float64", (3,), True, False),
        (np.ones(3), "float32", (3,), False, False),
        (np.ones(3), "float64", (4,), False, False),
        (np.ones(3), "float64", (3, 1), False, False),
        (np.ones(3), "float64", (-3,), False, False),
        (np.ones(3), "float64", (3.0,), False, False),
        (np.ones(6)[::2], "float64", (3,), False, False),
        (np.ones(3).astype(">f8"), "float64", (3,), False, False),
        (np.frombuffer(bytes(25), np.uint8)[1:].view("f8"), "float64", (3,), False, False),
        (np.ma.masked_array(np.ones(3)), "float64", (3,), False, False),
        (np.ones(3), "a name of none", (3,), False, False),
        (np.float64(1), "float64", (), False, False),
        ([1.0], "float64", (1,), False, False),
        (None, "float64", (), False, False),
    ],
)
def test_bucket_fits_accepts_packed_arrays(array, dtype, shape, reads, writes):
    assert _core.bucket_fits(array, dtype, shape, False) is reads
    assert _core.bucket_fits(array, dtype, shape, True) is writes


def _outputs():
    """Unsuitable outputs for a bucket that expects two float32 arrays, by their defect."""
    return {
        "": np.empty(2, np.float32),
        "dtype": np.empty(2),
        "shape": np.empty((2, 1), np.float32),
        "strides": np.empty(4, np.float32)[::2],
        "read-only": _read_only(np.empty(2, np.float32)),
        "another kind": np.ma.masked_array(np.empty(2, np.float32)),
        "none": None,
    }


@pytest.mark.parametrize("wrong", _outputs())
def test_bucket_checks_output_dtype_and_shape(wrong):
    out = _outputs()[wrong]
    segment = (np.ones(2, np.float32), (2,), out, "float32", (2,))
    if wrong:
        with pytest.raises(ValueError, match="not an array or tensor of that dtype and shape"):
            _core.bucket([segment], 1, 0, "sum", 1.0)
    else:
        bucket = _core.bucket([segment], 1, 0, "sum", 1.0)
        _core.bucket_reduce(bucket, np.empty(0, np.uint8))
        assert out.tolist() == [1, 1]


def test_segments_that_are_none_are_refused():
    array = np.ones(2, np.float32)
    for segment, error in (
        ((array, (2,)), "a segment is a tuple"),
        ((array, (2,), array, "float32", (2,), 1), "a segment is a tuple"),
        ((array, (2,), (), "float32"), "the codes"),
        ((array, (2,), array, 3, (2,)), "dtype"),
        ((array, (2,), array, "float32", [2]), "shape must be a tuple"),
    ):
        with pytest.raises(TypeError, match=error):
            _core.bucket([segment], 1, 0, "sum", 1.0)


@pytest.mark.parametrize(
    "codes",
    [
        *[(18,), (18, 1), (18, 0, 0), (18, 1, 20), (18, 2, 0), (0, 1, 1), (20, 1, 0)],
        *[(18, 2**64 - 1, 0), (18, 65, *([0] * 65)), (18, 2, 0, 18)],
    ],
    ids=str,
)
def test_sums_of_a_segment_are_checked(codes):
    """Of two ranks: numbers from 2 are intermediate sums, from 18 memories."""
    memories = tuple(np.zeros((2, 2), np.float32))
    segment = np.ones(4, np.float16), (2, 2), memories, np.array(codes, np.uint64)
    with pytest.raises(ValueError, match="the memories or codes are not those of sums"):
        _core.bucket([segment], 2, 0, "sum", 1.0)


def test_memories_of_sums_have_one_dtype_and_are_not_absent():
    codes = np.array([18, 1, 0], np.uint64)
    for memories in (np.ones(2, np.float32), np.ones(2)), (), np.ones(2, np.float32):
        with pytest.raises(ValueError, match="the memories or codes are not those of sums"):
            _core.bucket([(np.ones(4, np.float32), (2, 2), memories, codes)], 2, 0, "sum", 1.0)


def test_lengths_that_no_array_has_do_not_fit_and_leave_no_error():
    assert _core.bucket_fits(np.ones(3), "float64", (1 << 80,), False) is False
    with pytest.raises(TypeError, match="shape must be a tuple"):
        _core.bucket_fits(np.ones(3), "float64", [3], False)
    with pytest.raises(TypeError, match="dtype"):
        _core.bucket_fits(np.ones(3), float, (3,), False)
