"""States to and from torch files: bit for bit, and readable by torch without mlstate."""

import datetime
import errno
import functools
import io
import os
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path

import child
import gloo_ranks
import numpy as np
import pytest
from any_format import read_any, write_any
from resume_jobs import difference
from test_torch_optimizer import train

from mlstate import (
    CompatibilityError,
    FormatError,
    ModelStateDict,
    OptimizerStateDict,
    StateDict,
    StoreError,
)
from mlstate._common import atomic_file
from mlstate.checkpoint._convert.formats import format_of

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="torch is the peer to agree with")
dcp = pytest.importorskip("torch.distributed.checkpoint", reason="torch's own checkpoints")
pytest.importorskip("ml_dtypes", reason="torch has bfloat16")

optim = torch.optim
OPTIMIZERS = {
    "Adam": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9)),
    "SGD momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD": lambda p: optim.SGD(p, lr=1e-2),
}
if hasattr(optim, "Adafactor"):  # since torch 2.5
    OPTIMIZERS["Adafactor"] = lambda p: optim.Adafactor(p, lr=1e-2)
FORMATS = ["pt", "dcp", "npz", "safetensors", "checkpoint"]
NAMED = {"checkpoint": "mlstate"}  # a format without a suffix


def make(optimizer, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    ).to(dtype)
    module[2].bias.requires_grad_(False)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [{"params": trained[:2]}, {"params": trained[2:], "lr": 5e-3}]
    return module, optimizer(groups)


def write_by_torch(path, tree):
    if path.suffix == ".pt":
        torch.save(tree, path)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is only one process
        dcp.save(tree, checkpoint_id=path, no_dist=True)


def read_by_torch(path, tree):
    """Read mlstate's file as a user without mlstate would; `tree` provides the shapes."""
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tree, checkpoint_id=path, no_dist=True)
    return tree


# ---- round trips ----


# "all" passes each optimizer's state through every format, so that one optimizer covers each format
# alone.
TRIPS = [
    pytest.param(
        way, start, end, name,
        marks=[] if way == "all" or (name == "Adam" and start == "pt") else [pytest.mark.long],
    )
    for way in (*FORMATS, "all")
    for start, end in (("pt", "dcp"), ("dcp", "pt"))
    for name in OPTIMIZERS
]  # fmt: skip


@pytest.mark.parametrize(("way", "start", "end", "optimizer_name"), TRIPS)
def test_training_resumes_bitwise(tmp_path, way, start, end, optimizer_name):
    """From torch's file, through another format, to a torch file again."""
    make_optimizer = OPTIMIZERS[optimizer_name]
    uninterrupted, optimizer = make(make_optimizer)
    train(uninterrupted, optimizer, 0, 6)
    first, old = make(make_optimizer)
    train(first, old, 0, 3)
    path = tmp_path / f"start.{start}"
    write_by_torch(path, {"model": first.state_dict(), "optimizer": old.state_dict(), "epoch": 3})
    parts = read_any(path)
    for number, suffix in enumerate(FORMATS if way == "all" else [way]):
        path = tmp_path / f"{number}.{suffix}"
        write_any(path, *parts[:4], format=NAMED.get(suffix))
        parts = read_any(path, format=NAMED.get(suffix))
        assert parts[2] == {"epoch": 3}
    path = tmp_path / f"end.{end}"
    write_any(path, *parts[:4])

    second, new = make(make_optimizer, seed=9)
    train(second, new, 0, 1)  # so that there is a state to replace
    tree = {"model": second.state_dict(), "optimizer": new.state_dict()}
    file_content = read_by_torch(path, tree)
    assert not difference(file_content["model"], dict(first.state_dict()))
    assert not difference(file_content["optimizer"], old.state_dict())
    second.load_state_dict(file_content["model"])
    new.load_state_dict(file_content["optimizer"])
    train(second, new, 3, 6)
    assert not difference(dict(second.state_dict()), dict(uninterrupted.state_dict()))


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_dtype_survives(tmp_path, suffix):
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
    names += ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
    names += ["complex64"] if suffix not in ("safetensors", "checkpoint") else []
    bits = torch.arange(64, dtype=torch.uint8)
    tree = {n: bits.clone().view(getattr(torch, n)) if n != "bool" else bits > 5 for n in names}
    torch.save(tree, tmp_path / "a.pt")
    parts = read_any(tmp_path / "a.pt")
    write_any(tmp_path / f"b.{suffix}", *parts[:4], format=NAMED.get(suffix))
    again = read_any(tmp_path / f"b.{suffix}")
    write_any(tmp_path / "c.pt", *again[:4])
    assert not difference(torch.load(tmp_path / "c.pt", weights_only=True), tree)


