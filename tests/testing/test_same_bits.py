"""`assert_same_bits`: its error about differences, and the relations that it finds."""

import numpy as np
import pytest
from needs import needs

import mlstate
from mlstate.checkpoint import Layout, Shard
from mlstate.testing import assert_same_bits, run_ranks

WHOLE = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
NAN = np.array([0x7FC00001, 0x3F800000], np.uint32).view(np.float32)
OTHER_NAN = np.array([0xFFC00002, 0x3F800000], np.uint32).view(np.float32)


def changed(array, index, value):
    copy = array.copy()
    copy[index] = value
    return copy


def further(array, steps, towards=np.inf):
    """The values that are `steps` representable ones away."""
    for _ in range(steps):
        array = np.nextafter(array, array.dtype.type(towards))
    return array


def lines_of(actual, expected, **keywords):
    """The lines of the error, without the tensor's name; an empty list without an error."""
    if not hasattr(actual, "keys") and not isinstance(actual, str):
        actual, expected = {"w": actual}, {"w": expected}
    try:
        assert_same_bits(actual, expected, **keywords)
    except AssertionError as error:
        return str(error).removeprefix("1 of 1 tensors differ\nw: ").split("\n  ")
    return []


# ---- counts, positions and distances ----


def test_the_error_has_the_form_of_the_documentation():
    actual = {"same": WHOLE, "w": changed(WHOLE, (2, 3), 1.0), "new": np.ones(2)}
    expected = {"w": changed(WHOLE, (2, 3), 2.0), "same": WHOLE, "old": np.zeros(2)}
    with pytest.raises(AssertionError) as raised:
        assert_same_bits(actual, expected)
    assert str(raised.value).splitlines() == [
        "3 of 4 tensors differ",
        "w: 1 of 36 elements differ, by at most 8,388,608 ulps",
        "  first at [2, 3]: 1.0 (actual), 2.0 (expected)",
        "new: only in the actual state",
        "old: only in the expected state",
    ]


def test_a_long_error_lists_the_first_tensors():
    with pytest.raises(AssertionError) as raised:
        assert_same_bits({f"w{i}": np.ones(1) for i in range(30)}, {"w" * 99: np.ones(2)})
    lines = str(raised.value).splitlines()
    assert lines[0] == "31 of 31 tensors differ" and lines[-1] == "and 11 more" and len(lines) == 22


def test_the_first_index_of_a_later_block_is_found(monkeypatch):
    monkeypatch.setattr("mlstate.testing._same_bits._BLOCK", 5)
    actual = changed(changed(WHOLE, (4, 1), 0), (5, 5), 0)
    assert lines_of(actual, WHOLE)[0].startswith("2 of 36 elements differ, by at most 1,")
    assert lines_of(actual, WHOLE)[1].startswith("first at [4, 1]: 0.0 (actual), ")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("steps", [1, 3])
def test_ulps_count_representable_values_also_across_zero(dtype, steps):
    expected = np.array([1.0, -2.0, 6e-8, 0.0]).astype(dtype)
    actual = further(expected.view(np.float32 if dtype == np.complex64 else dtype), steps)
    actual = actual.view(dtype)
    assert not lines_of(actual, expected, ulps=steps)
    counted = "ulp" if steps == 1 else "ulps"
    assert f"by at most {steps} {counted}" in lines_of(actual, expected)[0]
    if steps > 1:
        text = f"by more than {steps - 1} ulp"
        assert text in lines_of(actual, expected, ulps=steps - 1)[0]
    smallest = np.finfo(dtype).smallest_subnormal
    assert not lines_of(np.full(2, -smallest, dtype), np.full(2, smallest, dtype), ulps=2)
    assert lines_of(np.full(2, -smallest, dtype), np.full(2, smallest, dtype), ulps=1)


