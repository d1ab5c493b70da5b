"""The content of a save: states of modules and optimizers, metadata, step; what is refused."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any, TypeAlias

from ..._common.arguments import check_int
from ..._common.arrays import is_cache, refuse_given_away, refuse_unstorable
from ..._common.backend import backend_of, is_module, is_optimizer
from ..._common.json_values import check_json_values
from ..._sharding.layout import steps_of
from ..._version import __version__
from ...errors import StoreError
from ...state._kind import kind_of
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._backend import CheckpointBackend
from .._sections import OPTIMIZER_STATE
from .._states.collect import (
    NO_STATES,
    NamedStates,
    add_entries,
    check_names,
    take_states,
)
from .._states.containers import rank_part
from .._states.excluded import NONE_EXCLUDED, Excluded
from .._states.modules import metadata_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .._options import SaveOptions
    from .target import SaveTarget

    _Dict: TypeAlias = dict[str, Any] | None
    Dicts: TypeAlias = tuple[_Dict, _Dict, _Dict]

WRITER = f"mlstate {__version__}"
_NO_ARRAYS = (dict, list, tuple, str, bytes, int, float, complex)  # common mistakes


def _torch_states(
    model: Any, optimizer: Any, ranks: int, excluded: Excluded
) -> tuple[Any, Any, Any]:
    """Return the states of a torch module and a torch optimizer, and other values as they are.

    `model`, `optimizer`: the caller's arguments. `ranks`: number of ranks that save. `excluded`:
    states of the optimizer to leave out. The third
    value has the module's entries that are not tensors, {} for other models, and the metadata that
    torch keeps for modules, {} if `model` carries none.
    """
    carried = getattr(model, "_metadata", None)  # only a ``state_dict()`` of torch has it
    others: Any = ({}, {} if carried is None else metadata_of(carried))
    module = model if is_module(model) else None
    if is_optimizer(optimizer):
        states, keywords = backend_of(optimizer, CheckpointBackend).saved_optimizer(
            optimizer, module, ranks, excluded
        )
        optimizer = OptimizerStateDict(**keywords)
        optimizer.update(states)
    if module is not None:
        tensors, *others = backend_of(module, CheckpointBackend).saved_module(module, ranks)
        model = StateDict(tensors)
    return model, optimizer, others


def _place_optimizer(optimizer: Any, states: Any) -> tuple[Any, Any]:
    """Return the optimizer and the named states to save.

    An optimizer that a table of tensors by parameter cannot hold becomes a named state, and so does
    an object with parameter groups that wraps one. Raises ValueError if another state has its name.
    """
    if is_optimizer(optimizer):
        fits = backend_of(optimizer, CheckpointBackend).fits_table(optimizer)
    else:
        names = ("param_groups", "state_dict", "load_state_dict")
        fits = hasattr(optimizer, "keys") or not all(hasattr(optimizer, name) for name in names)
    if fits:
        return optimizer, states
    states = dict(check_names(states or {}))
    if states.setdefault(OPTIMIZER_STATE, optimizer) is not optimizer:
        raise ValueError(
            f"{type(optimizer).__name__} has values beyond tensors by parameter, so it is stored "
            f"as states[{OPTIMIZER_STATE!r}], and another state has this name: rename that one"
        )
    return None, states


def _mapping_of(name: str, state: Any) -> Any:
    """Return the mapping in the argument `name`, or None; raise TypeError for other values.

    `state`: its value, a mapping, None or an object with ``get_state_dict()``.
    """
    if hasattr(state, "get_state_dict"):
        state = state.get_state_dict()
    if state is not None and not hasattr(state, "keys"):
        hint = f"; pass its .{name}" if hasattr(state, "model") else ""
        if isinstance(state, str | os.PathLike):
            hint = f"; mlstate.load(path).{name} is the {name} that a path holds"
        elif isinstance(state, int):
            hint = "; the number of a step is a keyword, step="
        elif is_cache(state):
            hint = '; pass a cache as states={"kv": cache}, which stores its positions too'
        raise TypeError(
            f"{name} must be a mapping of str to arrays, a torch "
            f"{'module' if name == 'model' else 'optimizer'} or something with "
            f"get_state_dict(), got {type(state).__name__}{hint}"
        )
    return state


def states_of(
    model: Any, optimizer: Any, ranks: int = 1, excluded: Excluded = NONE_EXCLUDED
) -> tuple[Any, Any, Any]:
    """Return the states of the arguments: mappings unchanged, torch objects as their states.

    `ranks`: number of ranks that save together; a module that torch sharded over more ranks is
    refused. `excluded`: states to leave out. The third value has a torch module's entries that are
    not tensors, and torch's metadata.
    """
    model, optimizer, others = _torch_states(model, optimizer, ranks, excluded)
    return _mapping_of("model", model), _mapping_of("optimizer", optimizer), others


def check_optimizer(model: Any, optimizer: Any, exclude: Any, ranks: int) -> None:
    """Raise what a save of the optimizer would raise for a value that cannot be stored.

    `model`: its module. `exclude`: as for `save`. `ranks`: number of ranks that save together.
    """
    excluded = Excluded(exclude)
    optimizer, states = _place_optimizer(optimizer, None)
    take_states(states or {}, model, ranks, excluded)
    states_of(model, optimizer, ranks, excluded)


def refuse_empty_save(*states: Any) -> None:
    """Raise ValueError if there is nothing to save."""
    if all(state is None for state in states):
        raise ValueError("nothing to save: give a model, an optimizer, states or several of them")


def _refuse_value(section: str, state: dict[str, Any], name: Any) -> TypeError:
    """Return the TypeError for a value that is not an array, with a hint for the user.

    `section`: its name. `state`: all of it. `name`: of the value.
    """
    value = state[name]
    if is_cache(value):
        hint = (
            f"pass the cache as states={{{name!r}: cache}}, which stores its positions too, or "
            "only its array"
        )
    elif "param_groups" in state and isinstance(state.get("state"), dict):
        hint = "this is a torch optimizer's state_dict(): pass the optimizer itself"
    elif section == "optim_state" and not isinstance(value, dict):
        hint = (
            "pass mlstate.OptimizerStateDict(arrays, step=3, param_groups=[{'lr': 0.1}]), which "
            "holds numbers too"
        )
    elif isinstance(value, dict):
        hint = "states are flat: pass the dict in it as model= or optimizer=, or join the names"
    elif isinstance(value, list | tuple):
        hint = "make an array of it, or keep it in metadata="
    else:
        hint = "pass values that are not arrays as metadata="
    return TypeError(
        f"{section} {name!r} must be a NumPy array or a torch tensor, got "
        f"{type(value).__name__}; {hint}"
    )


def _as_dict(state: Any, section: str, source: Any, ranks: int) -> dict[str, Any] | None:
    """Return the caller's `state` as a new dict, None for None; raise if a value cannot be stored.

    `section`: name for errors. `source`: the caller's object, a module or optimizer or the state.
    `ranks`: number of those that save. DTensors become shards.
    """
    if state is None:
        return None
    arrays = {name: rank_part(value, name, ranks) for name, value in dict(state).items()}
    refuse_given_away(arrays)
    if not is_module(source) and not is_optimizer(source):
        refuse_unstorable(arrays)
    for name, value in arrays.items():  # NumPy scalars have a dtype and count as arrays
        is_array = hasattr(value, "dtype") if isinstance(value, _NO_ARRAYS) else not is_cache(value)
        if value is None or not is_array:
            raise _refuse_value(section, arrays, name)
    return arrays


def _step_of(step: int | None, optimizer: Any, *, is_needed: bool) -> int | None:
    """Return the step to save: the argument, or the one of an `OptimizerStateDict`, or None.

    Raises TypeError for None if a step `is_needed`.
    """
    if step is None and isinstance(optimizer, OptimizerStateDict):
        step = optimizer.step
    if step is None and not is_needed:
        return None
    return check_int("step", step, 0, (1 << 63) - 1, "" if is_needed else " or None")


def _checked_metadata(mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a deep copy of the caller's metadata ({} for None); raise if it is not JSON."""
    import json

    if mapping is not None and not hasattr(mapping, "keys"):
        raise TypeError(f"metadata must be a mapping such as a dict, got {type(mapping).__name__}")
    metadata = {} if mapping is None else dict(mapping)
    if not metadata:
        return metadata
    try:
        check_json_values(metadata, "metadata")
        # also refuses other number classes and too long ints
        return json.loads(json.dumps(metadata, allow_nan=False))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        cls = TypeError if isinstance(error, TypeError) else ValueError
        raise cls(
            f"metadata must be JSON values (strings, numbers, lists, dicts): {error}; states= "
            "stores other values, and objects as their state"
        ) from None


