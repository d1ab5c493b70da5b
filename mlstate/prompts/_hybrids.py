"""States of mlx-lm and transformers converted (Mamba, delta rule) or told apart; RoPE warning.

========== =============================== ===============================
state      transformers                    mlx-lm
========== =============================== ===============================
conv       (batch, channels, kernel)       (batch, kernel - 1, channels)
delta rule (batch, heads, keys, values)    (batch, heads, values, keys)
Mamba 2    (batch, heads, head, state)     the same
========== =============================== ===============================

The oldest input of a convolution in transformers is never read again; mlx-lm does not have it.

Keys and values of different lengths, as of latent attention (MLA), are not the same numbers in both
engines: DeepSeek-V3 orders the rotated part in two ways. Values of mlx-lm have a name of their own
then, so that neither engine takes those of the other.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .._common.local_path import local_folder
from .._common.log import log
from ..kv._arguments import incompatible
from ..kv._cache_spec import CacheEntry, CacheSpec
from ..kv._cache_state import CacheState
from ._fingerprint import config_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MLX_VALUES = "mlx_values"  # name and role of values of mlx-lm whose keys have another length
_CONV, _DELTA, _MAMBA = "conv_states", "delta", "recurrent_states"
# The kinds of the states of a layer in mlx-lm, in the order of its slots, by the model type of
# config.json: the types that tests compare.
_SLOTS = {
    "granitemoehybrid": (_CONV, _MAMBA),
    "lfm2": (_CONV,),
    "mamba2": (_CONV, _MAMBA),
    "qwen3_5": (_CONV, _DELTA),
    "qwen3_5_text": (_CONV, _DELTA),
    "qwen3_next": (_CONV, _DELTA),
}


def config_facts(model: Any) -> dict[str, Any]:
    """Return the config of a model of Hugging Face; {} if it has none.

    `model`: the path of its folder, or the module. A str is a name, so it has none.
    """
    if isinstance(model, os.PathLike):
        path = os.path.join(local_folder(model), "config.json")
        config = config_of(path) if os.path.isfile(path) else None
    else:
        convert = getattr(getattr(model, "config", None), "to_dict", None)
        config = None if convert is None else convert()
    return config if isinstance(config, dict) else {}


def model_type_of(config: dict[str, Any], chosen: str | None) -> str | None:
    """Return the model type that the user has `chosen`, or the one of a config; None without both.

    Raises ValueError if both are known, and have states in other layouts.
    """
    kind = config.get("model_type")
    kind = kind if isinstance(kind, str) else None
    if chosen in _SLOTS and kind in _SLOTS and _SLOTS[chosen] != _SLOTS[kind]:
        raise ValueError(f"model_type is {chosen!r}, and the config of the model has {kind!r}")
    return kind if chosen is None else chosen


def warn_of_rope(config: dict[str, Any], path: str) -> None:
    """Log a warning if the keys of a model depend on the length of the prompt, or on the engine.

    Such keys cannot be shared by a longer prompt, or by engines. `config`: of the model. `path`: of
    the store.
    """
    parts = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    parts += [each for part in parts if isinstance(part, dict) for each in part.values()]
    for part in (part for part in parts if isinstance(part, dict)):
        kind = part.get("rope_type", part.get("type"))
        if kind in ("dynamic", "longrope"):
            text = "%s: keys with %s RoPE depend on the length of the prompt: pass another salt= "
            log("WARNING", text + "for prompts beyond the original length", path, kind)
            return
        if kind == "yarn" and part.get("truncate") is False:
            text = "%s: keys with %s RoPE depend on the engine, as mlx-lm rounds its frequencies: "
            log("WARNING", text + "pass another salt= for each engine", path, kind)
            return


def check_states(entries: Iterable[CacheEntry], *, is_mlx: bool, model_type: str | None) -> None:
    """Raise CompatibilityError if entries have a state of another engine in an unknown layout.

    `entries`: the stored ones. `is_mlx`: whether mlx-lm is to take them, else transformers.
    `model_type`: of config.json; the layouts of the types in `_SLOTS` are known.
    """
    foreign = ("conv_states", "recurrent_states") if is_mlx else ("states",)
    entries = list(entries)
    for entry in _uneven_values(entries, "values" if is_mlx else _MLX_VALUES):
        text = (
            f"{entry.name}: another engine, or an earlier version, stored this entry, whose keys "
            "have another length: give each engine a model= of its own, or prefill the prompt again"
        )
        raise incompatible(text, entry.name, "an entry of this engine", entry.role)
    for entry in entries:
        is_known = model_type in _SLOTS
        if entry.role not in foreign or (is_mlx and is_known):
            continue
        if is_known:
            text = f"mlx-lm stored this state without model_type={model_type!r}: pass another "
            text += "model=, or prefill the prompt again in a new store"
        else:
            text = "another engine stored this state, and its layout in this one is known for the "
            text += f"model types {', '.join(_SLOTS)} only, not {model_type!r}: pass model_type=, "
            text += "also to the store of the other engine, or another model="
        text = f"{entry.name}: {text}"
        raise incompatible(text, entry.name, ", ".join(_SLOTS), model_type)


def from_mlx(state: CacheState, model_type: str | None) -> CacheState:
    """Return a cache of mlx-lm with its states in the names and layouts of transformers.

    States of a model type that is not in `_SLOTS` are unchanged.
    """
    state = _renamed_values(state, "values", _MLX_VALUES)
    slots = _SLOTS.get(model_type or "", ())
    return _convert_entries(
        state,
        [(f"states.{i}", _transformers_name(s), _TO_TRANSFORMERS[s]) for i, s in enumerate(slots)],
    )


def to_mlx(state: CacheState, model_type: str | None) -> CacheState:
    """Undo `from_mlx`: return a state with the names and layouts of mlx-lm."""
    state = _renamed_values(state, _MLX_VALUES, "values")
    slots = _SLOTS.get(model_type or "", ())
    return _convert_entries(
        state, [(_transformers_name(s), f"states.{i}", _TO_MLX[s]) for i, s in enumerate(slots)]
    )


def _uneven_values(entries: Iterable[CacheEntry], role: str) -> list[CacheEntry]:
    """Return the values, with this role, whose keys have another length of a head."""
    by_name = {entry.name: entry for entry in entries}
    pairs = [(e, by_name.get(f"{e.name.rpartition('.')[0]}.keys")) for e in by_name.values()]
    return [e for e, keys in pairs if keys and e.role == role and e.shape[-1] != keys.shape[-1]]


def _renamed_values(state: CacheState, old: str, new: str) -> CacheState:
    """Return a state whose uneven values have another role and name; itself if it has none."""
    uneven = {entry.name: entry for entry in _uneven_values(state.spec, old)}
    if not uneven:
        return state
    entries, arrays = [], dict(state.arrays)
    for entry in state.spec:
        named = entry
        if entry.name in uneven:
            named = replace(entry, name=f"{entry.name.rpartition('.')[0]}.{new}", role=new)
            for before, after in zip(entry.arrays, named.arrays, strict=True):
                arrays[after] = arrays.pop(before)
        entries.append(named)
    return CacheState(CacheSpec(entries), arrays, state.length)


def _transformers_name(slot: str) -> str:
    """Return the name in transformers of a state of the kind `slot`, without the layer's name."""
    return f"{_CONV if slot == _CONV else _MAMBA}.0"


