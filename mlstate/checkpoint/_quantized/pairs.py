"""Quantized weights and their scales: found, paired, their values computed for `cast=`.

Values are computed in float32 and rounded once to the wanted dtype, as transformers does for the
methods ``fp8`` and ``mxfp4``. compressed-tensors rounds to the dtype of the scale first. A scale of
E8M0 is a power of two; its code 255 is NaN.
"""

from __future__ import annotations

import os
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ... import _core
from ..._common.converted import converted
from ..._common.dtypes import FLOAT8S, FLOATS, name_of, numpy_dtype
from ..._common.store_error import format_error
from ...errors import CompatibilityError
from .._store.open_path import is_url, open_folder
from .config import CONFIG, read_quantization

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

    from ..._sharding.layout import Cutting
    from ..._types import NDArray
    from ...errors import FormatError
    from .._folder.protocol import Files
    from .config import Block, Quantization

    Shape: TypeAlias = tuple[int, ...]
    Stored: TypeAlias = tuple[str, Shape]  # dtype and shape of a stored tensor
    Read: TypeAlias = Callable[[str, Cutting], NDArray]

WHOLE: Cutting = (None, 0, 0)
_EXPONENTS = "float8_e8m0fnu"
_FOUR_BITS = "float4_e2m1fn_x2"
_GROUP = 32  # values of MXFP4 that share a scale
_BYTES = _GROUP // 2  # of a group's codes, two in a byte
# Names of scales of activations, which values have no use for.
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "activation_scale_inv")
# Axes of blocks and scales of MXFP4, by the axes of the values: experts, columns, rows.
_STORED_AXES = {0: 0, 1: 2, 2: 1}


class Box(NamedTuple):
    """A part of a tensor: a box, and a range of the box's elements if the part is flat.

    A flat part is a range of the elements of the tensor in C order. `elements` is None otherwise.
    """

    starts: Shape
    lengths: Shape
    elements: slice | None

    def slices(self) -> tuple[slice, ...]:
        """Return the box as an index."""
        return tuple(slice(a, a + n) for a, n in zip(self.starts, self.lengths, strict=True))


def box_of(cutting: Cutting, shape: Shape) -> Box:
    """Return the box that a rank loads of a tensor of this shape, by the part in `cutting`.

    Of a flat part it is the smallest box with the part's elements, which `elements` selects.
    """
    steps, index, _ = cutting
    if steps is None:
        return Box((0,) * len(shape), shape, None)
    projected, number = _core.layout_project(steps, index, len(shape), None)
    starts, lengths, begin, end, flat = _core.layout_part(projected, shape, number)
    return Box(starts, lengths, slice(begin, end) if flat else None)


