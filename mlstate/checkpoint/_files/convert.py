"""State from and to the files of other programs: what ``mlstate convert`` does.

A path's format is that of its suffix; of a directory, what lies in it says which.

==============  ==========================  ====================================================
format          path                        holds
==============  ==========================  ====================================================
``mlstate``     a directory                 a checkpoint of `mlstate.save`
``safetensors`` ``.safetensors``            arrays and texts
``npz``         ``.npz``                    arrays of `numpy.savez`
``torch``       ``.pt .pth .bin``           what ``torch.load`` reads with ``weights_only``
``dcp``         a directory, or ``.dcp``    a checkpoint of torch.distributed.checkpoint
==============  ==========================  ====================================================

Safetensors and npz files have one level of names. A model and an optimizer in one such file
have the prefixes ``model.`` and ``optimizer.``, and the metadata entry ``mlstate_parts`` says
so; either alone has no prefix. Files of other writers, without that entry, hold a model.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.json_values import check_json_values
from ..._common.local_path import local_path
from ..._common.text import names_hint
from ...errors import CompatibilityError, FormatError, MLStateError, StoreError, StoreNotFoundError
from ...state._kind import describe, restore
from ...state._optimizer_state import OptimizerStateDict
from ...state._state_dict import StateDict
from .._store.folder import refuse_existing

if TYPE_CHECKING:
    from typing import TypeAlias

    from ..._common.backend import Backend
    from ..._types import NDArray
    from .._load import LoadedState

    Parts: TypeAlias = tuple[StateDict | None, OptimizerStateDict | None, dict[str, Any]]

# The entry that tells the parts of a flat file apart; it is no metadata of the user's.
PARTS = "mlstate_parts"
_PREFIXES = {"model": "model.", "optimizer": "optimizer."}


# ---- which format ----


class Format(NamedTuple):
    """How one kind of file is read and written, and which suffixes say that it is that."""

    read: Callable[[Path], Parts]
    write: Callable[[Path, StateDict | None, OptimizerStateDict | None, dict[str, Any], bool], None]
    suffixes: tuple[str, ...]


def format_of(path: str | os.PathLike[str]) -> str:
    """Tell a path's format by what is there, or by its suffix.

    Parameters
    ----------
    path : str or os.PathLike
        It need not exist.

    Returns
    -------
    str
        A name of `FORMATS`. A path without suffix is an mlstate checkpoint.

    Raises
    ------
    ValueError
        An unknown suffix.

    Examples
    --------
    >>> from mlstate.checkpoint._files.convert import format_of
    >>> format_of("model.safetensors"), format_of("runs/a"), format_of("weights.PT")
    ('safetensors', 'mlstate', 'torch')
    """
    place = Path(local_path(path))
    if place.is_dir():
        if (place / ".metadata").exists():
            return "dcp"
        if (place / "manifest.json").exists():
            return "mlstate"
    for name, one in FORMATS.items():
        if place.suffix.lower() in one.suffixes:
            return name
    if place.suffix and not place.is_dir():
        known = " ".join(suffix for one in FORMATS.values() for suffix in one.suffixes)
        raise ValueError(
            f"{place}: no format is known by the suffix {place.suffix!r}; known are {known}, "
            "and directories of mlstate and torch. Name the format if the path cannot: format= "
            "(--from or --to on the command line)"
            f"{names_hint(place.suffix.lower(), known.split(), listed=False)}"
        )
    return "mlstate"


def _named(format: str | None, path: Path) -> Format:
    name = format_of(path) if format is None else format
    if name not in FORMATS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    return FORMATS[name]


# ---- reading and writing ----


@contextmanager
def _store_errors(path: Path) -> Iterator[None]:
    """Let the operating system's refusals be those of every other function here."""
    try:
        yield
    except MLStateError:
        raise
    except OSError as error:
        kind = StoreNotFoundError if error.errno == errno.ENOENT else StoreError
        # filename2: what a temporary file was to replace
        shown = error.filename2 or error.filename or path
        raise kind(error.errno, error.strerror, str(shown)) from error


