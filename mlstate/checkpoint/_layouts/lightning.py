"""A Lightning checkpoint (dict) in a ``.ckpt`` file and in a folder of mlstate: exact types.

In a folder, the tensors of ``state_dict`` are the model. The named state ``lightning`` holds all
other entries. The named state ``lightning_module`` holds what else belongs to ``state_dict``: the
order of its names, its ``_metadata``, with the version of each module, and entries that are not
tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.arrays import is_torch
from ..._common.backend import torch_backend
from ...errors import CompatibilityError
from .._files.backend import PtBackend
from .._states.tree import encode
from .entries import find_unreadable, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._files.parts import Parts
    from .._loaded_state import LoadedState

STATE = "lightning"
_MODULE = "lightning_module"


def split_checkpoint(
    checkpoint: Mapping[str, Any], *, exact: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Return the model of a checkpoint of Lightning, a dict, or None, and the named states.

    `exact`: raise TypeError for a value that would be loaded as another class.
    """
    rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
    if exact:
        encode(rest, f"states[{STATE!r}]", exact=True, records=False)
    states: dict[str, Any] = {STATE: rest}
    model = checkpoint.get("state_dict")
    if model is not None:
        other = {name: value for name, value in model.items() if not is_torch(value)}
        if exact:
            encode(other, "state_dict", exact=True, records=False)
        metadata = getattr(model, "_metadata", None)
        states[_MODULE] = {"metadata": metadata, "other": other, "names": list(model)}
        model = {name: value for name, value in model.items() if name not in other}
    return model, states


def checkpoint_of(loaded: LoadedState | Parts) -> dict[str, Any]:
    """Return Lightning's checkpoint, a dict, from a loaded folder that `split_checkpoint` filled.

    Its ``state_dict`` has the names in the order that `save_checkpoint` recorded.
    """
    checkpoint = dict(loaded.states[STATE])
    if loaded.model is None:
        return checkpoint
    tensors = dict(loaded.model)
    module = loaded.states.get(_MODULE)
    if module is None:  # written by an older version
        return {**checkpoint, "state_dict": tensors}
    tensors |= module["other"]
    model = OrderedDict((name, tensors[name]) for name in module["names"])
    if module["metadata"] is not None:
        model._metadata = module["metadata"]  # type: ignore[attr-defined]
    return {**checkpoint, "state_dict": model}


def read_ckpt(path: Path, *, is_whole: bool = True) -> dict[str, Any]:
    """Read a ``.ckpt`` file of Lightning without running code from it.

    Raises CompatibilityError if it has no ``state_dict``, or, if `is_whole`, a value of another
    class than plain ones.
    """
    checkpoint = torch_backend("files of Lightning", PtBackend).read_tree(path)
    is_ckpt = isinstance(checkpoint, dict) and isinstance(checkpoint.get("state_dict"), dict)
    if (is_whole or not is_ckpt) and (reason := find_unreadable(checkpoint)):
        raise refusal(path, f"holds {reason}")
    if not is_ckpt:
        raise CompatibilityError(f"{path} holds no checkpoint of Lightning: it has no 'state_dict'")
    return checkpoint  # type: ignore[no-any-return]


def is_lightning(path: str) -> bool:
    """Return whether a file of torch is a checkpoint of Lightning.

    Without Lightning's version, a ``.ckpt`` is one if it has a ``state_dict``. False for damaged
    files: reading them reports this.
    """
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            pickled = archive.read(names[0]) if names else b""
    except Exception:  # each codec raises its own class, such as zlib.error
        return False
    is_named = path.endswith(".ckpt") and b"state_dict" in pickled
    return is_named or b"pytorch-lightning_version" in pickled
