"""`WholeSource`: formats that are read as a whole (torch, npz, DCP, Lightning), then cut."""

from __future__ import annotations

import os
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ... import _core
from ..._common.arguments import FLAG
from ..._common.arrays import is_torch
from ..._common.backend import TensorBackend, backend_of, is_module
from ..._common.caller import find_caller
from ..._common.dtypes import dtype_name, name_of
from ..._sharding.layout import Layout
from ...errors import CompatibilityError, MLStateError
from ...state._kind import kind_of
from ...state._load_into import check_load, load_into
from ...state._optimizer_state import OptimizerStateDict
from .._files.flat_file import as_arrays
from .._files.npz import restore_lost_dtypes
from .._files.parts import MODEL, is_flat
from .._files.parts import OPTIMIZER as OPTIMIZER_PART
from .._files.parts import STATES as STATES_PART
from .._files.safetensors_verify import verify_file
from .._folder.local import LocalFolder
from .._folder.names import SECTIONS
from .._folder.weight_names import TORCH_SUFFIX, is_index
from .._layouts.folders import step_folder
from .._options import LOAD_DEFAULTS
from .._quantized.config import entry_of_metadata, find_entry
from .._report import VerifyReport, note_refusal
from .._sections import OPTIMIZER, STATES
from .._states.collect import add_entries, take_states
from .._states.modules import split_entries
from .._store.manifest import Manifest, foreign_manifest
from .._store.weight_files import WeightFiles, parse_index
from .protocol import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import TypeAlias, Unpack

    from ..._common.callback import Progress
    from .._files.parts import Parts, Selection
    from .._options import LoadOptions
    from .protocol import How

    Read: TypeAlias = Callable[[bool, Selection | None], Parts]

# Formats whose arrays are views of mapped files: a load returns memory that no writer changes.
_MAPPED = ("torch", "huggingface")


_NBYTES = 9  # index of the bytes in a row of `tensors`


