"""A checkpoint of Lightning, a dict, from any state: its entries have the names of the parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._common.backend import torch_backend
from ..._common.caller import find_caller
from ...errors import CompatibilityError
from .._files.backend import PtBackend
from .._layouts.entries import LISTED, is_optimizer
from .._layouts.lightning import STATE, checkpoint_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._files.parts import Parts

_VERSION = "pytorch-lightning_version"
_HEAD = {_VERSION: "2.0.0", "epoch": 0}  # entries that Lightning requires, of this version
_MODEL, _SCHEDULERS, _LOOPS = "state_dict", "lr_schedulers", "loops"


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
    """Return Lightning's checkpoint, a dict, of a state that `with_order` returns.

    A state of `split_checkpoint` becomes the checkpoint that this got. Of any other, the entries
    are the metadata and the named states, by name. With an optimizer, a Trainer resumes at its
    step, at the start of an epoch. Warns of states that Lightning does not restore. Raises
    CompatibilityError without a model, ValueError for two entries of one name. `where`: the path.
    """
    if parts.model is None:
        raise CompatibilityError(f"{where}: a checkpoint of Lightning needs a model")
    if STATE in parts.states:
        return checkpoint_of(parts)
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
