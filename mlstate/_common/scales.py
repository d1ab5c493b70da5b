"""Which tensors are codes and which scales belong to them: quantized weights, by names and dtypes.

A code is a float of 8 or 4 bits, also packed in bytes, that a scale multiplies. Its number is not
its value, so a code is converted to a wider float together with its scales, or not at all. This is
the only place that identifies codes. Spellings of the scale of a weight ``l.weight``:

==============================  ================================================================
``l.weight_scale_inv``          DeepSeek-V3, transformers
``l.weight_scale``              compressed-tensors, AutoFP8, FBGEMM, ModelOpt, diffusers
``l.scale``                     DeepSeek-V4
``l.scale_weight``              ComfyUI
``l.qscale_weight``             Mistral
``l_scales`` of ``l_blocks``    MXFP4 of transformers
==============================  ================================================================
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CompatibilityError
from .converted import SMALL_FLOATS
from .dtypes import FLOAT8S, name_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from typing import TypeAlias

    Stored: TypeAlias = tuple[str, tuple[int, ...]]  # dtype and shape of a tensor

EXPONENTS = "float8_e8m0fnu"  # a dtype of scales, not of codes
FOUR_BITS = "float4_e2m1fn_x2"
CODE_FLOATS = (FLOAT8S | SMALL_FLOATS) - {EXPONENTS}
CODE_BYTES = frozenset({"int8", "uint8", FOUR_BITS})  # codes only if they have a scale
ENDINGS = ("_packed", "_blocks")  # of codes: their values have the name without it
SUFFIXES = ("_scale_inv", "_scale")  # of a weight's name
_LEAVES = ("scale", "scale_weight", "qscale_weight")  # of the layer of a weight
SECOND = ("_scale_2", "_global_scale")  # suffixes of a scale of the scales
# Scales of a layer's activations: values do not depend on them.
OF_ACTIVATIONS = frozenset(
    {"input_scale", "activation_scale", "activation_scale_inv", "scale_input", "qscale_act",
     "input_global_scale"}
)  # fmt: skip
MARK = "scaled_fp8"  # of a whole file of ComfyUI, without values
_OF_CACHES = frozenset({"k_scale", "v_scale", "q_scale", "output_scale"})
_OF_LAYER = re.compile(r"_*(q?scales?(_|\Z)|(weight|input|activation)_\w*scale)", re.ASCII)
_SHOWN = 4  # names in an error


class Scales(NamedTuple):
    """The neighbours of a code that are named as scales."""

    value: str  # name of the values
    weight: tuple[str, ...]  # scales of the codes; a weight has one
    second: str  # scale of the scales, or ""
    others: tuple[str, ...]  # of unknown meaning: the values cannot be computed

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.weight, *((self.second,) if self.second else ()), *self.others)

    def __bool__(self) -> bool:
        return bool(self.names)


def value_name(key: str) -> str:
    """Return the name of the values of the codes `key`."""
    ending = next((each for each in ENDINGS if key.endswith(each)), "")
    return key[: len(key) - len(ending)]


def is_scale(key: str) -> bool:
    """Return whether a tensor is named as a scale, so that it is not a code."""
    return "scale" in key.rpartition(".")[2]


def layer_of(key: str) -> str:
    """Return the start of the names in the layer of a tensor: all up to its last dot."""
    return key[: key.rfind(".") + 1]


def find_scales(tensors: Mapping[str, Stored]) -> dict[str, Scales]:
    """Return the codes among `tensors`, in their order, each with its neighbours named as scales.

    All floats of 8 bits are listed, with or without scales, except `EXPONENTS`. The time is linear.
    """
    values = {value_name(key) for key in tensors if not is_scale(key)}
    owned: dict[str, list[str]] = {}  # by the name of the values
    shared: dict[str, list[str]] = {}  # by layer
    for key in tensors:
        if is_scale(key) and not key.endswith(MARK):
            layer = layer_of(key)
            ends = [i for i in range(len(key) - 1, len(layer), -1) if key[i] in "_."]
            owner = next((key[:end] for end in ends if key[:end] in values), layer[:-1])
            groups, name = (owned, owner) if owner in values else (shared, layer)
            groups.setdefault(name, []).append(key)
    codes = {}
    for key, (dtype, _) in tensors.items():
        is_packed = dtype in CODE_BYTES or (dtype == "int32" and key.endswith("_packed"))
        if not is_scale(key) and (dtype in CODE_FLOATS or is_packed):
            named, near = owned.get(value_name(key), ()), shared.get(layer_of(key), ())
            scales = _scales_of(key, named, near)
            if dtype in CODE_FLOATS or scales.weight:
                codes[key] = scales
    return codes


def _scales_of(key: str, named: Collection[str], near: Collection[str]) -> Scales:
    """Return the scales of the codes `key`.

    `named`: names that begin with the name of the values. `near`: others of the layer.
    """
    value, layer = value_name(key), layer_of(key)
    leaf = value[len(layer) :]
    if key.endswith("_blocks"):
        spellings = {f"{value}_scales"}
    else:
        spellings = {value + each for each in SUFFIXES}
        spellings |= {layer + each for each in _LEAVES} if leaf == "weight" else set()
    near = [n for n in near if leaf == "weight" or _OF_LAYER.match(n[len(layer) :])]
    weight, seconds, others = [], [], []
    for name in (*named, *near):
        other = name[len(layer) :]
        if name in spellings:
            weight.append(name)
        elif name in {value + each for each in SECOND}:
            seconds.append(name)
        elif other not in _OF_CACHES and other.removeprefix(f"{leaf}_") not in OF_ACTIVATIONS:
            others.append(name)
    others += seconds[1:]
    return Scales(value, tuple(weight), seconds[0] if seconds else "", tuple(others))


def listed_names(names: Iterable[str]) -> str:
    """Return the first names as text."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def codes_of(tensors: Mapping[str, Stored]) -> dict[str, Scales]:
    """Return the codes that have scales; if one has, 8-bit floats without a scale are codes too."""
    codes = find_scales(tensors)
    return codes if any(codes.values()) else {}


def facts_of(state: Mapping[str, object]) -> dict[str, Stored]:
    """Return the dtype and shape of each array of a state; a shard's are of the whole tensor."""
    facts = {}
    for name, value in state.items():
        dtype = getattr(getattr(value, "array", value), "dtype", None)
        facts[name] = (name_of(dtype).rpartition(".")[2], tuple(getattr(value, "shape", ())))
    return facts


def refuse_codes(
    tensors: Mapping[str, Stored], text: str, names: Collection[str] | None = None
) -> None:
    """Raise CompatibilityError if one of `tensors` is a code with scales, which it names.

    `text`: the refused operation, such as ``is not converted``. `names`: consider only these.
    """
    for key, scales in codes_of(tensors).items():
        if names is None or key in names:
            near = f"its scales are {listed_names(scales.names)}" if scales else "it has no scale"
            raise CompatibilityError(
                f"{key!r} is quantized ({near}), and its numbers alone are not its values, so it "
                f"{text}: load the whole folder or file with cast=, which computes the values",
                name=key,
            )