class MemoryIndex:
    """The tensors of parts in memory, with the methods of a merged index; see `Index`."""

    def __init__(self, path: str, parts: Parts) -> None:
        """List the tensors of `parts`, the content of the file or folder at `path`."""
        self._path = path
        states = {
            f"{name}/{key}": value
            for name, state in parts.states.items()
            if is_flat(state)
            for key, value in state.items()
        }
        self.sections = [dict(parts.model or {}), dict(parts.optimizer or {}), states]
        self._states = parts.states
        self._unreadable = parts.unreadable.get(MODEL, {})

    def keys(self, section: int) -> list[str]:
        """Return the keys of a section in the file's order, then tensors that cannot be read."""
        return [*self.sections[section], *([] if section else self._unreadable)]

    def tensors(self) -> list[tuple[Any, ...]]:
        """Return the fields of a `TensorRecord` for each tensor that can be read."""
        rows = []
        for number, section in enumerate(SECTIONS):
            unreadable = self._unreadable if number == 0 else {}
            for key in sorted(self.sections[number].keys() - unreadable.keys()):
                array = self.sections[number][key]
                parameter, state = key, None
                if number == OPTIMIZER and "." in key:
                    parameter, _, state = key.rpartition(".")
                dtype, shape = name_of(array.dtype), tuple(array.shape)
                nbytes = prod(shape) * array.dtype.itemsize  # a sparse tensor has no `nbytes`
                # one whole shard of version 1: no layout, no tier, neither sparse nor compressed
                row = (section, key, parameter, state, dtype, shape)
                rows.append((*row, (), None, 1, nbytes, 1, None, nbytes, 0, None))
        return rows

    def shards(self) -> list[Any]:
        """Return no shards: the format does not tell where the tensors are."""
        return []

    def files(self) -> dict[str, int]:
        """Return the sizes of the files."""
        return {name: os.path.getsize(path) for name, path in files_of(self._path).items()}

    def heads(self) -> list[tuple[Any, ...]]:
        """Return one head, as of one index file; its last two fields are the bytes of all tensors.

        These are the bytes of the shards, and their bytes in files. The fields before, such as the
        number of shards, are 0: unknown.
        """
        total = sum(row[_NBYTES] for row in self.tensors())
        return [(0, 0, 0, 0, total, total)]

    def parts(self, section: int, keys: list[str], cuts: Any) -> dict[str, Any]:
        """Return parts of tensors by key, as views of the arrays in memory.

        `cuts`: one cutting for all, or a place (shape, layout, index) for each. Raises
        CompatibilityError for an optimizer's state of another shape than its parameter.
        """
        for key in keys if section == 0 else ():
            if key in self._unreadable:
                raise self._unreadable[key]
        if isinstance(cuts, list):
            places, arrays = zip(keys, cuts, strict=True), self.sections[section]
            return {
                key: arrays[key].reshape(-1)[cut:at]  # a range of elements
                if isinstance(cut, int)
                else Layout(cut).take(arrays[key], at)
                for key, (_, cut, at) in places
            }
        steps, index, world = cuts
        if not steps or not world:
            return {key: self.sections[section][key] for key in keys}
        return {key: self._cut(section, key, steps, index) for key in keys}

    def _cut(self, section: int, key: str, steps: Any, index: int) -> Any:
        """Return part `index` of a tensor.

        States of an optimizer with one element or without axes stay whole. Raises
        CompatibilityError for a state of any other shape than the parameter's, or for different
        shapes if the parameter is unknown.
        """
        array = self.sections[section][key]
        shape, expected = tuple(array.shape), self._shapes.get((section, key.rpartition(".")[0]))
        if expected is not None and shape in ((), (1,)) and shape not in expected:
            return array
        for other, label in (expected or {}).items():
            if other != shape:
                name = key.partition("/")[2] if section == STATES else key
                raise CompatibilityError(
                    f"{name!r} has shape {shape}, and {label} {other}: the format does not tell "
                    "how to cut it; load it whole, or convert it by mlstate convert first",
                    name=name,
                )
        projected, number = _core.layout_project(steps, index, len(shape), None)
        return Layout(projected).take(array, number)

    @cached_property
    def _shapes(self) -> dict[tuple[int, str], dict[tuple[int, ...], str]]:
        """The shapes that states of an optimizer may have, by section and key of the parameter.

        Each has its text for errors. It is the shape of the parameter in the model; if that lacks
        it, the shapes of its states, except of single elements.
        """
        model, shapes = self.sections[0], dict[Any, dict[tuple[int, ...], str]]()
        for section in (OPTIMIZER, STATES):
            for key, array in self.sections[section].items():
                state, _, name = key.partition("/") if section == STATES else ("", "", key)
                if state and not isinstance(self._states.get(state), OptimizerStateDict):
                    continue
                expected = shapes.setdefault((section, key.rpartition(".")[0]), {})
                parameter, shape = name.rpartition(".")[0], tuple(array.shape)
                if parameter in model:
                    expected[tuple(model[parameter].shape)] = "its parameter"
                elif parameter and shape not in ((), (1,)):
                    expected.setdefault(shape, repr(name))
        return shapes


def files_of(path: str) -> dict[str, str]:
    """Return the paths of the regular files of a path, by their names in it.

    A path that is a file is its only one, but an index has the files that it lists; a path that
    does not exist has none. Raises FormatError for a damaged index.
    """
    if os.path.isfile(path):
        folder, name = os.path.split(path)
        files: tuple[str, ...] = ()
        if is_index(name):
            place = LocalFolder(folder)
            data = place.read(name, follow_links=True)
            files = parse_index(place, name, data, TORCH_SUFFIX).files
        return {each: os.path.join(folder, each) for each in (name, *files)}
    if not os.path.isdir(path):
        return {}
    names = sorted(os.listdir(path))
    return {name: os.path.join(path, name) for name in names if os.path.isfile(f"{path}/{name}")}


def _kind_of(state: Any) -> dict[str, Any]:
    """Return the manifest's description of a state; only its kind if JSON cannot hold the rest."""
    try:
        return kind_of(state) or {"kind": "state"}
    except (TypeError, ValueError):  # values that JSON cannot hold
        return {"kind": "optimizer" if isinstance(state, OptimizerStateDict) else "state"}


