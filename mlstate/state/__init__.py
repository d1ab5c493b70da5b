"""State dicts: named arrays, checked, compared and loaded.

`StateDict` is a dict of arrays and keeps them as they are. `ModelStateDict` adds access by
layer, `OptimizerStateDict` access by parameter. Every function here accepts any mapping of str
to array.

Examples
--------
>>> import numpy as np
>>> from mlstate.state import ModelStateDict, check_compatibility, load_into, rename
>>> model = ModelStateDict({"fc.weight": np.zeros((2, 3)), "fc.bias": np.zeros(2)})
>>> saved = {"module.fc.weight": np.ones((2, 3)), "module.fc.bias": np.ones(2)}
>>> check_compatibility(saved, model).renames
{'module.': ''}
>>> load_into(model, rename(saved, {"module.": ""}))
>>> model.get_layer_state("fc")["bias"]
array([1., 1.])
"""

from .._common.set_module import set_module_of_exports
from .._exports import show_exports
from . import records
from ._compatibility import (
    CompatibilityResult,
    check_compatibility,
    get_missing_keys,
    get_unexpected_keys,
    keys_match,
    shapes_match,
)
from ._diff import diff
from ._digest import Digest
from ._load_into import load_into, rename
from ._optimizer_state import OptimizerStateDict, OptimizerType
from ._state_dict import ModelStateDict, StateDict, Stateful

__all__ = [
    "CompatibilityResult",
    "Digest",
    "ModelStateDict",
    "OptimizerStateDict",
    "OptimizerType",
    "StateDict",
    "Stateful",
    "check_compatibility",
    "diff",
    "get_missing_keys",
    "get_unexpected_keys",
    "keys_match",
    "load_into",
    "records",
    "rename",
    "shapes_match",
]

set_module_of_exports(globals())
show_exports(globals())
