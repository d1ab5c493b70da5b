"""`load` and `verify` of formats without an index (npz, .pt, DCP): read whole, then cut, renamed.

whole_path   -> the format of a path, if only `read_any` reads it
load_whole   -> the loaded state
verify_whole -> adds to a report what can be checked
"""

from __future__ import annotations

import datetime
import os
import zipfile
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _core
from .._common.arrays import is_on_device, is_torch
from .._common.backend import TensorBackend, backend_of, is_module, is_optimizer, torch_backend
from .._common.dtypes import name_of
from .._common.regular_file import open_regular
from .._sharding.layout import Cutting, Layout
from ..errors import CompatibilityError, FormatError, MLStateError, StoreError
from ..state._compatibility import as_dict
from ..state._kind import KEY, kind_of
from ..state._load_into import check_load, load_into
from ..state._optimizer_state import OptimizerStateDict
from ..state._state_dict import StateDict
from ._files.flat_file import PARTS, as_arrays
from ._files.formats import format_of
from ._files.parts import is_flat
from ._files.read_write import read_any
from ._files.torch_weights import torch_weights_root
from ._folder.local import LocalFolder
from ._folder.names import SECTIONS
from ._load_targets import names_error
from ._sections import OPTIMIZER, Section, rename_sections
from ._store.manifest import Manifest
from ._store.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .._types import NDArray
    from ._files.parts import Parts
    from ._folder.protocol import Folder
    from ._load import LoadRequest
    from ._loaded_state import LoadedState
    from ._report import VerifyReport

_WHOLE = ("npz", "torch", "dcp", "lightning", "torch_checkpointing")
_SECTIONS = ("model", "optimizer")
_ZIP_BLOCK = 1 << 20


class WholePath(NamedTuple):
    """The path of a file or folder that is read whole, and its format."""

    path: str
    format: str

    def read(self, *, checked: bool = True) -> Parts:
        """Read all of it; `checked`: compare the files with checksums of `checksum`, if any."""
        return read_any(self.path, format=self.format, checked=checked)


# Formats whose arrays are views of mapped files: a load returns memory that no writer changes.
_MAPPED = ("torch", "huggingface")

# ---- which formats ----


def has_safetensors_header(path: str) -> bool:
    """Return whether a file starts like safetensors: a plausible header length, then a brace."""
    with open_regular(path) as file:
        start = file.read(9)
        size = file.seek(0, 2)
    return len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") <= size - 8


def _has_optimizer(path: str) -> bool:
    """Return whether the metadata of a safetensors file describe an optimizer in it.

    False if the metadata cannot be read: reading the tensors reports this.
    """
    try:
        texts = _core.file_metadata(path, True)
    except MLStateError:  # reading the tensors reports it
        return False
    return PARTS in texts or '"kind": "optimizer"' in texts.get(KEY, "")


def whole_path(folder: Folder) -> WholePath | None:
    """Return path and format of a local file or folder that is read whole; else None.

    These are the formats `_WHOLE`, Hugging Face folders with torch's weights, and safetensors
    files. If `folder.file` names one file of the folder, only that file counts, and only if it is
    a safetensors file with an optimizer.
    """
    if not folder.is_local:
        return None
    path = os.path.join(folder.path, folder.file) if folder.file else str(folder.path)
    if folder.file:
        is_whole = folder.file.endswith(".safetensors") and _has_optimizer(path)
        return WholePath(path, "safetensors") if is_whole else None
    if not os.path.exists(path):
        return None
    if os.path.isfile(path) and has_safetensors_header(path):
        return WholePath(path, "safetensors")
    try:
        name = format_of(path)
    except ValueError:  # the suffix belongs to no format
        name = ""
    if name == "huggingface" and torch_weights_root(LocalFolder(path)) is not None:
        return WholePath(path, name)
    return WholePath(path, name) if name in _WHOLE else None


# ---- listing ----


