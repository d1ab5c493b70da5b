"""Chunks of a Core ML model in several packages: lists, patterns, ANEMLL's ``meta.yaml``.

A list names the chunks. A pattern such as ``model_chunk_*.mlpackage`` matches them. ANEMLL's
``meta.yaml`` describes a folder of them, with these keys of ``model_info: parameters:``

- ffn: the first chunk, such as ``qwen_FFN_PF_lut6_chunk_01of02.mlmodelc``; older files have only
  model_prefix and lut_ffn, which make up the same name
- num_chunks; monolithic_model: the only package, instead of chunks
- state_transition_infer_contexts: context sizes; every chunk has a function for each of them, and
  state_transition_infer_function_template has its name
- state_transition_infer_default_function: the function of the largest context

The file is untrusted: its size, counts and numbers are limited, names cannot leave the folder, and
a chunk cannot be a link to another place. All values are read as text: no tag has an effect.
"""

from __future__ import annotations

import glob
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.local_path import local_path
from .._common.text import count_text, shorten
from ..errors import FormatError, StoreNotFoundError
from ..kv._arguments import incompatible
from ..kv._model_states import format_error, quoted, read_file
from ._compiled import metadata_path
from ._package import is_inside

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_META = "meta.yaml"
_MOST_BYTES = 64 << 10  # real files have 1 to 5 KiB
_MOST_CHUNKS = 999
_MOST_CONTEXTS = 256
_EXTENSIONS = (".mlmodelc", ".mlpackage", ".mlmodel")
_CHUNK = re.compile(r"(.+)_chunk_(\d{1,4})(?:of(\d{1,4}))?", re.ASCII | re.DOTALL)
_NUMBER = re.compile(r"[1-9]\d{0,9}", re.ASCII)
_CONTEXT = "{context}"
_NULLS = ("", "~", "null", "Null", "NULL")  # of YAML


class Chunks(NamedTuple):
    """The chunks of a model, in order."""

    sources: tuple[Any, ...]  # each a path or another form of a single model
    contexts: dict[int, str]  # the function of each context size; empty if unknown
    default: str | None  # the default function, if meta.yaml names it
    origin: str | None  # the path of meta.yaml; None for a list or pattern


def find_chunks(source: Any) -> Chunks | None:
    """Return the chunks of a model that is stored as several packages; None for a single model.

    `source`: a list of models, a folder with ANEMLL's meta.yaml, this file, or a glob pattern. A
    path of another kind, and an object, is a single model. Raises TypeError for an empty or nested
    list, StoreNotFoundError for missing chunks, CompatibilityError for chunks of several models,
    and FormatError for a meta.yaml that is not valid.
    """
    if isinstance(source, list | tuple):
        return _chunks_of_list(source)
    if not isinstance(source, str | os.PathLike):
        return None
    path = os.fsdecode(local_path(source))
    if os.path.isdir(path):
        is_model = os.path.exists(os.path.join(path, "Manifest.json")) or metadata_path(path)
        file = os.path.join(path, _META)
        return _read_meta(file) if not is_model and os.path.lexists(file) else None
    if path.endswith((".yaml", ".yml")):
        return _read_meta(path)
    if glob.has_magic(path) and not os.path.lexists(path):
        return _chunks_of_pattern(path)
    return None


# ---- lists and patterns ----


def _chunks_of_list(sources: Sequence[Any]) -> Chunks:
    """Return the chunks in the order of `sources`, paths or models.

    Raises TypeError for no source or a nested sequence, and CompatibilityError if the names of the
    paths have numbers that are not in order or not complete.
    """
    if not sources:
        raise TypeError("source is an empty sequence of chunk models")
    for source in sources:
        if isinstance(source, list | tuple):
            raise TypeError("source is a sequence of sequences; pass one model for each chunk")
    paths = [os.fsdecode(source) for source in sources if isinstance(source, str | os.PathLike)]
    numbers = _chunk_numbers(paths) if len(paths) == len(sources) else None  # None: unknown
    if numbers is not None and numbers != sorted(numbers):
        text = (
            f"{quoted(map(_file_name, paths))} are not in the order of their numbers, in which "
            "the chunks run"
        )
        raise incompatible(text, None, _numbers_text(sorted(numbers)), _numbers_text(numbers))
    return Chunks(tuple(sources), contexts={}, default=None, origin=None)


def _chunks_of_pattern(pattern: str) -> Chunks:
    """Return the chunks whose paths match a glob pattern, in the order of their numbers.

    One path needs no number. Raises StoreNotFoundError if no path matches, and CompatibilityError
    if several paths have no numbers, or are not all chunks of one model.
    """
    paths = sorted(glob.glob(pattern))
    if not paths:
        hint = "; write [[] for a bracket in a name" if "[" in pattern else ""
        raise _missing_error(pattern, f"no file or folder matches this pattern{hint}")
    numbers = _chunk_numbers(paths)
    if numbers is None and len(paths) > 1:
        text = (
            f"{pattern}: {quoted(map(_file_name, paths))} are not numbered as chunks, such "
            "as model_chunk_01of02.mlpackage; pass a list"
        )
        raise incompatible(text, None, "numbered chunks", len(paths))
    if numbers is not None:
        paths = [path for _, path in sorted(zip(numbers, paths, strict=True))]
    return Chunks(tuple(paths), contexts={}, default=None, origin=None)