SPECIAL = {
    "zeros": (-np.zeros(3), np.zeros(3), "3 of 3 elements differ, by at most 0 ulps", True),
    "NaN": (NAN, OTHER_NAN, "1 of 2 elements differ, by at most 0 ulps", True),
    "one NaN": (NAN, np.ones(2, "f4"), "1 of 2 elements differ; 1 NaN in one state only", False),
    "integers": (np.arange(3), np.arange(3) * 4, "2 of 3 elements differ, by at most 6", False),
    "one NaN of several": (
        np.float32([np.nan, 1, 3]),
        np.float32([1, 2, 3]),
        "2 of 3 elements differ, by at most 8,388,608 ulps; 1 NaN in one state only",
        False,
    ),
    "NaN beside infinity": (
        np.array([0x7C01], np.uint16).view(np.float16),
        np.float16([np.inf]),
        "1 of 1 elements differ; 1 NaN in one state only",
        False,
    ),
    "unsigned": (np.uint8([0]), np.uint8([255]), "1 of 1 elements differ, by at most 255", False),
    "signed": (np.int8([-128]), np.int8([127]), "1 of 1 elements differ, by at most 255", False),
    "bool": (np.array([True, False]), np.ones(2, bool), "1 of 2 elements differ", False),
    "texts": (np.array(["a", "b"]), np.array(["a", "c"]), "1 of 2 elements differ", False),
    "dtype": (WHOLE, WHOLE.astype("f8"), "dtype float32 (actual), float64 (expected)", False),
    "shape": (WHOLE[0], WHOLE[:, :2], "shape (6,) (actual), (6, 2) (expected)", False),
    "scalar": (np.float32(1), np.float32(2), "1 of 1 elements differ, by at most 8,388,608", False),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_and_dtypes(name):
    actual, expected, text, is_within_ulps = SPECIAL[name]
    assert lines_of(actual, expected)[0].startswith(text)
    assert bool(lines_of(actual, expected, ulps=1)) != is_within_ulps
    assert not lines_of(actual, actual.copy())


def test_values_that_print_alike_are_shown_by_their_bits():
    assert "first at [0]: 0x7fc00001 (actual), 0xffc00002" in lines_of(NAN, OTHER_NAN)[1]
    assert "first at [1]: b (actual), c (expected)" in lines_of(*SPECIAL["texts"][:2])[1]


def test_byte_order_and_strides_do_not_count():
    assert not lines_of(WHOLE.astype(">f4"), WHOLE)
    assert lines_of(WHOLE.astype(">f4").T, WHOLE)[-1] == "it is the expected tensor, transposed"


@pytest.mark.parametrize(("ulps", "error"), [(-1, ValueError), (0.5, TypeError), (True, TypeError)])
def test_ulps_must_be_a_count(ulps, error):
    with pytest.raises(error, match="ulps must be"):
        assert_same_bits({}, {}, ulps=ulps)


# ---- relations ----

CUBE = np.random.default_rng(1).normal(size=(4, 5, 6))
LINE = CUBE[0, 0]
RELATIONS = {
    "it is the expected tensor, transposed": (WHOLE.T, WHOLE),
    "it is the expected tensor, with axes 0 and 2 swapped": (CUBE.swapaxes(0, 2), CUBE),
    "its elements are the expected ones, in the same order": (WHOLE.reshape(4, 9), WHOLE),
    "the actual tensor is expected[2:5]": (WHOLE[2:5], WHOLE),
    "the actual tensor is expected[:, 1:3]": (WHOLE[:, 1:3], WHOLE),
    "the expected tensor is actual[:, :, 3:6]": (CUBE, CUBE[..., 3:]),
    "it is the expected tensor, rolled by 1 along axis 0": (np.roll(WHOLE, 1, 0), WHOLE),
    "it is the expected tensor, rolled by -2 along axis 1": (np.roll(WHOLE, -2, 1), WHOLE),
    "it is the expected tensor, rolled by 1": (np.roll(WHOLE, 1), WHOLE),
    "it is the expected tensor, rolled by 3": (np.roll(LINE, 3), LINE),
    "it is the expected tensor, shifted by 2 along axis 0": (
        np.concatenate([np.zeros_like(WHOLE[:2]), WHOLE[:-2]]), WHOLE,
    ),
    "it is the expected tensor, shifted by -1": (changed(np.roll(LINE, -1), 5, 0), LINE),
    "it has the 3 expected parts along axis 0 in the order [1, 0, 2]": (
        WHOLE[[2, 3, 0, 1, 4, 5]], WHOLE,
    ),
    "it has the 6 expected parts along axis 1 in the order [3, 1, 2, 0, 4, 5]": (
        WHOLE[:, [3, 1, 2, 0, 4, 5]], WHOLE,
    ),
    "it has the expected slices along axis 0 in another order": (
        np.random.default_rng(2).permutation(np.arange(40.0)), np.arange(40.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", RELATIONS)
def test_relations_are_named(text):
    assert lines_of(*RELATIONS[text])[-1] == text


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (np.zeros((3, 3)), np.ones((3, 3))),
        (changed(WHOLE.T, (0, 0), 9), WHOLE),
        (np.ones(9), np.arange(9.0)),
        (WHOLE.astype(np.complex64), WHOLE + 1j),
        (WHOLE[:5, :5], WHOLE),
        (np.zeros((0, 3)), np.zeros((3, 0))),
        (np.ones((3, 1)), np.zeros((0, 3))),
        (np.array([3.0, 1, 1, 1, 1, 1]), np.array([1.0, 1, 1, 1, 1, 5])),
    ],
)
def test_unrelated_tensors_have_no_relation(actual, expected):
    assert not [line for line in lines_of(actual, expected) if line.startswith(("it ", "the "))]


def test_equal_parts_are_numbered_once():
    rows = np.array([[1.0, 2], [3, 4], [3, 4], [5, 6]])
    text = "it has the 4 expected parts along axis 0 in the order [1, 0, 3, 2]"
    assert lines_of(rows[[1, 0, 3, 2]], rows)[-1] == text


@pytest.mark.parametrize(("limit", "most"), [("_SLICES", 5), ("_SOUGHT", 35)])
def test_relations_along_long_axes_and_of_large_tensors_are_not_sought(limit, most, monkeypatch):
    monkeypatch.setattr(f"mlstate.testing._same_bits.{limit}", most)
    moved = WHOLE[[1, 0, 2, 3, 4, 5]]
    assert lines_of(moved, WHOLE)[-1].startswith("first at [0, 0]: ")
    assert len(lines_of(WHOLE[2:5], WHOLE)) == 1
    rolled = "first at [0, 0]" if limit == "_SOUGHT" else "it is the expected tensor, rolled by 1"
    assert lines_of(np.roll(WHOLE, 1), WHOLE)[-1].startswith(rolled)


def test_the_tensor_with_the_same_values_is_named():
    states = {"a": WHOLE, "b": -WHOLE, "z": WHOLE[0]}, {"a": -WHOLE, "c": WHOLE, "z": WHOLE[0]}
    with pytest.raises(AssertionError) as raised:
        assert_same_bits(*states)
    text = str(raised.value)
    assert "a: 36 of 36" in text and "it is equal to the expected 'c'" in text
    assert "b: only in the actual state\n  it is equal to the expected 'a'" in text
    zeros = np.zeros(3)
    assert "equal" not in lines_of({"w": zeros, "v": zeros}, {"w": zeros + 1, "v": zeros})[-1]


# ---- parts, paths, tensors ----


@pytest.mark.parametrize("layout", [Layout.rows(3), Layout.flat(5), Layout.axis(1, 2)], ids=repr)
def test_a_shard_is_compared_with_its_part_of_the_whole(layout):
    shard, wrong = layout.shard(WHOLE, 1), layout.take(WHOLE, 0)
    assert not lines_of(shard, WHOLE) and not lines_of(WHOLE, shard)
    assert not lines_of(shard, layout.shard(WHOLE, 1))
    wrong = Shard(np.resize(wrong, shard.array.shape), layout, 1, shape=WHOLE.shape)
    for pair, text in [
        ((wrong, WHOLE), "the actual part is part 0 of the expected tensor"),
        ((WHOLE, wrong), "the expected part is part 0 of the actual tensor"),
    ]:
        lines = lines_of(*pair)
        assert lines[0].startswith(f"part 1 of {layout.parts}, ") and lines[-1] == text
    assert lines_of(shard, layout.shard(WHOLE, 0))[0].startswith("another part: Shard(1 of ")
    assert "shape" in lines_of(shard, WHOLE.reshape(4, 9))[0]


def test_ranks_compare_their_parts_and_raise_one_error(tmp_path):
    mlstate.save(tmp_path / "c", {"w": WHOLE, "b": LINE}, digest=True)
    rows, columns = Layout.rows(3), Layout.axis(1, 3)
    sides = {  # what each rank has of the expected state
        "path": lambda rank: tmp_path / "c",
        "rows": lambda rank: {"w": rows.shard(WHOLE, rank), "b": LINE},
        "columns": lambda rank: {"w": columns.shard(WHOLE, rank), "b": LINE},
        "one rank": lambda rank: {"w": WHOLE, "b": LINE} if rank == 2 else {},
    }

    def compare(group, weight):
        actual = {"w": rows.shard(weight, group.rank), "b": LINE}
        texts = []
        for expected in sides.values():
            try:
                assert_same_bits(actual, expected(group.rank), group=group)
            except AssertionError as error:
                texts.append(str(error))
        return texts

    assert run_ranks(3, lambda group: compare(group, WHOLE)) == [[]] * 3
    errors = run_ranks(3, lambda group: compare(group, changed(WHOLE, (2, 2), 7)))
    assert errors == errors[:1] * 3
    lines = [text.splitlines() for text in errors[0]]
    for each in lines[:2]:
        assert each[0] == "1 of 2 tensors differ" and len(each) == 3
        assert each[1].startswith("w: rank 1: part 1 of 3, 1 of 12 elements differ, by at most ")
        assert each[2].startswith("  first at [0, 2]: 7.0 (actual), ")
    assert lines[2][1].startswith("w: rank 0: another part: Shard(0 of 3 ") and len(lines[2]) == 4
    one_state = "this rank has it in one state only"
    assert lines[3][1:] == [f"w: rank 0: {one_state}", f"  rank 1: {one_state}"]


def test_ranks_together_must_have_all_of_a_tensor():
    def compare(group):
        shard = Layout.rows(4).shard(WHOLE, group.rank)
        with pytest.raises(mlstate.CompatibilityError, match="24 of the 36") as raised:
            assert_same_bits({"w": WHOLE}, {"w": shard}, group=group)
        return raised.value.name

    assert run_ranks(2, compare) == ["w"] * 2


def test_checkpoints_are_compared_by_the_names_of_their_digests(tmp_path):
    paths = [str(tmp_path / name) for name in ("a", "b")]
    for path, (weight, number) in zip(paths, [(WHOLE, 3), (WHOLE.T, 4)], strict=True):
        nested = {"run": {"counts": [number, WHOLE]}, "ema": {"w": weight}}
        mlstate.save(path, {"w": weight}, optimizer={"w.m": weight}, states=nested)
    assert_same_bits(*[paths[0]] * 2)
    assert_same_bits(paths[0], mlstate.load(paths[0]))
    with pytest.raises(AssertionError) as raised:
        assert_same_bits(*paths)
    text = str(raised.value)
    for name in ("w", "optimizer.w.m", "states.ema.w"):
        assert f"\n{name}: 30 of 36 elements differ" in text
    assert "states.run.counts.0: 1 of 1 elements differ, by at most 1\n" in text
    assert text.startswith("4 of 5 tensors differ") and text.count("transposed") == 3


@pytest.mark.torch
@needs("torch")
def test_tensors_and_modules_of_torch(torch):
    weight = torch.from_numpy(WHOLE)
    assert not lines_of(weight, WHOLE)
    assert lines_of(weight.T.bfloat16(), weight.bfloat16())[-1].endswith("transposed")
    narrow = torch.tensor([1.0, 2.0]).bfloat16()
    near = (narrow.view(torch.int16) + 2).view(torch.bfloat16)
    assert lines_of(near, narrow) == [
        "2 of 2 elements differ, by at most 2 ulps",
        "first at [0]: 1.015625 (actual), 1.0 (expected)",
    ]
    assert not lines_of(near, narrow, ulps=2)
    codes = narrow.to(torch.float8_e4m3fn)
    nan = torch.tensor([448.0, float("nan")]).to(torch.float8_e4m3fn)
    assert "1 NaN in one state only" in lines_of(nan, codes, ulps=99)[0]
    conjugate = torch.tensor([1 + 2j]).conj()
    assert not lines_of({"w": conjugate.resolve_conj()}, {"w": np.array([1 - 2j], np.complex64)})
    module, other = (torch.nn.Linear(3, 2) for _ in range(2))
    with pytest.raises(AssertionError, match="2 of 2 tensors differ\nweight: 6 of 6"):
        assert_same_bits(module, other)
    other.load_state_dict(module.state_dict())
    assert_same_bits(module, other)
