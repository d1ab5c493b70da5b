"""Reading and writing of a path in any format, as `mlstate convert` does it."""

from mlstate import OptimizerStateDict
from mlstate.checkpoint._convert.formats import NAMES, find_format
from mlstate.checkpoint._convert.read_write import begin_write, read_parts, write_parts
from mlstate.checkpoint._files.parts import Parts
from mlstate.checkpoint._huggingface.export import export, take_export
from mlstate.checkpoint._sources.open_source import open_source
from mlstate.checkpoint._store.open_path import open_folder
from mlstate.state import StateDict


def read_any(path, *, format=None, storage_options=None, selection=None, checked=True):
    """Return the content (`Parts`) of a path; `checked`: compare it with its checksums."""
    if format is not None and format not in NAMES:
        raise ValueError(f"format must be one of {', '.join(NAMES)}, got {format!r}")
    source = open_source(path, storage_options, format=format)
    return read_parts(source, selection, {} if checked else {"verify": False})


def write_any(
    path,
    model=None,
    optimizer=None,
    metadata=None,
    states=None,
    *,
    format=None,
    overwrite=None,
    storage_options=None,
):
    """Write a state to a path; return the parts."""
    place = open_folder(path, storage_options).path
    name = find_format(format, place)
    if model is not None and not isinstance(model, StateDict):
        model = StateDict(model)
    if optimizer is not None and not isinstance(optimizer, OptimizerStateDict):
        optimizer = OptimizerStateDict(optimizer)
    parts = Parts(model, optimizer, metadata or {}, states or {})
    target = begin_write(place, name, overwrite)
    if name == "huggingface":
        export(take_export(place, model, overwrite=overwrite), start=target.target)
        return parts
    return write_parts(place, name, target, parts)
