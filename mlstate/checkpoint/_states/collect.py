"""`states=` of a save: which values are model, optimizer or nested; names; equal on ranks or not.

A *flat* state is a model or an optimizer: it has tensors by name, which ranks may share or hold
in parts. Any other state is a *tree*: a nested value. Several ranks may have different trees of
one name, for example generators. Trees that are equal on all ranks are stored once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._common.arrays import is_cache, is_torch, refuse_given_away, refuse_unstorable
from ..._common.backend import backend_of, is_module, is_optimizer
from ..._sharding.layout import Layout, Shard
from ...state._kind import kind_of
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._backend import CheckpointBackend
from .._folder.names import NEWER
from .containers import rank_part
from .excluded import NONE_EXCLUDED, Excluded
from .modules import encode_entries, entries_name, metadata_of
from .tree import RANKS, TEXT, Tree, encode, method_of, pack, pack_header, whole_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...collectives import ProcessGroup

# of a BLAKE2b; the packed length follows in 8 bytes, and a byte that is 1 for a newer form
_DIGEST_BYTES = 32


class NamedStates(NamedTuple):
    """The named states of a save, checked; arrays are not copied."""

    arrays: dict[str, Any] | None  # of flat states, by "<state>/<name>"; None without states
    trees: dict[str, Tree]  # the other states
    kinds: dict[str, dict[str, Any]]  # description of each state in the manifest

    def add(self, name: str, tree: Tree) -> None:
        """Add a nested value as the state `name`."""
        self.trees[name] = tree
        self.kinds[name] = {"kind": "tree", NEWER: True} if tree.is_newer else {"kind": "tree"}

    def summary(self) -> list[str]:
        """Return kind and name of each state, sorted: ranks compare these, which must agree."""
        return sorted(
            f"{'tree' if name in self.trees else 'tensors'} {name}" for name in self.kinds
        )

    def digests(self) -> list[bytes]:
        """Return digest and packed length of each tree, in the order of the sorted names."""
        return [_digest(self.trees[name]) for name in sorted(self.trees)]

    def add_trees(self, group: ProcessGroup | None, digests: Sequence[set[bytes]]) -> None:
        """Add the trees' arrays that this rank stores to `arrays`, as shards, and clear the trees.

        `group`: None for one rank. `digests`: for each tree, in the order of the sorted names, the
        set of the digests of all ranks. A tree that is equal on all ranks is stored once. Other
        trees are packed, and each rank stores a row of one tensor, so that the number of tensors in
        a checkpoint does not grow with the ranks.
        """
        assert self.arrays is not None
        rank, ranks = (0, 1) if group is None else (group.rank, group.world_size)
        for number, name in enumerate(sorted(self.trees)):
            tree = self.trees[name]
            for key, array in tree.arrays.items():
                if isinstance(array, Shard):
                    self.arrays[f"{name}/{key}"] = array
            if ranks > 1 and len(digests[number]) > 1:
                self.kinds[name]["ranks"] = ranks
                if any(digest[-1] for digest in digests[number]):
                    self.kinds[name][NEWER] = True
                row_bytes = max(  # packed length of the largest tree
                    int.from_bytes(digest[_DIGEST_BYTES:-1], "little") for digest in digests[number]
                )
                row = pack(tree, row_bytes).reshape(1, -1)
                layout = Layout.rows(ranks)
                shard = Shard(row, layout, rank, shape=(ranks, row_bytes))
                self.arrays[f"{name}/{RANKS}"] = shard
            # A tree that is equal on all ranks is stored by one of them, in turn.
            elif number % ranks == rank:
                for key, array in {**tree.arrays, TEXT: np.frombuffer(tree.text, np.uint8)}.items():
                    self.arrays[f"{name}/{key}"] = (
                        array if isinstance(array, Shard) else Shard(array)
                    )
        self.trees.clear()


def _digest(tree: Tree) -> bytes:
    """Return a digest of a tree without its shards, its packed length, and if it has a newer form.

    Ranks compare it to find the trees that are equal on all of them.
    """
    import hashlib

    arrays = whole_arrays(tree)
    header = pack_header(tree, arrays)
    hasher = hashlib.blake2b(header, digest_size=_DIGEST_BYTES, usedforsecurity=False)
    for array in arrays.values():
        hasher.update(array.reshape(-1).view(np.uint8).data)
    nbytes = len(header) + sum(array.nbytes for array in arrays.values())
    return hasher.digest() + nbytes.to_bytes(8, "little") + bytes([tree.is_newer])


NO_STATES = NamedStates(None, {}, {})


def check_names(states: Any) -> Mapping[str, Any]:
    """Return the user's argument ``states=``; raise if it is not a mapping of valid names.

    TypeError: no mapping, or a name is not a str. ValueError: a name is empty, starts with a dot or
    has a slash.
    """
    if not hasattr(states, "keys"):
        raise TypeError(f"states must be a mapping of names to states, got {type(states).__name__}")
    for name in states:
        if not isinstance(name, str):
            raise TypeError(f"names of states must be str, got {name!r}")
        if not name or "/" in name or name.startswith("."):
            raise ValueError(
                f"states has the name {name!r}: names must not be empty, start with a dot or "
                "contain '/'"
            )
    return states  # type: ignore[no-any-return]


def owner_of(optimizer: Any, modules: Sequence[Any]) -> Any:
    """Return the module that has all parameters of a torch optimizer; None if none has."""
    parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in modules:
        if parameter_ids <= {id(parameter) for parameter in module.parameters()}:
            return module
    return None


def modules_of(model: Any, states: Mapping[str, Any]) -> list[Any]:
    """Return the torch modules among a model and named states."""
    return [value for value in (model, *states.values()) if is_module(value)]


def _is_array(value: Any) -> bool:
    """Return whether a value in a flat dict is stored as a tensor.

    Shards, arrays and tensors are; NumPy scalars and KV caches are not.
    """
    return (
        isinstance(value, Shard)
        or is_torch(value)
        or (
            hasattr(value, "dtype")
            and hasattr(value, "shape")
            and not isinstance(value, np.generic)
            and not is_cache(value)
        )
    )


def _flat_state(value: Any, modules: Sequence[Any], ranks: int, excluded: Excluded) -> Any:
    """Return the tensors of a model or an optimizer by name; None for other values.

    `modules`: all torch modules of the save, which may have an optimizer's parameters. `ranks`:
    number of ranks that save. `excluded`: states of optimizers to leave out.
    """
    if is_optimizer(value):
        if not backend_of(value, CheckpointBackend).fits_table(value):
            return None
        owner = owner_of(value, modules)
        backend = backend_of(value, CheckpointBackend)
        states, keywords = backend.saved_optimizer(value, owner, ranks, excluded)
        state = OptimizerStateDict(**keywords)
        state.update(states)
        return state
    if method_of(value, "get_state_dict") is not None:
        value = value.get_state_dict()
    if method_of(value, "state_dict") is not None:
        return None
    if isinstance(value, StateDict):
        return value
    is_flat = isinstance(value, dict) and bool(value)
    if is_flat and all(isinstance(key, str) and _is_array(value[key]) for key in value):
        return {key: rank_part(inner, key, ranks) for key, inner in value.items()}
    return None


def add_entries(named: NamedStates, state: str | None, others: tuple[Any, Any]) -> NamedStates:
    """Return the named states with a module's entries that are not tensors.

    `state`: the module's own name among the states, or None for the model. `others`: the entries
    and torch's metadata. `named` is changed, unless it is empty.
    """
    where = "model" if state is None else f"states[{state!r}]"
    if named.arrays is None:
        named = NamedStates({}, {}, {})
    named.add(entries_name(state), encode_entries(*others, where))
    return named


def take_states(
    states: Any, model: Any, ranks: int, excluded: Excluded = NONE_EXCLUDED
) -> NamedStates:
    """Check the named states of a save and return them; no array is copied.

    A torch optimizer among the states may belong to `model`. `ranks`: number of ranks that save.
    `excluded`: what to leave out. Errors have the name and the path.
    """
    states = check_names(states)
    modules = modules_of(model, states)
    named = NamedStates({}, {}, {})
    assert named.arrays is not None
    for name, value in states.items():
        where = f"states[{name!r}]"
        others: Any  # entries that are not tensors, and torch's metadata
        try:
            if is_module(value):
                tensors, *others = backend_of(value, CheckpointBackend).saved_module(value, ranks)
                flat: Any = StateDict(tensors)
            else:
                flat, others = (
                    _flat_state(value, modules, ranks, excluded),
                    ({}, metadata_of(getattr(value, "_metadata", None))),
                )
        except (TypeError, ValueError) as error:
            error.args = (f"{where}: {error}",)
            raise
        if flat is None:
            named.add(name, encode(value, where, name=name, excluded=excluded, ranks=ranks))
        else:
            refuse_given_away(dict(flat))
            if not is_module(value) and not is_optimizer(value):
                refuse_unstorable(dict(flat))
            named.arrays.update({f"{name}/{key}": inner for key, inner in flat.items()})
            kind = kind_of(flat)
            assert kind is not None
            named.kinds[name] = kind
            if any(others):
                add_entries(named, name, others)
    return named