class WholeIndex:
    """The tensors of parts in memory, with the methods of a merged index that list them."""

    def __init__(self, path: str, parts: Parts) -> None:
        """List the tensors of `parts`, the content of the file or folder at `path`."""
        self._path = path
        states = {n: StateDict(value) for n, value in parts.states.items() if is_flat(value)}
        prefixed = {f"{n}/{key}": state[key] for n, state in states.items() for key in state}
        self._sections = [dict(parts.model or {}), dict(parts.optimizer or {}), prefixed]

    def keys(self, section: int) -> list[str]:
        """Return the sorted names of the tensors of a section."""
        return sorted(self._sections[section])

    def tensors(self) -> list[tuple[Any, ...]]:
        """Return the fields of a `TensorRecord` for each tensor in memory."""
        rows = []
        for number, section in enumerate(SECTIONS):
            for key in self.keys(number):
                array = self._sections[number][key]
                parameter, state = key, None
                if number == OPTIMIZER and "." in key:
                    parameter, _, state = key.rpartition(".")
                dtype, shape, nbytes = name_of(array.dtype), tuple(array.shape), int(array.nbytes)
                # one whole shard of version 1: no layout, no tier, neither sparse nor compressed
                row = (section, key, parameter, state, dtype, shape)
                rows.append((*row, (), None, 1, nbytes, 1, None, nbytes, 0, None))
        return rows

    def shards(self) -> list[Any]:
        """Return no shards: the format does not tell where the tensors are."""
        return []

    def files(self) -> dict[str, int]:
        """Return the sizes of the files."""
        return {name: os.path.getsize(path) for name, path in _files(self._path).items()}

    def heads(self) -> list[tuple[Any, ...]]:
        """Return one head, as of one index file; its last two fields are the bytes of all tensors.

        These are the bytes of the shards, and their bytes in files. The fields before, such as the
        number of shards, are 0: unknown.
        """
        total = sum(int(a.nbytes) for section in self._sections for a in section.values())
        return [(0, 0, 0, 0, total, total)]


def manifest_of(source: WholePath, parts: Parts) -> Manifest:
    """Return a manifest that describes a file or folder of another program, `source`.

    `parts`: its content, in memory. No save wrote it: the manifest has no generation, no indexes,
    and the time of the last change as the time of the save.
    """
    changed = datetime.datetime.fromtimestamp(os.path.getmtime(source.path), datetime.UTC)
    root = os.path.basename(source.path)
    return Manifest(
        generation="",
        sequence=1,
        created=changed.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        writer=f"a program that writes the format {source.format}",
        step=parts.step,
        world_size=1,
        model=None if parts.model is None else _kind_of(parts.model),
        optimizer=None if parts.optimizer is None else _kind_of(parts.optimizer),
        metadata=dict(parts.metadata),
        states={
            name: {"kind": "state" if is_flat(value) else "tree"}
            for name, value in parts.states.items()
        },
        indexes=(),
        weights=WeightFiles(root, tuple(_files(source.path))),
    )


def _kind_of(state: StateDict) -> dict[str, Any]:
    """Return the manifest's description of a state; only its kind if JSON cannot hold the rest."""
    try:
        return kind_of(state) or {"kind": "state"}
    except (TypeError, ValueError):  # values that JSON cannot hold
        return {"kind": "optimizer" if isinstance(state, OptimizerStateDict) else "state"}


# ---- loading ----


def _refuse_options(source: WholePath, request: LoadRequest) -> None:
    """Raise ValueError for options of `request` that need an index, which `source` lacks."""
    options = request.options
    for name, is_given in (
        ("mmap=True", options["mmap"]),
        ("verify='first'", options["verify"] == "first"),
        (f"missing={options['missing']!r}", options["missing"] != "skip"),
    ):
        if is_given:
            raise ValueError(
                f"{source.path}: {name} is not possible for the format {source.format}: leave it "
                "out, or convert it by mlstate convert first"
            )
    group, into = options["group"], options["into"]
    if group is not None and group.world_size > 1 and into is not None:
        raise ValueError(
            f"{source.path}: into= with a group is not possible for the format {source.format}: "
            "convert it by mlstate convert first, or load without into="
        )


def _shapes_of_parameters(
    states: dict[str, Any], model: dict[str, Any]
) -> dict[str, dict[tuple[int, ...], str]]:
    """Return the shapes that an optimizer's states may have, by the names of their parameters.

    Each has its text for errors. It is the shape of the parameter in `model`; if that lacks it,
    the shapes of its states in `states`, except of single elements.
    """
    shapes: dict[str, dict[tuple[int, ...], str]] = {}
    for name, array in states.items():
        parameter, shape = name.rpartition(".")[0], tuple(array.shape)
        if parameter in model:
            shapes[parameter] = {tuple(model[parameter].shape): "its parameter"}
        elif parameter and shape not in ((), (1,)):
            shapes.setdefault(parameter, {}).setdefault(shape, repr(name))
    return shapes


