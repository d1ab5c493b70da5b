"""Groups of torch.distributed: two and three real processes over gloo."""

import ast
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

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
    command = [sys.executable, str(RANKS), str(store)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), *names],
            stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment(),
        )
        for rank in range(world)
    ]  # fmt: skip
    deadline = time.monotonic() + LIMIT_SECONDS
    outcomes = []
    try:
        for process in processes:
            # the first rank to end lets the others go on: their input ends
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            found = {}
            for line in out.splitlines():
                if line.startswith("{"):
                    found.update(json.loads(line))
            outcomes.append((found, f"exit {process.returncode}\n{err[-3000:]}"))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
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
    for number in range(2):
        command = [sys.executable, "-c", UNDER_WAY, str(tmp_path / f"store{number}")]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment()
        )
        assert (done.returncode, done.stderr) == (0, "")


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
