"""Checks of plain arguments: other types are refused, with the parameter's name."""

import ml_dtypes
import numpy as np
import pytest

from mlstate._common.arguments import check_int, check_number


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.int8(2), np.float16(2), np.longdouble(2), np.array(2.0), ml_dtypes.bfloat16(2)],
)
def test_real_numbers_are_accepted(value):
    assert check_number("rate", value) == 2.0


@pytest.mark.parametrize(
    "value",
    [
        "2",
        np.str_("2"),
        np.bytes_(b"2"),
        np.complex64(2),
        np.timedelta64(2, "s"),
        True,
        np.array(True),
    ],
)
def test_texts_complex_numbers_and_bools_are_no_numbers(value):
    with pytest.raises(TypeError, match="rate must be a number, got"):
        check_number("rate", value)


def test_an_int_beyond_the_range_of_a_float_is_refused_by_name():
    with pytest.raises(ValueError, match="rate is beyond the range of a float"):
        check_number("rate", 10**400)


def test_tensors_of_bools_and_complex_numbers_are_refused():
    torch = pytest.importorskip("torch")
    assert check_number("rate", torch.tensor(2.0, dtype=torch.bfloat16)) == 2.0
    assert check_int("count", torch.tensor(2), 0) == 2
    for value in (torch.tensor(True), torch.tensor(2 + 0j)):
        with pytest.raises(TypeError, match="rate must be a number, got Tensor"):
            check_number("rate", value)
    with pytest.raises(TypeError, match="count must be an int, got Tensor"):
        check_int("count", torch.tensor(True), 0)


def test_numbers_of_mlx_are_numbers():
    mx = pytest.importorskip("mlx.core")
    assert check_number("rate", mx.array(0.5)) == 0.5
    with pytest.raises(TypeError, match="rate must be a number, got array"):
        check_number("rate", mx.array(True))
