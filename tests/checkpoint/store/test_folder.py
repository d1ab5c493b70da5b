"""The folder of a checkpoint: file names are hints only, and symbolic links are refused."""

import errno
import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import files_of

import mlstate
from mlstate.checkpoint import CheckpointManager, prune, save_async
from mlstate.checkpoint._folder.local import LocalFolder

# ---- file names are hints ----


@pytest.mark.parametrize("sequence", ["9223372036854775807", "9223372036854775808", "000000007"])
@pytest.mark.parametrize("text", [b"", b"{}"])
def test_a_stray_root_does_not_choose_the_next_number(tmp_path, sequence, text):
    mlstate.save(tmp_path / "ckpt", {"w": np.zeros(3)})
    stray = tmp_path / "ckpt" / "roots" / f"{sequence}.{'a' * 16}.json"
    stray.write_bytes(text)
    for number in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the files that the stray manifest needs are unknown
            saved = mlstate.save(tmp_path / "ckpt", {"w": np.full(3, number)})
        assert saved.sequence == number + 1
        assert mlstate.load(tmp_path / "ckpt").model["w"][0] == number
    assert stray.exists()


def test_malformed_root_names_are_ignored(tmp_path):
    mlstate.save(tmp_path / "ckpt", {"w": np.zeros(3)})
    names = [f"{2**63}.{'a' * 16}.json", f"00000000.{'a' * 16}.json", f"000000009.{'a' * 16}.json"]
    for name in names:
        (tmp_path / "ckpt" / "roots" / name).write_bytes(b"")
    assert mlstate.save(tmp_path / "ckpt", {"w": np.ones(3)}).sequence == 2  # without a warning
    assert mlstate.verify(tmp_path / "ckpt").strange == sorted(f"roots/{name}" for name in names)


def test_exhausted_sequence_is_refused_before_writing(tmp_path):
    from mlstate.checkpoint._folder.names import MANIFEST
    from mlstate.checkpoint._store import manifest as _manifest

    saved = mlstate.save(tmp_path / "ckpt", {"w": np.zeros(3)})
    root = saved._manifest._replace(sequence=2**63 - 1)
    (tmp_path / "ckpt" / MANIFEST).write_bytes(_manifest.build(root))
    before = (tmp_path / "ckpt" / MANIFEST).read_bytes()
    with pytest.raises(mlstate.FormatError, match="9223372036854775807 is the last"):
        mlstate.save(tmp_path / "ckpt", {"w": np.ones(3)})
    assert (tmp_path / "ckpt" / MANIFEST).read_bytes() == before
    assert not mlstate.verify(tmp_path / "ckpt").problems
    assert mlstate.verify(tmp_path / "ckpt").leftover == []


class _Replaced:
    """A module with some of its functions replaced."""

    def __init__(self, module, **functions):
        self.__dict__ |= vars(module) | functions


@pytest.mark.parametrize("part", ["manifest", "index"])
def test_save_never_commits_an_unreadable_checkpoint(tmp_path, monkeypatch, part):
    from mlstate import _core
    from mlstate.checkpoint._folder.names import MANIFEST
    from mlstate.checkpoint._save import commit
    from mlstate.checkpoint._store import manifest as _manifest

    mlstate.save(tmp_path / "ckpt", {"w": np.zeros(3)})
    before = (tmp_path / "ckpt" / MANIFEST).read_bytes()
    if part == "manifest":
        build = _manifest.build
        monkeypatch.setattr(
            _manifest, "build", lambda manifest: build(manifest._replace(sequence=2**63))
        )
    else:

        def write(folder, generation, *rest):
            written = _core.shards_write(folder, generation, *rest)
            path = Path(folder, "index", f"{generation}.0.json")
            path.write_bytes(path.read_bytes()[:-1])
            return written

        monkeypatch.setattr(commit, "_core", _Replaced(_core, shards_write=write))
    with pytest.raises(mlstate.MLStateError):
        mlstate.save(tmp_path / "ckpt", {"w": np.ones(3)})
    assert (tmp_path / "ckpt" / MANIFEST).read_bytes() == before
    assert mlstate.load(tmp_path / "ckpt").model["w"][0] == 0
    # the file of the failed save is deleted
    assert len(list((tmp_path / "ckpt" / "index").iterdir())) == 1


# ---- linked folders ----


@pytest.fixture
def linked(tmp_path, request):
    """Two checkpoints; one folder of the second is a link to that folder of the first."""
    part = request.param
    manager = CheckpointManager(tmp_path / "mine", keep=None)
    for step in (1, 2):
        state = {"w": np.full(3, step)}
        manager.save(step, state, {"w.m": np.full(3, step)})
        CheckpointManager(tmp_path / "other", keep=None).save(step, state)
    folder = tmp_path / "other" / part
    shutil.rmtree(folder)
    folder.symlink_to(Path("..", "mine", part))
    return tmp_path


