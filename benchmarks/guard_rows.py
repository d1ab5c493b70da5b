"""The operations in memory of `bench_guard.py`, each with the simple code that it replaces.

`MEMORY` is the table. A size is the number of bytes of the result, or of the target if there is no
result. Both ways read the same source, and write to separate targets.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import peers
from optional import optional
from paired import Case

from mlstate import StateDict
from mlstate.fsdp import GradientAccumulator
from mlstate.kv import (
    CacheEntry,
    CacheSpec,
    CacheState,
    KVState,
    compact_kv_state,
    create_attention_size_mask,
    create_decode_mask,
    rotate_keys,
    transition_kv_state,
)
from mlstate.state import diff, load_into

torch, ml_dtypes = optional("torch"), optional("ml_dtypes")
BFLOAT16 = ml_dtypes and np.dtype(ml_dtypes.bfloat16)
HALF, SINGLE = np.dtype(np.float16), np.dtype(np.float32)
HEAD_DIM = 128
GROUP = 64
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
UP_TO_256 = SIZES[:-1]
MANY = 1000
MANY_SIZES = (MANY * KIB, MANY * 64 * KIB)  # total bytes of all tensors

Arrays = dict[str, Any]
Build = Callable[[int, int], Case]


@dataclass(frozen=True)
class Operation:
    """One line of the table: the operation, the line it replaces, and how to make both."""

    name: str
    simple: str
    build: Build
    sizes: tuple[int, ...] = UP_TO_256
    many: bool = False  # also with 1,000 tensors
    threads: tuple[int, ...] = (1, 2)
    needs: object = True  # None or False: a package is missing
    fixed_us: float = 0.0  # additional microseconds that a call may cost
    why: str = ""  # the reason for these


MEMORY: list[Operation] = []  # the table


def operation(name: str, simple: str, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """Add an operation to the table; the function makes its case from these arguments."""

    def add(build: Any) -> Any:
        MEMORY.append(Operation(name, simple, partial(build, *arguments), **options))
        return build

    return add


# ---- sources ----


def filled(nbytes: int, dtype: Any, seed: int = 1) -> Any:
    """Make a flat array of normal values by repeating a block of 1 MiB."""
    kind = np.dtype(dtype)
    count = nbytes // kind.itemsize
    block = np.random.default_rng(seed).standard_normal(min(count, 1 << 18), np.float32)
    block = block.astype(kind)
    array = np.empty(count, kind)
    for start in range(0, count, len(block)):
        array[start : start + len(block)] = block[: count - start]
    return array


def touched(array: Any) -> Any:
    """Make a target of the array's shape and dtype whose pages have been written."""
    target = np.empty_like(array)
    target.reshape(-1).view(np.uint8)[...] = 1
    return target


