"""`save`: checks of arguments and values, this rank's shards, copies from devices to memory.

    save -> check_target       the arguments -> SaveTarget
         -> take_content       the states, checked but not copied -> SaveContent
         -> gather_shards      this rank's shards -> GatheredShards
         -> write_and_commit   see commit.py -> RootPath, of the saved root

Each step takes the result of the step before. If several ranks save together, an error on one rank
is carried to the next exchange of messages, where the other ranks wait.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ... import _core
from ..._common.arguments import check_int
from ..._common.arrays import is_cache, named_refusals, refuse_given_away, refuse_unstorable
from ..._common.backend import backend_of, is_module, is_optimizer
from ..._common.budget import parse_size
from ..._common.caller import Caller, find_caller
from ..._common.json_values import check_json_values
from ..._sharding.layout import Layout, Shard, Steps, steps_of
from ..._version import __version__
from ...collectives._arguments import optional_group
from ...errors import CollectiveError, StoreError
from ...state._kind import kind_of
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._backend import CheckpointBackend
from .._checkpoint.checkpoint import Checkpoint
from .._options import PACK_BELOW_MOST, SAVE_DEFAULTS, complete_save_options, show_options
from .._states.collect import NO_STATES, NamedStates, add_entries, take_states
from .._states.modules import metadata_of
from .._store.checkpoint_files import CheckpointFiles
from .._store.open_path import RootPath, open_target
from .commit import write_and_commit
from .replica_assignment import Assignment, assign_replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Unpack

    from ...collectives import ProcessGroup
    from .._folder.protocol import Claim
    from .._options import SaveOptions
    from .._store.checkpoint_files import FolderContent
    from .._store.manifest import Manifest
    from .job import SaveHandle

    _Dict: TypeAlias = dict[str, Any] | None
    _Dicts: TypeAlias = tuple[_Dict, _Dict, _Dict]

WRITER = f"mlstate {__version__}"
_NO_ARRAYS = (dict, list, tuple, str, bytes, int, float, complex)  # common mistakes


# ---- target and options ----


class SaveFolder(NamedTuple):
    """A folder with internal options; such callers pass it as the path of a save."""

    folder: str | os.PathLike[str]
    # Called after the commit with the new manifest. It deletes old roots and returns the
    # manifests of the remaining roots, by their paths in the folder.
    retain: Callable[[Manifest], Mapping[str, Manifest]] | None = None
    replace_steps: bool = False  # replace all steps of a manager by this checkpoint
    content: FolderContent | None = None  # if given, only this is replaced
    any_suffix: bool = False  # the caller's program chooses the name
    # entries of modules that are not tensors, and torch's metadata, by name of the state or None
    entries: Mapping[str | None, tuple[Any, Any]] = MappingProxyType({})
    started: Callable[[SaveHandle], object] | None = None  # called before `save_async` starts

    def __fspath__(self) -> str:
        return os.fspath(self.folder)


class WriteOptions(NamedTuple):
    """The options of `save` that `_core.shards_write` takes."""

    pack_below_bytes: int
    sparse: bool
    incremental: bool
    compress: str | None  # name of a codec


class SaveTarget(NamedTuple):
    """The checked arguments of `save` that describe where and how to save."""

    files: CheckpointFiles
    claim: Claim  # not yet acquired; only rank 0 acquires it
    group: ProcessGroup | None  # None if this process saves alone
    rank: int
    world_size: int
    layout: Layout | str | None  # for arrays that are not a `Shard`
    write_options: WriteOptions
    keep_root: bool  # keep the root under roots/, as `CheckpointManager` does
    replace_steps: bool
    content: FolderContent | None  # as of `SaveFolder`
    entries: Mapping[str | None, tuple[Any, Any]]  # as of `SaveFolder`
    retain: Callable[[Manifest], Mapping[str, Manifest]] | None  # as of `SaveFolder`
    started: Callable[[SaveHandle], object] | None
    caller: Caller

    @property
    def path(self) -> str:
        """Absolute path of the folder, or its URL."""
        return self.files.path


def delete_all_roots(files: CheckpointFiles, newest: Manifest) -> dict[str, Manifest]:
    """Delete all steps of a manager's folder after `newest` has replaced them."""
    files.delete_roots(files.list_roots())
    return {}


