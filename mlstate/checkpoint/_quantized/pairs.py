"""Quantized weights and their scales: found, paired, their values computed for `cast=`.

The tensors decide which weights are quantized (`find_scales`) and how: dtypes and shapes of codes
and scales. Values are computed in float32 and rounded once to the wanted dtype, as transformers
does. compressed-tensors rounds first: to the dtype of the scale, or to bfloat16 if the codes are
packed. A scale of E8M0 is a power of two; its code 255 is NaN. Sources of formulas without a
decoder that runs on a CPU: NVFP4 of ModelOpt is ``NVFP4QTensor.dequantize``, which multiplies
``weight_scale`` and ``weight_scale_2`` in float32 first; ``scale_weight`` is ``convert_weight`` in
ComfyUI's ``comfy/ops.py``.
"""

from __future__ import annotations

import os
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ... import _core
from ..._common.converted import converted
from ..._common.dtypes import FLOATS, name_of, numpy_dtype
from ..._common.scales import (
    CODE_FLOATS,
    EXPONENTS,
    FOUR_BITS,
    MARK,
    OF_ACTIVATIONS,
    Scales,
    find_scales,
    layer_of,
    listed_names,
)
from ..._common.store_error import format_error
from .config import COMFYUI, parse_entry, unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

    from ..._common.scales import Stored
    from ..._sharding.layout import Cutting, Steps
    from ..._types import NDArray
    from ...errors import FormatError
    from .config import Block

    Shape: TypeAlias = tuple[int, ...]
    Read: TypeAlias = Callable[[str, Cutting], NDArray]

