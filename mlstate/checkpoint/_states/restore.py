"""`states=` of a load: values of each rank, objects restored in place, undone after an error.

    load_trees      named states -> their values
    prepare_tree    a stored state and a target -> actions; everything is checked and read
    apply_all       runs the actions and the rest of the load; if one fails, undoes the actions

An action changes one object, and can undo its change.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from ..._common.arrays import copy_of, is_cache, is_torch, overlaps_itself, pairs_sharing_elements
from ..._common.backend import TensorBackend, backend_of, is_optimizer, torch_backend
from ..._common.dtypes import name_of
from ..._common.text import count_text
from ..._sharding.backend import ShardBackend
from ..._sharding.layout import Layout, Shard
from ...errors import CompatibilityError
from ...state._kind import kind_of
from .._backend import CheckpointBackend
from .._sections import STATES, state_name
from .containers import children, copy_of_wrapper, local_wrapper, mapped, walk
from .excluded import fill_excluded
from .generators import (
    check_fits,
    library_of,
    restored,
    seeds_of,
    set_state,
    source_of_numbers,
    state_of,
    state_of_numbers,
)
from .tree import (
    DICTS,
    MALFORMED,
    RANKS,
    STATE_DICTS,
    TEXT,
    decode,
    is_coreml_state,
    key_of,
    leaves_of,
    malformed,
    method_of,
    parse,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from ..._sharding.layout import Cuts, Cutting
    from ..._types import Array, NDArray
    from .._load.loader import Loader

_Result = TypeVar("_Result")
_WHOLE_TENSOR: Any = (None, 0, 0)
_PLAIN = (bool, int, float, str, bytes, np.ndarray)


class Action(NamedTuple):
    """A change of one object; `undo` restores its state before. None: that is not known."""

    label: str
    apply: Callable[[], object]
    undo: Callable[[], object] | None


class _StoredTree(NamedTuple):
    """A nested value in a checkpoint: its JSON form and its arrays, without shards."""

    node: Any
    arrays: dict[str, Any]
    may_have_shards: bool = True


class Sources:
    """The saved values of all targets of a load, to find targets that have two names."""

    def __init__(self) -> None:
        self.cache_arrays: dict[str, Mapping[str, Any]] = {}  # by the names of caches
        self.tensors: dict[str, Any] = {}  # to fill, by their names
        self._values: dict[tuple[int, str], list[tuple[str, Callable[[], str], bool]]] = {}

    def add(
        self,
        target: object,
        where: str,
        text: Callable[[], str],
        aspect: str = "",
        *,
        has_memory: bool = False,
    ) -> bool:
        """Note a target's saved value, and return whether the target is new.

        `where`: name of the target. `text` returns a text that is the same for equal values; it is
        called only for a target with two names. `aspect`: part of the target's state; values of the
        same aspect are compared. `has_memory`: two such values are not, because the overlap of
        their arrays is found later. Raises CompatibilityError if an earlier value differs: one of
        them would be lost.
        """
        # name of each target, function for its text, and whether it has memory
        values = self._values.setdefault((id(target), aspect), [])
        for first, first_text, first_has_memory in values:
            if not (has_memory and first_has_memory) and first_text() != text():
                reason = (
                    f"the target is also that of {first}, and the checkpoint stores different "
                    "values for the two: pass an object for each"
                )
                raise _error(where, reason, "another object", f"that of {first}")
        values.append((where, text, has_memory))
        return len(values) == 1


def refuse_overlaps(tensors: Mapping[str, Any]) -> None:
    """Raise ValueError if two targets share elements, so that one load overwrites the other.

    `tensors`: different objects by name.
    """
    for first, other in pairs_sharing_elements(tensors):
        raise ValueError(
            f"the targets {first} and {other} share memory: load into one of them, or into a clone"
        )


def text_of_value(node: object, arrays: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal nested values.

    `node`: the JSON form of one. `arrays`: by the keys in it, contiguous and of NumPy.
    """
    return json.dumps(_with_digests(node, arrays), sort_keys=True)


def describe_array(array: Any) -> dict[str, Any]:
    """Return the JSON form of a contiguous array of NumPy, with dtype, shape and digest as key."""
    import hashlib

    digest = hashlib.sha256(array.reshape(-1).view(np.uint8)).hexdigest()
    return {"$": "array", "key": [array.dtype.name, array.shape, digest], "form": "numpy"}