def _with_oldest(inputs: Any) -> Any:
    """Return the inputs of a convolution in the layout of transformers, with zeros as the oldest.

    `inputs`: in the layout of mlx-lm, which lacks the oldest one.
    """
    result = np.zeros((inputs.shape[0], inputs.shape[2], inputs.shape[1] + 1), inputs.dtype)
    result[..., 1:] = inputs.swapaxes(1, 2)
    return result


def _swap_last_axes(array: Any) -> Any:
    return array.swapaxes(-1, -2)


def _unchanged(array: Any) -> Any:
    return array


# Functions that convert the array of a state between the layouts, by the kinds in `_SLOTS`.
_TO_TRANSFORMERS = {_CONV: _with_oldest, _DELTA: _swap_last_axes, _MAMBA: _unchanged}
_TO_MLX = {
    _CONV: lambda array: _swap_last_axes(array[..., 1:]),
    _DELTA: _swap_last_axes,
    _MAMBA: _unchanged,
}


def _convert_entries(
    state: CacheState, changes: list[tuple[str, str, Callable[[Any], Any]]]
) -> CacheState:
    """Return a state with other names, kinds and arrays of some entries.

    `changes`: former name after the layer's name, new name, and function that converts the array.
    `state` itself is returned if no entry has one of the names.
    """
    names = {old: (new, convert) for old, new, convert in changes}
    entries, arrays, is_same = [], dict(state.arrays), True
    for entry in state.spec:
        layer, _, part = entry.name.partition(".")
        if part in names and entry.seq_axis is None:
            new, convert = names[part]
            array = convert(arrays.pop(entry.name))
            role = new.partition(".")[0]
            kind: Any = "conv" if role == _CONV else "recurrent"
            name = f"{layer}.{new}"
            entry = replace(entry, name=name, kind=kind, shape=array.shape, role=role)
            arrays[name], is_same = array, False
        entries.append(entry)
    return state if is_same else CacheState(CacheSpec(entries), arrays, state.length)
