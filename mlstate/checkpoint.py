"""State in files.

`save` writes the state of a model and its optimizer to a folder: one checked, versioned file
for each shard of each tensor, small ones together, committed in one step. `load` reads all of
it or any part, into any layout; `verify` finds every byte that changed. `CheckpointManager`
keeps the steps of a run. `save_file` and `load_file` are for one plain safetensors file.

Examples
--------
>>> import tempfile, numpy as np, mlstate
>>> folder = tempfile.mkdtemp()
>>> weights = {"layer.weight": np.ones((4, 2), np.float32)}
>>> checkpoint = mlstate.save(folder + "/ckpt", model=weights, metadata={"run": "a"})
>>> mlstate.load(folder + "/ckpt").model["layer.weight"].shape
(4, 2)
>>> mlstate.save_file(weights, folder + "/weights.safetensors")
>>> sorted(mlstate.load_file(folder + "/weights.safetensors"))
['layer.weight']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._checkpoint import Checkpoint, LayerRecord, ShardRecord, TensorRecord
from ._checkpoint_manager import CheckpointManager
from ._layout import Layout, Shard, Tier
from ._load import LoadedState, load_checkpoint
from ._plain_file import load_file, load_metadata, save_file
from ._planned import FileRead, LoadPlan, SavePlan, plan_load, plan_save
from ._prune import PruneReport, prune
from ._reshard import reshard
from ._save import PACK_BELOW, write_checkpoint
from ._save_async import SaveHandle, begin_save
from ._save_times import SaveTimes
from ._staging import Staging
from ._tiers import StateDicts, TieredState
from ._tiers_report import TierRecord, TierReport, Traffic
from ._tiers_use import TieredUnit
from ._verify import Problem, VerifyReport, verify_checkpoint

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from ._budget import MemorySize
    from .collectives import ProcessGroup

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "FileRead",
    "LayerRecord",
    "Layout",
    "LoadPlan",
    "LoadedState",
    "Problem",
    "PruneReport",
    "SaveHandle",
    "SavePlan",
    "SaveTimes",
    "Shard",
    "ShardRecord",
    "Staging",
    "StateDicts",
    "TensorRecord",
    "Tier",
    "TierRecord",
    "TierReport",
    "TieredState",
    "TieredUnit",
    "Traffic",
    "VerifyReport",
    "inspect",
    "load",
    "load_file",
    "load_metadata",
    "plan_load",
    "plan_save",
    "prune",
    "reshard",
    "save",
    "save_async",
    "save_file",
    "verify",
]


def save(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    *,
    metadata: Mapping[str, Any] | None = None,
    step: int | None = None,
    group: ProcessGroup | None = None,
    layout: Layout | str | None = None,
    pack_below_bytes: int = PACK_BELOW,
    sparse: bool = False,
    incremental: bool = False,
    compress: str | None = None,
    progress: Callable[[int], object] | None = None,
    lock_timeout: float = 0,
) -> Checkpoint:
    """
    Save the state of a model, of its optimizer, or both.

    When this returns, the new checkpoint is on the disk. Up to then, whatever happens, the one
    that was in the folder before is there and whole.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of the checkpoint; made where there is none. A checkpoint that is there is
        replaced: what did not change is not written again.
    model : mapping of str to array or Shard, or torch.nn.Module, optional
        A `ModelStateDict`, a plain dict, a module (its ``state_dict()``), or anything with
        ``get_state_dict()``. Arrays are NumPy's, ml_dtypes', or torch tensors; they are used
        where they lie. Tensors on a device are copied to main memory first, all of them. A
        module may be wrapped by DDP, compiled, or sharded by FSDP2, FSDP1 or tensor
        parallelism: names are those without the wrappers, and each rank stores its shards.
    optimizer : mapping of str to array or Shard, or torch.optim.Optimizer, optional
        An `OptimizerStateDict`, or a dict with keys ``"<parameter>.<state name>"``, or a torch
        optimizer, whose parameters' names come from the module given as `model`.
    metadata : mapping, optional
        What JSON can say: texts, finite numbers, lists, dicts with str keys, 100 deep at most.
    step : int, optional
        Default: that of an `OptimizerStateDict`.
    group : ProcessGroup, optional
        The ranks that save together, all of which call this; see `mlstate.collectives`. Each
        writes its own shards. An array that is no `Shard` is one that every rank has whole:
        they take turns in storing these. Default: this process alone.
    layout : Layout, "rows", "flat" or "whole", optional
        How arrays that are no `Shard` are cut into shards. Default: not at all.
    pack_below_bytes : int, default 262144
        Shards of fewer bytes share files; 0: every shard has a file of its own.
    sparse : bool, default False
        Leave out rows that are zero in all their bytes, and tensors that are: those of an
        optimizer's states whose parameter was not trained. Looking for them costs a pass over
        the memory.
    incremental : bool, default False
        Where no more than half of the rows of a shard changed since the last save in this
        folder, write these only. What was there is read, all of it, to find them.
    compress : {"zlib", "zstd"}, optional
        Compress what gets smaller by a quarter or more, as samples of each tensor tell: numbers
        that were rounded, counts, masks; trained float32 mostly does not. ``zlib`` is
        everywhere; ``zstd`` is quicker both ways and needs ``mlstate[zstd]``, here and where it
        is read.
    progress : callable, optional
        Called now and then with the number of bytes that were done since the last call. What
        it raises stops the save.
    lock_timeout : float, default 0
        Seconds to wait while another process writes.

    Returns
    -------
    Checkpoint
        What is in the folder now; ``written`` says what this call wrote.

    Raises
    ------
    ImportError
        The package that `compress` needs is not installed.
    TypeError, ValueError
        An argument is none of the above, ranks do not save the same, they lack a part of a
        tensor, or a shard's version goes back. Nothing is replaced then.
    CompatibilityError
        A dtype that files have no name for, or a shape that does not go with its layout.
    TypeError, ValueError
        A sharded module without the `group` of its ranks; an optimizer whose parameters are
        not the module's; a DTensor that is cut as no `Layout` can say. The text names it.
    BufferError
        A tensor has no memory to export, such as one on torch's ``meta`` device.
    StoreError
        The system refused: an `OSError` with its ``errno`` (EBUSY: another process is
        writing this checkpoint; EEXIST: the folder holds the steps of a `CheckpointManager`).
    CollectiveError
        Another rank failed; the text says which, and why.

    Notes
    -----
    Every file appears under a temporary name, and all of them are on the disk before
    ``manifest.json`` is replaced. A process that is killed leaves files behind that the next
    save deletes. Arrays must not be changed meanwhile. The GIL is released. Extra memory: about
    400 bytes a shard, and 2 MiB for each thread.

    Whether a shard changed is decided by its version, where it has one (see `Shard`), else by
    comparing its bytes with those on the disk.

    With `sparse` or `incremental` every function of mlstate returns the same arrays as without.
    A row is what lies behind one index of the first axis, but at least 256 bytes and at most
    64 KiB; shards of less than `pack_below_bytes` are written whole or, where they are zero, not
    at all. A shard of which more than 3/4 holds something is written whole. It is made of at most
    8 layers, which hold at most twice its bytes together; then it is written anew. Extra memory:
    a bit for each row.

    With `compress`, shards of less than `pack_below_bytes`, and of less than 16 KiB, are not
    compressed. Each thread compresses one shard at a time; extra memory: what that one becomes,
    at most 3/4 of it where it is kept.

    On a network file system one host writes at a time: the lock between hosts is not safe.

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
    return write_checkpoint(
        path,
        model,
        optimizer,
        metadata=metadata,
        step=step,
        group=group,
        layout=layout,
        pack_below=pack_below_bytes,
        sparse=sparse,
        incremental=incremental,
        compress=compress,
        progress=progress,
        lock_timeout=lock_timeout,
    )


