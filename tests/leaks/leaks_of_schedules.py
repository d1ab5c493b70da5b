"""Leak cases of the search for schedules."""

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
