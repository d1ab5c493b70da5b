"""Checkpoints for the tests of this folder to damage; each test gets an undamaged copy."""

import shutil

import pytest
from checkpoint_victim import Victim, saved

from mlstate.checkpoint import reshard


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A checkpoint of one rank: w and b in one file, w.m in another."""
    return Victim(saved(tmp_path_factory.mktemp("hostile") / "one"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The same for two ranks, each with rows of w."""
    base = tmp_path_factory.mktemp("hostile")
    reshard(saved(base / "source"), base / "two", layout="rows", world_size=2)
    return Victim(base / "two")


@pytest.fixture(autouse=True)
def restored(request):
    yield
    for name in {"one_rank", "two_ranks"} & set(request.fixturenames):
        victim = request.getfixturevalue(name)
        shutil.rmtree(victim.folder)
        victim.folder.mkdir()
        victim.restore()
