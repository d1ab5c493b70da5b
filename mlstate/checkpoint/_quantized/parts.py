"""Quantized weights of a source: pairs of each section; scales that belong to a part of codes."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.scales import CODE_FLOATS, codes_of, is_scale, layer_of, refuse_codes
from ..._common.text import count_text, shorten
from ...errors import CompatibilityError, FormatError
from .._folder.names import SECTIONS
from .pairs import find_pairs

if TYPE_CHECKING:
    from ..._common.scales import Stored
    from .._load.loader import Loader
    from .._sections import Section
    from .._sources.protocol import Source
    from .pairs import Box, Pair, Pairs

# Tensors of a layer that describe all codes, by the end of their name.
_WHOLE = ("g_idx", "weight_shape", "SCB", "comfy_quant")
_LONGEST = 60  # characters of a method's name
_PACKED = ("qweight", "scales", "qzeros")  # of GPTQ and AWQ


def known_entry(source: Source) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a source; None without a well-formed one."""
    with suppress(CompatibilityError, FormatError):
        return source.quantization
    return None


def scheme_of(source: Source) -> str | None:
    """Return a text with the method of a quantized model and its codes; None for other models.

    Without an entry that names the method, a model with codes and scales is quantized.
    """
    rows = source.index.tensors()
    tensors = {key: (dtype, tuple(shape)) for name, key, _, _, dtype, shape, *_ in rows
               if name == SECTIONS[0]}  # fmt: skip
    codes = codes_of(tensors)
    method = (known_entry(source) or {}).get("quant_method")
    if not codes and method is None:
        return None
    counts = Counter(tensors[key][0] for key in codes)
    texts = [f"{count_text(count, 'weight')} of {dtype}" for dtype, count in counts.items()]
    return ": ".join(filter(None, [shorten(str(method or ""), _LONGEST), ", ".join(texts)]))


def _tensors_of(loader: Loader, section: Section) -> dict[str, Stored]:
    """Return dtype and shape of the tensors of a section, by stored name."""
    start = len(section.key_of(""))
    return {key[start:]: (row.dtype, row.shape) for key, row in loader.rows(section).items()}


def pairs_of_sections(loader: Loader) -> dict[str, Pairs]:
    """Return the quantized weights of each section with some, by its label.

    Optimizers keep their dtypes. Raises as `find_pairs`.
    """
    pairs_by_label = {}
    for section in loader.sections:
        if section.is_optimizer or section.kind is None:
            continue
        entry = loader.source.quantization if section.number == 0 else None
        tensors = _tensors_of(loader, section)
        pairs = find_pairs(loader.folder, entry, tensors)
        if pairs is None and any(dtype in CODE_FLOATS for dtype, _ in tensors.values()):
            _refuse_scales_in_set(loader, tensors)
        if pairs is not None:
            pairs_by_label[section.label] = pairs
    return pairs_by_label


def _refuse_scales_in_set(loader: Loader, tensors: dict[str, Stored]) -> None:
    """Raise CompatibilityError if the scales of codes are in other files of a numbered set.

    `tensors`: of one file, which the caller loads.
    """
    list_names = getattr(loader.source, "names_in_set", list)
    others: dict[str, Stored] = dict.fromkeys(filter(is_scale, list_names()), ("", ()))
    refuse_codes(others | tensors, "is not converted, and other files have the scales", tensors)


