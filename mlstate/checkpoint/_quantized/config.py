"""``quantization_config``: which methods (fp8, MXFP4, compressed-tensors) `cast=` can decode.

===================  ==========================================================================
``quant_method``     tensors of a weight ``w``
===================  ==========================================================================
fp8                  ``w`` of 8-bit floats, ``w_scale_inv``: one scale, or one for each block
compressed-tensors   ``w`` of 8-bit floats, ``w_scale``: one scale, or one for each row, group
                     of columns or block
mxfp4                ``w_blocks`` with two 4-bit floats in a byte, ``w_scales`` of E8M0
===================  ==========================================================================
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import _core
from ..._common.store_error import format_error
from ..._common.text import shorten
from ...errors import CompatibilityError, FormatError, StoreNotFoundError

if TYPE_CHECKING:
    from .._folder.protocol import Files

CONFIG = "config.json"
_MOST_BYTES = 16 << 20  # of the file
_MOST_DEPTH = 64  # of nested arrays and objects
_LONGEST = 60  # characters of a name in errors

Block = tuple[int, int]  # rows and columns that share a scale


class Quantization(NamedTuple):
    """How the weights of a folder are quantized."""

    method: str
    suffix: str  # of the names of scales
    blocks: tuple[Block, ...] = ()  # that the scales of some weight may have


def _malformed(path: str, text: str) -> FormatError:
    """Return the FormatError for a malformed quantization_config in the file `path`."""
    error = format_error(f"{path}: quantization_config {text}", path)
    error.name = "quantization_config"
    return error


def _unsupported(path: str, text: str) -> CompatibilityError:
    """Return the CompatibilityError for a quantization that `cast=` cannot decode.

    `text`: names it.
    """
    error = CompatibilityError(
        f"{path}: quantization_config has {text}, whose values mlstate cannot compute; it can for "
        "fp8, mxfp4, and compressed-tensors with floats of 8 bits. Load the stored tensors without "
        "cast="
    )
    error.name, error.path = "quantization_config", path
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
    weights are not 8-bit floats, FormatError if malformed.
    """
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _malformed(path, "has a group of layers without weights")
    kind, bits = weights.get("type"), weights.get("num_bits")
    if kind != "float" or bits != 8 or weights.get("symmetric") is False:
        text = shorten(f"weights of type {kind!r} with num_bits {bits!r}", 2 * _LONGEST)
        raise _unsupported(path, f"compressed-tensors {text}")
    blocks = []
    if weights.get("block_structure") is not None:
        blocks.append(_checked_block(path, weights["block_structure"]))
    if weights.get("group_size") is not None:
        blocks.append(_checked_block(path, [1, weights["group_size"]]))
    return blocks


def _parse(path: str, config: dict[str, Any]) -> Quantization:
    """Return how weights are quantized, by `config`, a ``quantization_config``.

    `path`: of the file with it, for errors. Raises CompatibilityError for an unknown method,
    FormatError for a malformed one.
    """
    method = config.get("quant_method")
    if method == "mxfp4":
        return Quantization(method, "_scales")
    if method == "fp8":
        size = config.get("weight_block_size")
        blocks = [] if size is None else [_checked_block(path, size)]
        return Quantization(method, "_scale_inv", tuple(blocks))
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise _malformed(path, "has no config_groups")
        blocks = [block for group in groups.values() for block in _group_blocks(path, group)]
        return Quantization(method, "_scale", tuple(dict.fromkeys(blocks)))
    raise _unsupported(path, f"quant_method {shorten(repr(method), _LONGEST)}")


def read_quantization(folder: Files) -> Quantization | None:
    """Return how a folder's weights are quantized; None if its config names no method.

    Raises FormatError for a malformed config, and CompatibilityError for a method that is not
    supported.
    """
    import json

    path = os.path.join(folder.path, CONFIG)
    try:
        data = folder.read(CONFIG, follow_links=True)
    except StoreNotFoundError:
        return None
    if len(data) > _MOST_BYTES:
        raise format_error(f"{path}: too long", path)
    try:
        _core.json_check(data, _MOST_DEPTH, CONFIG)
        config = json.loads(data)
    except (FormatError, ValueError) as error:
        raise format_error(f"{path}: not valid JSON: {error}", path) from None
    entry = config.get("quantization_config") if isinstance(config, dict) else None
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise _malformed(path, "is not a JSON object")
    return _parse(path, entry)
