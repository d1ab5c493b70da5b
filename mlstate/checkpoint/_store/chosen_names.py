"""The tensors that `names=` chooses, and the error for a name without one."""

from __future__ import annotations

from itertools import chain

from ..._common.text import names_hint
from ...errors import TensorNotFoundError
from .name_globs import ALL_NAMES, Names
from .weight_files import WeightFiles, listed_only_error


def chosen_names(
    sections: list[list[str]],
    listed: list[str] | None,
    folder: str,
    weights: WeightFiles | None = None,
    is_renamed: bool = False,
) -> tuple[Names, list[list[str]]]:
    """Return the name matcher and, for model and optimizer, the names to load.

    `sections`: all names of both. `listed`: names or globs of the caller, None for all; raises
    TensorNotFoundError for one without a match. `folder`: path for errors. `weights`: of a Hugging
    Face folder. `is_renamed`: the names in `sections` are new ones, which the index of `weights`
    lacks.
    """
    if listed is None:
        return ALL_NAMES, sections
    names = Names(listed, *sections)
    chosen = []
    used: set[str] = set()
    for section, every in enumerate(sections):
        keys, meant = names.select(every, section)
        chosen.append(keys)
        used |= meant
    unused = [name for name in listed if name not in used]
    if unused:
        listed_only = listed_only_error(None if is_renamed else weights, unused[0], folder)
        if listed_only is not None:
            raise listed_only
        hint = names_hint(unused[0], chain.from_iterable(sections))
        hint += "; names= takes the names after rename=" if is_renamed else ""
        text = f"Tensor {unused[0]!r} not found in checkpoint{hint}"
        raise TensorNotFoundError(text, name=unused[0], path=folder)
    return names, chosen
