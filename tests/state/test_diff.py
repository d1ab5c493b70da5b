"""Comparing states: names, shapes and dtypes, and elements compared with NumPy."""

import collections
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from needs import needs
from thread_team import num_threads
from tries import tries

from mlstate import CompatibilityError, OptimizerStateDict, StateDict
from mlstate.state import (
    CompatibilityResult,
    check_compatibility,
    diff,
    get_missing_keys,
    get_unexpected_keys,
    keys_match,
    shapes_match,
)
from mlstate.state.records import Difference

ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 is a dtype of ml_dtypes")


def arrays(**shapes):
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


# ---- names and shapes ----

NAMES = st.lists(st.sampled_from("abcdef"), unique=True)


@given(NAMES, NAMES)
def test_names_are_compared_as_sets(first, second):
    a, b = StateDict.fromkeys(first, np.ones(1)), dict.fromkeys(second, np.ones(1))
    for left, right in ((a, b), (b, a), (collections.OrderedDict(a), collections.ChainMap(b))):
        assert keys_match(left, right) == (set(left) == set(right))
        assert get_missing_keys(left, right) == set(left) - set(right)
        assert get_unexpected_keys(left, right) == set(right) - set(left)


SHAPES = st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 2), max_size=2))


@given(SHAPES, SHAPES)
def test_shapes_match_follows_the_specification(first, second):
    a, b = arrays(**first), arrays(**second)
    assert shapes_match(a, b) == all(n in b and a[n].shape == b[n].shape for n in a)
    result = check_compatibility(a, b)
    shared = [n for n in a if n in b]
    assert result.is_compatible == all(a[n].shape == b[n].shape for n in shared)
    assert result.has_warnings == (set(a) != set(b))


def test_compatibility_lists_all_differences_with_both_shapes():
    source = arrays(w=(2, 3), only=1, same=2) | {"t": np.zeros(2)}
    target = arrays(w=(3, 2), same=2, t=2, new=1, fresh=1)
    result = check_compatibility(source, target)
    assert result.errors == ["w: shape (2, 3) in the source, (3, 2) in the target"]
    assert result.warnings == [
        "only in the source: only",
        "only in the target: new, fresh",
        "t: dtype float64 in the source, float32 in the target",
    ]
    assert result.differences == [
        Difference("missing", "only"),
        Difference("unexpected", "new"),
        Difference("unexpected", "fresh"),
        Difference("shape", "w", (2, 3), (3, 2)),
        Difference("dtype", "t", "float64", "float32"),
    ]
    assert not result.is_compatible and result.renames == {}
    text, page = str(result), result._repr_html_()
    assert text.startswith("not compatible, 1 error, 3 warnings\n  error: w: shape")
    assert "<table>" in page and "(3, 2) in the target" in page
    assert "CompatibilityResult: not compatible" in repr(result)


GROUPS = [{"params": ["a", "b"], "lr": 0.1}, {"params": ["c"], "lr": 0.2, "eps": 1.0}]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (GROUPS, GROUPS[::-1], []),
        (GROUPS, [{**GROUPS[1], "lr": 0.5}, {"params": ["b", "a"], "lr": 0.1}], []),
        ([GROUPS[0], {"params": []}], [GROUPS[0], {"params": [], "lr": 1}], ["target: lr"]),
        (GROUPS, [{"params": ["c"], "x": 1, "lr": 1}, GROUPS[0]], ["source: eps", "target: x"]),
        (GROUPS, [{"params": ["a"]}, {"params": ["b", "c"]}], ["in other groups"]),
        (GROUPS, [{"params": ["a", "b", "c"], "lr": 0.1}], ["in other groups"]),
        (GROUPS, [], []),
        ([{"lr": 0.1}], GROUPS, []),
    ],
)
def test_groups_are_matched_by_names_in_any_order(source, target, expected):
    first, second = (OptimizerStateDict(param_groups=groups) for groups in (source, target))
    result = check_compatibility(first, second)
    assert len(result.warnings) == len(expected) and result.is_loadable()
    for warning, text in zip(result.warnings, expected, strict=True):
        assert warning.startswith("param_groups") and text in warning


