"""Checkpoints of two and three real ranks over gloo, loaded by worlds of other sizes."""

import ast
import json
import os
import warnings
from pathlib import Path

import forked
import pytest

import mlstate

pytestmark = pytest.mark.torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own internals
    torch = pytest.importorskip("torch", reason="its groups connect the ranks")

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

RANKS = Path(__file__).with_name("checkpoint_ranks.py")
LIMIT_SECONDS = 100
NAMES = [
    node.name
    for node in ast.parse(RANKS.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
    and any(isinstance(d, ast.Name) and d.id == "scenario" for d in node.decorator_list)
]
KILLED = "a_killed_rank_leaves_the_old_checkpoint"


def run_ranks(world, names, folder):
    """Run scenarios on `world` processes; return each rank's status and outcomes by name.

    Every process has ended when this returns: those that take too long are killed.
    """
    paths = [str(Path(mlstate.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    arguments = [(folder / "store", folder, rank, world, *names) for rank in range(world)]
    outcomes = []
    for status, out, err in forked.run(RANKS, arguments, environment, LIMIT_SECONDS):
        found = {"stderr": err[-2000:]}
        for line in out.splitlines():
            if line.startswith("{"):
                found.update(json.loads(line))
        outcomes.append((status, found))
    return outcomes


@pytest.fixture(scope="module", params=[2, 3])
def worked(request, tmp_path_factory):
    names = [name for name in NAMES if name != KILLED]
    return run_ranks(request.param, names, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != KILLED])
def test_ranks(worked, name):
    for _, found in worked:
        assert found.get(name) == "ok", found.get(name, found)


@pytest.mark.parametrize("world", [2, 3])
def test_a_killed_rank_leaves_the_old_checkpoint(world, tmp_path):
    *survivors, (killed, _) = run_ranks(world, [KILLED], tmp_path)
    assert killed == -9
    for _, found in survivors:
        assert found.get(KILLED) == "ok", found.get(KILLED, found)
