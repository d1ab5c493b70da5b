"""The expected results of a group's operations in NumPy, for jobs of any engine."""

import shutil
import tempfile
from pathlib import Path

import numpy as np

# in elements: empty, small, above the limit of the small path, several blocks
LENGTHS = [0, 1, 7, 1000, 300_001]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"]


class Scenarios(dict):
    """Functions that every rank calls with its group, by name."""

    def add(self, function):
        """Add a function; a decorator."""
        self[function.__name__] = function
        return function


def _operation(name):
    return lambda group, **keywords: getattr(group, name)(np.arange(60.0), **keywords)


OPERATIONS = {
    name: _operation(name)
    for name in ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast")
}
OPERATIONS["barrier"] = lambda group, **keywords: group.barrier(**keywords)
OPERATIONS["gather_bytes"] = lambda group, **keywords: group.gather_bytes(b"x", **keywords)


def dtype_of(name):
    if name.startswith(("bfloat", "float8")):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def inputs(world, length, dtype, seed=0):
    """The inputs of all ranks; every rank can make them."""
    generator = np.random.default_rng(seed)
    numpy_dtype = dtype_of(dtype)
    raw = [generator.standard_normal(length) * 100 for _ in range(world)]
    if numpy_dtype.kind in "iu":
        bytes_of = (generator.integers(0, 256, length * numpy_dtype.itemsize, "u1") for _ in raw)
        return [data.view(numpy_dtype) for data in bytes_of]
    if numpy_dtype.kind == "b":
        return [array > 0 for array in raw]
    return [array.astype(numpy_dtype) for array in raw]


def reduced(arrays, op):
    """Summed in the order of ranks; small floats in float32, rounded once."""
    source_dtype = arrays[0].dtype
    wide = (
        np.dtype(np.float32)
        if source_dtype.itemsize < 4 and source_dtype.kind not in "iub"
        else source_dtype
    )
    step = {"min": np.minimum, "max": np.maximum}.get(op, np.add)
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = step(total, array.astype(wide))
    # divide each component, because NumPy's complex division rounds differently
    if op == "mean" and wide.kind == "c":
        parts = total.view(total.real.dtype)
        parts /= parts.dtype.type(len(arrays))
    elif op == "mean":
        total = total / wide.type(len(arrays))
    return total.astype(source_dtype)


def same_bits(actual, expected):
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.tobytes() == expected.tobytes(), (actual, expected)


def raises(error, text, call, *args, **keywords):
    """Call, and return the error, whose message must contain the text."""
    try:
        call(*args, **keywords)
    except error as caught:
        assert text in str(caught), str(caught)
        return caught
    raise AssertionError(f"{call} raised nothing")


def shared_folder(group):
    """A new folder that all ranks know."""
    folder = tempfile.mkdtemp() if group.rank == 0 else ""
    return Path(group.gather_bytes(folder.encode())[0].decode())


def remove_folder(group, folder):
    """Delete a shared folder after all ranks have called this."""
    group.barrier()
    if group.rank == 0:
        shutil.rmtree(folder)


def as_tensor(array):
    from mlstate.integrations.torch._tensors.state import tensors_of

    return tensors_of({"array": array})["array"]