def save_async(
    path: str | os.PathLike[str],
    model: Any = None,
    optimizer: Any = None,
    *,
    max_staging_bytes: MemorySize | None = None,
    staging: Staging | None = None,
    metadata: Mapping[str, Any] | None = None,
    step: int | None = None,
    group: ProcessGroup | None = None,
    layout: Layout | str | None = None,
    pack_below_bytes: int = PACK_BELOW,
    sparse: bool = False,
    incremental: bool = False,
    compress: str | None = None,
    progress: Callable[[int], object] | None = None,
    lock_timeout: float = 0,
) -> SaveHandle:
    """
    Begin to save, and return while the checkpoint is written.

    The state must not be changed before the handle's `staged` returns. Then everything of it
    is copied or written: training goes on, and the rest is written behind it. The new
    checkpoint is there when the handle's `wait` returns; up to then the old one is.

    Parameters
    ----------
    path, model, optimizer, metadata, step, layout, pack_below_bytes
        As for `save`. Tensors on a device are always copied.
    sparse, incremental, compress
        As for `save`.
    max_staging_bytes : int, float or str, optional
        Bytes, or a size such as ``"6GiB"``, that the save may take in all, with 2 MiB for each
        of its threads and about 500 bytes a shard; 0: no copies. What does not fit is written
        from where it lies before `staged` returns. Default: copies of the whole state, and what
        the writer takes.
    staging : Staging, optional
        Memory for the copies, allocated and touched beforehand. Default: allocated now and
        given back at the end.
    group : ProcessGroup, optional
        As for `save`, but one that nothing else uses until the save has ended: a thread talks
        to the other ranks through it. `staged` waits for the slowest rank to begin.
    progress : callable, optional
        As for `save`; called in the thread.
    lock_timeout : float, default 0
        Seconds to wait while another process writes.

    Returns
    -------
    SaveHandle
        To wait for what happens: `SaveHandle.staged`, `SaveHandle.wait`.

    Raises
    ------
    TypeError, ValueError, CompatibilityError, BufferError
        As `save`, about the arguments; what happens later is raised by the handle. ValueError
        also where `group` or `staging` is in use by another save, where `group` is torch's
        default group, or where tensors on a device do not fit `max_staging_bytes`.
    StoreError
        The folder holds the steps of a `CheckpointManager` (EEXIST).

    Notes
    -----
    Extra memory: `max_staging_bytes`; by default the state's and at most 16 MiB for the
    writer with about 400 bytes a shard. Below some 7 MiB a quarter of `max_staging_bytes` is
    for copies, and the writer has what it needs. References to arrays are dropped when they
    are staged, so that the memory of arrays that training replaces is free. Copies are made
    by the threads of `mlstate.set_num_threads` without the GIL; the writer has up to four
    threads of its own.

    A thread does the work, which the interpreter waits for when it ends. A save whose error
    nobody asked for shows it. In a forked child the handle is of no use, and the save is not
    disturbed. The idea of staging in memory and writing behind the training is that of
    CheckFreq (Mohan et al., FAST 2021).

    Examples
    --------
    >>> import tempfile, numpy as np
    >>> from mlstate.checkpoint import Staging, save_async
    >>> state = {"w": np.zeros((1000, 8), np.float32)}  # 32,000 bytes
    >>> memory = Staging(32_000)
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> for step in range(3):
    ...     handle = save_async(path, state, step=step, staging=memory)
    ...     handle.staged()
    ...     state["w"] += 1  # while it is written
    ...     checkpoint = handle.wait()
    >>> checkpoint.step, checkpoint.load().model["w"][0, 0].item()
    (2, 2.0)
    """
    return begin_save(
        path,
        model,
        optimizer,
        metadata=metadata,
        step=step,
        max_staging_bytes=max_staging_bytes,
        staging=staging,
        progress=progress,
        lock_timeout=lock_timeout,
        group=group,
        layout=layout,
        pack_below=pack_below_bytes,
        sparse=sparse,
        incremental=incremental,
        compress=compress,
    )


