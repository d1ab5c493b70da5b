"""The ``quantization_config`` of a model: where it is stored, and the block sizes in it.

The tensors determine the decoding (see pairs.py); the entry names methods that are not decoded,
and the blocks of a scale that does not divide its weight. It is found in

=========================  ======================================================================
``config.json``            ``quantization_config`` or ``compression_config``, at the top or in a
                           nested configuration, such as ``text_config``
``hf_quant_config.json``   ``quantization``, of ModelOpt
``params.json``            ``quantization``, of Mistral
metadata of a file         ``quantization_config`` as JSON; ``_quantization_metadata`` of ComfyUI
manifest of a checkpoint   ``quantization_config``: the entry of the model that was converted
=========================  ======================================================================
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.store_error import format_error
from ..._common.text import shorten
from ...errors import CompatibilityError, FormatError, StoreNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .._folder.protocol import Files

CONFIG = "config.json"
ENTRY = "quantization_config"
ENTRIES = (ENTRY, "compression_config")
# Other files with an entry ``quantization``, and its method.
OTHER_FILES = {"hf_quant_config.json": "modelopt", "params.json": "fp8"}
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_REAL", "FP8_PB_WO", "MXFP4", "MXFP8",
            "NVFP4")  # fmt: skip
COMFYUI = "comfyui"
_COMFYUI_METADATA = "_quantization_metadata"
_HAS = "quantization_config has"
_MOST_BYTES = 16 << 20  # of the file
_MOST_DEPTH = 64  # of nested arrays and objects
_LONGEST = 60  # characters of a name in errors

Block = tuple[int, int]  # rows and columns that share a scale


class Quantization(NamedTuple):
    """How the weights of a folder are quantized."""

    method: str  # "" without an entry
    suffix: str = ""  # of the names of scales; "": any
    blocks: tuple[Block, ...] = ()  # that the scales of some weight may have


def _malformed(path: str, text: str) -> FormatError:
    """Return the FormatError for a malformed quantization_config in the file `path`."""
    return format_error(f"{path}: quantization_config {text}", path, ENTRY)


def unsupported(path: str, text: str) -> CompatibilityError:
    """Return the CompatibilityError for a quantization that `cast=` cannot decode.

    `text`: what names it.
    """
    error = CompatibilityError(
        f"{path}: {text}, whose values mlstate cannot compute; it can for "
        "fp8, mxfp4, nvfp4, and compressed-tensors with floats of 8 and 4 bits or int8. Load the "
        "stored tensors without cast="
    )
    error.name, error.path = ENTRY, path
    return error


def _checked_block(path: str, value: Any) -> Block:
    """Return `value` as the rows and columns of a block; raise FormatError if it is not two."""
    is_block = isinstance(value, list) and len(value) == 2
    if not is_block or not all(type(each) is int and 0 < each < 1 << 31 for each in value):
        raise _malformed(path, f"has the block {shorten(repr(value), _LONGEST)}, not two lengths")
    return value[0], value[1]


def _group_blocks(path: str, group: Any) -> list[Block]:
    """Return the blocks that the scales of a group of compressed-tensors may have.

    They are [] if the group sets neither blocks nor a group size. Raises CompatibilityError if its
    weights are neither floats of 8 or 4 bits nor int8, FormatError if malformed.
    """
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _malformed(path, "has a group of layers without weights")
    kind, bits = weights.get("type"), weights.get("num_bits")
    supported = (("float", 8), ("float", 4), ("int", 8))
    if (kind, bits) not in supported or weights.get("symmetric") is False:
        text = shorten(f"weights of type {kind!r} with num_bits {bits!r}", 2 * _LONGEST)
        raise unsupported(path, f"{_HAS} compressed-tensors {text}")
    blocks = []
    if weights.get("block_structure") is not None:
        blocks.append(_checked_block(path, weights["block_structure"]))
    if weights.get("group_size") not in (None, -1):
        blocks.append(_checked_block(path, [1, weights["group_size"]]))
    return blocks if bits == 8 else []


def parse_entry(path: str, entry: Mapping[str, Any] | None) -> Quantization:
    """Return how weights are quantized, by `entry`; without one, the tensors alone tell it.

    `path`: of the file with it, for errors. Raises CompatibilityError for a method that is not
    decoded, FormatError for a malformed entry.
    """
    if entry is None:
        return Quantization("")
    method = entry.get("quant_method")
    if method == "mxfp4":
        return Quantization(method, "_scales")
    if method == "fp8":
        size = entry.get("weight_block_size")
        blocks = [] if size is None else [_checked_block(path, size)]
        return Quantization(method, "_scale_inv", tuple(blocks))
    if method in ("modelopt", "modelopt_fp4"):
        algorithm = str(entry.get("quant_algo")).upper()
        if algorithm not in MODELOPT:
            raise unsupported(
                path, f"{_HAS} quant_algo {shorten(repr(algorithm), _LONGEST)} of modelopt"
            )
        return Quantization("modelopt", "_scale")
    if method in ("fbgemm_fp8", COMFYUI):
        return Quantization(method, "_scale")
    if method == "compressed-tensors":
        groups = entry.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise _malformed(path, "has no config_groups")
        blocks = [block for group in groups.values() for block in _group_blocks(path, group)]
        return Quantization(method, "_scale", tuple(dict.fromkeys(blocks)))
    raise unsupported(path, f"{_HAS} quant_method {shorten(repr(method), _LONGEST)}")


# ---- the entry ----


def _read_json(folder: Files, name: str) -> Any:
    """Return the content of a JSON file in a folder; None if it does not exist."""
    path = os.path.join(folder.path, name)
    try:
        data = folder.read(name, follow_links=True)
    except StoreNotFoundError:
        return None
    if len(data) > _MOST_BYTES:
        raise format_error(f"{path}: too long", path)
    try:
        _core.json_check(data, _MOST_DEPTH, name)
        return json.loads(data)
    except (FormatError, ValueError) as error:
        raise format_error(f"{path}: not valid JSON: {error}", path) from None


def _entries_in(config: Any) -> Iterator[Any]:
    """Yield the entries of a configuration and of those nested in it, the outer ones first."""
    level = [config]
    while level:
        objects = [each for each in level if isinstance(each, dict)]
        for each in objects:
            yield from (each[name] for name in ENTRIES if each.get(name) is not None)
        level = [v for each in objects for name, v in each.items() if name not in ENTRIES]


def _only_entry(path: str, entries: list[Any]) -> dict[str, Any] | None:
    """Return the entry in a file; raise if it is not an object, or there are different ones."""
    if not entries:
        return None
    if not all(isinstance(each, dict) for each in entries):
        raise _malformed(path, "is not a JSON object")
    if any(each != entries[0] for each in entries[1:]):
        raise unsupported(path, f"{_HAS} several different entries")
    return entries[0]  # type: ignore[no-any-return]


def entry_of_metadata(path: str, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the entry in the metadata of the file `path`, an object or its JSON; else None."""
    entry = metadata.get(ENTRY)
    if entry is None and _COMFYUI_METADATA in metadata:
        return {"quant_method": COMFYUI}
    if isinstance(entry, str):
        try:
            _core.json_check(entry.encode(), _MOST_DEPTH, path)
            entry = json.loads(entry)
        except (FormatError, ValueError) as error:
            raise _malformed(path, f"is not valid JSON: {error}") from None
    return None if entry is None else _only_entry(path, [entry])


def find_entry(folder: Files, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of the weights in a folder; None without one.

    `metadata`: of the weights. Raises FormatError for a malformed one.
    """
    path = os.path.join(folder.path, CONFIG)
    entry = _only_entry(path, [*_entries_in(_read_json(folder, CONFIG))])
    if entry is not None:
        return entry
    for name, method in OTHER_FILES.items():
        config = None
        with suppress(FormatError):  # it may be of any program
            config = _read_json(folder, name)
        value = config.get("quantization") if isinstance(config, dict) else None
        if value is not None:
            other = _only_entry(os.path.join(folder.path, name), [value])
            return {"quant_method": method, **(other or {})}
    return entry_of_metadata(folder.path, metadata)


def remove_entries(config: dict[str, Any]) -> bool:
    """Remove the entries of a configuration and of those nested in it; return whether one was."""
    present = [name for name in ENTRIES if config.get(name) is not None]
    for name in present:
        del config[name]
    nested = [remove_entries(each) for each in config.values() if isinstance(each, dict)]
    return bool(present) or any(nested)


def has_entries(config: dict[str, Any]) -> bool:
    """Return whether a configuration, or one nested in it, has an entry."""
    return any(True for _ in _entries_in(config))
