"""Wrong values of keywords and paths are refused before anything changes."""

import inspect
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from any_format import write_any
from command_table import CHECKPOINT_COMMANDS, call_of

import mlstate
from mlstate import checkpoint, fsdp, state
from mlstate.checkpoint import CheckpointManager, TieredState
from mlstate.cli import main
from mlstate.collectives import LocalGroup, SingleGroup
from mlstate.distributed import DistributedStateCollector

STATE = {"w": np.ones((4, 2), np.float32)}
CACHE = np.zeros((2, 1, 1, 4, 2), np.float16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint, a run and a file, from which each test gets a copy."""
    folder = tmp_path_factory.mktemp("saved")
    mlstate.save(folder / "c", STATE)
    CheckpointManager(folder / "run").save(1, STATE)
    mlstate.save_file(STATE, folder / "file.safetensors")
    return folder


@pytest.fixture
def place(saved, tmp_path, monkeypatch):
    """A working folder with a checkpoint, a run and a file."""
    shutil.copytree(saved, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(folder):
    """Return the files below a folder, and their bytes."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def target():
    return {"model": {"w": np.zeros((4, 2), np.float32)}}


def into(**options):
    return mlstate.load("c", into=target(), **options)


def unit():
    return fsdp.FSDPShardingUnit("w", (2,), "float32", 0)


FLAGS = {
    "load mmap": lambda v: mlstate.load("c", mmap=v),
    "load strict": lambda v: into(strict=v),
    "load verify": lambda v: mlstate.load("c", verify=v),
    "load_into strict": lambda v: state.load_into(dict(STATE), STATE, strict=v),
    "load_into cast": lambda v: state.load_into(dict(STATE), STATE, cast=v),
    "is_loadable strict": lambda v: state.check_compatibility(STATE, STATE).is_loadable(v),
    "load_file mmap": lambda v: mlstate.load_file("file.safetensors", mmap=v),
    "load_file verify": lambda v: mlstate.load_file("file.safetensors", verify=v),
    "load_metadata verify": lambda v: checkpoint.load_metadata("file.safetensors", verify=v),
    "save sparse": lambda v: mlstate.save("new", STATE, sparse=v),
    "save incremental": lambda v: mlstate.save("new", STATE, incremental=v),
    "save_async sparse": lambda v: checkpoint.save_async("new", STATE, sparse=v).wait(),
    "verify repair": lambda v: mlstate.verify("c", repair=v),
    "prune dry_run": lambda v: checkpoint.prune("run", dry_run=v),
    "reshard overwrite": lambda v: checkpoint.reshard(
        "c", "cut", layout="rows", world_size=2, overwrite=v
    ),
    "plan_load verify": lambda v: checkpoint.plan_load("c", verify=v),
    "manager warn_unchanged": lambda v: CheckpointManager("run", warn_unchanged=v),
    "manager sparse": lambda v: CheckpointManager("run").save(2, STATE, sparse=v),
    "tiers discard": lambda v: TieredState(STATE, {}, "tiers", discard=v),
    "FSDP allow_unused": lambda v: fsdp.FSDP(SingleGroup(), allow_unused=v),
    "FSDP record": lambda v: fsdp.FSDP(SingleGroup(), record=v),
    "async_op": lambda v: SingleGroup().all_reduce(np.ones(2), async_op=v),
    "LocalGroup async_op": lambda v: [
        group.close() or group.all_gather(np.ones(2), async_op=v) for group in LocalGroup.threads(1)
    ],
    "merge_states verify_replicas": lambda v: DistributedStateCollector(
        SingleGroup()
    ).gather_full_state(STATE, verify_replicas=v),
    "transition low_memory": lambda v: mlstate.transition_kv_state(CACHE, 8, 2, low_memory=v),
    "compact low_memory": lambda v: mlstate.compact_kv_state(CACHE, 2, 1, low_memory=v),
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["no", "", 1, 0, None, 1.0, [], np.ones(2, bool)], ids=repr)
def test_a_flag_is_true_or_false(place, name, value):
    if "low_memory" in name and isinstance(value, int):
        pytest.skip("0 and 1 are accepted")
    if "overwrite" in name and value is None:
        pytest.skip("None is the default")
    before = listing(place)
    with pytest.raises((TypeError, ValueError), match=f"{name.split()[-1]} must be True"):
        FLAGS[name](value)
    assert listing(place) == before


@pytest.mark.parametrize("name", [n for n in FLAGS if "tiers" not in n and "Local" not in n])
def test_a_flag_of_numpy_is_a_flag(place, name):
    FLAGS[name](np.False_)


COUNTS = {
    "pack_below_bytes": lambda v: mlstate.save("new", STATE, pack_below_bytes=v),
    "step": lambda v: mlstate.save("new", STATE, step=v),
    "max_shard_bytes": lambda v: checkpoint.export_huggingface("new", STATE, max_shard_bytes=v),
    "rank": lambda v: mlstate.load("c", rank=v, world_size=2),
    "world_size": lambda v: mlstate.load("c", rank=0, world_size=v),
    "reshard world_size": lambda v: checkpoint.reshard("c", "n", layout="rows", world_size=v),
    "keep": lambda v: CheckpointManager("run", v),
    "keep_best": lambda v: CheckpointManager("run", keep_best=v, monitor="x"),
    "keep_period": lambda v: CheckpointManager("run", keep_period=v),
    "prune keep": lambda v: checkpoint.prune("run", keep=v),
    "checkpoint step": lambda v: CheckpointManager("run").restore(v),
    "plan_save rank": lambda v: checkpoint.plan_save(STATE, rank=v, world_size=2),
    "plan_save pack_below_bytes": lambda v: checkpoint.plan_save(STATE, pack_below_bytes=v),
    "threads": mlstate.set_num_threads,
    "root": lambda v: SingleGroup().broadcast(np.ones(2), root=v),
    "shard_index": lambda v: fsdp.FSDPShardingUnit("w", (4,), "float32", v, world_size=4),
    "bucket_bytes": lambda v: fsdp.FSDP(SingleGroup(), bucket_bytes=v),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, np.True_, "2", 2.0, [2], b"2"], ids=repr)
