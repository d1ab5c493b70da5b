"""Modules with extra state, hooks or own ``load_state_dict``: their entries, and the load of them.

The entries of a module's ``state_dict()`` need not be the module's memory: a submodule may have an
extra state, override torch's methods, or have hooks that change entries. Such a submodule is a
*unit*: all of its entries are passed to its own load, as ``load_state_dict`` would pass them.
The entries of all other submodules are the module's own memory, and a load fills them in place.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...._common.staged_targets import tied_error
from ....checkpoint._states.containers import copy_of_wrapper, is_wrapper
from ....errors import CompatibilityError
from .._tensors.state import refuse_unstorable, restore_table
from .module_names import by_name, unwrapped_name, wrapped_attribute

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import torch

EXTRA = "_extra_state"  # torch's key of an extra state, after the submodule's prefix
# Of a load: missing keys, unexpected keys, texts of errors.
_Problems: TypeAlias = "tuple[list[str], list[str], list[str]]"
# Modules of the hooks of torch's wrappers. These hooks gather parameters and change names, which
# `dtensor_shards` and `module_names` do too.
_WRAPPER_HOOKS = ("torch.distributed.fsdp.", "torch.distributed.algorithms._checkpoint.")
_REMEDY = "untie them, or load one of them by names="
_HIDDEN = "_checkpoint_wrapped_module."  # a hook of the wrapper omits it from the keys


class Unit(NamedTuple):
    """A submodule that loads its own entries: and its children's if `is_whole`."""

    module: torch.nn.Module
    prefix: str  # of its keys in torch's state dict
    name: str  # of the submodule, without the parts that wrappers add
    is_whole: bool


# ---- torch's own methods ----


def _is_torch_method(module: torch.nn.Module, name: str, extra: Collection[object] = ()) -> bool:
    """Return whether a method is torch.nn.Module's own, or one of the functions `extra`."""
    import torch

    function = getattr(getattr(module, name), "__func__", None)
    return function is getattr(torch.nn.Module, name) or function in extra


def _has_hooks(module: torch.nn.Module, *names: str) -> bool:
    """Return whether a module has hooks in the attributes `names`, apart from torch's wrappers'."""
    hooks = [hook for name in names for hook in getattr(module, name).values()]
    return any(not getattr(hook, "__module__", "").startswith(_WRAPPER_HOOKS) for hook in hooks)


