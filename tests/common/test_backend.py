"""The registry of frameworks: torch's backend has every operation, and loads on first use."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

from mlstate._common import backend
from mlstate._common.backend import Backend, backend_named, backend_of, is_module, is_optimizer


def operations():
    """Names of the methods that a backend must have."""
    return {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if name[0] != "_"}


def run(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.torch
def test_torch_has_every_operation_and_no_other():
    from mlstate.integrations.torch import _backend

    own = {"is_mine", "is_module", "is_optimizer"}
    assert {*_backend._HOMES, *own} == operations()
    for name in operations():
        assert callable(getattr(backend_named("torch"), name)), name


@pytest.mark.torch
def test_tensors_modules_and_optimizers_have_a_backend():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters())
    for value in (module.weight, torch.ones(1), module, optimizer):
        assert backend_of(value) is backend_named("torch")
    assert [is_module(v) for v in (module, optimizer, module.weight)] == [True, False, False]
    assert [is_optimizer(v) for v in (module, optimizer, module.weight)] == [False, True, False]


@pytest.mark.parametrize("value", [None, {}, np.ones(1), "a"], ids=["None", "dict", "array", "str"])
def test_other_values_have_none(value):
    assert not is_module(value)
    assert not is_optimizer(value)
    with pytest.raises(TypeError, match=type(value).__name__):
        backend_of(value)


def test_another_framework_may_register(monkeypatch):
    class Toy:
        @staticmethod
        def is_mine(value):
            return value == "toy"

    monkeypatch.setitem(backend._INTEGRATIONS, "sys", "a module that registers before it is needed")
    monkeypatch.setattr(backend, "_registered", dict(backend._registered))
    backend.register("sys", Toy)
    assert backend_of("toy") is Toy
    assert Toy in backend.registered()


@pytest.mark.torch
def test_the_integration_is_imported_on_first_use():
    pytest.importorskip("torch")
    code = """
import sys, numpy, mlstate
from mlstate._common.backend import backend_of, is_module
name = "mlstate.integrations.torch"
mlstate.StateDict(w=numpy.ones(1))
print(name in sys.modules)
import torch
print(is_module({}), name in sys.modules)
backend_of(torch.ones(1))
print(name in sys.modules, name + "._training" in sys.modules)
"""
    assert run(code) == ["False", "False", "False", "True", "False"]
