"""``mlstate cache``: show prompt cache files of mlx-lm, and convert them between its versions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._common.atomic_file import Target
from .._common.dtypes import name_of
from .._common.local_path import local_path, refuse_same_path
from .._common.overwrite import file_at, require_free, shapes_of
from .._common.report import Table
from .._common.text import bytes_text, count_text
from .._safetensors import save_file
from ..checkpoint._files.safetensors_verify import read_header
from ..integrations.mlx._prompt_caches import read_prompt
from ..integrations.mlx._prompt_file import GENERATIONS, PromptFile, flatten_prompt
from ._common import (
    Commands,
    add_actions_of,
    add_command,
    print_result,
    shared,
    stat_path,
    value_lines,
)

if TYPE_CHECKING:
    from ..integrations.mlx._layer_values import LayerValues

__all__ = ["add"]

_COLUMNS = ["layer", "class", "tokens [n]", "numbers", "array", "shape", "dtype", "bytes [B]"]
_VERSIONS = dict(zip(GENERATIONS, ("0.31 or earlier", "0.32 or later"), strict=True))


def add(commands: Commands) -> None:
    """Add the parser of ``mlstate cache`` and its actions to `commands`; it sets ``run``."""
    help_text = "show and convert prompt cache files of mlx-lm"
    actions = add_actions_of(commands, "cache", help_text)
    text = "read a file whose checksums do not match; mlx-lm copies those of another file"
    no_verify = {"--no-verify": {"action": "store_false", "dest": "verify", "help": text}}
    usages = {"file": "a .safetensors file of mlx-lm or save_prompt_cache", **no_verify}
    add_command(actions, "show", "list the layers of a prompt cache file", run_show, usages)
    text = f"version of mlx-lm that reads it: {' or '.join(_VERSIONS.values())} (default: 0.32)"
    usages = {
        "source": "a prompt cache file of any version of mlx-lm",
        "target": "the file to write",
        "--to": {"choices": GENERATIONS, "default": GENERATIONS[-1], "help": text},
        **shared("--overwrite"),
        **no_verify,
    }
    text = "write a prompt cache file for another version of mlx-lm, with checksums"
    add_command(actions, "convert", text, run_convert, usages)


def _flat(layers: list[LayerValues], where: str = "") -> list[tuple[str, LayerValues]]:
    """Return all layers with their places: "3", and "3.1" for layer 1 in layer 3, a list of layers.

    A list comes before its layers. `where`: start of the places.
    """
    listed = []
    for i, layer in enumerate(layers):
        listed += [(f"{where}{i}", layer), *_flat(layer.children, f"{where}{i}.")]
    return listed


def _numbers_of(layer: LayerValues) -> dict[str, Any]:
    """Return a layer's counts, flags and vectors (as lists) by field; None is left out."""
    numbers = {}
    for name, kind in layer.cls.fields.items():
        value = layer.values[name]
        if value is not None and kind not in ("rows", "codes", "states"):
            numbers[name] = value.tolist() if hasattr(value, "tolist") else value
    return numbers


def _arrays_of(layer: LayerValues) -> dict[str, Any]:
    """Return the arrays of tokens of a layer."""
    numbers = _numbers_of(layer)
    return {name: array for name, array in layer.arrays().items() if name not in numbers}


def _tokens_of(prompt: PromptFile) -> int | None:
    """Return the number of tokens if all layers that count them have the same, else None."""
    counts = {layer.tokens for _, layer in _flat(prompt.layers) if not layer.is_empty} - {None}
    return counts.pop() if len(counts) == 1 else None


def _layer_data(name: str, layer: LayerValues) -> dict[str, Any]:
    """Return a layer of a cache as JSON values; `name`: its place, as `_flat` returns it."""
    arrays = {
        key: {"shape": list(array.shape), "dtype": name_of(array.dtype), "bytes": array.nbytes}
        for key, array in _arrays_of(layer).items()
    }
    return {
        "layer": name,
        "class": layer.cls.name,
        "tokens": layer.tokens,
        "numbers": _numbers_of(layer),
        "arrays": arrays,
    }


def _layer_rows(layer: dict[str, Any], is_empty: bool) -> list[list[object]]:
    """Return a row for each array of a layer, as `_layer_data` returns it, or one without an array.

    Only the first row has place, class, tokens, numbers.
    """
    numbers = ", ".join(f"{key} {value}" for key, value in layer["numbers"].items())
    tokens = "-" if layer["tokens"] is None or is_empty else layer["tokens"]
    head = [layer["layer"], layer["class"], tokens, numbers]
    rows = [
        [key, tuple(array["shape"]), array["dtype"], array["bytes"]]
        for key, array in layer["arrays"].items()
    ]
    none = [None] * 4
    return [[*(none if i else head), *row] for i, row in enumerate(rows or [none])]


def run_show(arguments: argparse.Namespace) -> int:
    """Print the version, counts and layers of a prompt cache file; return 0."""
    stat_path(arguments.file)
    prompt = read_prompt(arguments.file, verify=arguments.verify, mmap=True)
    header = read_header(str(local_path(arguments.file)), verify=arguments.verify)
    layers, tokens = _flat(prompt.layers), _tokens_of(prompt)
    listed = [_layer_data(*each) for each in layers]
    data = {
        "path": arguments.file,
        "mlx_lm": prompt.generation,
        "tokens": tokens,
        "bytes": prompt.nbytes,
        "checksums": header.has_checksums,
        "metadata": prompt.metadata,
        "layers": listed,
    }
    parts = [
        f"prompt cache of mlx-lm {_VERSIONS[prompt.generation]}",
        count_text(len(prompt.layers), "layer"),
        *([] if tokens is None else [count_text(tokens, "token")]),
        bytes_text(prompt.nbytes),
        "with checksums" if header.has_checksums else "no checksums",
        *(["not compared"] if header.has_checksums and not arguments.verify else []),
    ]
    lines = [f"{arguments.file}: {', '.join(parts)}"]
    lines += value_lines("metadata", prompt.metadata)
    rows: list[list[object]] = []
    for each, (_, layer) in zip(listed, layers, strict=True):
        rows += _layer_rows(each, layer.is_empty)
    return print_result(arguments, data, [Table(lines, _COLUMNS, rows)])


def run_convert(arguments: argparse.Namespace) -> int:
    """Write a prompt cache file for another version of mlx-lm, and print a summary; return 0.

    Raises ValueError if the target is the source, CompatibilityError for values that the version
    cannot store.
    """
    stat_path(arguments.source)
    source, target = (Path(local_path(each)) for each in (arguments.source, arguments.target))
    refuse_same_path(str(source), str(target))
    start = Target.of(target)
    rule = str(target), file_at(str(target)), arguments.overwrite, "safetensors"
    require_free(*rule)
    prompt = read_prompt(arguments.source, verify=arguments.verify)
    arrays, texts = flatten_prompt(prompt.layers, prompt.metadata, arguments.to)
    require_free(*rule, lambda: shapes_of(arrays))
    start.write_file(lambda temporary: save_file(arrays, temporary, texts))
    nbytes = sum(array.nbytes for array in arrays.values())
    data = {
        "source": str(source.absolute()),
        "source_mlx_lm": prompt.generation,
        "target": str(target.absolute()),
        "target_mlx_lm": arguments.to,
        "layers": len(prompt.layers),
        "bytes": nbytes,
    }
    size = f"{count_text(len(prompt.layers), 'layer')}, {bytes_text(nbytes)}"
    text = f"{arguments.target}: {size}, for mlx-lm {_VERSIONS[arguments.to]}"
    return print_result(arguments, data, [text])