def _loads_itself(module: torch.nn.Module) -> bool:
    """Return whether a module's own load does more than copy to its parameters and buffers."""
    if _has_hooks(module, "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
        return True
    if _is_torch_method(module, "_load_from_state_dict"):
        return False
    from torch.nn.modules import batchnorm, instancenorm

    # These two add a counter to old states that lack it, and refuse old statistics: for a state
    # with exactly the module's entries they copy.
    torch_methods = (
        batchnorm._NormBase._load_from_state_dict,
        instancenorm._InstanceNorm._load_from_state_dict,
    )
    return not _is_torch_method(module, "_load_from_state_dict", torch_methods)


def saves_itself(module: torch.nn.Module) -> bool:
    """Return whether a module's entries may be other than its parameters and buffers.

    This is so if it overrides torch's methods for saving, or has hooks on them.
    """
    return (
        not _is_torch_method(module, "state_dict")
        or not _is_torch_method(module, "_save_to_state_dict")
        or _has_hooks(module, "_state_dict_hooks", "_state_dict_pre_hooks")
    )


def _has_extra_state(module: torch.nn.Module) -> bool:
    """Return whether a module overrides the methods of an extra state."""
    is_default = _is_torch_method(module, "get_extra_state")
    return not (is_default and _is_torch_method(module, "set_extra_state"))


# ---- memory ----


def _memory_of(value: Any) -> tuple[object, ...] | None:
    """Return a key that is equal for tensors over the same elements; None for other values."""
    import torch

    if not isinstance(value, torch.Tensor):
        return None
    if hasattr(value, "device_mesh"):
        value = value._local_tensor  # type: ignore[attr-defined]
    try:
        storage = value.untyped_storage()._cdata
        view = (value.storage_offset(), tuple(value.shape), value.stride())
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or without a shape yet
        return (id(value),)
    return storage, *view, value.dtype, value.is_conj(), value.is_neg()


def _storage_of(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors of one storage."""
    return (_memory_of(tensor) or (0,))[0]


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of one module."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _prefix_below(name: str) -> str:
    """Return the prefix of the names below a submodule's name: "a." for "a", "" for ""."""
    return name + "." if name else ""


def _entries_match(
    entries: Mapping[str, object], names: Collection[str], expected: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether the entries `names` are the memory of the tensors `expected`, by name.

    A name that only one of them has makes it False.
    """
    return set(names) == expected.keys() and all(
        _memory_of(entries[name]) == _memory_of(expected[name]) for name in names
    )


def _with_tied(module: torch.nn.Module, chosen: set[int]) -> set[int]:
    """Return the ids `chosen`, and the ids of all modules that share memory with one of them.

    Tied modules must load by their own methods too: the last write to shared memory counts.
    """
    # storages of the tensors of each module, by the module's id
    storages = {
        id(child): {_storage_of(tensor) for _, tensor in _tensors_of(child)}
        for child in module.modules()
    }
    count = -1
    # until no module is added: a tied one may share memory with further ones
    while count != len(chosen):
        count = len(chosen)
        shared = set().union(*(storages[module_id] for module_id in chosen))
        chosen = chosen | {key for key, own in storages.items() if not own.isdisjoint(shared)}
    return chosen


def _modules_of(unit: Unit) -> Iterable[torch.nn.Module]:
    """Return the modules whose memory a unit loads: with its children if it is whole."""
    return unit.module.modules() if unit.is_whole else (unit.module,)


def _copy_of(name: str, value: Any) -> Any:
    """Return a copy of an entry of a state, to undo a load with.

    `name`: of the entry, for the CompatibilityError if `value` cannot be copied.
    """
    import torch

    try:
        if is_wrapper(value):
            return copy_of_wrapper(value)
        if isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value):
            return value.detach().clone()
        return copy.deepcopy(value)
    except Exception as error:
        raise _refusal(
            name, f"{name!r} cannot be copied, so its load could not be undone: {error}"
        ) from error


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have equal bits; of DTensors, this rank's part."""
    import torch

    left, right = (
        getattr(each, "_local_tensor", each).detach().reshape(-1).view(torch.uint8)
        for each in (first, second)
    )
    return torch.equal(left, right)


def _refusal(name: str, text: str) -> CompatibilityError:
    """Return a CompatibilityError about the entry or module `name`."""
    return CompatibilityError(text, name=name)


# ---- the contract ----


class ModuleContract:
    """The entries of a module's state, and the units among its submodules.

    Names have no parts that wrappers add. `state` is the result of the module's ``state_dict()``.
    """

    def __init__(self, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
        """Find the submodules that load their own entries, and those that are tied to them.

        `state`: see the class. If a module saves by its own methods, the modules whose entries are
        not their memory become units too.
        """
        self.module = module
        self._keys = by_name(module, {key: key for key in state})
        self.entries = {name: state[key] for name, key in self._keys.items()}
        self._metadata: Mapping[str, dict[str, Any]] = getattr(state, "_metadata", None) or {}
        self.units: list[Unit] = []
        self._unit_of: dict[str, Unit | None] = {}  # by the names of submodules
        self._list_units(module, "", "", None, set())
        chosen = {id(child) for unit in self.units for child in _modules_of(unit)}
        if any(saves_itself(child) for child in module.modules()):
            chosen |= self._with_foreign_entries()
        if chosen:
            # again, because the modules that are tied to units become units too
            chosen = _with_tied(module, chosen)
            self.units, self._unit_of = [], {}
            self._list_units(module, "", "", None, chosen)

    def _list_units(
        self, module: torch.nn.Module, prefix: str, name: str, unit: Unit | None, chosen: set[int]
    ) -> None:
        """List the submodules that load themselves, in torch's order, in `units` and `_unit_of`.

        `prefix`, `name`: of `module`, with and without the parts of wrappers. `unit`: the one that
        contains `module`, or None. `chosen`: ids of modules that are units anyway.
        """
        if unit is None:
            is_whole = self._is_whole(module, name)
            has_wrapper = any(is_wrapper(tensor) for _, tensor in _tensors_of(module))
            if is_whole or _has_extra_state(module) or has_wrapper or id(module) in chosen:
                unit = Unit(module, prefix, name, is_whole)
                self.units.append(unit)
        self._unit_of[name] = unit
        inherited = unit if unit is not None and unit.is_whole else None
        inner = wrapped_attribute(module)
        for key, child in module._modules.items():
            if child is not None:
                below = name if key == inner else _prefix_below(name) + key
                self._list_units(child, f"{prefix}{key}.", below, inherited, chosen)

    def _is_whole(self, module: torch.nn.Module, name: str) -> bool:
        """Return whether a module's own methods must load its children too.

        This is so if it overrides its load, has hooks on it, or its entries are not its memory.
        `name`: of the module in the entries.
        """
        if module is self.module and not _is_torch_method(module, "load_state_dict"):
            return True
        if _loads_itself(module):
            return True
        return saves_itself(module) and not self._entries_are_module_memory(module, name)

    def _entries_are_module_memory(self, module: torch.nn.Module, name: str) -> bool:
        """Return whether the entries below `name` are the memory of `module`, under its names.

        All its parameters and persistent buffers count, also of its children; extra states do not.
        Each must have an entry over the same elements (equal values are not enough), and there must
        be no further entries.
        """
        start = _prefix_below(name)
        expected, extra = {}, set()
        for path, child in module.named_modules(remove_duplicate=False):
            below = _prefix_below(start + unwrapped_name(module, path))
            expected.update({below + key: tensor for key, tensor in _tensors_of(child)})
            extra.add(below + EXTRA)
        entries = [key for key in self.entries if key.startswith(start) and key not in extra]
        return _entries_match(self.entries, entries, expected)

    def _with_foreign_entries(self) -> set[int]:
        """Return the ids of modules with entries that are not their memory, or that lack one.

        A hook of one module may change the entries of any other.
        """
        keys_by_owner: dict[str, list[str]] = {}
        for key in self.entries:
            keys_by_owner.setdefault(self._owner_of(key), []).append(key)
        foreign = set()
        for path, child in self.module.named_modules(remove_duplicate=False):
            name = unwrapped_name(self.module, path)
            expected = {_prefix_below(name) + key: tensor for key, tensor in _tensors_of(child)}
            # a wrapper has the name of the module in it, whose entries these are
            is_empty_wrapper = not expected and wrapped_attribute(child)
            keys = [] if is_empty_wrapper else keys_by_owner.get(name, [])
            if not _entries_match(self.entries, keys, expected):
                foreign.add(id(child))
        return foreign

    def _owner_of(self, name: str) -> str:
        """Return the name of the innermost submodule that the entry `name` belongs to.

        It is "" for entries of the module itself.
        """
        parts = name.split(".")[:-1]
        while parts and ".".join(parts) not in self._unit_of:
            parts.pop()
        return ".".join(parts)

    def unit_of(self, name: str) -> Unit | None:
        """Return the unit that an entry belongs to, or None."""
        return self._unit_of[self._owner_of(name)] if self.units else None

    def key_of(self, unit: Unit, name: str) -> str:
        """Return the key of a unit's entry in torch's state dict.

        `name`: of the entry, without parts of wrappers. An entry that the module lacks now gets the
        key that it would have.
        """
        key: str | None = self._keys.get(name)
        if key is None:
            return unit.prefix + name[len(_prefix_below(unit.name)) :]
        # The recorded key may lack the wrapper's part that the unit's prefix has.
        visible_prefix = unit.prefix.replace(_HIDDEN, "")
        return key if key.startswith(unit.prefix) else unit.prefix + key[len(visible_prefix) :]

    def own_metadata(self) -> dict[str, dict[str, Any]]:
        """Return torch's metadata of the modules in units by name, unless it is torch's default.

        A checkpoint stores it, so that a load passes the same versions to the modules.
        """
        own_metadata = {}
        for prefix, metadata in self._metadata.items():
            name = unwrapped_name(self.module, prefix)
            if metadata != {"version": 1} and self._unit_of.get(name) is not None:
                own_metadata[name] = dict(metadata)
        return own_metadata

    def metadata_of_module(self) -> dict[str, dict[str, Any]]:
        """Return torch's metadata of this module, by prefix of its keys."""
        return {prefix: dict(each) for prefix, each in self._metadata.items()}

    def metadata_by_prefix(
        self, stored: Mapping[str, dict[str, object]], default: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return the metadata for a load, by torch's prefixes.

        `stored`: of the checkpoint, by names of modules. `default`: for modules that it lacks.
        """
        return {
            prefix: dict(stored.get(unwrapped_name(self.module, prefix), default))
            for prefix, _ in self.module.named_modules(remove_duplicate=False)
        }

    def memory(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Return a unit's entries that are its parameters or buffers, by name.

        A load may fill these in place; lazy parameters have no memory yet and are left out.
        """
        import torch

        tensors = {}
        for below, child in self.modules_of(unit):
            for key, tensor in _tensors_of(child):
                memory = _memory_of(tensor)
                if torch.nn.parameter.is_lazy(tensor):
                    continue
                if memory is not None and _memory_of(self.entries.get(below + key)) == memory:
                    tensors[below + key] = tensor
        return tensors

    def modules_of(self, unit: Unit) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules of `_modules_of`, each with the start of its entries' names.

        A module that is reached by several paths is yielded for each of them.
        """
        tree = unit.module.named_modules(remove_duplicate=False)
        for path, child in tree if unit.is_whole else [("", unit.module)]:
            name = unwrapped_name(self.module, (unit.prefix + path).rstrip("."))
            yield _prefix_below(name), child


def refuse_units(module: torch.nn.Module, wrapper: str) -> None:
    """Raise CompatibilityError if a submodule of a sharded module must load its own entries.

    `wrapper`: name of the sharding, for the error.
    """
    for path, child in module.named_modules():
        if _loads_itself(child) or saves_itself(child) or _has_extra_state(child):
            name = unwrapped_name(module, path) or type(child).__name__
            raise _refusal(
                name,
                f"{name!r} ({type(child).__name__}) has its own load methods, hooks or extra "
                f"state, which {wrapper} cannot call on a part of its entries: use fully_shard "
                "(FSDP2), or load into the module before wrapping it",
            )


# ---- loads by the modules' own methods ----


def _refuse_other_bits(
    contract: ModuleContract, units: Iterable[Unit], entries: Mapping[str, Any]
) -> None:
    """Raise CompatibilityError if entries of one parameter or buffer have other bits.

    `entries`: the values to load into `units`, by name. They are compared in the dtype of the
    parameter or buffer.
    """
    first_names: dict[Any, str] = {}
    for unit in units:
        for name, tensor in contract.memory(unit).items():
            if name not in entries:
                continue
            first = first_names.setdefault(_memory_of(tensor), name)
            if first == name:
                continue
            values = [entries[each].to(tensor.dtype) for each in (first, name)]
            if values[0].shape == values[1].shape and not _same_bits(*values):
                raise tied_error(repr(first), repr(name), _REMEDY)


class OwnLoad:
    """A load of some units by their own methods, which `undo` reverts.

    `entries` are the entries to load, by name; each must be of one of the units. The earlier
    entries and memory are copied here.
    """

    def __init__(
        self,
        contract: ModuleContract,
        units: list[Unit],
        entries: Mapping[str, Any],
        metadata: dict[str, dict[str, Any]],
        *,
        strict: bool,
    ) -> None:
        """Copy all entries and memory of the units' modules for `undo`; nothing is loaded yet.

        `metadata`: by prefix. `strict`: `apply` raises for missing and unexpected entries. Raises
        CompatibilityError if an entry cannot be copied, or entries of one memory have other bits,
        and UnstorableError for meta tensors.
        """
        import torch

        _refuse_other_bits(contract, units, entries)

        self.contract = contract
        self.units = units
        self.strict = strict
        self._new = self._by_unit(entries)
        self._metadata = metadata
        chosen = {id(unit) for unit in units}
        clones: dict[Any, torch.Tensor] = {}
        # each tensor and its copy; each dict of parameters or buffers and its copy
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for unit in units:
            for below, module in contract.modules_of(unit):
                for table in (module._parameters, module._buffers):
                    self._tables.append((table, dict(table)))
                    for key, tensor in table.items():
                        if tensor is None or torch.nn.parameter.is_lazy(tensor):
                            continue
                        if tensor.device.type == "meta":
                            refuse_unstorable(below + key, tensor)
                        memory = _memory_of(tensor)
                        if memory not in clones:
                            clones[memory] = _copy_of(below + key, tensor)
                        self._memory.append((tensor, clones[memory]))
        self._shared = self._tied_memory()
        copies = {}  # of the entries as they are now; memory is copied once
        for name, value in contract.entries.items():
            owner = contract.unit_of(name)
            if owner is not None and id(owner) in chosen:
                memory = _memory_of(value)
                copies[name] = clones[memory] if memory in clones else _copy_of(name, value)
        self._before = self._by_unit(copies)

    def _by_unit(self, entries: Mapping[str, object]) -> list[dict[str, Any]]:
        """Return for each unit its part of `entries`, by the keys of torch's state dict."""
        tables: dict[int, dict[str, object]] = {id(unit): {} for unit in self.units}
        for name, value in entries.items():
            unit = self.contract.unit_of(name)
            assert unit is not None
            tables[id(unit)][self.contract.key_of(unit, name)] = value
        return [tables[id(unit)] for unit in self.units]

    def _tied_memory(self) -> list[dict[str, torch.Tensor]]:
        """Return for each unit its tensors, by name, whose storage another unit has too."""
        tensors = [
            {
                below + key: tensor
                for below, module in self.contract.modules_of(unit)
                for key, tensor in _tensors_of(module)
            }
            for unit in self.units
        ]
        units_of: dict[object, set[int]] = {}
        for number, named in enumerate(tensors):
            for tensor in named.values():
                units_of.setdefault(_storage_of(tensor), set()).add(number)
        return [
            {n: t for n, t in named.items() if len(units_of[_storage_of(t)]) > 1}
            for named in tensors
        ]

    def _has_written(self, unit: Unit, name: str, tensor: torch.Tensor, state: Any) -> bool:
        """Return whether the load of a unit's entries `state` wrote its tensor `name`.

        A tensor that is not an entry itself is made of the unit's other entries.
        """
        if self.contract.key_of(unit, name) in state or name not in self.contract.memory(unit):
            return bool(state)
        return not any(t is tensor and _same_bits(t, clone) for t, clone in self._memory)

    def apply(self) -> None:
        """Load the entries of all units; raise CompatibilityError as ``load_state_dict`` would.

        It is also raised if a unit overwrites memory of an earlier one with other bits. After an
        error, some units may be loaded: call `undo`.
        """
        problems: _Problems = ([], [], [])
        written: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # with copies
        for unit, state, shared in zip(self.units, self._new, self._shared, strict=True):
            self._load(unit, dict(state), self._metadata, problems)
            for name, tensor in shared.items():
                if self._has_written(unit, name, tensor, state):
                    written.append((name, tensor, tensor.detach().clone()))
        missing, unexpected, errors = problems
        lines = list(errors)
        if self.strict and unexpected:
            lines.insert(0, f"Unexpected key(s) in checkpoint: {_quoted(unexpected)}.")
        if self.strict and missing:
            lines.insert(0, f"Missing key(s) in checkpoint: {_quoted(missing)}.")
        if lines:
            name = type(self.contract.module).__name__
            text = "\n    ".join([f"Error(s) in loading {name}:", *lines])
            raise _refusal((missing or unexpected or [name])[0], text)
        for number, (name, tensor, clone) in enumerate(written):
            if not _same_bits(tensor, clone):
                others = [
                    n for n, t, _ in written[number + 1 :] if _storage_of(t) == _storage_of(tensor)
                ]
                raise tied_error(repr(name), repr(others[-1] if others else name), _REMEDY)

    def undo(self) -> None:
        """Load the entries from before `apply` back, and restore parameters and buffers.

        All units are restored as far as possible; then CompatibilityError is raised for those whose
        load failed.
        """
        import torch

        failures: dict[str, str] = {}  # texts by the units' names
        metadata = self.contract.metadata_of_module()
        for unit, state in zip(self.units, self._before, strict=True):
            name = _name_of(unit)
            errors: list[str] = []
            try:
                copies = {key: _copy_of(key, value) for key, value in state.items()}
                self._load(unit, copies, metadata, ([], [], errors))
            except CompatibilityError as error:
                failures[name] = str(error)
            if errors:
                failures[name] = f"{name!r}: {errors[0]}"
        for table, before in self._tables:  # a load may replace parameters
            restore_table(table, before)
        with torch.no_grad():
            for tensor, clone in self._memory:
                if tensor.shape == clone.shape:
                    tensor.copy_(clone)
        if failures:
            raise _refusal(next(iter(failures)), "; ".join(failures.values()))

    def _load(
        self,
        unit: Unit,
        state: dict[str, Any],
        metadata: dict[str, dict[str, Any]],
        problems: _Problems,
    ) -> None:
        """Let one unit load its entries `state`, by torch's keys.

        `metadata`: of all modules, by prefix. Keys that do not fit are added to `problems`. An
        exception of the unit's own method becomes a CompatibilityError.
        """
        ordered: Any = OrderedDict(state)
        ordered._metadata = metadata
        root = self.contract.module
        try:
            # the root's own load_state_dict raises for keys itself
            if unit.module is root and not _is_torch_method(root, "load_state_dict"):
                unit.module.load_state_dict(ordered, **({} if self.strict else {"strict": False}))
                return
            _load_module(unit.module, ordered, unit.prefix, metadata, problems, unit.is_whole)
        except Exception as error:
            text = f"{_name_of(unit)!r}: {type(error).__name__}: {error}"
            raise _refusal(_name_of(unit), text) from error


def _name_of(unit: Unit) -> str:
    return unit.name or type(unit.module).__name__


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _load_module(
    module: torch.nn.Module,
    state: dict[str, object],
    prefix: str,
    metadata: Mapping[str, dict[str, object]],
    problems: _Problems,
    is_whole: bool,
) -> None:
    """Load one module as `torch.nn.Module.load_state_dict` does; its children too if `is_whole`.

    `prefix`: of its keys in `state`. `metadata`: by prefix. `problems`: lists of missing keys,
    unexpected keys and texts of errors, which are extended. Exceptions of the module's methods and
    hooks are not caught.
    """
    from torch.nn.modules.module import _IncompatibleKeys

    # True, strict: all problems are listed, and `OwnLoad.apply` decides which of them are errors
    module._load_from_state_dict(state, prefix, metadata.get(prefix[:-1], {}), True, *problems)
    if not is_whole:
        return
    for name, child in module._modules.items():
        if child is not None:
            start = f"{prefix}{name}."
            below = {key: value for key, value in state.items() if key.startswith(start)}
            _load_module(child, below, start, metadata, problems, is_whole)
    incompatible = _IncompatibleKeys(*problems[:2])
    for hook in module._load_state_dict_post_hooks.values():
        if hook(module, incompatible) is not None:
            raise TypeError("a hook of register_load_state_dict_post_hook returned a value")
