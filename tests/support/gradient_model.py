"""Expected results of scattered gradients in NumPy; ranks and gradients to test with."""

from math import ceil, prod

import numpy as np
from rank_threads import Messages

from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
from mlstate.testing import run_ranks

try:
    from ml_dtypes import bfloat16
except ImportError:  # an optional dependency
    bfloat16 = None

FLOATS = ["float16", "float32", "float64", *(["bfloat16"] if bfloat16 else [])]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NARROW = ("float16", "bfloat16")


def dtype_of(name):
    return np.dtype(bfloat16 if name == "bfloat16" else name)


def gradient_of(seed, shape, dtype):
    """A gradient whose sum depends on the order of addition."""
    rng = np.random.default_rng(seed)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    sizes = 10.0 ** rng.integers(-3, 4, shape)
    return (rng.standard_normal(shape) * sizes).astype(dtype_of(dtype))


def reduced(gradients, op="sum", divisor=1.0, reduce_dtype=None):
    """The full reduced gradient: summed in the order of ranks, 16-bit in float32, rounded once."""
    first, *others = gradients
    narrow = str(first.dtype) in NARROW
    wide = np.dtype(np.float32) if narrow else first.dtype
    join = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum}[op]
    total = first.astype(wide)
    for gradient in others:
        total = join(total, gradient.astype(wide))
    divisor = len(gradients) if op == "mean" else divisor
    if divisor != 1:
        total = total / wide.type(divisor)
    return total.astype(reduce_dtype if narrow and reduce_dtype else first.dtype)


def part_of(full, layout, rank, world):
    """The part of a rank: rows, or elements in C order; the last parts may be empty."""
    flat = full if layout == "rows" else full.reshape(-1)
    chunk = ceil(len(flat) / world)
    return flat[rank * chunk : (rank + 1) * chunk]


def units_of(rank, shapes, dtypes="float32", layout="flat"):
    """Units by name; dtype and layout are one value, or a dict by name."""
    return {
        name: FSDPShardingUnit(
            name,
            shape,
            dtypes if isinstance(dtypes, str) else dtypes[name],
            rank,
            layout="flat" if not len(shape) else layout,
        )
        for name, shape in shapes.items()
    }


def gradients_of(rank, shapes, dtypes="float32"):
    """The gradients of a rank by name."""
    return {
        name: gradient_of(
            [rank, i, prod(shape)], shape, dtypes if isinstance(dtypes, str) else dtypes[name]
        )
        for i, (name, shape) in enumerate(shapes.items())
    }


def check_parts(units, world, shapes, dtypes="float32", layout="flat", **how):
    """Local gradients have the bits, dtype and shape of the model."""
    each = [gradients_of(rank, shapes, dtypes) for rank in range(world)]
    for name, unit in units.items():
        total = reduced([gradients[name] for gradients in each], **how)
        assert_same(
            unit.local_gradient,
            part_of(total, layout if shapes[name] else "flat", unit.shard_index, world),
            name,
        )


def assert_same(actual, expected, name=""):
    """Arrays are equal to the bit, and C-contiguous."""
    assert isinstance(actual, np.ndarray), name
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
    assert actual.flags.c_contiguous, name
    assert actual.tobytes() == np.ascontiguousarray(expected).tobytes(), name


def hook_of(group, units, *, accumulate=False, **settings):
    """A hook that takes the gradients of units one by one; `settings` are those of FSDP."""
    hook = FSDPBackwardHook(FSDP(group, **settings))
    hook.use_units(units, accumulate=accumulate)
    return hook


def backward(hook, gradients):
    """A backward pass: pass the gradients from the last to the first, and finish."""
    for name in reversed(gradients):
        hook.add_gradient(name, gradients[name])
    hook.finish()


class Model:
    """A model in the specification's sense: it keeps a function for each parameter."""

    def __init__(self, *, removable=True):
        self.functions = {}
        self.removable = removable

    def register_backward_hook(self, name, function):
        self.functions[name] = function
        return Handle(self, name) if self.removable else None

    def backward(self, gradients):
        """Call the parameters' functions in reverse order, as a backward pass does."""
        return {name: self.functions[name](gradients[name]) for name in reversed(gradients)}


class Handle:
    def __init__(self, model, name):
        self.model, self.name = model, name

    def remove(self):
        del self.model.functions[self.name]


ENGINES = {"messages": Messages, "shared memory": lambda group: group}


def run(function, world_size=2, engine="messages"):
    """The result of each rank; raises the first error."""
    return run_ranks(world_size, lambda group: function(ENGINES[engine](group)))
