"""Publishers among other writers of their folder, and in damaged folders."""

import json
import shutil
import threading
import time

import child
import numpy as np
import pytest
from checkpoint_model import flip
from json_checksums import text_with_checksum
from thread_team import run_in_threads

from mlstate.checkpoint import CheckpointManager, Layout
from mlstate.checkpoint._folder.local import LocalFolder
from mlstate.errors import CheckpointWarning, ChecksumError, FormatError, StoreError
from mlstate.follow import Follower, Publisher, _publisher

PUBLISH = """
import sys, numpy as np
from mlstate.follow import Publisher
Publisher(sys.argv[1]).publish(7, {"w": np.full(50, 7.0)})
"""

# Publishes as fast as it can, until another process has published or ROUNDS steps are over.
RACE = """
import sys, numpy as np
from mlstate.errors import StoreError
from mlstate.follow import Publisher
number = int(sys.argv[2])
publisher, returned = Publisher(sys.argv[1], anchor_every=3), []
for step in range(number * 1000, number * 1000 + 15):
    try:
        publisher.publish(step, {"w": np.full(50, float(step))})
        returned.append(step)
    except StoreError as error:
        assert error.errno in (16, 17), error  # EBUSY, EEXIST
        if returned:
            break
print(*returned)
"""


def weights(step):
    return {"w": np.full(50, float(step))}


def followed(path):
    """Step and content of the newest version."""
    into = weights(0)
    return Follower(path, into=into).advance(), into["w"][0]


@pytest.mark.parametrize("first", [True, False])
def test_another_process_that_publishes_during_a_publication_is_noticed(
    tmp_path, monkeypatch, first
):
    path = tmp_path / "weights"
    publisher = Publisher(path)
    if not first:
        publisher.publish(0, weights(0))

    def compare(*arguments):
        child.run(PUBLISH, path)
        return changes(*arguments)

    changes = _publisher._changes
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="another writer") as error:
        patch.setattr(_publisher, "_changes", compare)
        publisher.publish(1, weights(1))
    assert error.value.errno == 17
    assert followed(path) == (7, 7.0)
    if not first:
        with pytest.raises(StoreError, match="another publisher"):
            publisher.publish(2, weights(2))
        return
    assert publisher.publish(2, weights(2)) == "anchor"


def test_of_publishers_in_several_processes_one_stays(tmp_path):
    path = tmp_path / "weights"
    outputs = run_in_threads(lambda number: child.run(RACE, path, number), 3, seconds=120)
    last = [int(text.split()[-1]) for text in outputs if text.split()]
    step, content = followed(path)
    assert step == content
    assert step in last


def test_a_publisher_waits_for_a_command_that_deletes_versions(tmp_path):
    path = tmp_path / "weights"
    publisher = Publisher(path)
    publisher.publish(0, weights(0))
    thread = threading.Thread(target=publisher.publish, args=(1, weights(1)))
    with LocalFolder(str(path)).claim(0):
        thread.start()
        time.sleep(0.3)
        assert followed(path) == (0, 0.0)
    thread.join()
    assert followed(path) == (1, 1.0)


def test_a_root_of_a_killed_writer_starts_a_new_lineage(tmp_path):
    path, other = tmp_path / "weights", tmp_path / "other"
    publisher = Publisher(path)
    for step in (0, 1):
        publisher.publish(step, weights(step))
    shutil.copytree(path, other)
    Publisher(other).publish(5, weights(5))
    for file in sorted(other.rglob("*")):  # all but the manifest: the commit did not happen
        target = path / file.relative_to(other)
        if file.is_file() and file.name != "lock" and not target.exists():
            shutil.copy(file, target)
    into = weights(0)
    follower = Follower(path, into=into)
    assert follower.advance() == 1
    assert publisher.publish(2, weights(2)) == "anchor"
    with pytest.warns(CheckpointWarning, match="new lineage"):
        assert follower.advance() == 2
    publisher.publish(3, weights(3))
    assert follower.advance() == 3


# ---- damaged folders ----


def test_a_delta_that_is_left_out_of_the_chain_is_noticed_by_parts(tmp_path):
    path = tmp_path / "weights"
    publisher, model = Publisher(path), {"w": np.zeros((40, 10))}
    into = {"w": np.zeros((40, 5))}
    follower = Follower(path, into=into, layout=Layout.axis(1, 2), rank=1, world_size=2)
    for step in range(4):
        model["w"][step, 7] = step + 1
        publisher.publish(step, model)
        if step == 1:
            follower.advance()
    document = json.loads((path / "manifest.json").read_bytes())
    del document["metadata"]["mlstate.follow"]["chain"][2]  # the version of step 2
    (path / "manifest.json").write_bytes(text_with_checksum(document))
    with pytest.raises(FormatError, match="no anchor leads to step 3"):
        follower.advance()
    assert follower.version == 1
    assert into["w"][:, 2].tolist() == [1, 2] + [0] * 38


def damage_manifest(path, how):
    manifest = path / "manifest.json"
    if how == "missing":
        manifest.unlink()
    else:
        flip(manifest, 50)


def test_publishers_replace_a_damaged_manifest(tmp_path):
    path = tmp_path / "weights"
    publisher = Publisher(path)
    into = weights(0)
    follower = Follower(path, into=into)
    for step in (0, 1):
        publisher.publish(step, weights(step))
    follower.advance()
    damage_manifest(path, "flipped")
    with pytest.raises(ChecksumError):
        follower.advance()
    with pytest.warns(CheckpointWarning, match="damaged"):
        publisher.publish(2, weights(2))
    assert follower.advance() == 2
    assert into["w"][0] == 2
    damage_manifest(path, "flipped")
    with pytest.warns(CheckpointWarning, match="damaged"):
        assert Publisher(path).publish(3, weights(3)) == "anchor"
    assert followed(path) == (3, 3.0)


@pytest.mark.parametrize("how", ["missing", "flipped"])
def test_a_managers_steps_without_their_manifest_are_not_deleted(tmp_path, how):
    path = tmp_path / "run"
    CheckpointManager(path).save(4, weights(4))
    damage_manifest(path, how)
    with pytest.raises(StoreError, match="not a published version"):
        Publisher(path).publish(5, weights(5))
    assert CheckpointManager(path).checkpoint(4).load().model["w"][0] == 4


def test_files_of_a_killed_first_publisher_are_deleted(tmp_path):
    Publisher(tmp_path / "w").publish(0, {"w": np.zeros(1000)})
    (tmp_path / "w/manifest.json").unlink()  # killed after it wrote the root of its step
    old = set((tmp_path / "w").rglob("*.safetensors"))
    Publisher(tmp_path / "w").publish(0, {"w": np.ones(1000)})
    assert old and not any(path.exists() for path in old)
