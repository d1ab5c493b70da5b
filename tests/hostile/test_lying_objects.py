"""Objects that misreport themselves cause an exception at worst."""

import numpy as np
import pytest

import mlstate
from mlstate import StateDict
from mlstate.state import diff


class Liar:
    """Reports one shape and dtype, and exports the memory of another array."""

    def __init__(self, says, has):
        self.shape, self.dtype, self.nbytes = says.shape, says.dtype, says.nbytes
        self.has = has

    def __dlpack__(self, **options):
        return self.has.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.has.__dlpack_device__()


@pytest.mark.parametrize("has", [np.zeros(1), np.zeros((1, 1)), np.zeros(1000, np.float32)])
def test_memory_overrides_stated_attributes(has):
    honest = np.zeros(1000)
    state = {"w": Liar(honest, has)}
    for compare in (
        lambda: diff(state, {"w": honest}),
        lambda: diff({"w": honest}, state),
        lambda: StateDict(state) == StateDict(w=honest),
    ):
        with pytest.raises(mlstate.CompatibilityError) as caught:
            compare()
        assert caught.value.name == "w"


def test_class_returning_another_object_is_refused():
    class Odd(StateDict):
        made = None

        def __new__(cls, *args, **kwargs):
            return Odd.made if Odd.made is not None else super().__new__(cls)

    state = Odd({"w": np.ones(2)})
    for Odd.made in ({}, [], 3, StateDict(x=np.ones(1))):
        for copy in (state.copy, lambda: state | {}, lambda: {} | state):
            with pytest.raises(TypeError, match="must give an empty state dict"):
                copy()
