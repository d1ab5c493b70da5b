"""Deltas of arrays: exact for every dtype and layout, applied wholly or undone."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlstate import _core
from mlstate.checkpoint import Layout
from mlstate.errors import ChecksumError, CompatibilityError, FormatError
from mlstate.follow._delta import (
    Delta,
    apply_delta,
    compare_arrays,
    compose_deltas,
    filter_delta,
    roll_back,
)

DTYPES = [
    np.dtype(name)
    for name in ("bool", "int8", "uint8", "float16", "int32", "float32", "float64", "complex64")
] + [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn")]
DENSITIES = [0.0, 0.001, 0.01, 0.03, 0.5, 1.0]


def random_pair(count, dtype, density, seed=0):
    """A random array, and a copy with about `density` other elements, of any bits."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (count, dtype.itemsize), np.uint8)
    other = raw.copy()
    rows = np.flatnonzero(random.random(count) < density)
    other[rows, random.integers(0, dtype.itemsize, len(rows))] ^= 1
    return raw.reshape(-1).view(dtype), other.reshape(-1).view(dtype)


def decode(delta):
    """The numbers of the changed elements, by docs/follow_format.md."""
    most = np.iinfo(delta.gaps.dtype).max
    number, numbers = 0, []
    for unit in delta.gaps.tolist():
        number += unit
        if unit != most:
            numbers.append(number)
            number += 1
    return numbers


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8).tobytes()


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta_has_exactly_the_elements_with_other_bytes(dtype, density):
    base, new = random_pair(5003, dtype, density)
    delta = compare_arrays(base, new)
    rows = base.view(np.uint8).reshape(5003, -1) != new.view(np.uint8).reshape(5003, -1)
    expected = np.flatnonzero(rows.any(1))
    assert decode(delta) == expected.tolist()
    assert delta.values.dtype == dtype
    assert bits(delta.values) == bits(new[expected])
    assert delta.crc32c == _core.crc32c(new)
    log, target = [], base.copy()
    apply_delta(target, delta, log)
    assert bits(target) == bits(new)
    roll_back(log)
    assert bits(target) == bits(base)
    assert log == []


def test_signed_zeros_and_payloads_of_nan_are_changes():
    base = np.array([0.0, np.nan, 1.0], np.float32)
    new = base.copy()
    new[0] = -0.0
    new.view(np.uint32)[1] ^= 1
    assert decode(compare_arrays(base, new)) == [0, 1]
    assert decode(compare_arrays(base, base.copy())) == []


VIEWS = {
    "transposed": lambda a: a.reshape(40, 60).T,
    "reversed": lambda a: a.reshape(40, 60)[::-1, ::-2],
    "sliced": lambda a: a.reshape(40, 60)[3:37:2, 5:],
    "rolled axes": lambda a: a.reshape(10, 8, 30).transpose(2, 0, 1),
    "scalar": lambda a: a[7:8].reshape(()),
    "empty": lambda a: a[:0].reshape(0, 5),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided_arrays_are_numbered_in_c_order(view):
    base, new = random_pair(2400, np.dtype(np.float16), 0.05)
    base, new = view(base.copy()), view(new.copy())
    delta = compare_arrays(base, new)
    packed = compare_arrays(np.ascontiguousarray(base), np.ascontiguousarray(new))
    assert delta.crc32c == packed.crc32c
    assert bits(delta.gaps) == bits(packed.gaps)
    log, before = [], base.copy()
    apply_delta(base, packed, log)
    assert bits(base) == bits(new)
    roll_back(log)
    assert bits(base) == bits(before)


def test_gaps_use_the_width_with_fewer_bytes():
    base = np.zeros(200_000, np.int16)
    sparse, dense = base.copy(), base.copy()
    sparse[[100, 190_000]] = 1
    dense[::50] = 1
    narrow, wide = compare_arrays(base, dense), compare_arrays(base, sparse)
    assert narrow.gaps.dtype == np.uint8
    assert wide.gaps.tolist() == [100, 65535, 65535, 190_000 - 101 - 2 * 65535]
    assert decode(wide) == [100, 190_000]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([0.0, 0.002, 0.02, 0.3, 1.0]), min_size=2, max_size=4),
    st.integers(0, 3000),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32 - 1),
)
def test_composed_deltas_have_the_effect_of_the_chain(densities, count, dtype, seed):
    versions = [random_pair(count, dtype, 0, seed)[0]]
    for step, density in enumerate(densities):
        _, changed = random_pair(count, dtype, density, seed + step)
        mask = np.random.default_rng(seed + step).random(count) < density
        versions.append(np.where(mask, changed, versions[-1]))
    deltas = [compare_arrays(a, b) for a, b in pairwise(versions)]
    total = deltas[0]
    for delta in deltas[1:]:
        total = compose_deltas(total, delta)
    log, target = [], versions[0].copy()
    apply_delta(target, total, log)
    assert bits(target) == bits(versions[-1])
    roll_back(log)
    assert bits(target) == bits(versions[0])


LAYOUTS = [
    Layout.whole(),
    Layout.rows(3),
    Layout.axis(1, 4),
    Layout.flat(5),
    Layout.axis(2, 2) * Layout.rows(2),
    Layout.axis(1, 2) * Layout.flat(3),
]