def _cut(name: str, array: Any, cutting: Cutting, shapes: dict[tuple[int, ...], str] | None) -> Any:
    """Return the part of the tensor `name` that `cutting` requests, as a new array.

    The array itself is returned for all of it. `shapes`: for an optimizer's state, as of
    `_shapes_of_parameters`; None for other tensors. States with one element or without axes stay
    whole. Raises CompatibilityError for any other shape than the parameter's, or for different
    shapes if the parameter is unknown.
    """
    steps, index, world = cutting
    if not steps or not world:
        return array
    shape = tuple(array.shape)
    if shapes is not None and shape in ((), (1,)) and shape not in shapes:
        return array
    for other, label in (shapes or {}).items():
        if other == shape:
            continue
        error = CompatibilityError(
            f"{name!r} has shape {shape}, and {label} {other}: the format does not tell how to "
            "cut it; load it whole, or convert it by mlstate convert first"
        )
        error.name = name
        raise error
    steps, index = _core.layout_project(steps, index, len(shape), None)
    part = Layout(steps).take(array, index)
    return part if part is array else part.copy()


def _renamed_arrays(
    states: dict[str, Any], rules: Mapping[str, str] | None
) -> list[dict[str, Any]]:
    """Return the arrays of each state by name, after the caller's renaming; {} for None.

    `states`: by their labels in errors; the first two are model and optimizer. `rules`: pattern to
    replacement, None for no renaming. The groups of optimizers in `states` get the new names.
    """
    arrays = [{} if state is None else dict(state) for state in states.values()]
    if rules is None:
        return arrays
    sections = [
        Section(label, number, kind_of(state), each)
        for number, ((label, state), each) in enumerate(zip(states.items(), arrays, strict=True))
    ]
    rename_sections(sections, rules)
    for state, section in zip(states.values(), sections, strict=True):
        if isinstance(state, OptimizerStateDict):
            state.param_groups = (section.kind or {})["param_groups"]
    return [
        {name: each[section.keys([name])[0]] for name in section.names}
        for each, section in zip(arrays, sections, strict=True)
    ]


def _states_to_change(
    source: WholePath, parts: Parts, request: LoadRequest
) -> dict[str, dict[str, Any]]:
    """Return the named states of tensors that `request` renames, cuts or converts; else {}.

    A renaming counts their names even if ``names`` or ``into`` leave them out. A state with a name
    that no file can hold is then omitted; otherwise it raises ValueError.
    """
    options = request.options
    is_loaded = request.names is None and options["into"] is None
    if not (options["rename"] or (is_loaded and (request.cutting[0] or request.dtype))):
        return {}
    states = {name: value for name, value in parts.states.items() if is_flat(value)}
    for name, state in list(states.items()) if options["rename"] else ():
        try:
            StateDict(state)
        except ValueError as error:
            if is_loaded:
                raise ValueError(f"{source.path}: states[{name!r}]: {error}") from None
            del states[name]
    return states


def _array_of(name: str, value: Any, path: str) -> NDArray:
    """Return a tensor of a named state as an array; `path` starts the text of errors.

    Raises UnstorableError for tensors without plain memory, TypeError for Python objects.
    """
    try:
        if is_torch(value):
            backend_of(value, TensorBackend).refuse_unstorable(name, value)
        return as_arrays({name: value})[name]
    except (CompatibilityError, TypeError) as error:
        text = "leave out cast= and layout=, which need plain tensors, or choose others by names="
        error.args = (f"{path}: {error}; {text}",)
        raise


def _with_arrays(state: Any, arrays: dict[str, Any]) -> Any:
    """Return a copy of a state, a `StateDict` or dict, with other arrays; None for None."""
    if state is None:
        return None
    result = copy(state)
    result.clear()
    result.update(arrays)
    return result


