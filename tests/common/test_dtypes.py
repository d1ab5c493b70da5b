"""bfloat16 and the 8-bit floats without ml_dtypes: bytes and dtype names are preserved."""

import copy
import json
import pickle
import sys
import warnings

import child
import ml_dtypes
import numpy as np
import pytest
from any_format import read_any, write_any

import mlstate
from mlstate import ModelStateDict, OptimizerStateDict, StateDict, load_file, save_file
from mlstate._common.dtypes import (
    DTYPES,
    LABEL,
    as_numbers,
    label_of,
    ml_dtype,
    name_of,
    stored_dtype,
    text_of,
)
from mlstate.checkpoint import CheckpointManager, Layout, Shard, save_async
from mlstate.cli import main
from mlstate.collectives import SingleGroup
from mlstate.collectives._memory import reduce_parts
from mlstate.coreml import FakeMLState, transition_coreml_state
from mlstate.distributed import DistributedStateCollector
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit, GradientAccumulator
from mlstate.kv import KVState, transition_kv_state
from mlstate.state import check_compatibility, diff, load_into, rename
from mlstate.testing import run_ranks

BYTES = [info.name for info in DTYPES if info.kind == "float8"]
NAMES = ["bfloat16", *BYTES]
FILE_NAMES = [info.file_name for info in DTYPES if info.name in NAMES]
WITHOUT = "import sys; sys.modules['ml_dtypes'] = sys.modules['torch'] = None\n"


def every_bit_pattern(dtype):
    size = np.dtype(dtype).itemsize
    return np.arange(256**size, dtype=f"u{size}").reshape(16, -1).view(dtype)


def state_of(make=lambda name: np.dtype(getattr(ml_dtypes, name))):
    return StateDict({f"layer.{name}": every_bit_pattern(make(name)) for name in NAMES})


def header(path):
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def bits(state):
    return {name: array.view(f"u{array.itemsize}").tobytes() for name, array in state.items()}


def true_names(state):
    return {name: name_of(array.dtype) for name, array in state.items()}


TRUE = {f"layer.{name}": name for name in NAMES}


@pytest.fixture
def without(monkeypatch):
    """ml_dtypes is missing, and the warning about it is off."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def state():
    """Every bit pattern of every dtype, in a process without ml_dtypes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ml_dtypes", None)
        return state_of(stored_dtype)


# ---- the table of the core ----

# safetensors defines the file names; NumPy and ml_dtypes define the names in Python.
TABLE = [
    ("float16", "F16", 2), ("bfloat16", "BF16", 2), ("float32", "F32", 4), ("float64", "F64", 8),
    ("int8", "I8", 1), ("int16", "I16", 2), ("int32", "I32", 4), ("int64", "I64", 8),
    ("uint8", "U8", 1), ("uint16", "U16", 2), ("uint32", "U32", 4), ("uint64", "U64", 8),
    ("bool", "BOOL", 1), ("complex64", "C64", 8), ("float8_e4m3fn", "F8_E4M3", 1),
    ("float8_e5m2", "F8_E5M2", 1), ("float8_e8m0fnu", "F8_E8M0", 1),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ", 1), ("float8_e5m2fnuz", "F8_E5M2FNUZ", 1),
    ("float4_e2m1fn_x2", "F4", 1), ("float6_e2m3fn_x4", "F6_E2M3", 1),
    ("float6_e3m2fn_x4", "F6_E3M2", 1),
]  # fmt: skip


def test_dtype_table_matches_the_formats():
    assert [info[:3] for info in DTYPES] == TABLE


@pytest.mark.parametrize("info", DTYPES, ids=lambda info: info.name)
def test_table_dtypes_match_numpy_and_ml_dtypes(info):
    if info.kind == "packed":  # of no package: labelled bytes
        dtype = stored_dtype(info.name)
        with pytest.raises(TypeError, match=f"cannot compute with {info.name}: its bytes hold"):
            ml_dtype(info.name)
    else:
        dtype = np.dtype(info.name) if info.in_numpy else ml_dtype(info.name)
        assert dtype.name == info.name
    assert dtype.itemsize == info.item_bytes
    state = StateDict(w=np.ones(3, dtype))
    assert name_of(state["w"].dtype) == info.name and state.nbytes == 3 * info.item_bytes
    kinds = {
        "float": "fV",
        "float8": "fV",
        "packed": "u",
        "int": "i",
        "uint": "u",
        "bool": "b",
        "complex": "c",
    }
    assert dtype.kind in kinds[info.kind]
    assert info.in_numpy == (dtype.isbuiltin == 1 and not label_of(dtype))


