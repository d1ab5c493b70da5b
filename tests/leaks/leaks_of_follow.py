"""Leak cases of deltas."""

import numpy as np
from leak_cases import case, each, raises

from mlstate import errors
from mlstate.checkpoint import Layout
from mlstate.follow import _delta


@case()
def deltas(_):
    base = np.arange(60, dtype=np.float32).reshape(6, 10)
    new, target = base.copy(), base.copy()
    new[::2, 3] = -1
    delta = _delta.compare_arrays(base, new)
    damaged = _delta.Delta(60, delta.gaps[:-1], delta.values)
    rows, columns = (Layout.rows(1), 0), (Layout.axis(1, 2), 0)
    log = []

    def apply_and_roll_back():
        _delta.apply_delta(target, delta, log)
        _delta.roll_back(log)

    return each(
        lambda: _delta.compare_arrays(base, new),
        lambda: _delta.compare_arrays(base.T, new.T, checksum=False),
        apply_and_roll_back,
        lambda: _delta.compose_deltas(delta, delta),
        lambda: _delta.filter_delta(delta, (6, 10), rows, columns),
        raises(errors.FormatError, _delta.apply_delta, target, damaged, log),
        raises(errors.CompatibilityError, _delta.apply_delta, target[1:], delta, log),
        raises(errors.CompatibilityError, _delta.compare_arrays, base, new.T),
        raises(errors.CompatibilityError, _delta.filter_delta, delta, (5, 10), rows, columns),
    ), [base, new, target, delta, log]
