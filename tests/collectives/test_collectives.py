"""Groups of one process, checks that every group makes, and asynchronous operations."""

import pickle
import threading

import child
import numpy as np
import pytest
from group_model import OPERATIONS

from mlstate import CollectiveError, CompatibilityError
from mlstate.collectives import ProcessGroup, ReduceOp, SingleGroup, Work
from mlstate.collectives._arguments import check_counts, check_timeout, counts_of

MOVING = ["reduce_scatter", "all_gather", "all_reduce", "all_to_all"]
DTYPES = ["bool", "int8", "uint64", "float16", "float64", "complex64", ">f4", "M8[s]", "S3"]


def moved(name, array, **keywords):
    return getattr(SingleGroup(), name)(array, **keywords)


def test_one_process_is_a_group():
    group = SingleGroup()
    assert isinstance(group, ProcessGroup)
    assert (group.rank, group.world_size, repr(group)) == (0, 1, "SingleGroup()")


def test_object_without_all_methods_is_not_a_group():
    class Half:
        rank, world_size = 0, 1

        def barrier(self):
            """The only operation that it supports."""

    assert not isinstance(Half(), ProcessGroup)


@pytest.mark.parametrize("name", OPERATIONS)
def test_async_gives_the_same_result(name):
    group = SingleGroup()
    expected = OPERATIONS[name](group)
    work = OPERATIONS[name](group, async_op=True, timeout=5)
    assert isinstance(work, Work)
    assert work.done()
    np.testing.assert_equal(work.wait(timeout=1.0), expected)
    assert work.wait() is work.wait()
    assert (work.operation, work.rank) == (name, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_any_bytes_move(name, dtype):
    array = np.arange(12).astype("i8").astype(dtype).reshape(4, 3)[::-2, 1:]
    result = moved(name, array)
    assert result.dtype == array.dtype
    assert result.flags.c_contiguous
    assert not np.shares_memory(result, array)
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("name", MOVING)
def test_out_is_filled_and_returned(name):
    array, out = np.arange(8.0)[::2], np.zeros((4, 2))[:, 0]
    assert moved(name, array, out=out) is out
    assert out.tolist() == [0, 2, 4, 6]
    assert moved(name, array, out=array) is array
    assert array.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (np.zeros(3), CompatibilityError, r"out has shape \(3,\), expected \(4,\)"),
        (np.zeros(4, np.float32), CompatibilityError, "out has dtype float32, expected float64"),
        (np.zeros(4, ">f8"), CompatibilityError, "out has dtype >f8, expected float64"),
        ([0.0] * 4, TypeError, "out must be a NumPy array"),
        (np.frombuffer(bytes(32)), ValueError, "out is read-only"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(name, out, error, text):
    with pytest.raises(error, match=f"{name}: {text}"):
        moved(name, np.ones(4), out=out)


@pytest.mark.parametrize("name", MOVING)
def test_an_out_over_half_of_the_input_is_refused(name):
    memory = np.arange(6.0)
    for out in (memory[1:5], memory[3::-1]):
        with pytest.raises(ValueError, match="out shares memory with the input"):
            moved(name, memory[:4], out=out)
    assert memory.tolist() == list(range(6))


@pytest.mark.parametrize("name", MOVING)
def test_out_with_overlapping_elements_is_refused(name):
    for strides in ((0, 8), (8, 8), (8, 0)):
        out = np.lib.stride_tricks.as_strided(np.zeros(9), (4, 3), strides)
        with pytest.raises(ValueError, match="elements of out share memory"):
            moved(name, np.ones((4, 3)), out=out)
    room = np.zeros((4, 6))
    room[:, ::2] = 5
    assert (moved(name, room[:, ::2], out=room[:, 1::2]) == 5).all()  # they interleave
    assert (room == 5).all()


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize(
    ("array", "text"),
    [
        ([1.0], "got list"),
        (None, "got NoneType"),
        (np.array([{}]), "references to objects"),
        (np.ma.masked_array([1.0], [1]), "a masked array"),
    ],
)
def test_non_numeric_arrays_are_refused(name, array, text):
    with pytest.raises(TypeError, match=f"{name}.*{text}"):
        moved(name, array)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather", "all_to_all"])
def test_rows_need_a_dimension(name):
    with pytest.raises(CompatibilityError, match=f"{name}: the array has no dimensions") as caught:
        moved(name, np.float64(3))
    assert caught.value.name == name
    assert moved("all_reduce", np.float64(3)) == 3


@pytest.mark.parametrize(
    ("op", "good", "bad"),
    [
        ("sum", ["int8", "uint64", "float16", "complex64"], ["bool", "M8[s]", "S3"]),
        ("mean", ["float16", "complex128"], ["bool", "int64", "m8[s]"]),
        ("min", ["bool", "uint8", "float64"], ["complex64", "M8[s]"]),
        ("max", ["bool", "int64", "float32"], ["complex64", "V4"]),
    ],
)
def test_operations_are_defined_by_dtype(op, good, bad):
    for name in ("reduce_scatter", "all_reduce"):
        for dtype in good:
            moved(name, np.zeros(2, dtype), op=op)
            moved(name, np.zeros(2, dtype), op=ReduceOp(op))
        for dtype in bad:
            with pytest.raises(CompatibilityError, match=f"op '{op}' is not defined for dtype"):
                moved(name, np.zeros(2, dtype), op=op)


def test_small_floats_of_ml_dtypes_are_numbers():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="has bfloat16")
    array = np.arange(3).astype(ml_dtypes.bfloat16)
    assert moved("all_reduce", array, op="mean").dtype == array.dtype
    assert moved("all_reduce", array.astype(ml_dtypes.float8_e4m3fn)).tolist() == [0, 1, 2]


def test_an_unknown_operation_is_refused():
    with pytest.raises(ValueError, match="op 'product' is not one of sum, mean, min, max"):
        moved("all_reduce", np.zeros(2), op="product")


@pytest.mark.parametrize(
    ("counts", "error", "text"),
    [
        ([2], CompatibilityError, "first dimension is 3, expected 2, the (sum of counts|count of)"),
        ([1, 2], ValueError, "counts has 2 entries for 1 ranks"),
        ([-3], ValueError, "negative entry"),
        ([3.0], TypeError, "sequence of int"),
        (3, TypeError, "sequence of int"),
    ],
)
@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather"])
def test_counts_that_do_not_fit_are_refused(name, counts, error, text):
    assert moved(name, np.zeros((3, 2)), counts=np.array([3])).shape == (3, 2)
    with pytest.raises(error, match=f"{name}: .*{text}"):
        moved(name, np.zeros((3, 2)), counts=counts)


def test_all_to_all_needs_both_counts():
    for keywords in ({"counts": [3]}, {"out_counts": [3]}):
        with pytest.raises(ValueError, match="both counts and out_counts, or neither"):
            moved("all_to_all", np.zeros(3), **keywords)
    with pytest.raises(CompatibilityError, match="the sum of out_counts"):
        moved("all_to_all", np.zeros(3), counts=[3], out_counts=[2])


def test_rows_of_several_ranks():
    assert check_counts("x", "counts", None, 6, 3) == [2, 2, 2]
    assert check_counts("x", "counts", (0, 5, 1), 6, 3) == [0, 5, 1]
    assert counts_of("x", "counts", np.array([1, 2]), 2) == [1, 2]
    with pytest.raises(CompatibilityError, match="is 7, expected a multiple of the 3 ranks; pass"):
        check_counts("x", "counts", None, 7, 3)


@pytest.mark.parametrize("name", ["broadcast", "gather_bytes"])
@pytest.mark.parametrize(
    ("root", "error", "text"),
    [
        (1, ValueError, "root 1 is not a rank of this group; pass 0 to 0"),
        (-1, ValueError, "root -1 is not a rank"),
        ("0", TypeError, "root must be an int, got str"),
        (0.0, TypeError, "root must be an int, got float"),
    ],
)
def test_a_wrong_root_is_refused(name, root, error, text):
    with pytest.raises(error, match=f"{name}: {text}"):
        OPERATIONS[name](SingleGroup(), root=root)


def test_broadcast_returns_the_array_itself():
    array = np.arange(3)
    assert SingleGroup().broadcast(array) is array


@pytest.mark.parametrize("data", [b"ab", bytearray(b"ab"), memoryview(b"-ab-")[1:3]])
def test_bytes_are_gathered(data):
    group = SingleGroup()
    for root in (None, 0):
        gathered = group.gather_bytes(data, root=root)
        assert gathered == [b"ab"]
        assert type(gathered[0]) is bytes
    assert group.gather_bytes(b"") == [b""]


@pytest.mark.parametrize("data", ["text", None, 5, [1]])
def test_gather_bytes_refuses_other_types(data):
    with pytest.raises(TypeError, match=f"gather_bytes takes bytes, got {type(data).__name__}"):
        SingleGroup().gather_bytes(data)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("end", ["close", "abort"])
def test_closed_or_aborted_group_raises(name, end):
    group = SingleGroup()
    getattr(group, end)()
    group.close()  # a second call does nothing
    done = {"close": "closed", "abort": "aborted"}[end]
    with pytest.raises(CollectiveError, match=f"{name} on rank 0: this group was {done}") as caught:
        OPERATIONS[name](group)
    assert (caught.value.name, caught.value.rank) == (name, 0)
    assert isinstance(caught.value, RuntimeError)
    assert repr(group) == f"SingleGroup({done})"


def test_a_group_closes_at_the_end_of_with():
    with SingleGroup() as group:
        group.barrier()
    with pytest.raises(CollectiveError, match="closed"):
        group.barrier()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    ("timeout", "error"),
    [(0, ValueError), (-1.5, ValueError), (float("nan"), ValueError), (float("inf"), ValueError),
     ("5", TypeError), (True, TypeError)],
)  # fmt: skip
def test_a_wrong_timeout_is_refused(name, timeout, error):
    with pytest.raises(error, match="timeout must be"):
        OPERATIONS[name](SingleGroup(), timeout=timeout)


