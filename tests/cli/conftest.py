"""A checkpoint, a run and a file, and calls of the command line."""

import json
import shutil

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import CheckpointManager
from mlstate.cli import main

WEIGHTS = {"layer.w": np.arange(12.0, dtype=np.float32).reshape(4, 3), "layer.b": np.ones(3)}
MOMENTS = {"layer.w.m": np.zeros((4, 3), np.float32)}


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory):
    """A checkpoint, a run of three steps and a single file."""
    folder = tmp_path_factory.mktemp("made")
    metadata = {"run": "a"}
    mlstate.save(folder / "ckpt", WEIGHTS, MOMENTS, metadata=metadata, step=7, pack_below_bytes=0)
    manager = CheckpointManager(folder / "run", keep=None)
    for step in (10, 20, 30):
        manager.save(step, {"w": np.full(500, step), "frozen": np.ones(5)}, pack_below_bytes=0)
    state = {"w": np.arange(300_000.0), "b": np.ones(2)}
    mlstate.save_file(state, folder / "w.safetensors", {"a": "1"})
    return folder


@pytest.fixture
def place(example_folder, tmp_path, monkeypatch):
    """A copy of these as the working directory."""
    shutil.copytree(example_folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def run(capsys):
    """A function that calls the command line; returns status, output lines and error lines."""

    def call(*arguments):
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    return call


@pytest.fixture
def refused(run):
    """A function that calls the command line, which must fail; returns the line of its error."""

    def call(*arguments):
        status, out, err = run(*arguments)
        assert (status, out, len(err)) == (2, [], 1)
        return err[0]

    return call


@pytest.fixture
def run_json(run):
    def call(*arguments):
        status, out, err = run(*arguments, "--json")
        assert err == []
        return status, json.loads("\n".join(out))

    return call