def check_target(
    path: str | os.PathLike[str],
    options: SaveOptions,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveTarget:
    """Check the arguments and return where and how to save; the claim is not acquired yet.

    `path` may be a `SaveFolder`, of a manager. `options` has all keywords, as
    `complete_save_options` returns them. Raises TypeError or ValueError for a wrong argument.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            "the path of a checkpoint must be a str or os.PathLike, got "
            f"{type(path).__name__}; it comes first: save(path, model, optimizer)"
        )
    save_folder = path if isinstance(path, SaveFolder) else SaveFolder(path)
    folder = open_target(save_folder.folder, storage_options, any_suffix=save_folder.any_suffix)
    claim = folder.claim(options["lock_timeout"])
    if options["incremental"]:
        folder.require_local("incremental=True", "save whole shards")
    files = CheckpointFiles(folder)
    rank, world_size = 0, 1
    group = optional_group(options["group"])
    pack_below = parse_size("pack_below_bytes", options["pack_below_bytes"], 0, PACK_BELOW_MOST)
    is_sparse, is_incremental = bool(options["sparse"]), bool(options["incremental"])
    if group is not None:
        rank, world_size = group.rank, group.world_size
    return SaveTarget(
        files=files,
        claim=claim,
        group=None if world_size == 1 else group,
        rank=rank,
        world_size=world_size,
        layout=options["layout"],
        write_options=WriteOptions(pack_below, is_sparse, is_incremental, options["compress"]),
        keep_root=save_folder.retain is not None,
        replace_steps=save_folder.replace_steps,
        content=save_folder.content,
        entries=save_folder.entries,
        retain=partial(delete_all_roots, files)
        if save_folder.replace_steps
        else save_folder.retain,
        started=save_folder.started,
        caller=find_caller(),
    )


# ---- content ----


def _array_of(value: Any) -> Any:
    return value.array if isinstance(value, Shard) else value


def is_on_device(value: Any) -> bool:
    """Return whether a value is a torch tensor, or a Shard of one, outside main memory."""
    return getattr(getattr(_array_of(value), "device", None), "type", "cpu") != "cpu"


def _on_host(name: str, value: Any, copy: Callable[[Any], Any] | None) -> Any:
    """Return a copy of a device tensor in main memory; a `Shard` stays one, of the tier "hot".

    `name`: for errors. `copy`: copies to memory that it provides; None: newly allocated memory.
    Raises BufferError for torch's meta device.
    """
    array = _array_of(value)
    if array.device.type == "meta":
        raise BufferError(f"{name!r} is a tensor on torch's meta device: it has no elements")
    copied = array.detach().cpu() if copy is None else copy(array.detach())
    if not isinstance(value, Shard):
        return copied
    return value._with_array(copied, value.tier or "hot")


def _torch_states(model: Any, optimizer: Any, ranks: int) -> tuple[Any, Any, Any]:
    """Return the states of a torch module and a torch optimizer, and other values as they are.

    `model`, `optimizer`: the caller's arguments. `ranks`: number of ranks that save. The third
    value has the module's entries that are not tensors, {} for other models, and the metadata that
    torch keeps for modules, {} if `model` carries none.
    """
    carried = getattr(model, "_metadata", None)  # only a ``state_dict()`` of torch has it
    others: Any = ({}, {} if carried is None else metadata_of(carried))
    module = model if is_module(model) else None
    if is_optimizer(optimizer):
        states, keywords = backend_of(optimizer, CheckpointBackend).saved_optimizer(
            optimizer, module, ranks
        )
        optimizer = OptimizerStateDict(**keywords)
        optimizer.update(states)
    if module is not None:
        tensors, *others = backend_of(module, CheckpointBackend).saved_module(module, ranks)
        model = StateDict(tensors)
    return model, optimizer, others


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
        elif is_cache(state):
            hint = '; pass a cache as states={"kv": cache}, which stores its positions too'
        raise TypeError(
            f"{name} must be a mapping of str to arrays, a torch "
            f"{'module' if name == 'model' else 'optimizer'} or something with "
            f"get_state_dict(), got {type(state).__name__}{hint}"
        )
    return state


def states_of(model: Any, optimizer: Any, ranks: int = 1) -> tuple[Any, Any, Any]:
    """Return the states of the arguments: mappings unchanged, torch objects as their states.

    `ranks`: number of ranks that save together; a module that torch sharded over more ranks is
    refused. The third value has a torch module's entries that are not tensors, and torch's
    metadata.
    """
    model, optimizer, others = _torch_states(model, optimizer, ranks)
    return _mapping_of("model", model), _mapping_of("optimizer", optimizer), others


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
    elif isinstance(value, dict) and "param_groups" in state:
        hint = "this is a torch optimizer's state_dict(): pass the optimizer itself"
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


def _as_dict(state: Any, section: str, source: Any) -> dict[str, Any] | None:
    """Return the caller's `state` as a new dict, None for None; raise if a value cannot be stored.

    `section`: name for errors. `source`: the caller's object, a module or optimizer or the state.
    """
    if state is None:
        return None
    arrays = dict(state)
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
            f"metadata must be JSON values (strings, numbers, lists, dicts): {error}"
        ) from None


class SaveContent:
    """The content of one rank's save; its arrays are not copied."""

    __slots__ = ("dicts", "entries", "error", "header", "named", "step")

    def __init__(
        self,
        dicts: _Dicts,
        header: dict[str, Any],
        error: BaseException | None = None,
        named: NamedStates = NO_STATES,
        entries: Iterable[str] = (),
        step: int | None = None,
    ) -> None:
        """Keep what one rank saves; the comments describe each attribute."""
        # which ranks must agree on: the caller's, or -2 minus that of an `OptimizerStateDict`
        self.step = step
        # arrays of model, optimizer and named states; `gather_shards` takes and clears them
        self.dicts = dicts
        self.header = header  # description of the state in the manifest
        self.error = error  # why this rank cannot save, if it saves with others
        self.entries = tuple(entries)  # names of a torch module's entries that are not tensors
        self.named = named  # `gather_shards` adds the arrays of its trees to `dicts`


def _refuse_manager_folder_early(target: SaveTarget) -> None:
    """Raise StoreError (EEXIST) if the folder is a manager's, before the thread starts.

    Other errors are left to the commit.
    """
    if target.keep_root or target.replace_steps:
        return
    try:
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
    states = options["states"]
    try:
        if in_thread and target.rank == 0 and target.files.folder.is_local:
            _refuse_manager_folder_early(target)
        refuse_empty_save(model, optimizer, states)
        named = NO_STATES if states is None else take_states(states, model, target.world_size)
        *pair, others = states_of(model, optimizer, target.world_size)
        refuse_empty_save(*pair, states)
        if any(others):
            named = add_entries(named, None, others)
        for state, stored in target.entries.items():
            named = add_entries(named, state, stored)
        params = _as_dict(pair[0], "params", model)
        dicts = (params, _as_dict(pair[1], "optim_state", optimizer), named.arrays)
        header = {
            "writer": WRITER,
            "step": _step_of(step, pair[1], is_needed=target.keep_root),
            "world_size": target.world_size,
            "model": kind_of(pair[0]),
            "optimizer": kind_of(pair[1]),
            "metadata": _checked_metadata(options["metadata"]),
            "states": named.kinds or None,
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
    return SaveContent(dicts, header, None, named, others[0], step)


# ---- the shards that this rank writes ----


class GatheredShards:
    """The shards that one rank writes, before they are written."""

    __slots__ = ("copies", "error", "header", "nbytes", "shards")

    def __init__(self, header: dict[str, Any], copies: bytes = b"") -> None:
        """Create the result without shards; the comments describe each attribute."""
        self.header = header  # description of the state in the manifest
        self.copies = copies  # names of shards that another rank must store, if to be reported
        self.shards: Any = None  # of `_core.shards_collect`; `write_and_commit` consumes them
        self.nbytes = 0
        self.error: BaseException | None = None  # why this rank cannot save with the others

    def fail(self, error: BaseException) -> None:
        """Drop the shards and keep the error; the next exchange reports it to other ranks."""
        self.shards = None
        self.error = error


def gather_shards(
    target: SaveTarget, content: SaveContent, copy: Callable[[Any], Any] | None = None
) -> GatheredShards:
    """Return the shards that this rank stores; every rank calls it, even after a failure.

    `copy` copies tensors on a device to main memory; None: to new memory. `content` loses its
    arrays. Errors are raised if this process saves alone; otherwise the result carries them, except
    a CollectiveError, which is always raised.
    """
    gathered = GatheredShards(content.header)
    try:
        steps: Steps = ()  # for arrays that are not a `Shard`; () if these stay whole
        if target.layout is not None and content.error is None:
            steps = steps_of(target.layout, target.world_size) or ()
        assigned = Assignment()
        if target.group is not None:
            with named_refusals(*content.dicts):
                assigned = _assign_replicas(target.group, steps, content)
        gathered.copies, gathered.error = assigned.copies, assigned.error
        if gathered.error is None:
            dicts, own_names = content.dicts, assigned.own_names
            if content.named.trees:
                content.named.add_trees(target.group, assigned.digests)
            ranks = (target.rank, target.world_size)
            with named_refusals(*dicts):
                _copy_to_host(dicts, own_names or (None, None, None), copy)
                gathered.shards, gathered.nbytes = _core.shards_collect(
                    ranks, dicts, Shard, own_names, steps
                )
    except CollectiveError:
        raise
    except BaseException as error:
        if target.group is None:
            raise
        gathered.fail(error)
    finally:
        # drop references to arrays, including references in the error's traceback
        content.dicts, content.error = (None, None, None), None
        content.named.trees.clear()
    return gathered


def _assign_replicas(group: ProcessGroup, steps: Steps, content: SaveContent) -> Assignment:
    """Agree with all ranks on which rank writes each whole array.

    Every rank calls it, even after a failure. `steps`: of the layout for these arrays. The
    optimizers' groups in `content` become the groups of all ranks, and its step the one of any
    rank. Raises ValueError if callers pass different steps.
    """
    digests: list[bytes] = []
    try:
        step = -1 if content.step is None else int(content.step)
        digests = [*content.named.digests(), step.to_bytes(16, "little", signed=True)]
    except BaseException as error:  # must not raise here: other ranks wait for a message
        content.error = content.error or error
    names = content.named.summary()
    kinds = _optimizer_kinds(content)
    groups = {label: kind["param_groups"] for label, kind in kinds.items()}
    assigned = assign_replicas(group, content.dicts, steps, content.error, names, digests, groups)
    for label, merged in (assigned.groups or {}).items():
        kinds[label]["param_groups"] = merged
    packed_steps = assigned.digests[-1] if assigned.error is None and assigned.digests else ()
    values = {int.from_bytes(each, "little", signed=True) for each in packed_steps} - {-1}
    # a step that the caller of any rank passes replaces the steps of optimizers
    steps_of_ranks = {each for each in values if each >= 0} or {-2 - each for each in values}
    if len(steps_of_ranks) > 1:
        raise ValueError(
            f"ranks pass different steps, {' and '.join(map(str, sorted(steps_of_ranks)))}: pass "
            "the same step= on every rank that passes one"
        )
    for only_step in steps_of_ranks:
        content.header["step"] = only_step
    return assigned


def _optimizer_kinds(content: SaveContent) -> dict[str, dict[str, Any]]:
    """Return the optimizers' descriptions in the manifest, by the optimizers' names in errors."""
    kinds = {f"states[{name!r}]": kind for name, kind in content.named.kinds.items()}
    kinds["optimizer"] = content.header.get("optimizer") or {}
    return {label: kind for label, kind in kinds.items() if "param_groups" in kind}


def _copy_to_host(
    dicts: _Dicts,
    own_names: tuple[frozenset[str] | None, ...],
    copy: Callable[[Any], Any] | None,
) -> None:
    """Replace the device tensors in `dicts` that this rank stores by copies in main memory.

    `own_names`: of replicated tensors that this rank stores, by section; None: all. `copy`: as for
    `gather_shards`.
    """
    if sys.modules.get("torch") is None:
        return
    for state, names in zip(dicts, own_names, strict=True):
        for name, value in () if state is None else state.items():
            is_replicated = not isinstance(value, Shard)
            is_stored_here = (
                (names is None or name in names) if is_replicated else value.replica == 0
            )
            if is_stored_here and is_on_device(value):
                state[name] = _on_host(name, value, copy)  # type: ignore[index]


# ---- the whole save ----


def save_root(
    path: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    step: int | None,
    options: SaveOptions,
    storage_options: Mapping[str, Any] | None = None,
) -> RootPath:
    """Save as `save` does, and return the saved root; `options` may lack keywords."""
    options = {**SAVE_DEFAULTS, **options}
    target = check_target(path, options, storage_options)
    content = take_content(target, model, optimizer, step, options)
    return write_and_commit(target, gather_shards(target, content), options["progress"])


@show_options(SAVE_DEFAULTS)
def save(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    *,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[SaveOptions],
) -> Checkpoint:
    """
    Save the state of a model, of its optimizer, and any other states.

    When `save` returns, the new checkpoint is on disk. Until then the old checkpoint in the
    folder stays complete, even if the save fails or the process is killed.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of the checkpoint, or a URL in an object store such as ``"s3://bucket/run"``;
        created if it does not exist. An existing checkpoint is replaced; in a folder, unchanged
        shards are not written again.
    model : mapping of str to array or Shard, or torch.nn.Module, optional
        A `ModelStateDict`, a plain dict, a module (its ``state_dict()``), or an object with
        ``get_state_dict()``. Arrays are NumPy arrays (dtypes of ml_dtypes included) or torch
        tensors. They are not copied, except tensors on a device: all of these are first copied
        to main memory. A module may be wrapped by DDP, compiled, or sharded by FSDP2, FSDP1 or
        tensor parallelism: names have no wrapper prefixes, and each rank stores its shards.
        Entries of a module that are not tensors (extra states) are stored as in `states`.
    optimizer : mapping of str to array or Shard, or torch.optim.Optimizer, optional
        An `OptimizerStateDict`, a dict with keys ``"<parameter>.<state name>"``, or a torch
        optimizer. The names of its parameters come from the module given as `model`.
    states : mapping of str to object, optional
        Further states by name: models, optimizers and mappings of arrays, stored like `model` and
        `optimizer`; random generators (``random.Random``, NumPy's and torch's, or the modules
        ``random``, ``numpy.random``, ``torch.random``, ``torch.cuda`` for their shared ones);
        caches of `mlstate.kv`; objects with ``state_dict()``; and None, numbers, str, bytes,
        arrays, and lists, tuples, sets and dicts of all these. Nothing is pickled. With a group,
        each rank stores its own values of a state that differs between ranks; models, optimizers
        and mappings of arrays are shared, as for `model`.
    metadata : mapping, optional
        JSON values: str, finite numbers, lists, dicts with str keys, at most 100 levels deep. With
        a group, rank 0's values are stored.
    step : int, optional
        Training step. Default: the step of an `OptimizerStateDict`. Ranks must not pass different
        steps; one that a rank passes counts for all.
    group : ProcessGroup, optional
        The ranks that save together; see `mlstate.collectives`. All of them call `save`, and
        each writes its own shards. An array that is not a `Shard` is treated as replicated:
        every rank holds all of it, and the writes are divided round-robin. Default: this
        process saves alone.
    layout : Layout or str, optional
        Layout for arrays that are not a `Shard`. Default: they are stored whole.
    pack_below_bytes : int or str, default 262144
        Shards of fewer bytes share files. If 0, every shard has its own file.
    sparse : bool, default False
        Omit rows whose bytes are all zero, and tensors that consist of such rows, for example
        optimizer states of parameters that were not trained. This takes one pass over the
        memory.
    incremental : bool, default False
        If at most half of the rows of a shard changed since the last save in this folder, write
        only these rows. The old shard is read to find them.
    compress : {"zlib", "zstd"}, optional
        Compress tensors that shrink by a quarter or more, judged by samples of each tensor.
        Rounded numbers, counts and masks usually do; trained float32 weights mostly do not.
        ``zlib`` is always available; ``zstd`` is faster in both directions and needs
        ``mlstate[zstd]`` to save and to load.
    progress : callable, optional
        Called repeatedly with the number of bytes processed since the last call. An exception
        from it stops the save. With a URL, these bytes are in temporary files; it is called with 0
        during their upload.
    lock_timeout : float, default 0
        Seconds to wait for another process that is writing this checkpoint. Stores have no
        locks: with a URL, the writer that commits second raises.
    storage_options : mapping, optional
        Options of the object store for a URL: credentials, region, endpoint, and those that
        the page on object stores lists.

    Returns
    -------
    Checkpoint
        The new checkpoint; its ``written`` describes what this call wrote.

    Raises
    ------
    ImportError
        The package that `compress` or a URL needs is not installed.
    TypeError, ValueError
        An argument is wrong, ranks save different states, the ranks together lack a part of a
        tensor, or a shard's version decreases. The old checkpoint is unchanged.
    CompatibilityError
        The file format has no name for a dtype, or a layout cannot cut a shape. A tensor is
        not plain memory (sparse, quantized, conjugated, of a subclass), or an entry of a module
        has a type that cannot be restored: an `UnstorableError`, also a `TypeError`.
    TypeError, ValueError
        A sharded module is saved without the `group` of its ranks, an optimizer's parameters
        do not belong to the module, or no `Layout` describes the placement of a DTensor. The
        message names it.
    BufferError
        A tensor has no memory to export, such as one on torch's ``meta`` device (also an
        `UnstorableError`).
    StoreError
        The operating system refused: an `OSError` with its ``errno``. EBUSY: another process is
        writing this checkpoint. EEXIST: the folder holds the steps of a `CheckpointManager`.
    CollectiveError
        Another rank failed; the message names the rank and the reason.

    Notes
    -----
    `mlstate.checkpoint.save_async` and `CheckpointManager` take the same arguments.

    Every file is written under a temporary name. ``manifest.json`` is replaced only when all
    files are on disk. If the process is killed, the next save deletes the files that it left.
    Arrays must not change during the save. The GIL is released. Extra memory: about 400 bytes
    per shard, and 2 MiB for each thread.

    A shard with a version (see `Shard`) is unchanged if its version is unchanged. Other shards
    are compared with their bytes on disk.

    With `sparse` or `incremental`, every function of mlstate returns the same arrays as without.
    A row is the part at one index of the first axis, but at least 256 bytes and at most 64 KiB.
    A shard of less than `pack_below_bytes` is written whole, or omitted if it is all zero. A
    shard that is more than 3/4 nonzero is written whole. A shard has at most 8 layers, which
    together hold at most twice its bytes; beyond that it is written again as a whole. Extra
    memory: one bit for each row.

    With `compress`, shards of less than `pack_below_bytes` or less than 16 KiB are not
    compressed. Each thread compresses one shard at a time. Extra memory: the compressed shard,
    which is kept only if it has at most 3/4 of the shard's bytes.

    On a network file system only one host may write: locks between hosts are not reliable.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> state = {"a": np.zeros(3), "b": np.ones(3)}
    >>> mlstate.save(path, state).written["new_shards"]
    2
    >>> state["a"][0] = 5
    >>> [t.version for t in mlstate.save(path, state).tensors()]
    [2, 1]
    """
    options = complete_save_options(save, options)
    return Checkpoint(save_root(path, model, optimizer, step, options, storage_options))