def test_timeouts_are_seconds():
    assert check_timeout(None) is None
    assert check_timeout(np.float32(0.5)) == 0.5
    assert check_timeout(3) == 3.0


# ---- work ----


def test_work_can_be_waited_for_again():
    work = Work("all_reduce", 2)
    assert not work.done()
    with pytest.raises(CollectiveError, match=r"all_reduce on rank 2: not done after 0.01 s"):
        work.wait(timeout=0.01)
    thread = threading.Thread(target=lambda: work.set_result(5), daemon=True)
    thread.start()
    assert work.wait(timeout=30) == 5
    assert work.done()
    thread.join()


def test_work_raises_its_error_on_every_wait():
    work = Work("barrier", 0)
    work.set_error(CollectiveError("rank 1 is gone"))
    for _ in range(2):
        with pytest.raises(CollectiveError, match="rank 1 is gone"):
            work.wait()
    assert work.done()


# ---- torch tensors on one process ----


def test_tensors_stay_tensors(torch):
    tensor = torch.arange(6.0, dtype=torch.bfloat16, requires_grad=True)
    for name in MOVING:
        result = moved(name, tensor)
        assert torch.equal(result, tensor.detach())
        assert not result.requires_grad
        assert result.data_ptr() != tensor.data_ptr()
        out = torch.zeros(6, dtype=torch.bfloat16)
        assert moved(name, tensor, out=out) is out
        assert torch.equal(out, tensor.detach())
        assert moved(name, out, out=out) is out
        with pytest.raises(ValueError, match="shares memory"):
            moved(name, out[:4], out=out[1:5])
        with pytest.raises(TypeError, match="out must be a torch tensor"):
            moved(name, tensor, out=np.zeros(6))
    with pytest.raises(CompatibilityError, match="op 'mean' is not defined for dtype int64"):
        moved("all_reduce", torch.arange(3), op="mean")


def test_importing_loads_no_threads():
    code = (
        "import sys, numpy; had = set(sys.modules); import mlstate.collectives;"
        "print('threading' in sys.modules.keys() - had)"  # NumPy may have imported it already
    )
    done = child.attempt(code)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


class NestedGroup(SingleGroup):
    """Uses itself again inside an operation, as a signal handler may."""

    __slots__ = ("calls", "label")

    def __init__(self):
        super().__init__()
        self.calls, self.label = 0, "trainer"

    def _source(self, operation, array, *, reduced):
        self.calls += 1
        if self.calls == 1:
            self.barrier()
            assert self.all_gather(np.arange(3)).tolist() == [0, 1, 2]
        return super()._source(operation, array, reduced=reduced)


@pytest.mark.timeout(20)
def test_single_group_allows_nested_operations():
    group = NestedGroup()
    assert group.all_reduce(np.ones(2)).tolist() == [1, 1]
    assert group.calls == 2


def test_pickled_single_group_keeps_attributes_of_subclasses():
    group = pickle.loads(pickle.dumps(NestedGroup()))
    assert (group.label, group.calls) == ("trainer", 0)
    group.close()
    assert repr(pickle.loads(pickle.dumps(group))) == "SingleGroup(closed)"
