"""Digests of tensors: their definition, sums over parts, changes that they find, ranks, texts."""

import json

import child
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from needs import needs
from tries import tries

import mlstate
from mlstate import CompatibilityError, FormatError, _core
from mlstate.checkpoint import Layout, Shard
from mlstate.state import Digest
from mlstate.state._digest import boxes_of
from mlstate.state.records import DigestDiff, TensorDigest
from mlstate.testing import run_ranks

LANE = 1 << 64
DTYPES = ["<f4", ">f4", "<c8", ">c8", "u1", "<f2", ">i8", "?", "<c16", ">f8", "<U3", "m8[s]"]
LAYOUTS = [
    Layout.rows(3),
    Layout.axis(1, 4),
    Layout.axis(2, 5),
    Layout.rows(9),  # two parts are empty
    Layout.flat(4),
    Layout([(1, 2), ("flat", 3)]),
    Layout([(2, 2), (0, 2)]),
]


def mix(number):
    """splitmix64."""
    z = (number + 0x9E3779B97F4A7C15) % LANE
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % LANE
    z = (z ^ z >> 27) * 0x94D049BB133111EB % LANE
    return z ^ z >> 31


def defined(data):
    """The digest of bytes by the text of the definition."""
    lanes = [0, 0]
    for offset, byte in enumerate(data):
        word, place = divmod(offset, 4)
        block, within = divmod(word, 1024)
        keys = mix(within) % (1 << 32) | 1, mix(within) >> 32 | 1
        for lane, key in enumerate(keys):
            lanes[lane] += (byte << 8 * place) * key * (mix((1 << 36) + 2 * block + lane) | 1)
    return "".join(f"{lane % LANE:016x}" for lane in lanes)


def value(array):
    return mlstate.digest({"w": array})["w"].value


def random_array(seed, dtype, shape):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "U":
        return rng.choice(["", "a", "xyz"], shape).astype(dtype)
    return rng.integers(-100, 100, shape).astype(dtype)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 5, 63, 4095, 4096, 4097, 9001])
def test_the_value_is_the_defined_sum(nbytes):
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    assert value(data) == defined(data.tobytes())


@pytest.mark.parametrize("dtype", ["<f4", ">c16", "<U3", "m8[s]"])
def test_arrays_without_axes_have_digests(dtype):
    scalar = random_array(1, dtype, ())
    assert value(scalar) == defined(scalar.astype(scalar.dtype.newbyteorder("<")).tobytes())


def test_values_of_version_1_never_change():
    rows = np.arange(30_000, dtype=np.float32).reshape(100, 300)
    state = mlstate.digest({"rows": rows, "empty": np.zeros((0, 3), np.int8)})
    assert state["rows"].value == "4ddd59a3f6572400e85b43a49759b800"
    assert str(state) == "1:f89d9808ff7733c008f477ad79684eb94f1e2a527f490dfc914e075a028b54eb"


@given(
    st.integers(0, 9),
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 40)),
    st.permutations(range(3)),
    st.sampled_from([1, -1, 2]),
)
def test_strides_and_byte_order_do_not_count(seed, dtype, shape, axes, step):
    array = random_array(seed, dtype, shape).transpose(axes)[..., ::step]
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    assert value(array) == defined(little.tobytes())
    assert mlstate.digest({"w": array}) == mlstate.digest({"w": little})


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("dtype", ["<f4", "u1", ">c8", "<U3"])
def test_parts_of_any_layout_have_the_digest_of_the_whole(layout, dtype):
    full = random_array(1, dtype, (7, 5, 6))

    def divided(group):
        return mlstate.digest({"w": layout.shard(full, group.rank)}, group=group)

    expected = mlstate.digest({"w": full})
    assert run_ranks(layout.parts, divided) == [expected] * layout.parts