def _file_name(path: str) -> str:
    return os.path.basename(path.rstrip("/"))


def _split_extension(name: str) -> tuple[str, str]:
    """Return the name of a package without its extension, and the extension, if it has one."""
    stem, extension = os.path.splitext(name)
    return (stem, extension) if extension in _EXTENSIONS else (name, "")


def _chunk_numbers(paths: Sequence[str]) -> list[int] | None:
    """Return the number in the name of each path, such as 1 of "m_chunk_01of02"; None without any.

    Raises CompatibilityError unless the paths are all chunks of one model: the names differ in the
    number only, and no number is missing or repeated.
    """
    labels = [_file_name(path) for path in paths]
    matches = [_CHUNK.fullmatch(_split_extension(label)[0]) for label in labels]
    named = [match for match in matches if match is not None]
    if not named:
        return None
    series = sorted({(match[1], match[3] or "") for match in named})  # (name, total in the name)
    if len(named) < len(paths) or len(series) > 1 or len(paths) > _MOST_CHUNKS:
        raise incompatible(
            f"{quoted(labels)} are not the chunks of one model; narrow the pattern or the list",
            None,
            f"at most {_MOST_CHUNKS} names that differ in the number only",
            count_text(len(paths), "name"),
        )
    numbers = [int(match[2]) for match in named]
    named_total = series[0][1]
    first = 1 if named_total else min(1, *numbers)  # names without a total may count from 0
    total = int(named_total or max(numbers) + 1 - first)
    repeated = sorted({number for number in numbers if numbers.count(number) > 1})
    if repeated:
        again = [labels[i] for i, number in enumerate(numbers) if number == repeated[0]]
        text = f"chunk {repeated[0]} appears more than once: {quoted(again)}; name one of each"
        raise incompatible(text, None, "one package for each chunk", quoted(again))
    last = first + total - 1
    absent = [i for i in range(first, min(last, _MOST_CHUNKS) + 1) if i not in numbers]
    if absent or max(numbers) > last:
        raise incompatible(
            f"{quoted(labels)}: {_numbers_text(absent)} of {total} missing"
            if absent
            else f"{quoted(labels)}: chunk {max(numbers)} of {total}",
            None,
            f"chunks {first} to {last}",
            _numbers_text(numbers),
        )
    return numbers


def _numbers_text(numbers: Iterable[int]) -> str:
    """Return at most 8 numbers of chunks as text, such as "chunks 2, 3 and 4 more"."""
    listed = list(numbers)
    text = ", ".join(map(str, listed[:8]))
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"chunk{'s' if len(listed) > 1 else ''} {text}{more}"


def _missing_error(path: str, text: str) -> StoreNotFoundError:
    return StoreNotFoundError(2, text, path, path=path)


# ---- meta.yaml ----


def _repeated_key(file: str, key: Any) -> FormatError:
    """Return the FormatError for `key`, a node of a mapping in `file` that repeats another key."""
    name = shorten(key.value, 80)
    text = f"{file}: line {key.start_mark.line + 1}: the key {name!r} appears twice"
    return FormatError(text, path=file, name=name)