def _fill(source: WholePath, request: LoadRequest, arrays: list[dict[str, Any]]) -> list[Any]:
    """Copy model and optimizer into the targets of ``into``; return both targets.

    A target that the user did not pass is None. `source`: for errors. `arrays`: of model
    and optimizer, by name. Everything is checked before one is changed. Raises CompatibilityError
    for other names, shapes or dtypes, ValueError for named states, a torch optimizer, an array that
    cannot be written, or arrays that overlap.
    """
    into, strict = request.options["into"], request.options["strict"]
    take = into.get if hasattr(into, "get") else lambda name: getattr(into, name, None)
    if take("states"):
        raise ValueError(
            f"{source.path}: the format {source.format} fills no named states of into="
        )
    targets = [take(name) for name in _SECTIONS]
    for label, target, each in zip(_SECTIONS, targets, arrays, strict=True):
        if is_optimizer(target):
            raise ValueError(
                f"{source.path}: into= cannot fill a torch optimizer from the format "
                f"{source.format}: convert it by mlstate convert first"
            )
        if target is not None and not each and strict:
            error = CompatibilityError(f"{source.path} holds no {label}")
            error.path = source.path
            raise error
    if request.names is not None:
        strict = False
        for target, each in zip(targets, arrays, strict=True):
            known = None if target is None else StateDict(target)
            absent = [name for name in each if known is not None and name not in known]
            if absent:
                raise names_error([], absent, [], source.path)
    model, optimizer = targets
    if optimizer is not None and model is not None:
        # raises before the model is changed
        check_load(optimizer, arrays[1], strict=strict, cast=request.cast)
    if model is not None and not is_module(model):
        check_load(model, arrays[0], strict=strict, cast=request.cast)
    filled = []
    for label, target, each in zip(_SECTIONS, targets, arrays, strict=True):
        if target is not None and not is_module(target):
            have = as_dict(target)
            names = [name for name in each if name in have and not is_on_device(have[name])]
            filled.append((label, names, have))
    _core.targets_tied(filled)  # raises if arrays overlap
    for target, each in zip(targets, arrays, strict=True):
        if target is not None:
            load_into(target, each, strict=strict, cast=request.cast)
    return targets


def _moved_to(device: Any, value: Any) -> Any:
    """Return a nested value with its tensors on `device`; dicts and lists in it are changed."""
    if is_torch(value):
        return backend_of(value, TensorBackend).move_tensor(value, device)
    if isinstance(value, StateDict):
        backend = torch_backend("tensors on a device=", TensorBackend)
        value.update(backend.tensors_of(value))
    if isinstance(value, dict):
        for key in value:  # `update` of a Counter would add
            value[key] = _moved_to(device, value[key])
    elif isinstance(value, list):
        value[:] = [_moved_to(device, inner) for inner in value]
    elif type(value) is tuple:
        return tuple(_moved_to(device, inner) for inner in value)
    return value


def load_whole(source: WholePath, request: LoadRequest) -> LoadedState:
    """Read the file or folder `source`; return the selected tensors, or this rank's parts of them.

    `request`: the checked arguments of the load. Its `into` is filled and returned, without named
    states; otherwise arrays are copies if the file was mapped, so that a later writer cannot change
    them. Its dtype is for the floats of the model, and of named states of tensors other than
    optimizers. `progress` is called once, with the bytes of model and optimizer. Raises ValueError
    for options that need an index, before anything is read.
    """
    from .._common.converted import converted_value
    from ._load import chosen_names, expects_parts, warn_of_whole_tensors
    from ._loaded_state import LoadedState
    from ._quantized.pairs import refuse_quantized_state

    _refuse_options(source, request)
    if expects_parts(request.options):
        warn_of_whole_tensors(request.options, source.path)
    parts = source.read(checked=bool(request.options["verify"]))
    if request.dtype and source.format == "huggingface" and parts.model is not None:
        refuse_quantized_state(source.path, parts.model)
    named = _states_to_change(source, parts, request)
    all_states: dict[str, Any] = {"model": parts.model, "optimizer": parts.optimizer}
    all_states |= {f"states[{name!r}]": state for name, state in named.items()}
    sections = _renamed_arrays(all_states, request.options["rename"])
    if request.options["progress"] is not None:
        request.options["progress"](sum(a.nbytes for each in sections[:2] for a in each.values()))
    _, chosen = chosen_names([list(each) for each in sections[:2]], request.names, source.path)
    is_loaded = request.names is None and request.options["into"] is None
    if is_loaded and (request.cutting[0] or request.dtype):
        chosen += [list(each) for each in sections[2:]]
    is_mapped = source.format in _MAPPED and request.options["into"] is None
    arrays: list[dict[str, Any]] = []
    for (label, state), section, names in zip(all_states.items(), sections, chosen, strict=False):
        is_optimizer_state = isinstance(state, OptimizerStateDict)
        shapes = _shapes_of_parameters(section, sections[0]) if is_optimizer_state else {}
        arrays.append({})
        for name in names:
            array = value = section[name]
            if label not in _SECTIONS:
                array = _array_of(name, value, f"{source.path}: {label}")
            own_shapes = shapes.get(name.rpartition(".")[0], {}) if is_optimizer_state else None
            part = _cut(name, array, request.cutting, own_shapes)
            if request.dtype and not is_optimizer_state:
                part = converted_value(part, request.dtype)
            part = part.copy() if is_mapped and part is array else part
            if is_torch(value):
                part = backend_of(value, TensorBackend).tensors_of({name: part})[name]
            arrays[-1][name] = part
    metadata = dict(parts.metadata)
    step = parts.step
    if request.options["into"] is not None:
        filled_model, filled_optimizer = _fill(source, request, arrays[:2])
        return LoadedState(filled_model, filled_optimizer, metadata, step, {})
    states = dict(parts.states) if request.names is None else {}
    for name, state, section in zip(named, named.values(), sections[2:], strict=True):
        if name in states:  # values that change follow
            states[name] = _with_arrays(state, section) if len(chosen) == 2 else None
    if is_mapped:
        states = deepcopy(states)
    # `chosen` and `arrays` have named states only if their values change
    loaded = [_with_arrays(*each) for each in zip(all_states.values(), arrays, strict=False)]
    states |= dict(zip(named, loaded[2:], strict=False))
    device = request.options["device"]
    if device is not None:
        loaded = [_moved_to(device, state) for state in loaded[:2]]
        states = {name: _moved_to(device, value) for name, value in states.items()}
    return LoadedState(loaded[0], loaded[1], metadata, step, states)


