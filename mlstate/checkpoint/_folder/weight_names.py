"""Weight files of a Hugging Face folder by name: variants, numbered sets, which one is chosen.

The root of such a folder is the name that describes its weights: of the only file, of the index
that lists the files, or, for numbered files without an index, a pattern such as
``model-*-of-00003.safetensors``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from ..._common.store_error import format_error
from ...errors import FormatError, StoreError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from .protocol import Files

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
TORCH_SUFFIX = ".bin"
# Stems of transformers, PEFT, diffusers and Mistral. The first one in a folder is its weights.
_STEMS = {
    SUFFIX: (
        "model",
        "adapter_model",
        "diffusion_pytorch_model",
        "pytorch_lora_weights",
        "consolidated",
    ),
    TORCH_SUFFIX: (
        "pytorch_model",
        "adapter_model",
        "diffusion_pytorch_model",
        "pytorch_lora_weights",
    ),
}
_INDEX = re.compile(r"(.+?)(\.safetensors|\.bin)\.index(\.[^.]+)?\.json\Z")
_NUMBERED = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})(\.[^.]+)?(\.safetensors|\.bin)\Z", re.ASCII)
_COUNTED = re.compile(r"(.+)\.(\d+)(\.safetensors|\.bin)\Z", re.ASCII)
_ANY = "*"
ONE_FILE = ("adapter_model", "pytorch_lora_weights")  # PEFT and diffusers read no parts of these
_MOST_FILES = 100_000  # of a set


class _ParsedName(NamedTuple):
    """A name of a weight file, in parts: the stem, the variant, such as ``fp16``, and the root."""

    stem: str
    variant: str
    order: int  # a single file is preferred to an index, and this to numbered files
    root: str


def is_index(name: str) -> bool:
    """Return whether a name is an index, such as ``model.safetensors.index.json``."""
    return _INDEX.match(name) is not None


def index_of(stem: str) -> str:
    """Return the name of the index of the safetensors files with this stem, such as ``model``."""
    return f"{stem}{SUFFIX}.index.json"


def stem_of(names: Collection[str]) -> str:
    """Return the start of the names of weight files, such as ``model``, that suits a folder.

    `names`: all its files. It is the start of the names of its weights, which its program looks
    for: ``adapter_model`` for PEFT, ``diffusion_pytorch_model`` for diffusers; ``model``
    without weights, and in place of ``pytorch_model``, the stem of torch's files.
    """
    for suffix, stems in _STEMS.items():
        parsed = (_parse_name(name, suffix) for name in names)
        present = {each.stem for each in parsed if each is not None}
        for stem in stems:
            if stem in present:
                return "model" if stem == "pytorch_model" else stem
    return "model"


def is_weights_root(root: str) -> bool:
    """Return whether a root is a file of another program, not a manifest of mlstate."""
    return root.endswith(SUFFIX) or is_index(root)


def is_set(root: str) -> bool:
    """Return whether a root is the pattern of numbered files without an index."""
    return _ANY in root


def set_of(name: str) -> str | None:
    """Return the root of the set that a numbered file belongs to; None for other names.

    For ``model-00001-of-00003.safetensors`` this is ``model-*-of-00003.safetensors``.
    """
    if match := _NUMBERED.match(name):
        stem, _, count, variant, suffix = match.groups()
        return f"{stem}-{_ANY}-of-{count}{variant or ''}{suffix}"
    return None


def _parse_name(name: str, suffix: str) -> _ParsedName | None:
    """Return stem, variant and root of a weight file's name; None if it is not one of weights.

    `suffix`: of the format to look for, ".safetensors" or ".bin"; names of other formats return
    None.
    """
    index = _INDEX.match(name)
    pattern = set_of(name)
    counted = _COUNTED.match(name)
    # `start` is the stem, which a variant may follow, as in "model.fp16.safetensors"
    if index is not None:
        start, own_suffix, variant, order, root = index[1], index[2], index[3] or "", 1, name
    elif (match := _NUMBERED.match(name)) and pattern:
        start, own_suffix, variant, order, root = match[1], match[5], match[4] or "", 2, pattern
    elif counted is not None:
        start, own_suffix, variant, order = counted[1], counted[3], "", 2
        root = f"{start}.{_ANY}{own_suffix}"
    else:
        start, dot, extension = name.rpartition(".")
        own_suffix, variant, order, root = dot + extension, "", 0, name
    stem, dot, inner = start.partition(".")
    if own_suffix != suffix or stem not in _STEMS[suffix]:
        return None
    return _ParsedName(stem, dot + inner + variant, order, root)


def weights_root(names: Iterable[str], suffix: str = SUFFIX, *, folder: str = "") -> str | None:
    """Return the name that describes the weights of a folder with the files `names`.

    It is a file, an index, or a pattern of numbered files; None without weights. `suffix`: of the
    format to look for. Of several stems, the first in `_STEMS` is chosen. Files with a variant in
    their name, such as ``model.fp16.safetensors``, are the weights if the folder has no others.
    Raises FormatError, which names `folder`, if it has several variants, or several sets.
    """
    parsed = [each for name in names if (each := _parse_name(name, suffix)) is not None]
    for stem in _STEMS[suffix]:
        of_stem = {each for each in parsed if each.stem == stem}
        variants = {each.variant for each in of_stem}
        if not variants:
            continue
        if "" not in variants and len(variants) > 1:
            roots = sorted(each.root for each in of_stem)
            text = f"{folder}: the folder holds several variants: {', '.join(roots)}: {_REMEDY}"
            raise format_error(text, folder)
        # The smallest is "", no variant, if there are such files.
        variant = min(variants)
        chosen = [each for each in of_stem if each.variant == variant]
        preferred_order = min(each.order for each in chosen)
        roots = sorted(each.root for each in chosen if each.order == preferred_order)
        if len(roots) > 1:
            text = f"{folder}: the folder holds several models: {', '.join(roots)}: {_REMEDY}"
            raise format_error(text, folder)
        return roots[0]
    return None


def find_weights(folder: Files) -> str | None:
    """Return the root of the weights in a folder, as `weights_root`; None without weights."""
    try:
        names = folder.names("")
    except StoreError:
        if folder.is_local:  # reading the manifest reports the reason
            return None
        raise
    return weights_root(names, folder=folder.path)


_REMEDY = "pass the path of one file or index, or move the others away"


def set_files(names: Collection[str], root: str) -> tuple[list[str], list[str]]:
    """Return the numbered files among `names` that `root` describes, and the missing ones.

    `root`: a pattern with one ``*`` for the number. If no file matches, the pattern itself is the
    missing one. Raises FormatError if a number appears twice, or is not one of the set.
    """
    before, _, after = root.partition(_ANY)
    pattern = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}\Z", re.ASCII)
    numbers: dict[int, str] = {}
    for name in sorted(names):
        match = pattern.match(name)
        if match is None:
            continue
        if int(match[1]) in numbers:
            raise FormatError(f"{numbers[int(match[1])]} and {name} have the same number")
        numbers[int(match[1])] = name
    if not numbers:
        return [], [root]
    # The `*` of the root is one character, so a number has `len(name) - len(root) + 1` digits.
    width = min(len(name) - len(root) + 1 for name in numbers.values())
    counted = re.match(r"-of-(\d+)", after)
    # Sets whose names contain their size count from 1; Mistral's (`consolidated.00`) from 0.
    first = 1 if counted else 0
    last = int(counted[1]) if counted else max(numbers)
    if max(numbers) > last or min(numbers) < first or last > _MOST_FILES:
        raise FormatError(f"{root}: the files are numbered {min(numbers)} to {max(numbers)}")
    missing = [
        f"{before}{number:0{width}d}{after}"
        for number in range(first, last + 1)
        if number not in numbers
    ]
    return list(numbers.values()), missing