# ---- .pt ----


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before 1.6"])
def test_bare_state_dicts_are_models(tmp_path, legacy):
    module, _ = make(OPTIMIZERS["SGD"])
    path = tmp_path / "pytorch_model.bin"
    torch.save(module.state_dict(), path, _use_new_zipfile_serialization=not legacy)
    model, optimizer, metadata, *_ = read_any(path)
    assert (type(model), optimizer, metadata) == (StateDict, None, {})
    assert model == StateDict.from_torch(module.state_dict())
    write_any(tmp_path / "b.pt", model)
    module.load_state_dict(torch.load(tmp_path / "b.pt", weights_only=True))


def test_a_file_is_mapped_not_read(tmp_path):
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "a.pt")
    tensor = read_any(tmp_path / "a.pt")[0]["w"]
    tensor[0] = 1  # a private page
    assert torch.load(tmp_path / "a.pt", weights_only=True)["w"][0] == 0


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("other", ["optimizer", "optimizer_state_dict", "optim"])
def test_parts_are_known_by_the_names_that_programs_use(tmp_path, key, other):
    module, optimizer = make(OPTIMIZERS["Adam"])
    train(module, optimizer, 0, 1)
    rest = {"epoch": 3, "loss": torch.tensor(0.5), "schedule": {"last": [1, 2.5], "on": True}}
    torch.save({key: module.state_dict(), other: optimizer.state_dict(), **rest}, tmp_path / "a.pt")
    model, moments, metadata, states, *_ = read_any(tmp_path / "a.pt")
    assert model == StateDict.from_torch(module.state_dict())
    assert moments == OptimizerStateDict.from_torch(optimizer)
    assert moments.param_groups == OptimizerStateDict.from_torch(optimizer).param_groups
    assert (moments.step, moments.learning_rate) == (1, 0.01)
    assert metadata == {"epoch": 3, "loss": 0.5}
    assert states == {"schedule": rest["schedule"]}


def test_an_optimizer_alone(tmp_path):
    module, optimizer = make(OPTIMIZERS["Adam"])
    train(module, optimizer, 0, 1)
    torch.save(optimizer.state_dict(), tmp_path / "a.pt")
    model, moments, metadata, *_ = read_any(tmp_path / "a.pt")
    assert (model, metadata) == (None, {})
    assert moments == OptimizerStateDict.from_torch(optimizer)


def test_names_of_parameters_are_kept(tmp_path):
    """State of an optimizer with named parameters, or as FSDP gathers it."""
    state = {"exp_avg": torch.ones(2), "step": 3}
    numbered = {
        "state": {0: state, 1: {}},
        "param_groups": [{"lr": 0.1, "params": [0, 1], "param_names": ["a.w", "a.b"]}],
    }
    named = {"state": {"a.w": state}, "param_groups": [{"lr": 0.1, "params": ["a.w", "a.b"]}]}
    for number, tree in enumerate((numbered, named)):
        path = tmp_path / f"{number}.pt"
        torch.save({"optimizer": tree}, path)
        moments = read_any(path)[1]
        assert moments == OptimizerStateDict(
            {"a.w.exp_avg": np.ones(2, "f4"), "a.w.step": np.asarray(3)}
        )
        for suffix in (".pt", ".dcp"):
            again = tmp_path / f"{number}-again{suffix}"
            write_any(again, None, moments)
            assert read_any(again)[1] == moments
        written = torch.load(tmp_path / f"{number}-again.pt", weights_only=True)["optimizer"]
        assert written["param_groups"][0]["params"] == ["a.w", "a.b"]
        assert type(written["state"]["a.w"]["step"]) is int


def test_levels_are_joined_with_dots(tmp_path):
    tree = {"encoder": {"w": torch.ones(2), "layers": [{"b": torch.zeros(1)}, {"b": 3}]}, 5: 0.5}
    torch.save(tree, tmp_path / "a.pt")
    parts = read_any(tmp_path / "a.pt")
    assert list(parts.model) == ["encoder.w", "encoder.layers.0.b"]
    assert parts.metadata == {"encoder.layers.1.b": 3, "5": 0.5}


def test_state_dicts_that_torch_stored_as_such(tmp_path):
    torch.save(ModelStateDict(w=np.ones(2), model_type="tiny"), tmp_path / "a.pt")
    model = read_any(tmp_path / "a.pt")[0]
    assert (type(model), model.model_type) == (ModelStateDict, "tiny")
    adam = OptimizerStateDict({"w.m": np.ones(2)}, step=2)
    torch.save({"model": StateDict(w=np.ones(2)), "optimizer": adam}, tmp_path / "b.pt")
    parts = read_any(tmp_path / "b.pt")
    assert (parts[0], parts[1], parts[1].step) == (StateDict(w=np.ones(2)), adam, 2)


