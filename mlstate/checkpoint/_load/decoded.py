"""`into=` with ``cast=True``: quantized weights whose targets receive values."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from .._quantized.pairs import Pair
    from .._sections import Section
    from .loader import Loader


class Decoded(NamedTuple):
    """A quantized weight to decode into a target, and the part of its values."""

    pair: Pair
    cutting: Cutting
    elements: slice | None  # of the part, if the target is a range of elements


def without_whole_steps(steps: Steps, index: int) -> tuple[Steps, int]:
    """Return the steps that cut into several parts, and the index of a part; 0 without such steps.

    So two descriptions of one part are equal.
    """
    steps = tuple((axis, parts) for axis, parts in steps if parts > 1)
    return steps, index if steps else 0


def decode_names(
    loader: Loader, section: Section, selected: list[str], filling: Any
) -> tuple[Section, list[str], dict[str, Pair]]:
    """Return a section, its selected names, and the weights to decode, by name.

    Weights whose targets have wider floats receive their values: codes get the names of these, and
    scales without a target have none. Other targets receive codes and scales as they are stored.
    """
    if section.is_optimizer:
        return section, selected, {}
    pairs = loader.pairs[section.label]
    names: dict[str, str | None] = {}  # new ones by stored name
    decoded = {}
    for name, stored in section.old_names().items():
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
    old_names = section.old_names()
    renamed = (names.get(old_names[name], name) for name in selected)
    return section.with_values(names), [name for name in renamed if name is not None], decoded


def decoded_part(loader: Loader, section: Section, filling: Any, name: str, pair: Pair) -> Decoded:
    """Return a quantized weight with the part of its values that the target `name` receives.

    Raises CompatibilityError if the target is of another tensor or part, FormatError if the scales
    are missing or do not fit.
    """
    pair.check()
    cutting, elements, target = loader.cutting_of(section, pair), None, filling.arrays[name]
    shape = cut = None
    if isinstance(target, Shard):
        steps, index, _ = cutting
        part = _core.layout_project(steps or (), index, len(pair.shape), None)
        shape, cut = target.shape, without_whole_steps(target._steps, target.index)
        if cut == without_whole_steps(*part):
            cut = None
    elif hasattr(filling, "cuts") and loader.request.by_target:
        [(shape, steps, last)] = filling.cuts([name])
        cutting = WHOLE
        if isinstance(steps, int):
            elements = slice(steps, last)
        elif steps:
            cutting = (steps, last, prod(parts for _, parts in steps))
    if cut is not None or (shape is not None and tuple(shape) != pair.shape):
        want = f"{shape}, cut by {list(cut[0])} as number {cut[1]}" if cut else str(shape)
        have = f"{pair.shape}, cut by {list(cutting[0] or ())} as number {cutting[1]}"
        text = (
            f"{section.label}[{name!r}] is of shape {want}, and the load decodes {have}: pass the "
            "layout= and rank= of this part"
        )
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
