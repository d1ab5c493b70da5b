"""Targets that change while their replacement is written; mlstate/_common/atomic_file.py."""

import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from any_format import read_any, write_any
from interruption import signal_once

import mlstate
from mlstate import _core
from mlstate._common import atomic_file
from mlstate._common.atomic_file import Target
from mlstate.checkpoint import export_huggingface, reshard
from mlstate.checkpoint._huggingface import export as export_module
from mlstate.cli import main


def write(path, data):
    Target.of(path).write_content(lambda file: file.write(data))


def content(path):
    """Return the names and bytes below a path, links included."""
    if path.is_symlink():
        return path.readlink()
    if path.is_file():
        return path.read_bytes()
    return {entry.name: content(entry) for entry in path.iterdir()}


def make_file(path):
    path.write_bytes(b"mine")


def make_folder(path):
    path.mkdir()
    (path / "notes").write_bytes(b"mine")


def make_link(path):
    path.symlink_to(path.parent / "elsewhere")


def make_checkpoint(path):
    path.mkdir(exist_ok=True)
    mlstate.save(path, {"mine": np.ones(3)}, overwrite=True)


APPEARED = [make_file, make_folder, make_link, make_checkpoint, lambda path: path.mkdir()]


def before_last_step(monkeypatch, action):
    """Run an action once, right before the call that renames the new file or folder."""
    rename, done = _core.path_rename, []

    def act(*args):
        if not done:
            done.append(True)
            action()
        return rename(*args)

    monkeypatch.setattr(_core, "path_rename", act)
    return done


@pytest.mark.parametrize("appear", APPEARED)
@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".dcp", ""])
def test_target_created_concurrently_is_kept(tmp_path, monkeypatch, suffix, appear):
    if suffix in (".pt", ".dcp"):
        pytest.importorskip("torch")
    target = tmp_path / f"target{suffix}"
    done = before_last_step(monkeypatch, lambda: appear(target))
    with pytest.raises(mlstate.StoreError, match="appeared while") as caught:
        if suffix:
            write_any(target, {"w": np.ones(3)})
        else:
            export_huggingface(target, {"w": np.ones(3)})
    assert done
    assert caught.value.errno == errno.EEXIST
    assert str(target) in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == [target.name]
    appeared = content(target)
    assert appeared == {} or "mine" in str(appeared) or appear is make_link
    if appear is make_checkpoint:
        assert list(mlstate.load(target).model) == ["mine"]


def test_an_empty_folder_is_used_only_while_it_is_empty(tmp_path, monkeypatch):
    target = tmp_path / "m"
    target.mkdir()
    put = Target.put

    def fill_and_put(self, new):
        (target / "notes").write_bytes(b"mine")
        put(self, new)

    monkeypatch.setattr(Target, "put", fill_and_put)
    with pytest.raises(mlstate.StoreError, match="appeared while"):
        export_huggingface(target, {"w": np.ones(3)})
    assert content(target) == {"notes": b"mine"}
    assert len(list(tmp_path.iterdir())) == 1


def add_file(target):
    (target / "notes").write_bytes(b"mine")


def rewrite_file(target):
    path = target / "a"
    info = path.stat()
    path.write_bytes(b"NEW")  # the same inode and size
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def rewrite_nested_file(target):
    (target / "sub" / "b").write_bytes(b"new")


def exchange_file(target):
    (target / "sub" / "c").write_bytes((target / "a").read_bytes())
    (target / "sub" / "c").replace(target / "a")


def exchange_folder(target):
    shutil.copytree(target, target.parent / "copy")
    shutil.rmtree(target)
    (target.parent / "copy").rename(target)


def make_it_a_file(target):
    shutil.rmtree(target)
    target.write_bytes(b"mine")


CHANGES = [
    add_file,
    rewrite_file,
    rewrite_nested_file,
    exchange_file,
    exchange_folder,
    make_it_a_file,
]


def without_exchange(monkeypatch):
    """Refuse the renames that only some file systems have."""

    def refuse(*args):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(_core, "path_rename", refuse)


@pytest.fixture(params=[False, True], ids=["exchange", "no exchange"])
def _exchange(request, monkeypatch):
    """A file system that has these renames, and one that lacks them."""
    if request.param:
        without_exchange(monkeypatch)