# ---- names ----


def test_labelled_integers_replace_missing_dtypes(without):
    for name in NAMES:
        dtype = stored_dtype(name)
        assert (dtype.kind, dtype.metadata[LABEL]) == ("u", name)
        assert (dtype.itemsize, label_of(dtype)) == (1 + (name == "bfloat16"), name)
        assert name_of(dtype) == text_of(dtype) == name
        assert name_of(np.dtype(dtype.str)) == dtype.name == f"uint{8 * dtype.itemsize}"
        with pytest.raises(ImportError, match=rf"{name}.*mlstate\[dtypes\]"):
            as_numbers(np.zeros(2, dtype))
    with pytest.raises(ImportError, match=r"int4.*mlstate\[dtypes\]"):
        stored_dtype("int4")


@pytest.mark.parametrize("order", "<>")
def test_labelled_integers_of_any_byte_order_become_their_values(order):
    bits = np.array([0x3F80, 0xC000], f"{order}u2")
    labelled = bits.view(np.dtype(f"{order}u2", metadata={LABEL: "bfloat16"}))
    assert as_numbers(labelled).astype(float).tolist() == [1.0, -2.0]


def test_ml_dtypes_is_used_if_installed():
    assert stored_dtype("bfloat16") == ml_dtype("bfloat16") == ml_dtypes.bfloat16
    assert name_of(stored_dtype("bfloat16")) == "bfloat16" and not label_of(
        stored_dtype("bfloat16")
    )


def test_a_broken_ml_dtypes_is_an_error(tmp_path):
    (tmp_path / "ml_dtypes.py").write_text("raise ImportError('wrong build')")
    save_file({"w": np.zeros(2, ml_dtypes.bfloat16)}, tmp_path / "f")
    done = child.attempt(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"import mlstate; mlstate.load_file({str(tmp_path / 'f')!r})"
    )
    assert done.returncode == 1 and "wrong build" in done.stderr


@pytest.mark.parametrize(
    ("integers", "label"),
    [("u1", "bfloat16"), ("u2", "float8_e5m2"), ("i2", "bfloat16"), ("u2", "float16"), ("u2", 7),
     ("u2", "\ud800"), ("u4", "none")],
)  # fmt: skip
def test_labels_that_do_not_fit_are_ignored(tmp_path, integers, label):
    array = np.zeros(3, np.dtype(integers, metadata={LABEL: label}))
    save_file({"w": array}, tmp_path / "f")
    assert header(tmp_path / "f")["w"]["dtype"] == f"{integers[0].upper()}{8 * int(integers[1])}"
    assert name_of(array.dtype) == array.dtype.name


# ---- round trips ----


def test_files_come_back_as_they_were_in_a_process_that_has_numpy_only(tmp_path):
    source, target = tmp_path / "source.safetensors", tmp_path / "target.safetensors"
    save_file(state_of(), source)
    for mmap in (True, False):
        child.run(
            WITHOUT + "import numpy, mlstate\n"
            f"state = mlstate.load_file({str(source)!r}, mmap={mmap})\n"
            "assert {a.dtype.str for a in state.values()} == {'|u1', '<u2'}, state\n"
            f"mlstate.save_file(state, {str(target)!r})"
        )
        assert target.read_bytes() == source.read_bytes()
    file_dtypes = {name[6:]: header(target)[name]["dtype"] for name in TRUE}
    assert file_dtypes == dict(zip(NAMES, FILE_NAMES, strict=True))


def test_checkpoints_come_back_in_a_process_that_has_numpy_only(tmp_path):
    moments = {f"{name}.m": array for name, array in state_of().items()}
    mlstate.save(tmp_path / "source", state_of(), moments)
    child.run(
        WITHOUT + "import mlstate\n"
        f"found = mlstate.load({str(tmp_path / 'source')!r})\n"
        f"mlstate.save({str(tmp_path / 'target')!r}, found.model, found.optimizer)"
    )
    loaded = mlstate.load(tmp_path / "target")
    assert loaded.model == state_of()
    assert dict(loaded.optimizer) == StateDict(moments)