def _with_digests(node: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a JSON form with digests of its arrays instead of their keys, to compare values.

    Forms of equal values are equal: only for an OrderedDict does the order of keys matter. The
    keys of JSON objects are in any order. Tensors of torch equal arrays, and shards whole arrays.
    """
    if isinstance(node, list):
        return [_with_digests(each, arrays) for each in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node or "key" not in node:
        form = {key: _with_digests(each, arrays) for key, each in node.items()}
        state = form.get("state")
        if node.get("$") == "object" and isinstance(state, dict) and state.get("$") == "dict":
            form["state"] = {str(key): each for key, each in state["items"]}
        if node.get("$") == "dict" and node["class"] != "OrderedDict":
            form["items"].sort(key=json.dumps)
        return form
    described = describe_array(arrays[str(node["key"])])
    return (
        described if node.get("form") in ("numpy", "torch") else {**node, "key": described["key"]}
    )


# ---- reading ----


def _own_rank(loader: Loader, label: str, ranks: int) -> int | None:
    """Return the rank whose value of a state to load; None for the values of all ranks.

    `label`: the state's name in errors. `ranks`: number of ranks that saved it. Raises
    CompatibilityError if another number of ranks loads it.
    """
    rank, world_size = loader.request.rank, loader.request.world_size
    if rank is None and loader.options["into"] is None:
        return None
    if rank is None or world_size != ranks:
        got = "none" if rank is None else f"rank {rank} of {world_size}"
        text = (
            f"{label} differs between the {ranks} ranks that saved it, so it can be loaded only by "
            f"as many ranks: pass group=, or rank= and world_size={ranks} (got {got}), or leave "
            "this state out of into="
        )
        raise CompatibilityError(text, name=label, expected=f"{ranks} ranks", got=got)
    return rank


def read_trees(loader: Loader, names: Iterable[str]) -> Iterator[tuple[str, list[_StoredTree]]]:
    """Yield each named state with its stored values, as a list of one item.

    A list has an item for each rank if the values of the ranks differ and no rank loads. All states
    are read together. Raises FormatError if a state is malformed, and CompatibilityError as
    `_own_rank`.
    """
    texts: dict[str, str] = {}  # keys of the texts, by state
    for name in names:
        ranks = loader.states[name].get("ranks")
        if ranks is None:
            texts[name] = f"{name}/{TEXT}"
            continue
        label = _label(name)
        rank = _own_rank(loader, label, ranks)
        cut = _WHOLE_TENSOR if rank is None else (Layout.rows(ranks)._steps, rank, ranks)
        key = f"{name}/{RANKS}"
        rows = loader.load_keys(STATES, [key], cut)[key]
        yield name, [_StoredTree(*unpack(row, label)) for row in rows]
    stored_keys = set(loader.source.index.keys(STATES)) if texts else set()
    loaded = loader.load_keys(STATES, sorted(texts.values()), _WHOLE_TENSOR) if texts else {}
    forms = {name: _parse_form(name, loaded[key], stored_keys) for name, key in texts.items()}
    others = dict.fromkeys(f"{name}/{key}" for name, (_, keys, _) in forms.items() for key in keys)
    loaded = loader.load_keys(STATES, list(others), _WHOLE_TENSOR) if others else {}
    for name, (node, keys, has_shards) in forms.items():
        yield name, [_StoredTree(node, {key: loaded[f"{name}/{key}"] for key in keys}, has_shards)]


def _load_whole(loader: Loader, names: list[str]) -> dict[str, Any]:
    """Return the values of named states without ranks, by name; shards become whole arrays.

    All arrays are read together, and no form is searched for its arrays: of many small states, this
    takes half the time of `read_trees`.
    """
    arrays: dict[str, dict[str, Any]] = {name: {} for name in names}
    stored_keys = loader.source.index.keys(STATES) if names else ()
    keys = [key for key in stored_keys if state_name(key) in arrays]
    for key, array in (loader.load_keys(STATES, keys, _WHOLE_TENSOR) if keys else {}).items():
        name, _, inner = key.partition("/")
        arrays[name][inner] = array
    device, values = loader.options["device"], {}
    convert = None if device is None else _tensor_of(device)
    for name in names:
        label, text = _label(name), arrays[name].get(TEXT)
        if text is None:
            raise malformed(label, "it is not stored")
        value = decode(parse(text.tobytes(), label), arrays.pop(name), label, convert)
        values[name] = fill_excluded(value, None) if loader.manifest.exclude else value
    return values


def _label(name: str) -> str:
    return f"states[{name!r}]"


def _parse_form(
    name: str, text: NDArray, stored_keys: Container[str]
) -> tuple[Any, list[str], bool]:
    """Return the JSON form of a state, the keys of its arrays, and whether it has shards.

    Keys of shards are left out. Raises FormatError if the form is malformed, or an array is not
    stored.
    """
    node = parse(text.tobytes(), _label(name))
    try:
        leaves = leaves_of(node)
    except MALFORMED as error:
        raise malformed(_label(name), error) from None
    keys = [leaf.key for leaf in leaves if not leaf.is_sharded]
    for key in keys:
        if f"{name}/{key}" not in stored_keys:
            reason = f"it names the array {key!r}, which is not stored"
            raise malformed(_label(name), reason)
    return node, keys, len(keys) < len(leaves)


def _tensor_of(device: Any) -> Callable[[Any], Any]:
    """Return a function that makes a torch tensor of an array, on `device` (None: the CPU)."""
    backend = torch_backend("states that were saved with tensors of torch", TensorBackend)

    def convert(array: Array) -> Any:
        tensor = backend.tensors_of({"": array})[""]
        return tensor if device is None else tensor.to(device)

    return convert


def _leaf(template: Any, path: Iterable[Any]) -> Any:
    """Return the value at a path of keys and indices in a nested value; None if it has none.

    `template`: the nested value.
    """
    for part in path:
        template = dict(children(template) or ()).get(part)
    return template


def _shards(
    loader: Loader, name: str, node: object, template: object, cutting: Cutting = _WHOLE_TENSOR
) -> dict[str, Any]:
    """Return the sharded arrays that `node` refers to, by key, read from the state `name`.

    A DTensor at the same place in `template` determines the part that is read, or else `cutting`.
    """
    shards = {}
    for leaf in leaves_of(node):
        if not leaf.is_sharded:
            continue
        key = f"{name}/{leaf.key}"
        like = _leaf(template, leaf.path)
        if not (is_torch(like) and hasattr(like, "device_mesh")):
            shards[leaf.key] = loader.load_keys(STATES, [key], cutting)[key]
            continue
        shards[leaf.key] = load_like(loader, STATES, key, like)
    return shards


def load_like(loader: Loader, section: int, key: str, like: Any) -> Any:
    """Return a new DTensor like `like`, with this rank's elements of the stored tensor `key`.

    It has the stored dtype. `section`: number of the key's section. Raises CompatibilityError if
    the stored tensor has another shape.
    """
    part = _part_of(like, key)
    cut = (part._steps, part.index, part.layout.parts) if part._steps else _WHOLE_TENSOR
    array = loader.load_keys(section, [key], cut)[key]
    targets = {key: np.empty(part.array.shape, array.dtype)}
    cuts: Cuts = [(part.shape, part._steps, part.index)]
    loader.source.fits(section, [key], cuts, targets)
    return _with_elements(like, _tensor_of(None)(array))


def _with_elements(like: Any, elements: Any) -> Any:
    """Return a new DTensor like `like`, whose part on this rank has `elements` and their dtype."""
    tensor = like.detach().clone().to(elements.dtype)
    array = _part_of(tensor, "").array
    array.copy_(elements.reshape(array.shape))
    return tensor


def _part_of(tensor: Any, key: str) -> Shard:
    """Return this rank's part of a DTensor; `key`: its name in errors."""
    part = backend_of(tensor, ShardBackend).part_of(key, tensor)
    return part if isinstance(part, Shard) else Shard(part)


def _decode(
    loader: Loader,
    name: str,
    stored: _StoredTree,
    node: Any,
    template: object = None,
    *,
    tensors: bool,
    cutting: Cutting | None = None,
    target: Callable[[], Any] | None = None,
    current: Callable[[], Any] | None = None,
) -> Any:
    """Return the value of `node`, the JSON form of a piece of the stored state `name`.

    `stored`: the whole state, with its arrays. `template`: the target's value, whose tensors'
    layouts are used; None: no target. `cutting`: of other sharded arrays; None: the part that the
    load requests. `target`: as for `Decoder`. `current`: returns the value with those to keep in
    place of excluded ones; None: `template`. `tensors`: return torch tensors for arrays that were
    saved from these, as a `device` of the load does. Raises FormatError if `node` is malformed.
    """
    device = loader.options["device"]
    convert = _tensor_of(device) if tensors or device is not None else None
    arrays = stored.arrays
    if stored.may_have_shards:
        cutting = cutting or loader.request.cutting
        arrays = {**arrays, **_shards(loader, name, node, template, cutting)}
    value = decode(node, arrays, f"states[{name!r}]", convert, target)
    if not loader.manifest.exclude:
        return value
    return fill_excluded(value, template if current is None else current())


def load_trees(loader: Loader, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of named states by name.

    A value is a list with one item for each rank if these differ and no rank is loaded.
    """
    has_parts: dict[bool, list[str]] = {True: [], False: []}
    for name in names:
        has_parts[bool(loader.request.cutting[2]) or "ranks" in loader.states[name]].append(name)
    values = _load_whole(loader, has_parts[False])
    for name, trees in read_trees(loader, has_parts[True]):
        items = [_decode(loader, name, each, each.node, tensors=False) for each in trees]
        is_list = "ranks" in loader.states[name] and loader.request.rank is None
        values[name] = items if is_list else items[0]
    return values


def text_of_tree(loader: Loader, name: str) -> str:
    """Return a text that is the same for equal nested values of named states."""
    [(_, [stored])] = read_trees(loader, [name])
    shards = _shards(loader, name, stored.node, {})
    return text_of_value(stored.node, {**stored.arrays, **shards})


def read_own(loader: Loader, name: str, target: Callable[[], Any] | None) -> Any:
    """Return the value of the named state `name` for a target of this rank, with torch tensors.

    `target`: as for `Decoder`.
    """
    [(_, [stored])] = read_trees(loader, [name])
    tensors = _has_torch(stored.node)
    return _decode(loader, name, stored, stored.node, tensors=tensors, target=target)


# ---- restoring ----


class _Restorer:
    """Prepares the actions that restore the targets of one named state."""

    def __init__(
        self, loader: Loader, name: str, stored: _StoredTree, target: Any, sources: Sources
    ) -> None:
        """Create a restorer of the state `name`, whose saved value is `stored`.

        The restorers of all states share `sources`.
        """
        self.loader = loader
        self.name = name
        self.target = target
        self.stored = stored
        self.sources = sources
        self.actions: list[Action] = []

    def decode(self, node: object, template: object = None, **options: Any) -> Any:
        """Return the value of a piece of the state, as `_decode`."""
        options.setdefault("tensors", False)
        options.setdefault("target", lambda: self.target)
        return _decode(self.loader, self.name, self.stored, node, template, **options)

    def add(self, target: Any, node: Any, where: str) -> None:
        """Add the actions that restore one object of the caller, by its type.

        `node`: the JSON form of its saved value. `where`: its path in the state, for errors. Raises
        TypeError for a type that cannot be restored in place, and CompatibilityError if the saved
        value is of another kind. The methods for the types raise the same.
        """
        is_new = self.sources.add(target, where, partial(self.text_of, node))
        library = library_of(target)
        if library is not None:
            self.add_generator(target, library, node, where)
        elif is_cache(target):
            if is_new:
                arrays = target.arrays if hasattr(target, "arrays") else {"array": target.array}
                self.sources.cache_arrays[where] = arrays
            self.add_cache(target, node, where)
        elif method_of(target, "load_state_dict") is not None:
            self.add_object(target, node, where)
        elif is_torch(target):
            if is_new:
                self.sources.tensors[where] = target
            self.add_tensor(target, node, where)
        elif type(target) in (*DICTS.values(), *STATE_DICTS):
            self.add_dict(target, node, where)
        elif type(target) in (list, deque):
            self.add_list(target, node, where)
        elif not isinstance(target, dict) and is_coreml_state(target):
            raise TypeError(
                f"into={{'states': ...}}: {where} is a {type(target).__name__}, which does not "
                "list its names: pass its mlstate.coreml.StateManager, or take the arrays from "
                "LoadedState.states of load(path) without into= and call write_state for each"
            )
        else:
            raise TypeError(
                f"into={{'states': ...}}: {where} is a {type(target).__name__}, which cannot be "
                "restored in place: pass a generator, a cache of mlstate.kv, an object with "
                "load_state_dict(), a dict, a list or a deque; or leave it out, and take the value "
                "from LoadedState.states of load(path) without into="
            )

    def text_of(self, node: object) -> str:
        """Return a text that is the same for equal values; `node`: the JSON form of one."""
        shards = _shards(self.loader, self.name, node, {})
        return text_of_value(node, {**self.stored.arrays, **shards})

    def add_generator(self, target: Any, library: str, node: object, where: str) -> None:
        """Add the action that sets a random generator to its saved state.

        `library`: the target's, by `library_of`. `node`, `where`: as for `add`.
        """
        if library == "torch" and isinstance(node, dict) and node.get("form") == "torch":
            # a tensor of torch.get_rng_state(), from a file of torch
            node = {"$": "generator", "library": library, "state": node}
        if not (isinstance(node, dict) and node.get("$") == "generator"):
            raise _mismatch(where, "the state of a generator", "another value")
        saved = str(node.get("library"))
        state = _decode_generator(self, node, library)
        check_fits(target, library, saved, state, where)
        seeds = self.decode(node.get("seeds"))
        numbers = source_of_numbers(target, library)
        self.sources.add(numbers, where, partial(self.text_of, state_of_numbers(node)), "numbers")
        before = restored(state_of(target, library), library)
        seeds_before = None if seeds is None else seeds_of(target, library)
        self.actions.append(
            Action(
                where,
                lambda: set_state(target, library, state, seeds),
                lambda: set_state(target, library, before, seeds_before),
            )
        )

    def add_cache(self, target: Any, node: object, where: str) -> None:
        """Add the action that overwrites a KV cache with the saved one.

        A copy of the target is kept to undo this. `node`, `where`: as for `add`.
        """
        from ...kv._stored import check_cache, overwrite_cache

        if not (isinstance(node, dict) and node.get("$") == "cache"):
            raise _mismatch(where, f"a {type(target).__name__}", "another value")
        cache = self.decode(node, tensors=_has_torch(node))
        check_cache(target, cache, where)
        before = target.copy()
        self.actions.append(
            Action(
                where,
                lambda: overwrite_cache(target, cache),
                lambda: overwrite_cache(target, before),
            )
        )

    def add_object(self, target: Any, node: object, where: str) -> None:
        """Add the action that passes the saved value to the target's ``load_state_dict``.

        The target's state now is kept to undo this. `node`, `where`: as for `add`.
        """
        if isinstance(node, dict) and node.get("$") == "generator":
            raise _mismatch(where, "the state of an object", "that of a generator")
        before = _copy_state(where, target)
        options = {"cutting": _WHOLE_TENSOR, "target": lambda: before}
        if hasattr(target, "state_dict"):
            options["current"] = target.state_dict
        value = self.decode(node, before, tensors=_has_torch(node), **options)
        value = like_tensors(value, before)
        if is_optimizer(target) and isinstance(value, dict):
            value = backend_of(target, CheckpointBackend).divided_state(target, value, where)
            lost = min(value.keys() - (before or {}).keys(), key=str, default=None)
            if lost is not None:
                text = f"its state_dict() lacks {lost!r}, which was saved: the load would lose it"
                raise _error(where, text, "this value", "an optimizer of another class")
        self.actions.append(_load_action(where, target, value, before))

    def add_tensor(self, target: Any, node: object, where: str) -> None:
        """Add the action that fills a tensor in place; `node`, `where`: as for `add`."""
        value = self.decode(node, target, tensors=_has_torch(node))
        # an array of NumPy fills a tensor too
        is_array = isinstance(value, np.ndarray) and not hasattr(target, "device_mesh")
        expected, got = (
            f"{name_of(each.dtype)} of shape {tuple(each.shape)}"
            if (is_torch(each) and not each.is_meta) or (is_array and each is value)
            else "a meta tensor, which has no memory"
            if is_torch(each)
            else f"a {type(each).__name__}, not a tensor"
            for each in (target, value)
        )
        if expected != got:
            raise _mismatch(where, expected, got)
        if overlaps_itself(target):
            raise ValueError(
                f"the target {where} has elements that share memory: load into a copy of it"
            )
        if is_array:
            value = _tensor_of(None)(value)
        fill, before = target.detach().copy_, target.detach().clone()
        self.actions.append(Action(where, lambda: fill(value), lambda: fill(before)))

    def add_dict(self, target: dict[Any, Any], node: object, where: str) -> None:
        """Add the actions for a dict; `node`, `where`: as for `add`.

        Generators, caches, objects and parameters in the dict are restored in place; other values
        are replaced. Without ``strict``, keys that only the target or only the checkpoint has are
        left as they are.
        """
        if isinstance(node, dict) and node.get("$") == "state":
            self.add_kind(target, node["kind"], where)
            node = node["values"]
        if not isinstance(node, dict) or node.get("$") not in (None, "dict"):
            raise _mismatch(where, "a dict", "another value")
        pairs = {key_of(key): each for key, each in node["items"]} if "$" in node else node
        strict = self.loader.options["strict"]
        if strict and target.keys() != pairs.keys():
            key = min(target.keys() ^ pairs.keys(), key=str)
            holder, other = ("target", "checkpoint") if key in target else ("checkpoint", "target")
            expected, got = ("this key", "nothing") if key in target else ("nothing", "this key")
            text = f"the {holder} has this key, the {other} does not"
            raise _error(f"{where}[{key!r}]", text, expected, got)
        new = {
            key: self.add_inner(target[key], inner, f"{where}[{key!r}]")
            for key, inner in pairs.items()
            if key in target
        }
        others = {key: value for key, value in target.items() if key not in pairs}
        self.actions.append(_replacement(where, target, new | others, dict(target)))
        if "$" in node and "attributes" in node and hasattr(target, "__dict__"):
            attributes, own = self.decode(node["attributes"]), vars(target)
            self.actions.append(_replacement(where, own, own | attributes, dict(own)))

    def add_kind(self, target: dict[Any, Any], kind: dict[str, Any], where: str) -> None:
        """Add the action that sets the attributes of a state dict of mlstate.

        `kind`: its saved class and attributes. `where`: as for `add`. Raises
        CompatibilityError if attributes were saved and the target is of another class.
        """
        target_kind = kind_of(target) if type(target) in STATE_DICTS else {"kind": "dict"}
        assert target_kind is not None
        attributes = {name: value for name, value in kind.items() if name != "kind"}
        if not attributes:
            return
        if target_kind["kind"] != kind["kind"]:
            raise _mismatch(
                where, *(f"of the kind {each['kind']!r}" for each in (target_kind, kind))
            )

        def change(values: Mapping[str, Any]) -> None:
            for name in attributes:
                setattr(target, name, values[name])

        before = {name: getattr(target, name) for name in attributes}
        self.actions.append(Action(where, lambda: change(attributes), lambda: change(before)))

    def add_list(self, target: Any, node: Any, where: str) -> None:
        """Add the actions for a list or deque; `node`, `where`: as for `add`.

        One with something to restore in place, other than tensors, must have the saved length. The
        content of any other one is replaced.
        """
        items = _items_of(target, node, where, self)
        if _is_restorable(target, tensors=len(target) == len(items)):
            new = self.add_items(target, items, where)
        else:
            new = self.replace(target, items)
        maxlen = getattr(target, "maxlen", None)
        if maxlen is not None and len(new) > maxlen:
            raise _mismatch(where, f"a deque of at most {maxlen}", count_text(len(new), "value"))
        self.actions.append(_replacement(where, target, new, list(target)))

    def add_items(self, target: Any, items: list[Any], where: str) -> list[Any]:
        """Add the actions for the values in a sequence, and return its new values.

        `items`: the JSON forms of the saved values. Raises CompatibilityError for another length.
        """
        if len(items) != len(target):
            name = type(target).__name__
            counts = (count_text(len(each), "value") for each in (target, items))
            raise _mismatch(where, *(f"a {name} of {count}" for count in counts))
        pairs = enumerate(zip(target, items, strict=True))
        return [self.add_inner(*pair, f"{where}[{i}]") for i, pair in pairs]

    def replace(self, current: Any, node: object) -> Any:
        """Return the saved value; its tensors get the devices and layouts of those in `current`."""
        return like_tensors(self.decode(node, current, tensors=_has_torch(node)), current)

    def add_inner(self, current: Any, node: object, where: str) -> Any:
        """Add the actions for the value `current` in a container, and return its new value.

        A value that is restored in place stays; another one is replaced by the saved value. A tuple
        is replaced by one of the same objects. `node`, `where`: as for `add`.
        """
        if isinstance(node, dict) and node.get("$") == "excluded":
            return current
        if not _is_restorable(current) or (is_torch(current) and node is None):
            return self.replace(current, node)
        if type(current) is tuple:
            items = _items_of(current, node, where, self)
            if not _is_restorable(current, tensors=len(current) == len(items)):
                return self.replace(current, node)
            return tuple(self.add_items(current, items, where))
        self.add(current, node, where)
        return current


def _items_of(target: Any, node: Any, where: str, restorer: _Restorer) -> list[Any]:
    """Return the JSON forms of the values in a saved list, tuple or deque of the target's class.

    Raises CompatibilityError for another saved value, whose JSON form is `node`.
    """
    cls = type(target)
    if cls is list and isinstance(node, list):
        return node
    if isinstance(node, dict) and node.get("$") == cls.__name__:
        items: list[Any] = node["items"]
        return items
    raise _mismatch(where, f"a {cls.__name__}", type(restorer.decode(node)).__name__)


def _is_restorable(value: Any, *, tensors: bool = True) -> bool:
    """Return whether a value in a target is restored in place, or has a value in it that is.

    Any other value is replaced, such as results of operations of torch. `tensors`: parameters are
    restored in place too. An object that can only be saved is refused by `add`.
    """
    return any(
        library_of(each) is not None
        or is_cache(each)
        or method_of(each, "load_state_dict") is not None
        or method_of(each, "state_dict") is not None
        or (tensors and is_torch(each) and each.requires_grad and each.is_leaf)
        for each in walk(value)
        if not isinstance(each, _PLAIN)
    )


def like_tensors(value: Any, like: Any) -> Any:
    """Return a value whose tensors have devices and layouts of the tensors in `like`.

    Tensors at the same keys correspond. A value without a counterpart stays.
    """
    if is_torch(value):
        if not is_torch(like) or like.is_meta or local_wrapper(like) is not None:
            return value
        if not hasattr(like, "device_mesh") or hasattr(value, "device_mesh"):
            return value.to(like.device)
        if value.shape != like.shape:
            return value
        part = _part_of(like, "")
        return _with_elements(like, part.layout.take(value, part.index))
    if type(value) is not type(like):
        return value
    likes = dict(children(like) or ())
    if isinstance(value, Mapping) or len(children(value) or ()) == len(likes) > 0:
        return mapped(value, lambda key, each: like_tensors(each, likes.get(key)))
    return value


def _has_torch(node: object) -> bool:
    return any(leaf.form == "torch" for leaf in leaves_of(node))


def _decode_generator(restorer: _Restorer, node: dict[str, Any], library: str) -> Any:
    """Return the state of a generator from its JSON form `node`, for `set_state`.

    `library`: the target's. Generators of torch take tensors in main memory, for any ``device=``.
    """
    if not library.startswith("torch") or not _has_torch(node):
        return restorer.decode(node)
    return decode(node, restorer.stored.arrays, f"states[{restorer.name!r}]", _tensor_of(None))


def _mismatch(where: str, expected: str, got: str) -> CompatibilityError:
    """Return the CompatibilityError for a target whose saved value is of another kind."""
    text = f"the target is {expected}, the checkpoint has {got}"
    return _error(where, text, expected, got)


def _error(where: str, text: str, expected: str, got: str) -> CompatibilityError:
    """Return a CompatibilityError with its attributes; `where`: path of the target."""
    return CompatibilityError(f"{where}: {text}", name=where, expected=expected, got=got)


def _replacement(where: str, target: Any, new: object, before: object) -> Action:
    """Return an action that replaces the content of a dict or list by `new`.

    Undo replaces it by `before`. `where`: path of the target, for errors.
    """

    def fill(content: Any) -> None:
        target.clear()
        (target.update if isinstance(target, dict) else target.extend)(content)

    return Action(where, lambda: fill(new), lambda: fill(before))


def _copy_state(where: str, target: object) -> Any:
    """Return a copy of a target's state, to undo a load; None if it has no method for that.

    The method is ``state_dict()`` or ``get_state_dict()``. `where`: path of the target, for the
    CompatibilityError if the state cannot be copied.
    """
    import copy

    methods = (name for name in ("state_dict", "get_state_dict") if hasattr(target, name))
    method = next(methods, None)
    if method is None:
        return None
    try:
        state = getattr(target, method)()
        return copy.deepcopy(state, _copies_of_results(state))
    except Exception as error:
        raise CompatibilityError(
            f"{where}: the result of {type(target).__name__}.{method}() cannot be copied, so a "
            f"load could not be undone: {type(error).__name__}: {error}",
            name=where,
        ) from error


def _copies_of_results(state: Any) -> dict[int, Any]:
    """Return copies of the tensors in a state that `copy.deepcopy` refuses, by id.

    These are results of operations that autograd records, and wrappers.
    """
    return {
        id(each): copy_of_wrapper(each) if parts is not None else copy_of(each)
        for each in walk(state)
        if is_torch(each) and ((parts := children(each)) is not None or not each.is_leaf)
    }


def _load_action(where: str, target: Any, value: Any, before: Any) -> Action:
    """Return an action that passes `value` to the target's ``load_state_dict``.

    Undo passes `before`, if this is not None.
    """
    undo = None if before is None else lambda: target.load_state_dict(before)
    return Action(where, lambda: target.load_state_dict(value), undo)


def prepare_tree(
    loader: Loader, name: str, stored: _StoredTree, target: Any, sources: Sources
) -> list[Action]:
    """Return the actions that restore the target of the named state `name`.

    `stored`: its value, as `read_trees` returns it. `sources`: the saved values of all targets so
    far; this state's are added. Raises CompatibilityError if the target is of another kind than the
    saved value, and TypeError if it cannot be restored in place.
    """
    restorer = _Restorer(loader, name, stored, target, sources)
    restorer.add(target, stored.node, f"states[{name!r}]")
    return restorer.actions


def prepare_object(label: str, target: Any, state: Any) -> Action:
    """Return the action that passes a state of tensors to the target's ``load_state_dict``.

    Arrays whose values are tensors of torch in the target now become such, on the same devices.
    `label`: the state's name in errors.
    """
    before = _copy_state(label, target)
    for name, value in before.items() if isinstance(before, Mapping) else ():
        is_tensor = is_torch(value) and not hasattr(value, "device_mesh")
        if is_tensor and isinstance(state.get(name), np.ndarray):
            state[name] = _tensor_of(value.device)(state[name])
    return _load_action(label, target, state, before)


def undo_all(actions: list[Action], cause: BaseException) -> str:
    """Undo actions, the last one first; return the names of those that cannot be undone, or "".

    `cause`: the error that made the load fail; a note in it has the names, too. Raises
    CompatibilityError, which names the objects that stay changed, if an undo fails; the others are
    still undone.
    """
    changed = ", ".join(action.label for action in actions if action.undo is None)
    if changed:
        cause.add_note(f"these objects may stay changed, as they have no state_dict(): {changed}")
    failures: list[tuple[Action, Exception]] = []
    for action in reversed(actions):
        try:
            if action.undo is not None:
                action.undo()
        except Exception as error:
            failures.append((action, error))
    if failures:
        labels = "; ".join(f"{action.label}: {error}" for action, error in failures)
        raise CompatibilityError(
            f"the load failed ({type(cause).__name__}: {cause}), and the earlier state of these "
            f"objects, which stay changed, could not be loaded back: {labels}",
            name=failures[0][0].label,
        ) from failures[0][1]
    return changed


def apply_all(actions: list[Action], then: Callable[[], _Result]) -> _Result:
    """Run the actions, then `then`, and return its result; if one raises, undo all that have begun.

    An error of an action becomes a CompatibilityError. KeyboardInterrupt and other exceptions that
    are not an Exception are raised as they are.
    """
    done = 0  # actions
    try:
        for action in actions:
            action.apply()
            done += 1
        return then()
    except BaseException as error:
        # The failed action may have changed its object in part.
        changed = undo_all(actions[: done + 1], error)
        if done == len(actions) or not isinstance(error, Exception):
            raise
        result = "nothing was restored"
        if changed:
            result = f"{changed} may stay changed, without a state_dict() to undo that"
        raise CompatibilityError(
            f"{actions[done].label}: the target refused the saved state, and {result}: "
            f"{type(error).__name__}: {error}",
            name=actions[done].label,
        ) from error
