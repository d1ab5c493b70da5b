"""The state of a model that several ranks have together: collected, merged, sent out.

Ranks have replicas of one state (data parallelism), or each a part of it (fully sharded, by
tensor parallelism, or both). `DistributedStateCollector` tells what a rank has, makes one
state of what all have, on one rank or from a list, and fills all ranks from one.

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

from .._common.arrays import is_torch
from .._common.backend import backend_of, is_module, is_optimizer
from .._common.text import names_hint
from .._sharding.layout import Shard
from ..collectives._arguments import check_group, check_root, check_timeout
from ..errors import TensorNotFoundError
from ..state._optimizer_state import OptimizerStateDict
from ..state._state_dict import StateDict
from ._exchange import (
    MAX_BYTES,
    Broadcasting,
    Gathering,
    check_max_bytes,
    check_writable,
    exchange,
    opening,
)
from ._merge import RankDifference, compare, describe, merge, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .._common.budget import MemorySize
    from ..collectives import ProcessGroup
    from ._merge import Entry

__all__ = ["DistributedStateCollector", "RankDifference"]


# ---- what a rank has ----


def _of_torch(
    source: Any, model: Any, fill: bool
) -> tuple[StateDict, Callable[[], None] | None] | None:
    """Return the state of a torch module or optimizer; None for anything else."""
    if is_optimizer(source):
        if model is not None and not is_module(model):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        states, keywords, store = backend_of(source).optimizer_parts(source, model, fill=fill)
        made = OptimizerStateDict(**keywords)
        made.update(states)
        return made, store
    if is_module(source):
        state, store = backend_of(source).module_state(source)
        return StateDict(state), store
    return None


def _manner(source: Any, model: Any) -> str:
    """Say how a state is collected, where torch needs all ranks for that."""
    if not is_module(source) and not is_optimizer(source):
        return "of any kind"
    module = source if model is None else model
    if not is_module(module):
        return "of any kind"
    return backend_of(module).needs_all_ranks(source, module) or "of any kind"


def _without_dtensors(state: Mapping[str, Any]) -> StateDict:
    """Return a state whose DTensors are shards; itself where there are none."""
    found = {
        name: value
        for name, value in state.items()
        if is_torch(value) and hasattr(value, "device_mesh")
    }
    if not found and isinstance(state, StateDict):
        return state
    made = state.copy() if isinstance(state, StateDict) else StateDict()
    if not found:
        made.update(state)
        return made
    part_of = backend_of(next(iter(found.values()))).part_of
    for name, value in state.items():
        made[name] = part_of(name, value) if name in found else value
    return made


def _taken(
    source: Any, model: Any, *, fill: bool = False
) -> tuple[StateDict, Callable[[], None] | None]:
    """Return what this rank has, and what puts it back where it is not the memory itself."""
    made = _of_torch(source, model, fill)
    if made is not None:
        return made
    if model is not None:
        raise TypeError("model= goes with a torch optimizer, whose parameters it names")
    if hasattr(source, "get_state_dict"):
        state = source.get_state_dict()
        if not isinstance(state, Mapping):
            raise TypeError(f"get_state_dict() gave a {type(state).__name__}, not a mapping")
        taken = _without_dtensors(state)
        return taken, lambda: source.load_state_dict(taken)
    if not isinstance(source, Mapping):
        raise TypeError(
            "expected a mapping of str to arrays, a torch module or optimizer, or something with "
            f"get_state_dict(), got {type(source).__name__}"
        )
    return _without_dtensors(source), None


def _chosen(state: StateDict, names: str | Iterable[str] | None) -> StateDict:
    """Return the tensors that `names` mean, in the state's order."""
    if names is None:
        return state
    from ..checkpoint._store.name_selection import Names, listed_names
    from ._merge import like

    listed, keys = listed_names(names), list(state)
    chosen, used = Names(listed, keys).select(keys, int(isinstance(state, OptimizerStateDict)))
    unused = [name for name in listed or () if name not in used]
    if unused:
        raise TensorNotFoundError(
            f"no tensor is called {unused[0]!r}, and no name begins with that and a dot"
            f"{names_hint(unused[0], keys)}"
        )
    made = like(state)
    made.update({name: state[name] for name in chosen})
    return made


