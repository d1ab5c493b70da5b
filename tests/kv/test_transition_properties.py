"""Every instruction set gives the same bytes, and memory use is as documented."""

import child
import numpy as np
import pytest
from kv_model import assert_same_bits, expand
from traced_memory import traced

from mlstate import _core
from mlstate.kv import compact_kv_state, transition_kv_state

SETS = ("scalar", "avx2", "avx512", "neon")

# The results of one instruction set, as one digest for each pair of dtypes.
DIGESTS = """
import hashlib, sys
import numpy as np
from mlstate import _core
from mlstate.kv import create_attention_size_mask, create_causal_mask, transition_kv_state

print(_core.cpu_name())
NAMES = ("float16", "float32", "float64", "int8", "complex64")
try:
    import ml_dtypes
    NAMES = ("bfloat16", *NAMES)
except ImportError:
    pass
FLOATS = {"float16", "bfloat16", "float32", "float64"}

def digest(arrays):
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()

def source(name, shape, seed=0):
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    count = int(np.prod(shape))
    raw = np.random.default_rng(seed).bytes(count * dtype.itemsize)
    made = np.frombuffer(raw, dtype).reshape(shape).copy()
    with np.errstate(all="ignore"):
        made[made != made] = 0  # payloads of NaNs are outside the promise
    return made

def results(name, to):
    for length in range(0, 140):  # every remainder of every vector, from every alignment
        room = source(name, (1, 1, length + 1, 1), length)
        yield transition_kv_state(room[:, :, length % 2 :], length + 3, length // 2, 1, dtype=to)
    wide = source(name, (2, 3, 41, 33))
    for view in (wide, wide[:, ::-1, :, 1:], wide[..., ::2], wide.transpose(0, 3, 2, 1)):
        yield transition_kv_state(view, 50, 37, dtype=to)
    # large enough to go round the cache (4 MiB in int8), into memory that was used before
    large = source(name, (2, 1, 1 << 15, 67))
    out = np.ones((2, 1, 36001, 67), to if to != "bfloat16" else ml_dtypes.bfloat16)
    yield transition_kv_state(large, 36001, 32763, 0, out=out)

for name in NAMES:
    for to in FLOATS & set(NAMES) if name in FLOATS else (name,):
        if name in FLOATS or name == to:
            pad = 0 if name == "complex64" else 1
            if pad == 0:
                wide = source(name, (2, 3, 41, 33))
                print(name, to, digest([transition_kv_state(wide, 50, 37)]))
            else:
                print(name, to, digest(results(name, to)))
for dtype in sorted(FLOATS & set(NAMES)):
    masks = (create_attention_size_mask(n, n // 3, 0, dtype=dtype, fill=-7) for n in range(70))
    print(dtype, "mask", digest(masks))
"""


def offered():
    """The instruction sets that this machine and this build support."""
    done = child.attempt("from mlstate import _core", MLSTATE_CPU="no such set")
    names = done.stderr.rpartition(": ")[2]
    return [name for name in SETS if name in names.replace(",", " ").split()]


@pytest.fixture(scope="module")
def of_the_oracle():
    return child.run(DIGESTS, MLSTATE_CPU="scalar").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("cpu", SETS[1:])
def test_instruction_sets_give_scalar_bytes(cpu, of_the_oracle):
    if cpu not in offered():
        pytest.skip(f"this machine has no {cpu}")
    first, *lines = child.run(DIGESTS, MLSTATE_CPU=cpu).splitlines()
    assert first == cpu and of_the_oracle[0] == "scalar"
    lines, expected = sorted(lines), sorted(of_the_oracle[1:])
    assert len(lines) >= 14 and lines == expected


@pytest.mark.slow
@pytest.mark.parametrize("copy", ["plain", "loop", "stream1"])
def test_store_variants_give_scalar_bytes(copy, of_the_oracle):
    _, *lines = child.run(DIGESTS, MLSTATE_COPY=copy).splitlines()
    assert sorted(lines) == sorted(of_the_oracle[1:])


# Copies of every kind into memory larger than the cache, and a fork before the choice is made.
CHOICES = """
import os
import numpy as np
import mlstate
from mlstate import _core
from mlstate.kv import transition_kv_state
from mlstate.state import load_into

def chosen():
    return {
        (c["operation"], c["cache"], c["destination"]): c["chosen"]
        for c in _core.copy_choices()["choices"]
    }

assert set(chosen().values()) == {None}, "measured at import"
least = _core.copy_choices()["least_bytes"]["past"]
one = {"w": np.arange(least // 4 + 70_001, dtype=np.float32)}
two = {"w": np.zeros_like(one["w"])}

def check():
    two["w"][:] = 0
    load_into(two, one)
    assert np.array_equal(one["w"], two["w"])

child = os.fork()
if child == 0:
    check()
    print(chosen()["copy", "past", "touched"], flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert chosen()["copy", "past", "touched"] is None
small = {"w": np.ones(1000, np.float32)}
load_into({"w": np.zeros(1000, np.float32)}, small)
assert set(chosen().values()) == {None}, "measured with a copy that fits the cache"
check()
print(chosen()["copy", "past", "touched"])
check()
_core.measure_copies()
decided = {operation for (operation, _, _), value in chosen().items() if value is not None}
assert decided == {"copy", "fill", "narrow", "widen", "checksum"}, decided
"""