WHOLE: Cutting = (None, 0, 0)
_GROUP = 32  # values of MXFP4 that share a scale
_BYTES = _GROUP // 2  # of a group's codes, two in a byte
_NV_GROUP = 16  # values of NVFP4 that share a scale
# Other names of a layer that do not change its values.
_MARKS = ("comfy_quant", "weight_shape")
# Last parts of names that only unsupported methods have: another name of the layer, the method.
_METHODS = {
    "qweight": ("scales", "gptq or awq"),
    "q_weight": ("q_scale", "exl2"),
    "W_q": ("scale", "hqq"),
    "SCB": ("weight", "bitsandbytes"),
    "absmax": ("quant_map", "bitsandbytes"),
}


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
    scales: Scales
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
    def axes(self) -> tuple[int, ...]:
        """Axes of the values in the order of the codes; ``w_blocks`` exchange rows and columns."""
        return (0, 2, 1) if self.codes.endswith("_blocks") else tuple(range(len(self.shape)))

    @property
    def unit(self) -> int:
        """Columns of the values in one index of the last axis of the codes that can be cut."""
        if self.codes.endswith("_blocks"):
            return _GROUP
        return 2 if self.dtype == FOUR_BITS else 1

    def value_steps(self, steps: Steps) -> Steps:
        """Return the steps of a layout of the codes as steps of the values; () if none exist."""
        try:
            return tuple(
                (axis if isinstance(axis, str) else self.axes[axis], n) for axis, n in steps
            )
        except IndexError:
            return ()

    def load(self, read: Read, cutting: Cutting, dtype: str) -> NDArray:
        """Return the values of the part `cutting`, computed from codes and scales.

        `read(key, cutting)`: returns a part of a stored tensor. `dtype`: of the values.
        """
        self.check()
        box, product_dtype = box_of(cutting, self.shape), self.product_dtype or dtype
        values = np.empty(box.lengths, numpy_dtype(product_dtype))
        if values.size:
            self._decode(read, cutting, box, values)
        if product_dtype != dtype:
            values = converted(values, dtype)
        return values if box.elements is None else values.reshape(-1)[box.elements].copy()

    def _decode(self, read: Read, cutting: Cutting, box: Box, values: NDArray) -> None:
        """Write the values of `box`, the part `cutting`, to `values`."""
        ranges = [box.slices()[axis] for axis in self.axes]
        shape = [self.shape[axis] for axis in self.axes]
        # At least two axes: a weight without or with one axis is a row.
        *outer, rows, columns = [1, 1, *shape][-max(len(shape), 2) :]
        at = [slice(0, 1), slice(0, 1), *ranges][-max(len(shape), 2) :]
        first = at[-1].start - at[-1].start % self.unit  # of the codes that are read
        codes = self._read_codes(read, cutting, box, ranges)
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        scales = None
        if self.scales:
            scales = self._scale_numbers(read)
            all_blocks = (*outer, *grid)
            spread = np.broadcast_to if scales.size == 1 else np.reshape
            scales = spread(scales.reshape(()) if scales.size == 1 else scales, all_blocks)
            scales = scales[tuple(at[: len(outer)])].reshape(-1, *grid)
        lengths = (prod(each.stop - each.start for each in at[:-2]), at[-2].stop - at[-2].start)
        _core.scaled_codes_decode(
            # the axes of stored codes; then matrices, rows, columns
            values.transpose(self.axes).reshape(*lengths, -1)
            if self.axes == tuple(range(len(self.shape)))
            else values.transpose(self.axes),
            np.ascontiguousarray(codes).view(np.uint8).reshape(*lengths, -1),
            scales,
            self.dtype,
            at[-1].start - first,  # codes to skip at the start of a row
            self.block,
            (at[-2].start, at[-1].start),
        )

    def _read_codes(self, read: Read, cutting: Cutting, box: Box, ranges: list[slice]) -> NDArray:
        """Return the codes of `box`; `ranges`: of the values, in the order of the codes' axes.

        The whole tensor is read if no layout cuts it so that exactly these codes are its part.
        """
        stored = list(ranges)
        if stored:
            last = stored[-1]
            stored[-1] = slice(last.start // self.unit, -(-last.stop // self.unit))
        steps, index, _ = cutting
        if steps is not None and box.elements is None:
            projected, number = _core.layout_project(steps, index, len(self.shape), None)
            mapped = tuple((self.axes.index(axis), parts) for axis, parts in projected)
            shape = [self.shape[axis] for axis in self.axes]
            shape[-1] //= self.unit
            starts, lengths, *_ = _core.layout_part(mapped, tuple(shape), number)
            part = [slice(a, a + n) for a, n in zip(starts, lengths, strict=True)]
            if mapped and part == stored:
                return read(self.codes, (mapped, number, prod(parts for _, parts in mapped)))
        return read(self.codes, WHOLE)[tuple(stored)]

    def _scale_numbers(self, read: Read) -> NDArray:
        """Return the scales of all blocks as float32, with the scale of the scales."""
        [key] = self.scales.weight
        scales = _numbers(read(key, WHOLE))
        if self.scales.second:
            second = _numbers(read(self.scales.second, WHOLE)).reshape(())
            is_divisor = self.scales.second.endswith("_global_scale")
            scales = scales / second if is_divisor else scales * second
        return scales


def _numbers(scales: NDArray) -> NDArray:
    """Return scales as float32; uint8 and E8M0 scales are exponents of 2."""
    name = name_of(scales.dtype)
    if name in (EXPONENTS, "uint8"):
        values = np.empty(scales.shape, np.float32)
        codes = np.ascontiguousarray(scales).view(np.uint8).reshape(1, 1, -1)
        # no scales, no codes to skip, blocks of one code
        _core.scaled_codes_decode(
            values.reshape(1, 1, -1), codes, None, EXPONENTS, 0, (1, 1), (0, 0)
        )
        return values
    return scales if name == "float32" else converted(scales, "float32")


# ---- the pairs of a state ----


class Pairs:
    """The weights with scales of a state, by the names of their values."""

    def __init__(self, pairs: dict[str, Pair], hidden: set[str]) -> None:
        self.by_name = pairs
        self.by_codes = {pair.codes: pair for pair in pairs.values()}
        self.hidden = hidden  # keys of codes, scales, and facts about activations

    def renamed(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the stored key for each name to load: codes get the names of their weights.

        `keys`: of all stored tensors. Scales and facts about activations get no name.
        """
        names: dict[str, str] = {}
        for key in keys:
            pair = self.by_codes.get(key)
            if key not in self.hidden or pair is not None:
                names[key if pair is None else pair.name] = key
        return names


class _Finder:
    """Finds the pairs among the tensors of a state."""

    def __init__(
        self, path: str, entry: Mapping[str, Any] | None, tensors: Mapping[str, Stored]
    ) -> None:
        """Prepare to find the pairs among `tensors`, dtype and shape by key.

        `path`: for errors. `entry`: the ``quantization_config``, or None. Raises CompatibilityError
        for a method that is not decoded, which the entry or the tensors name.
        """
        self.path = path
        self.tensors = tensors
        self.method, self.suffix, self.blocks = parse_entry(path, entry)
        for key in tensors:
            layer = layer_of(key)
            beside, method = _METHODS.get(key[len(layer) :], ("", ""))
            if method and layer + beside in tensors:
                raise unsupported(path, f"{key!r} is of the method {method}")
        self.pairs: dict[str, Pair] = {}
        self.hidden: set[str] = set()

    def _problem(self, name: str, text: str) -> FormatError:
        """Return the FormatError for the weight `name`, raised if its values are loaded."""
        problem = f"{self.path}: {name!r}: {text}; load the stored tensors without cast="
        return format_error(problem, self.path, name)

    def find(self) -> Pairs:
        """Return all pairs.

        A pair that lacks codes or scales, or does not fit, has a problem, which is raised when it
        is loaded.
        """
        scales_of_codes = find_scales(self.tensors)
        if self.method or any(scales_of_codes.values()):
            for codes, scales in scales_of_codes.items():
                self._add(codes, scales)
            self._add_lone_scales()
            self.hidden |= {key for key in self.tensors if key[len(layer_of(key)) :] == MARK}
        return Pairs(self.pairs, self.hidden)

    def _add(self, codes: str, scales: Scales) -> None:
        """Add the pair of the tensor `codes`, and hide what describes the layer's activations."""
        if codes.endswith("_blocks"):
            pair = self._pair_of_groups(scales)
        else:
            pair = self._pair_of_weight(codes, scales)
        self.pairs[pair.name] = pair
        self.hidden |= {codes, *scales.weight, *((scales.second,) if scales.second else ())}
        # scales of activations have the name of the layer: "a.weight" has "a.input_scale"
        is_weight = pair.name.endswith("weight")
        layer = layer_of(codes) if is_weight else f"{pair.name}_"
        beside = {layer + each for each in (*OF_ACTIVATIONS, *_MARKS)}
        self.hidden |= beside & self.tensors.keys()

    def _add_lone_scales(self) -> None:
        """Add scales without a weight, if the method tells their names."""
        if self.suffix == "_scales":
            for key in self.tensors:
                name = key.removesuffix("_blocks").removesuffix("_scales")
                if name != key and name not in self.pairs:
                    self.pairs[name] = self._pair_of_groups(Scales(name, (key,), "", ()))
                    self.hidden |= {f"{name}_blocks", f"{name}_scales"} & self.tensors.keys()
            return
        # scales of activations, such as "input_scale", end in "_scale" too
        suffix = ".weight" + self.suffix if self.suffix == "_scale" else self.suffix
        for key in self.tensors if self.suffix else ():
            name = key[: -len(self.suffix)]
            is_lone = key not in self.hidden and name not in self.pairs
            if not key.endswith(suffix) or key.endswith("activation_scale_inv") or not is_lone:
                continue
            text = f"{key!r} is the scale of a tensor that is missing"
            if name in self.tensors:
                text = f"{self.tensors[name][0]} has a scale, but is no code"
            codes, scales = name if name in self.tensors else key, Scales(name, (key,), "", ())
            problem = self._problem(name, text)
            self.pairs[name] = Pair(name, codes, scales, (), "", (1, 1), problem)
            self.hidden |= {codes, key}

    # ---- weights ----

    def _pair_of_weight(self, codes: str, scales: Scales) -> Pair:
        """Return the pair of a weight whose values have the order of its codes."""
        dtype, shape = self.tensors[codes]
        kinds = [self.tensors[key][0] for key in scales.weight]
        kind = kinds[0] if kinds else ""
        name = scales.value
        is_four = dtype not in CODE_FLOATS and (dtype != "int8" or kind in (EXPONENTS, "uint8"))
        if is_four and shape:
            shape = (*shape[:-1], 2 * shape[-1])
        form = FOUR_BITS if is_four else dtype
        text = self._refusal(codes, scales, kind, form)
        block: Block = (1, 1)
        if not text:
            [key] = scales.weight
            block, text = self._block_of(shape, self.tensors[key][1], kind, form)
        rounded = ""
        if codes.endswith("_packed"):
            rounded = "bfloat16"
        elif self.method in ("", "compressed-tensors") and scales.weight:
            is_named = scales.weight[0] == f"{name}_scale"
            rounded = kind if is_named and kind in FLOATS and not scales.second else ""
        problem = self._problem(name, text) if text else None
        return Pair(name, codes, scales, shape, form, block, problem, rounded)

    def _refusal(self, codes: str, scales: Scales, kind: str, form: str) -> str:
        """Return why the weight `codes` has no values by the names and dtypes of its scales, or "".

        `kind`: dtype of the scales. `form`: dtype of the codes, which may be packed in bytes.
        """
        name, dtype = scales.value, self.tensors[codes][0]
        if scales.others or len(scales.weight) > 1 or (scales and not scales.weight):
            return f"its scales are {listed_names(scales.names)}, which mlstate cannot combine"
        if not scales.weight:
            return f"{name + (self.suffix or '_scale')!r}, its scale, is missing"
        text = self._refusal_of_neighbours(codes, name)
        if form == FOUR_BITS or kind in (EXPONENTS, "uint8"):
            text = text or self._refusal_of_tiles(codes)
        if text or form == FOUR_BITS:
            return text or self._refusal_of_four_bits(scales, kind)
        [key] = scales.weight
        if form == "int8" and not key.endswith("_scale"):
            return f"int8 has a scale, but {key!r} is not the name of a scale of int8"
        if scales.second:
            return f"{dtype} has two scales, {listed_names(scales.names)}"
        is_number = kind in FLOATS or kind in (EXPONENTS, "uint8")
        return "" if is_number else f"its scale is {kind}, not a float"

    def _refusal_of_neighbours(self, codes: str, name: str) -> str:
        """Return why the weight `name` has no values by tensors other than scales, or ""."""
        neighbours = {
            f"{name}_zero_point": "the zero points",
            f"{layer_of(codes)}zero_point": "the zero points",
            f"{name}_g_idx": "the order of groups",  # their columns need not be adjacent
        }
        if self.tensors[codes][0] == "int32":
            return "int32 packs several integers, which mlstate does not unpack"
        if name != codes and name in self.tensors:
            return "it is the name of a tensor too"
        present = [f"it has {neighbours[key]} {key!r}" for key in neighbours if key in self.tensors]
        return present[0] if present else ""

    def _refusal_of_tiles(self, codes: str) -> str:
        """Return why scales of small blocks beside `codes` are not in order, or ""."""
        is_comfyui = self.method == COMFYUI or f"{layer_of(codes)}comfy_quant" in self.tensors
        return "ComfyUI stores the scales of small blocks in tiles" if is_comfyui else ""

    def _refusal_of_four_bits(self, scales: Scales, kind: str) -> str:
        """Return why packed codes have no values by the dtypes of their scales, or "".

        `kind`: dtype of the scales of groups.
        """
        if kind in (EXPONENTS, "uint8") and not scales.second:
            return ""
        if kind == "float8_e4m3fn" and scales.second:
            count = prod(self.tensors[scales.second][1])
            return "" if count == 1 else f"{scales.second!r} has {count} numbers instead of 1"
        lacks = "" if scales.second else " without a second scale"
        return f"4-bit codes have the scale {scales.weight[0]!r} of {kind}{lacks}"

    def _block_of(self, shape: Shape, grid: Shape, kind: str, form: str) -> tuple[Block, str]:
        """Return the block (rows, columns) that shares a scale, and why there is none, or "".

        `shape`: of the values. `grid`, `kind`: shape and dtype of the scales. `form`: of the codes.
        """
        *outer, rows, columns = (1, 1, *shape)[-max(len(shape), 2) :]
        matrix = (max(rows, 1), max(columns, 1))  # the block of one scale for all
        fitting, shapes = [], []  # blocks; shapes of their scales
        for each in self._choices(matrix, grid, len(outer), kind, form):
            block = (min(each[0], matrix[0]), min(each[1], matrix[1]))
            forms = [(*outer, -(-rows // block[0]), -(-columns // block[1]))]
            shapes.append(forms[0])
            if not self.blocks and block == (1, matrix[1]):
                forms.append((*outer, rows))
            if not self.blocks and block == matrix:
                forms.append(tuple(outer))
            if grid in forms or (block == matrix and prod(grid) == 1):
                fitting.append(block)
        fitting = [*dict.fromkeys(fitting)]
        if len(fitting) == 1:
            return fitting[0], ""
        text = f"its scale has the shape {grid}"
        if fitting:
            return (1, 1), f"{text}, which fits blocks of {' and '.join(map(str, fitting))}"
        more = "" if self.blocks or form == FOUR_BITS else ", or quantization_config with blocks"
        return (1, 1), f"{text} instead of {' or '.join(map(str, dict.fromkeys(shapes)))}{more}"

    def _choices(self, matrix: Block, grid: Shape, outer: int, kind: str, form: str) -> list[Block]:
        """Return the blocks that scales may have; `outer`: axes before those of the matrix."""
        row = (1, matrix[1])
        if form == FOUR_BITS:
            return [(1, _NV_GROUP if kind == "float8_e4m3fn" else _GROUP)]
        if self.blocks:
            is_other = self.method == "compressed-tensors"  # the entry has no other schemes
            return [*self.blocks, *([row, matrix] if is_other else ())]
        is_grid = len(grid) == outer + 2 and self.method != "compressed-tensors"
        return [*(self._divisors(matrix, grid) if is_grid else ()), row, matrix]

    @staticmethod
    def _divisors(matrix: Block, grid: Shape) -> list[Block]:
        """Return the block of a grid of scales that divides a matrix, if no other is likely.

        Each side must be a power of 2, unless one scale is for all of it: two scales for 160 rows
        may be of blocks of 80 or of 128.
        """
        block = []
        for length, count in zip(matrix, grid[-2:], strict=True):
            side = length // count if count and not length % count else 0
            if side & (side - 1) and count > 1:
                return []
            block.append(side)
        return [(block[0], block[1])] if all(block) else []

    # ---- groups of 4-bit floats ----

    def _pair_of_groups(self, scales: Scales) -> Pair:
        """Return the pair of ``w_blocks`` and ``w_scales``, MXFP4 of transformers."""
        name = scales.value
        codes, key = f"{name}_blocks", f"{name}_scales"
        shape, text = self._values_shape(self.tensors.get(codes), self.tensors.get(key))
        codes = codes if codes in self.tensors else key
        if name in self.tensors:
            text = "it is the name of a tensor too"
        problem = self._problem(name, text) if text else None
        return Pair(name, codes, scales, shape, FOUR_BITS, (1, _GROUP), problem)

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


def find_pairs(
    path: str, entry: Mapping[str, Any] | None, tensors: Mapping[str, Stored]
) -> Pairs | None:
    """Return the quantized weights among `tensors`, each paired with its scales; None without any.

    `path`: of the checkpoint, for errors. `entry`: its ``quantization_config``, or None. `tensors`:
    dtype and shape by key. Raises CompatibilityError for a method that is not decoded.
    """
    finder = _Finder(os.path.join(path, "")[:-1], entry, tensors)
    pairs = finder.find()
    return pairs if pairs.by_name or pairs.hidden else None