def read_any(path: str | os.PathLike[str], *, format: str | None = None) -> Parts:
    """
    Read a state from a file or directory of any known format.

    Parameters
    ----------
    path : str or os.PathLike
        What to read.
    format : str, optional
        A name of `FORMATS`; default: what `format_of` tells.

    Returns
    -------
    model : StateDict or None
        Arrays; those of torch files may be over the mapped file.
    optimizer : OptimizerStateDict or None
        Keys ``"<parameter>.<state name>"``. Where a file numbers its parameters, as
        ``optimizer.state_dict()`` does, names are the ``param_names`` of its groups, else
        ``param_0``, ``param_1``, ...
    metadata : dict
        What else the file holds as plain values.

    Raises
    ------
    FormatError
        Damaged, no file of that format, or one with objects that no state holds; the message
        names them.
    ValueError
        An unknown suffix or format.
    StoreError
        The operating system refused.
    ImportError
        A torch file without torch, or a dtype such as int4 without ml_dtypes.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint._files.convert import read_any
    >>> path = tempfile.mkdtemp() + "/weights.npz"
    >>> np.savez(path, w=np.arange(3.0))
    >>> model, optimizer, metadata = read_any(path)
    >>> model["w"], optimizer, metadata
    (array([0., 1., 2.]), None, {})
    """
    place = Path(local_path(path))
    found = _named(format, place)
    with _store_errors(place):
        place.stat()  # a missing one is that, whatever its format makes of it
        return found.read(place)


def write_any(
    path: str | os.PathLike[str],
    model: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    format: str | None = None,
    overwrite: bool = False,
) -> None:
    """
    Write a state to a file or directory of any known format.

    Files appear whole, or the old ones stay.

    Parameters
    ----------
    path : str or os.PathLike
        What to write.
    model, optimizer : mapping of str to array, optional
        At least one.
    metadata : mapping of str to plain values, optional
        Numbers, texts, None, lists and dicts of such: what JSON can hold.
    format : str, optional
        As for `read_any`.
    overwrite : bool, default False
        Replace an existing file, checkpoint or torch directory of the same format, all steps of
        a `CheckpointManager` included.

    Raises
    ------
    CompatibilityError
        The format has no such dtype, or a value is a `Shard` and the format not mlstate's own.
    TypeError
        A value is no array, or metadata are no plain values.
    ValueError
        Nothing to write, an unknown suffix or format, or a torch directory with other files.
    StoreError
        The operating system refused, or `path` exists (EEXIST). An empty directory is replaced.

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate import load_file
    >>> from mlstate.checkpoint._files.convert import write_any
    >>> path = tempfile.mkdtemp() + "/both.safetensors"
    >>> write_any(path, {"w": np.ones(2)}, {"w.m": np.zeros(2)}, {"step": 3})
    >>> list(load_file(path))
    ['model.w', 'optimizer.w.m']
    """
    if model is None and optimizer is None:
        raise ValueError(f"{path}: neither a model nor an optimizer is given to write")
    place = Path(local_path(path))
    found = _named(format, place)
    weights = model if model is None or isinstance(model, StateDict) else StateDict(model)
    moments = optimizer
    if moments is not None and not isinstance(moments, OptimizerStateDict):
        moments = OptimizerStateDict(moments)
    refuse_existing(place, overwrite)
    if found is not FORMATS["mlstate"]:
        _refuse_parts(weights, moments)
    with _store_errors(place):
        found.write(place, weights, moments, _checked_metadata(metadata), overwrite)


def _refuse_parts(*states: StateDict | None) -> None:
    """Raise for shards, of which other formats would take the part for the whole."""
    from ..._sharding.layout import Shard

    for state in states:
        for name, value in () if state is None else dict(state).items():
            if isinstance(value, Shard) and value.layout.parts > 1:
                error = CompatibilityError(
                    f"{name!r} is part {value.index} of {value.layout.parts} of an array of shape "
                    f"{value.shape}: files but those of mlstate.save hold whole arrays; save it "
                    "so, and convert that"
                )
                error.name = name
                raise error


