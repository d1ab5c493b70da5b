"""Division of items into batches of few bytes."""

from mlstate._common.batches import batches_of


def test_items_fill_batches_in_order_and_a_larger_one_is_alone():
    assert [*batches_of([3, 4, 9, 1, 2, 3], int, 7)] == [[3, 4], [9], [1, 2, 3]]
    assert [*batches_of([1, 1, 1], int, 7, 2)] == [[1, 1], [1]]
    assert [*batches_of([], int, 7)] == []