def _manifest_of(path: str, name: str, parts: Parts) -> Manifest:
    """Return a manifest that describes a file or folder of another program, of the format `name`.

    `parts`: its content. No save wrote it: the manifest has no generation, no indexes, and the time
    of the last change as the time of the save.
    """
    return foreign_manifest(
        "",
        os.path.getmtime(path),
        writer=f"a program that writes the format {name}",
        step=parts.step,
        model=None if parts.model is None else _kind_of(parts.model),
        optimizer=None if parts.optimizer is None else _kind_of(parts.optimizer),
        metadata=dict(parts.metadata),
        states={
            name: _kind_of(value) if is_flat(value) else {"kind": "tree"}
            for name, value in parts.states.items()
        },
        indexes=(),
        weights=WeightFiles(os.path.basename(path), tuple(files_of(path))),
    )


class WholeSource(Source):
    """A local file or folder that `read` reads as a whole; see `Source`."""

    def __init__(self, path: str, name: str, read: Read, manifest: Manifest | None = None) -> None:
        """Create the source; nothing is read.

        `name`: of the format. `read`: returns the content; its arguments tell whether to compare
        files with the checksums of `checksum`, and which entries to read. `manifest`: the
        description, if it is known.
        """
        self.path, self.format = path, name
        self.is_mapped = name in _MAPPED
        self._read_parts = read
        self._options = LOAD_DEFAULTS
        self._selection: Selection | None = None
        self._parts: Parts | None = None
        self._index: MemoryIndex | None = None
        self._manifest = manifest

    def fresh(self) -> WholeSource:
        """Return an unread source of the same path."""
        return WholeSource(self.path, self.format, self._read_parts)

    def check(self, options: LoadOptions) -> None:
        """Raise ValueError for options that need an index."""
        group, into = options["group"], options["into"]
        for text, is_given in (
            ("mmap=True", options["mmap"]),
            ("verify='first'", options["verify"] == "first"),
            (f"missing={options['missing']!r}", options["missing"] != "skip"),
            ("into= with a group", into is not None and group is not None and group.world_size > 1),
        ):
            if is_given:
                raise ValueError(
                    f"{self.path}: {text} is not possible for the format {self.format}: leave it "
                    "out, or convert it by mlstate convert first"
                )
        self._options = options

    def select(self, selection: Selection) -> None:
        """Read only these entries, also if others were read before."""
        self._selection = selection
        self._parts = self._manifest = self._index = None

    # ---- description ----

    @property
    def parts(self) -> Parts:
        """The content, read at the first use."""
        if self._parts is None:
            self._parts = self._read_parts(bool(self._options["verify"]), self._selection)
            if self.format == "npz" and self._parts.unreadable:
                cast = self._options["cast"]
                dtype = "" if isinstance(cast, FLAG) else dtype_name(cast)
                self._parts = restore_lost_dtypes(self._parts, dtype)
        return self._parts

    @property
    def manifest(self) -> Manifest:
        """A description of the content."""
        if self._manifest is None:
            self._manifest = _manifest_of(self.path, self.format, self.parts)
        return self._manifest

    @property
    def index(self) -> MemoryIndex:
        """The table of the tensors in memory."""
        if self._index is None:
            self._index = MemoryIndex(self.path, self.parts)
        return self._index

    @property
    def saved(self) -> Mapping[str, Any]:
        """The states in memory by label; arrays may be views of mapped files."""
        parts = self.parts
        named = {f"states[{name!r}]": value for name, value in parts.states.items()}
        return {"model": parts.model, "optimizer": parts.optimizer, **named}

    def begin(self, names: list[str] | None, rank: int | None, into: Any = None) -> None:
        """Read everything; list the named states that `into` has as a save would store them.

        Raises the error of a tensor or an optimizer that cannot be read, unless a target or a name
        excludes it. Warns of named states that cannot be read.
        """
        parts = self.parts
        takes_all, strict = self._options["names"] is None, self._options["strict"]
        needed = [MODEL, OPTIMIZER_PART] if strict or into is None else [OPTIMIZER_PART]
        if takes_all:
            parts.refuse_unreadable(
                p for p in needed if into is None or getattr(into, p) is not None
            )
        unread = parts.unreadable.get(STATES_PART, {})
        if into is None:
            if unread and takes_all:
                names_unread = ", ".join(sorted(unread))
                find_caller().warn(f"{self.path}: these entries are not read: {names_unread}")
            return
        for name in into.states:
            if name in unread:
                raise unread[name]
        self._list_targets(into.states, into.model)

    def _list_targets(self, targets: Collection[str], model: Any) -> None:
        """List the named states in `targets`, and the entries of the module `model`, as saved."""
        states, _ = split_entries(self.parts.states)
        chosen = {name: state for name, state in states.items() if name in targets}
        named = take_states(chosen, model=None, ranks=1)
        if is_module(model):
            entries = self.parts.module_entries(model.state_dict())
            named = add_entries(named, None, (entries, {})) if entries else named
        named.add_trees(None, digests=())
        arrays = {key: getattr(each, "array", each) for key, each in (named.arrays or {}).items()}
        self.index.sections[STATES].update(arrays)
        kinds = {n: kind for n, kind in (self.manifest.states or {}).items() if n[0] != "."}
        self._manifest = self.manifest._replace(states={**kinds, **named.kinds})

    # ---- reading ----

    def fits(self, section: int, keys: list[str], cuts: Any, targets: dict[str, Any]) -> None:
        """Raise if `targets`, by key, do not fit; see `Source`."""
        parts = self.index.parts(section, keys, cuts)
        check_load({key: targets[key] for key in keys}, parts, strict=True, cast=False)

    def read(self, section: int, keys: list[str], cuts: Any, **how: Unpack[How]) -> dict[str, Any]:
        """Return parts of tensors by key, in memory that no writer changes; see `Source`."""
        tensors, parts = self.index.sections[section], self.index.parts(section, keys, cuts)
        if "into" in how:
            load_into({key: how["into"][key] for key in keys}, parts)
        for key, part in parts.items() if "into" not in how else ():
            array = _array_of(key, part, self.path) if is_torch(part) else part
            parts[key] = array if array is tensors[key] and not self.is_mapped else array.copy()
        if (progress := how.get("progress")) is not None:
            progress(sum(int(part.nbytes) for part in parts.values()))
        return parts

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The ``quantization_config`` beside the files of Hugging Face, or in the metadata."""
        if self.format != "huggingface":
            return entry_of_metadata(self.path, self.manifest.metadata)
        folder = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        return find_entry(LocalFolder(folder), self.manifest.metadata)

    # ---- verifying ----

    def require_loadable(self) -> None:
        """Raise the error that a load of model and optimizer raises."""
        self.parts.refuse_unreadable((MODEL, OPTIMIZER_PART))

    def files_to_verify(self) -> dict[str, str]:
        """Return the paths of the files with the content, by name."""
        is_run = self.format == "deepspeed"
        return files_of(step_folder(LocalFolder(self.path)).path if is_run else self.path)

    def verify(self, report: VerifyReport, progress: Progress) -> None:
        """Compare the CRC-32 of zip entries, then read the content as a load does."""
        from .verify_zip import verify_files

        try:
            if self.format == "safetensors":
                contents = verify_file(self.path, progress)
                report.checksums = contents.checksums
                report.problems += contents.problems
                report.bytes += contents.bytes
            else:
                verify_files(self.files_to_verify(), report, progress)
            if not report.problems:
                self.require_loadable()
        except MLStateError as error:
            note_refusal(report, error, os.path.basename(error.path or self.path))


def _array_of(key: str, value: Any, path: str) -> Any:
    """Return a tensor of a named state as an array; `path` starts the text of errors.

    Raises UnstorableError for tensors without plain memory, TypeError for Python objects.
    """
    state, _, name = key.partition("/")
    try:
        if is_torch(value):
            backend_of(value, TensorBackend).refuse_unstorable(name, value)
        return as_arrays({name: value})[name]
    except (CompatibilityError, TypeError) as error:
        text = "leave out cast= and layout=, which need plain tensors, or choose others by names="
        error.args = (f"{path}: states[{state!r}]: {error}; {text}",)
        raise