@pytest.mark.usefixtures("_exchange")
@pytest.mark.parametrize("change", CHANGES)
def test_concurrently_changed_folder_is_not_replaced(tmp_path, change):
    target = tmp_path / "m"
    (target / "sub").mkdir(parents=True)
    (target / "a").write_bytes(b"old")
    (target / "sub" / "b").write_bytes(b"old")
    changed_content = None

    def write_and_change(new):
        nonlocal changed_content
        Path(new).mkdir()
        change(target)
        changed_content = content(target)

    with pytest.raises(mlstate.StoreError, match="was changed while"):
        Target.of(target).write_path(write_and_change)
    assert content(target) == changed_content
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]
    Target.of(target).write_path(os.mkdir)
    assert content(target) == {}
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.usefixtures("_exchange")
def test_concurrently_changed_file_is_not_replaced(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    for text in (b"new", b"longer"):

        def write_and_change(file, text=text):
            file.write(b"ours")
            path.unlink()
            path.write_bytes(text)

        with pytest.raises(mlstate.StoreError, match="was changed while"):
            Target.of(path).write_content(write_and_change)
        assert path.read_bytes() == text
    write(path, b"ours")
    assert path.read_bytes() == b"ours"
    path.unlink()
    write(path, b"again")
    assert path.read_bytes() == b"again"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("lacks_exchange", [False, True])
def test_file_system_without_exchange_keeps_the_new_target(tmp_path, monkeypatch, lacks_exchange):
    without_exchange(monkeypatch)
    if lacks_exchange:  # without hard links too

        def refuse(*args):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "a"

    def write_and_appear(file):
        file.write(b"ours")
        path.write_bytes(b"mine")

    with pytest.raises(mlstate.StoreError, match="appeared"):
        Target.of(path).write_content(write_and_appear)
    assert path.read_bytes() == b"mine"
    path.unlink()
    write(path, b"ours")
    assert path.read_bytes() == b"ours"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.usefixtures("_exchange")
@pytest.mark.parametrize("step", range(3))
def test_interrupt_between_renames_restores_the_old_folder(tmp_path, monkeypatch, step):
    target = tmp_path / "m"
    make_folder(target)
    start = Target.of(target)
    steps = []

    def interrupted(function):
        def call(*args):
            result = function(*args)
            steps.append(function)
            if len(steps) == step + 1:
                raise KeyboardInterrupt
            return result

        return call

    for owner, name in ((_core, "path_rename"), (os, "rename"), (atomic_file, "_list_path")):
        monkeypatch.setattr(owner, name, interrupted(getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
        start.write_path(os.mkdir)
    assert content(target) == {"notes": b"mine"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.usefixtures("_exchange")
def test_a_signal_waits_until_the_old_folder_is_restored(tmp_path, monkeypatch):
    target, swap = tmp_path / "m", Target._swap
    make_folder(target)

    def swap_and_fail(*arguments):
        monkeypatch.setattr(Target, "_swap", swap)
        swap(*arguments)
        raise MemoryError

    monkeypatch.setattr(Target, "_swap", swap_and_fail)
    signal_once(monkeypatch, Target, "_restore")
    with pytest.raises(KeyboardInterrupt):
        Target.of(target).write_path(os.mkdir)
    assert content(target) == {"notes": b"mine"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.usefixtures("_exchange")
def test_a_signal_waits_until_the_new_folder_is_in_place(tmp_path, monkeypatch):
    target = tmp_path / "m"
    make_folder(target)
    signal_once(monkeypatch, os, "rename")
    with pytest.raises(KeyboardInterrupt):
        Target.of(target).write_path(lambda new: (Path(new) / "new").mkdir(parents=True))
    assert [entry.name for entry in target.iterdir()] == ["new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_a_folder_that_cannot_be_restored_is_named(tmp_path, monkeypatch):
    target = tmp_path / "m"
    make_folder(target)
    start = Target.of(target)
    without_exchange(monkeypatch)
    rename = os.rename

    def rename_and_fill(source, other):
        rename(source, other)
        if source == str(target):
            make_checkpoint(target)  # another process, between the two renames

    monkeypatch.setattr(os, "rename", rename_and_fill)
    with pytest.raises(mlstate.StoreError, match="earlier content is") as caught:
        start.write_path(os.mkdir)
    assert list(mlstate.load(target).model) == ["mine"]
    [old] = [entry for entry in tmp_path.iterdir() if entry != target]
    assert content(old) == {"notes": b"mine"}
    assert str(old) in str(caught.value)


def test_of_two_exports_one_wins(tmp_path):
    for attempt in range(20):
        target, results = tmp_path / f"m{attempt}", []
        gate = threading.Barrier(2)

        def export(value, target=target, gate=gate, results=results):
            model = {"w": np.full(3, value)}
            snapshot = export_module.take_export(target, model, overwrite=False)
            gate.wait()
            try:
                export_module.export(snapshot)
                results.append(value)
            except mlstate.StoreError as error:
                assert error.errno == errno.EEXIST

        threads = [threading.Thread(target=export, args=(value,)) for value in (1, 2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(results) == 1
        assert mlstate.load(target).model["w"][0] == results[0]
        assert len(list(tmp_path.iterdir())) == attempt + 1


# ---- checkpoints as targets ----


def before_lock(monkeypatch, action):
    """Run an action once, when a save is about to take the lock."""
    from mlstate.checkpoint._save.commit import Commit

    begin, done = Commit.begin, []

    def act(commit, **keywords):
        if not done:
            done.append(True)
            action()
        begin(commit, **keywords)

    monkeypatch.setattr(Commit, "begin", act)


@pytest.mark.parametrize("overwrite", [None, True])
@pytest.mark.parametrize("way", ["reshard", "convert"])
def test_concurrently_saved_checkpoint_is_not_replaced(tmp_path, monkeypatch, way, overwrite):
    source, target = tmp_path / "a", tmp_path / "b"
    mlstate.save(source, {"w": np.ones(4)})
    if overwrite:
        mlstate.save(target, {"old": np.ones(4)})
    before_lock(monkeypatch, lambda: make_checkpoint(target))
    with pytest.raises(mlstate.StoreError, match="changed by another writer") as caught:
        if way == "reshard":
            reshard(source, target, layout="rows", world_size=2, overwrite=overwrite)
        else:
            write_any(target, *read_any(source)[:4], overwrite=overwrite)
    assert caught.value.errno == errno.EEXIST
    assert list(mlstate.load(target).model) == ["mine"]
    assert mlstate.verify(target)


def test_concurrently_saved_step_is_not_deleted(tmp_path, monkeypatch):
    source, run = tmp_path / "a", tmp_path / "run"
    mlstate.save(source, {"w": np.ones(4)})
    manager = mlstate.checkpoint.CheckpointManager(run)
    manager.save(1, {"w": np.ones(2)})
    before_lock(monkeypatch, lambda: manager.save(2, {"w": np.zeros(2)}))
    with pytest.raises(mlstate.StoreError, match="changed by another writer"):
        reshard(source, run, layout="rows", world_size=2, overwrite=True)
    assert manager.steps() == [1, 2]


def test_reshard_refuses_files_that_appear_in_its_target(tmp_path, monkeypatch):
    source, target = tmp_path / "a", tmp_path / "b"
    mlstate.save(source, {"w": np.ones(4)})
    before_lock(monkeypatch, lambda: export_huggingface(target, {"mine": np.ones(2)}))
    with pytest.raises(mlstate.StoreError, match=r"holds 'model\.safetensors'"):
        reshard(source, target, layout="rows", world_size=2)
    assert list(mlstate.load(target).model) == ["mine"]


@pytest.mark.parametrize("suffix", ["", ".npz", ".safetensors"])
def test_overwrite_replaces_only_the_target_seen_at_start(tmp_path, monkeypatch, capsys, suffix):
    from mlstate.checkpoint._convert import convert

    source, target = tmp_path / "a", tmp_path / f"b{suffix}"
    mlstate.save(source, {"w": np.ones(4)})
    write_any(target, {"old": np.ones(2)})
    read = convert.read_parts

    def read_and_change(*args, **options):
        write_any(target, {"mine": np.ones(2)}, overwrite=True)
        return read(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(convert, "read_parts", read_and_change)
        assert main(["convert", str(source), str(target), "--overwrite"]) == 2
    assert "changed" in capsys.readouterr().err
    assert list(read_any(target)[0]) == ["mine"]
    assert main(["convert", str(source), str(target), "--overwrite"]) == 0
    assert list(read_any(target)[0]) == ["w"]


def test_a_changed_target_is_refused_without_a_rename(tmp_path, monkeypatch):
    """So that no reader sees the replacement for a moment."""
    path, new = tmp_path / "file", tmp_path / "new"
    path.write_bytes(b"mine")
    new.write_bytes(b"new")
    target = Target.of(path)
    path.write_bytes(b"other")
    monkeypatch.setattr(_core, "path_rename", None)
    with pytest.raises(mlstate.StoreError, match="was changed"):
        target.put(str(new))
    assert path.read_bytes() == b"other"


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "pt"])
def test_an_error_of_a_new_file_names_the_target(tmp_path, suffix, monkeypatch):
    """The folder was deleted after it was created."""
    pytest.importorskip("torch")
    for module in ("_common.atomic_file", "_safetensors"):
        monkeypatch.setattr(f"mlstate.{module}.make_parents", lambda path: None)
    path = tmp_path / "missing" / f"w.{suffix}"
    mlstate.save(tmp_path / "ckpt", {"w": np.ones(3)})
    with pytest.raises(mlstate.StoreError) as caught:
        write_any(path, *read_any(tmp_path / "ckpt")[:4])
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(path)


def test_a_replaced_file_exists_at_every_moment(tmp_path, monkeypatch):
    """Also on a file system that cannot swap two names, such as NFS."""
    path, rename, seen = tmp_path / "file", os.rename, []

    def watched(*names):
        seen.append(path.read_bytes())
        rename(*names)
        seen.append(path.read_bytes())

    without_exchange(monkeypatch)
    monkeypatch.setattr(os, "rename", watched)
    path.write_bytes(b"old")
    write(path, b"new")
    assert seen == [b"old", b"new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["before", "after"])
def test_an_interrupt_between_the_steps_keeps_the_old_file(tmp_path, monkeypatch, call):
    path, rename = tmp_path / "file", os.rename

    def interrupted(*names):
        monkeypatch.setattr(os, "rename", rename)
        if call == "after":
            rename(*names)
        raise KeyboardInterrupt

    without_exchange(monkeypatch)
    monkeypatch.setattr(os, "rename", interrupted)
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
