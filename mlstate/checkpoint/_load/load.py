"""`load`: its arguments, new arrays or targets, and loads of all ranks of a group together.

load -> LoadRequest   the arguments, checked
-> open_source    the path, by its content
-> Loader         the sections of tensors; then new arrays, or
Prepared      targets; see targets.py
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ...collectives._consensus import agree
from ...errors import MLStateError, StoreError
from .._loaded_state import LoadedState
from .._options import LOAD_DEFAULTS, complete_options, show_options
from .._sources.indexed import IndexedSource
from .._sources.open_source import open_source
from .._states.restore import apply_all, undo_all
from .._store.checkpoint_files import TRIES
from .._store.open_path import RootPath
from .arguments import check_request
from .group_names import names_elsewhere, target_names
from .loader import Loader, load_new_state
from .targets import Prepared

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar, Unpack

    from ...collectives import ProcessGroup
    from .._options import LoadOptions
    from .._sources.protocol import Source
    from .._states.restore import Action
    from .arguments import LoadRequest

    _Result = TypeVar("_Result")


def _load_into_targets(request: LoadRequest, source: Source) -> LoadedState:
    """Check the targets of ``into``, fill and return them.

    After an error while arrays are filled, objects get their old states back, but the content of
    the arrays is undefined.
    """
    prepared = Prepared(Loader(request, source))
    prepared.prepare()
    return apply_all(prepared.actions, prepared.fill)


def _load_together(group: ProcessGroup, request: LoadRequest, source: IndexedSource) -> LoadedState:
    """Fill the targets of all ranks and return them, or raise on all ranks.

    No rank changes anything before every rank has checked its targets. If an object of one rank
    refuses its state, every rank undoes its changes. All begin again if the checkpoint is replaced,
    or if the best step is deleted or differs between ranks, and raise StoreError if that happens
    `TRIES` times.
    """
    error: BaseException | None = None  # of this rank, in one attempt
    generation = ""

    def run(step: Callable[[], _Result]) -> _Result | None:
        """Return the result of a step; None if it or an earlier step of this attempt failed."""
        nonlocal error
        try:
            return step() if error is None else None
        except BaseException as caught:
            error = caught
            return None

    def begin() -> Prepared:
        nonlocal generation
        generation = source.manifest.generation
        return Prepared(Loader(request, source))

    def agree_on(*, is_last: bool) -> bool:
        """Return whether all ranks read the same checkpoint; False: all open it again.

        Raises on all ranks if one has an error that a newer manifest does not explain, or with
        `is_last` any error.
        """
        nonlocal error
        again = False
        if not is_last and isinstance(error, FileNotFoundError):
            try:
                again = source.reopen(generation)
            except MLStateError as other:
                error = other
        return agree(group, generation, error, again=again)

    applied: list[Action] = []
    for tries_left in reversed(range(TRIES)):
        error, generation = None, ""
        run(partial(undo_all, applied, StoreError("the checkpoint was replaced")))
        applied = []
        if tries_left < TRIES - 1:
            run(source.forget)
        prepared = run(begin)
        names = None if prepared is None else run(partial(target_names, prepared))
        elsewhere = names_elsewhere(group, names)
        if elsewhere is not None and prepared is not None:
            prepared.elsewhere = elsewhere
            run(prepared.prepare)
        if not agree_on(is_last=not tries_left):
            continue
        assert prepared is not None
        run(partial(apply_all, prepared.actions, lambda: None))
        applied = [] if error else prepared.actions
        try:
            agree_on(is_last=True)  # raises if a rank failed
            loaded = run(prepared.fill)
            if agree_on(is_last=not tries_left):
                assert loaded is not None
                return loaded
        except BaseException as caught:
            undo_all(applied, caught)
            raise
    raise StoreError(f"the checkpoint was replaced at each of {TRIES} attempts to load it")


def open_loader(path: object, options: LoadOptions) -> Loader:
    """Return a loader of all tensors of a source, for a caller that reads one after the other."""
    request = check_request(complete_options(load, options, LOAD_DEFAULTS))
    source = open_source(path, options.get("storage_options"))
    source.check(request.options)
    return Loader(request, source)


@show_options(LOAD_DEFAULTS)
def load(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    **options: Unpack[LoadOptions],
) -> LoadedState:
    """
    Load a checkpoint, or any part of it.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of a checkpoint or of a run, or a file or folder of another program; its content
        decides what it is, and a suffix only breaks ties. Safetensors files, and folders of
        Hugging Face models (also with the names of PEFT, diffusers and Mistral), are read by byte
        ranges; an index that differs from the headers of its files causes a warning. All these may
        be URLs in an object store. Other local formats are read as a whole and then cut: files of
        `torch.save` (no code of them runs), ``.npz``, Lightning, and folders such as those of
        torch.distributed.checkpoint and DeepSpeed. For these ``mmap=True``, ``verify="first"``,
        ``missing``, and `into` with a group of several ranks are refused. Named states in them that
        cannot be read cause a `CheckpointWarning`.
    step : int or "latest", optional
        The step of a run, the folder of a `CheckpointManager`, whose `restore` also takes "best".
        Default: the newest.
    names : str or iterable of str, optional
        Tensors to load. Each name is a parameter (selects its optimizer states too), a layer
        (selects everything below it), or one tensor. An exact name wins, even ``"w[0]"``; any other
        string is a glob such as ``"layers.*.weight"``. Named states are then left out, except those
        in `into`.
    rank, world_size : int, optional
        Load only the part of one rank. Without `layout`, tensors are cut as they were saved, for
        `world_size` ranks; tensors that were saved whole are loaded whole, with a
        `CheckpointWarning` if none was saved in parts.
    layout : Layout or str, optional
        Layout to load, independent of the saved layout. Optimizer states are cut along the same
        axes as their parameter, as far as they have these axes.
    group : ProcessGroup, optional
        Alternative to `rank` and `world_size`. The ranks do not wait for each other, except with
        `into`. Then all ranks must call `load`; before anything is changed, they check together
        that every target matches and that all read the same checkpoint. The targets of all ranks
        together must have the stored names, such as those of the stages of a pipeline.
    into : mapping or object, optional
        ``{"model": state, "optimizer": state, "states": {name: state}}``, an object with these
        attributes, or a torch module, which receives the model. Existing arrays of the right shape
        and dtype are filled, and no new ones are made. Torch modules and optimizers are filled in
        place, including DDP, FSDP2 and FSDP1 modules. Sharded modules know their part of each
        tensor, so `group`, `rank` and `layout` do not cut for them; a given `rank` or `layout` cuts
        for modules that are not sharded. Submodules with extra states, own load methods or hooks
        are loaded by their own methods, before any array is filled, as their ``load_state_dict``
        does. Optimizer states that do not exist yet are created, and the optimizer's groups receive
        the saved values. A section without a target is not loaded. With `names`, the selected names
        must exist in the checkpoint and in `into`; everything else in `into` is unchanged. Named
        states may also be random generators, caches of `mlstate.kv`, objects with
        ``load_state_dict``, and dicts and lists, whose content is replaced; generators, caches and
        objects in them are restored themselves, also in tuples, and a list or tuple of such values
        must have the saved length. All objects are restored before the arrays, or none: if one
        refuses its state, those before it get their old states back, and no array is changed.
    mmap : bool, default False
        Return read-only arrays over memory-mapped files. Tensors whose part spans several shards,
        or a sparse or compressed one, are assembled in new memory. With ``verify=False``, data is
        read on first access.
    verify : bool or "first", default True
        Verify checksums while reading. With ``mmap=True``, the requested bytes are read once, in
        pieces, and compared before the arrays are returned. With ``"first"``, the whole checkpoint
        is read and verified before anything is loaded.
    missing : {"skip", "zeros", "error"}, default "skip"
        How to treat optimizer states that the checkpoint lacks: leave them out, make them zeros, or
        raise. A parameter lacks a state if another parameter has it with that parameter's shape. If
        the saved optimizer lists the parameters that it trains, only these are considered. With
        `into`, states that exist in `into` and were not saved are lacking too: ``"skip"`` leaves
        such arrays unchanged, and removes such states from a torch optimizer, which then creates
        them anew.
    strict : bool, default True
        Require the same names in the checkpoint and in each target of `into`; with a group, stored
        names that a target of any rank has. If False, fill only the tensors that both have. A shape
        mismatch always raises, and so does a target without a name in common with the checkpoint.
    cast : bool or dtype, default False
        With True, convert between float16, bfloat16, float32 and float64 if a target of `into` has
        another dtype, rounding to nearest; targets of these dtypes also receive the values of
        8-bit floats and quantized weights, which `names` may choose by either name. This needs
        memory for these tensors. With one of these four dtypes, of NumPy, ml_dtypes or torch, or
        its name, return the floating-point tensors of the model, and of named states that are
        modules or dicts of tensors alone, in this dtype.
        The result has the values of quantized weights instead of codes and scales, also of 4-bit
        floats and int8; 8-bit floats without scales are converted by their values. Integers, bool
        and complex numbers keep their dtypes, and so do all tensors of optimizers and of other
        named states. Besides the result this needs memory for one tensor, or 64 MiB. A dtype cannot
        be combined with `into` or `mmap`.
    device : torch.device or str, optional
        Return torch tensors on this device instead of NumPy arrays. Targets in `into` keep their
        own devices; objects with ``load_state_dict`` get their tensors on this one. Needs
        ``mlstate[torch]``.
    rename : mapping of str to str, optional
        Rules of `mlstate.state.rename`, applied to the stored names of model, optimizer and named
        states; `names`, `into` and the result have the new names. Each rule must match a name.
    progress, storage_options
        As for `save`.

    Returns
    -------
    LoadedState
        ``model``, ``optimizer``, ``metadata``, ``step``, ``states``. Each state has the class that
        was saved. Arrays below 4 MiB may be views of shared blocks of 4 to 20 MiB; a block stays
        allocated as long as any of its arrays exists. bfloat16 and 8-bit floats have the dtypes
        that `load_file` returns.

    Raises
    ------
    StoreError
        The operating system refused. Also a `FileNotFoundError` if there is no checkpoint.
    FormatError
        The manifest, an index or a file is malformed, or in a format that is not read, or a part of
        a tensor was not stored. With `cast`, the scales of a quantized weight are missing,
        unknown or have a wrong shape.
    ChecksumError
        Bytes changed since they were written. (A `FormatError`.)
    TensorNotFoundError
        One of `names` matches no tensor. (A `KeyError`.)
    CompatibilityError
        `into` has other names, shapes or dtypes, or an object refuses its state; or two names would
        become the same by `rename`; or an array or object of `into` has two names with different
        values in the checkpoint, such as tied weights. `into` is unchanged. The model or optimizer
        of another program has a value that is neither a tensor nor plain. With `cast`, the model
        is quantized by a method whose values mlstate cannot compute.
    TypeError, ValueError
        A torch object in `into` is refused for one of the reasons of `save`, or arrays of `into`
        are read-only or overlap without being the same array. `into` is unchanged. Or one argument
        concerns another that is not given, or they exclude each other.
    MLStateError
        A device failed during the copy to a tensor of `into` on it; the message names the tensor.
        The content of `into` is then undefined, also with ``verify="first"``.

    Notes
    -----
    Only the requested byte ranges are read; with verification, all checksummed 1 MiB blocks
    that contain them. Memory is allocated after the files were opened. A checksum mismatch is
    found while reading: `into` then has undefined content, unless ``verify="first"``. If an
    array is in `into` under several names, such as tied weights, the bytes of these names, after
    `rename` and `cast`, must be equal: they are compared before anything is written, by checksums
    or by reading the tensors in pieces. Non-contiguous targets are filled last, in their order.
    Objects without ``state_dict()`` are restored after all others, as this cannot be undone. If a
    file is truncated while it is mapped, access ends the process (SIGBUS), as with every mapping;
    mlstate never truncates its files.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.arange(8.0).reshape(4, 2)})
    >>> mlstate.load(path, rank=1, world_size=2, layout="rows").model["w"]
    array([[4., 5.],
           [6., 7.]])
    """
    request = check_request(complete_options(load, options, LOAD_DEFAULTS))
    if isinstance(path, RootPath):
        request = request._replace(written=path.written)
    only_local = ("mmap=True", "load without it") if request.options["mmap"] else None
    source = open_source(path, options.get("storage_options"), step, only_local=only_local)
    source.check(request.options)
    group, into = request.options["group"], request.options["into"]
    if group is not None and group.world_size > 1 and into is not None:
        assert isinstance(source, IndexedSource)  # others refuse the option
        return _load_together(group, request, source)
    load_state = load_new_state if into is None else _load_into_targets
    return source.attempt(partial(load_state, request, source))
