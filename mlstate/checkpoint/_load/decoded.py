"""`into=` of quantized weights: targets that receive values, with ``cast=True``, or scales."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ... import _core
from ..._common.converted import converted
from ..._common.dtypes import FLOAT8S, FLOATS, name_of, numpy_dtype
from ..._common.scales import layer_of, value_name
from ..._sharding.layout import Shard
from ...errors import CompatibilityError
from ...state._load_into import check_load
from .._quantized.pairs import WHOLE, box_of

if TYPE_CHECKING:
    from ..._sharding.layout import Cutting, Steps
    from .._quantized.pairs import Pair, Shape
    from .._records import TensorRecord
    from .._sections import Section
    from .loader import Loader

    Part: TypeAlias = tuple[Steps, int]


class Decoded(NamedTuple):
    """A quantized weight to decode into a target, and the part of its values."""

    pair: Pair
    cutting: Cutting
    elements: slice | None  # of the part, if the target is a range of elements

    def load(self, loader: Loader, section: Section, dtype: str) -> Any:
        """Return the values of the part in this dtype."""
        values = loader.decode(section, self.pair, self.cutting, dtype)
        return values if self.elements is None else values.reshape(-1)[self.elements]

    def check(self, loader: Loader, name: str, target: Any) -> None:
        """Raise CompatibilityError if a target has another shape than the part of the values."""
        box = box_of(self.cutting, self.pair.shape)
        shape, part = box.lengths, self.elements or box.elements
        shape = shape if part is None else (part.stop - part.start,)
        _check_array(name, target, "float32", shape, cast=True)


class ScaleBlocks(NamedTuple):
    """The scales of all blocks that a rank's part of codes touches."""

    row: TensorRecord  # of all scales
    slices: tuple[slice, ...]
    codes: str

    def read(self, loader: Loader, section: Section, *, mmap: bool = False) -> Any:
        """Return the scales in the stored dtype."""
        arrays = loader.load_keys(section.number, [self.row.key], WHOLE, mmap=mmap)
        return arrays[self.row.key][self.slices]

    def load(self, loader: Loader, section: Section, dtype: str) -> Any:
        """Return the scales; 8-bit floats are converted to this dtype if the load casts."""
        scales = self.read(loader, section)
        return converted(scales, dtype) if self._is_converted(loader, dtype) else scales

    def _is_converted(self, loader: Loader, dtype: str) -> bool:
        return loader.request.cast and self.row.dtype in FLOAT8S and dtype in FLOATS

    def check(self, loader: Loader, name: str, target: Any) -> None:
        """Raise CompatibilityError if a target has another shape, part or dtype."""
        array = target.array if isinstance(target, Shard) else target
        shape, got = tuple(each.stop - each.start for each in self.slices), tuple(array.shape)
        slices: object = self.slices
        if isinstance(target, Shard):
            part = box_of((target._steps, target.index, 1), target.shape)
            slices = part.slices() if part.elements is None else part.elements
        if got != shape or slices != self.slices:
            ranges = ", ".join(f"{each.start}:{each.stop}" for each in self.slices)
            text = (
                f"{loader.folder}: rank {loader.request.rank} needs the scales [{ranges}] of "
                f"{name!r}, which has the shape {self.row.shape}, for its part of {self.codes!r}, "
                f"and the target has the shape {got}: pass an array of the shape {shape}"
            )
            raise CompatibilityError(text, name=name, expected=str(shape), got=str(got))
        dtype = "float32" if self._is_converted(loader, name_of(array.dtype)) else self.row.dtype
        _check_array(name, array, dtype, shape, cast=loader.request.cast)


def refuse_other_part(label: str, name: str, shard: Shard, shape: Shape, part: Part) -> None:
    """Raise CompatibilityError unless the target `shard` is the part that a load reads.

    `label`, `name`: of its section and itself. `shape`: of the tensor. `part`: steps and index.
    """
    texts = []
    for whole, cuts, number in ((shape, *part), (shard.shape, shard._steps, shard.index)):
        cuts = tuple((axis, parts) for axis, parts in cuts if parts > 1)
        texts.append(f"part {number if cuts else 0} of shape {whole}, cut by {list(cuts)}")
    got, expected = texts
    if got != expected:
        text = (
            f"{label}[{name!r}] is a Shard, {expected}, and the load reads {got}: pass the layout= "
            "and rank= of this part"
        )
        raise CompatibilityError(text, name=name, expected=expected, got=got)


