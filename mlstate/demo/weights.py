"""The demo's second part: the model's weights as a state dict.

A checkpoint of the same model has other names, as after saving a wrapped model. It is compared,
renamed and loaded into an untrained model. Then a checkpoint with wrong shapes is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..checkpoint import load_file
from ..errors import CompatibilityError
from ..state import ModelStateDict, check_compatibility, diff, load_into, rename
from . import verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Loaded", "show_weights"]


class Loaded(NamedTuple):
    """Results of the state dict part."""

    state: ModelStateDict  # the model's weights after loading
    refused: str  # the error about the damaged checkpoint
    untouched: bool  # whether all bits of the weights were unchanged after the error


def show_weights(path: Path, say: Callable[[str], None]) -> Loaded:
    """Load a checkpoint with other names after renaming them, and refuse one with other shapes.

    `path`: of the model's safetensors file. `say` is called with each text of the output.
    """
    trained = ModelStateDict(load_file(path), model_type="character model", layer_count=4)
    names = trained.layer_names(2)
    say(f"\n8. State dict: {len(trained)} tensors, {trained.nbytes / 1024:.0f} KiB, {names}")
    for line in repr(trained.get_layer_state("layers.3")).splitlines():
        say(f"   {line}")

    wrapped = rename(trained, {"": "module."})
    model = ModelStateDict((name, np.zeros_like(array)) for name, array in trained.items())
    say("\n9. A wrapper renamed the checkpoint; an untrained model is to load it")
    compatibility = check_compatibility(wrapped, model)
    say(f"   proposed: rename(source, {compatibility.renames!r})")
    load_into(model, rename(wrapped, compatibility.renames))
    say(f"   after load_into: {diff(trained, model)}")

    say("\n10. One tensor of another shape, and nothing is written")
    damaged = trained.copy()
    damaged["layers.2.out.weight"] = np.zeros((64, 32), np.float16)
    damaged["embed.weight"] = np.ones((96, 64), np.float16)
    before = model.digest()
    try:
        load_into(model, damaged)
    except CompatibilityError as error:
        refused = str(error)
    else:
        raise AssertionError("a checkpoint with another shape was loaded")
    for line in refused.splitlines():
        say(f"   {line.strip()}")
    untouched = model.digest() == before
    say(f"   digest of the model before and after: {verdict(untouched, 'the same')}")
    return Loaded(model, refused, untouched)