class SaveContent:
    """The content of one rank's save; its arrays are not copied."""

    __slots__ = ("dicts", "entries", "error", "excluded", "header", "named", "step")

    def __init__(
        self,
        dicts: Dicts,
        header: dict[str, Any],
        error: BaseException | None = None,
        named: NamedStates = NO_STATES,
        entries: Iterable[str] = (),
        step: int | None = None,
        excluded: Excluded = NONE_EXCLUDED,
    ) -> None:
        """Keep what one rank saves; the comments describe each attribute."""
        # which ranks must agree on: the caller's, or -2 minus that of an `OptimizerStateDict`
        self.step = step
        # arrays of model, optimizer and named states; `gather_shards` takes and clears them
        self.dicts = dicts
        self.header = header  # description of the state in the manifest
        self.error = error  # why this rank cannot save, if it saves with others
        self.entries = tuple(entries)  # names of a torch module's entries that are not tensors
        self.excluded = excluded  # what is left out; `gather_shards` refuses unused patterns
        self.named = named  # `gather_shards` adds the arrays of its trees to `dicts`


def _refuse_folder_early(target: SaveTarget) -> None:
    """Raise StoreError (EEXIST) for a manager's folder, or another program's, in the caller.

    Other errors are left to the commit.
    """
    if target.keep_root:
        return
    try:
        target.files.refuse_foreign(target.request.overwrite)
        if target.request.overwrite:
            return
        target.files.refuse_steps(target.files.list_roots())
    except StoreError as error:
        if error.errno == errno.EEXIST:
            raise


