"""A Lightning checkpoint (dict) as a folder of mlstate and as ``.ckpt``: entries, exact types.

In a folder, the tensors of ``state_dict`` are the model. The named state ``lightning`` holds all
other entries. The named state ``lightning_module`` holds what else belongs to ``state_dict``: the
order of its names, its ``_metadata``, with the version of each module, and entries that are not
tensors. Any other state becomes a checkpoint whose entries have the names of its parts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._common.arrays import is_torch
from ..._common.atomic_file import replacing
from ..._common.backend import torch_backend
from ..._common.caller import find_caller
from ...errors import CompatibilityError
from .._files.backend import PtBackend
from .._states.generators import library_of
from .entries import LISTED, find_unreadable, is_optimizer, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..._common.atomic_file import Target
    from .._files.parts import Parts
    from .._loaded_state import LoadedState

STATE = "lightning"
_MODULE = "lightning_module"
_VERSION = "pytorch-lightning_version"
_HEAD = {_VERSION: "2.0.0", "epoch": 0}  # entries that Lightning requires, of this version
_MODEL, _SCHEDULERS, _LOOPS = "state_dict", "lr_schedulers", "loops"
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_EXACT = (*_CONTAINERS, OrderedDict, Counter)


def _refuse_inexact(value: Any, where: str) -> None:
    """Raise TypeError for a value that would be loaded as another class.

    `where`: path of the value, for the error. The tree of named states stores a subclass of dict as
    a dict, a parameter as a tensor, and modules and generators as their states.
    """
    remedy = ""
    if isinstance(value, _CONTAINERS) and type(value) not in _EXACT:
        remedy = "store a dict, list, tuple or set instead"
    elif is_torch(value) and value.requires_grad:
        remedy = "store a detached tensor instead"
    elif callable(getattr(value, "state_dict", None)) or library_of(value) is not None:
        remedy = "leave it out, as save_hyperparameters(ignore=[name]) does, or store its state"
    if remedy:
        cls = type(value)
        raise TypeError(
            f"{where} is a {cls.__module__}.{cls.__qualname__}, which cannot be stored without "
            f"pickle: {remedy}"
        )
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_inexact(inner, f"{where}[{key!r}]")
    elif isinstance(value, _CONTAINERS):
        for number, inner in enumerate(value):
            _refuse_inexact(inner, f"{where}[{number}]")


def split_checkpoint(
    checkpoint: Mapping[str, Any], *, exact: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Return the model of a checkpoint of Lightning, a dict, or None, and the named states.

    `exact`: raise TypeError for a value that would be loaded as another class.
    """
    rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
    if exact:
        _refuse_inexact(rest, f"states[{STATE!r}]")
    states: dict[str, Any] = {STATE: rest}
    model = checkpoint.get("state_dict")
    if model is not None:
        other = {name: value for name, value in model.items() if not is_torch(value)}
        if exact:
            _refuse_inexact(other, "state_dict")
        metadata = getattr(model, "_metadata", None)
        states[_MODULE] = {"metadata": metadata, "other": other, "names": list(model)}
        model = {name: value for name, value in model.items() if name not in other}
    return model, states


def checkpoint_of(loaded: LoadedState) -> dict[str, Any]:
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


def with_order(parts: Parts) -> Parts:
    """Return the parts without an optimizer that tells no order of its parameters; warn of it."""
    if parts.optimizer is None or parts.optimizer.param_groups:
        return parts
    find_caller().warn(
        "the optimizer is not converted: Lightning numbers its parameters in the order of its "
        "groups, and it has none"
    )
    return parts._replace(optimizer=None)