# ---- verifying ----


def _files(path: str) -> dict[str, str]:
    """Return the paths of the regular files of a path, by their names in it.

    A path that is a file is its only one; a path that does not exist has none.
    """
    if os.path.isfile(path):
        return {os.path.basename(path): path}
    if not os.path.isdir(path):
        return {}
    names = sorted(os.listdir(path))
    return {name: os.path.join(path, name) for name in names if os.path.isfile(f"{path}/{name}")}


def _read_sizes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[int | None]:
    """Read a zip entry, and yield the bytes of each block; None, as the last, if it is damaged."""
    try:
        with archive.open(entry) as file:
            while block := file.read(_ZIP_BLOCK):
                yield len(block)
    except MemoryError:
        raise
    except Exception:  # each codec raises its own class, such as zlib.error
        yield None


def _open_zip(path: str) -> zipfile.ZipFile:
    """Open a zip file; raise BadZipFile, NotImplementedError or ValueError if it is damaged.

    Entries that share bytes are damage: such a small file could take hours to read.
    """
    archive = zipfile.ZipFile(path)
    if sum(entry.compress_size for entry in archive.infolist()) > os.path.getsize(path):
        archive.close()
        raise zipfile.BadZipFile("its entries overlap")
    return archive


def _damaged_entry(
    archive: zipfile.ZipFile, progress: Callable[[int], object] | None
) -> str | None:
    """Return the name of the first damaged or encrypted entry of a zip file; None without such.

    A good entry matches its CRC-32. `progress` is called with the bytes of each block read.
    """
    for entry in archive.infolist():
        for nbytes in _read_sizes(archive, entry):
            if nbytes is None:
                return entry.filename
            if progress is not None:
                progress(nbytes)
    return None


def verify_whole(
    source: WholePath, report: VerifyReport, progress: Callable[[int], object] | None
) -> None:
    """Read all of a file or folder of another program, and add its problems to `report`.

    `report.bytes` grows by the sizes of its files. `report.checksums` becomes True if all of them
    are zip files, whose CRC-32 values were compared. Only without a problem so far, the content is
    also read as a load does. `progress` is called with the bytes of each block of a zip file.
    """
    from ._report import file_problem

    files = _files(source.path)
    checked = 0
    for name, path in files.items():
        report.bytes += os.path.getsize(path)
        if not zipfile.is_zipfile(path):
            continue
        checked += 1
        entry, text = None, ""
        try:
            archive = _open_zip(path)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            text = f"the list of its entries is damaged: {error}"
        else:
            with archive:  # errors of `progress` are the caller's
                entry = _damaged_entry(archive, progress)
        if entry is not None:
            text = f"the entry {entry!r} does not match its CRC-32"
        if text:
            report.problems.append(file_problem("altered", name, text, name=entry))
    report.checksums = bool(files) and checked == len(files)
    if report.problems:
        return
    try:
        source.read()
    except (FormatError, CompatibilityError, StoreError) as error:
        name = os.path.basename(source.path)
        report.problems.append(file_problem("unreadable", name, str(error)))