def test_a_count_is_an_int_and_no_flag(place, name, value):
    before = listing(place)
    is_size = value == "2" and name.endswith("_bytes")  # a text is a size with a unit
    value, error = ("2 X", ValueError) if is_size else (value, TypeError)
    with pytest.raises(error, match=name.split()[-1]):
        COUNTS[name](value)
    assert listing(place) == before


NUMBERS = {
    "gradient_divide_factor": lambda v: fsdp.FSDP(SingleGroup(), gradient_divide_factor=v),
    "max_norm": lambda v: fsdp.clip_grad_norm({}, v, SingleGroup()),
    "timeout": lambda v: SingleGroup().barrier(timeout=v),
    "lock_timeout": lambda v: mlstate.save("new", STATE, lock_timeout=v),
    "keep_time_interval": lambda v: CheckpointManager("run", keep_time_interval=v),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, np.True_, "2", [2], b"2", np.ones(1)], ids=repr)
def test_a_number_is_not_a_flag_or_text(place, name, value):
    before = listing(place)
    with pytest.raises(TypeError, match=name):
        NUMBERS[name](value)
    assert listing(place) == before


def test_a_size_in_memory_is_not_a_flag(place):
    with pytest.raises(TypeError, match="max_staging_bytes"):
        checkpoint.save_async("new", STATE, max_staging_bytes=True)


WORDS = {
    "load missing": lambda v: mlstate.load("c", missing=v),
    "load layout": lambda v: mlstate.load("c", rank=0, world_size=2, layout=v),
    "save layout": lambda v: mlstate.save("new", STATE, layout=v),
    "save compress": lambda v: mlstate.save("new", STATE, compress=v),
    "reshard layout": lambda v: checkpoint.reshard("c", "new", layout=v, world_size=2),
    "rename unused": lambda v: state.rename(STATE, {"w": "x"}, unused=v),
    "manager mode": lambda v: CheckpointManager("run", keep_best=1, monitor="x", mode=v),
    "FSDP op": lambda v: fsdp.FSDP(SingleGroup(), op=v),
    "FSDP nonfinite": lambda v: fsdp.FSDP(SingleGroup(), nonfinite=v),
    "unit layout": lambda v: fsdp.FSDPShardingUnit("w", (2,), "float32", 0, layout=v),
    "units layout": lambda v: fsdp.ReduceScatterOperation(
        SingleGroup(), (2,), "float32", 0, layout=v
    ),
    "op": lambda v: SingleGroup().all_reduce(np.ones(2), op=v),
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("value", ["other", "", 1, True, [], ["rows"], b"rows", {}], ids=repr)
def test_a_word_is_one_of_its_words(place, name, value):
    before = listing(place)
    with pytest.raises((TypeError, ValueError)):
        WORDS[name](value)
    assert listing(place) == before


# ---- paths ----

PATHS = {
    "save": lambda p: mlstate.save(p, STATE),
    "save_async": lambda p: checkpoint.save_async(p, STATE).wait(),
    "export": lambda p: checkpoint.export_huggingface(p, STATE),
    "export_async": lambda p: checkpoint.export_huggingface_async(p, STATE).wait(),
    "manager": lambda p: CheckpointManager(p).save(1, STATE),
    "reshard": lambda p: checkpoint.reshard("c", p, layout="rows", world_size=2),
    "convert": lambda p: main(["convert", "c", str(p), "--to", "mlstate"]),
}
OTHERS = {
    "save_file": lambda p: mlstate.save_file(STATE, p),
    "write npz": lambda p: write_any(p, STATE, format="npz"),
    "tiers": lambda p: TieredState(STATE, {}, p).close(),
}


@pytest.fixture
def home(place, monkeypatch):
    """A home folder."""
    folder = place / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))

    return folder


