"""Files of ``torch.save`` (``.pt``, ``.bin``): read without running their code, written.

A file contains a tree of dicts: a plain state dict, or a dict with a model, an optimizer in the
form of ``optimizer.state_dict()``, and plain values. This module writes only tensors and plain
values, so that torch can read the files without mlstate.
"""

from __future__ import annotations

import errno
import re
import struct
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ...._common.regular_file import open_regular
from ....checkpoint._files.parts import Parts, Unreadable, is_flat
from ....checkpoint._layouts.entries import RECORD, malformed, sort_entries
from ....checkpoint._states.modules import split_entries
from ....errors import CompatibilityError
from ....state._compatibility import join
from ....state._kind import describe
from ....state._optimizer_state import OptimizerStateDict
from .._tensors.state import tensors_of
from .file_optimizer import optimizer_of as optimizer_of
from .optimizer import number_states, packed_states, unpack_state
from .optimizer_values import NOT_VALUES, decode_value

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ...._common.atomic_file import Target


# ---- states to trees ----


def _compact_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors` with copies of those that use only a part of their storage.

    A file would contain the whole storage. Tied tensors that together use their whole storage stay
    tied.
    """
    filled: Counter[int] = Counter()
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():
        filled[tensor.untyped_storage().data_ptr()] += tensor.nbytes
    copies: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        wasted = storage.nbytes() > filled[storage.data_ptr()]
        copies.setdefault(id(tensor), tensor.clone() if wasted else tensor)
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _cpu_tensors(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return all values as plain CPU tensors."""
    tensors = tensors_of(state)
    return _compact_tensors({name: tensor.cpu() for name, tensor in tensors.items()})


def _check_names(state: OptimizerStateDict, listed: list[str]) -> None:
    """Raise CompatibilityError unless all arrays are states of the parameters that groups list."""
    parameters = set(state.parameters())
    unknown = sorted(parameters - set(listed))
    others = [n for n in state if n.rpartition(".")[0] not in parameters or n.endswith(".")]
    if others:
        raise CompatibilityError(
            "the optimizer has arrays that are not named <parameter>.<state>, as torch needs: "
            f"{join(others)}; convert to another format, or leave the optimizer out (--skip)",
            name=others[0],
        )
    if unknown:
        text = "the optimizer has states of parameters that none of its groups lists: "
        raise CompatibilityError(text + join(unknown), name=unknown[0])


def _optimizer_tree(state: OptimizerStateDict, *, numbered: bool = False) -> dict[str, Any]:
    """Return an optimizer's state in the form of ``optimizer.state_dict()``.

    Parameters are numbers if `numbered`, or if all names are (``param_0`` and so on), else names.
    Raises CompatibilityError if a parameter with states is in none of the groups, or if an array is
    not the state of a parameter.
    """
    saved = state.param_groups or ({"lr": state.learning_rate, "params": list(state.parameters())},)
    listed = [str(name) for group in saved for name in group.get("params", ())]
    _check_names(state, listed)
    numbered = numbered or listed == [f"param_{i}" for i in range(len(listed))]
    # torch's key of each parameter
    keys: dict[str, Any] = {name: i if numbered else name for i, name in enumerate(listed)}
    numbers = number_states(saved)
    states: dict[Any, dict[str, Any]] = {}
    nested = packed_states(saved) & state.keys()
    tensors = _cpu_tensors({key: v for key, v in state.items() if key not in nested})
    for key, value in {**tensors, **{key: unpack_state(key, state[key]) for key in nested}}.items():
        name, _, state_name = key.rpartition(".")
        is_number = key in numbers and value.numel() == 1
        states.setdefault(keys[name], {})[state_name] = value.item() if is_number else value
    groups = [
        {
            **{k: decode_value(v, k) for k, v in group.items() if k not in NOT_VALUES},
            "params": [keys[str(name)] for name in group.get("params", ())],
        }
        for group in saved
    ]
    return {"state": states, "param_groups": groups}


def _state_value(value: Any, where: str, *, numbered: bool = False) -> Any:
    """Return a named state as torch's reader accepts it: arrays become tensors.

    `where`: name of the value in errors. `numbered`: of the parameters of an optimizer. Raises
    CompatibilityError for other objects.
    """
    if isinstance(value, OptimizerStateDict):
        return _optimizer_tree(value, numbered=numbered)
    if is_flat(value):
        return _cpu_tensors(value)
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "data_ptr"):
        return _cpu_tensors({where: value})[where]
    if isinstance(value, dict):
        return {key: _state_value(each, f"{where}[{key!r}]") for key, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_state_value(each, where) for each in value)
    if value is not None and not isinstance(value, bool | int | float | complex | str | bytes):
        raise CompatibilityError(
            f"{where} is a {type(value).__name__}, which files of torch cannot hold without pickle:"
            " convert to a checkpoint of mlstate, or leave the state out (--skip)"
        )
    return value


def tree_of(parts: Parts) -> dict[str, Any]:
    """Return a tree that torch can store, of the parts of a state.

    For a model alone: its tensors by name, for ``module.load_state_dict``. Otherwise the entries
    ``model``, ``optimizer``, ``metadata``, one for each named state, and ``mlstate``, which records
    the classes of the states. Raises ValueError if a state has the name of another entry, and
    CompatibilityError for a value that torch's files cannot hold without pickle.
    """
    kinds = {"model": describe(parts.model), "optimizer": describe(parts.optimizer)}
    texts = {kind: text for kind, text in kinds.items() if text is not None}
    tree = entries_of(parts)
    if tree.keys() == {"model"} and not parts.metadata and not texts:
        return tree["model"]  # type: ignore[no-any-return]
    return {**tree, "metadata": dict(parts.metadata), RECORD: {"version": "1", **texts}}


def entries_of(parts: Parts, *, numbered: bool = False) -> dict[str, Any]:
    """Return ``model``, ``optimizer`` and each named state in the forms of torch, by name.

    `numbered`: optimizers number their parameters, in the order of their groups. Raises as
    `tree_of`.
    """
    states, entries = split_entries(parts.states)
    for name in ("model", "optimizer", "metadata", RECORD):
        if name in states:
            text = f"a state has the name {name!r} of another entry: leave it out (--skip)"
            raise ValueError(text)
    named = {"model": parts.model, "optimizer": parts.optimizer}
    values = {**{name: value for name, value in named.items() if value is not None}, **states}
    tree = {n: _state_value(v, f"states[{n!r}]", numbered=numbered) for n, v in values.items()}
    for state, (others, metadata) in entries.items():
        key = "model" if state is None else state
        tree[key] = OrderedDict({**tree[key], **_state_value(dict(others), "model")})
        if metadata:
            tree[key]._metadata = OrderedDict(metadata)
    return tree


# ---- .pt, .pth, .bin ----


def read_pt(path: Path) -> Parts:
    """Read a ``torch.save`` file without running code from it, and divide it into parts.

    Files in the zip format are memory-mapped, and the arrays share this memory. Raises FormatError
    for damage; objects that are not plain are listed as unreadable.
    """
    return sort_entries(_load_pickle(path, maps=True), path)


def read_tree(path: Path) -> Any:
    """Read any value from a ``torch.save`` file without running code from it.

    Beyond tensors and plain values, it may hold NumPy arrays and scalars, paths, namespaces of
    argparse, and members of enums that the program has imported. Other objects become `Unreadable`.
    Raises FormatError for damage.
    """
    return _load_pickle(path, maps=False)


def read_ranks(paths: list[Path], *, keeps_differences: bool = False) -> Any:
    """Read the value that each rank of a job saved to one of `paths`, in rank order, as one value.

    Files are read as by `read_tree`. Parts of a DTensor are joined to whole tensors; all other
    values must be equal. Raises CompatibilityError if they differ or a part is missing, FormatError
    for damage. `keeps_differences`: entries of a dict that differ become lists by rank instead.
    """
    import logging

    from .rank_files import join_ranks

    def is_logged(_record: object) -> bool:
        return False

    logger = logging.getLogger("torch.distributed.device_mesh")
    logger.addFilter(is_logged)  # it warns that the groups of the mesh do not exist here
    try:
        trees = [_load_pickle(path, maps=len(paths) > 1) for path in paths]
        return join_ranks(trees, paths[0], keeps_differences=keeps_differences)
    finally:
        logger.removeFilter(is_logged)


def write_tree(tree: Any, file: IO[bytes]) -> None:
    """Write any value to an open file with ``torch.save``.

    If `file` raises an OSError, this is raised itself; torch would replace it by another error.
    """
    import torch

    try:
        torch.save(tree, file)
    except RuntimeError as error:
        cause = error.__context__  # torch's archive is incomplete after an error of the file
        if not isinstance(cause, OSError):
            raise
        raise cause from None


def _empty_array(cls: Any, shape: Any, code: Any) -> Any:
    """Return an array for a pickle to fill: the next instruction of the pickle sets its size.

    It takes the arguments of NumPy's own function, which could allocate any memory.
    """
    return np.empty(0, np.uint8)


# What `torch.load` raises for damaged files.
_DAMAGE = (
    RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError, AssertionError,
    ArithmeticError, struct.error,
)  # fmt: skip


def _reason_of(name: str) -> str:
    """Return why an object of the class `name` is not read."""
    return (
        f"a {name}, which is neither a tensor nor a plain value: save the tensors alone, or, if "
        "you trust who made the file, open it by torch.load(..., weights_only=False) and save its "
        "state_dict()"
    )


@cache
def _placeholder(name: str) -> type:
    """Return a class in place of the one that a pickle names: it has no content, and runs no code.

    It is a class of tensors, because pickles of subclasses of tensors pass it to torch's functions.
    """
    import torch

    def create(cls: Any, *_arguments: Any, **_keywords: Any) -> Any:
        return torch.empty(0).as_subclass(cls)

    def ignore(self: Any, *_arguments: Any, **_keywords: Any) -> None:
        pass

    def dispatch(_cls: Any, *_arguments: Any, **_keywords: Any) -> Any:
        raise TypeError(f"{name} is not read")

    content = {
        "__new__": create,
        "__init__": ignore,
        "__setstate__": ignore,
        "__torch_dispatch__": classmethod(dispatch),
        "reason": _reason_of(name),
    }
    metaclass: Any = type(torch.Tensor)
    cls: type = metaclass("Unreadable", (Unreadable, torch.Tensor), content)
    return cls


def _allowed_globals(path: Path | IO[bytes]) -> tuple[list[Any], list[str]]:
    """Return the classes that torch's reader may use, and the names of those it has no access to.

    The first are for ``torch.serialization.safe_globals``, with placeholders for the others.
    `path`: the file, which decides on enums and DTensors: only those that it names are accepted.
    """
    import pathlib
    import sys
    from argparse import Namespace
    from enum import Enum
    from operator import attrgetter

    import torch

    scalar = np._core.multiarray.scalar  # type: ignore[attr-defined]
    dtypes = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + "?efdFD"}
    classes: list[Any] = [np.dtype, *dtypes, np.ndarray, Namespace]
    allowed = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        allowed |= {f"{core}.scalar": scalar, f"{core}._reconstruct": _empty_array}
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
        cls = getattr(pathlib, name)
        allowed |= {f"pathlib.{name}": cls, f"pathlib._local.{name}": cls}
    names: list[str] = []
    with suppress(Exception):  # not in the zip format, or damaged: `torch.load` tells how
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if any(name.startswith("torch.distributed.tensor.") for name in names):
        import torch.distributed.tensor  # makes DTensors loadable

        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    for name in names:
        module, _, attribute = name.rpartition(".")
        with suppress(AttributeError):
            cls = attrgetter(attribute)(sys.modules.get(module))
            if isinstance(cls, type) and issubclass(cls, Enum):
                allowed[name] = cls
    unknown = sorted(set(names) - allowed.keys())
    allowed |= {name: _placeholder(name) for name in unknown}
    return [(cls, name) for name, cls in allowed.items()], unknown


def load_value(file: Path | IO[bytes], where: object, *, maps: bool = False) -> Any:
    """Return the content of a file of torch, read without running code in it.

    Objects that are neither tensors nor plain values become `Unreadable`, or the whole content does
    if an object cannot be replaced. `where`: name of the file in errors. `maps`: map the tensors
    into memory instead of reading them. Raises FormatError for damage.
    """
    from pickle import UnpicklingError

    import torch

    allowed, unknown = _allowed_globals(file)
    if not hasattr(file, "suffix"):
        file.seek(0)
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")  # torch's warnings about its storage classes
            return torch.load(file, map_location="cpu", weights_only=True, mmap=maps)
    except UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        names = [match[1]] if match else unknown
        if names:
            return Unreadable(_reason_of(names[0]))
        raise malformed(where, f"torch cannot read it: {first_line(error)}") from None
    except (OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # of a truncated archive
            raise
        raise malformed(where, "torch cannot read it: it ends too early") from None
    except _DAMAGE as error:
        raise malformed(where, f"torch cannot read it: {first_line(error)}") from None


def _load_pickle(path: Path, *, maps: bool) -> Any:
    """Return the content of the torch file at `path`, as `load_value` reads it.

    `maps`: map the tensors into memory instead of reading them, if the file is in the zip format.
    """
    with open_regular(path) as file:
        if path.suffix == ".safetensors":  # torch trusts this suffix of a path
            return load_value(file, path)
        zipped = file.read(4) == b"PK\x03\x04"
    return load_value(path, path, maps=maps and zipped)


def first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def write_pt(target: Target, parts: Parts) -> None:
    """Atomically write a file that ``torch.load`` reads with ``weights_only``.

    `target`: the path; its old content is replaced. `parts`: those that are None are left out.
    Raises as `tree_of` does, before anything is written.
    """
    tree = tree_of(parts)
    target.write_content(partial(write_tree, tree))
