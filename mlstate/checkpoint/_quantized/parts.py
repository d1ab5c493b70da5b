"""Quantized weights of a source: pairs of each section; scales that belong to a part of codes."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.scales import CODE_FLOATS, codes_of, is_scale, layer_of, refuse_codes
from ..._common.text import count_text, shorten
from ...errors import CompatibilityError, FormatError
from .._folder.names import SECTIONS
from .pairs import find_pairs

if TYPE_CHECKING:
    from ..._common.scales import Stored
    from ..._types import NDArray
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
    shape: tuple[int, ...]  # of the codes
    blocks: tuple[int, ...]  # indices of the codes that share a scale, by axis; (): unknown

    def take(self, scales: NDArray, box: Box) -> NDArray:
        """Return the scales of all blocks that a box of the codes touches."""
        index = []
        for axis, count in enumerate(scales.shape[: len(self.blocks)]):
            begin, length, block = box.starts[axis], box.lengths[axis], self.blocks[axis]
            is_one = count == 1 or block == 0
            index.append(
                slice(None) if is_one else slice(begin // block, -(-(begin + length) // block))
            )
        return scales[tuple(index)]


def _blocks_of(shape: tuple[int, ...], scales: tuple[int, ...], pair: Pair | None) -> Any:
    """Return the indices of codes of `shape` that share one of `scales`, by axis; 0: unknown."""
    blocks = [n // m if m and not n % m else 0 for n, m in zip(shape, scales, strict=False)]
    if pair is not None and pair.problem is None and len(shape) == len(scales) >= 2:
        blocks[-2:] = [pair.block[0], max(pair.block[1] // pair.unit, 1)]
    return tuple(blocks)


def scale_parts(loader: Loader, section: Section) -> dict[str, ScalePart]:
    """Return how the scales of a section follow parts of their codes, by stored name.

    Raises CompatibilityError if the method has no parts: EXL2, and GPTQ in the order of
    activations.
    """
    tensors = _tensors_of(loader, section)
    entry = known_entry(loader.source) if section.number == 0 else None
    _refuse_methods_without_parts(loader.folder, entry, tensors)
    pairs: Pairs | None = None
    with suppress(CompatibilityError):
        pairs = find_pairs(loader.folder, entry, tensors)
    by_codes = {} if pairs is None else pairs.by_codes
    parts = {}
    for codes, scales in codes_of(tensors).items():
        shape = tensors[codes][1]
        for name in scales.names:
            blocks = _blocks_of(shape, tensors[name][1], by_codes.get(codes))
            parts[name] = ScalePart(codes, shape, blocks)
    layers = {layer_of(codes): codes for codes in tensors if codes.endswith(_PACKED[0])}
    for name, (_, shape) in tensors.items():
        layer = layer_of(name)
        leaf = name[len(layer) :]
        codes = layers.get(layer, "")
        if codes and leaf in _PACKED[1:]:
            code_shape = tensors[codes][1]
            parts[name] = ScalePart(codes, code_shape, _blocks_of(code_shape, shape, None))
        elif leaf.endswith(_WHOLE):
            parts[name] = ScalePart(codes or name, (), ())
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
