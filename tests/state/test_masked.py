"""Masked arrays are refused by their type, other classes with a mask are not."""

import numpy as np
import pytest

from mlstate import StateDict
from mlstate.state import diff, load_into


class PropertyMask(np.ndarray):
    mask = property(lambda array: array > 0)


class NoMask(np.ndarray):
    mask = None


class OwnMasked(np.ma.MaskedArray):
    pass


@pytest.mark.parametrize("cls", [PropertyMask, NoMask])
def test_a_subclass_with_an_attribute_mask_is_an_array(cls):
    target, source = (np.full(3, value).view(cls) for value in (0.0, 1.0))
    load_into({"w": target}, {"w": source})
    assert target.tolist() == [1, 1, 1]
    assert StateDict(w=target) == StateDict(w=source)
    assert diff({"w": target}, {"w": source}).unchanged == 1
    assert StateDict(w=target).digest() == StateDict(w=np.ones(3)).digest()


@pytest.mark.parametrize("cls", [np.ma.MaskedArray, OwnMasked])
def test_a_masked_array_of_any_class_is_refused(cls):
    masked = np.ma.array(np.ones(2), mask=[True, False]).view(cls)
    for call in (
        lambda: load_into({"w": masked}, {"w": np.ones(2)}),
        lambda: load_into({"w": np.ones(2)}, {"w": masked}),
        lambda: diff({"w": masked}, {"w": np.ones(2)}),
        lambda: StateDict(w=masked).digest(),
    ):
        with pytest.raises(TypeError, match="is a masked array"):
            call()