@pytest.mark.parametrize("options", [{}, {"compress": "zlib"}, {"pack_below_bytes": 0}])
def test_saves_of_every_kind_keep_dtypes(tmp_path, state, without, options):
    mlstate.save(tmp_path / "c", state, **options)
    for mmap in (False, True):
        assert true_names(mlstate.load(tmp_path / "c", mmap=mmap).model) == TRUE
    again = mlstate.save(tmp_path / "c", state, **options)
    assert {record.dtype for record in again.tensors()} == set(NAMES)
    assert true_names(mlstate.load(tmp_path / "c", names=["*e5m2"]).model) == {
        "layer.float8_e5m2": "float8_e5m2"
    }


def test_async_saves_and_managers_keep_dtypes(tmp_path, state, without):
    save_async(tmp_path / "c", state).wait()
    assert mlstate.load(tmp_path / "c").model == state
    manager = CheckpointManager(tmp_path / "run", warn_unchanged=False)
    manager.save(1, state)
    manager.save(2, state)
    assert true_names(manager.restore_latest().model) == TRUE


def test_shards_keep_dtypes(tmp_path, state, without):
    parts = {
        name: Shard(array[:8], Layout.rows(2), 0, shape=array.shape)
        for name, array in state.items()
    }
    assert "bfloat16" in repr(StateDict(parts))
    compatibility = check_compatibility(StateDict(parts), state)
    assert compatibility.is_compatible and not compatibility.has_warnings


@pytest.mark.parametrize("installed", [False, True])
def test_tiers_keep_dtypes_and_bits(tmp_path, state, monkeypatch, installed):
    if not installed:
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with mlstate.checkpoint.TieredState(dict(state), None, tmp_path / "cold") as tiered:
        for name in list(tiered):
            tiered.demote(name, "cold")
        for name in list(tiered):
            tiered.promote(name, "warm")
        arrays = {k: shard.array for k, shard in tiered.state_dicts().model.items()}
        assert true_names(arrays) == TRUE and bits(arrays) == bits(state)


def test_loads_into_arrays_keep_dtypes(tmp_path, state, without):
    mlstate.save(tmp_path / "c", state)
    target = {name: np.zeros_like(array) for name, array in state.items()}
    mlstate.load(tmp_path / "c", into={"model": target, "optimizer": None})
    assert StateDict(target) == state


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ""])
def test_formats_keep_dtypes_both_ways(tmp_path, state, monkeypatch, suffix):
    write_any(tmp_path / f"with{suffix}", state_of())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ml_dtypes", None)
        model, *_ = read_any(tmp_path / f"with{suffix}")
        assert true_names(model) == TRUE and bits(model) == bits(state)
        write_any(tmp_path / f"without{suffix}", model)
    model, *_ = read_any(tmp_path / f"without{suffix}")
    assert model == state_of()
    assert {array.dtype.type.__module__ for array in model.values()} == {"ml_dtypes"}


def test_torch_files_and_tensors_keep_dtypes(torch, tmp_path, state, without):
    torch_dtypes = {key: name for key, name in TRUE.items() if hasattr(torch, name)}
    assert {"bfloat16", "float8_e4m3fn", "float8_e5m2"} <= set(torch_dtypes.values())
    state = StateDict({key: state[key] for key in torch_dtypes})
    tensors = state.to_torch()
    assert {key: str(t.dtype) for key, t in tensors.items()} == {
        key: f"torch.{name}" for key, name in torch_dtypes.items()
    }
    assert StateDict.from_torch(tensors) == state
    write_any(tmp_path / "f.pt", state)
    assert torch.load(tmp_path / "f.pt")["layer.bfloat16"].dtype == torch.bfloat16
    assert read_any(tmp_path / "f.pt")[0] == state
    torch.save(state, tmp_path / "s")
    assert true_names(torch.load(tmp_path / "s")) == torch_dtypes
    assert torch.load(tmp_path / "s") == state


