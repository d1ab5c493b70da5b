"""Autograd after loads: a backward pass that needs the old content of a tensor raises."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mlstate  # noqa: E402
from mlstate._common import staged_targets  # noqa: E402
from mlstate.state import load_into  # noqa: E402

pytestmark = pytest.mark.torch


def aliased_module():
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.ones(8))
    module.b = torch.nn.Parameter(module.a.data)
    return module


def load(way, path, module):
    mapping = {"a": module.a, "b": module.b}
    if way == "module":
        mlstate.load(path, into={"model": module})
    elif way == "one name":
        mlstate.load(path, names="b", into={"model": module})
    elif way == "mapping":
        mlstate.load(path, into={"model": mapping})
    elif way == "one name of a mapping":
        mlstate.load(path, names="b", into={"model": mapping})
    elif way == "load_into":
        load_into(module, {name: torch.zeros(8) for name in mapping})
    else:
        load_into(mapping, {name: torch.zeros(8) for name in mapping})


WAYS = ["module", "one name", "mapping", "one name of a mapping"]


@pytest.mark.parametrize("way", [*WAYS, "load_into", "load_into a mapping"])
def test_all_aliases_of_read_memory_refuse_an_old_backward_pass(tmp_path, way):
    mlstate.save(tmp_path / "c", {"a": torch.zeros(8), "b": torch.zeros(8)})
    module = aliased_module()
    out = (module.a**2).sum()
    load(way, tmp_path / "c", module)
    assert not module.a.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_aliased_states_of_an_optimizer_refuse_an_old_backward_pass(tmp_path):
    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(4)).sum().backward()
    optimizer.step()
    states = optimizer.state[module.weight]
    states["exp_avg_sq"] = states["exp_avg"].data
    mlstate.save(tmp_path / "c", module, optimizer)
    scale = torch.ones(4, 4, requires_grad=True)
    out = (states["exp_avg"] * scale).sum()
    mlstate.load(tmp_path / "c", into={"model": module, "optimizer": optimizer})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_load_of_all_targets_computes_no_memory_keys(tmp_path, monkeypatch, library):
    mlstate.save(tmp_path / "c", {"a": np.ones(8), "b": np.ones(8)})
    into = {name: np.zeros(8) for name in "ab"}
    if library == "torch":
        into = {name: torch.from_numpy(array) for name, array in into.items()}
    monkeypatch.setattr(staged_targets, "memory_key", lambda _: pytest.fail("computed a key"))
    mlstate.load(tmp_path / "c", into={"model": into})
    assert all((array == 1).all() for array in into.values())