def _checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    taken = {} if metadata is None else dict(metadata)
    for key, value in taken.items():
        if not isinstance(key, str):
            raise TypeError(f"metadata keys must be str, got {key!r}")
        try:
            check_json_values(value, f"metadata[{key!r}]", finite=False)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"metadata {key!r} is no plain value: {error}; keep numbers, texts, lists and "
                "dicts of such there"
            ) from None
    return taken


# ---- one level of names ----


def _joined(
    model: StateDict | None, optimizer: OptimizerStateDict | None
) -> tuple[StateDict, dict[str, Any]]:
    """Return one state for both, and what tells them apart again; nothing if there is one."""
    parts = {"model": model, "optimizer": optimizer}
    present = {name: state for name, state in parts.items() if state is not None}
    if len(present) == 1:
        return next(iter(present.values())), {}
    joined = StateDict()
    for name, state in present.items():
        joined.update({_PREFIXES[name] + key: value for key, value in dict(state).items()})
    return joined, {"parts": {name: describe(state) for name, state in present.items()}}


def _parted(path: Path, state: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return model and optimizer of what `_joined` made, or of another writer's file."""
    texts = record.get("parts")
    if texts is None:
        return (None, state) if isinstance(state, OptimizerStateDict) else (state, None)
    if not (isinstance(texts, dict) and set(texts) == set(_PREFIXES)):
        raise _misdescribed(path, "names no parts")
    arrays: dict[str, dict[str, Any]] = {name: {} for name in _PREFIXES}
    for key, value in state.items():
        name, dot, rest = key.partition(".")
        if not dot or name not in arrays:
            raise _misdescribed(path, f"array {key!r} belongs to no part")
        arrays[name][rest] = value
    made = [_restored(path, arrays[name], texts[name]) for name in _PREFIXES]
    if not isinstance(made[1], OptimizerStateDict):
        raise _misdescribed(path, "the optimizer is none")
    return made[0], made[1]


def _restored(path: Path, arrays: dict[str, Any], text: Any) -> StateDict:
    if not (text is None or isinstance(text, str)):
        raise _misdescribed(path, f"{text!r} is no description of a state")
    return restore(arrays, text, str(path))


def _misdescribed(path: Path, what: str) -> FormatError:
    error = FormatError(f"{path}: entry {PARTS!r} does not describe the file: {what}")
    error.path, error.name = str(path), PARTS
    return error


# ---- safetensors ----


def _write_safetensors(
    path: Path,
    model: StateDict | None,
    optimizer: OptimizerStateDict | None,
    metadata: dict[str, Any],
    _overwrite: bool,
) -> None:
    """Metadata that are no texts are stored as JSON; the record says which."""
    from .. import save_file

    state, record = _joined(model, optimizer)
    plain = {key: value for key, value in metadata.items() if not isinstance(value, str)}
    if plain:
        record["json"] = sorted(plain)
    texts = metadata | {key: json.dumps(value) for key, value in plain.items()}
    if PARTS in texts:
        raise ValueError(f"metadata key {PARTS!r} is reserved: choose another")
    if record:
        texts[PARTS] = json.dumps(record, sort_keys=True)
    save_file(state, path, texts)


def _read_safetensors(path: Path) -> Parts:
    return read_file(path, mmap=False)


def read_file(path: Path, *, mmap: bool) -> Parts:
    """Read, or map, a plain safetensors file."""
    from .. import load_file, load_metadata

    metadata: dict[str, Any] = dict(load_metadata(path))
    state = load_file(path, mmap=mmap)
    record: Any = {}
    try:
        record = json.loads(metadata.pop(PARTS, "{}"))
        for key in record.get("json", ()):
            metadata[key] = json.loads(metadata[key])
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise _misdescribed(path, repr(error)) from None
    return *_parted(path, state, record), metadata


# ---- npz ----


def _as_arrays(state: StateDict) -> dict[str, NDArray]:
    """Return NumPy arrays for all values; tensors are viewed, or copied from their device."""
    import numpy as np

    from ..._common.arrays import is_torch
    from ..._common.backend import backend_of

    arrays: dict[str, NDArray] = {}
    for name, value in dict(state).items():
        if is_torch(value):
            arrays[name] = backend_of(value).arrays_of({name: value.detach().cpu()})[name]
        elif isinstance(value, np.ndarray | np.generic):
            arrays[name] = np.asarray(value)
        elif hasattr(value, "__dlpack__"):
            arrays[name] = np.from_dlpack(value)
        elif hasattr(value, "__array_interface__"):
            arrays[name] = np.asarray(value)
        else:
            raise TypeError(f"{name!r} is a {type(value).__name__}, not a whole array in memory")
        if arrays[name].dtype.hasobject:
            raise TypeError(f"{name!r} holds Python objects, which no file here can hold")
    return arrays


def _write_npz(
    path: Path,
    model: StateDict | None,
    optimizer: OptimizerStateDict | None,
    metadata: dict[str, Any],
    _overwrite: bool,
) -> None:
    from .npz import write_npz

    state, record = _joined(model, optimizer)
    kind = describe(state)
    write_npz(path, _as_arrays(state), {**record, "kind": kind, "metadata": metadata})


def _read_npz(path: Path) -> Parts:
    from .npz import read_npz

    arrays, record = read_npz(path)
    metadata = record.get("metadata", {})
    if not isinstance(metadata, dict):
        raise _misdescribed(path, "metadata are no object")
    state = _restored(path, arrays, record.get("kind"))
    return *_parted(path, state, record), metadata


# ---- mlstate's own, and torch ----


def _read_mlstate(path: Path) -> Parts:
    from ... import checkpoint

    return parts_of(checkpoint.load(path))


def parts_of(found: LoadedState) -> Parts:
    """Return what a checkpoint gave, as `read_any` does."""
    metadata = dict(found.metadata or {})
    optimizer = found.optimizer
    if optimizer is None and found.step is not None:
        metadata.setdefault("step", found.step)
    if not (optimizer is None or isinstance(optimizer, OptimizerStateDict)):
        optimizer = OptimizerStateDict(optimizer, step=found.step or 0)
    return found.model, optimizer, metadata


def _write_mlstate(
    path: Path,
    model: StateDict | None,
    optimizer: OptimizerStateDict | None,
    metadata: dict[str, Any],
    overwrite: bool,
) -> None:
    from .._save import PACK_BELOW, write_checkpoint

    write_checkpoint(
        path,
        model,
        optimizer,
        metadata=metadata,
        step=None,
        progress=None,
        group=None,
        layout=None,
        pack_below=PACK_BELOW,
        replace_steps=overwrite,
    )


def _torch_backend() -> Backend:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ImportError(
            "files of torch need torch: pip install 'mlstate[torch]'", name="torch"
        ) from None
    from ..._common.backend import backend_named

    return backend_named("torch")


def _read_torch(path: Path) -> Parts:
    return _torch_backend().read_pt(path)


def _write_torch(
    path: Path,
    model: StateDict | None,
    optimizer: OptimizerStateDict | None,
    metadata: dict[str, Any],
    _overwrite: bool,
) -> None:
    _torch_backend().write_pt(path, model, optimizer, metadata)


def _read_dcp(path: Path) -> Parts:
    return _torch_backend().read_dcp(path)


def _write_dcp(path: Path, *parts: Any) -> None:
    _torch_backend().write_dcp(path, *parts)


FORMATS = {
    "mlstate": Format(_read_mlstate, _write_mlstate, ()),
    "safetensors": Format(_read_safetensors, _write_safetensors, (".safetensors",)),
    "npz": Format(_read_npz, _write_npz, (".npz",)),
    "torch": Format(_read_torch, _write_torch, (".pt", ".pth", ".bin")),
    "dcp": Format(_read_dcp, _write_dcp, (".dcp",)),
}
