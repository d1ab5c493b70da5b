"""Extra state and other entries of a module that are not tensors: stored, loaded by its methods.

A checkpoint stores such entries, and torch's metadata of modules that load themselves, as a nested
value: a named state, whose name starts with a dot and so cannot be a user's.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.backend import TensorBackend, is_module, torch_backend
from ..._common.dtypes import FLOATS, name_of
from ..._sharding.layout import Shard
from ...errors import CompatibilityError
from .restore import (
    Action,
    describe_array,
    like_tensors,
    load_like,
    read_own,
    text_of_tree,
    text_of_value,
)
from .tree import Tree, encode, malformed, parse, whole_arrays

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .._load.loader import Loader
    from .._sections import Section
    from .._store.name_globs import Names
    from .restore import Sources

MODEL = ".model"  # name of the model's state; that of a named state ends with its name
_NAMED = ".states."


def entries_name(state: str | None) -> str:
    """Return the name under which a module's entries are stored.

    `state`: name of the module among the named states; None: the model.
    """
    return MODEL if state is None else _NAMED + state


def is_entries(name: str, value: object) -> bool:
    """Return whether a named state is a module's entries that are not tensors, with metadata."""
    return (
        (name == MODEL or name.startswith(_NAMED))
        and isinstance(value, dict)
        and value.keys() == {"entries", "metadata"}
    )


def split_entries(
    states: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str | None, tuple[Any, Any]]]:
    """Return the named states without modules' entries, and these by name of the module's state.

    `states`: with entries under the names of `entries_name`. Each has the entries and the metadata.
    """
    entries: dict[str | None, tuple[Any, Any]] = {
        None if name == MODEL else name.removeprefix(_NAMED): (value["entries"], value["metadata"])
        for name, value in states.items()
        if is_entries(name, value)
    }
    others = {name: value for name, value in states.items() if not is_entries(name, value)}
    return others, entries


def encode_entries(entries: Mapping[str, Any], metadata: Mapping[str, Any], where: str) -> Tree:
    """Return a module's entries that are not tensors, and torch's metadata, as a nested value.

    Both are results of `saved_module`. `where`: name of the module in errors.
    """
    return encode({"entries": dict(entries), "metadata": dict(metadata)}, where, exact=True)


def metadata_of(carried: object) -> dict[str, dict[str, Any]]:
    """Return the metadata of modules, by module, of the ``_metadata`` that a state carries.

    {} for None or another object, of a state that is not torch's. Modules of version 1 without
    more metadata, as nearly all are, are left out.
    """
    if not isinstance(carried, dict):
        return {}
    return {
        name: dict(each)
        for name, each in carried.items()
        if isinstance(name, str) and isinstance(each, dict) and each != {"version": 1}
    }


def shown_states(states: dict[str, object]) -> dict[str, Any]:
    """Return the named states for the caller, without those that only torch's loaders need.

    These are states of a module (`encode_entries`) whose name begins with a dot and whose list of
    entries is empty: they have only torch's metadata.
    """

    def is_hidden(name: str) -> bool:
        value = states[name]
        return name[0] == "." and isinstance(value, dict) and not value.get("entries", True)

    return {name: value for name, value in states.items() if not is_hidden(name)}


# ---- loading ----


def all_entries(loader: Loader) -> dict[str, dict[str, Any]]:
    """Return the entries that are not tensors of all modules, and metadata, by `entries_name`.

    Modules without both are left out.
    """
    stored = {
        entries_name(section.state): stored_entries(loader, section)
        for section in loader.sections
        if not section.is_optimizer
    }
    return {name: each._asdict() for name, each in stored.items() if any(each)}