def test_ties_stay_and_views_are_stored_alone(tmp_path):
    large = np.zeros(1 << 20)
    array = np.arange(8.0)
    state = StateDict(part=large[9:13], step=large[::4096], a=array, b=array, half=array[4:])
    state["other"] = large[4096::8192]
    state["view"] = torch.zeros(1 << 20)[5:7]
    write_any(tmp_path / "a.pt", state)
    assert (tmp_path / "a.pt").stat().st_size < 1 << 14
    tensors = torch.load(tmp_path / "a.pt", weights_only=True)
    storages = {tensors[name].untyped_storage().data_ptr() for name in ("a", "b", "half")}
    assert len(storages) == 1
    assert read_any(tmp_path / "a.pt")[0] == state


def test_torch_reads_it_without_mlstate(tmp_path):
    module, optimizer = make(OPTIMIZERS["Adam"])
    train(module, optimizer, 0, 1)
    parts = StateDict.from_torch(module.state_dict()), OptimizerStateDict.from_torch(optimizer)
    write_any(tmp_path / "a.pt", *parts[:2], {"step": 1})
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import torch; "
        f"tree = torch.load({str(tmp_path / 'a.pt')!r}, weights_only=True); "
        "print(sorted(tree), tree['metadata'], 'mlstate' in sys.modules)"
    )
    output = child.run(code).strip()
    assert output == "['metadata', 'mlstate', 'model', 'optimizer'] {'step': 1} False"


class Strange:
    """An object that only unpickling can restore."""


def groups(params, state):
    return {"optimizer": {"state": state, "param_groups": [{"params": params}]}}


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"w": torch.ones(2), "a": {1, 2}}, "'a' is a set, which is neither"),
        (torch.ones(2), "holds a Tensor, not a dict"),
        ([torch.ones(2)], "holds a list, not a dict"),
        ({"w": torch.ones(2), "x": Strange()}, "'x' is a .*Strange, which is neither"),
        (Strange(), "holds a .*Strange, which is neither"),
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "two entries have the name 'a.b'"),
        (groups([0], {0: {"a.b": 1}}), "named 'a.b'"),
    ],
)  # fmt: skip
def test_unsupported_values_are_named(tmp_path, tree, text):
    torch.save(tree, tmp_path / "a.pt")
    with pytest.raises(CompatibilityError, match=text) as caught:
        read_any(tmp_path / "a.pt")
    assert caught.value.path == str(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"optimizer": {"state": {}, "param_groups": [{}]}}, "no list of 'params'"),
        (groups([0, 0], {}), "0 is not a number, or appears twice"),
        (groups([0], {1: {}}), "state for 1"),
        (groups([0], []), "no dict of states"),
        ({"model": {"w": torch.ones(1)}, "mlstate": 3}, "'mlstate' does not describe"),
        ({"model": {"w": torch.ones(1)}, "mlstate": {"model": 3}}, "'mlstate' does not describe"),
        ({"model": {"w": torch.ones(1)}, "mlstate": {"model": "x"}}, "does not describe a state"),
    ],
)  # fmt: skip
def test_malformed_entries_are_named(tmp_path, tree, text):
    torch.save(tree, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=text) as caught:
        read_any(tmp_path / "a.pt")
    assert caught.value.path == str(tmp_path / "a.pt")


def test_a_tree_that_holds_itself_is_refused(tmp_path):
    tree = {"w": torch.ones(1)}
    tree["again"] = tree
    torch.save(tree, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="more than 64 levels deep"):
        read_any(tmp_path / "a.pt")
    torch.save({"model": {}, "rest": tree}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="'rest' is nested more than 64 levels deep"):
        read_any(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("keep", "text"),
    [(0, "it is empty"), (3, "starts with"), (100, "too early"), (-20, "too early")],
)
def test_a_damaged_file_is_refused(tmp_path, keep, text):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(FormatError, match=text):
        read_any(path)