def load(
    path: str | os.PathLike[str],
    *,
    names: str | Iterable[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    layout: Layout | str | None = None,
    group: ProcessGroup | None = None,
    into: Any = None,
    mmap: bool = False,
    verify: bool | str = True,
    missing: str = "skip",
    progress: Callable[[int], object] | None = None,
) -> LoadedState:
    """
    Load a checkpoint, all of it or any part.

    Parameters
    ----------
    path : str or os.PathLike
        Its folder.
    names : str or iterable of str, optional
        Which tensors: the name of a parameter (with its optimizer states), of a layer (all
        below it), of one tensor, or a glob (``"layers.*.weight"``) where nothing has that very
        name.
    rank, world_size : int, optional
        Load the part of one rank only. Without `layout`, tensors are cut in the way in which
        they were saved, for `world_size` ranks; those that were saved whole are loaded whole.
    layout : Layout, "rows", "flat" or "whole", optional
        How to cut, whatever they were saved as. Optimizer states are cut along the same axes as
        their parameter, in so far as they have them.
    group : ProcessGroup, optional
        In place of `rank` and `world_size`. The ranks need not wait for each other, but for
        torch modules and optimizers in `into`: there all ranks call this, and hear of each
        other, before anything is changed, whether all fits and is of one checkpoint.
    into : mapping or object, optional
        ``{"model": state, "optimizer": state}``, or something with these attributes: arrays
        that exist, of the right shape and dtype, are filled; no new ones are made. Torch
        modules and optimizers are filled in place, of DDP, FSDP2 and FSDP1 too: they know
        which part of a tensor they have, so `group`, `rank` and `layout` do not cut for them
        (a `rank` or `layout` that is given cuts for modules that are not sharded). States
        that an optimizer has not made yet are made; its groups get the values that were
        saved. Nothing is loaded for one that is absent. With `names`, what they mean must be
        on both sides; all else in `into` stays as it is.
    mmap : bool, default False
        Return read-only arrays over the mapped files: nothing is read before it is touched.
        Tensors whose part lies in several shards, or in a sparse one, are put together in new
        memory.
    verify : bool or "first", default True
        Compare checksums while reading. Of a mapping, and with False, nothing is compared.
        ``"first"``: read and compare the whole checkpoint before anything else is done.
    missing : {"skip", "zeros", "error"}, default "skip"
        What to do about optimizer states that were not saved, such as those of parameters that
        have none: leave them out, make them zeros, or refuse. They are those that other
        parameters have, in their own shape; where the saved optimizer says which parameters it
        trains, of these. With `into`, also those that are there: ``"skip"`` leaves arrays as
        they are, and lets a torch optimizer forget such states: it makes them anew.
    progress : callable, optional
        As for `save`.

    Returns
    -------
    LoadedState
        ``model``, ``optimizer``, ``metadata``, ``step``. Each state is of the class that was
        saved. Many arrays below 4 MiB are views of blocks that they share, of 4 to 20 MiB; a
        block lives as long as any of its arrays. bfloat16 and 8-bit floats are what
        `load_file` returns for them.

    Raises
    ------
    StoreError
        The system refused; a `FileNotFoundError` too where there is no checkpoint.
    FormatError
        The manifest, an index or a file is not what it should be, or not all of a tensor was
        stored.
    ChecksumError
        Bytes changed since they were written. (A `FormatError`.)
    TensorNotFoundError
        One of `names` means nothing. (A `KeyError`.)
    CompatibilityError
        `into` has other names, shapes or dtypes. Nothing was changed.
    TypeError, ValueError
        As `save`, of the torch objects in `into`; arrays of `into` are read-only, or share
        memory and are not the same array. Nothing was changed.

    Notes
    -----
    Only the byte ranges that are wanted are read; where they are verified, the checksummed
    blocks of 1 MiB that hold them. Memory is asked for once the files were seen to be there. A
    checksum that does not match is found while reading: ``into`` then holds anything, unless
    ``verify="first"``. An array that is in `into` under several names of a section, as tied
    weights are, is filled for the last of them. Views with gaps are filled when all else is
    read, in their order. A file that is cut short while a mapping of it is in use ends the
    process (SIGBUS), as with every mapping; mlstate never does that to its files.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.arange(8.0).reshape(4, 2)})
    >>> mlstate.load(path, rank=1, world_size=2, layout="rows").model["w"]
    array([[4., 5.],
           [6., 7.]])
    """
    return load_checkpoint(
        path,
        names=names,
        rank=rank,
        world_size=world_size,
        layout=layout,
        group=group,
        into=into,
        mmap=mmap,
        verify=verify,
        missing=missing,
        progress=progress,
    )


def verify(
    path: str | os.PathLike[str],
    *,
    repair: bool = False,
    progress: Callable[[int], object] | None = None,
) -> VerifyReport:
    """
    Read every byte of a checkpoint, and say what is not as it was written.

    Parameters
    ----------
    path : str or os.PathLike
        Its folder.
    repair : bool, default False
        Write damaged headers of shard files again. If tensors are damaged, put the newest older
        checkpoint whose tensors are all good in its place (`CheckpointManager` keeps older ones).
        Newer steps with damaged tensors are given up: load with ``verify=False`` before, if
        something of them is to be saved.
    progress : callable, optional
        Called with the number of bytes read since the last call.

    Returns
    -------
    VerifyReport
        True if the checkpoint is good. Problems name the file, the byte range and the tensor.

    Raises
    ------
    StoreError
        There is no such folder, or, with `repair`, it cannot be written; or other processes
        replaced the checkpoint at each of 20 attempts to verify it.

    Notes
    -----
    If another process replaces the checkpoint meanwhile, verifying begins again.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> checkpoint = mlstate.save(path, {"w": np.arange(8.0)})
    >>> with open(path + "/" + checkpoint.shards()[0].path, "r+b") as file:
    ...     _ = file.seek(4100)
    ...     _ = file.write(b"!")
    >>> [(p.kind, p.name, p.offset) for p in mlstate.verify(path).problems]
    [('altered', 'w', 4096)]
    """
    return verify_checkpoint(path, repair=repair, progress=progress)


def inspect(path: str | os.PathLike[str]) -> Checkpoint:
    """
    Say what is in a checkpoint.

    Parameters
    ----------
    path : str or os.PathLike
        Its folder.

    Returns
    -------
    Checkpoint
        Prints as a table, also in notebooks.

    Raises
    ------
    As `Checkpoint`.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.zeros((4, 2), np.float32)}, step=3)
    >>> mlstate.checkpoint.inspect(path)
    Checkpoint: 1 tensor, 32 B, 1 file, 1 rank, step 3, ...
    tensor  state  dtype    shape   shards  bytes  version
    w              float32  (4, 2)  1       32 B   1
    """
    return Checkpoint._opened(path)
