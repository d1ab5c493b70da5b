"""`save_prompt_cache` and `load_prompt_cache` of mlx-lm: atomic write, checksums, versions."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..._common.arguments import check_flags
from ..._common.set_module import set_module
from ..._safetensors import load_file, load_metadata, save_file
from ...errors import ChecksumError
from ._live_layers import (
    check_cache,
    installed_generation,
    new_layer,
    read_layer,
    refuse_unstored,
)
from ._prompt_file import PromptFile, flatten_prompt, parse_prompt

if TYPE_CHECKING:
    from collections.abc import Mapping

_Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]


@set_module("mlstate.integrations.mlx")
def save_prompt_cache(
    path: _Path,
    cache: list[Any],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool | None = None,
) -> None:
    """Write a prompt cache of mlx-lm to a file, atomically and with checksums.

    The parameters are in the order of ``mlx_lm.models.cache.save_prompt_cache``.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        File to write, with the name as it is.
    cache : list of layers
        As ``make_prompt_cache`` returns it. It is not changed.
    metadata : mapping of str to str, optional
        Texts to store, such as the name of the model.
    overwrite : bool, optional
        As for `save_file`. A cache whose arrays have grown has other shapes: its file is replaced
        only by ``overwrite=True``.

    Raises
    ------
    CompatibilityError
        A layer is of an unknown class, has other attributes than in mlx-lm 0.31 and 0.32, is
        between ``prepare`` and ``finalize``, has a window with a slot that is not written yet (see
        `unwritten` of `mlstate.kv.CacheEntry`), or has values that the installed mlx-lm 0.31 does
        not store. The file is unchanged. A ValueError.
    TypeError
        `cache` is not a list, or `metadata` has a value that is not a str.
    ValueError
        A key of `metadata` is ``"mlstate"`` or starts with ``"mlstate."``.
    StoreError
        The operating system refused, or the path exists (EEXIST). The file is unchanged.

    Notes
    -----
    The installed mlx-lm reads the file: it has the arrays and texts that mlx-lm writes. The
    checksums are in the user's metadata, under ``mlstate``, which `load_prompt_cache` leaves out.
    Arrays are written from the memory of mlx, without a copy; arrays that are lazy are computed.
    The call returns when the file is on disk.

    Examples
    --------
    >>> import mlx.core as mx, pathlib, tempfile
    >>> from mlx_lm.models.cache import KVCache
    >>> from mlstate.integrations.mlx import load_prompt_cache, save_prompt_cache
    >>> layer = KVCache()
    >>> _ = layer.update_and_fetch(mx.ones((1, 2, 10, 64)), mx.ones((1, 2, 10, 64)))
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "prompt.safetensors"
    >>> save_prompt_cache(path, [layer], {"model": "tiny"})
    >>> cache, metadata = load_prompt_cache(path, return_metadata=True)
    >>> cache[0].offset, metadata
    (10, {'model': 'tiny'})
    """
    check_cache(cache, "cache")
    layers = [read_layer(layer, str(i)) for i, layer in enumerate(cache)]
    refuse_unstored(layers)
    texts = {} if metadata is None else metadata
    arrays, entries = flatten_prompt(layers, texts, installed_generation())
    save_file(arrays, path, entries, overwrite=overwrite)


@set_module("mlstate.integrations.mlx")
def load_prompt_cache(path: _Path, return_metadata: bool = False, *, verify: bool = True) -> Any:
    """Read a prompt cache of mlx-lm from a file, also one of another generation of mlx-lm.

    The parameters are in the order of ``mlx_lm.models.cache.load_prompt_cache``.

    Parameters
    ----------
    path : str, bytes or os.PathLike
        A file of `save_prompt_cache`, of mlx-lm 0.32 and later, or of mlx-lm 0.31 and earlier,
        which mlx-lm 0.32 cannot read.
    return_metadata : bool, default False
        Return the user's metadata too.
    verify : bool, default True
        Verify the checksums, if the file has them. They are stale if mlx-lm saved the file with
        metadata that it read from a file of `save_prompt_cache`.

    Returns
    -------
    list of layers, or tuple of list and dict
        New layers of mlx-lm, with the values that they were saved with. The keys of metadata are as
        they were passed: a key with a dot does not become a nested dict as in mlx-lm.

    Raises
    ------
    FormatError
        The file is not a prompt cache, is damaged, or has a layer of an unknown class. ``name`` is
        the tensor or the layer. A ValueError.
    ChecksumError
        The bytes changed since they were written. A `FormatError`.
    StoreError
        The operating system refused. An `OSError`.

    Notes
    -----
    The arrays are read and verified, and then copied into memory of mlx.
    """
    check_flags(return_metadata=return_metadata, verify=verify)
    prompt = read_prompt(path, verify=verify)
    cache = [new_layer(layer, str(i)) for i, layer in enumerate(prompt.layers)]
    return (cache, prompt.metadata) if return_metadata else cache


def read_prompt(path: _Path, *, verify: bool = True, mmap: bool = False) -> PromptFile:
    """Return the content of the file at `path`, with arrays of NumPy.

    `verify`: compare checksums. `mmap`: map the arrays instead of reading them, and compare only
    the header.
    """
    try:
        arrays = load_file(path, mmap=mmap, verify=verify and not mmap)
        texts = load_metadata(path, verify=verify)
    except ChecksumError as error:
        if error.name is None:  # of the header; damaged arrays are no work of mlx-lm
            text = (
                f"{error}. If mlx-lm saved it with the metadata of such a file, pass verify=False"
            )
            error.args = (text, *error.args[1:])
        raise
    return parse_prompt(arrays, texts, os.fsdecode(path))