def checkpoint_from(parts: Parts, where: object) -> dict[str, Any]:
    """Return Lightning's checkpoint, a dict, of any other state that `with_order` returns.

    Its entries are the metadata and the named states, by name. With an optimizer, a Trainer resumes
    at its step, at the start of an epoch. Warns of states that Lightning does not restore. Raises
    CompatibilityError without a model, ValueError for two entries of one name. `where`: the path.
    """
    if parts.model is None:
        raise CompatibilityError(f"{where}: a checkpoint of Lightning needs a model")
    if STATE in parts.states:
        raise CompatibilityError(
            f"{where}: a folder of MLStateCheckpointIO is converted as a whole: convert it without "
            "other options, and then the file with them"
        )
    step = parts.step or 0
    entries = torch_backend("files of Lightning", PtBackend).entries_of(parts, numbered=True)
    checkpoint = {_MODEL: entries.pop("model")}
    keys = ["optimizer", *(f"optimizer_{number}" for number in range(len(entries)))]
    optimizers = [entries.pop(key) for key in keys if is_optimizer(entries.get(key))]
    resumed: dict[str, Any] = {}
    if optimizers:
        checkpoint[LISTED] = optimizers
        schedulers = [key for key in entries if _is_scheduler(entries[key])]
        resumed = {_LOOPS: _loops_at(step), _SCHEDULERS: [entries.pop(key) for key in schedulers]}
    metadata = {key: each for key, each in parts.metadata.items() if (key, each) != ("step", step)}
    both = (metadata.keys() & entries.keys()) | (checkpoint.keys() & {*metadata, *entries})
    if both:
        raise ValueError(
            f"{where}: two entries have the name {min(both)!r}: leave one out (--skip)"
        )
    if _VERSION not in metadata:  # else Lightning has written them
        _warn_of_rest(entries, resumed)
    return {**_HEAD, "global_step": step, **resumed, **metadata, **entries, **checkpoint}


def _is_scheduler(state: Any) -> bool:
    return isinstance(state, dict) and "last_epoch" in state


def _warn_of_rest(entries: Mapping[str, Any], resumed: Mapping[str, Any]) -> None:
    """Warn of what a Trainer that resumes does not restore; `resumed`: its entries for that."""
    if left := sorted(entries.keys() - {"callbacks", "hyper_parameters", _LOOPS, _SCHEDULERS}):
        find_caller().warn(
            f"Lightning does not restore these entries of the file itself: {', '.join(left)}; a "
            "module's on_load_checkpoint gets them"
        )
    if resumed and not {**resumed, **entries}[_SCHEDULERS]:
        find_caller().warn(
            "the source has no state of a learning rate scheduler: a Trainer that resumes starts "
            "its schedulers anew"
        )


def _loops_at(step: int) -> dict[str, Any]:
    """Return the entry of Lightning's loops for a Trainer that continues after `step` steps.

    It starts an epoch, because no other program stores the position in one.
    """
    count = {"ready": step, "completed": step}
    progress = {"total": count, "current": count}
    started = {**count, "started": step}
    zero_grad = {"total": started, "current": started}
    prefix = "epoch_loop."
    fit = {
        f"{prefix}state_dict": {"_batches_that_stepped": step},
        f"{prefix}automatic_optimization.optim_progress": {
            "optimizer": {"step": progress, "zero_grad": zero_grad}
        },
        f"{prefix}manual_optimization.optim_step_progress": progress,
    }
    return {"fit_loop": fit, "validate_loop": {}, "test_loop": {}, "predict_loop": {}}


def read_ckpt(path: Path, *, is_whole: bool = True) -> dict[str, Any]:
    """Read a ``.ckpt`` file of Lightning without running code from it.

    Raises CompatibilityError if it has no ``state_dict``, or, if `is_whole`, a value of another
    class than plain ones.
    """
    checkpoint = torch_backend("files of Lightning", PtBackend).read_tree(path)
    is_needed = is_whole or not isinstance(checkpoint, dict)
    if is_needed and (reason := find_unreadable(checkpoint)):
        raise refusal(path, f"holds {reason}")
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise CompatibilityError(f"{path} holds no checkpoint of Lightning: it has no 'state_dict'")
    return checkpoint


def write_ckpt(target: Target, checkpoint: dict[str, object]) -> None:
    """Write a ``.ckpt`` file that Lightning loads without mlstate, atomically."""
    backend = torch_backend("files of Lightning", PtBackend)
    with replacing(target.path, target) as file:
        backend.write_tree(checkpoint, file)


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
