"""Tensors are listed by the numbers in their names: layers.2 before layers.10."""

import numpy as np
import pytest

import mlstate
from mlstate._common.text import number_order

NAMES = [f"layers.{i}.{part}" for i in (0, 1, 2, 10, 11) for part in ("mlp.w2", "mlp.w10", "norm")]


@pytest.fixture
def state():
    return mlstate.StateDict({name: np.zeros(2) for name in sorted(NAMES)})


def shown_order(text, names):
    places = [text.index(name) for name in names]
    return places == sorted(places)


def test_key():
    assert sorted(sorted(NAMES), key=number_order) == NAMES
    assert sorted(["a.10", "a.²", "a.9", "a.0", "a.00", "a"], key=number_order)[:2] == ["a", "a.0"]
    assert number_order("9" * 10_000) > number_order("8" * 10_000)  # int() refuses them


def test_repr(state):
    assert shown_order(repr(state), NAMES)


def test_html(state):
    page = state._repr_html_()
    assert shown_order(page, [f"<b>{i}</b>" for i in (0, 1, 2, 10, 11)])
    assert shown_order(page, ["w2", "w10"])


def test_checkpoint_html(state, tmp_path):
    one_layer = {f"experts.{i}": np.zeros(2) for i in (2, 10)}
    mlstate.save(tmp_path / "ckpt", {**state, **one_layer})
    page = mlstate.inspect(tmp_path / "ckpt")._repr_html_()
    assert shown_order(page, [f"layers.{i}<" for i in (0, 1, 2, 10, 11)])
    assert shown_order(page, ["<td>2<", "<td>10<"])