def take_content(
    target: SaveTarget,
    model: Any,
    optimizer: Any,
    step: int | None,
    options: SaveOptions,
    *,
    in_thread: bool = False,
) -> SaveContent:
    """Return the content of this rank's save, checked, without copying any array.

    `model`, `optimizer`, `step`, `options`: the caller's. `in_thread`: a thread does the rest, so a
    manager's folder is refused here, but not in an object store, because this would delay the
    caller. Errors are raised if this process saves alone; otherwise the result carries them.
    """
    try:
        optimizer, states = _place_optimizer(optimizer, options["states"])
        if in_thread and target.rank == 0 and target.files.folder.is_local:
            _refuse_folder_early(target)
        refuse_empty_save(model, optimizer, states)
        excluded = Excluded(options["exclude"])
        ranks = target.world_size
        named = NO_STATES if states is None else take_states(states, model, ranks, excluded)
        *pair, others = states_of(model, optimizer, ranks, excluded)
        if target.group is None:
            excluded.refuse_unused([excluded.used])
        refuse_empty_save(*pair, states)
        if any(others):
            named = add_entries(named, None, others)
        for state, stored in target.request.entries.items():
            named = add_entries(named, state, stored)
        params = _as_dict(pair[0], "params", model, ranks)
        dicts = (params, _as_dict(pair[1], "optim_state", optimizer, ranks), named.arrays)
        header = {
            "writer": WRITER,
            "step": _step_of(step, pair[1], is_needed=target.keep_root),
            "world_size": target.world_size,
            "model": kind_of(pair[0]),
            "optimizer": kind_of(pair[1]),
            "metadata": _checked_metadata(options["metadata"]),
            "states": named.kinds or None,
            "quantization_config": target.request.quantization_config,
            "exclude": excluded.patterns or None,
        }
        if target.layout is not None:
            steps_of(target.layout, 1)
    except BaseException as error:
        if target.group is None:
            raise
        return SaveContent((None, None, None), {}, error)
    # torch's steps are computed from the states, which ranks may have of different parameters
    if step is None and isinstance(pair[1], OptimizerStateDict) and not is_optimizer(optimizer):
        step = -2 - pair[1].step
    return SaveContent(dicts, header, None, named, others[0], step, excluded)