class Pair(NamedTuple):
    """A weight with its scales, by the keys of both."""

    name: str  # of the values
    codes: str
    scales: str
    shape: Shape  # of the values
    dtype: str  # of the codes
    block: Block
    problem: FormatError | None = None  # why it has no values
    product_dtype: str = ""  # to round the products to before they are converted

    def check(self) -> None:
        """Raise FormatError if the scales are missing, or do not fit the weight."""
        if self.problem is not None:
            raise self.problem

    @property
    def is_packed(self) -> bool:
        """Whether this is MXFP4, whose values have rows and columns exchanged."""
        return self.dtype == _FOUR_BITS

    def load(self, read: Read, cutting: Cutting, dtype: str) -> NDArray:
        """Return the values of the part `cutting`, computed from codes and scales.

        `read(key, cutting)`: returns a part of a stored tensor. `dtype`: of the values.
        """
        self.check()
        box = box_of(cutting, self.shape)
        if self.is_packed:
            values = self._values_of_groups(read, cutting, box, dtype)
        else:
            # codes of a flat part are read whole, and then cut to the box
            stored_part = WHOLE if box.elements is not None else cutting
            codes = read(self.codes, stored_part)
            if box.elements is not None:
                codes = codes[box.slices()]
            product_dtype = self.product_dtype or dtype
            values = self._values_of_blocks(codes, read(self.scales, WHOLE), box, product_dtype)
            if product_dtype != dtype:
                values = converted(values, dtype)
        return values if box.elements is None else values.reshape(-1)[box.elements].copy()

    def _values_of_blocks(
        self, codes: NDArray, stored_scales: NDArray, box: Box, dtype: str
    ) -> NDArray:
        """Return the values of `box`, a part of a weight whose last two axes have blocks.

        `codes`: of the box only. `stored_scales`: of the whole weight, one for each block, or one
        in all. `dtype`: of the values.
        """
        scales = _scale_numbers(stored_scales)
        # At least two axes: a weight without or with one axis is a row.
        *outer, rows, columns = (1, 1, *self.shape)[-max(len(self.shape), 2) :]
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if scales.size == 1:
            scales = np.broadcast_to(scales.reshape(()), (*outer, *grid))
        scales = scales.reshape(*outer, *grid)[box.slices()[: len(outer)]]
        *_, first_row, first_column = (0, 0, *box.starts)
        values = np.empty(box.lengths, numpy_dtype(dtype))
        matrices = prod(box.lengths[: len(outer)])
        shape = (matrices, *(1, 1, *box.lengths)[-2:])
        _core.scaled_codes_decode(
            values.reshape(shape),
            np.ascontiguousarray(codes).view(np.uint8).reshape(shape),
            scales.reshape(matrices, *grid),
            self.dtype,
            0,  # codes to skip at the start of a row
            self.block,
            (first_row, first_column),
        )
        return values

    def _values_of_groups(self, read: Read, cutting: Cutting, box: Box, dtype: str) -> NDArray:
        """Return the values of a box of MXFP4 weights, whose axes are experts, columns and rows.

        `read`: as for `load`. `cutting`: the part that the box is of. `dtype`: of the values. Whole
        tensors are read if the part does not consist of whole groups.
        """
        experts, columns, rows = box.slices()
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        stored = (experts, rows, groups)
        part = _stored_cutting(cutting, self.shape, stored) if box.elements is None else WHOLE
        codes, exponents = read(self.codes, part), read(self.scales, part)
        if part == WHOLE:
            codes, exponents = codes[stored], exponents[stored]
        values = np.empty(box.lengths, numpy_dtype(dtype))
        # Values of the first group that precede the box.
        skip = columns.start - groups.start * _GROUP
        _core.scaled_codes_decode(
            values.transpose(0, 2, 1),
            codes.view(np.uint8).reshape(*codes.shape[:2], -1),
            _scale_numbers(exponents),
            self.dtype,
            skip,
            self.block,
            (0, skip),
        )
        return values


