"""`into=` with ``cast=True``: quantized weights whose targets receive values."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ... import _core
from ..._common.dtypes import FLOATS, name_of
from ..._common.scales import value_name
from ..._sharding.layout import Shard
from ...errors import CompatibilityError
from ...state._load_into import check_load
from .._quantized.pairs import WHOLE, box_of

if TYPE_CHECKING:
    from ..._sharding.layout import Cutting, Steps
    from .._quantized.pairs import Pair, Shape
    from .._sections import Section
    from .loader import Loader

    Part: TypeAlias = tuple[Steps, int]


class Decoded(NamedTuple):
    """A quantized weight to decode into a target, and the part of its values."""

    pair: Pair
    cutting: Cutting
    elements: slice | None  # of the part, if the target is a range of elements


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
    scales without a target have none. Other targets receive codes and scales as they are stored.
    """
    pairs, old_names = loader.pairs[section.label], section.old_names()
    names: dict[str, str | None] = {}  # new ones by stored name
    decoded = {}
    for name, stored in old_names.items():
        pair = pairs.by_codes.get(stored)
        if pair is not None:
            value = name if pair.name == pair.codes else value_name(name)
            target = filling.arrays.get(value)
            if target is not None and name_of(target.dtype) in FLOATS:
                names[stored] = value
                decoded[value] = pair
        elif stored in pairs.hidden and name not in filling.known:
            names[stored] = None
    if not decoded:
        return section, selected, {}
    renamed = (names.get(old_names[name], name) for name in selected)
    return section.with_values(names), [name for name in renamed if name is not None], decoded


def decoded_part(loader: Loader, section: Section, filling: Any, name: str, pair: Pair) -> Decoded:
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


def check_decoded(name: str, decoded: Decoded, target: Any) -> None:
    """Raise CompatibilityError if a target has another shape than the part of the values."""
    box = box_of(decoded.cutting, decoded.pair.shape)
    shape, part = box.lengths, decoded.elements or box.elements
    shape = shape if part is None else (part.stop - part.start,)
    target = target.array if isinstance(target, Shard) else target
    check_load(
        {name: target}, {name: np.broadcast_to(np.float32(0), shape)}, strict=True, cast=True
    )