def state_of(nbytes: int, tensors: int, dtype: Any = SINGLE, seed: int = 1) -> Arrays:
    """Make a state of equal tensors."""
    return {f"layer.{i}.weight": filled(nbytes // tensors, dtype, seed) for i in range(tensors)}


def touched_state(state: Arrays, dtype: Any = None) -> Arrays:
    """Make target arrays for a state."""
    return {n: touched(np.empty(a.shape, dtype or a.dtype)) for n, a in state.items()}


def cache_shape(nbytes: int) -> tuple[int, int, int, int]:
    """Return the shape of a float16 cache of `nbytes` bytes."""
    length = 256 if nbytes < MIB else 512 if nbytes < 16 * MIB else 1024
    length = length if nbytes < 64 * MIB else 4096
    blocks = nbytes // (2 * HEAD_DIM * length)
    heads = min(blocks, 8)
    return blocks // heads, heads, length, HEAD_DIM


def random_cache(shape: tuple[int, ...], dtype: Any) -> Any:
    """Make a cache of normal values."""
    count = int(np.prod(shape))
    return filled(count * np.dtype(dtype).itemsize, dtype).reshape(shape)


# ---- the simple ways ----

ZEROS = "new = np.zeros(...); new[:, :, :n] = cache"
INTO = "out[:, :, :n] = cache[:, :, :n]; out[:, :, n:] = 0"
INNERMOST = "out[..., :n] = cache[..., :n]; out[..., n:] = 0"
ROTATE = "x, y = keys halves as f32; np.concatenate((x * cos - y * sin, y * cos + x * sin))"
TORCH_INTO = "the same two lines on torch tensors, as many threads"
COPYTO = "for each tensor: np.copyto(target, source)"
NUMPY_DIFF = "for each tensor: d = np.abs(a - b); np.nanmax(d); np.count_nonzero(d)"
QUANTIZE = "scales, biases and np.rint((x - bias) / scale) of groups in float32"
DEQUANTIZE = "codes.view(np.uint8).astype(np.float32) * scale + bias"
ROWS = "np.full(-inf); for each row: mask[row, low:high] = 0"
MAPPED = "new = mmap.mmap(-1, ...) as an array; new[:, :, :n] = cache"
SMALL_PAGES = MAPPED + ", after madvise(MADV_NOHUGEPAGE)"
SUM = "sum += gradient; np.vdot(sum, sum); np.count_nonzero(~np.isfinite(sum))"

# ---- KV caches ----


def into_outs(
    simple: Any, move: Any, source: Any, shape: tuple[int, ...], length: int, used: int, **axis: Any
) -> Case:
    """Write to separate targets of this shape."""
    simple_out, out = (touched(np.empty(shape, HALF)) for _ in range(2))
    return Case(
        partial(simple, source, used, simple_out),
        partial(move, source, length, used, out=out, **axis),
    )


@operation("kv.expand bf16-f16 out=", INTO, BFLOAT16, "out=", needs=BFLOAT16)
@operation("kv.expand bf16-f16 fresh", ZEROS, BFLOAT16, "fresh", needs=BFLOAT16)
@operation("kv.expand f32-f16 out=", INTO, SINGLE, "out=")
@operation("kv.expand f32-f16 fresh", ZEROS, SINGLE, "fresh")
@operation("kv.expand low_memory", SMALL_PAGES, HALF, "low_memory")
@operation("kv.expand out=", INTO, HALF, "out=", sizes=SIZES)
@operation("kv.expand fresh", ZEROS, HALF, "fresh", sizes=SIZES)
def expanding(dtype: Any, how: str, nbytes: int, tensors: int) -> Case:
    """Double the length; the result is float16."""
    shape = layers, heads, length, dim = cache_shape(nbytes)
    used = length // 2
    source = random_cache((layers, heads, used, dim), dtype)
    if how == "out=":
        return into_outs(peers.numpy_into, transition_kv_state, source, shape, length, used)
    if how == "low_memory":
        return Case(
            partial(peers.numpy_mapped, source, length, used, small_pages=True),
            partial(transition_kv_state, source, length, used, low_memory=True),
        )
    options: dict[str, Any] = {} if source.dtype == HALF else {"dtype": HALF}
    return Case(
        partial(peers.numpy_zeros, source, length, used, HALF),
        partial(transition_kv_state, source, length, used, **options),
    )


@operation("kv.expand torch bf16-f16 out=", TORCH_INTO, "bfloat16", needs=torch)
@operation("kv.expand torch f32-f16 out=", TORCH_INTO, "float32", needs=torch)
def torch_expanding(dtype: str, nbytes: int, tensors: int) -> Case:
    """Double the length of a torch cache into a target, with the same number of threads."""
    layers, heads, length, dim = cache_shape(nbytes)
    used = length // 2
    float_cache = torch.from_numpy(random_cache((layers, heads, used, dim), SINGLE))
    source = float_cache.to(getattr(torch, dtype))
    outs = [torch.ones((layers, heads, length, dim), dtype=torch.float16) for _ in range(2)]
    return Case(
        partial(peers.numpy_into, source, used, outs[0]),
        partial(transition_kv_state, source, length, used, out=outs[1]),
        rest=True,
        use_threads=torch.set_num_threads,
        simple_per_thread=True,
    )


@operation("kv.compact out=", INTO, "out=")
@operation("kv.compact fresh", ZEROS, "fresh")
def compacting(how: str, nbytes: int, tensors: int) -> Case:
    """Halve the length; nine tenths of the result are tokens."""
    shape = layers, heads, length, dim = cache_shape(nbytes)
    source, used = random_cache((layers, heads, 2 * length, dim), HALF), length * 9 // 10
    if how == "out=":
        return into_outs(peers.numpy_into, compact_kv_state, source, shape, length, used)
    return Case(
        partial(peers.numpy_zeros, source, length, used, HALF),
        partial(compact_kv_state, source, length, used),
    )


def innermost_into(source: Any, position: int, out: Any) -> None:
    """Copy the tokens into a target with the sequence innermost, and clear the rest."""
    out[..., :position] = source[..., :position]
    out[..., position:] = 0


@operation("kv.expand innermost out=", INNERMOST)
def innermost(nbytes: int, tensors: int) -> Case:
    """Double the length of a float16 cache whose sequence is the last axis, into a target."""
    layers, heads, length, dim = cache_shape(nbytes)
    used, shape = length // 2, (layers, 1, heads * dim, 1, length)
    source = random_cache((*shape[:-1], used), HALF)
    return into_outs(innermost_into, transition_kv_state, source, shape, length, used, seq_axis=-1)


@operation("kv.rotate_keys f32", ROTATE, SINGLE, sizes=UP_TO_256[1:])
@operation("kv.rotate_keys f16", ROTATE, HALF)
def rotating(dtype: Any, nbytes: int, tensors: int) -> Case:
    """Move keys to other positions."""
    keys = random_cache(cache_shape(nbytes * 2 // np.dtype(dtype).itemsize), dtype)
    return Case(partial(peers.numpy_rotate, keys, -256), partial(rotate_keys, keys, -256))


@operation("kv.CacheState.dequantize", DEQUANTIZE, True)
@operation("kv.CacheState.quantize", QUANTIZE, False)
def quantizing(back: bool, nbytes: int, tensors: int) -> Case:
    """Quantize a float16 cache to 8 bits, or compute it from the codes."""
    values = random_cache(cache_shape(nbytes), HALF)
    spec = CacheSpec([CacheEntry("keys", "full", values.shape, HALF)])
    state = CacheState(spec, {"keys": values}, values.shape[-2])
    if back:
        state.quantize(8, GROUP)
        return Case(
            partial(peers.numpy_dequantize, *state.arrays.values()),
            lambda: CacheState(state.spec, state.arrays, state.length).dequantize(),
        )
    return Case(
        partial(peers.numpy_quantize, values, GROUP),
        lambda: CacheState(spec, {"keys": values}, state.length).quantize(8, GROUP),
    )


@operation("kv.KVState.from_array", MAPPED, sizes=SIZES)
def from_array(nbytes: int, tensors: int) -> Case:
    """Make a state from an array."""
    source = random_cache(cache_shape(nbytes), HALF)
    length = source.shape[2]
    simple = partial(peers.numpy_mapped, source, length, length)
    return Case(simple, partial(KVState.from_array, source))


@operation("kv.KVState.contiguous", "np.ascontiguousarray(state.array)", sizes=SIZES)
def contiguous(nbytes: int, tensors: int) -> Case:
    """Copy half of a state's capacity to a contiguous array."""
    source = random_cache(cache_shape(nbytes), HALF)
    state = KVState.from_array(source, 2 * source.shape[2])
    return Case(partial(np.ascontiguousarray, state.array), state.contiguous)


@operation("kv.KVState.resize shrink", "array[:, :, n:] = 0", sizes=SIZES)
def shrinking(nbytes: int, tensors: int) -> Case:
    """Clear the second half of the positions: `nbytes` are cleared."""
    layers, heads, length, dim = cache_shape(nbytes)
    state = KVState.from_array(random_cache((layers, heads, 2 * length, dim), HALF))
    cache = touched(np.empty((layers, heads, 2 * length, dim), HALF))

    def simple() -> None:
        cache[:, :, length:] = 0

    def shrink() -> None:
        state.resize(length)
        state.resize(2 * length)

    return Case(simple, shrink)


@operation("kv.KVState.reserve", MAPPED, sizes=SIZES)
def reserving(nbytes: int, tensors: int) -> Case:
    """Double the capacity of a full state, to `nbytes`."""
    layers, heads, length, dim = cache_shape(nbytes)
    source = random_cache((layers, heads, length // 2, dim), HALF)
    states: list[Any] = []
    return Case(
        partial(peers.numpy_mapped, source, length, length // 2),
        lambda: states[0].reserve(length),
        before_ours=lambda: states.append(KVState.from_array(source)),
        after_ours=states.clear,
    )


@operation("kv.KVState append", "np.concatenate((cache, token), axis=2)")
def appending(nbytes: int, tensors: int) -> Case:
    """Append the entries of one token."""
    layers, heads, length, dim = cache_shape(nbytes)
    source = random_cache((layers, heads, length - 1, dim), HALF)
    token = random_cache((layers, heads, 1, dim), HALF)
    state = KVState.from_array(source, length)

    def append() -> None:
        state.resize(length)
        state.array[:, :, -1:] = token

    simple = partial(np.concatenate, (source, token), axis=2)
    return Case(simple, append, after_ours=partial(state.resize, length - 1))


@operation("kv.mask out=", ROWS, "out=")
@operation("kv.mask fresh", ROWS, "fresh")
def masking(how: str, nbytes: int, tensors: int) -> Case:
    """Make a full mask with a window of a quarter of its length."""
    length = int((nbytes // 2) ** 0.5)
    create = partial(create_attention_size_mask, length, length // 4, length)
    if how == "fresh":
        return Case(partial(peers.mask_by_rows, length, length // 4), create)
    simple_out, out = (touched(np.empty((1, 1, length, length), HALF)) for _ in range(2))

    def simple() -> None:
        simple_out[...] = float("-inf")
        for row in range(length):
            simple_out[0, 0, row, max(0, row - length // 4) : row + 1] = 0

    return Case(simple, partial(create, out=out))


@operation("kv.decode_mask", "np.full(-inf); row[low:high] = 0", sizes=SIZES[:3])
def decode_masking(nbytes: int, tensors: int) -> Case:
    """Make one row of a mask."""
    length = nbytes // 2
    return Case(
        partial(peers.decode_row, length, length // 4, length // 2),
        partial(create_decode_mask, length, length // 4, length // 2),
    )


# ---- states ----


def copy_each(target: Arrays, source: Arrays) -> None:
    """Copy a state with NumPy."""
    for name, array in target.items():
        np.copyto(array, source[name], casting="same_kind")


@operation("state.load_into bf16-f32", COPYTO, BFLOAT16, SINGLE, needs=BFLOAT16)
@operation("state.load_into f16-f32", COPYTO, HALF, SINGLE)
@operation("state.load_into f32-f16", COPYTO, SINGLE, HALF, many=True)
@operation("state.load_into f32", COPYTO, SINGLE, SINGLE, sizes=SIZES, many=True)
def loading(source_dtype: Any, target_dtype: Any, nbytes: int, tensors: int) -> Case:
    """Copy a state into another of `nbytes`."""
    factor = np.dtype(source_dtype).itemsize / np.dtype(target_dtype).itemsize
    source = state_of(int(nbytes * factor), tensors, source_dtype)
    simple, mlstate_target = (touched_state(source, target_dtype) for _ in range(2))
    cast = {} if source_dtype == target_dtype else {"cast": True}
    return Case(
        partial(copy_each, simple, source),
        partial(load_into, mlstate_target, source, **cast),
        tensors,
    )


@operation(
    "state.load_into torch f32",
    "for each tensor: target.copy_(source), as many threads",
    many=True,
    needs=torch,
)
def torch_loading(nbytes: int, tensors: int) -> Case:
    """Copy a state of torch tensors."""
    source = {n: torch.from_numpy(a) for n, a in state_of(nbytes, tensors).items()}
    simple, mlstate_target = ({n: torch.ones_like(t) for n, t in source.items()} for _ in range(2))

    def copy_torch() -> None:
        for name, tensor in simple.items():
            tensor.copy_(source[name])

    return Case(
        copy_torch,
        partial(load_into, mlstate_target, source),
        tensors,
        rest=True,
        use_threads=torch.set_num_threads,
        simple_per_thread=True,
    )


def numpy_diff(a: Arrays, b: Arrays) -> None:
    """Find the largest difference and the number of changed elements of each tensor."""
    for name, array in a.items():
        distance = np.abs(array - b[name])
        np.nanmax(distance)
        np.count_nonzero(distance)


@operation("state.diff bf16 changed", NUMPY_DIFF, BFLOAT16, 1.01, sizes=SIZES[:-2], needs=BFLOAT16)
@operation("state.diff f16 changed", NUMPY_DIFF, HALF, 1.01)
@operation("state.diff f32 same", NUMPY_DIFF, SINGLE, 1.0, sizes=SIZES, many=True)
@operation("state.diff f32 changed", NUMPY_DIFF, SINGLE, 1.01, sizes=SIZES, many=True)
def differing(dtype: Any, factor: float, nbytes: int, tensors: int) -> Case:
    """Compare two states of `nbytes` each."""
    a = state_of(nbytes, tensors, dtype)
    scale = np.array(factor, dtype)
    b = {name: array * scale for name, array in a.items()}
    return Case(partial(numpy_diff, a, b), partial(diff, a, b), tensors)


def all_equal(a: Arrays, b: Arrays) -> bool:
    """Compare two states with NumPy."""
    return a.keys() == b.keys() and all(np.array_equal(array, b[n]) for n, array in a.items())


@operation("state.StateDict ==", "all(np.array_equal(a, b))", many=True)
def equality(nbytes: int, tensors: int) -> Case:
    """Compare two equal states."""
    a = state_of(nbytes, tensors)
    b = {name: array.copy() for name, array in a.items()}
    mlstate_state = StateDict(a)
    return Case(partial(all_equal, a, b), lambda: mlstate_state == b, tensors)


@operation("state.StateDict deepcopy", "{n: a.copy() for ...}", many=True)
def copying(nbytes: int, tensors: int) -> Case:
    """Copy a state, arrays included."""
    tensors_dict = state_of(nbytes, tensors)
    return Case(
        lambda: {name: array.copy() for name, array in tensors_dict.items()},
        partial(copy.deepcopy, StateDict(tensors_dict)),
        tensors,
    )


def sha256_each(state: Arrays) -> str:
    """Hash names and bytes with hashlib."""
    hasher = hashlib.sha256()
    for name in sorted(state):
        hasher.update(name.encode())
        hasher.update(state[name])
    return hasher.hexdigest()


@operation("state.StateDict.digest", "hashlib.sha256, updated by each", sizes=SIZES[:-2], many=True)
def digesting(nbytes: int, tensors: int) -> Case:
    """Hash a state."""
    tensors_dict = state_of(nbytes, tensors)
    return Case(partial(sha256_each, tensors_dict), StateDict(tensors_dict).digest, tensors)


# ---- gradients ----


@operation("fsdp.GradientAccumulator bf16", SUM, BFLOAT16, sizes=SIZES[:-2], needs=BFLOAT16)
@operation("fsdp.GradientAccumulator f16", SUM, HALF, sizes=SIZES[:-2])
@operation("fsdp.GradientAccumulator f32", SUM, SINGLE, many=True)
def adding(dtype: Any, nbytes: int, tensors: int) -> Case:
    """Add the gradients of another micro-batch, with norm and count of non-finite elements."""
    gradients = state_of(nbytes, tensors, dtype)
    sums = {name: array.copy() for name, array in gradients.items()}
    accumulator = GradientAccumulator()
    accumulator.add_gradients(gradients)

    def simple() -> tuple[float, int]:
        squares, nonfinite = 0.0, 0
        for name, gradient in gradients.items():
            sums[name] += gradient
            wide = sums[name].astype(SINGLE, copy=False)  # squares of float16 overflow
            squares += float(np.vdot(wide, wide))
            nonfinite += int(np.count_nonzero(~np.isfinite(wide)))
        return math.sqrt(squares), nonfinite

    def call_mlstate() -> tuple[float, dict[str, int]]:
        accumulator.add_gradients(gradients)
        return accumulator.norm, accumulator.nonfinite

    return Case(simple, call_mlstate, tensors)


@operation("fsdp.GradientAccumulator first", "{n: g.copy() for ...}", many=True)
def starting(nbytes: int, tensors: int) -> Case:
    """Add the gradients of the first micro-batch, and take the sums."""
    gradients = state_of(nbytes, tensors)
    accumulator = GradientAccumulator()

    def start() -> None:
        accumulator.add_gradients(gradients)
        accumulator.get_and_clear_gradients()

    return Case(lambda: {name: array.copy() for name, array in gradients.items()}, start, tensors)