@pytest.mark.parametrize("target", LAYOUTS, ids=repr)
@pytest.mark.parametrize("source", LAYOUTS, ids=repr)
def test_filtered_deltas_change_a_part_as_its_tensor(source, target):
    shape = (7, 11, 6)
    base, new = (a.reshape(shape) for a in random_pair(462, np.dtype("f4"), 0.2))
    for index in range(target.parts):
        part = target.take(base, index).copy()
        for number in range(source.parts):
            delta = compare_arrays(source.take(base, number), source.take(new, number))
            filtered = filter_delta(delta, shape, (source, number), (target, index))
            assert filtered.elements == part.size
            apply_delta(part, filtered, [])
        assert bits(part) == bits(target.take(new, index))


# ---- refusals ----


@pytest.fixture
def pair():
    return random_pair(3000, np.dtype(np.float32), 0.02)


def refuse(error, match, target, delta):
    """Check that a refused delta leaves the target and the log unchanged."""
    log, before = [], target.copy()
    with pytest.raises(error, match=match):
        apply_delta(target, delta, log)
    assert bits(target) == bits(before)
    assert log == []


def replaced(delta, **fields):
    values = {name: getattr(delta, name) for name in ("elements", "gaps", "values", "crc32c")}
    return Delta(**(values | fields))


def test_delta_of_another_array_is_refused(pair):
    base, new = pair
    delta = compare_arrays(base, new)
    refuse(CompatibilityError, "3000 elements does not belong to an array of 2999", base[1:], delta)
    refuse(CompatibilityError, "elements of 4 bytes", np.zeros(3000), delta)
    refuse(CompatibilityError, "a delta of float32", base.view(np.int32), delta)
    refuse(CompatibilityError, "byte-swapped", base.view(">f4"), delta)
    with pytest.raises(CompatibilityError, match="shape"):
        compare_arrays(base, new.reshape(30, 100))
    with pytest.raises(CompatibilityError, match="float32 and int32"):
        compare_arrays(base, new.view(np.int32))
    with pytest.raises(CompatibilityError, match="byte-swapped"):
        compare_arrays(base.view(">f4"), new.view(">f4"))
    with pytest.raises(CompatibilityError, match="does not belong to a part with 2999 elements"):
        filter_delta(delta, (2999,), (Layout.whole(), 0), (Layout.whole(), 0))


def test_damaged_streams_are_refused(pair):
    base, new = pair
    delta = compare_arrays(base, new)
    gaps, values = delta.gaps, delta.values
    escaped = np.append(gaps, np.uint8(255))
    for wrong, match in (
        (replaced(delta, gaps=gaps[:-1]), "gaps for"),
        (replaced(delta, values=values[:-1]), "gaps for"),
        (replaced(delta, gaps=escaped), "within a gap|pass the end"),
        (replaced(delta, gaps=np.full_like(gaps, 254)), "pass the end"),
        (replaced(delta, gaps=gaps[:0]), "0 gaps"),
    ):
        refuse(FormatError, match, base, wrong)
    for wrong in (
        replaced(delta, gaps=gaps.astype(np.int32)),
        replaced(delta, elements=-3000),
    ):
        refuse(ValueError, "gaps of uint8 or uint16 and at least 0", base, wrong)
    refuse(ValueError, "gaps must be a vector", base, replaced(delta, gaps=gaps[::2]))
    refuse(ValueError, "values must be", base, replaced(delta, values=values.reshape(1, -1)))


def test_a_wrong_base_is_found_by_the_checksum_and_undone(pair):
    base, new = pair
    delta = compare_arrays(base, new)
    other, log = base.copy(), []
    other.view(np.uint32)[decode(delta)[0] + 1] ^= 1
    before = other.copy()
    with pytest.raises(ChecksumError, match="another base"):
        apply_delta(other, delta, log)
    assert bits(other) != bits(before)
    roll_back(log)
    assert bits(other) == bits(before)


def test_read_only_and_shared_memory_are_refused(pair):
    base, new = pair
    delta = compare_arrays(base, new)
    base.flags.writeable = False
    refuse(ValueError, "read-only", base, delta)
    target = np.zeros(3000, np.float32)
    shared = replaced(delta, values=target[: len(delta.values)])
    refuse(ValueError, "must not share memory", target, shared)


def test_rolling_back_an_unapplied_delta_keeps_the_base(pair):
    """An interrupt can come between the entry of the log and the change."""
    base, new = pair
    delta, log, target = compare_arrays(base, new), [], base.copy()
    apply_delta(target, delta, log)
    target[:] = base
    roll_back(log)
    assert bits(target) == bits(base)


def test_mutated_streams_never_write_outside_of_the_target(pair):
    base, new = pair
    delta = compare_arrays(base, new)
    random = np.random.default_rng(3)
    room = np.zeros(3000 + 512, np.float32)
    target = room[256:-256]
    for _ in range(500):
        gaps, values = delta.gaps.copy(), delta.values.copy()
        for _ in range(random.integers(1, 4)):
            gaps[random.integers(len(gaps))] = random.integers(256)
        try:
            apply_delta(target, Delta(3000, gaps, values), [])
        except FormatError:
            continue
    assert not room[:256].any()
    assert not room[-256:].any()
