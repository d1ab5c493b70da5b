"""Tests whose functions run on ranks: processes of gloo. The import skips a file without gloo."""

import functools
import inspect
import warnings

import pytest

from mlstate.testing import run_ranks

torch = pytest.importorskip("torch", reason="its groups connect the ranks")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this torch was built without gloo", allow_module_level=True)

TIMEOUT = 100.0  # seconds, more than a busy machine needs


def run(world_size, function, *, warn="ignore", timeout=TIMEOUT):
    """Call a function on ranks, and return their results.

    `warn`: what happens to warnings; torch's wrappers warn about themselves.
    """
    with warnings.catch_warnings():
        warnings.simplefilter(warn)
        return run_ranks(world_size, function, "gloo", timeout=timeout)


def run_on(*world_sizes, most=2, warn="ignore"):
    """Make a test of a function that every rank calls with its group.

    The function may take the `tmp_path` of the test. The test runs for each number of
    ranks; with more than `most` it is marked long.
    """
    cases = [pytest.param(n, marks=[pytest.mark.long] * (n > most)) for n in world_sizes]

    def decorate(function):
        takes_path = "tmp_path" in inspect.signature(function).parameters

        @pytest.mark.parametrize("world_size", cases)
        def test(world_size, tmp_path):
            keywords = {"tmp_path": tmp_path} if takes_path else {}
            run(world_size, functools.partial(function, **keywords), warn=warn)

        test.__name__ = function.__name__
        test.on_rank = function
        function.__qualname__ += ".on_rank"  # where the ranks find it
        return test

    return decorate