def test_removed_way_to_store_is_replaced_with_a_warning():
    code = "from mlstate import _core; print(_core.copy_choices()['forced'])"
    done = child.attempt(code, MLSTATE_COPY="stream4")
    assert done.stdout.strip() == "stream1"
    assert "MLSTATE_COPY=stream4 was removed; stream1 is used instead" in done.stderr


def test_the_first_large_copy_chooses_how_to_store():
    variants = _core.copy_choices()["variants"]
    if variants == 1:
        pytest.skip("this instruction set has one way to store")
    names = {"plain", "loop", "stream1"}
    chosen = child.run(CHOICES, MLSTATE_COPY="auto").split()
    assert len(chosen) == 2 and set(chosen) <= names


def test_the_best_set_is_chosen_by_default():
    assert "scalar" in offered() and _core.cpu_name() in offered()
    name = child.run("from mlstate import _core; print(_core.cpu_name())", MLSTATE_CPU="")
    assert name.strip() == offered()[-1]


# ---- memory ----


@pytest.mark.parametrize("to", [np.float16, np.float32])
def test_move_into_out_allocates_no_memory(to):
    source = np.ones((4, 2, 1024, 64), np.float16)
    out = np.zeros((4, 2, 2048, 64), to)
    with traced() as trace:
        transition_kv_state(source, 2048, out=out)
    assert trace.peak < 4096
    odd = source[:, ::-1, ::2].transpose(0, 1, 3, 2).transpose(0, 1, 3, 2)
    with traced() as trace:
        transition_kv_state(odd, 2048, out=out)
    assert trace.peak < 4096


@pytest.mark.parametrize("to", [None, np.float64])
@pytest.mark.parametrize("low_memory", [False, True])
def test_only_the_result_is_allocated(to, low_memory):
    source = np.ones((4, 2, 1024, 64), np.float16)
    with traced() as trace:
        moved = transition_kv_state(source, 40_000, 1000, dtype=to, low_memory=low_memory)
    assert moved.nbytes <= trace.peak < moved.nbytes + 4096
    assert moved.flags.owndata
    with traced() as trace:
        moved = compact_kv_state(source, 512, 500)
    assert moved.nbytes <= trace.peak < moved.nbytes + 4096


@pytest.mark.parametrize("low_memory", [True, 1, np.True_, False, 0])
@pytest.mark.parametrize("pad", [0.0, -0.0, 1.0])
def test_low_memory_gives_the_same_result(low_memory, pad):
    source = np.arange(4 * 2 * 100 * 64, dtype=np.float32).reshape(4, 2, 100, 64)
    for length in (200, 20_000):  # below and above the size at which zero pages stay untouched
        got = transition_kv_state(source, length, 77, pad, low_memory=low_memory)
        assert_same_bits(got, expand(source, length, 77, pad))
        got = transition_kv_state(source, length, 77, pad, np.float16, low_memory=low_memory)
        assert_same_bits(got, expand(source, length, 77, pad, np.float16))
        got[...] = 1
        assert got.min() == 1


def test_low_memory_gives_the_same_result_if_heads_span_huge_pages():
    source = np.arange(2 * 3 * 40_000 * 32, dtype=np.float32).reshape(2, 3, 40_000, 32)
    got = transition_kv_state(source, 60_000, 39_999, low_memory=True)
    assert_same_bits(got, expand(source, 60_000, 39_999, 0.0))


def test_memory_that_was_used_before_is_padded_too():
    """A fresh result may use memory that another array freed, with old content."""
    for length in (300, 70_000):
        for _ in range(3):
            np.full((2, 1, length, 64), 7, np.float32)
            got = transition_kv_state(np.ones((2, 1, 9, 64), np.float32), length, 5)
            assert not got[:, :, 5:].any() and (got[:, :, :5] == 1).all()


RESIDENT = """
import numpy as np
from mlstate.kv import transition_kv_state

source = np.ones((16, 8, 64, 128), np.float16)
transition_kv_state(source, 128)
base = status("VmRSS")
made = transition_kv_state(source, 4096, 64, low_memory=True)  # 2 of 128 MiB
print(status("VmRSS") - base, made.nbytes)
"""


@child.needs_status
def test_low_memory_leaves_the_padding_untouched():
    resident, full_bytes = map(int, child.run(child.STATUS + RESIDENT).split())
    assert full_bytes == 128 << 20
    assert resident < 16 << 20
