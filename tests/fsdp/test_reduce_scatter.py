"""`ReduceScatterOperation`: one gradient at a time."""

import numpy as np
import pytest
from gradient_model import (
    ENGINES,
    FLOATS,
    INTEGERS,
    assert_same,
    gradient_of,
    part_of,
    reduced,
    run,
)

from mlstate import CollectiveError
from mlstate.collectives import ReduceOp, SingleGroup
from mlstate.fsdp import ReduceScatterOperation

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", ["flat", "rows"])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(d, op) for d in FLOATS + INTEGERS for op in ReduceOp if d in FLOATS or op != "mean"],
)
def test_each_rank_gets_its_part_of_the_reduced_gradient(dtype, op, layout, engine):
    def work(group):
        each = [gradient_of([7, rank], (5, 3), dtype) for rank in range(3)]
        operation = ReduceScatterOperation(group, (5, 3), dtype, group.rank, op, layout=layout)
        for gradients in (each, each[::-1]):
            part = operation.reduce_scatter(gradients[group.rank])
            assert_same(part, part_of(reduced(gradients, op), layout, group.rank, 3))

    run(work, 3, engine)


def test_default_operation_is_the_sum(group):
    operation = ReduceScatterOperation(group, [4], np.float64, group.rank)
    assert operation.reduce_scatter(np.arange(4.0)).tolist() == [[0.0, 2.0], [4.0, 6.0]][group.rank]


def test_each_result_is_a_new_array():
    operation = ReduceScatterOperation(SingleGroup(), (3,), "float32", 0)
    first = operation.reduce_scatter(np.ones(3, np.float32))
    second = operation.reduce_scatter(np.zeros(3, np.float32))
    assert not np.shares_memory(first, second)
    assert first.tolist() == [1.0] * 3


def test_a_torch_tensor_gives_a_torch_tensor(torch):
    operation = ReduceScatterOperation(SingleGroup(), (2, 2), torch.bfloat16, 0, layout="rows")
    full = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    part = operation.reduce_scatter(full.T)
    assert part.dtype == torch.bfloat16
    assert part.tolist() == [[1.0, 1.0]] * 2
    assert not part.requires_grad
    assert part.data_ptr() != full.data_ptr()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((object(), (2,), "f4", 0), TypeError, "ProcessGroup"),
        ((None, (2,), "f4", 0), TypeError, "ProcessGroup"),
        ((SingleGroup(), (2,), "f4", 1), ValueError, "shard_index 1 is out of range"),
        ((SingleGroup(), (2,), "f4", -1), ValueError, "shard_index must be 0 or more"),
        ((SingleGroup(), (2,), "f4", 0.0), TypeError, "float"),
        ((SingleGroup(), (-2,), "f4", 0), ValueError, "number of shape must be 0 or more, got -2"),
        ((SingleGroup(), (2,), None, 0), TypeError, "dtype must be"),
        ((SingleGroup(), (2,), "f4", 0, "prod"), ValueError, "'prod' is not a valid ReduceOp"),
    ],
)
def test_invalid_operations_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        ReduceScatterOperation(*arguments)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (None, "no gradient"),
        (np.ones(5, np.float32), r"has shape \(5,\), expected \(4,\)"),
        (np.ones((2, 2), np.float32), r"has shape \(2, 2\), expected \(4,\)"),
        (np.ones(4, np.float64), "has dtype float64, expected float32"),
        ([1.0] * 4, "is a list, not an array or tensor"),
        (np.ma.masked_less(np.ones(4, np.float32), 2), "MaskedArray, whose mask has no sum"),
        (np.array([1, np.nan, 1, 1], np.float32), r"NaN or infinite elements \(rank 1: 1\)"),
    ],
)
def test_misshapen_gradient_fails_on_all_ranks(group, bad, text):
    operation = ReduceScatterOperation(group, (4,), "float32", group.rank)
    good = np.ones(4, np.float32)
    with pytest.raises(CollectiveError, match=text) as caught:
        operation.reduce_scatter(bad if group.rank else good)
    assert str(caught.value).startswith(f"reduce_scatter on rank {group.rank}: a gradient was")
    assert (caught.value.name, caught.value.rank) == ("gradient", 1)
    assert operation.reduce_scatter(good).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((4,), "float32", 1, "max"), "settings of FSDP differ .*op=max"),
        (((8,), "float32", 1), r"do not reduce the same .*\(8,\)"),
        (((4,), "float64", 1), "do not reduce the same .*float64"),
    ],
)
def test_operations_that_differ_between_ranks_are_an_error_on_all(group, arguments, text):
    own_arguments = arguments if group.rank else ((4,), "float32", 0)
    operation = ReduceScatterOperation(group, *own_arguments)
    with pytest.raises(CollectiveError, match=text):
        operation.reduce_scatter(np.ones(own_arguments[0], own_arguments[1]))


def test_closed_operation_raises():
    group = SingleGroup()
    with ReduceScatterOperation(group, (2,), "float32", 0) as operation:
        assert operation.reduce_scatter(np.ones(2, np.float32)).tolist() == [1, 1]
    operation.close()
    with pytest.raises(ValueError, match="is closed; make another one"):
        operation.reduce_scatter(np.ones(2, np.float32))
    another = ReduceScatterOperation(group, (2,), "float32", 0)  # the group stays usable
    assert another.reduce_scatter(np.ones(2, np.float32)).tolist() == [1, 1]
    another.close()