# ---- commands ----


@pytest.fixture
def files(tmp_path):
    """Two files that differ in one element of each tensor."""
    other = {name: array.copy() for name, array in state_of().items()}
    for array in other.values():
        array[3, 5] = array[7, 7]
    save_file(state_of(), tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    return tmp_path


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_commands_print_the_same_without_ml_dtypes(files, capsys, monkeypatch, command):
    paths = [str(files / "a.safetensors"), str(files / "b.safetensors")]
    arguments = [command, *paths[: 1 + (command == "diff")], "--json"]
    expected = main(arguments), json.loads(capsys.readouterr().out)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert (main(arguments), json.loads(capsys.readouterr().out)) == expected
    assert main(arguments[:-1]) == expected[0]
    assert "bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize("middle", ["m.npz", "m"])
def test_convert_gives_the_same_bytes_back_with_numpy_only(files, middle):
    paths = [str(files / name) for name in ("a.safetensors", middle, "t.safetensors")]
    child.run(
        WITHOUT + f"from mlstate.cli import main\na, b, c = {paths}\n"
        "assert main(['convert', a, b]) == main(['convert', b, c]) == main(['diff', a, c]) == 0"
    )
    dtypes = {name: header(files / "a.safetensors")[name]["dtype"] for name in TRUE}
    assert {name: header(files / "t.safetensors")[name]["dtype"] for name in TRUE} == dtypes
    assert load_file(files / "t.safetensors") == state_of()


# ---- state dicts ----


def test_renaming_keeps_dtypes(state, without):
    model = ModelStateDict(state)
    layer = model.get_layer_state("layer")
    assert true_names(layer) == dict(zip(NAMES, NAMES, strict=True))
    renamed = rename(state, {"layer": "block.0"})
    assert true_names(renamed) == {f"block.0.{name}": name for name in NAMES}
    assert true_names(state | {"x": state["layer.bfloat16"]}) == TRUE | {"x": "bfloat16"}
    assert true_names({k: v for k, v in state.items() if "e5m2" in k}) == {
        k: v for k, v in TRUE.items() if "e5m2" in k
    }
    for renamed_state in (
        state.copy(),
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        OptimizerStateDict(state),
        StateDict({name: array[::2].copy()[:, ::-1] for name, array in state.items()}),
    ):
        assert true_names(renamed_state) == TRUE
    assert "bfloat16" in repr(state) and "uint16" not in repr(state)
    assert "bfloat16" in state._repr_html_()


def test_a_state_is_the_same_with_and_without_ml_dtypes(state):
    assert state == state_of()
    assert state.digest() == state_of().digest()
    assert diff(state, state_of()).unchanged == len(NAMES)


def test_integers_are_not_the_floats_of_their_bits(state):
    integers = {name: array.view(array.dtype.str) for name, array in state.items()}
    assert state != StateDict(integers)
    assert {name for name, _, _ in diff(state, integers).dtypes} == set(TRUE)


def test_swapped_byte_order_is_stored_natively(tmp_path, without):
    native = every_bit_pattern(stored_dtype("bfloat16"))
    swapped = native.astype(native.dtype.newbyteorder())
    save_file({"w": native}, tmp_path / "native")
    save_file({"w": swapped}, tmp_path / "swapped")
    assert (tmp_path / "native").read_bytes() == (tmp_path / "swapped").read_bytes()


def test_casts_read_the_true_dtype(state, without):
    target = {"w": np.zeros((16, 4096), np.float32)}
    load_into(target, {"w": state["layer.bfloat16"]}, cast=True)
    expected = every_bit_pattern(np.uint16).astype(np.uint32) << 16
    np.testing.assert_array_equal(target["w"], expected.view(np.float32))


def test_caches_move_and_do_not_convert_by_their_bits(without):
    float_cache = np.ones((1, 1, 4, 2), np.float32)
    cache = np.zeros(float_cache.shape, stored_dtype("bfloat16"))
    load_into({"w": cache}, {"w": float_cache}, cast=True)
    moved = transition_kv_state(cache, 8, 4)
    assert name_of(moved.dtype) == "bfloat16"
    assert transition_kv_state(cache, 8, 4, dtype=np.float32)[0, 0, :4].tolist() == [[1, 1]] * 4
    assert "bfloat16" in repr(KVState.from_array(cache))
    for call in (
        lambda: transition_kv_state(cache, 8, 4, dtype=np.int8),
        lambda: transition_kv_state(np.ones((1, 1, 4, 2), np.int8), 8, 4, dtype="bfloat16"),
        lambda: KVState((1, 1, 4, 2), 8, "bfloat16"),
    ):
        with pytest.raises(ImportError, match=r"bfloat16.*mlstate\[dtypes\]"):
            call()


# ---- gradients and ranks ----


def test_sums_use_the_true_dtype(without):
    ones = np.zeros(3, stored_dtype("bfloat16"))
    load_into({"w": ones}, {"w": np.ones(3, np.float32)}, cast=True)
    sums = GradientAccumulator(2)
    for _ in range(2):
        sums.add_gradients({"w": ones})
    wide = {"w": np.zeros(3, np.float32)}
    load_into(wide, sums.get_and_clear_gradients(), cast=True)
    assert wide["w"].tolist() == [2, 2, 2]
    unit = FSDPShardingUnit("w", (3,), ones.dtype, 0, world_size=1)
    assert (unit.dtype, unit.item_bytes, name_of(unit.zeros().dtype)) == ("bfloat16", 2, "bfloat16")


def test_ranks_exchange_and_add_the_true_dtype(state, without):
    ones = np.zeros(4, stored_dtype("bfloat16"))
    load_into({"w": ones}, {"w": np.ones(4, np.float32)}, cast=True)

    def work(group):
        added = group.all_reduce(ones)
        full = DistributedStateCollector(group).gather_full_state(state)
        return added, full

    for added, full in run_ranks(2, work):
        wide = {"w": np.zeros(4, np.float32)}
        load_into(wide, {"w": added}, cast=True)
        assert wide["w"].tolist() == [2, 2, 2, 2]
        assert full is None or true_names(full) == TRUE


def test_results_go_into_arrays_of_the_true_dtype(without):
    ones = np.zeros(4, stored_dtype("bfloat16"))
    with pytest.raises(mlstate.CompatibilityError, match=r"dtype uint16.*bfloat16"):
        SingleGroup().all_reduce(ones, out=np.zeros(4, np.uint16))


def test_ranks_of_mpi_add_the_true_dtype(state, monkeypatch):
    halves = state["layer.float8_e5m2"].reshape(-1)[60:61]  # 0x3c is the number 1
    out = np.zeros_like(halves)
    reduce_parts([halves, halves], "sum", out)
    assert out.tolist() == [0x40] and label_of(out.dtype) == "float8_e5m2"
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="float8_e5m2"):
        reduce_parts([halves, halves], "sum", out)


