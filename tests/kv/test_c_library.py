"""The C library of include/mlstate/kv.h against the Python package, bit for bit.

`examples/c/replay.c` runs random operations in C. By default the library and the program are built
for this machine. For another one, `tools/cross.sh` and `tools/sanitize.sh` set MLSTATE_KV_LIBRARY
(what to link), MLSTATE_KV_CC and MLSTATE_KV_RUN (the emulator).
"""

import os
import shutil
import subprocess
import sys

import core_build
import numpy as np
import pytest
from core_build import ROOT

from mlstate import _core
from mlstate.errors import CapacityError
from mlstate.kv import (
    CacheEntry,
    CacheSpec,
    CacheState,
    compact_kv_state,
    create_attention_size_mask,
    rotate_keys,
    transition_kv_state,
)

ml_dtypes = pytest.importorskip("ml_dtypes")

LIBRARY = os.environ.get("MLSTATE_KV_LIBRARY")
CC = os.environ.get("MLSTATE_KV_CC", os.environ.get("CC", "cc")).split()
RUN = os.environ.get("MLSTATE_KV_RUN", "").split()
STRICT = ["-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'include'}"]
ERROR_CAPACITY = 5

# The codes of the header.
DTYPES = {
    np.dtype(dtype): code
    for code, dtype in enumerate(
        [
            *("f2", ml_dtypes.bfloat16, "f4", "f8", "i1", "i2", "i4", "i8"),
            *("u1", "u2", "u4", "u8", "?", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
        ],
        1,
    )
}
FLOATS = list(DTYPES)[:4]

pytestmark = [
    pytest.mark.skipif(
        LIBRARY is None and "MLSTATE_UNDER_SANITIZER" in os.environ,
        reason="sanitize.sh runs this file with an instrumented library",
    ),
    pytest.mark.skipif(not (ROOT / "include").exists(), reason="no C sources beside these tests"),
]


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """Return a function that compiles an example with all warnings and returns its command."""
    libraries = LIBRARY.split() if LIBRARY else []
    if not libraries:
        if core_build.missing():
            pytest.skip(core_build.missing())
        built, log = core_build.make("kv")
        libraries = [built / "libmlstate_kv.a"]
        assert libraries[0].exists(), log
    if sys.platform == "linux" and len(libraries) == 1:
        # A Swift package links every object, so none may need another part of the core.
        libraries = ["-Wl,--whole-archive", *libraries, "-Wl,--no-whole-archive"]

    def compile_example(name):
        program = tmp_path_factory.mktemp("c") / name
        source = ROOT / "examples" / "c" / f"{name}.c"
        command = [*CC, "-std=c11", *STRICT, source, *libraries, "-lpthread", "-lm"]
        subprocess.run([*command, "-o", program], check=True, cwd=ROOT, timeout=100)
        return [*RUN, program]

    return compile_example


def random_bytes(rng, count):
    return np.frombuffer(rng.bytes(int(count)), np.uint8).copy()


def strided(rng, shape, dtype, content=None):
    """Return a view of random axis order with gaps, and its memory; the view starts at byte 0."""
    order = rng.permutation(len(shape)) if rng.random() < 0.5 else np.arange(len(shape))
    gaps = rng.integers(0, 3, len(shape)) if rng.random() < 0.5 else np.zeros(len(shape), int)
    lengths = [shape[axis] + gap for axis, gap in zip(order, gaps, strict=True)]
    memory = random_bytes(rng, np.prod(lengths) * dtype.itemsize)
    if dtype.kind == "b":
        memory %= 2
    whole = memory.view(dtype).reshape(lengths)
    view = whole[tuple(slice(shape[axis]) for axis in order)].transpose(np.argsort(order))
    if content is not None:
        view[...] = content
    return view, memory


def normal(rng, shape, dtype):
    """Return random numbers of very different sizes, and infinities."""
    with np.errstate(over="ignore"):
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(dtype)


def element_strides(view):
    return [step // view.itemsize for step in view.strides]


class Operation:
    """One line for replay.c with its arrays, and the expected answer."""

    def __init__(self, words, arrays, expected, code=0):
        sizes = [len(array) for array in arrays]
        line = " ".join(str(word) for word in [*words, *sizes])
        self.request = line.encode() + b"\n" + b"".join(array.tobytes() for array in arrays)
        self.words = words
        self.code = code
        self.expected = expected  # called later: the bytes of the targets after the operation


def random_move(rng):
    rank = int(rng.integers(2, 9))
    axis = int(rng.integers(-rank, rank))
    shape = [int(n) for n in rng.integers(1, 4, rank)]
    shape[axis] = int(rng.integers(0, 40))
    is_expand = rng.random() < 0.5
    length = int(rng.integers(shape[axis] if is_expand else 0, 60))
    position = int(rng.integers(0, min(length, shape[axis]) + 1))
    if rng.random() < 0.05:
        position = int(rng.choice([-1, max(length, shape[axis]) + 1]))
    if rng.random() < 0.3:  # a conversion
        source_dtype, target_dtype = (FLOATS[i] for i in rng.integers(0, 4, 2))
        content = normal(rng, shape, source_dtype)
    else:
        source_dtype = target_dtype = list(DTYPES)[rng.integers(len(DTYPES))]
        content = None
    source, source_memory = strided(rng, shape, source_dtype, content)
    target_shape = list(shape)
    target_shape[axis] = length
    target, memory = strided(rng, target_shape, target_dtype)
    pad = 0.0
    if is_expand and target_dtype in FLOATS:
        pad = float(rng.choice([0.0, -0.0, 1.5, -65504.0 / 2, np.inf]))
    words = ["expand" if is_expand else "compact", DTYPES[source_dtype], DTYPES[target_dtype]]
    words += [rank, axis, length, position, pad, *shape]
    words += [*element_strides(source), *element_strides(target)]
    arrays = [source_memory.copy(), memory.copy()]
    code = 0
    try:
        if is_expand:
            transition_kv_state(source, length, position, pad, out=target, seq_axis=axis)
        else:
            compact_kv_state(source, length, position, out=target, seq_axis=axis)
    except CapacityError:
        code = ERROR_CAPACITY
    return Operation(words, arrays, [memory], code)


def random_mask(rng):
    dtype = FLOATS[rng.integers(4)]
    length, attention, sinks = (int(n) for n in rng.integers(0, 50, 3))
    first = int(rng.integers(0, length + 1))
    end = int(rng.integers(first, length + 1))
    fill = float(rng.choice([-np.inf, -65504.0 / 2, -1.0]))
    stride = length + int(rng.integers(0, 3))
    memory = random_bytes(rng, max(end - first, 1) * max(stride, 1) * dtype.itemsize)
    before = memory.copy()
    rows = memory.view(dtype)[: (end - first) * stride].reshape(end - first, stride)
    rows[:, :length] = create_attention_size_mask(
        length, attention, 0, sinks=sinks, rows=(first, end), dtype=dtype, fill=fill
    )[0, 0]
    words = ["mask", DTYPES[dtype], stride, length, attention, sinks, first, end, fill]
    return Operation(words, [before], [memory])


def random_rotation(rng):
    dtype = FLOATS[rng.integers(4)]
    rank = int(rng.integers(2, 6))
    axis = int(rng.integers(0, rank - 1))
    shape = [int(n) for n in rng.integers(1, 4, rank)]
    shape[axis] = int(rng.integers(1, 20))
    shape[-1] = 2 * int(rng.integers(1, 40))
    rotary_dim = int(rng.choice([0, shape[-1], 2]))
    base, scaling = float(rng.choice([1e4, 5e5])), float(rng.choice([1.0, 4.0]))
    interleaved = bool(rng.random() < 0.5)
    shifts = rng.integers(-5000, 5000, shape[axis] if rng.random() < 0.5 else 1)
    keys, keys_memory = strided(rng, shape, dtype, rng.standard_normal(shape).astype(dtype))
    target, memory = strided(rng, shape, dtype)
    words = ["rotate", DTYPES[dtype], rank, axis, base, scaling, rotary_dim, int(interleaved)]
    words += [*shape, *element_strides(keys), *element_strides(target)]
    arrays = [shifts.view(np.uint8).copy(), keys_memory.copy(), memory.copy()]
    rotate_keys(
        keys, shifts, base=base, scaling=scaling, interleaved=interleaved,
        rotary_dim=rotary_dim or None, seq_axis=axis, out=target,
    )  # fmt: skip
    return Operation(words, arrays, [memory])


def random_group(rng):
    """Return the bits of a code, and the size of a group that fits them."""
    bits = int(rng.choice([2, 3, 4, 5, 6, 8]))
    unit = 8 if bits % 4 == 0 else 32
    return bits, unit * int(rng.integers(1, 72 // unit + 1))


def random_quantization(rng):
    dtype = FLOATS[rng.integers(3)]
    bits, group = random_group(rng)
    rank = int(rng.integers(1, 5))
    shape = [int(n) for n in rng.integers(1, 5, rank)]
    shape[-1] = group * int(rng.integers(1, 4))
    values, values_memory = strided(rng, shape, dtype, rng.standard_normal(shape).astype(dtype))
    words, groups = _core.kv_quantized_lengths(shape[-1], bits, group)
    codes = rng.integers(0, 2**32, (*shape[:-1], words), np.uint32)
    scales, biases = (rng.standard_normal((*shape[:-1], groups)).astype(dtype) for _ in range(2))
    is_back = bool(rng.random() < 0.5)
    line = ["dequantize" if is_back else "quantize", DTYPES[dtype], rank, bits, group, *shape]
    line += element_strides(values)
    results = [codes, scales, biases]
    arrays = [values_memory.copy(), *(array.view(np.uint8).reshape(-1).copy() for array in results)]
    (_core.kv_dequantize if is_back else _core.kv_quantize)(values, *results, bits, group)
    return Operation(line, arrays, [values_memory] if is_back else results)


def random_quantized_move(rng):
    """A state that is quantized, or the reverse, on the way to another capacity."""
    dtype = FLOATS[rng.integers(3)]
    bits, group = random_group(rng)
    rank = int(rng.integers(2, 6))
    axis = int(rng.integers(0, rank - 1))
    shape = [int(n) for n in rng.integers(1, 4, rank)]
    shape[-1] = group * int(rng.integers(1, 4))
    shape[axis] = int(rng.integers(1, 20))
    length = int(rng.integers(1, 30))
    position = int(rng.integers(0, min(shape[axis], length) + 1))
    moved_shape = [*shape]
    moved_shape[axis] = length
    is_back = bool(rng.random() < 0.5)
    full = CacheEntry("k", "full", shape, dtype, axis)
    coded = CacheEntry("k", "quantized", shape, dtype, axis, bits=bits, group=group)
    moved = CacheEntry("k", "quantized", moved_shape, dtype, axis, bits=bits, group=group)
    if is_back:
        values, values_memory = strided(rng, moved_shape, dtype)
        before = values_memory.copy()
        results = [
            rng.integers(0, 2**32, shape, np.uint32)
            if name == "uint32"
            else rng.standard_normal(shape).astype(dtype)
            for shape, name in coded.arrays.values()
        ]
        state = CacheState(
            CacheSpec([coded]), dict(zip(coded.arrays, results, strict=True)), position
        )
        state.dequantize(capacity=length)
        values[...] = state.arrays["k"]
        expected = [values_memory]
    else:
        content = rng.standard_normal(shape).astype(dtype)
        values, values_memory = strided(rng, shape, dtype, content)
        before = values_memory.copy()
        results = [
            random_bytes(rng, np.prod(shape) * np.dtype(name).itemsize)
            for shape, name in moved.arrays.values()
        ]
        state = CacheState(CacheSpec([full]), {"k": values}, position)
        state.quantize(bits, group, capacity=length)
        expected = list(state.arrays.values())
    words = ["dequantize_move" if is_back else "quantize_move", DTYPES[dtype], rank]
    words += [axis - rank * int(rng.integers(2)), length, position, bits, group, *shape]
    words += element_strides(values)
    arrays = [before, *(array.view(np.uint8).reshape(-1).copy() for array in results)]
    return Operation(words, arrays, expected)


def read_answer(output, at, operation):
    """Return the code and the bytes of an answer, and where the next one starts."""
    end = output.index(b"\n", at) + 1
    stop = end + sum(array.nbytes for array in operation.expected)
    return int(output[at:end]), output[end:stop], stop


def test_random_operations_give_the_bits_of_the_package(link):
    rng = np.random.default_rng(7)
    kinds = [random_mask, random_rotation, random_quantization, random_quantized_move]
    kinds += [random_move] * 2
    operations = [kinds[i % len(kinds)](rng) for i in range(3000)]  # 1,000 transitions
    assert {operation.code for operation in operations} == {0, ERROR_CAPACITY}
    done = subprocess.run(
        link("replay"), input=b"".join(operation.request for operation in operations),
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    at = 0
    for operation in operations:
        code, data, at = read_answer(done.stdout, at, operation)
        assert code == operation.code, operation.words
        assert data == b"".join(array.tobytes() for array in operation.expected), operation.words
    assert at == len(done.stdout)


def test_example_moves_a_cache(link):
    done = subprocess.run(link("transition"), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "token 179: 181.500, next: 0.000",
        "attends to token 115: no",
        "257 tokens in 256 positions: the tokens or the position do not fit the length",
    ]


@pytest.mark.parametrize("compiler", ["cc -std=c11", "c++ -x c++ -std=c++11"])
@pytest.mark.parametrize("name", ["transition", "replay"])
def test_c_and_cpp_programs_compile_without_warnings(compiler, name, tmp_path):
    command, *flags = compiler.split()
    if shutil.which(command) is None:
        pytest.skip(f"no {command} here")
    source = ROOT / "examples" / "c" / f"{name}.c"
    subprocess.run(
        [command, *flags, *STRICT, "-c", source, "-o", tmp_path / "object"], check=True, timeout=100
    )
