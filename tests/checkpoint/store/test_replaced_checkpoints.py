"""Reading a folder while a writer replaces its checkpoint and deletes the old files."""

import json
import os
import threading

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import CheckpointManager, inspect, plan_load, prune, reshard
from mlstate.checkpoint._load.targets import Prepared
from mlstate.checkpoint._store.checkpoint_files import CheckpointFiles
from mlstate.cli import main
from mlstate.errors import MLStateError
from mlstate.testing import run_ranks

pytestmark = pytest.mark.skipif(os.name == "nt", reason="checkpoints need POSIX")


def state(step):
    return {"w": np.full(40, step, np.float32), "b": np.full(3, step)}


class Counter:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Writer:
    """Saves again each time a reader has read a manifest, or its indexes, `times` times in all."""

    def __init__(self, folder, monkeypatch, save):
        self.folder, self.save = str(folder), save
        self.times, self.is_saving, self.step = 2, False, 1
        self.real = {
            name: getattr(CheckpointFiles, name) for name in ("read_manifest", "load_merged_index")
        }
        self.patch = monkeypatch

    def begin(self, moment):
        """`moment` is "root" or "indexes": the read after which the writer replaces it."""
        name = {"root": "read_manifest", "indexes": "load_merged_index"}[moment]

        def read(files, *arguments):
            content = self.real[name](files, *arguments)
            if files.path == self.folder and self.times and not self.is_saving:
                self.times -= 1
                self.replace()
            return content

        self.patch.setattr(CheckpointFiles, name, read)
        return self

    def replace(self):
        """Save the next step."""
        self.is_saving = True
        self.step += 1
        self.save(self.step)
        self.is_saving = False


@pytest.fixture
def writer(tmp_path, monkeypatch):
    def save(step):
        mlstate.save(tmp_path / "ckpt", state(step), step=step)

    save(1)
    return Writer(tmp_path / "ckpt", monkeypatch, save)


MOMENTS = pytest.mark.parametrize("moment", ["root", "indexes"])


def converted(folder, tmp_path, _):
    assert main(["convert", folder, str(tmp_path / "c.npz")]) == 0
    with np.load(tmp_path / "c.npz") as arrays:
        return arrays["w"][0]


def resharded(folder, tmp_path, _):
    reshard(folder, tmp_path / "cut", layout="rows", world_size=3)
    loaded = mlstate.load(tmp_path / "cut")
    assert set(loaded.model["w"]) == set(loaded.model["b"]) == {loaded.step}
    return loaded.step


def compared(folder, tmp_path, capsys):
    mlstate.save(tmp_path / "other", state(3))
    assert main(["diff", folder, str(tmp_path / "other"), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["first"]["step"]


READERS = {  # each returns the step that it has read
    "verify": lambda folder, *_: mlstate.verify(folder).step,
    "load": lambda folder, *_: mlstate.load(folder, verify="first").model["w"][0],
    "diff": compared,
    "reshard": resharded,
    "convert": converted,
}


@MOMENTS
@pytest.mark.parametrize("name", READERS)
def test_readers_begin_again(writer, moment, name, tmp_path, capsys):
    assert READERS[name](writer.begin(moment).folder, tmp_path, capsys) == writer.step
    assert writer.times == 0


@MOMENTS
def test_inspect_restarts_and_keeps_one_generation(writer, moment):
    checkpoint = inspect(writer.begin(moment).folder)
    writer.times = 0
    writer.replace()
    assert [tensor.key for tensor in checkpoint.tensors()] == ["b", "w"]
    assert checkpoint.step < writer.step


@MOMENTS
def test_the_inspect_command_begins_again(writer, moment, capsys):
    assert main(["inspect", writer.begin(moment).folder, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {tensor["key"] for tensor in data["tensors"]} == {"b", "w"}


def test_reshard_never_mixes_two_checkpoints(writer, tmp_path):
    other_manager = CheckpointManager(tmp_path / "ckpt2", keep=None)
    other_manager.save(1, state(1))
    calls = []

    def progress(count):
        calls.append(count)
        other_manager.save(1 + len(calls), state(1 + len(calls)))  # files of older steps stay

    reshard(
        other_manager.directory, tmp_path / "cut", layout="rows", world_size=3, progress=progress
    )
    assert calls
    assert set(mlstate.load(tmp_path / "cut").model["w"]) == {1}


def test_a_plan_to_load_begins_again(writer):
    plan = plan_load(writer.begin("root").folder)
    assert writer.times == 0
    assert set(plan.indexes) == {f"index/{inspect(writer.folder).generation}.0.json"}


def test_a_trial_of_prune_begins_again(writer):
    writer.times = 4  # during the last two the reader looks for the files that are needed
    assert not prune(writer.begin("root").folder, dry_run=True).steps
    assert writer.times == 0


@pytest.mark.parametrize("keep", [1, 2])
def test_steps_pruned_during_verify_are_not_damaged(tmp_path, monkeypatch, capsys, keep):
    manager = CheckpointManager(tmp_path / "run", keep=keep)
    writer = Writer(tmp_path / "run", monkeypatch, lambda step: manager.save(step, state(step)))
    for _ in range(keep):
        writer.replace()
    writer.begin("indexes")
    assert main(["verify", manager.directory, "--all-steps", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["good"]
    assert data["checkpoints"]


@MOMENTS
def test_step_pruned_during_restore_is_skipped_silently(tmp_path, monkeypatch, moment):
    manager = CheckpointManager(tmp_path / "run", keep=1)
    writer = Writer(tmp_path / "run", monkeypatch, lambda step: manager.save(step, state(step)))
    writer.replace()
    writer.begin(moment)
    assert CheckpointManager(manager.directory).restore_latest().step == writer.step
    assert writer.times == 0


def test_missing_file_raises_like_load(tmp_path):
    saved = mlstate.save(tmp_path / "ckpt", state(1))
    [path] = saved.files()
    (tmp_path / "ckpt" / path).unlink()
    assert [problem.kind for problem in mlstate.verify(saved.path).problems] == ["missing"]
    with pytest.raises(FileNotFoundError, match=path) as caught:
        mlstate.load(saved.path, verify="first")
    assert isinstance(caught.value, mlstate.StoreError)
    assert caught.value.path == str(tmp_path / "ckpt" / path)


def test_frequent_replacement_is_not_reported_as_damage(writer):
    writer.begin("indexes").times = 10**6
    with pytest.raises(mlstate.StoreError, match="replaced at each of 20 attempts to verify"):
        mlstate.verify(writer.folder)


def test_ranks_that_begin_again_keep_the_state_from_before_the_first_attempt(tmp_path, monkeypatch):
    """The second attempt fails; a failure restores the objects' state before the load."""
    path = tmp_path / "ckpt"
    mlstate.save(path, states={"counter": Counter(1)})
    attempts, lock = [], threading.Lock()

    def fill(prepared):
        with lock:  # the other rank waits for the save
            attempts.append(prepared)
            if len(attempts) == 1:
                mlstate.save(path, states={"counter": Counter(2)})
        raise FileNotFoundError("a file of the replaced checkpoint")

    monkeypatch.setattr(Prepared, "fill", fill)
    counters = [Counter(7), Counter(8)]

    def load(group):
        into = {"states": {"counter": counters[group.rank]}}
        with pytest.raises((FileNotFoundError, MLStateError)):
            mlstate.load(path, into=into, group=group)

    run_ranks(2, load)
    assert len(attempts) == 4
    assert [counter.value for counter in counters] == [7, 8]
