"""The registry of frameworks: torch implements every Protocol, and loads on first use."""

import inspect
import math
import re
from importlib import import_module
from types import SimpleNamespace

import child
import house
import numpy as np
import pytest

from mlstate._common import backend
from mlstate._common.backend import (
    Framework,
    TensorBackend,
    backend_named,
    backend_of,
    imported_backends,
    is_module,
    is_optimizer,
)
from mlstate.kv._move import KVBackend

PROTOCOL = re.compile(r"^class (\w+Backend)\(Protocol\)", re.MULTILINE)


def protocols():
    """Every Protocol that an integration can implement, with the module that defines it."""
    for path in sorted(house.PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(house.ROOT).with_suffix("").parts)
        for name in PROTOCOL.findall(path.read_text(encoding="utf-8")):
            yield pytest.param(getattr(import_module(module), name), id=name)


def operations(protocol):
    """The functions that a Protocol requires, with their parameters."""
    for name, function in inspect.getmembers(protocol, inspect.isfunction):
        if name[0] != "_":
            yield name, list(inspect.signature(function).parameters.values())[1:]


@pytest.mark.torch
@pytest.mark.parametrize("protocol", [*protocols(), pytest.param(Framework, id="Framework")])
def test_torch_implements_every_protocol_with_equal_parameters(protocol):
    from mlstate.integrations.torch import _backend

    implementation = _backend if protocol is Framework else backend_named("torch", protocol)
    for name, expected in operations(protocol):
        parameters = inspect.signature(getattr(implementation, name)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in parameters] == [
            (p.name, p.kind, p.default) for p in expected
        ], name


@pytest.mark.torch
def test_torch_names_a_module_for_every_protocol_and_for_no_other():
    from mlstate.integrations.torch import _backend

    assert list(_backend.BACKENDS) == sorted(parameter.id for parameter in protocols())


@pytest.mark.torch
def test_tensors_modules_and_optimizers_have_a_backend(torch):
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters())
    for value in (module.weight, torch.ones(1), module, optimizer):
        assert backend_of(value, TensorBackend) is backend_named("torch", TensorBackend)
    assert [is_module(v) for v in (module, optimizer, module.weight)] == [True, False, False]
    assert [is_optimizer(v) for v in (module, optimizer, module.weight)] == [False, True, False]


@pytest.mark.parametrize("value", [None, {}, np.ones(1), "a"], ids=["None", "dict", "array", "str"])
def test_other_values_have_none(value):
    assert not is_module(value)
    assert not is_optimizer(value)
    with pytest.raises(TypeError, match=type(value).__name__):
        backend_of(value, TensorBackend)


def test_another_framework_may_implement_some_protocols_only(monkeypatch):
    toy = SimpleNamespace(BACKENDS={"TensorBackend": "math"}, recognizes=lambda v: v == "toy")
    monkeypatch.setattr(backend, "_INTEGRATIONS", {"sys": "a module that has registered before"})
    monkeypatch.setattr(backend, "_registered", {})
    monkeypatch.setattr(backend, "_backends", {})
    backend.register("sys", toy)
    assert backend_of("toy", TensorBackend) is math
    assert imported_backends(TensorBackend) == [math]
    assert imported_backends(KVBackend) == []
    with pytest.raises(TypeError, match="the integration of sys does not implement KVBackend"):
        backend_of("toy", KVBackend)


@pytest.mark.torch
def test_the_integration_is_imported_on_first_use():
    pytest.importorskip("torch")
    code = """
import sys, numpy, mlstate
from mlstate._common.backend import TensorBackend, backend_of, is_module
name = "mlstate.integrations.torch"
mlstate.StateDict(w=numpy.ones(1))
print(name in sys.modules)
import torch
print(is_module({}), name in sys.modules)
backend_of(torch.ones(1), TensorBackend)
print(name in sys.modules, name + "._checkpoint" in sys.modules)
"""
    assert child.run(code).split() == ["False", "False", "False", "True", "False"]


def test_an_integration_without_its_framework_is_not_asked():
    code = """
import sys
sys.modules["torch"] = None  # as if torch were not installed
import mlstate.integrations.torch
from mlstate._common.backend import TensorBackend, backend_of, is_module, is_optimizer
print(is_module(1), is_optimizer(1))
try:
    backend_of(1, TensorBackend)
except TypeError as error:
    print(error)
"""
    lines = child.run(code).splitlines()
    assert lines == ["False False", "int is not a tensor, module or optimizer of a framework"]