@pytest.mark.filterwarnings("ignore:keep=1 deletes steps:UserWarning")
@pytest.mark.parametrize("linked", ["params", "optim_state", "index", "roots"], indirect=True)
def test_linked_folders_are_refused_by_name(linked):
    before = files_of(linked / "mine")
    other = linked / "other"
    part = next(path.name for path in other.iterdir() if path.is_symlink())
    calls = {
        "save": lambda: mlstate.save(other, {"w": np.zeros(3)}),
        "async": lambda: save_async(other, {"w": np.zeros(3)}).wait(),
        "manager": lambda: CheckpointManager(other, keep=1).save(9, {"w": np.zeros(3)}),
        "prune": lambda: prune(other, keep=1),
        "dry": lambda: prune(other, keep=1, dry_run=True),
        "repair": lambda: mlstate.verify(other, repair=True),
    }
    for name, call in calls.items():
        with (
            suppress(mlstate.MLStateError)
            if name == "repair"
            else pytest.raises(
                mlstate.StoreError, match=f"symbolic link.*{part}|holds the steps of a Ch"
            )
        ):
            call()
        assert files_of(linked / "mine") == before, name
    report = mlstate.verify(linked / "mine")
    assert not report.problems


def test_a_linked_pool_is_reported_and_read(tmp_path):
    mlstate.save(tmp_path / "ckpt", {"w": np.arange(3)})
    (tmp_path / "ckpt" / "params").rename(tmp_path / "elsewhere")
    (tmp_path / "ckpt" / "params").symlink_to("../elsewhere")
    assert mlstate.load(tmp_path / "ckpt").model["w"].tolist() == [0, 1, 2]
    report = mlstate.verify(tmp_path / "ckpt")
    assert (report.problems, report.strange) == ([], ["params"])


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "ckpt").symlink_to("disk")
    for number in (1, 2):
        mlstate.save(tmp_path / "ckpt", {"w": np.full(3, number)})
    assert mlstate.load(tmp_path / "disk").model["w"][0] == 2
    assert prune(tmp_path / "ckpt").files == {}


@pytest.mark.parametrize(
    "path",
    [
        "../mine/params/x.0123456789abcdef-0.safetensors",
        "params/../x.0123456789abcdef-0.safetensors",
        "params/notes.safetensors",
        "/etc/x.0123456789abcdef-0.safetensors",
        "lock",
        "index/x",
    ],
)
def test_only_files_of_a_checkpoint_are_deleted(tmp_path, path):
    from mlstate.checkpoint._store.open_path import open_files

    mlstate.save(tmp_path / "ckpt", {"w": np.arange(3)})
    before = files_of(tmp_path)
    with pytest.raises(mlstate.StoreError, match="not a file of this checkpoint"):
        open_files(tmp_path / "ckpt").remove([path])
    assert files_of(tmp_path) == before


# ---- permissions ----


def permissions(folder):
    """Permission bits of the folder and its content."""
    return {path: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
@pytest.mark.parametrize("sections", [1, 2])
def test_a_private_checkpoint_stays_private(tmp_path, sections):
    folder = tmp_path / "run"
    manager = CheckpointManager(folder, keep=2)
    manager.save(0, {"w": np.zeros(9)})
    for path, mode in permissions(folder).items():
        path.chmod(mode & 0o700)
    before = permissions(folder)
    (folder / "lock").unlink()
    (folder / "optim_state").rmdir()
    for step in (1, 2):
        manager.save(step, *[{"w": np.full(9, step)}] * sections)
    after = permissions(folder)
    assert len(after.keys() - before.keys()) > 3
    assert [path for path, mode in after.items() if mode & 0o077] == []


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_a_private_manifest_makes_new_files_private(tmp_path):
    folder = tmp_path / "ckpt"
    mlstate.save(folder, {"w": np.zeros(9)})
    (folder / "manifest.json").chmod(0o640)
    mlstate.save(folder, {"w": np.ones(9)})
    [shard] = (folder / "params").iterdir()
    assert shard.stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_new_files_keep_folder_permissions(tmp_path):
    tmp_path.chmod(0o700)
    mlstate.save(tmp_path, {"w": np.zeros(9)})
    assert [path for path, mode in permissions(tmp_path).items() if mode & 0o077] == []


def test_the_reason_why_files_cannot_be_found_is_a_store_error(tmp_path):
    folder = LocalFolder(str(tmp_path))
    (tmp_path / "a").write_bytes(b"12")
    assert [info.nbytes for info in folder.find_files(["a", "b"]).values()] == [2]
    with pytest.raises(mlstate.StoreError, match="cannot find the file") as caught:
        folder.find_files(["a", "b" * 300])
    assert caught.value.errno == errno.ENAMETOOLONG
