"""Groups of torch.distributed: two and three real processes over gloo."""

import ast
import json
import os
import time
import warnings
from pathlib import Path

import forked
import pytest

import mlstate

pytestmark = pytest.mark.torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own internals
    torch = pytest.importorskip("torch", reason="torch is the peer to agree with")

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)
pytest.importorskip("ml_dtypes", reason="ranks compare bfloat16 in NumPy")

RANKS = Path(__file__).with_name("group_ranks.py")
LIMIT_SECONDS = 240


def scenarios():
    """Names of the functions that ranks run, in the file's order."""
    tree = ast.parse(RANKS.read_text(encoding="utf-8"))
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "scenario" for d in node.decorator_list)
    ]


NAMES = scenarios()
FAILURES = NAMES[NAMES.index("a_rank_that_does_not_come_is_a_timeout") :]
WORKING = [name for name in NAMES if name not in FAILURES]


def environment():
    """The variables for a process that imports the same mlstate."""
    paths = [str(Path(mlstate.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_ranks(world, names, store):
    """Run scenarios on `world` processes; return each rank's outcomes by name.

    Every process has ended when this returns: those that take too long are killed.
    """
    arguments = [(store, rank, world, *names) for rank in range(world)]
    outcomes = []
    # the first rank to end lets the others go on: their input ends
    for status, out, err in forked.run(RANKS, arguments, environment(), LIMIT_SECONDS):
        found = {}
        for line in out.splitlines():
            if line.startswith("{"):
                found.update(json.loads(line))
        outcomes.append((found, f"exit {status}\n{err[-3000:]}"))
    return outcomes


@pytest.fixture(scope="module", params=[2, 3])
def worked(request, tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "ranks"
    return run_ranks(request.param, WORKING, store)


@pytest.mark.parametrize("name", WORKING)
def test_ranks_agree(worked, name):
    for rank, (found, log) in enumerate(worked):
        assert found.get(name) == "ok", f"rank {rank}: {found.get(name)}\n{log}"


def test_processes_end_well(worked):
    for _, log in worked:
        assert log.strip() == "exit 0"


UNDER_WAY = """
import sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch.distributed as dist
from mlstate.integrations.torch import TorchGroup
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
group = TorchGroup()
works = [group.all_reduce(np.ones(100_000), async_op=True) for _ in range(20)]
"""


def test_a_process_may_end_with_operations_under_way(tmp_path):
    program = tmp_path / "under_way.py"
    program.write_text(UNDER_WAY, encoding="utf-8")
    arguments = [[tmp_path / f"store{number}"] for number in range(2)]
    for status, _, err in forked.run(program, arguments, environment(), 60):
        assert (status, err) == (0, "")


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_an_error_on_every_rank_that_is_left(name, tmp_path):
    began = time.monotonic()
    outcomes = run_ranks(2, [name], tmp_path / "ranks")
    for rank, (found, log) in enumerate(outcomes):
        assert found.get(name) == "ok", f"rank {rank}: {found.get(name)}\n{log}"
    assert time.monotonic() - began < 60


def test_torch_must_be_initialised():
    from mlstate import CollectiveError
    from mlstate.integrations.torch import TorchGroup

    with pytest.raises(CollectiveError, match="init_process_group first"):
        TorchGroup()