class DistributedStateCollector:
    """Collects the state of a model over the ranks of a group.

    Parameters
    ----------
    group : mlstate.collectives.ProcessGroup
        The ranks, on any engine: `mlstate.collectives.LocalGroup` on one host,
        `mlstate.integrations.torch.TorchGroup` for torch.distributed,
        `mlstate.integrations.mpi.MPIGroup`, or `mlstate.collectives.SingleGroup`.
    timeout : float, optional
        Seconds that each of its operations may take. Default: the group's own.

    Raises
    ------
    TypeError
        `group` lacks the methods of a group.

    Notes
    -----
    All ranks call `gather_full_state` and `broadcast_state` together. They first tell each
    other what they have: what does not go together, and whatever goes wrong on one rank until
    then, is an error on every rank, before anything is moved; the group is as good as before.
    What goes wrong while data move (a rank dies, memory runs out) leaves the other ranks to
    the group's timeout.

    Names of torch modules lose the prefixes that wrappers put in: ``module.`` of
    DistributedDataParallel and DataParallel, ``_orig_mod.`` of torch.compile, and those of FSDP
    and of activation checkpointing, wherever in the name they are.

    Elements travel as bytes in main memory: those of tensors on a device are copied there,
    piece by piece.

    References
    ----------
    ``DistributedStateCollector`` of the state dict specification, whose ``MergeStates`` keeps
    the first of equal keys: right for replicas, but it would lose all shards but the first.

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
        check_group(group)
        self._group = group
        self._timeout = check_timeout(timeout)

    def __repr__(self) -> str:
        return f"DistributedStateCollector({self._group!r})"

    @property
    def group(self) -> ProcessGroup:
        """The ranks."""
        return self._group

    def _options(self, operation: str, root: int, max_bytes: MemorySize) -> dict[str, Any]:
        """Check what every rank must pass alike."""
        return {
            "operation": operation,
            "root": check_root(operation, root, self._group.world_size),
            "max_bytes": check_max_bytes(operation, max_bytes),
        }

    def collect_local_state(self, source: Any, /, *, model: Any = None) -> StateDict:
        """Return what this rank has of a state.

        Parameters
        ----------
        source : Stateful, mapping, torch.nn.Module or torch.optim.Optimizer
            A module may be plain, DDP, compiled, or sharded by FSDP2 or FSDP1; an optimizer
            may be of such a module.
        model : torch.nn.Module, optional
            With an optimizer: the module whose parameters it has, for their names.

        Returns
        -------
        StateDict
            The arrays and tensors themselves, no copies; what this rank has a part of is a
            `mlstate.checkpoint.Shard`. States of optimizers are called
            ``"<parameter>.<state name>"``, in an `mlstate.OptimizerStateDict`.

        Raises
        ------
        TypeError
            Nothing that has a state, or a value that is no tensor, or a DTensor that is cut as
            no `mlstate.checkpoint.Layout` can say (partial sums, interleaved shards).

        Notes
        -----
        No rank waits for another, except with FSDP1: there torch puts each flat parameter
        together to cut it by rows, so all ranks call this, and the shards are copies.

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
        return _taken(source, model)[0]

    def merge_states(self, states: Sequence[Mapping[str, Any]], *, check: bool = True) -> StateDict:
        """Make one state of those of all ranks.

        Parameters
        ----------
        states : sequence of mapping of str to array or Shard
            In the order of ranks. A tensor need not be in all of them.
        check : bool, default True
            Compare replicas element by element, and refuse those that differ. False keeps the
            first of each, whatever the others are.

        Returns
        -------
        StateDict
            Of the class of the first state, with its attributes. Whole arrays are those of the
            first rank that has them, no copies; shards are assembled in new arrays, one for tied
            ones.

        Raises
        ------
        CompatibilityError
            Replicas differ, shards do not have the same shape, dtype and layout, or a part is
            missing. ``differences`` has a `RankDifference` for each.
        TypeError
            A state is no mapping of str to arrays.

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
        listed = _listed(states)
        if not listed:
            return StateDict()
        tensors, differences = compare(listed) if check else _structure(listed)
        if differences:
            raise refusal(
                "merge_states",
                differences,
                "check=False keeps the first of replicas that differ." if check else "",
            )
        return merge(listed, tensors)

    def compare_states(self, states: Sequence[Mapping[str, Any]]) -> list[RankDifference]:
        """Say all that keeps `merge_states` from making one state.

        Parameters
        ----------
        states : sequence of mapping of str to array or Shard
            In the order of ranks.

        Returns
        -------
        list of RankDifference
            Empty where nothing does.

        Raises
        ------
        TypeError, ValueError
            As `merge_states`.

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
        return compare(_listed(states))[1]

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
        """Bring the whole state to one rank; all ranks call this.

        Parameters
        ----------
        source, model
            As for `collect_local_state`.
        root : int, default 0
            The rank that gets the state.
        names : str or iterable of str, optional
            Which tensors: names, beginnings of names up to a dot, or globs. Default: all.
        max_bytes : int, float or str, default 64 MiB
            Largest message, in bytes or as a size such as ``"6MiB"``, on any rank. At least one
            element of each sender travels at a time.
        verify_replicas : bool, default True
            Compare what several ranks have by SHA-256, and refuse differences. False takes the
            root's own, or else those of the first rank that has them.

        Returns
        -------
        StateDict or None
            On the root, the state: arrays for arrays, and for torch tensors tensors in main
            memory. Whole arrays are the root's own, no copies (but for tensors on a device);
            sharded ones are new; tied ones stay one array. None on the others.

        Raises
        ------
        CompatibilityError
            On every rank: ranks do not have the same tensors, in the same shapes, dtypes and
            layouts; or nobody has a part; or replicas differ. The message names tensors and
            ranks; ``differences`` has a `RankDifference` for each.
        CollectiveError
            On the other ranks, whatever goes wrong on one of them before data move; on all of
            them, where they pass other arguments; and what the group raises.

        Notes
        -----
        Copy whole arrays before training goes on, if the state is to stay as it is: they are
        the model's.

        Besides the result the root takes at most `max_bytes`; so do the others, and less where
        arrays are contiguous. All replicas are read once to be compared. Running
        statistics of batch normalisation differ between replicas in training: give
        ``verify_replicas=False`` for those, or leave them out by `names`.

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
        taken: list[StateDict] = []

        def options() -> dict[str, Any]:
            same = self._options(operation, root, max_bytes)
            manner = _manner(source, model)
            return {**same, "verify_replicas": bool(verify_replicas), "the state": manner}

        def prepare() -> tuple[list[Entry], list[Entry]]:
            taken.append(_chosen(_taken(source, model)[0], names))
            return describe(taken[0]), []

        entries, _ = opening(self._group, operation, self._timeout, options, prepare)
        nbytes = check_max_bytes(operation, max_bytes)
        gathering = Gathering(self._group, int(root), nbytes, self._timeout)
        found: StateDict | None = gathering.run(taken[0], entries, bool(verify_replicas))
        return found

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
        """Fill the arrays of all ranks from one rank's; all ranks call this.

        Parameters
        ----------
        target, model
            What is filled, in place: as `source` and `model` of `collect_local_state`.
        source : mapping of str to array, optional
            On the root, the full state that is sent, such as a loaded one: ranks that have a
            `mlstate.checkpoint.Shard` get their parts. Default: the root's `target`, which may
            have shards only where every rank has the same part. The other ranks' is not looked
            at.
        root : int, default 0
            The rank that sends.
        max_bytes : int, float or str, default 64 MiB
            Largest message, in bytes or as a size such as ``"6MiB"``.

        Raises
        ------
        CompatibilityError
            On every rank: one of them has other tensors, shapes or dtypes than the root sends.
            The message names them. Nothing is changed, anywhere.
        CollectiveError
            As `gather_full_state`; nothing is changed unless it is while data move.
        ValueError
            An array is read-only, or its elements share memory.

        Notes
        -----
        Data go from and to the arrays' own memory where they are contiguous, and otherwise
        through messages. An object with ``get_state_dict`` gets its filled state by
        ``load_state_dict`` too, in case that were copies. Tensors are changed as by
        ``load_state_dict`` of a module: autograd sees it.

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
        taken: list[StateDict] = []
        stores: list[Callable[[], None] | None] = []
        given: list[StateDict] = []

        def options() -> dict[str, Any]:
            same = self._options(operation, root, max_bytes)
            return {**same, "the state": _manner(target, model)}

        def prepare() -> tuple[list[Entry], list[Entry]]:
            state, store = _taken(target, model, fill=True)
            check_writable(state)
            taken.append(state)
            stores.append(store)
            entries, sent = describe(state), []
            if self._group.rank == root:
                given.extend([] if source is None else [_taken(source, None)[0]])
                sent = describe(given[0]) if given else entries
            return entries, sent

        everyone, sent = opening(self._group, operation, self._timeout, options, prepare)
        nbytes = check_max_bytes(operation, max_bytes)
        broadcasting = Broadcasting(self._group, int(root), nbytes, self._timeout)
        state, store = taken[0], stores[0]
        broadcasting.run(state, given[0] if given else None, sent[int(root)], everyone)
        _note(state)
        # every rank hears of a rank that cannot take over what it got
        exchange(self._group, operation, self._timeout, lambda: store() if store else None)


def _note(state: Mapping[str, Any]) -> None:
    """Let autograd know of tensors that were filled."""
    arrays = [value.array if isinstance(value, Shard) else value for value in state.values()]
    tensors = [array for array in arrays if is_torch(array)]
    if tensors:
        backend_of(tensors[0]).note_written(tensors)


def _listed(states: Any) -> list[StateDict]:
    """Return the states of all ranks; torch's DTensors as shards."""
    if isinstance(states, Mapping) or not hasattr(states, "__iter__"):
        raise TypeError(f"expected the states of all ranks in a list, got {type(states).__name__}")
    return [_taken(state, None)[0] for state in states]


def _structure(states: list[StateDict]) -> tuple[Any, list[RankDifference]]:
    """Find the tensors, and what keeps shards from being assembled."""
    from ._merge import agree

    tensors, differences = agree([describe(state) for state in states], partial=True)
    sharded = {
        name for state in states for name, value in state.items() if isinstance(value, Shard)
    }
    return tensors, [found for found in differences if found.name in sharded]