def _load_yaml(file: str) -> Any:
    """Return the document in the YAML file `file`; all its scalars are text, also with tags.

    Raises FormatError if it is not YAML or too large, and ImportError without PyYAML.
    """
    data = read_file(file, _MOST_BYTES)
    try:
        import yaml
    except ImportError:
        raise ImportError(
            f"{file}: meta.yaml is read with PyYAML: pip install 'mlstate[anemll]', or pass a list "
            "of the chunks",
            name="yaml",
        ) from None

    class Loader(yaml.BaseLoader):  # type: ignore[misc]
        """Makes text, lists and dicts only; YAML forbids keys that appear twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            """Return the mapping in `node`; raise FormatError if it has a key twice."""
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            names: set[str] = set()
            for key, _ in node.value:
                if key.value in names:
                    raise _repeated_key(file, key)
                names.add(key.value)
            return mapping

    try:
        return yaml.load(data, Loader=Loader)
    except FormatError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = shorten(" ".join(str(error).split()), 200)
        raise format_error(file, f"not YAML: {problem}") from None


def _read_parameters(file: str) -> dict[str, Any]:
    """Return the mapping ``model_info: parameters:`` of a meta.yaml; FormatError if it has none."""
    document = _load_yaml(file)
    for key in ("model_info", "parameters"):
        document = document.get(key) if isinstance(document, dict) else None
    if not isinstance(document, dict):
        raise format_error(file, "no mapping model_info: parameters: as in ANEMLL's meta.yaml")
    return document


def _text(file: str, parameters: dict[str, Any], key: str) -> str | None:
    """Return the value of `key` in `parameters`, from the meta.yaml `file`, without outer spaces.

    None if it is absent, empty or null. Raises FormatError if it is a list or a mapping.
    """
    value = parameters.get(key, "")
    if not isinstance(value, str):
        raise format_error(file, f"{key}: expected text, got a {type(value).__name__}")
    text = value.strip()
    return None if text in _NULLS else text


def _number(file: str, key: str, value: Any, most: int) -> int:
    """Return the text `value` of `key` as an int; raise FormatError unless it is 1 to `most`."""
    if not isinstance(value, str) or not _NUMBER.fullmatch(value) or int(value) > most:
        got = shorten(repr(value), 60) if isinstance(value, str) else type(value).__name__
        raise format_error(file, f"{key}: expected an integer from 1 to {most}, got {got}")
    return int(value)


def _read_contexts(file: str, parameters: dict[str, Any]) -> dict[int, str]:
    """Return the function name of each context size from `parameters`; {} if they list none.

    `file`: the path of the meta.yaml, for errors. Raises FormatError for a list or template that
    is not valid.
    """
    key = "state_transition_infer_contexts"
    values = parameters.get(key, "")
    values = [] if values in _NULLS else values
    if not isinstance(values, list) or len(values) > _MOST_CONTEXTS:
        raise format_error(file, f"{key}: expected a list of at most {_MOST_CONTEXTS} integers")
    contexts = [_number(file, key, value, (1 << 31) - 1) for value in values]
    if len(set(contexts)) < len(contexts):
        raise format_error(file, f"{key}: a context appears twice: {contexts}")
    key = "state_transition_infer_function_template"
    template = _text(file, parameters, key) or f"infer_ctx{_CONTEXT}"
    if _CONTEXT not in template or "{" in template.replace(_CONTEXT, ""):
        got = shorten(repr(template), 60)
        raise format_error(file, f"{key}: expected a name with {_CONTEXT}, got {got}")
    return {context: template.replace(_CONTEXT, str(context)) for context in contexts}


def _chunk_names(file: str, parameters: dict[str, Any]) -> list[str]:
    """Return the file names of all chunks from `parameters`, from the meta.yaml `file`.

    The files may have another extension than these names, which may have none. Raises FormatError
    if the parameters name no chunk, or contradict one another.
    """
    monolithic = _text(file, parameters, "monolithic_model")
    if monolithic is not None:
        return [monolithic]
    count = _number(file, "num_chunks", parameters.get("num_chunks", "1"), _MOST_CHUNKS)
    first = _text(file, parameters, "ffn")
    if first is None:
        prefix = _text(file, parameters, "model_prefix")
        if prefix is None:
            raise format_error(file, "neither ffn nor model_prefix, which name the chunks")
        bits = _text(file, parameters, "lut_ffn")
        # bits of the table that weights are looked up in; without quantization: none or -1
        first = f"{prefix}_FFN_PF" + (f"_lut{bits}" if bits not in (None, "none", "-1") else "")
    stem, extension = _split_extension(first)
    match = _CHUNK.fullmatch(stem)
    if match is not None:
        stem = match[1]
        if int(match[3] or count) != count:
            name = shorten(first, 80)
            raise format_error(file, f"num_chunks is {count}, but ffn is {name!r}")
    elif count == 1 and _chunk_path(file, first) is not None:  # not named as a chunk
        return [first]
    return [f"{stem}_chunk_{i:02d}of{count:02d}{extension}" for i in range(1, count + 1)]


def _chunk_path(file: str, name: str) -> str | None:
    """Return the path of the chunk `name` in the folder of `file`; None if it is missing.

    The extension of `name` is tried first, then the other ones. Raises FormatError for a name or a
    link that leads outside of the folder.
    """
    if not is_inside(name):
        got = shorten(repr(name), 80)
        raise format_error(file, f"the name of a chunk leads outside of the folder: {got}")
    folder = os.path.dirname(file) or "."
    stem, _ = _split_extension(name)
    for candidate in dict.fromkeys([name, *(stem + other for other in _EXTENSIONS)]):
        path = os.path.join(folder, candidate)
        if os.path.exists(path):
            root, real = os.path.realpath(folder), os.path.realpath(path)
            if os.path.commonpath([root, real]) != root:
                raise format_error(file, f"{candidate} is a link to a place outside of the folder")
            return path
    return None


def _read_meta(file: str) -> Chunks:
    """Return the chunks that the meta.yaml `file` lists.

    Raises StoreNotFoundError if a chunk is missing, and FormatError if the file is not valid.
    """
    parameters = _read_parameters(file)
    contexts = _read_contexts(file, parameters)
    names = _chunk_names(file, parameters)
    paths = [_chunk_path(file, name) for name in names]
    absent = [i for i, path in enumerate(paths) if path is None]
    if absent:
        numbers = _numbers_text(i + 1 for i in absent)
        name = shorten(repr(names[absent[0]]), 80)
        raise _missing_error(
            file, f"{numbers} of {len(names)} missing in the folder, such as {name}"
        )
    default = _text(file, parameters, "state_transition_infer_default_function")
    return Chunks(tuple(paths), contexts, default, file)