def test_headline_counts_loadable_tensors():
    state = arrays(a=1, b=2, c=3)
    none, some = "compatible, but nothing would be loaded: no name matches", "compatible in part:"
    for other, headline in (
        (state, "compatible"),
        (arrays(x=1, y=2), f"{none} of 3 in the source and 2 in the target, 2 warnings"),
        ({}, f"{none} of 3 in the source and 0 in the target, 1 warning"),
        (arrays(a=1), f"{some} 1 name matches of 3 in the source and 1 in the target, 1 warning"),
        (state | arrays(d=4), f"{some} 3 names match of 3 in the source and 4 in the target, "
         "1 warning"),
    ):  # fmt: skip
        result = check_compatibility(state, other)
        assert str(result).splitlines()[0] == headline
        assert headline in repr(result) and headline in result._repr_html_()
        assert result.is_compatible
    assert str(check_compatibility({}, {})) == "compatible"


class Odd:
    """Reports a shape and a dtype, and exports memory, but its comparisons are unusual."""

    def __init__(self, shape):
        self.shape, self.dtype = shape, "odd"
        self.__array_interface__ = np.zeros(2).__array_interface__


def test_quick_and_full_comparison_agree():
    # if nothing differs at first sight, no pair is examined further
    pairs = [
        (np.zeros(2, "<f4"), np.zeros(2, ">f4"), 0),
        (np.zeros(2, "<f4"), np.zeros(2, "<i4"), 1),
        (np.zeros(2, "M8[s]"), np.zeros(2, "M8[s]"), 0),
        (np.zeros(2, "M8[s]"), np.zeros(2, "M8[ms]"), 1),
        (Odd((2, 3)), Odd((2, 3)), 0),
        (Odd((2, 3)), Odd([2, 3]), 0),
        (Odd((2, 3)), Odd((3, 2)), 1),
        (Odd((2,)), np.zeros(2), 1),
    ]
    for name in ("w", "Gewicht-\N{LATIN SMALL LETTER SHARP S}", type("Name", (str,), {})("w")):
        for left, right, difference_count in pairs:
            source, target = {"first": np.ones(1), name: left}, {name: right, "first": np.ones(1)}
            assert len(check_compatibility(source, target).differences) == difference_count
            assert len(check_compatibility(target, source).differences) == difference_count
    with pytest.raises(CompatibilityError, match="not a tuple of at most 64 sizes"):
        check_compatibility({"w": Odd(("2",))}, {"w": Odd(("2",))})


def test_findings_of_callers_count_too():
    result = CompatibilityResult()
    assert result.is_compatible and not result.has_warnings and str(result) == "compatible"
    result.add_warning("older")
    result.add_error("<b>other</b> tokenizer")
    assert not result.is_compatible and result.errors == ["<b>other</b> tokenizer"]
    assert "<b>other" not in result._repr_html_()


def test_tensors_without_memory_can_be_compared(torch):
    source = {"w": np.zeros((2, 3), np.float32), "h": np.zeros(2, ml_dtypes.bfloat16)}
    meta = {
        "w": torch.empty((2, 3), device="meta"),
        "h": torch.empty(2, dtype=torch.bfloat16, device="meta"),
    }
    assert shapes_match(source, meta) and shapes_match(meta, source)
    assert check_compatibility(source, meta).differences == []
    meta["h"] = torch.empty(3, device="meta")
    kinds = [d.kind for d in check_compatibility(source, meta).differences]
    assert kinds == ["shape", "dtype"]


@pytest.mark.parametrize("compare", [keys_match, shapes_match, check_compatibility, diff])
def test_non_states_are_refused(compare):
    good = arrays(w=2)
    for bad in (3, [("w", 1)], None, {3: np.ones(1)}):
        with pytest.raises(TypeError):
            compare(bad, good if bad != {3: np.ones(1)} else bad)
    with pytest.raises(TypeError):
        compare(good, 3)


# ---- elements ----


def modulus(number):
    """Return the absolute value; of a complex number, as the square root of a sum of squares."""
    is_complex = isinstance(number, complex)
    return math.sqrt(number.real**2 + number.imag**2) if is_complex else abs(number)