def padded(part):
    """The same part in a larger buffer, as parts with padding are."""
    buffer = np.ones([length + 3 for length in part.shape], part.dtype)
    view = buffer[tuple(slice(1, length + 1) for length in part.shape)]
    view[...] = part
    return view


MEMORY = {
    "padded": padded,
    "every second element": lambda part: np.repeat(part, 2, axis=-1)[..., ::2],
    "backward": lambda part: part[..., ::-1].copy()[..., ::-1],
    "Fortran order": np.asfortranarray,
    "big-endian": lambda part: part.astype(part.dtype.newbyteorder(">")),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("kind", MEMORY)
def test_the_memory_of_a_part_does_not_count(layout, kind):
    full = random_array(2, "<f4", (7, 5, 6))

    def divided(group):
        part = MEMORY[kind](layout.shard(full, group.rank).array)
        shard = Shard(part, layout, group.rank, shape=full.shape)
        return mlstate.digest({"w": shard}, group=group)

    expected = mlstate.digest({"w": full})
    assert run_ranks(layout.parts, divided) == [expected] * layout.parts


def test_a_range_of_a_box_is_divided_into_boxes():
    for lengths in [(5,), (3, 4), (2, 3, 4), (1, 5, 1, 3), ()]:
        numbers = np.arange(np.prod(lengths, dtype=int)).reshape(lengths)
        for begin in range(numbers.size + 1):
            for end in range(begin, numbers.size + 1):
                numbers_of_boxes = []
                for starts, sizes in boxes_of(lengths, begin, end):
                    box = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
                    numbers_of_boxes += numbers[box].reshape(-1).tolist()
                assert numbers_of_boxes == list(range(begin, end))


def test_large_tensors_are_divided_among_threads_with_the_same_bits():
    full = np.random.default_rng(0).integers(0, 1 << 62, (3, 1 << 19))  # 12 MiB
    parts = [_core.digest_part(row, (full.size,), (n << 19,)) for n, row in enumerate(full)]
    sums = [sum(lane) % LANE for lane in zip(*parts, strict=True)]
    for array in (full, np.asfortranarray(full)):
        assert _core.digest_part(array, full.shape, (0, 0)) == tuple(sums)


PROGRAM = """
import numpy as np, mlstate
rng = np.random.default_rng(0)
for size in (*range(70), 5000, 100_000):
    array = rng.integers(0, 256, size, np.uint8)
    print(mlstate.digest({"w": array, "odd": array[3:], "matrix": array[: size // 7 * 7].reshape(-1, 7).T}))
"""  # noqa: E501


def test_every_instruction_set_gives_the_same_bits():
    outputs = {}
    for cpu in _core.cpu_offered():
        outputs[cpu] = child.run(PROGRAM, MLSTATE_CPU=cpu)
    assert "scalar" in outputs
    assert len({*outputs.values()}) == 1


# ---- changes ----


def lanes_of(array):
    return _core.digest_part(array, array.shape, (0,) * array.ndim)


def test_every_change_of_bytes_changes_both_lanes():
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, 40_000, np.uint8)
    before = lanes_of(data)
    for _ in range(tries(20_000)):
        place, new = rng.integers(data.size), rng.integers(1, 256)
        data[place] ^= new
        after = lanes_of(data)
        assert before[0] != after[0] and before[1] != after[1], (place, new)
        before = after


def test_two_changed_signs_do_not_cancel():
    rng = np.random.default_rng(4)
    values = rng.normal(size=5_000)
    before = lanes_of(values)
    for _ in range(tries(5_000)):
        pair = rng.choice(values.size, 2, replace=False)
        values[pair] *= -1
        assert lanes_of(values) != before, pair
        values[pair] *= -1