class Trap:
    """Would write a file, if a reader executed the pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_code_is_not_run(tmp_path):
    torch.save({"w": torch.ones(1), "trap": Trap(tmp_path / "ran")}, tmp_path / "a.pt")
    with pytest.raises(CompatibilityError, match=r"holds a builtins\.getattr"):
        read_any(tmp_path / "a.pt")
    write_by_torch(tmp_path / "a.dcp", {"w": torch.ones(1), "trap": Trap(tmp_path / "ran")})
    with pytest.raises(CompatibilityError, match=r"'trap' is a builtins\.getattr"):
        read_any(tmp_path / "a.dcp")
    (tmp_path / "a.dcp" / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with pytest.raises(FormatError, match="which describes no checkpoint"):
        read_any(tmp_path / "a.dcp")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", [".pt", ".dcp"])
def test_dtypes_missing_in_torch_are_refused(tmp_path, suffix):
    for state in ({"d": np.zeros(2, "M8[s]")}, {"d": np.zeros(2, np.longdouble)}):
        with pytest.raises(CompatibilityError, match=r"'d' is .* torch has no dtype"):
            write_any(tmp_path / f"a{suffix}", state)
    orphan = OptimizerStateDict({"w.m": np.ones(1)}, param_groups=[{"params": ["x"]}])
    with pytest.raises(CompatibilityError, match="none of its groups lists: w"):
        write_any(tmp_path / f"a{suffix}", None, orphan)
    assert list(tmp_path.iterdir()) == []


# ---- torch.distributed.checkpoint ----


def test_torchs_checkpoints_are_known(tmp_path):
    write_by_torch(tmp_path / "step-3.5", OrderedDict(w=torch.ones(2)))
    assert format_of(tmp_path / "step-3.5") == "dcp"
    assert read_any(tmp_path / "step-3.5")[0] == StateDict(w=np.ones(2, "f4"))


def save_rows(group, folder):
    """Save uneven rows by torch, as one of two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rows = torch.arange(10.0).reshape(5, 2)
    part = DTensor.from_local(
        rows[:3] if group.rank == 0 else rows[3:], init_device_mesh("cpu", (2,)), [Shard(0)],
        shape=(5, 2), stride=(2, 1),
    )  # fmt: skip
    tree = {"model": {"rows": part, "whole": torch.ones(3)}, "step": 4}
    torch.distributed.checkpoint.save(tree, checkpoint_id=folder)


def test_shards_of_two_ranks_become_whole(tmp_path):
    gloo_ranks.run(2, functools.partial(save_rows, folder=tmp_path / "a"))
    assert len(list((tmp_path / "a").glob("*.distcp"))) == 2
    model, _, metadata, *_ = read_any(tmp_path / "a")
    assert model["rows"].tolist() == np.arange(10.0).reshape(5, 2).tolist()
    assert (model["whole"].tolist(), metadata) == ([1, 1, 1], {"step": 4})


def test_non_empty_directory_is_kept(tmp_path):
    target = tmp_path / "a.dcp"
    target.mkdir()
    write_any(target, {"w": np.ones(2)})  # an empty folder is accepted
    before = sorted(p.name for p in target.iterdir())
    with pytest.raises(StoreError, match="exists already"):
        write_any(target, {"w": np.zeros(3)})
    (target / "letter").write_text("dear")
    with pytest.raises(StoreError, match="holds 'letter'; overwrite=True"):
        write_any(target, {"w": np.zeros(2)}, overwrite=True)
    (target / "letter").unlink()
    assert sorted(p.name for p in target.iterdir()) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.dcp"]
    assert read_any(target)[0]["w"].tolist() == [1, 1]


def changed_metadata(path, change):
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def huge(metadata):
    metadata.state_dict_metadata["w"].size = torch.Size([1 << 40])


def outside(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../a/__0_0.distcp"


def beyond(metadata):
    for info in metadata.storage_data.values():
        info.offset += 1 << 20


DAY = datetime.date(1, 1, 1)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda p: changed_metadata(p, huge), "describes 4,398,046,511,104 bytes of tensors"),
        (lambda p: changed_metadata(p, outside), "outside of it"),
        (lambda p: changed_metadata(p, beyond), "torch cannot read it"),
        (lambda p: (p / ".metadata").write_bytes(b"x"), "metadata cannot be read"),
        (lambda p: (p / ".metadata").write_bytes(pickle.dumps(3)), "metadata holds a int"),
        (lambda p: (p / ".metadata").write_bytes(pickle.dumps(DAY)), "names datetime.date"),
        (lambda p: (p / "__0_0.distcp").write_bytes(bytes(999)), "torch cannot read it"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused(tmp_path, damage, text):
    path = tmp_path / "a"
    write_by_torch(path, {"w": torch.ones(100)})
    damage(path)
    with pytest.raises(FormatError, match=text) as caught:
        read_any(path)
    assert caught.value.path == str(path)


def test_a_missing_shard_is_a_missing_file(tmp_path):
    write_by_torch(tmp_path / "a", {"w": torch.ones(100)})
    (tmp_path / "a" / "__0_0.distcp").unlink()
    with pytest.raises((FileNotFoundError, FormatError)):
        read_any(tmp_path / "a")


def test_a_full_disk_is_an_error_of_the_target(tmp_path, monkeypatch):
    """torch replaces the system's error by one about its archive."""

    def full(descriptor, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class File(io.FileIO):
        write = full

    monkeypatch.setattr(atomic_file, "open", lambda path, *_, **__: File(path, "r+", False), False)
    path = tmp_path / "a.pt"
    with pytest.raises(StoreError, match="No space left") as caught:
        write_any(path, {"w": np.ones(3)})
    assert caught.value.filename == str(path) and not list(tmp_path.iterdir())
