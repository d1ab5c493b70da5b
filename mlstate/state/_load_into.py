"""`load_into` (all or nothing, `strict=`, `cast=`), `rename`; their errors; torch modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from .. import _core
from .._common.arguments import check_flags, check_type
from .._common.arrays import is_same_memory, is_torch
from .._common.backend import TensorBackend, backend_of, is_module
from .._common.dtypes import FLOATS
from .._common.scales import CODE_FLOATS
from .._common.text import shorten
from ..errors import CompatibilityError
from ._backend import StateBackend
from ._compatibility import LISTED, LONGEST, as_dict, differences_of, join, rename_hint
from ._optimizer_state import OptimizerStateDict
from ._state_dict import StateDict

if TYPE_CHECKING:
    from .._types import Array

State = TypeVar("State", bound=StateDict)


def _quoted(names: list[str]) -> str:
    return join([f'"{name}"' for name in names])


def _refusal(
    target: dict[str, Any],
    source: dict[str, Any],
    strict: bool,
    cast: bool,
    missing: list[str],
    unexpected: list[str],
    shapes: list[tuple[str, object, object]],
    dtypes: list[tuple[str, object, object]],
) -> CompatibilityError:
    """Return an error that lists all mismatches, in torch's words.

    `missing`, `unexpected`: names that only the target, or only the source has. `shapes`, `dtypes`:
    (name, in the source, in the target). `strict` and `cast`: of the load; missing and unexpected
    names are left out unless `strict`, dtypes with `cast`. At least one mismatch must remain.
    """
    lines = []
    if strict and missing:
        lines.append(f"Missing key(s) in state_dict: {_quoted(missing)}.")
    if strict and unexpected:
        lines.append(f"Unexpected key(s) in state_dict: {_quoted(unexpected)}.")
    for name, have, want in shapes[:LISTED]:
        lines.append(
            f"size mismatch for {shorten(name, LONGEST)}: copying a tensor with shape {have} "
            f"from the source, the shape in the target is {want}."
        )
    if len(shapes) > LISTED:
        lines.append(f"... and {len(shapes) - LISTED:,} more of another size.")
    dtypes = [] if cast else dtypes
    for name, have, want in dtypes[:LISTED]:
        floats = have in FLOATS and want in FLOATS
        remedy = "cast=True converts floats" if floats else "convert the source first"
        if have in CODE_FLOATS and want in FLOATS:
            remedy = "mlstate.load with into= and cast=True computes values with their scales"
        lines.append(
            f"dtype mismatch for {shorten(name, LONGEST)}: {have} in the source, {want} in the "
            f"target; {remedy}."
        )
    if len(dtypes) > LISTED:
        lines.append(f"... and {len(dtypes) - LISTED:,} more of another dtype.")
    _, hint = rename_hint(source, target, unexpected, missing)
    if hint:
        lines.append(f"{hint}.")
    error = CompatibilityError("\n    ".join(["Error(s) in loading state_dict:", *lines]))
    mismatches = [*shapes, *dtypes]
    if mismatches:
        error.name, got, expected = mismatches[0]
        error.got, error.expected = str(got), str(expected)
    else:
        error.name = (missing or unexpected)[0]
    listed = (missing, unexpected) if strict else ([], [])
    error.differences = tuple(differences_of(*listed, shapes, dtypes))
    return error


def load_into(
    target: Mapping[str, Any],
    source: Mapping[str, Any],
    *,
    strict: bool = True,
    cast: bool = False,
) -> None:
    """Copy the tensors of one state into another: all of them, or none.

    Parameters
    ----------
    target : mapping of str to array, or torch.nn.Module
        The arrays to write, in place: writable NumPy arrays, or torch tensors in main memory
        (parameters of a module too). A module is filled as by ``load(into=)``: submodules with
        extra states, own load methods or hooks are loaded by these, before any array is filled.
    source : mapping of str to array, or torch.nn.Module
        The arrays to read.
    strict : bool, default True
        Require the same names in both. If False, copy only the tensors that both have.
    cast : bool, default False
        Convert between float16, bfloat16, float32 and float64, rounding to nearest. Without
        it, dtypes must be the same.

    Raises
    ------
    CompatibilityError
        Names, shapes or dtypes do not match. The message lists all mismatches in torch's
        words, as seen from the target, with both shapes. It proposes a `rename` if prefixes
        explain the names. ``differences`` lists them as `Difference` objects.
    ValueError
        A target is read-only, its elements share memory with one another, or it shares memory
        with the source of a tensor. Only a target that is exactly its own source is allowed;
        it is left unchanged. Or the target mapping returns copies of its arrays.
    TypeError
        An argument is not a mapping of str to array, or has a masked array.
    MLStateError
        A device failed during the copy to a module's tensor on it; the message names the tensor.
        The content of the module is then undefined.

    Notes
    -----
    Everything is checked before the first byte is written; the copy in main memory cannot fail.
    No memory is allocated for the elements, except main memory for a module's tensors on a
    device. The GIL is released, and large tensors are copied by `mlstate.threads.get_num_threads`
    threads. Target tensors that share memory, such as tied weights, are written in the order of
    the target. Autograd treats a write to a torch tensor as an in-place change without gradient,
    like ``load_state_dict`` of a module.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import load_into
    >>> weights = {"w": np.zeros(3, np.float32)}
    >>> load_into(weights, {"w": np.arange(3.0)}, cast=True)
    >>> weights["w"]
    array([0., 1., 2.], dtype=float32)
    >>> load_into(weights, {"module.w": np.ones(3, np.float32)})
    Traceback (most recent call last):
    mlstate.errors.CompatibilityError: Error(s) in loading state_dict:
        Missing key(s) in state_dict: "w".
        Unexpected key(s) in state_dict: "module.w".
        1 of 1 names match after rename(source, {'module.': ''}).
    """
    # After a copy of more than a level 2 cache, each Python function takes microseconds, because
    # its code was evicted. So a load of dicts calls few.
    if strict is not True or cast is not False:
        check_flags(strict=strict, cast=cast)
    arrays = source if isinstance(source, dict) else as_dict(source)
    if isinstance(target, dict):
        entries = target
    elif is_module(target):
        _load_into_module(target, arrays, strict, cast)
        return
    else:
        entries = as_dict(target)
        _refuse_copies(target, entries)
    others = _load(entries, arrays, strict, cast, False)  # those that are no arrays of NumPy
    if others:
        tensors = [getattr(value, "array", value) for value in others]
        if written := [tensor for tensor in tensors if is_torch(tensor)]:
            backend_of(written[0], TensorBackend).note_written(written)


def _refuse_copies(target: Mapping[str, Any], entries: dict[str, Any]) -> None:
    """Raise ValueError if a mapping returns a new copy of an array at each access.

    A write to the copy would be lost. `entries`: of `target`.
    """
    for name in () if target is entries else entries:
        first, again = (getattr(each, "array", each) for each in (entries[name], target[name]))
        is_strided = is_torch(first) and str(first.layout) == "torch.strided"
        if (isinstance(first, np.ndarray) or is_strided) and not is_same_memory(first, again):
            raise ValueError(
                f"target {name!r} is a new copy at each access, so a write to it would be lost: "
                "pass a mapping of the arrays themselves"
            )


def check_load(
    target: Mapping[str, Any], source: Mapping[str, Any], *, strict: bool, cast: bool
) -> None:
    """Raise what `load_into` would raise for these mappings; nothing is written."""
    _load(as_dict(target), as_dict(source), strict, cast, True)  # a dry run


def _load(
    target: dict[str, Any], source: dict[str, Any], strict: bool, cast: bool, dry_run: bool
) -> list[Any]:
    """Copy the arrays of `source` to `target`, and return the written ones; raise as `load_into`.

    `dry_run`: only check.
    """
    report = _core.state_load(target, source, strict, cast, dry_run)
    if isinstance(report, tuple):
        raise _refusal(target, source, strict, cast, *report)
    return report


def _load_into_module(module: Any, source: dict[str, Any], strict: bool, cast: bool) -> None:
    """Fill the tensors of a torch module from `source`; all of them, or none after an error.

    Submodules with own load methods or hooks load themselves; only the dtypes of their tensors are
    checked here, and their load is undone if it raises. `strict`, `cast`, and errors: as for
    `load_into`.
    """
    backend = backend_of(module, StateBackend)
    # `own_tensors` by name: of submodules that load themselves, by `own_load`
    target, own_tensors, own_load = backend.module_target(module, source, strict=strict)
    arrays = {name: value for name, value in source.items() if not target.loads_itself(name)}
    _load(target.arrays, arrays, strict, cast, True)  # a dry run
    entries = {name: source[name] for name in own_tensors if hasattr(source.get(name), "dtype")}
    *_, dtypes = _core.state_compare(entries, own_tensors)
    refused = [
        (name, got, expected)
        for name, got, expected in dtypes
        if not (cast and {got, expected} <= FLOATS)
    ]
    if refused:
        # the dtypes are the only mismatches, and `cast` does not help
        raise _refusal(own_tensors, entries, strict, False, [], [], [], refused)
    try:
        if own_load is not None:
            own_load.apply()
        # Everything was checked by the dry run above: only a copy to a device can fail.
        _core.state_load(target.arrays, arrays, strict, cast, False)  # no dry run
        target.finish([name for name in target.arrays if name in arrays])
    except BaseException:
        if own_load is not None:
            own_load.undo()
        raise


def check_rules(rules: object) -> None:
    """Raise TypeError if the rules of a rename are not a mapping."""
    check_type("rules", rules, Mapping, "a mapping of str to str")


def unused_rules(state: Mapping[str, object], rules: list[str]) -> ValueError:
    """Return the ValueError for the rules that match no name of `state`.

    `rules`: their prefixes. It suggests a name that they may be meant for.
    """
    old = rules[0].removeprefix("*")
    near = next((name for name in state if old and old in name), None) or next(iter(state), None)
    hint = "there are no names" if near is None else f"one name is {shorten(near, LONGEST)!r}"
    return ValueError(
        f"rename: no name matches {join([repr(rule) for rule in rules])}; {hint}. A prefix starts "
        "where the name does (with a star, where a part of it does) and ends at a dot or at the "
        "end of the name; unused='ignore' allows rules without a match"
    )


@overload
def rename(state: State, rules: Mapping[str, str], *, unused: str = ...) -> State: ...
@overload
def rename(
    state: Mapping[str, Array], rules: Mapping[str, str], *, unused: str = ...
) -> StateDict: ...
def rename(
    state: Mapping[str, Array], rules: Mapping[str, str], *, unused: str = "error"
) -> StateDict:
    """Rename tensors by their prefixes.

    Parameters
    ----------
    state : mapping of str to array, or torch.nn.Module
        The state; it is not changed.
    rules : mapping of str to str
        Old prefix to new prefix: ``{"module.": ""}`` removes a prefix, ``{"": "model."}`` adds
        one, and ``{"module": ""}`` removes the dot too. A prefix ends at a dot or at the end of
        the name: ``"layers.1"`` matches ``layers.1.w``, not ``layers.10.w``. With a leading
        star, a prefix also matches at the start of any later part of the name:
        ``{"*_orig_mod.": ""}``. Each rule is applied once to each name, in the order given.
    unused : {"error", "ignore"}, default "error"
        Whether to raise if a rule matches no name.

    Returns
    -------
    StateDict
        A new state dict with the same arrays in the same order. It has the class of `state`
        if that is a `StateDict`. The groups of an `OptimizerStateDict` list the new names of the
        parameters.

    Raises
    ------
    CompatibilityError
        Two names would become the same.
    ValueError
        A rule matches no name, leaves an empty name or an empty part of one (``layers..w``), or
        is only a star.
    TypeError
        `state` is not a mapping of str to array, or a rule is not a str.

    Examples
    --------
    >>> import numpy as np
    >>> from mlstate.state import rename
    >>> list(rename({"module.a": np.ones(1), "module.b": np.ones(1)}, {"module.": ""}))
    ['a', 'b']
    """
    check_rules(rules)
    if unused not in ("error", "ignore"):
        raise ValueError(f"unused must be 'error' or 'ignore', got {unused!r}")
    entries, pairs = as_dict(state), tuple(rules.items())
    renamed, unused_numbers = _core.state_rename(entries, pairs)  # of the rules without a match
    groups = []
    for group in state.param_groups if isinstance(state, OptimizerStateDict) else ():
        params = group.get("params", ())  # names, or positions, which have no prefixes
        old_names = {name: None for name in params if isinstance(name, str)}
        new_names, unused_here = _core.state_rename(old_names, pairs)
        new_name = dict(zip(old_names, new_names, strict=True))
        params = [new_name.get(name, name) for name in params]
        groups.append({**group, "params": params} if "params" in group else group)
        unused_numbers = [number for number in unused_numbers if number in unused_here]
    if unused_numbers and unused == "error":
        raise unused_rules(entries, [list(rules)[number] for number in unused_numbers])
    if not isinstance(state, StateDict):
        return StateDict(renamed)
    result = state.copy()
    result.clear()
    result.update(renamed)
    if isinstance(result, OptimizerStateDict):
        result.param_groups = groups
    return result