def text_of_section(loader: Loader, section: Section) -> str:
    """Return a text that is the same for sections with equal values; reads all of its tensors.

    It is also that of an equal object in a nested value. Classes may differ.
    """
    tensors = {}
    for name in section.names:  # one at a time
        tensors[name] = describe_array(loader.load_tensors(section, [name], (None, 0, 0))[name])
    parts: list[Any] = [{"$": "object", "state": tensors}]
    parts += [{name: each} for name, each in (section.kind or {}).items() if name != "kind"]
    entries = entries_name(section.state)
    if not section.is_optimizer and entries in loader.states:
        parts.append(text_of_tree(loader, entries))
    return json.dumps(parts if len(parts) > 1 else parts[0], sort_keys=True)


def _text_of_entries(entries: Mapping[str, Any], where: str) -> str:
    """Return a text that is the same for equal entries; `where`: their module, for errors."""
    tree = encode(entries, where)
    arrays = {
        key: value.array if isinstance(value, Shard) else value
        for key, value in tree.arrays.items()
    }
    return text_of_value(parse(tree.text, where), whole_arrays(Tree(tree.text, arrays)))


class StoredEntries(NamedTuple):
    """The entries of one module that are not tensors, by name, and torch's metadata."""

    entries: dict[str, object]
    metadata: dict[str, dict[str, object]] | None  # None: the checkpoint is not of mlstate


def stored_entries(loader: Loader, section: Section, target: Any = None) -> StoredEntries:
    """Return the stored entries of a section's module that are not tensors, and torch's metadata.

    `target`: receives them; a module also gives the classes of records in them. Entries are {} if
    none were stored. Metadata of None: unknown, for weights of another program. Raises FormatError
    if the stored value has another form.
    """
    if section.is_optimizer or section.kind is None:
        return StoredEntries({}, None)
    name = entries_name(section.state)
    if name not in loader.states:
        return StoredEntries({}, None if loader.manifest.weights is not None else {})
    label = f"states[{name!r}]"
    is_saved = loader.options["into"] is None and label in loader.source.saved
    value = loader.source.saved[label] if is_saved else _read_entries(loader, name, target)
    if not isinstance(value, dict) or not all(
        isinstance(value.get(part), dict) for part in ("entries", "metadata")
    ):
        raise malformed(label, "it must have entries and metadata")
    entries, metadata = value["entries"], value["metadata"]
    rules = loader.options["rename"]
    if rules is not None:
        entries = _core.state_rename(entries, tuple(rules.items()))[0]
        metadata = section.renamed_layers(metadata)
    return StoredEntries(entries, metadata)


def _read_entries(loader: Loader, name: str, target: Any) -> Any:
    return read_own(loader, name, target.state_dict if is_module(target) else None)


def _by_unit(contract: Any, names: Iterable[str]) -> dict[int, list[str]]:
    """Return the names of each submodule's entries, by id of the submodule; others are left out.

    `contract`: which submodules load themselves, as `fill_module` returns it.
    """
    names_by_unit: dict[int, list[str]] = {}
    for name in names:
        unit = contract.unit_of(name)
        if unit is not None:
            names_by_unit.setdefault(id(unit), []).append(name)
    return names_by_unit


def _selected_units(
    contract: Any, names: Names, stored: list[str], chosen: list[str]
) -> list[object]:
    """Return the submodules of `contract.units`, which load themselves, that have chosen names.

    `names`: the user's choice; without one, all are returned. `stored`: names in the checkpoint.
    `chosen`: names to load. Raises CompatibilityError if the choice has some names of a submodule
    and not all.
    """
    if names.listed is None:
        return list(contract.units)
    every, some = _by_unit(contract, stored), _by_unit(contract, chosen)
    units = []
    for unit in contract.units:
        if id(unit) not in some:
            continue
        left_out = set(every[id(unit)]) - set(some[id(unit)])
        if left_out:
            where = unit.name or "the module"
            raise CompatibilityError(
                f"{where!r} loads its entries by its own methods, all together, and names= leaves "
                f"out {min(left_out)!r}: select all of its entries, or none",
                name=min(left_out),
            )
        units.append(unit)
    return units