MOVES = {
    "swap": lambda a, i, j: a.reshape(-1).__setitem__([i, j], a.reshape(-1)[[j, i]]),
    "rows": lambda a, i, j: a.__setitem__([i % 64, j % 64], a[[j % 64, i % 64]]),
    "columns": lambda a, i, j: a.__setitem__(np.s_[:, [i % 96, j % 96]], a[:, [j % 96, i % 96]]),
    "negate": lambda a, i, j: np.negative(a, out=a),
    "shift": lambda a, i, j: a.__setitem__(..., np.roll(a, i % 90 + 1)),
    "blocks": lambda a, i, j: a.reshape(6, -1).__setitem__(
        [i % 6, j % 6], a.reshape(6, -1)[[j % 6, i % 6]]
    ),
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("move", MOVES)
def test_moved_elements_are_found(move, dtype):
    rng = np.random.default_rng(5)
    values = rng.permutation(64 * 96).reshape(64, 96).astype(dtype)
    for _ in range(tries(1_100)):
        before, old = lanes_of(values), values.tobytes()
        MOVES[move](values, rng.integers(values.size), rng.integers(values.size))
        assert (lanes_of(values) == before) == (values.tobytes() == old)


def test_a_transpose_of_bytes_is_found():
    for seed in range(tries(200)):
        square = np.random.default_rng(seed).normal(size=(24, 24)).astype(np.float32)
        assert lanes_of(square) != lanes_of(np.ascontiguousarray(square.T))


# ---- ranks ----

FULL = np.arange(42, dtype=np.float32).reshape(7, 6)


def changed(rank):
    copy = FULL.copy()
    copy[0, 0] += rank == 2
    return copy


REFUSED = {
    "the copy of rank 2 differs from that of the other 2 ranks": changed,
    "the copies of ranks 0, 1, 2 differ": lambda rank: FULL + rank,
    "its parts have 36 of the 42 elements": lambda rank: Layout.rows(4).shard(FULL, rank),
    "parts of it overlap": lambda rank: Layout.rows(2).shard(FULL, 1) if rank else FULL,
    "another dtype: float32 on 0; float64 on 1, 2": lambda rank: (
        FULL.astype(np.float64) if rank else FULL
    ),
    "another shape: (7, 6) on 0, 1; (6, 7) on 2": lambda rank: (
        FULL.reshape(6, 7) if rank == 2 else FULL
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_every_rank_names_the_tensor_and_the_ranks(text):
    def refused(group):
        with pytest.raises(CompatibilityError) as raised:
            mlstate.digest({"good": FULL, "w": REFUSED[text](group.rank)}, group=group)
        return raised.value.name, str(raised.value)

    for name, message in run_ranks(3, refused):
        assert name == "w"
        assert message.startswith("digest of 'w': ") and text in message


def test_a_failure_of_one_rank_is_named_by_all():
    def refused(group):
        state = {"w": np.array([object()])} if group.rank == 1 else {"w": FULL}
        with pytest.raises(CompatibilityError) as raised:
            mlstate.digest(state, group=group)
        return str(raised.value)

    error = "an array of object has no bytes of its own"
    assert run_ranks(3, refused) == [f"rank 1: {error}", error, f"rank 1: {error}"]


def test_a_part_without_its_group_is_refused():
    with pytest.raises(CompatibilityError, match=r"24 of the 42 elements.*pass the group="):
        mlstate.digest({"w": Layout.rows(2).shard(FULL, 0)})


def test_ranks_may_have_other_tensors():
    def both(group):
        return mlstate.digest({f"w{group.rank}": FULL, "b": FULL[0]}, group=group)

    expected = mlstate.digest({"w0": FULL, "w1": FULL, "b": FULL[0]})
    assert run_ranks(2, both) == [expected] * 2


# ---- values ----


@pytest.mark.parametrize("value", [3, [1.0], None, np.ones(2)])
def test_other_values_are_refused(value):
    with pytest.raises(TypeError, match="a state must be a mapping of str to arrays"):
        mlstate.digest(value)


def test_a_masked_array_is_refused():
    with pytest.raises(TypeError, match="'w' is a masked array"):
        mlstate.digest({"w": np.ma.ones(3)})


def test_digests_are_compared_by_name_dtype_shape_and_value():
    first = mlstate.digest({"a": FULL, "b": FULL, "c": FULL, "d": FULL})
    second = mlstate.digest({"d": FULL, "c": -FULL, "b": FULL.reshape(6, 7), "e": FULL, "f": FULL})
    difference = first.diff(second)
    assert isinstance(difference, DigestDiff)
    assert not difference.identical and first != second
    assert difference.missing == ["a"] and difference.unexpected == ["e", "f"]
    assert [name for name, *_ in difference.changed] == ["b", "c"] and difference.unchanged == 1
    assert "shape " in str(difference) and "only in the second" in str(difference)
    assert first.diff(Digest(first)).identical and first == Digest(first)
    assert repr(first).startswith("<Digest: 4 tensors, 1:")
    assert "<td>float32" in first._repr_html_() and "<td>c" in difference._repr_html_()


def test_the_order_of_names_does_not_count():
    first, second = (
        mlstate.digest({"a": FULL, "b": FULL}),
        mlstate.digest({"b": FULL, "a": FULL}),
    )
    assert first == second and str(first) == str(second) and hash(first) == hash(second)


def test_json_returns_the_digest():
    digest = mlstate.digest({"a": FULL, 'ü "x"': np.zeros((0, 2)), "scalar": np.float32(1)})
    assert Digest.from_json(digest.to_json()) == digest
    assert isinstance(digest["scalar"], TensorDigest)
    assert json.loads(digest.to_json())["tensors"]["a"][:2] == ["float32", [7, 6]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not the JSON of a digest"),
        ("[]", "not the JSON of a digest"),
        ('{"version": 1, "tensors": {"w": ["f", [1], "00"]}}', "no tensor is described by"),
        (
            '{"version": 1, "tensors": {"w": ["f", [-1], "' + "0" * 32 + '"]}}',
            "no tensor is described",
        ),
        ('{"version": 1, "tensors": {"w": 3}}', "not the JSON of a digest"),
        ('{"version": 2, "tensors": {}}', "has version 2, and this mlstate computes version 1"),
    ],
)
def test_another_text_is_refused(text, reason):
    with pytest.raises(FormatError, match=reason):
        Digest.from_json(text)


@pytest.mark.torch
@needs("torch")
@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8", "int64", "complex64", "bool"])
def test_operations_of_torch_give_the_bits_of_the_core(torch, name):
    from mlstate.integrations.torch._tensors import digest_part

    full = torch.arange(-120, 120).reshape(6, 5, 8).to(getattr(torch, name))
    for starts in ((0, 0, 0), (3, 2, 1)):
        part = full[starts[0] :, starts[1] : 4, starts[2] : 5]
        expected = _core.digest_part(part, tuple(full.shape), starts)
        assert digest_part(part, tuple(full.shape), starts) == expected
    big = torch.arange(3 << 20).to(getattr(torch, name))
    assert digest_part(big, (4 << 20,), (77,)) == _core.digest_part(big, (4 << 20,), (77,))


@pytest.mark.torch
@needs("torch")
def test_a_module_has_the_digest_of_its_state(torch):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).bfloat16()
    expected = mlstate.digest({name: t.detach() for name, t in module.state_dict().items()})
    assert mlstate.digest(module) == mlstate.digest({"model": module}) == expected
    assert expected["0.weight"][:2] == ("bfloat16", (4, 3))
    tied = Shard(module[0].weight, Layout.rows(1), shape=(4, 3))
    assert mlstate.digest({"w": tied})["w"] == expected["0.weight"]


def test_a_group_of_another_kind_is_refused():
    for group in ("gloo", object()):
        with pytest.raises(TypeError, match="TorchGroup wraps; got"):
            mlstate.digest({"w": np.ones(2)}, group=group)