def measured(a, b):
    """The expected result of `diff`, in NumPy and Python numbers."""
    changed = nan = 0
    max_abs = max_rel = 0.0
    for x, y in zip(a.ravel(), b.ravel(), strict=True):
        if x.tobytes() == y.tobytes() or (x != x and y != y):
            continue
        changed += 1
        if x != x or y != y:
            nan += 1
            continue
        kind = complex if a.dtype.kind == "c" else int if a.dtype.kind in "iub" else float
        p, q = kind(x), kind(y)
        if kind is not int and (np.isinf(p) or np.isinf(q)):
            distance = relative = np.inf
        else:
            distance = float(modulus(p - q))
            largest = max(modulus(p), modulus(q))
            relative = distance / float(largest) if largest else 0.0
        max_abs, max_rel = max(max_abs, distance), max(max_rel, relative)
    return changed, nan, max_abs, max_rel


DTYPES = st.sampled_from(
    ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", ">f4", ">i8", ">f2"]
)


@st.composite
def pairs(draw):
    dtype = np.dtype(draw(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    a = draw(hnp.arrays(dtype, shape))
    b = a.copy()
    if b.size and draw(st.booleans()):
        flat = b.reshape(-1)
        for _ in range(draw(st.integers(1, 4))):
            value = draw(hnp.from_dtype(dtype))
            flat[draw(st.integers(0, flat.size - 1))] = value
        b = flat.reshape(shape)
    return a, (b.T.copy().T if draw(st.booleans()) else b)


@given(pairs())
@settings(max_examples=tries(300))
def test_elements_are_measured_as_numpy_would(pair):
    a, b = pair
    difference = diff({"w": a}, {"w": b})
    changed, nan, max_abs, max_rel = measured(a, b)
    assert difference.identical == (changed == 0) == (StateDict(w=a) == StateDict(w=b))
    if changed:
        (change,) = difference.changes
        assert (change.name, change.changed, change.size, change.nan) == ("w", changed, a.size, nan)
        assert change.max_abs == pytest.approx(max_abs, rel=1e-12, abs=0)
        assert change.max_rel == pytest.approx(max_rel, rel=1e-6)


def edge_values(dtype):
    """All 8-bit numbers; or zeros, subnormals, ones, the largest numbers, infinities and NaNs."""
    if dtype.kind == "c":
        parts = [0, -0.0, 1, 3, 4, 3e38, 2.0**-149, np.inf, -np.inf, np.nan]
        return np.array([complex(x, y) for x in parts for y in parts], dtype)
    if dtype.kind == "b":
        return np.array([False, True])
    bits = 8 * dtype.itemsize
    codes = np.dtype(f"u{dtype.itemsize}")
    if bits == 8:
        return np.arange(256, dtype=codes).view(dtype)
    near = {0, 2 ** (bits - 1)}
    if dtype.kind not in "iu":
        positive = np.array([1, 1.5, np.inf, np.nan, ml_dtypes.finfo(dtype).max], dtype)
        near |= {int(code) for code in positive.view(codes)} | {int(positive[0].view(codes)) // 2}
    every = {code + step for code in near for step in (-2, -1, 0, 1, 2)}
    every |= {code + 2 ** (bits - 1) for code in every}
    return np.array(sorted({code % 2**bits for code in every}), codes).view(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        *("f2", "f4", "f8", "c8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    ],
)
def test_pairs_of_edge_values_are_measured_exactly(dtype):
    values = edge_values(np.dtype(dtype))
    for others in (np.roll(values, step) for step in range(0, len(values), len(values) // 60 + 1)):
        pairs = {str(i): (values[i : i + 1], others[i : i + 1]) for i in range(len(values))}
        first, second = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
        changes = {
            c.name: (c.changed, c.nan, c.max_abs, c.max_rel) for c in diff(first, second).changes
        }
        for name, pair in pairs.items():
            assert changes.get(name, (0, 0, 0, 0)) == measured(*pair), pair


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_small_floats_are_measured_by_their_values(dtype):
    bits = (
        np.arange(65536, dtype=np.uint16) if dtype == "bfloat16" else np.arange(256, dtype=np.uint8)
    )
    a, b = bits.view(dtype), np.roll(bits, 1).view(dtype)
    (change,) = diff({"w": a}, {"w": b}).changes
    with np.errstate(invalid="ignore"):
        x, y = a.astype(np.float64), b.astype(np.float64)
        distance = np.abs(x - y)
    assert change.nan == (np.isnan(x) != np.isnan(y)).sum()
    assert change.changed == (~(np.isnan(x) & np.isnan(y))).sum()  # no two neighbours are equal
    if np.isinf(x).any():
        assert change.max_abs == np.inf
    else:
        assert change.max_abs == np.nanmax(distance)


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_measured_in_parts(threads):
    rng = np.random.default_rng(0)
    a = {"w": rng.standard_normal((1500, 1001), np.float32), "h": np.zeros(10_000_003, np.float16)}
    b = {name: array.copy() for name, array in a.items()}
    b["w"][[3, 1499], [0, 1000]] += [1, 2]
    b["h"][-1] = np.nan
    with num_threads(threads):
        difference = diff(a, b)
        assert StateDict(a) != StateDict(b) and StateDict(a) == StateDict(a).copy()
    changes = {change.name: change for change in difference.changes}
    assert changes["w"].changed == 2 and changes["h"][1:4] == (1, 10_000_003, 1)
    expected = np.abs(a["w"].astype(float) - b["w"]).max()
    assert changes["w"].max_abs == pytest.approx(expected, rel=1e-12)


def test_unmatched_and_incomparable_tensors_are_listed():
    a = arrays(gone=1, shape=(2, 3), same=2) | {"dtype": np.zeros(2)}
    b = arrays(new=1, shape=6, same=2, dtype=2)
    difference = diff(a, b)
    assert difference.missing == ["gone"] and difference.unexpected == ["new"]
    assert difference.shapes == [("shape", (2, 3), (6,))]
    assert difference.dtypes == [("dtype", "float64", "float32")]
    assert difference.changes == [] and difference.unchanged == 1 and not difference.identical
    text = str(difference)
    assert text.splitlines()[0] == (
        "1 of another shape, 1 of another dtype, 1 only in the first, 1 only in the second, "
        "1 unchanged"
    )
    assert str(diff({"w": np.ones(1)}, {"w": np.ones(1)})) == "identical: 1 tensor"
    assert repr(difference) == f"<StateDiff: {text.splitlines()[0]}>"
    assert "(2, 3) -> (6,)" in text and "(2, 3) -&gt; (6,)" in difference._repr_html_()


def test_the_worst_tensors_come_first_and_the_table_is_cut():
    a = {f"t{i}": np.full(4, 100.0) for i in range(60)}
    b = {name: array + int(name[1:]) for name, array in a.items()}
    difference = diff(a, b)
    lines = str(difference).splitlines()
    assert lines[0] == "59 changed, 1 unchanged" and lines[2].startswith("t59")
    assert lines[-1] == "… 39 more" and len(lines) == 23
    html = difference._repr_html_()
    assert html.count("<tr>") == 1 + 20 + 1 + 39 and "<summary>39 more</summary>" in html
    difference = diff(a | {"s": np.zeros(2)}, b | {"s": np.zeros(3)})
    assert (
        str(difference).splitlines()[2].startswith("s ")
    )  # listed although many changes come first


def test_memory_that_cannot_be_read_is_named(torch):
    a, b = ({"w": torch.empty(2, device="meta")} for _ in range(2))
    with pytest.raises((CompatibilityError, BufferError, NotImplementedError, RuntimeError)):
        diff(a, b)
    with pytest.raises(CompatibilityError, match=r"'w'.*datetime64"):
        diff({"w": np.zeros(2, "M8[s]")}, {"w": np.ones(2, "M8[s]")})


# ---- tolerances ----


def changes(first, second, **tolerances):
    difference = diff({"w": np.asarray(first)}, {"w": np.asarray(second)}, **tolerances)
    return [tuple(change)[1:] for change in difference.changes]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_within_a_tolerance_an_infinity_equals_only_itself(dtype):
    first = np.array([1, np.inf, -np.inf, np.inf, np.nan, 2], dtype)
    second = np.array([np.inf, 1, np.inf, np.inf, np.nan, 2], dtype)
    for tolerances in ({"rtol": 0.1}, {"atol": np.inf}):
        assert changes(first, second, **tolerances) == [(3, 6, 0, np.inf, np.inf)]


@pytest.mark.parametrize("dtype", [np.int64, ">i8", np.uint64])
def test_large_integers_within_a_tolerance_are_compared_exactly(dtype):
    first = np.array([2**53, 5, 2**62], dtype)
    second = first + np.array([3, 0, 0], dtype)
    assert changes(first, second, atol=3) == []
    assert changes(first, second, atol=2.5)[0][:4] == (1, 3, 0, 3.0)
    assert changes(second, first, atol=2.5)[0][:4] == (1, 3, 0, 3.0)


def test_a_tolerance_for_packed_floats_is_refused_by_name():
    packed = np.dtype("u1", metadata={"mlstate.dtype": "float4_e2m1fn_x2"})
    with pytest.raises(CompatibilityError, match=r"'w'.*float4_e2m1fn_x2") as caught:
        changes(np.zeros(2, packed), np.ones(2, packed), atol=1)
    assert caught.value.name == "w"


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "is_close"),
    [
        ([np.inf, 1.0], [np.inf, 1.1], {"atol": 0.5}, True),
        ([np.inf], [1.0], {"rtol": 0.1}, False),
        ([np.inf], [-np.inf], {"rtol": 0.1}, False),
        ([0.0, 1.0], [0.0, 2.0], {"rtol": np.inf}, True),
        ([2**62], [2**62 + 1], {"atol": 0.5}, False),
        ([2**62], [2**62 + 1], {"atol": 1}, True),
        ([-(2**63)], [2**63 - 1], {"rtol": 1.9}, False),
    ],
)
def test_tolerances_of_infinities_and_large_integers(a, b, tolerance, is_close):
    assert diff({"w": np.array(a)}, {"w": np.array(b)}, **tolerance).identical == is_close


LARGEST = 2**64 - 1


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        (np.array([2**53 + 1]), np.array([2**53]), 1),
        (np.array([LARGEST], np.uint64), np.array([LARGEST - 3], np.uint64), 3),
        (np.array([2**63], np.uint64), np.array([2**63 - 1]), 1),
        (np.array([-5], np.int8), np.array([3], np.uint8), 8),
        (np.array([LARGEST], np.uint64), np.array([-1]), 2.0**64),
        (np.array([-(2**63)]), np.array([2**63 - 1]), 2.0**64),
    ],
)
def test_differences_of_integers_within_a_tolerance_are_exact(first, second, distance):
    for a, b in ((first, second), (second, first)):
        [change] = diff({"n": a}, {"n": b}, atol=0.5).changes
        assert (change.changed, change.max_abs) == (1, distance)
        assert diff({"n": a}, {"n": b}, atol=distance).identical


@pytest.mark.parametrize(
    "read",
    [
        lambda state: diff(state, {"w": np.ones(2)}),
        lambda state: diff({"w": np.ones(2)}, state, atol=1),
        lambda state: state.astype("float16"),
        lambda state: state.digest(),
        pytest.param(lambda state: state.to_torch(), marks=needs("torch")),
    ],
)
def test_masks_are_not_ignored(read):
    state = StateDict(w=np.ma.array([1.0, 2.0], mask=[False, True]))
    with pytest.raises(TypeError, match="'w' is a masked array, whose mask would be lost"):
        read(state)


@pytest.mark.parametrize("shape", [(3,), (1, 2)])
def test_within_a_tolerance_other_shapes_and_dtypes_are_listed_and_not_compared(shape):
    a, b = {"w": np.zeros(2, np.float32)}, {"w": np.zeros(shape)}
    assert diff(a, b, atol=1.0) == diff(a, b)
    assert diff(a, b, atol=1.0).unchanged == 0