def test_gradients_are_verified_by_their_numbers(state):
    ones = np.full(3, 0x3F80, np.uint16).view(state["layer.bfloat16"].dtype)
    near = np.full(3, 0x3F81, np.uint16).view(ones.dtype)  # one unit in the last place apart
    hook = FSDPBackwardHook(FSDP(SingleGroup()))
    unit = FSDPShardingUnit("w", (3,), ones.dtype, 0, world_size=1)
    hook.scatter_gradient(unit, ones)
    assert hook.verify_gradients({"w": unit}, {"w": near}, atol=0.01)
    assert not hook.verify_gradients({"w": unit}, {"w": near}, atol=0.001)


def test_core_ml_gets_the_numbers(without):
    kind = stored_dtype("bfloat16")
    source = FakeMLState({"kv": (1, 1, 4, 2)})
    source.read_state = lambda name: np.full((1, 1, 4, 2), 0x3F80, np.uint16).view(kind)
    target = FakeMLState({"kv": (1, 1, 8, 2)})
    transition_coreml_state(source, target, "kv", 4)
    assert target.read_state("kv")[0, 0, :4].tolist() == [[1, 1]] * 4
    source.read_state = lambda name: np.zeros((1, 1, 4, 2), stored_dtype("float8_e5m2"))
    with pytest.raises(mlstate.CompatibilityError, match="gave float8_e5m2"):
        transition_coreml_state(source, target, "kv", 4)
