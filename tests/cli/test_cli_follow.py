"""The commands for published versions, and the Hugging Face folder that follows these."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import mlstate
from mlstate.checkpoint import CheckpointManager
from mlstate.checkpoint._folder.writer_lock import WriterLock
from mlstate.follow import Follower, Publisher


@pytest.fixture
def versions(place):
    """Six versions: steps 0 to 5, with anchors 0 and 3."""
    model = {"w": np.zeros((40, 50), np.float16), "b": np.zeros(3, np.float32)}
    publisher = Publisher("weights", anchor_every=3)
    for step in range(6):
        model["w"][step] = step + 1
        publisher.publish(step, model)
    return publisher, model


def damage(step):
    checkpoint = CheckpointManager("weights").checkpoint(step)
    path = Path("weights", next(iter(checkpoint.files())))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@contextlib.contextmanager
def following():
    """The process of a command that follows, after its first step; it is killed at the end."""
    words = ["follow", "weights", "--into", "hf", "--every", "0.05"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "mlstate", *words], **pipes) as process:
        try:
            assert process.stdout.readline() == "hf: step 5\n"
            yield process
        finally:
            process.kill()


def test_publish_ls_lists_the_versions(versions, run, run_json):
    status, out, err = run("publish", "ls", "weights")
    assert (status, err) == (0, [])
    assert out[0].startswith("weights: 6 versions, lineage ")
    kinds = ["anchor", "delta", "delta", "both", "delta", "delta"]
    assert [line.split()[:2] for line in out[2:]] == [
        [str(n), kind] for n, kind in enumerate(kinds)
    ]
    status, data = run_json("publish", "ls", "weights")
    assert [row["step"] for row in data["versions"]] == list(range(6))
    assert data["versions"][1]["bytes"] < data["versions"][0]["bytes"] / 3


@pytest.mark.parametrize(
    ("removed", "listed"), [([1], [0, 3, 4, 5]), ([0], [3, 4, 5]), ([4], [0, 1, 2, 3])]
)
def test_publish_ls_leaves_out_versions_without_the_ones_before(
    versions, run_json, removed, listed
):
    steps = [row["step"] for row in run_json("publish", "ls", "weights")[1]["versions"]]
    roots = sorted(Path("weights/roots").iterdir())
    for number in removed:
        roots[number].unlink()
    rows = run_json("publish", "ls", "weights")[1]["versions"]
    assert [row["step"] for row in rows] == [steps[number] for number in listed]


@pytest.mark.parametrize(
    ("removed", "bad"), [([1], [1]), ([0], [1]), ([5], [5]), (range(6), [5]), ([0, 1, 2], [])]
)
def test_publish_verify_finds_versions_without_the_ones_before(versions, run_json, removed, bad):
    roots = sorted(Path("weights/roots").iterdir())
    for number in removed:
        roots[number].unlink()
    status, data = run_json("publish", "verify", "weights")
    assert [row["step"] for row in data["versions"] if row["problems"]] == bad
    assert (status, data["good"]) == (int(bool(bad)), not bad)


def test_publish_verify_names_the_damaged_version(versions, run, run_json):
    assert run("publish", "verify", "weights")[0] == 0
    damage(4)
    status, out, _ = run("publish", "verify", "weights")
    assert status == 1
    assert out[0] == "weights: damaged"
    assert [line.split()[0] for line in out[2:] if "good" not in line] == ["4"]
    status, data = run_json("publish", "verify", "weights")
    assert (status, data["good"]) == (1, False)
    assert [row["step"] for row in data["versions"] if row["problems"]] == [4]


def test_publish_prune_keeps_an_anchor_and_the_publisher_continues(versions, run, run_json):
    publisher, model = versions
    status, out, _ = run("publish", "prune", "weights", "--keep", "2")
    assert (status, out[-1]) == (0, "kept: 3, 4, 5")
    assert CheckpointManager("weights").steps() == [3, 4, 5]
    assert publisher.publish(6, model) == "both"
    assert run("publish", "verify", "weights")[0] == 0
    assert run_json("publish", "prune", "weights", "--keep", "1")[1]["kept"] == [6]
    model["w"][35] = 1
    assert publisher.publish(7, model) == "delta"
    assert [row["step"] for row in run_json("publish", "ls", "weights")[1]["versions"]] == [6, 7]
    assert run("publish", "verify", "weights")[0] == 0


def test_publish_prune_keeps_the_anchor_of_a_version_that_is_published_before_it_has_the_lock(
    versions, run, monkeypatch
):
    publisher, model = versions
    publisher.publish(6, model)  # with an anchor
    acquire = WriterLock.acquire

    def publish_and_acquire(lock):
        monkeypatch.setattr(WriterLock, "acquire", acquire)
        model["w"][20] = 9
        assert publisher.publish(7, model) == "delta"
        return acquire(lock)

    monkeypatch.setattr(WriterLock, "acquire", publish_and_acquire)
    assert run("publish", "prune", "weights", "--keep", "1")[1][-1] == "kept: 6, 7"
    into = {name: np.ones_like(array) for name, array in model.items()}
    assert Follower("weights", into=into).advance() == 7
    assert np.array_equal(into["w"], model["w"])


def test_follow_keeps_a_folder_with_its_other_files(versions, run, run_json):
    publisher, model = versions
    Path("files").mkdir()
    Path("files/config.json").write_text('{"a": 1}')
    status, out, err = run("follow", "weights", "--into", "hf", "--files-from", "files", "--once")
    assert (status, out, err) == (0, ["hf: step 5"], [])
    model["b"][1] = 7
    publisher.publish(6, model)
    assert run_json("follow", "weights", "--into", "hf", "--once")[1]["step"] == 6
    assert sorted(path.name for path in Path("hf").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    loaded = mlstate.load("hf").model
    assert all(np.array_equal(loaded[name], model[name]) for name in model)


def test_follow_leaves_a_folder_of_other_files_as_it_is(versions, refused):
    Path("hf").mkdir()
    Path("hf/notes.txt").write_text("mine")
    error = refused("follow", "weights", "--into", "hf", "--once")
    assert "not a Hugging Face folder" in error
    assert [path.name for path in Path("hf").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "name",
    ["1_Pooling/config.json", "optimizer.pt", ".git/HEAD", "adapter_model.safetensors"],
)
def test_follow_refuses_a_folder_with_files_that_would_be_lost(versions, run, refused, name):
    Path("hf/.cache").mkdir(parents=True)
    mlstate.save_file({"w": np.zeros(2)}, "hf/model.safetensors")
    Path("hf", name).parent.mkdir(exist_ok=True)
    Path("hf", name).write_text("{}")
    error = refused("follow", "weights", "--into", "hf", "--once")
    assert name.partition("/")[0] in error
    assert "--files-from" in error
    assert Path("hf", name).exists()
    assert name.partition("/")[0] in refused(
        "follow", "weights", "--into", "hf", "--files-from", "hf", "--once"
    )


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_follow_writes_each_version_until_it_is_interrupted(versions):
    publisher, model = versions
    with following() as process:
        for step in (6, 7):
            model["w"][30] = step
            publisher.publish(step, model)
            assert process.stdout.readline() == f"hf: step {step}\n"
            assert np.array_equal(mlstate.load("hf").model["w"], model["w"])
        publisher = Publisher("weights")
        publisher.publish(0, {"other": np.ones(2)})
        assert process.stdout.readline() == "hf: step 0\n"
        assert list(mlstate.load("hf").model) == ["other"]
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_follow_writes_a_version_that_could_not_be_written_before(versions):
    publisher, model = versions
    with following() as process:
        Path("hf").rename("away")
        Path("hf").write_text("in the way")
        model["w"][30] = 6
        publisher.publish(6, model)
        assert "not a Hugging Face folder" in process.stderr.readline()
        assert Path("hf").read_text() == "in the way"
        Path("hf").rename("moved")
        assert process.stdout.readline() == "hf: step 6\n"
        assert np.array_equal(mlstate.load("hf").model["w"], model["w"])


def test_follow_continues_after_a_damaged_version(versions):
    publisher, model = versions
    with following() as process:
        process.send_signal(signal.SIGSTOP)
        for step in (6, 7):
            model["w"][step] = step
            publisher.publish(step, model)
        damage(7)
        process.send_signal(signal.SIGCONT)
        assert "mlstate: warning: " in process.stderr.readline()
        assert np.array_equal(mlstate.load("hf").model["w"][6], np.zeros(50))
        publisher.publish(8, model)
        publisher.publish(9, model)
        assert process.stdout.readline() == "hf: step 9\n"
        assert np.array_equal(mlstate.load("hf").model["w"], model["w"])
        assert "are not kept" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_commands_refuse_other_checkpoints(place, refused):
    for words in (["publish", "ls", "ckpt"], ["follow", "ckpt", "--into", "hf", "--once"]):
        error = refused(*words)
        assert "no Publisher wrote" in error or "not a version" in error


@pytest.mark.parametrize("seconds", ["0", "nan", "inf", "1e300"])
def test_follow_refuses_a_time_that_a_thread_cannot_sleep(versions, refused, seconds):
    error = refused("follow", "weights", "--into", "hf", "--every", seconds)
    assert "--every must be a positive number of seconds" in error
    assert not Path("hf").exists()