def _check_dtypes(loader: Loader, section: Section, contract: Any, units: list[Any]) -> None:
    """Raise CompatibilityError if a stored tensor and the submodules' tensor differ in dtype.

    With ``cast=True``, two float dtypes may differ. `section`: of the module. `units`: the
    submodules of its `contract`.
    """
    memory: dict[str, Any] = {}
    for unit in units:
        memory.update(contract.memory(unit))
    stored = [name for name in section.names if name in memory]
    for name, row in loader.rows_of(section, stored).items():
        expected, got = name_of(memory[name].dtype), row.dtype
        if expected != got and not (loader.request.cast and {expected, got} <= FLOATS):
            text = f"{name!r} is {got} in the checkpoint, expected {expected}"
            raise CompatibilityError(text, name=name, expected=expected, got=got)


def _read_tensors(
    loader: Loader, section: Section, names: list[str], earlier: Mapping[str, object]
) -> dict[str, Any]:
    """Return the stored tensors of `names` as new ones, by name.

    `earlier`: the module's tensors now, which determine the devices, and for DTensors the layout.
    Raises TypeError for a DTensor if the load requests another part (rank or layout).
    """
    request, number = loader.request, section.number
    sharded = [name for name in names if hasattr(earlier.get(name), "device_mesh")]
    if sharded and not request.by_target:
        raise TypeError(
            f"{sharded[0]!r} is a part of a tensor, and its layout is known: do not pass layout=, "
            "rank= and world_size="
        )
    unsharded = [name for name in names if name not in sharded]
    cutting = (None, 0, 0) if request.by_target else request.cutting
    arrays = loader.load_tensors(section, unsharded, cutting)
    tensors = torch_backend("modules", TensorBackend).tensors_of(arrays)
    for name, key in zip(sharded, section.keys(sharded), strict=True):
        tensors[name] = load_like(loader, number, key, earlier[name])
    return {name: like_tensors(tensors[name], earlier.get(name)) for name in names}


def prepare_units(
    loader: Loader,
    section: Section,
    filling: Any,
    chosen: list[str],
    stored: StoredEntries,
    names: Names,
    sources: Sources,
) -> list[Action]:
    """Read the entries of submodules that load themselves; return the action that loads them.

    [] if there are none. The module is not changed yet. `filling`: the result of `fill_module` for
    it. `chosen`: names that the load selects, from the user's choice `names`.
    `stored`: entries that are not tensors. `sources`: of the targets so far; the submodules' are
    added. Raises CompatibilityError for another dtype, a choice of only some entries of a
    submodule, or a submodule that an earlier target loads from other entries.
    """
    contract = filling.contract
    if contract is None or not contract.units:
        return []
    every = [*section.names, *stored.entries]
    units = _selected_units(contract, names, every, chosen)
    if not units:
        return []
    _check_dtypes(loader, section, contract, units)
    names_by_unit = _by_unit(contract, chosen)
    unit_names = [name for unit in units for name in names_by_unit.get(id(unit), ())]
    tensors = [name for name in unit_names if name not in stored.entries]
    entries = _read_tensors(loader, section, tensors, contract.entries)
    for name in unit_names:
        if name in stored.entries:
            entries[name] = like_tensors(stored.entries[name], contract.entries.get(name))
    # a submodule in two units is noted once; `prefix`: of the names of its entries
    modules = {id(each): (prefix, each) for u in units for prefix, each in contract.modules_of(u)}
    for prefix, submodule in modules.values():
        for name in (each for each in entries if each.startswith(prefix)):
            where = f"{section.label}[{name!r}]"
            text = partial(_text_of_entries, {"": entries[name]}, where)
            sources.add(submodule, where, text, name[len(prefix) :])
    load = filling.own_load(entries, stored.metadata, units, strict=loader.options["strict"])
    return [Action(section.label, load.apply, load.undo)]