def decode_names(
    loader: Loader, section: Section, selected: list[str], filling: Any
) -> tuple[Section, list[str], dict[str, Pair]]:
    """Return a section, its selected names, and the weights to decode, by name.

    Weights whose targets have wider floats receive their values: codes get the names of these, and
    scales without a target have none, if the codes are selected. Other targets receive codes and
    scales as they are stored, unless the caller chose the codes by the names of their values: these
    names stay, for the error.
    """
    pairs, old_names = loader.pairs[section.label], section.old_names()
    names: dict[str, str | None] = {}  # new ones by stored name
    decoded = {}
    chosen_codes = filter(pairs.by_codes.__contains__, map(old_names.__getitem__, selected))
    layers = {*map(layer_of, chosen_codes)}
    for name, stored in old_names.items():
        pair = pairs.by_codes.get(stored)
        if pair is not None:
            value = name if pair.name == pair.codes else value_name(name)
            target = filling.arrays.get(value)
            if target is not None and name_of(target.dtype) in FLOATS:
                decoded[value] = pair
            if value in decoded or name in loader.by_value:
                names[stored] = value
    if not names:
        return section, selected, {}
    for name, stored in old_names.items():
        is_hidden = stored in pairs.hidden and stored not in pairs.by_codes
        is_chosen = loader.request.names is None or layer_of(stored) in layers
        if is_hidden and is_chosen and name not in filling.known:
            names[stored] = None
    renamed = (names.get(old_names[name], name) for name in selected)
    return section.with_values(names), [name for name in renamed if name is not None], decoded


def computed_parts(
    loader: Loader, section: Section, filling: Any, pairs: dict[str, Pair], names: list[str]
) -> dict[str, Decoded | ScaleBlocks]:
    """Return what targets among `names` receive instead of a part as it is stored, by name.

    These are values of the weights `pairs`, and scales of a part of codes, unless targets cut for
    themselves. Raises as `_decoded_part`.
    """
    parts: dict[str, Decoded | ScaleBlocks] = {
        name: _decoded_part(loader, section, filling, name, pairs[name])
        for name in names
        if name in pairs
    }
    if not (loader.request.by_target and hasattr(filling, "cuts")):
        parts |= loader.scale_parts(section, (name for name in names if name not in parts))
    return parts


def _decoded_part(loader: Loader, section: Section, filling: Any, name: str, pair: Pair) -> Decoded:
    """Return a quantized weight with the part of its values that the target `name` receives.

    Raises CompatibilityError if the target is of another tensor or part, FormatError if the scales
    are missing or do not fit.
    """
    pair.check()
    cutting, elements, target = loader.cutting_of(section, pair), None, filling.arrays[name]
    if isinstance(target, Shard):
        steps, index, _ = cutting
        part = _core.layout_project(steps or (), index, len(pair.shape), None)
        refuse_other_part(section.label, name, target, pair.shape, part)
    elif hasattr(filling, "cuts") and loader.request.by_target:
        [(shape, steps, last)] = filling.cuts([name])
        cutting = WHOLE
        if isinstance(steps, int):
            elements = slice(steps, last)
        elif steps:
            cutting = (steps, last, prod(parts for _, parts in steps))
        if tuple(shape) != pair.shape:
            want, have = str(shape), str(pair.shape)
            text = f"{section.label}[{name!r}] is of shape {want}, and the load decodes {have}"
            raise CompatibilityError(text, name=name, expected=want, got=have)
    return Decoded(pair, cutting, elements)


def _check_array(name: str, target: Any, dtype: str, shape: tuple[int, ...], *, cast: bool) -> None:
    """Raise CompatibilityError if a target has another shape, or another dtype without `cast`."""
    target = target.array if isinstance(target, Shard) else target
    values = np.broadcast_to(np.zeros((), numpy_dtype(dtype)), shape)
    check_load({name: target}, {name: values}, strict=True, cast=cast)