def _stored_cutting(cutting: Cutting, shape: Shape, stored: tuple[slice, ...]) -> Cutting:
    """Return the cutting that reads exactly the groups `stored` of MXFP4 for a part of the values.

    `cutting`: the part. `shape`: of the values. `stored`: slices of experts, rows and groups. It is
    `WHOLE` if no cutting gives exactly these, because the part begins or ends within a group.
    """
    steps, index, _ = cutting
    if steps is None:
        return WHOLE
    projected, number = _core.layout_project(steps, index, 3, None)
    mapped = tuple((_STORED_AXES[axis], parts) for axis, parts in projected)  # type: ignore[index]
    groups = (shape[0], shape[2], shape[1] // _GROUP)
    starts, lengths, *_ = _core.layout_part(mapped, groups, number)
    is_exact = all(
        each.stop - each.start == length and (each.start == start or not length)
        for each, start, length in zip(stored, starts, lengths, strict=True)
    )
    return (mapped, number, prod(parts for _, parts in mapped)) if mapped and is_exact else WHOLE


def _scale_numbers(scales: NDArray) -> NDArray:
    """Return scales as float32; uint8 and E8M0 scales are exponents of 2."""
    name = name_of(scales.dtype)
    if name in (_EXPONENTS, "uint8"):
        values = np.empty(scales.shape, np.float32)
        codes = np.ascontiguousarray(scales).view(np.uint8).reshape(1, 1, -1)
        # no scales, no codes to skip, blocks of one code
        _core.scaled_codes_decode(
            values.reshape(1, 1, -1), codes, None, _EXPONENTS, 0, (1, 1), (0, 0)
        )
        return values
    return scales if name == "float32" else converted(scales, "float32")


# ---- the pairs of a folder ----


class Pairs:
    """The weights with scales of a folder, by the names of their values."""

    def __init__(self, pairs: dict[str, Pair], hidden: set[str]) -> None:
        self.by_name = pairs
        self.by_codes = {pair.codes: pair for pair in pairs.values()}
        self._hidden = hidden  # keys of codes, scales, and facts about activations

    def renamed(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the stored key for each name to load: codes get the names of their weights.

        `keys`: of all stored tensors. Scales and facts about activations get no name.
        """
        names: dict[str, str] = {}
        for key in keys:
            pair = self.by_codes.get(key)
            if key not in self._hidden or pair is not None:
                names[key if pair is None else pair.name] = key
        return names


class _Finder:
    """Finds the pairs among the tensors of a folder."""

    def __init__(self, path: str, quantization: Quantization, tensors: dict[str, Stored]) -> None:
        """Prepare to find the pairs among `tensors`, dtype and shape by key; `path`: for errors."""
        self.path = path
        self.tensors = tensors
        self.suffix = quantization.suffix
        self.blocks = quantization.blocks
        self.pairs: dict[str, Pair] = {}
        self.hidden: set[str] = set()

    def _problem(self, name: str, text: str) -> FormatError:
        """Return the FormatError for the weight `name`, raised if its values are loaded."""
        error = format_error(
            f"{self.path}: {name!r}: {text}; load the stored tensors without cast=", self.path
        )
        error.name = name
        return error

    def _add(self, pair: Pair) -> None:
        self.pairs[pair.name] = pair
        self.hidden |= {pair.codes, pair.scales}

    # ---- 8-bit floats ----

    def find_float8s(self) -> None:
        """Add the weights of 8-bit floats, and scales without a weight.

        A pair that lacks one of both, or does not fit, has a problem, which is raised when it is
        loaded.
        """
        names = {key for key, (dtype, _) in self.tensors.items() if dtype in FLOAT8S - {_EXPONENTS}}
        # scales of activations, such as "input_scale", end in "_scale" too
        suffix = ".weight" + self.suffix if self.suffix == "_scale" else self.suffix
        names |= {
            key[: -len(self.suffix)]
            for key in self.tensors
            if key.endswith(suffix) and not key.endswith("activation_scale_inv")
        }
        for name in names:
            scales = name + self.suffix
            dtype, shape = self.tensors.get(name, ("", ()))
            block, text = self._block_of(name, dtype, shape, self.tensors.get(scales))
            problem = self._problem(name, text) if text else None
            # without a weight, the key of the scales is listed under the name of the weight
            codes = name if name in self.tensors else scales
            kind = self.tensors[scales][0] if scales in self.tensors else ""
            product_dtype = kind if self.suffix == "_scale" and kind in FLOATS else ""
            self._add(Pair(name, codes, scales, shape, dtype, block, problem, product_dtype))
            # scales of activations have the name of the layer: "a.weight" has "a.input_scale"
            layer = name[: -len("weight")] if name.endswith(".weight") else f"{name}_"
            self.hidden |= {layer + each for each in _OF_ACTIVATIONS} & self.tensors.keys()

    def _block_of(
        self, name: str, dtype: str, shape: Shape, scales: Stored | None
    ) -> tuple[Block, str]:
        """Return the block (rows, columns) that shares a scale, and a text.

        The text is "", or why the weight `name` has no values. `dtype`, `shape`: of the codes, ""
        if they are missing. `scales`: dtype and shape of the scales, None if missing.
        """
        no_block = (1, 1)
        if scales is None:
            return no_block, f"{name + self.suffix!r}, its scale, is missing"
        if not dtype:
            return no_block, f"{name + self.suffix!r} is the scale of a tensor that is missing"
        if dtype not in FLOAT8S:
            return no_block, f"{dtype} has a scale, but is no 8-bit float"
        if f"{name}_zero_point" in self.tensors:
            return no_block, f"it has the zero points {name + '_zero_point'!r}"
        if f"{name}_g_idx" in self.tensors:  # columns of a group need not be adjacent
            return no_block, f"it has the order of groups {name + '_g_idx'!r}"
        kind, grid = scales
        if kind not in FLOATS and kind not in (_EXPONENTS, "uint8"):
            return no_block, f"its scale is {kind}, not a float"
        *outer, rows, columns = (1, 1, *shape)[-max(len(shape), 2) :]
        matrix = (max(rows, 1), max(columns, 1))  # the block of one scale for all
        # compressed-tensors may have a scale for each row, or one in all, besides its blocks
        is_compressed_tensors = self.suffix == "_scale"
        choices = [*self.blocks, *([(1, matrix[1])] if is_compressed_tensors else [])]
        choices += [matrix] if is_compressed_tensors or not self.blocks else []
        expected, fitting = [], []  # shapes of the scales; blocks
        for block in dict.fromkeys((min(b[0], matrix[0]), min(b[1], matrix[1])) for b in choices):
            expected.append((*outer, -(-rows // block[0]), -(-columns // block[1])))
            if grid == expected[-1] or (block == matrix and prod(grid) == 1):
                fitting.append(block)
        if len(fitting) == 1:
            return fitting[0], ""
        if fitting:
            blocks = " and ".join(map(str, fitting))
            return no_block, f"its scale has the shape {grid}, which fits blocks of {blocks}"
        shapes = " or ".join(map(str, dict.fromkeys(expected)))
        return no_block, f"its scale has the shape {grid} instead of {shapes}"

    # ---- groups of 4-bit floats ----

    def find_groups(self) -> None:
        """Add the weights of MXFP4, whose codes are in groups.

        A pair that lacks blocks or scales has a problem, which is raised when it is loaded.
        """
        names = {
            key.removesuffix(ending)
            for key in self.tensors
            for ending in ("_blocks", "_scales")
            if key.endswith(ending)
        }
        for name in names:
            codes, scales = f"{name}_blocks", f"{name}_scales"
            shape, text = self._values_shape(self.tensors.get(codes), self.tensors.get(scales))
            if name in self.tensors:
                text = "it is the name of a tensor too"
            problem = self._problem(name, text) if text else None
            stored_key = codes if codes in self.tensors else scales
            self._add(Pair(name, stored_key, scales, shape, _FOUR_BITS, (1, _GROUP), problem))

    @staticmethod
    def _values_shape(blocks: Stored | None, scales: Stored | None) -> tuple[Shape, str]:
        """Return the shape of the values and "", or () and why they cannot be computed.

        `blocks`, `scales`: dtype and shape, None if missing.
        """
        if blocks is None or scales is None:
            return (), f"its {'blocks' if blocks is None else 'scales'} are missing"
        if blocks[0] != "uint8" or scales[0] != "uint8":
            return (), f"blocks of {blocks[0]} and scales of {scales[0]} instead of uint8"
        if len(blocks[1]) != 4 or blocks[1][3] != _BYTES:
            text = f"its blocks have the shape {blocks[1]} instead of experts, rows, groups, "
            return (), f"{text}{_BYTES} bytes"
        experts, rows, groups, _ = blocks[1]
        if scales[1] != (experts, rows, groups):
            return (), f"its scales have the shape {scales[1]} instead of {blocks[1][:3]}"
        return (experts, groups * _GROUP, rows), ""


def find_pairs(folder: Files, tensors: Callable[[], dict[str, Stored]]) -> Pairs | None:
    """Return the quantized weights of a Hugging Face folder, each paired with its scales.

    None if its config names no quantization. `tensors`: returns dtype and shape of all tensors by
    key; called only if needed.
    """
    quantization = read_quantization(folder)
    if quantization is None:
        return None
    path = os.path.join(folder.path, "")[:-1]
    finder = _Finder(path, quantization, tensors())
    if quantization.method == "mxfp4":
        finder.find_groups()
    else:
        finder.find_float8s()
    return Pairs(finder.pairs, finder.hidden)


def refuse_quantized(folder: Files, tensors: dict[str, Stored]) -> None:
    """Raise CompatibilityError if some tensors are quantized according to a folder's config.

    `tensors`: dtype and shape by key.
    """
    pairs = find_pairs(folder, lambda: tensors)
    if pairs is not None and pairs.by_name:
        name = min(pairs.by_name)
        error = CompatibilityError(
            f"{name!r} is quantized, as {os.path.join(folder.path, CONFIG)} says, and its numbers "
            "alone are not its values: load its folder of safetensors files with cast="
        )
        error.name, error.path = name, folder.path
        raise error


def refuse_quantized_state(path: str, state: Mapping[str, Any]) -> None:
    """Do as `refuse_quantized` for the tensors `state` of a folder, or of a file in one.

    `path`: of the folder or file, or a URL.
    """
    is_folder = is_url(path) or os.path.isdir(path)
    folder = path if is_folder else os.path.dirname(os.path.abspath(path))
    tensors = {name: (name_of(each.dtype), tuple(each.shape)) for name, each in state.items()}
    refuse_quantized(open_folder(folder, reads=True), tensors)
