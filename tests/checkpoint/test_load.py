"""Loading into new and existing arrays: selection by name, and arrays that share memory."""

import re
import sys

import child
import numpy as np
import pytest
from checkpoint_model import same
from weight_folder import write_weight_file

import mlstate
from mlstate import CompatibilityError
from mlstate.checkpoint import Layout, Shard, _ties


def random(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_targets_that_are_one_array_are_filled_by_equal_tensors(path):
    count = 3 << 20  # several threads read
    mlstate.save(path, {"a": np.arange(count) * 1.0, "b": np.arange(count) * 1.0})
    tied = np.full(count, 7.0)
    for target in ({"a": tied, "b": tied}, {"b": tied.reshape(-1), "a": tied[:]}):
        mlstate.load(path, into={"model": target})
        assert np.array_equal(tied, np.arange(count))
        tied[:] = 7


def unequal(first, second):
    """The pattern of an error for two targets of one memory."""
    both = rf"targets {re.escape(first)} and {re.escape(second)} share memory, as tied"
    return pytest.raises(CompatibilityError, match=f"{both}.*different bytes: .*names=.*rename=")


# each has a pair of targets of one memory, and the stored value of the second one that is equal
VIEWS = {
    "the same array": (lambda x: (x, x), lambda a: a),
    "equal views": (lambda x: (x[:2], x[:2]), lambda a: a),
    "columns of a matrix": (lambda x: (x[:, 1:3], x[:, 1:3]), lambda a: a),
    "another shape": (lambda x: (x, x.reshape(6, 2)), lambda a: a.reshape(6, 2)),
    "transposed": (lambda x: (x, x.T), lambda a: a.T),
    "reversed": (lambda x: (x, x[::-1]), lambda a: a[::-1]),
}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("kind", VIEWS)
def test_names_of_one_memory_need_bytes_that_are_equal_there(path, kind, cast):
    room = np.full((4, 3), 7, np.float32)
    views, equal = VIEWS[kind]
    first, second = views(room)
    value = random(first.shape).astype(np.float64 if cast else np.float32)
    same_values = {"a": value, "b": np.ascontiguousarray(equal(value))}
    other_values = same_values | {"b": same_values["b"] + np.eye(*second.shape, dtype=value.dtype)}
    mlstate.save(path / "equal", same_values)
    mlstate.save(path / "other", other_values)
    mlstate.save_file(other_values, path / "other.safetensors")
    into = {"model": {"a": first, "b": second}}
    for name in ("other", "other.safetensors"):
        with unequal("model['a']", "model['b']"):
            mlstate.load(path / name, into=into, cast=cast)
        assert (room == 7).all()
    mlstate.load(path / "other", into=into, cast=cast, names="b")
    assert np.array_equal(second, other_values["b"].astype(np.float32))
    mlstate.load(path / "equal", into=into, cast=cast)
    assert np.array_equal(first, value.astype(np.float32))


def test_values_of_one_memory_are_compared_after_rename_and_cast(path):
    single = np.array([1 / 3, 2 / 3], np.float32)
    rounded = single.astype(np.float64) + 1e-12  # to `single`
    mlstate.save(path, {"x.a": single, "x.b": rounded, "x.c": single + 1})
    tied = np.zeros(2, np.float32)
    into = {"model": {"a": tied, "b": tied, "c": np.zeros(2, np.float32)}}
    mlstate.load(path, into=into, rename={"x.": ""}, cast=True)
    assert np.array_equal(tied, single)
    tied[:] = 7
    with unequal("model['a']", "model['b']"):
        mlstate.load(path, into=into, rename={"x.a": "a", "x.b": "c", "x.c": "b"}, cast=True)
    assert (tied == 7).all()


def test_tensors_of_one_memory_are_compared_in_pieces(path, monkeypatch):
    monkeypatch.setattr(_ties, "_PIECE_BYTES", 1000)
    wide = np.zeros((40, 30), np.float32)
    for row, column in ((0, 0), (17, 29), (39, 29)):
        other = wide.copy()
        other[row, column] = -0.0
        model = {"a": wide, "b": other}
        name = f"{row}.safetensors"  # without checksums: of another program
        mlstate.save(path / str(row), model)
        write_weight_file(path / name, model)
        for source, cut in (
            (name, {}),
            (str(row), {}),
            (str(row), {"layout": Layout.axis(1, 2), "rank": int(column >= 15)}),
            (str(row), {"layout": "rows", "world_size": 4, "rank": row // 10}),
            (str(row), {"layout": "flat", "world_size": 4, "rank": row // 10}),
        ):
            shape = {"layout": (40, 30), "rows": (10, 30), "flat": (300,)}
            kind = cut.get("layout", "layout")
            tied = np.full(shape.get(kind, (40, 15)), 7.0)
            with unequal("model['a']", "model['b']"):
                mlstate.load(
                    path / source, into={"model": {"a": tied, "b": tied}}, cast=True, **cut
                )
            assert (tied == 7).all()


def test_equal_checksums_are_enough_for_one_memory(path, monkeypatch):
    value = random((64, 8))
    mlstate.save(path, {"a": value, "b": value.copy()})
    monkeypatch.setattr(_ties, "_read", None)  # calling it would raise
    tied = np.zeros_like(value)
    mlstate.load(path, into={"model": {"a": tied, "b": tied}})
    assert np.array_equal(tied, value)


def test_a_comparison_of_tied_tensors_counts_no_progress(path):
    mlstate.save(path, {"a": np.arange(1000.0), "b": np.arange(1000.0, dtype=np.float32)})
    tied, counts = np.zeros(1000), []
    into = {"model": {"a": tied, "b": tied}}
    mlstate.load(path, into=into, cast=True, progress=counts.append)
    assert sum(counts) == 4000 and tied[-1] == 999


@pytest.mark.parametrize("equal", [True, False])
def test_one_array_may_be_the_target_of_two_sections(path, equal):
    value = random(8)
    mlstate.save(
        path, {"w": value}, {"w.m": value if equal else value + 1}, states={"s": {"v": value}}
    )
    shared = np.full(8, 7, np.float32)
    into = {"model": {"w": shared}, "optimizer": {"w.m": shared}, "states": {"s": {"v": shared}}}
    if equal:
        mlstate.load(path, into=into)
        assert np.array_equal(shared, value)
        return
    with unequal("model['w']", "optimizer['w.m']"):
        mlstate.load(path, into=into)
    assert (shared == 7).all()


def test_targets_sharing_memory_are_refused_before_writing(path):
    mlstate.save(path, {"a": np.ones(8), "b": np.ones(8)}, {"a.m": np.ones(8)})

    def refused(text, memory, **into):
        before = memory.copy()
        with pytest.raises(ValueError, match=text):
            mlstate.load(path, into=into)
        assert np.array_equal(memory, before)

    memory = np.arange(16.0)
    both = r"the targets model\['a'\] and model\['b'\] share memory"
    refused(both, memory, model={"a": memory[:8], "b": memory[7:15]})
    refused(
        r"model\['b'\] and model\['a'\] share", memory, model={"a": memory[8:], "b": memory[1:9]}
    )
    other = memory[:8].view(np.int64)
    mlstate.save(path / "kinds", {"a": np.ones(8), "b": np.ones(8, np.int64)})
    with pytest.raises(ValueError, match=both):
        mlstate.load(path / "kinds", into={"model": {"a": memory[:8], "b": other}})
    model = {"a": memory[:8], "b": memory[8:]}
    refused(
        r"model\['a'\] and optimizer\['a.m'\] share",
        memory,
        model=model,
        optimizer={"a.m": memory[1:9]},
    )

    columns = {"a": memory[::2], "b": memory[1::2]}  # the two share no byte
    mlstate.load(path, into={"model": columns})
    assert (memory == 1).all()


def test_targets_with_gaps_are_compared_element_by_element(path):
    model = {name: random((4, 3), seed) for seed, name in enumerate("abcd")}
    mlstate.save(path, model)
    rows = np.zeros((4, 12), np.float32)
    mlstate.load(path, into={"model": {n: rows[:, k::4] for k, n in enumerate("abcd")}})
    assert all((rows[:, k::4] == model[n]).all() for k, n in enumerate("abcd"))
    same_part = {"a": rows[:, :3], "b": rows[:, :3], "c": rows[:, 3:6]}  # tied, as if packed
    with unequal("model['a']", "model['b']"):
        mlstate.load(path, into={"model": same_part}, names="[abc]")
    mlstate.load(path, into={"model": same_part}, names="[bc]")
    assert (rows[:, :3] == model["b"]).all() and (rows[:, 3:6] == model["c"]).all()
    before = rows.copy()
    for targets in (
        {"a": rows[:, :3], "b": rows[:, 2:5]},
        {"a": rows[:, :3], "b": rows[::-1, :3]},
        {"a": rows[:, ::3][:, :3], "b": rows[:, ::2][:, :3]},
        {"a": rows[:, :3], "b": rows.reshape(-1)[:12].reshape(4, 3)},
    ):
        with pytest.raises(ValueError, match=r"'[ab]'\] and model\['[ab]'\] share"):
            mlstate.load(path, into={"model": targets}, names="[ab]")
    for strides in ((0, 4), (4, 4), (12, 0)):
        window = np.lib.stride_tricks.as_strided(rows, (4, 3), strides)
        with pytest.raises(ValueError, match="its elements share memory"):
            mlstate.load(path, into={"model": {"a": window}}, names="a")
    assert (rows == before).all()


def test_selected_names_must_have_targets(path):
    model = {"enc.w": random(4), "enc.b": random(4, seed=1), "head.w": random(2)}
    mlstate.save(path, model, {"enc.w.m": random(4), "head.w.m": random(2)})

    def refused(text, names, missing="skip", **into):
        before = {section: {k: v.copy() for k, v in into[section].items()} for section in into}
        with pytest.raises(mlstate.CompatibilityError, match=text):
            mlstate.load(path, names=names, into=into, missing=missing)
        assert all(same(before[section], into[section]) for section in into)

    def zeros(*names):
        return {name: np.zeros(4, np.float32) for name in names}

    hint = r"2 of 2 names match with rename={'enc.': ''}"
    refused(rf'(?s)Unexpected key.*"enc.b", "enc.w"\..*{hint}', "enc", model=zeros("w", "b"))
    refused('Unexpected key.*"enc.w"', "enc.w", model=zeros("enc.W"))
    refused('Unexpected key.*"enc.w.m"', "enc", model=zeros("enc.w", "enc.b"), optimizer={})
    refused('Missing key.*"enc.c"', "enc", model=zeros("enc.w", "enc.b", "enc.c"))
    refused('Missing key.*"enc.w.v"', "enc", "error", optimizer=zeros("enc.w.m", "enc.w.v"))

    into = {"model": zeros("enc.w", "enc.b", "head.w", "new.w"), "optimizer": zeros("enc.w.m")}
    into["optimizer"] |= {"enc.b.m": np.ones(4), "new.w.m": np.ones(4)}
    mlstate.load(path, names="enc", into=into, missing="zeros")
    assert same({"enc.w": random(4)}, {"enc.w": into["model"]["enc.w"]})
    assert not into["model"]["head.w"].any() and not into["model"]["new.w"].any()
    assert not into["optimizer"]["enc.b.m"].any() and into["optimizer"]["new.w.m"].all()


# ---- new arrays ----

FEW_BYTES = """
import resource
import mlstate

path, count = {path!r}, {count}
mlstate.set_num_threads(2)
mlstate.load(path)  # the threads are there from now on

def loaded():
    model = mlstate.load(path).model
    return len(model) == count and all((model[f"w{{i}}"] == i).all() for i in range(count))

def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used() + (24 << 20), before[1]))
for _ in range(3):
    try:
        mlstate.load(path)
    except MemoryError:
        print("no memory")
resource.setrlimit(resource.RLIMIT_AS, before)
print(loaded())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory differ")
def test_arrays_that_find_no_memory_end_a_load_that_has_begun(path):
    """By then reads into the first arrays have begun, and their memory must outlive them."""
    count = 40
    mlstate.save(path, {f"w{i}": np.full(1 << 19, i, np.float32) for i in range(count)})  # 80 MiB
    out = child.run(FEW_BYTES.format(path=str(path), count=count))
    assert out.split("\n")[:-1] == ["no memory"] * 3 + ["True"]


def test_small_tensors_load_in_any_requested_order(path):
    """Arrays are allocated in the order of the names, and filled in the order of the file."""
    names = [f"w{i:04}" for i in range(3000)]
    mlstate.save(path, {name: np.full(1100, i, np.int32) for i, name in enumerate(names)})
    shuffled = [names[i * 7 % 3000] for i in range(3000)]
    for order in (names, names[::-1], shuffled):
        model = mlstate.load(path, names=order).model
        assert list(model) == list(mlstate.load(path, names=order, verify=False).model)
        for name in order:
            assert (model[name] == int(name[1:])).all()


def test_shards_in_into_take_their_own_part_only(tmp_path):
    array, rows = np.arange(8.0).reshape(4, 2), Layout.rows(2)
    mlstate.save(tmp_path, {"w": array}, {"w.m": array[:, 0]})
    for number, options in enumerate(({}, {"layout": "rows"}, {"layout": Layout.axis(1, 2)})):
        for rank in range(2):
            data = np.zeros((4, 2))
            into = {"model": {"w": rows.shard(data, 1)}}
            parts = {"rank": rank, "world_size": 2, **options} if number else {}
            if (number, rank) == (1, 1):
                mlstate.load(tmp_path, into=into, **parts)
                assert data[2:].tolist() == array[2:].tolist() and not data[:2].any()
                continue
            with pytest.raises(CompatibilityError, match=r"model\['w'\] is a Shard, part 1"):
                mlstate.load(tmp_path, into=into, **parts)
            assert not data.any()
    other = Shard(np.zeros((2, 2)), rows, 0, shape=(3, 2))
    with pytest.raises(CompatibilityError, match=r"part 0 of shape \(3, 2\)"):
        mlstate.load(tmp_path, into={"model": {"w": other}}, rank=0, world_size=2, layout="rows")


@pytest.mark.parametrize("steps", [[(0, 1)], [(0, 1), (1, 1)]])
def test_a_shard_cut_into_one_part_is_filled_as_the_whole_array(tmp_path, steps):
    array = np.arange(8.0).reshape(4, 2)

    def shard_of(data):
        return Shard(data, Layout(steps), 0, shape=(4, 2))

    mlstate.save(tmp_path, {"w": shard_of(array)}, {"w": shard_of(array)})
    data = np.zeros((2, 4, 2))
    into = {"model": {"w": shard_of(data[0])}, "optimizer": {"w": shard_of(data[1])}}
    mlstate.load(tmp_path, into=into)
    assert (data == array).all()
    second = Shard(data[0, :2], Layout([(0, 2), *steps[1:]]), 1, shape=(4, 2))
    mlstate.load(tmp_path, into={"model": {"w": second}}, layout=Layout.rows(2), rank=1)
    assert (data[0] == array[[2, 3, 2, 3]]).all()


def test_errors_of_loads_name_the_state_of_an_optimizer(tmp_path):
    moments = np.arange(20_000.0)
    mlstate.save(tmp_path, optimizer={"w.m": moments})
    read_only = moments.copy()
    read_only.flags.writeable = False
    for target, kind in (
        (np.zeros(3), CompatibilityError),
        (np.zeros(20_000, "i4"), CompatibilityError),
        (read_only, ValueError),
    ):
        with pytest.raises(kind, match=r"'w\.m'") as caught:
            mlstate.load(tmp_path, into={"optimizer": {"w.m": target}})
        assert getattr(caught.value, "name", "w.m") == "w.m"
    [file] = (tmp_path / "optim_state").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(mlstate.ChecksumError, match=r"tensor 'w\.m'") as caught:
        mlstate.load(tmp_path)
    assert caught.value.name == "w.m"


def test_the_error_of_a_dtype_keeps_its_hint_for_long_shapes(tmp_path):
    shape = (1,) * 16
    mlstate.save(tmp_path, {"w": np.ones(shape, "f8")})
    with pytest.raises(CompatibilityError, match="cast=True converts floats"):
        mlstate.load(tmp_path, into={"model": {"w": np.ones(shape, "f4")}})


def test_a_layout_cuts_states_saved_without_their_model_like_the_parameter(tmp_path):
    states = {
        "w.row": np.ones((4, 1)),
        "w.col": np.ones((1, 3)),
        "w.step": np.ones(1),
        "b.m": np.arange(4.0),
        "b.step": np.ones(1),
    }
    mlstate.save(tmp_path / "alone", optimizer=states)
    mlstate.save(tmp_path / "both", {"w": np.ones((4, 3)), "b": np.ones(4)}, states)
    for name in ("alone", "both"):
        loaded = mlstate.load(tmp_path / name, rank=1, world_size=2, layout="rows").optimizer
        shapes = {key: array.shape for key, array in loaded.items()}
        assert shapes == {
            "w.row": (2, 1),
            "w.col": (1, 3),
            "w.step": (1,),
            "b.m": (2,),
            "b.step": (1,),
        }
