"""`DistributedStateCollector`: collect, merge, gather and broadcast the state of a sharded model.

Ranks hold replicas of one state (data parallelism), or parts of it (fully sharded data
parallelism, tensor parallelism, or both). `DistributedStateCollector` returns a rank's part of a
state, merges the states of all ranks, and fills all ranks from one state.

Examples
--------
>>> import numpy as np
>>> from mlstate.checkpoint import Layout
>>> from mlstate.collectives import SingleGroup
>>> from mlstate.distributed import DistributedStateCollector
>>> collector = DistributedStateCollector(SingleGroup())
>>> weight, rows = np.arange(6.0).reshape(3, 2), Layout.rows(2)
>>> states = [{"w": rows.shard(weight, 0)}, {"w": rows.shard(weight, 1)}]
>>> collector.merge_states(states)["w"].tolist()
[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .._common.arguments import check_flags
from .._common.arrays import copy_of, is_on_device, is_torch, overwrite
from .._common.backend import TensorBackend, backend_of, is_module, is_optimizer
from .._common.set_module import set_module_of_exports
from .._common.text import names_hint
from .._exports import show_exports
from .._sharding.backend import ShardBackend
from .._sharding.layout import Shard
from ..collectives._arguments import check_group, check_root, check_timeout
from ..errors import CompatibilityError, TensorNotFoundError
from ..state._group_merge import merge_groups
from ..state._optimizer_state import OptimizerStateDict
from ..state._state_dict import StateDict
from . import records
from ._byte_ranges import array_of
from ._exchange import (
    MAX_BYTES,
    Broadcasting,
    Gathering,
    check_apart,
    check_max_bytes,
    check_writable,
    exchange,
    open_exchange,
)
from ._merge import compare, describe, differences_error, merge, with_overlaps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .._common.budget import MemorySize
    from ..collectives import ProcessGroup
    from ._merge import Entry, RankDifference

__all__ = ["DistributedStateCollector", "records"]

set_module_of_exports(globals())


# ---- the local state ----


def _collect_torch_state(
    source: Any, model: Any, fill: bool
) -> tuple[StateDict, Callable[[], None] | None] | None:
    """Return the state of a torch module or optimizer, and a function that stores it back.

    None for other objects than a torch module or optimizer. The function is None if the state's
    tensors are the object's own. `model`: the module of an optimizer's parameters, or None. `fill`:
    the caller will overwrite the state. Raises TypeError if `model` is not a module.
    """
    if is_optimizer(source):
        if model is not None and not is_module(model):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        backend = backend_of(source, ShardBackend)
        states, keywords, store = backend.optimizer_parts(source, model, fill=fill)
        collected = OptimizerStateDict(**keywords)
        collected.update(states)
        return collected, store
    if is_module(source):
        state, store = backend_of(source, ShardBackend).module_state(source, fill=fill)
        return StateDict(state), store
    return None


def _collection_mode(source: Any, model: Any) -> str:
    """Return a text that must be equal on all ranks, which check it before they collect a state.

    It is the reason why all ranks must collect the state of `source` together, as torch requires
    for some wrappers; otherwise "of any kind". `model`: the module of an optimizer's parameters, or
    None.
    """
    if not is_module(source) and not is_optimizer(source):
        return "of any kind"
    module = source if model is None else model
    if not is_module(module):
        return "of any kind"
    return backend_of(module, ShardBackend).needs_all_ranks(source, module) or "of any kind"


def _without_dtensors(state: Mapping[str, Any]) -> StateDict:
    """Return a `StateDict` of a state, with a `Shard` in place of each DTensor.

    It is the state itself if that is a `StateDict` without DTensors.
    """
    # DTensors by name
    shards = {
        name: value
        for name, value in state.items()
        if is_torch(value) and hasattr(value, "device_mesh")
    }
    if not shards and isinstance(state, StateDict):
        return state
    replaced = state.copy() if isinstance(state, StateDict) else StateDict()
    if not shards:
        replaced.update(state)
        return replaced
    part_of = backend_of(next(iter(shards.values())), ShardBackend).part_of
    for name, value in state.items():
        replaced[name] = part_of(name, value) if name in shards else value
    return replaced


def _collect_state(
    source: Any, model: Any, *, fill: bool = False
) -> tuple[StateDict, Callable[[], None] | None]:
    """Return this rank's state of a module, optimizer or mapping, and a function or None.

    The function stores the state back into `source`; None: the tensors are the source's own.
    `model`: the module of an optimizer's parameters, else None. `fill`: the caller will overwrite
    the state. Raises TypeError if `source` has no state.
    """
    collected = _collect_torch_state(source, model, fill)
    if collected is not None:
        return collected
    if model is not None:
        raise TypeError("model= requires a torch optimizer, whose parameters it names")
    if hasattr(source, "get_state_dict"):
        state = source.get_state_dict()
        if not isinstance(state, Mapping):
            raise TypeError(f"get_state_dict() gave a {type(state).__name__}, not a mapping")
        tensors = _without_dtensors(state)
        return tensors, lambda: source.load_state_dict(tensors)
    if not isinstance(source, Mapping):
        raise TypeError(
            "expected a mapping of str to arrays, a torch module or optimizer, or something with "
            f"get_state_dict(), got {type(source).__name__}"
        )
    return _without_dtensors(source), None


def _select_tensors(state: StateDict, names: str | Iterable[str] | None) -> StateDict:
    """Return a state with the tensors that `names` select, or the state itself for None.

    `names`: exact names, prefixes that end at a dot, or globs. Raises TensorNotFoundError for one
    that selects no tensor.
    """
    if names is None:
        return state
    from ..checkpoint._store.name_globs import Names, listed_names
    from ._merge import like

    listed, keys = listed_names(names), list(state)
    chosen, used = Names(listed, keys).select(keys, int(isinstance(state, OptimizerStateDict)))
    unused = [name for name in listed or () if name not in used]
    if unused:
        raise TensorNotFoundError(
            f"no tensor has the name or the prefix {unused[0]!r}{names_hint(unused[0], keys)}"
        )
    selected = like(state)
    selected.update({name: state[name] for name in chosen})
    return selected


class DistributedStateCollector:
    """Collects and distributes the state of a model over the ranks of a group.

    Parameters
    ----------
    group : mlstate.collectives.ProcessGroup
        The ranks, in any implementation: `mlstate.collectives.LocalGroup` on one host,
        `mlstate.integrations.torch.TorchGroup` for torch.distributed,
        `mlstate.integrations.mpi.MPIGroup`, or `mlstate.collectives.SingleGroup`.
    timeout : float, optional
        Limit in seconds for each operation. Default: the group's own.

    Raises
    ------
    TypeError
        `group` does not have the methods of a group.

    Notes
    -----
    All ranks must call `gather_full_state` and `broadcast_state` together. They first exchange
    descriptions of their states. If descriptions do not match, or one rank fails before that,
    every rank raises before any data is transferred, and the group stays usable. If a rank
    fails during the transfer (it dies, or runs out of memory), the others raise after the
    group's timeout.

    Names of torch modules do not have the prefixes of wrappers: ``module.`` of
    DistributedDataParallel and DataParallel, ``_orig_mod.`` of torch.compile, and the prefixes of
    FSDP and activation checkpointing, at any place in the name.

    Elements are transferred as bytes in main memory. Tensors on a device are copied there in
    ranges.

    References
    ----------
    ``DistributedStateCollector`` of the state dict specification. The specification's
    ``MergeStates`` keeps the first of equal keys, which is right for replicas, but would lose
    all shards except the first.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.collectives import SingleGroup
    >>> from mlstate.distributed import DistributedStateCollector
    >>> collector = DistributedStateCollector(SingleGroup())
    >>> collector.gather_full_state({"w": np.arange(3.0)})
    StateDict: 1 tensor, 24 B
      w  float64  (3,)
    """

    def __init__(self, group: ProcessGroup, *, timeout: float | None = None) -> None:
        self._group: ProcessGroup = check_group(group)
        self._timeout = check_timeout(timeout)

    def __repr__(self) -> str:
        return f"DistributedStateCollector({self._group!r})"

    @property
    def group(self) -> ProcessGroup:
        """The group of the ranks."""
        return self._group

    def _options(self, operation: str, root: int, max_bytes: MemorySize) -> dict[str, Any]:
        """Check the options that every rank must pass identically, and return them by name.

        `operation`: name of the method, for errors. Raises TypeError or ValueError for a wrong
        option of this rank.
        """
        return {
            "operation": operation,
            "root": check_root(operation, root, self._group.world_size),
            "max_bytes": check_max_bytes(operation, max_bytes),
        }

    def collect_local_state(self, source: Any, /, *, model: Any = None) -> StateDict:
        """Return this rank's part of a state.

        Parameters
        ----------
        source : Stateful, mapping, torch.nn.Module or torch.optim.Optimizer
            A module may be plain, DDP, compiled, or sharded by FSDP2 or FSDP1; an optimizer
            may be of such a module.
        model : torch.nn.Module, optional
            The module of the optimizer's parameters, for their names; needed for optimizers.

        Returns
        -------
        StateDict
            The arrays and tensors themselves, not copies. A partial tensor is a
            `mlstate.checkpoint.Shard`. Optimizer states have names of the form
            ``"<parameter>.<state name>"``, in an `OptimizerStateDict`.

        Raises
        ------
        TypeError
            `source` has no state, a value is not a tensor, or no `mlstate.checkpoint.Layout`
            describes a DTensor (partial sums, interleaved shards).

        Notes
        -----
        Ranks do not wait for each other, except with FSDP1. There torch assembles each flat
        parameter to cut it by rows, so all ranks must call this, and the shards are copies.

        Examples
        --------
        >>> import torch
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.distributed import DistributedStateCollector
        >>> layer = torch.nn.Linear(2, 1)
        >>> state = DistributedStateCollector(SingleGroup()).collect_local_state(layer)
        >>> list(state), state["bias"].data_ptr() == layer.bias.data_ptr()
        (['weight', 'bias'], True)
        """
        return _collect_state(source, model)[0]

    def merge_states(self, states: Sequence[Mapping[str, Any]], *, check: bool = True) -> StateDict:
        """Merge the states of all ranks into one state.

        Parameters
        ----------
        states : sequence of mapping of str to array or Shard
            The states, in rank order. A tensor may be missing in some of them.
        check : bool, default True
            Compare replicas element by element, and raise if they differ. False uses the
            first replica without comparing.

        Returns
        -------
        StateDict
            The merged state, with class and attributes of the first state. With `check`, an
            optimizer has the groups of all ranks and the largest step. A whole array is
            taken from the first rank that has it, without a copy. Shards are assembled in new
            arrays; tied tensors share one.

        Raises
        ------
        CompatibilityError
            Replicas differ, shards differ in shape, dtype or layout, or a part is missing; or the
            groups of a parameter differ.
            ``differences`` has a `RankDifference` for each.
        TypeError
            `states` is a single state or not iterable, a state is not a mapping of str to arrays,
            or an array has Python objects.
        UnstorableError
            A tensor is not plain memory, such as a sparse one.
        ValueError
            A name is not valid Unicode.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.distributed import DistributedStateCollector
        >>> collector = DistributedStateCollector(SingleGroup())
        >>> first, second = {"w": np.ones(3)}, {"w": np.ones(3), "b": np.zeros(1)}
        >>> merged = collector.merge_states([first, second])
        >>> merged["w"] is first["w"], list(merged)
        (True, ['w', 'b'])
        """
        listed = _collect_states(states)
        if not listed:
            return StateDict()
        tensors, differences = compare(listed) if check else _match_shards(listed)
        if differences:
            raise differences_error(
                "merge_states",
                differences,
                "check=False keeps the first replica." if check else "",
            )
        groups_and_step = _merge_groups(listed) if check else None
        merged = merge(listed, tensors)
        if groups_and_step is not None and isinstance(merged, OptimizerStateDict):
            merged.param_groups, merged.step = groups_and_step
        return merged

    def compare_states(self, states: Sequence[Mapping[str, Any]]) -> list[RankDifference]:
        """Return all differences that prevent `merge_states`.

        Parameters
        ----------
        states : sequence of mapping of str to array or Shard
            The states, in rank order.

        Returns
        -------
        list of RankDifference
            Empty if the states can be merged.

        Raises
        ------
        TypeError, UnstorableError, ValueError
            As for `merge_states`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.distributed import DistributedStateCollector
        >>> collector = DistributedStateCollector(SingleGroup())
        >>> for found in collector.compare_states([{"w": np.ones(3)}, {"w": np.ones(2)}]):
        ...     print(found.kind, found.ranks, found.text)
        shape (1,) w: shape (2,) on rank 1, (3,) on rank 0
        """
        return compare(_collect_states(states))[1]

    def gather_full_state(
        self,
        source: Any,
        /,
        *,
        model: Any = None,
        root: int = 0,
        names: str | Iterable[str] | None = None,
        max_bytes: MemorySize = MAX_BYTES,
        verify_replicas: bool = True,
    ) -> StateDict | None:
        """Collect the whole state on one rank; all ranks must call this.

        Parameters
        ----------
        source, model
            As for `collect_local_state`.
        root : int, default 0
            The rank that receives the state.
        names : str or iterable of str, optional
            Tensors to collect: exact names, prefixes that end at a dot, or globs. Default: all.
        max_bytes : int, float or str, default 64 MiB
            Largest message on any rank, in bytes or as a size such as ``"6MiB"``. Each message
            has at least one element of each sender.
        verify_replicas : bool, default True
            Compare replicas by SHA-256, and raise if they differ. False uses the root's
            replica, or the first rank's that has one. Of an `OptimizerStateDict`, also
            compare the step, and the hyperparameters of each parameter's group; without groups,
            the learning rate.

        Returns
        -------
        StateDict or None
            On the root, the state. NumPy arrays stay NumPy arrays; torch tensors become
            tensors in main memory. Whole arrays are the root's own, not copies (except tensors
            on a device), sharded arrays are new, and tied arrays stay tied. None on the other
            ranks.

        Raises
        ------
        CompatibilityError
            Raised on every rank: ranks differ in tensors, shapes, dtypes or layouts, no rank
            has some part, or replicas or values of optimizers differ. The message names tensors
            and ranks; ``differences`` has a `RankDifference` for each tensor.
        CollectiveError
            Raised on the other ranks if one rank fails before the transfer. Raised on all ranks
            if they pass different arguments. Also errors of the group.
        TypeError, UnstorableError, ValueError
            An argument is wrong, or as for `merge_states`.

        Notes
        -----
        Whole arrays belong to the model: copy them before training continues if the state
        must not change.

        In addition to the result, the root needs at most `max_bytes` of memory. The other ranks
        need at most as much, and less if arrays are contiguous. Comparing replicas reads each
        replica once. Running statistics of batch normalisation differ between replicas during
        training: pass ``verify_replicas=False`` for them, or exclude them by `names`.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.checkpoint import Layout
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.distributed import DistributedStateCollector
        >>> collector = DistributedStateCollector(SingleGroup())
        >>> shard = Layout.rows(1).shard(np.arange(4.0), 0)
        >>> collector.gather_full_state({"w": shard})["w"]
        array([0., 1., 2., 3.])
        """
        operation = Gathering.operation

        def options() -> dict[str, Any]:
            """Return this rank's options, equal on all ranks; raise if one is wrong."""
            common = self._options(operation, root, max_bytes)
            check_flags(verify_replicas=verify_replicas)
            mode = _collection_mode(source, model)
            return {**common, "verify_replicas": bool(verify_replicas), "the state": mode}

        def prepare() -> tuple[StateDict, list[Entry], list[Entry], bool]:
            """Return this rank's state, descriptions of its tensors, an empty list and False.

            In a broadcast, the list describes the tensors that the root sends.
            """
            state = _select_tensors(_collect_state(source, model)[0], names)
            return state, describe(state), [], False

        state, entries, *_ = open_exchange(self._group, operation, self._timeout, options, prepare)
        nbytes = check_max_bytes(operation, max_bytes)
        gathering = Gathering(self._group, int(root), nbytes, self._timeout)
        return gathering.run(state, entries, bool(verify_replicas))

    def broadcast_state(
        self,
        target: Any,
        /,
        *,
        model: Any = None,
        source: Mapping[str, Any] | None = None,
        root: int = 0,
        max_bytes: MemorySize = MAX_BYTES,
    ) -> None:
        """Fill the arrays of all ranks from one rank; all ranks must call this.

        Parameters
        ----------
        target, model
            The state to fill, in place; as `source` and `model` of `collect_local_state`.
        source : mapping of str to array, optional
            On the root, the full state to send, such as a loaded one. Ranks with a
            `mlstate.checkpoint.Shard` receive their parts. Default: the root's `target`, which
            may contain shards only if every rank has the same part. Ignored on other ranks.
        root : int, default 0
            The rank that sends.
        max_bytes : int, float or str, default 64 MiB
            Largest message, in bytes or as a size such as ``"6MiB"``.

        Raises
        ------
        CompatibilityError
            Raised on every rank: a rank has other tensors, shapes or dtypes than the root
            sends, its tensors overlap in another way, or it would receive two different tensors
            in one array. The message names them. No rank is changed.
        CollectiveError
            As for `gather_full_state`. Nothing is changed, unless the transfer fails.
        ValueError
            An array is read-only, its elements share memory, or it shares memory with `source`.

        Notes
        -----
        Contiguous arrays are sent and received directly, others through messages. Submodules with
        their own load methods, hooks or extra states receive copies, and load them afterwards by
        these methods. For an object with ``get_state_dict``, the filled state is also passed to its
        ``load_state_dict``, because the state may be a copy. If any rank has such an object or
        submodule, every rank keeps a copy of its state in main memory during the call, and restores
        it if one of these methods raises. Autograd treats the writes to tensors like a module's
        ``load_state_dict``.

        Examples
        --------
        >>> import numpy as np
        >>> from mlstate.collectives import SingleGroup
        >>> from mlstate.distributed import DistributedStateCollector
        >>> model = {"w": np.zeros(2)}
        >>> collector = DistributedStateCollector(SingleGroup())
        >>> collector.broadcast_state(model, source={"w": np.ones(2)})
        >>> model["w"]
        array([1., 1.])
        """
        operation = Broadcasting.operation

        def options() -> dict[str, Any]:
            """Return this rank's options, equal on all ranks; raise if one is wrong."""
            common = self._options(operation, root, max_bytes)
            return {**common, "the state": _collection_mode(target, model)}

        def prepare() -> tuple[Any, list[Entry], list[Entry], bool]:
            """Return state, store function and source of this rank, and lists for all ranks.

            The lists describe the tensors to fill and those to send. Only the root has a source.
            The last value is whether the store function can refuse the state. Raises if this rank
            cannot take part.
            """
            state, store = _collect_state(target, model, fill=True)
            entries = with_overlaps(state, describe(state))
            check_writable(state)
            can_refuse = store is not None and not is_optimizer(target)
            if self._group.rank != root:
                return (state, store, None), entries, [], can_refuse
            full = None if source is None else _collect_state(source, None)[0]
            sent = entries
            if full is not None:
                sent = with_overlaps(full, describe(full))
                check_apart(state, full)
            return (state, store, full), entries, sent, can_refuse

        (state, store, full), entries, sent, can_refuse = open_exchange(
            self._group, operation, self._timeout, options, prepare
        )
        nbytes = check_max_bytes(operation, max_bytes)
        broadcasting = Broadcasting(self._group, int(root), nbytes, self._timeout)
        before = {n: _copy_to_host(array_of(value)) for n, value in state.items() if can_refuse}
        broadcasting.run(state, full, sent[int(root)], entries)
        _note_written(state)
        # if one rank's store function fails, every rank raises
        try:
            exchange(self._group, operation, self._timeout, lambda: store() if store else None)
        except BaseException as error:
            _undo(state, before, store, error)
            raise


