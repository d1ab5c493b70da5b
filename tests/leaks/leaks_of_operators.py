"""Leak cases of the search for schedules and of operator selection."""

import numpy as np
import pytest
from leak_cases import case, each, raises

from mlstate import _core, activation, errors

CHAIN = ([1, 2, 3, 4], [2] * 4, [10, 20, 30, 40, 5], [50, 60, 70, 10])


@case()
def schedules_of_any_kind(_):
    chain = activation.Chain(*CHAIN)
    hosted = activation.Chain(*CHAIN, offload_bytes_per_second=8, load_bytes_per_second=8)
    steps = activation.plan(chain, 190)._steps
    search, arrays = _core.search_schedules, chain._arrays
    return each(
        lambda: activation.plan(chain, 190, schedules="any"),
        lambda: activation.plan(hosted, 190, schedules="any", offload=True),
        lambda: search(arrays, 190, False, steps, 3),
        raises(errors.CapacityError, activation.plan, chain, 20, schedules="any"),
        raises(errors.CapacityError, search, arrays, 190, False, None, 1),
        raises(ValueError, search, arrays, 1, False, steps, 0),
        raises(ValueError, search, arrays, 190, True, None, 0),
        raises(ValueError, search, arrays, 190, False, None, -1),
        raises(TypeError, search, arrays, 190, False, "steps", 0),
        raises(TypeError, search, arrays, 190, False, None, "few"),
    ), [chain, hosted, steps, arrays]


@case("select_operators", "OperatorSelection", "OperatorSelection.report")
def operators(_):
    seconds, sizes = np.arange(50.0), np.arange(50) * 7 % 31
    names = [f"aten.größe.{i}" for i in range(50)]
    choose = activation.OperatorSelection

    def use():
        chosen = activation.select_operators(seconds, sizes, 300, names)
        chosen.report(), repr(chosen), chosen._repr_html_(), chosen.saved, chosen.recomputed
        activation.OperatorSelection(seconds, sizes, 300, states=2)
        activation.select_operators([], [], 0)

    return each(
        use,
        raises(ValueError, choose, seconds, sizes, -1),
        raises(ValueError, choose, -seconds, sizes, 1),
    ), [seconds, sizes, names]


@case("OperatorSelection.contexts", calls=60)
def operators_kept_by_torch(_):
    torch = pytest.importorskip("torch", reason="contexts are torch's")
    from torch.utils.checkpoint import checkpoint

    from mlstate.integrations.torch import profile_operators

    layer, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
    chosen = activation.select_operators([1.0], [64], 64, ["aten.addmm.default"])

    def use():
        out = checkpoint(layer, x, use_reentrant=False, context_fn=chosen.contexts)
        out.sum().backward()
        layer.zero_grad()
        profile_operators(layer, x, repeats=1).select(64)

    return use, [layer, x, chosen]
