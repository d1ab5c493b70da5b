"""`save`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._common.set_module import set_module
from .._options import SAVE_DEFAULTS, SaveOptions, complete_save_options, show_options
from .._save.save_root import save_root
from .checkpoint import Checkpoint

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from typing import Unpack


@set_module("mlstate.checkpoint")
@show_options(SAVE_DEFAULTS)
def save(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    *,
    step: int | None = None,
    overwrite: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[SaveOptions],
) -> Checkpoint:
    """
    Save the state of a model, of its optimizer, and any other states.

    When `save` returns, the new checkpoint is on disk. Until then the old checkpoint in the
    folder stays complete, even if the save fails or the process is killed.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of the checkpoint, or a URL in an object store such as ``"s3://bucket/run"``;
        created if it does not exist. In a folder, unchanged shards of the checkpoint that is
        replaced are not written again.
    model : mapping of str to array or Shard, or torch.nn.Module, optional
        A `ModelStateDict`, a plain dict, a module (its ``state_dict()``), or an object with
        ``get_state_dict()``. Arrays are NumPy arrays (dtypes of ml_dtypes included) or torch
        tensors. They are not copied, except tensors on a device: all of these are first copied
        to main memory. A module may be wrapped by DDP, compiled, or sharded by FSDP2, FSDP1 or
        tensor parallelism: names have no wrapper prefixes, and each rank stores its shards.
        Entries of a module that are not tensors (extra states) are stored as in `states`.
    optimizer : mapping of str to array or Shard, or torch.optim.Optimizer, optional
        An `OptimizerStateDict`, a dict with keys ``"<parameter>.<state name>"``, or a torch
        optimizer. The names of its parameters come from the module given as `model`. An optimizer
        with values that tensors by parameter cannot hold becomes the named state ``"optimizer"``,
        in which `load` finds it.
    states : mapping of str to object, optional
        Further states by name: models, optimizers and mappings of arrays, stored like `model` and
        `optimizer`; random generators (``random.Random``, NumPy's and torch's, or the modules
        ``random``, ``numpy.random``, ``torch.random``, ``torch.cuda`` for their shared ones);
        caches of `mlstate.kv`; objects with ``state_dict()``; and None, numbers, str, bytes,
        arrays, and lists, tuples, sets and dicts of all these. Nothing is pickled. With a group,
        each rank stores its own values of a state that differs between ranks; models, optimizers
        and mappings of arrays are shared, as for `model`.
    metadata : mapping, optional
        JSON values: str, finite numbers, lists, dicts with str keys, at most 100 levels deep. With
        a group, rank 0's values are stored.
    step : int, optional
        Training step. Default: the step of an `OptimizerStateDict`. Ranks must not pass different
        steps; one that a rank passes counts for all.
    group : ProcessGroup, optional
        The ranks that save together; see `mlstate.collectives`. All of them call `save`, and
        each writes its own shards. An array that is not a `Shard` is treated as replicated:
        every rank holds all of it, and the writes are divided round-robin. Default: this
        process saves alone.
    layout : Layout or str, optional
        Layout for arrays that are not a `Shard`. Default: they are stored whole.
    pack_below_bytes : int or str, default 262144
        Shards of fewer bytes share files. If 0, every shard has its own file.
    sparse : bool, default False
        Omit rows whose bytes are all zero, and tensors that consist of such rows, for example
        optimizer states of parameters that were not trained. This takes one pass over the
        memory.
    incremental : bool, default False
        If at most half of the rows of a shard changed since the last save in this folder, write
        only these rows. The old shard is read to find them.
    compress : {"zlib", "zstd"}, optional
        Compress tensors that shrink by a quarter or more, judged by samples of each tensor.
        Rounded numbers, counts and masks usually do; trained float32 weights mostly do not.
        ``zlib`` is always available; ``zstd`` is faster in both directions and needs
        ``mlstate[zstd]`` to save and to load.
    digest : bool, default False
        Record the digest of each tensor (see `mlstate.digest`), which does not depend on `layout`
        or the number of ranks. `mlstate.digest` of the checkpoint then reads no tensor, and
        `reshard` and ``mlstate convert`` compare their copies with it. This takes one pass over
        the memory. A save without it keeps none.
    exclude : str or iterable of str, optional
        Patterns of optimizer states, such as ``"*.projector"``, of values of its groups, such as
        ``"param_groups.*.helper"``, and of paths in nested states, such as ``"warm_up.after"``,
        that are not stored. A load keeps the target's own values there. A
        pattern that matches nothing on any rank raises ValueError on all.
    progress : callable, optional
        Called repeatedly with the number of bytes processed since the last call. An exception
        from it stops the save. With a URL, these bytes are in temporary files; it is called with 0
        during their upload.
    lock_timeout : float, default 0
        Seconds to wait for another process that is writing this checkpoint. Stores have no
        locks: with a URL, the writer that commits second raises.
    overwrite : bool, optional
        Default: a checkpoint with the same tensor names and shapes is replaced, and so is the
        earlier one if both have a `step`. True: replace any checkpoint, the steps of a
        `CheckpointManager` included. False: replace nothing. See docs/files.md.
    storage_options : mapping, optional
        Options of the object store for a URL: credentials, region, endpoint, and those that
        the page on object stores lists.

    Returns
    -------
    Checkpoint
        The new checkpoint; its ``written`` describes what this call wrote.

    Raises
    ------
    ImportError
        The package that `compress` or a URL needs is not installed.
    TypeError, ValueError
        An argument is wrong, ranks save different states, the ranks together lack a part of a
        tensor, or a shard's version decreases. The old checkpoint is unchanged.
    CompatibilityError
        The file format has no name for a dtype, or a layout cannot cut a shape. A tensor is
        not plain memory (sparse, quantized, conjugated, of a subclass), or an entry of a module
        has a type that cannot be restored: an `UnstorableError`, also a `TypeError`.
    TypeError, ValueError
        A sharded module is saved without the `group` of its ranks, an optimizer's parameters
        do not belong to the module, or no `Layout` describes the placement of a DTensor. The
        message names it.
    BufferError
        A tensor has no memory to export, such as one on torch's ``meta`` device (also an
        `UnstorableError`).
    StoreError
        The operating system refused: an `OSError` with its ``errno``. EBUSY: another process is
        writing this checkpoint. EEXIST: `path` exists, and `overwrite` does not replace it.
    CollectiveError
        Another rank failed; the message names the rank and the reason.

    Notes
    -----
    `mlstate.checkpoint.save_async` and `CheckpointManager` take the same arguments.

    Every file is written under a temporary name. ``manifest.json`` is replaced only when all
    files are on disk. If the process is killed, the next save deletes the files that it left.
    Arrays must not change during the save. The GIL is released. Extra memory: about 400 bytes
    per shard, and 2 MiB for each thread.

    A shard with a version (see `Shard`) is unchanged if its version is unchanged. Other shards
    are compared with their bytes on disk.

    With `sparse` or `incremental`, every function of mlstate returns the same arrays as without.
    A row is the part at one index of the first axis, but at least 256 bytes and at most 64 KiB.
    A shard of less than `pack_below_bytes` is written whole, or omitted if it is all zero. A
    shard that is more than 3/4 nonzero is written whole. A shard has at most 8 layers, which
    together hold at most twice its bytes; beyond that it is written again as a whole. Extra
    memory: one bit for each row.

    With `compress`, shards of less than `pack_below_bytes` or less than 16 KiB are not
    compressed. Each thread compresses one shard at a time. Extra memory: the compressed shard,
    which is kept only if it has at most 3/4 of the shard's bytes.

    On a network file system only one host may write: locks between hosts are not reliable.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> state = {"a": np.zeros(3), "b": np.ones(3)}
    >>> mlstate.save(path, state).written["new_shards"]
    2
    >>> state["a"][0] = 5
    >>> [t.version for t in mlstate.save(path, state).tensors()]
    [2, 1]
    """
    options = complete_save_options(save, options)
    return Checkpoint(save_root(path, model, optimizer, step, options, storage_options, overwrite))