def _copy_to_host(array: Any) -> Any:
    """Return a copy of an array or tensor in main memory."""
    return array.cpu() if is_on_device(array) else copy_of(array)


def _undo(
    state: Mapping[str, Any],
    before: Mapping[str, Any],
    store: Callable[[], None] | None,
    cause: BaseException,
) -> None:
    """Write the arrays `before` back to a state, and store it.

    An error becomes a note of `cause`.
    """
    for name, array in before.items():
        overwrite(array_of(state[name]), array)
    _note_written({name: state[name] for name in before})
    try:
        if store is not None:
            store()
    except Exception as error:
        cause.add_note(f"the earlier state was refused, too: {type(error).__name__}: {error}")


def _note_written(state: Mapping[str, Any]) -> None:
    """Tell autograd that the tensors of a state were written to; arrays are skipped."""
    arrays = [value.array if isinstance(value, Shard) else value for value in state.values()]
    tensors = [array for array in arrays if is_torch(array)]
    if tensors:
        backend_of(tensors[0], TensorBackend).note_written(tensors)


def _collect_states(states: Any) -> list[StateDict]:
    """Return the states of all ranks, in rank order, with shards in place of DTensors.

    Raises TypeError if `states` is a single state or not iterable.
    """
    if isinstance(states, Mapping) or not hasattr(states, "__iter__"):
        raise TypeError(f"expected the states of all ranks in a list, got {type(states).__name__}")
    return [_collect_state(state, None)[0] for state in states]


def _merge_groups(states: list[StateDict]) -> tuple[list[dict[str, Any]], int] | None:
    """Return the parameter groups and the largest step of all ranks' optimizers; None without any.

    Raises CompatibilityError if the groups of a parameter differ.
    """
    optimizers = {
        rank: state for rank, state in enumerate(states) if isinstance(state, OptimizerStateDict)
    }
    if not optimizers:
        return None
    groups = {rank: list(state.param_groups) for rank, state in optimizers.items()}
    try:
        merged = merge_groups("merge_states", groups)
    except CompatibilityError as error:
        raise CompatibilityError(f"{error}; check=False keeps the groups of the first") from None
    return merged, max(state.step for state in optimizers.values())


def _match_shards(states: list[StateDict]) -> tuple[Any, list[RankDifference]]:
    """Return the tensors of all ranks' states, and the differences between their shards.

    Differences between whole arrays are left out, and no elements are compared.
    """
    from ._merge import match_entries

    tensors, differences = match_entries([describe(state) for state in states], partial=True)
    sharded = {
        name for state in states for name, value in state.items() if isinstance(value, Shard)
    }
    return tensors, [difference for difference in differences if difference.name in sharded]


show_exports(globals())
