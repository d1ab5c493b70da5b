"""Pruning: which files it deletes, which it keeps, and when it deletes none."""

import errno
from pathlib import Path

import numpy as np
import pytest
from checkpoint_model import files_of

import mlstate
from mlstate.checkpoint import CheckpointManager, prune
from mlstate.checkpoint._folder.local import LocalFolder
from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles

GENERATION = "0123456789abcdef"


def listing(folder):
    return {name: len(data) for name, data in files_of(folder).items()}


@pytest.fixture
def manager(tmp_path):
    created = CheckpointManager(tmp_path / "run", keep=None)
    for step in range(5):
        created.save(step, {"w": np.full(100_000, step), "frozen": np.ones(100_000)})
    return created


def litter(folder):
    """Leave every kind of file that a killed writer can leave."""
    names = [
        f"params/w.0-1.{GENERATION}-0.safetensors",
        f"params/w.0-1.{GENERATION}-1.safetensors.tmp",
        f"optim_state/segment-0.{GENERATION}-0.safetensors",
        f"index/{GENERATION}.0.json",
        f"index/{GENERATION}.1.json.tmp",
        f".mlstate-{GENERATION}.tmp",
        f"roots/.mlstate-{GENERATION}.tmp",
    ]
    for number, name in enumerate(names):
        Path(folder, name).write_bytes(b"x" * number)
    return {name: number for number, name in enumerate(names)}


def test_unreferenced_files_are_deleted_and_counted(manager):
    before = listing(manager.directory)
    names = litter(manager.directory)
    report = prune(manager.directory)
    assert report.files == names
    assert report.nbytes == sum(names.values())
    assert (report.steps, report.kept) == ([], [0, 1, 2, 3, 4])
    after = listing(manager.directory)
    assert {k: v for k, v in after.items() if k != "lock"} == {
        k: v for k, v in before.items() if k != "lock"
    }
    assert "7 files" in str(report)


def test_dry_run_reports_without_deleting(manager):
    litter(manager.directory)
    before = listing(manager.directory)
    dry_report = prune(manager.directory, keep=2, dry_run=True)
    assert dry_report.dry_run
    assert listing(manager.directory) == before
    done = prune(manager.directory, keep=2)
    assert dry_report._replace(dry_run=False) == done
    after = listing(manager.directory)
    assert done.files == {k: v for k, v in before.items() if k not in after}


def test_each_index_is_read_once(manager, monkeypatch):
    read = []
    load = CheckpointFiles.load_merged_index

    def count_and_load(files, manifest):
        read.append(manifest.generation)
        return load(files, manifest)

    monkeypatch.setattr(CheckpointFiles, "load_merged_index", count_and_load)
    prune(manager.directory)
    assert len(read) == len(set(read)) == 5


def test_steps_that_stay_are_whole(manager):
    report = prune(manager.directory, keep=2)
    assert (report.steps, report.kept) == ([0, 1, 2], [3, 4])
    assert manager.steps() == [3, 4]
    for step in (3, 4):
        assert manager.restore(step).model["w"][0] == step
        assert manager.restore(step).model["frozen"][0] == 1
    assert mlstate.load(manager.directory).step == 4
    assert prune(manager.directory, keep=9).files == {}


def test_newest_checkpoint_is_kept_without_a_root(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None)
    for step in (1, 2, 9):
        manager.save(step, {"w": np.full(3, step)})
    max((tmp_path / "roots").iterdir()).unlink()  # the newest manifest is no longer a step
    assert prune(tmp_path, keep=1).steps == [1]
    assert mlstate.load(tmp_path).model["w"][0] == 9
    assert manager.restore(2).model["w"][0] == 2


def test_files_of_others_stay(tmp_path):
    mlstate.save(tmp_path / "ckpt", {"w": np.ones(3)})
    for name in ("notes.txt", "params/mine.safetensors", "roots/x"):
        (tmp_path / "ckpt" / name).write_text("mine")
    assert prune(tmp_path / "ckpt", keep=1).files == {}
    assert mlstate.verify(tmp_path / "ckpt").strange == [
        "notes.txt",
        "params/mine.safetensors",
        "roots/x",
    ]


@pytest.mark.parametrize("damaged_path", ["manifest.json", "index", "roots"])
def test_damaged_metadata_prevents_deletion(manager, damaged_path):
    folder = Path(manager.directory)
    path = (
        folder / damaged_path
        if damaged_path.endswith(".json")
        else max((folder / damaged_path).iterdir())
    )
    path.write_bytes(path.read_bytes()[:-9])
    litter(folder)
    before = listing(folder)
    with pytest.raises(mlstate.FormatError):
        prune(folder)
    assert set(listing(folder)) == set(before)


def test_damaged_root_is_pruned_with_old_steps(manager):
    newest = max(Path(manager.directory, "roots").iterdir())
    damaged = sorted(Path(manager.directory, "roots").iterdir())[2]
    damaged.write_bytes(b"{}")
    report = prune(manager.directory, keep=3)
    assert (report.steps, report.kept) == ([0, None], [1, 3, 4])
    assert newest.exists()
    assert not damaged.exists()


def test_folder_without_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        prune(tmp_path)
    assert list(tmp_path.iterdir()) == []
    mlstate.save(tmp_path / "ckpt", {"w": np.ones(3)})
    # the manifest is lost: its files may still be needed
    (tmp_path / "ckpt" / "manifest.json").unlink()
    before = listing(tmp_path)
    with pytest.raises(FileNotFoundError):
        prune(tmp_path / "ckpt")
    assert listing(tmp_path) == before


def test_prune_refuses_a_locked_folder(manager):
    names = litter(manager.directory)
    with (
        LocalFolder(manager.directory).claim(),
        pytest.raises(mlstate.StoreError) as caught,
    ):
        prune(manager.directory)
    assert caught.value.errno == errno.EBUSY
    assert prune(manager.directory, dry_run=True).files == names


def test_a_bad_number_is_refused(manager):
    with pytest.raises(ValueError, match="keep must be 1 or more"):
        prune(manager.directory, keep=0)
