"""Jobs of torch.distributed over gloo for tests: several processes run the same scenarios.

The processes run a file of ranks; torch_processes.py describes such files.
"""

import ast
import json
import os
import warnings
from pathlib import Path

import forked
import pytest

import mlstate

LIMIT_SECONDS = 100
MODULES = forked.TORCH + forked.OPTIMIZERS


def skip_without_gloo():
    """Skip a test, or a file of tests, if torch or gloo is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about torch's internals
        torch = pytest.importorskip("torch", reason="its groups connect the ranks")
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch was built without gloo", allow_module_level=True)


def scenarios(file):
    """Names of the functions that ranks run, in the file's order."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "scenario" for d in node.decorator_list)
    ]


def run(program, arguments, limit_seconds, modules=MODULES):
    """Run a program that imports the same mlstate as many processes; see `forked.run`."""
    paths = [
        str(Path(mlstate.__file__).parents[1]),
        str(Path(__file__).parent),
        os.environ.get("PYTHONPATH", ""),
    ]
    path = os.pathsep.join(filter(None, paths))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return forked.run(program, arguments, environment, limit_seconds, modules)


def run_ranks(file, world, names, store, limit_seconds=LIMIT_SECONDS, modules=MODULES):
    """Run scenarios on `world` processes; return each rank's outcomes by name, and its log.

    Every process has ended when this returns: those that take too long are killed.
    """
    arguments = [(store, rank, world, *names) for rank in range(world)]
    outcomes = []
    # when the first rank ends, the input of the next one ends, and it stops waiting
    for status, out, err in run(file, arguments, limit_seconds, modules):
        results = {}
        for line in out.splitlines():
            if line.startswith("{"):
                results.update(json.loads(line))
        outcomes.append((results, f"exit {status}\n{err[-3000:]}"))
    return outcomes


def check(outcomes, name):
    """Fail with the error of a rank, if any."""
    for rank, (results, log) in enumerate(outcomes):
        assert results.get(name) == "ok", f"rank {rank}: {results.get(name)}\n{log}"
        assert log.startswith("exit 0"), log


def jobs(file, scenarios, limit_seconds=LIMIT_SECONDS, modules=MODULES):
    """A fixture that returns the outcomes of a job by its number of ranks.

    `wanted` has the names of scenarios for each number of ranks. A job runs once, when a test
    requests it.
    """

    @pytest.fixture(scope="module")
    def outcomes(tmp_path_factory):
        skip_without_gloo()
        done = {}

        def of(world):
            if world not in done:
                store = tmp_path_factory.mktemp("store") / "ranks"
                done[world] = run_ranks(
                    file, world, scenarios[world], store, limit_seconds, modules
                )
            return done[world]

        return of

    return outcomes


def agreement(file, scenarios, limit_seconds=LIMIT_SECONDS, modules=MODULES):
    """A fixture `outcomes`, and a test that each scenario succeeds on every rank."""

    @pytest.mark.parametrize(("world", "name"), cases(scenarios))
    def test_ranks_agree(outcomes, world, name):
        check(outcomes(world), name)

    return jobs(file, scenarios, limit_seconds, modules), test_ranks_agree


def cases(scenarios):
    """Parameters (ranks, name) of a test; jobs of more than two ranks are marked long."""
    return [
        pytest.param(world, name, marks=[pytest.mark.long] if world > 2 else [])
        for world, names in scenarios.items()
        for name in names
    ]
