"""What a notebook shows of an object: no error when its files are gone, and a table."""

import shutil

import numpy as np
import pytest
from html_page import Page

import mlstate
from mlstate.checkpoint import CheckpointManager, plan_load, save_async
from mlstate.follow import Follower, Publisher
from mlstate.prompts import PromptStore

STATE = {"w": np.zeros(2)}


def follower():
    Publisher("published").publish(7, STATE)
    follower = Follower("published", into={"w": np.zeros(2)})
    follower.advance()
    return follower


def publisher():
    publisher = Publisher("published")
    publisher.publish(7, STATE)
    return publisher


def handle():
    handle = save_async("run", STATE)
    handle.wait()
    return handle


def manager():
    manager = CheckpointManager("run")
    manager.save(7, STATE)
    return manager


def saved_file():
    mlstate.save_file(STATE, "w.safetensors")
    return mlstate.inspect("w.safetensors")


def saved(function, **keywords):
    mlstate.save("run", STATE)
    return function("run", **keywords)


OBJECTS = {
    "a saved checkpoint": lambda: mlstate.save("run", STATE, step=7),
    "an inspected checkpoint": lambda: saved(mlstate.inspect),
    "a file": saved_file,
    "a manager": manager,
    "a step": lambda: CheckpointManager("run").save(7, STATE),
    "a handle": handle,
    "a loaded state": lambda: saved(mlstate.load),
    "a mapped state": lambda: saved(mlstate.load, mmap=True),
    "a report": lambda: saved(mlstate.verify),
    "a plan": lambda: saved(plan_load),
    "a publisher": publisher,
    "a follower": follower,
    "prompts": lambda: PromptStore("prompts", model="m"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_shown_after_their_files_are_gone(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = OBJECTS[name]()
    for entry in tmp_path.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert repr(shown) and str(shown)
    if name != "a plan":
        Page(shown._repr_html_())
    if name in ("a saved checkpoint", "a step"):
        path = tmp_path / "run"
        assert repr(shown).startswith(f"Checkpoint: step 7 (deleted), {path}")
        assert "step 7 (deleted)" in shown._repr_html_()


def test_damaged_checkpoint_is_shown_with_its_problem(tmp_path):
    saved = mlstate.save(tmp_path, STATE)
    [index] = (tmp_path / "index").iterdir()
    index.write_bytes(b"{}")
    assert f"(cannot be read: {index}" in repr(saved)


def test_publishers_list_versions_and_followers_list_arrays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = Page(publisher()._repr_html_()).texts
    assert {"step", "kind", "7"} <= {*texts}
    monkeypatch.chdir(tmp_path.parent)
    texts = Page(Follower(tmp_path / "published", into={"w": np.zeros(2)})._repr_html_()).texts
    assert {"w", "float64", "(2,)"} <= {*texts}