class ScalePart(NamedTuple):
    """How scales follow the part of their codes."""

    codes: str
    # by axis: an index of the codes or of the scales for how many of the other; None: unknown
    blocks: tuple[tuple[int, int] | None, ...]

    def slices(self, shape: tuple[int, ...], box: Box) -> tuple[slice, ...]:
        """Return the scales of all blocks that a box of the codes touches, as an index.

        `shape`: of all scales. Scales of unknown blocks come whole.
        """
        index = [slice(0, count) for count in shape]
        for axis, (count, block) in enumerate(zip(shape, self.blocks, strict=False)):
            if count != 1 and block is not None:
                begin, end = box.starts[axis], box.starts[axis] + box.lengths[axis]
                codes, scales = block
                index[axis] = slice(begin * scales // codes, -(-end * scales // codes))
        return tuple(index)


def _blocks_of(shape: tuple[int, ...], scales: tuple[int, ...], pair: Pair | None) -> Any:
    """Return how many of the codes of `shape` have how many of `scales`, by axis; None: unknown.

    A code that packs several numbers may have several scales. Without a pair that tells it, the
    side of a block is a power of 2, as in pairs.py. A pair with a problem tells nothing, but as
    many scales as codes of an axis belong to one each.
    """
    if pair is not None and pair.problem is not None:
        return tuple((1, 1) if n == m else None for n, m in zip(shape, scales, strict=False))
    blocks = []
    for n, m in zip(shape, scales, strict=False):
        side = n // m if m and not n % m else 0
        is_packed = bool(n) and not m % n
        blocks.append((1, m // n) if is_packed else (side, 1) if side.bit_count() == 1 else None)
    if pair is not None and len(shape) == len(scales) >= 2:
        blocks[-2:] = (pair.block[0], 1), (max(pair.block[1] // pair.unit, 1), 1)
    return tuple(blocks)


def scale_parts(loader: Loader, section: Section) -> dict[str, ScalePart]:
    """Return how the scales of a section follow parts of their codes, by stored name.

    Raises as `parts_of_scales`.
    """
    entry = known_entry(loader.source) if section.number == 0 else None
    return parts_of_scales(loader.folder, entry, _tensors_of(loader, section))


def parts_of_scales(
    path: str, entry: dict[str, Any] | None, tensors: dict[str, Stored]
) -> dict[str, ScalePart]:
    """Return how scales among `tensors` follow parts of their codes, by name.

    `path`: of the checkpoint, for errors. `entry`: its ``quantization_config``, or None. Raises
    CompatibilityError if the method has no parts: EXL2, and GPTQ in the order of activations.
    """
    _refuse_methods_without_parts(path, entry, tensors)
    pairs: Pairs | None = None
    with suppress(CompatibilityError):
        pairs = find_pairs(path, entry, tensors)
    by_codes = {} if pairs is None else pairs.by_codes
    scales_of_codes = codes_of(tensors)
    owners = {name: codes for codes, scales in scales_of_codes.items() for name in scales.names}
    layers = {layer_of(codes): codes for codes in scales_of_codes}
    layers |= {layer_of(codes): codes for codes in tensors if codes.endswith(_PACKED[0])}
    parts = {}
    for name, (_, shape) in tensors.items():
        layer = layer_of(name)
        codes, leaf = layers.get(layer, ""), name[len(layer) :]
        is_number = bool(layers) and is_scale(name) and prod(shape) == 1
        if name not in owners and leaf not in _PACKED[1:] and not leaf.endswith("zero_point"):
            if leaf.endswith(_WHOLE) or is_number:
                parts[name] = ScalePart(codes or name, ())
        elif codes := owners.get(name, codes):
            parts[name] = ScalePart(
                codes, _blocks_of(tensors[codes][1], shape, by_codes.get(codes))
            )
    return parts


def _refuse_methods_without_parts(
    path: str, entry: dict[str, Any] | None, tensors: dict[str, Stored]
) -> None:
    """Raise CompatibilityError if the method cannot be cut into parts."""
    method = str((entry or {}).get("quant_method"))
    is_ordered = method == "gptq" and (entry or {}).get("desc_act") is True
    if is_ordered or method == "exl2" or any(name.endswith(".q_scale_max") for name in tensors):
        text = "gptq with desc_act" if is_ordered else "exl2"
        raise CompatibilityError(
            f"{path}: weights of the method {text} have no parts: their columns are stored in "
            "another order; load them whole, without rank= and layout=",
            path=path,
        )
