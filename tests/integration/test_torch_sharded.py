"""States of torch modules on several ranks: two and four real processes over gloo."""

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

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own internals
    torch = pytest.importorskip("torch", reason="its modules are what is collected")

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

RANKS = Path(__file__).with_name("sharded_ranks.py")
LIMIT_SECONDS = 150


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
FOUR = NAMES[NAMES.index("meshes_of_two_dimensions_are_layouts") :]
TWO = [name for name in NAMES if name not in FOUR]
FOUR = ["fsdp2_is_assembled", "fsdp1_is_assembled", *FOUR]  # a rank without rows
CASES = [
    *((2, name) for name in TWO),
    *(pytest.param(4, name, marks=pytest.mark.long) for name in FOUR),
]


def run_ranks(world, names, store):
    """Run scenarios on `world` processes; return each rank's outcomes by name.

    Every process has ended when this returns: those that take too long are killed.
    """
    paths = [str(Path(mlstate.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(store), str(rank), str(world), *names],
            stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment,
        )
        for rank in range(world)
    ]  # fmt: skip
    deadline = time.monotonic() + LIMIT_SECONDS
    outcomes = []
    try:
        for process in processes:
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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    done = {}

    def of(world):
        if world not in done:
            store = tmp_path_factory.mktemp("store") / "ranks"
            done[world] = run_ranks(world, TWO if world == 2 else FOUR, store)
        return done[world]

    return of


@pytest.mark.parametrize(("world", "name"), CASES)
def test_ranks_agree(outcomes, world, name):
    for rank, (found, log) in enumerate(outcomes(world)):
        assert found.get(name) == "ok", f"rank {rank}: {found.get(name)}\n{log}"
        assert log.startswith("exit 0"), log