@pytest.mark.parametrize("name", [*PATHS, *OTHERS])
@pytest.mark.parametrize("path", ["~/x", Path("~/x")], ids=["str", "Path"])
def test_a_tilde_is_the_home_folder(place, home, name, path):
    (PATHS | OTHERS)[name](path)
    assert (home / "x").exists()
    assert not list(place.glob("~*"))


def test_readers_and_commands_know_the_home_folder(place, home, capsys):
    mlstate.save("~/x", STATE)
    mlstate.save_file(STATE, b"~/f.safetensors")
    assert list(mlstate.load("~/x").model) == ["w"]
    assert mlstate.verify("~/x")
    assert list(mlstate.load_file(Path("~/f.safetensors"))) == ["w"]
    assert checkpoint.inspect("~/x").path == str(home / "x")
    for words in (
        *(
            call_of(name, source="~/x", other="~/f.safetensors", target=f"~/{name}")
            for name in CHECKPOINT_COMMANDS
        ),
        ["inspect", "~/f.safetensors"],
        ["verify", "~/f.safetensors"],
        ["convert", "~/f.safetensors", "~/g.npz"],
        ["convert", "~/x", "~/hf", "--to", "huggingface", "--files-from", "~"],
    ):
        assert main(words) == 0, capsys.readouterr().err
    assert (home / "g.npz").exists()
    assert not list(place.glob("~*"))


@pytest.mark.parametrize("name", [*PATHS, *OTHERS])
@pytest.mark.parametrize("path", ["~no-such-user-here/x", "~~", "", "a\0b"])
def test_unusable_paths_are_refused(place, home, name, path):
    before = listing(place)
    if name == "convert":
        assert PATHS[name](path) == 2
    else:
        with pytest.raises(ValueError, match=r"user|empty|NUL"):
            (PATHS | OTHERS)[name](path)
    assert listing(place) == before


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(
    "suffix", [".safetensors", ".npz", ".PT", ".pth", ".bin", ".ckpt", ".npy", ".gguf"]
)
def test_a_folder_has_no_suffix_of_a_file(place, home, capsys, name, suffix):
    before = listing(place)
    path = f"m{suffix}"
    if name == "convert":
        assert PATHS[name](path) == 2
        assert "is the suffix of a file" in capsys.readouterr().err
    else:
        with pytest.raises(ValueError, match=r"a checkpoint is a folder.*(save_file|convert)"):
            PATHS[name](path)
    assert not os.path.lexists(path)
    assert listing(place) == before


def test_checkpoint_folder_with_a_file_suffix_is_resaved(place):
    Path("c").rename("c.pt")
    mlstate.save("c.pt", {"w": np.zeros(3)}, overwrite=True)
    assert mlstate.load("c.pt").model["w"].shape == (3,)
    with pytest.raises(mlstate.StoreError):
        mlstate.save_file(STATE, "c.pt")


SAVES = {
    "save": lambda **options: mlstate.save("new", STATE, **options),
    "save_async": lambda **options: checkpoint.save_async("new", STATE, **options),
    "manager": lambda **options: CheckpointManager("run").save(2, STATE, **options),
    "manager async": lambda **options: CheckpointManager("run").save_async(2, STATE, **options),
}


@pytest.mark.parametrize("name", SAVES)
def test_unknown_save_keyword_suggests_the_nearest(place, name):
    before = listing(place)
    with pytest.raises(TypeError, match=r"'incrementl'; did you mean 'incremental'\?"):
        SAVES[name](incrementl=True)
    assert listing(place) == before


@pytest.mark.parametrize(
    "function",
    [mlstate.save, checkpoint.save_async, CheckpointManager.save, CheckpointManager.save_async],
)
def test_save_signature_lists_keywords_and_defaults(function):
    parameters = inspect.signature(function).parameters
    assert {"states", "metadata", "group", "layout", "sparse", "progress"} <= parameters.keys()
    assert parameters["pack_below_bytes"].default == 262144
    assert parameters["compress"].annotation == "str | None"
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


@pytest.mark.parametrize(
    "function",
    [
        mlstate.load,
        checkpoint.Checkpoint.load,
        CheckpointManager.restore,
        CheckpointManager.restore_latest,
    ],
)
def test_the_signature_of_a_load_shows_each_keyword_and_default(function):
    parameters = inspect.signature(function).parameters
    assert {"names", "rank", "into", "mmap", "rename", "storage_options"} <= parameters.keys()
    assert parameters["verify"].default is True
    assert parameters["missing"].default == "skip"
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_an_unknown_keyword_of_a_load_is_named_with_the_nearest(place):
    with pytest.raises(TypeError, match=r"load\(\) .*'map'; did you mean 'mmap'\?"):
        mlstate.load("c", map=True)
