"""Load a sharded checkpoint; public through `mlstate.checkpoint`."""

from __future__ import annotations

import os
import re
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import _core
from .._common.arrays import is_torch
from .._common.backend import OptimizerRecord, backend_of, is_module, is_optimizer
from .._common.set_module import set_module
from .._common.text import names_hint
from .._sharding.layout import Layout, Steps, steps_of
from ..collectives._arguments import check_group
from ..collectives._consensus import agree
from ..errors import CompatibilityError, MLStateError, StoreError, TensorNotFoundError
from ..state._compatibility import SHOWN, join, rename_hint
from ..state._kind import restore_kind
from ..state._optimizer_state import OptimizerStateDict
from ._remote.remote_folder import checkpoint_folder, refuse_remote
from ._store import folder as _folder
from ._store.name_globs import Names, listed_names
from ._store.rank_indexes import Indexes
from ._store.weight_files import check_total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ..collectives import ProcessGroup
    from ..state._state_dict import StateDict
    from ._store.manifest import Manifest

    _Ready: TypeAlias = tuple[int, Any, list[str], Any]  # section, filling, keys, cuts

_NUMBERED = re.compile(r"param_\d+\.", re.ASCII)  # of an optimizer saved without its module
MISSING = ("skip", "zeros", "error")
_ALL_NAMES = Names(None)


@set_module("mlstate.checkpoint")
class LoadedState:
    """The state that `load` returns.

    Attributes
    ----------
    model : ModelStateDict, StateDict or None
        The model's arrays; None if no model was saved. If ``into["model"]`` was given, that
        object.
    optimizer : OptimizerStateDict, StateDict or None
        The same for the optimizer.
    metadata : dict
        The saved metadata after a JSON round trip: tuples become lists, dict keys become str.
    step : int or None
        The saved step.

    Examples
    --------
    >>> import tempfile, numpy as np, mlstate
    >>> path = tempfile.mkdtemp() + "/ckpt"
    >>> _ = mlstate.save(path, {"w": np.arange(3.0)}, metadata={"run": "a"})
    >>> mlstate.load(path).metadata
    {'run': 'a'}
    """

    __slots__ = ("metadata", "model", "optimizer", "step")

    def __init__(
        self, model: Any, optimizer: Any, metadata: dict[str, Any], step: int | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.metadata = metadata
        self.step = step

    def __repr__(self) -> str:
        def shown(state: Any) -> str:
            if state is None:
                return "None"
            if not hasattr(state, "keys") or not hasattr(state, "__len__"):
                return f"<{type(state).__name__}: filled>"  # len() of a module counts modules
            count = len(state)
            return f"<{type(state).__name__}: {count} tensor{'s' if count != 1 else ''}>"

        return (
            f"LoadedState(model={shown(self.model)}, optimizer={shown(self.optimizer)}, "
            f"metadata={self.metadata!r}, step={self.step})"
        )

    def _repr_html_(self) -> str:
        from ._html import loaded_html

        return loaded_html(self)


# ---- selecting tensors ----


def chosen_keys(
    merged: Any, listed: list[str] | None, folder: str
) -> tuple[Names, list[list[str]]]:
    """Return the name matcher, and the matching keys of both sections."""
    sections = [merged.keys(section) for section in (0, 1)]
    if listed is None:
        return _ALL_NAMES, sections
    names = Names(listed, *sections)
    chosen = []
    used: set[str] = set()
    for section, every in enumerate(sections):
        keys, meant = names.select(every, section)
        chosen.append(keys)
        used |= meant
    unused = [name for name in listed if name not in used]
    if unused:
        hint = names_hint(unused[0], chain.from_iterable(sections))
        error = TensorNotFoundError(f"Tensor {unused[0]!r} not found in checkpoint{hint}")
        error.name, error.path = unused[0], folder
        raise error
    return names, chosen


# ---- targets ----


def _target(into: Any, name: str) -> Any:
    """Return the object in `into` that receives one section."""
    return into.get(name) if hasattr(into, "get") else getattr(into, name, None)


def _check_into(into: Any) -> None:
    if hasattr(into, "get"):
        unknown = [key for key in into if key not in ("model", "optimizer")]
        if unknown:
            raise TypeError(
                f"into= takes {{'model': ..., 'optimizer': ...}}, got the key {unknown[0]!r}"
            )
    elif not (hasattr(into, "model") and hasattr(into, "optimizer")):
        raise TypeError(
            "into= takes {'model': ..., 'optimizer': ...} or something with these attributes, "
            f"got {type(into).__name__}"
        )


class _ArrayTarget:
    """Arrays of the caller that receive one section."""

    optional: frozenset[str] = frozenset()  # names that the checkpoint may lack

    def __init__(self, target: Any) -> None:
        arrays = dict(target)
        self.tensors = [value for value in arrays.values() if is_torch(value)]
        if self.tensors:
            arrays = backend_of(self.tensors[0]).arrays_of(arrays)
        self.arrays = arrays
        self.known = arrays.keys()
        self.zeros: list[str] = []

    def zero(self, name: str) -> None:
        self.zeros.append(name)

    def done(self) -> None:
        for name in self.zeros:
            self.arrays[name][...] = 0
        if self.tensors:
            backend_of(self.tensors[0]).note_written(self.tensors)


def _names_error(
    missing: list[str], unexpected: list[str], unfilled: list[str], path: str
) -> CompatibilityError:
    """Return an error, in torch's words, that lists mismatched names and suggests a rename."""
    lines = [f"Error(s) in loading {path}:"]
    for words, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            quoted = join([f'"{name}"' for name in names[:SHOWN]])
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(f"{words} key(s) in checkpoint: {quoted}{more}.")
    hint = rename_hint(dict.fromkeys(unexpected), dict.fromkeys(unfilled), unexpected, unfilled)[1]
    lines += [f"{hint}."] if hint else []
    error = CompatibilityError("\n    ".join(lines))
    error.name = (missing or unexpected)[0]
    error.path = path
    return error


# ---- loading ----


class LoadRequest(NamedTuple):
    """The arguments of a load, checked.

    Attributes
    ----------
    folder, root : str
        The checkpoint, and the path of its root in the folder.
    names : list of str or None
        As for `load`.
    rank : int or None
        Rank whose index is preferred if several list the same tensors.
    cutting : tuple
        The part to load: steps, index, world (0: all of every tensor).
    into : object or None
        As for `load`.
    own : bool
        Whether torch objects determine which part of a tensor they receive.
    mmap, verify, missing, progress
        As for `load`.
    """

    folder: str
    root: str
    names: list[str] | None
    rank: int | None
    cutting: tuple[Steps | None, int, int]
    into: Any
    own: bool
    mmap: bool
    verify: bool | str
    missing: str
    progress: Callable[[int], object] | None


class Loader:
    """Loads one root.

    Parameters
    ----------
    request : LoadRequest
        What to load.
    manifest : Manifest
        The root's manifest.

    Raises
    ------
    FormatError, ChecksumError, StoreError
        An index cannot be read or, with ``verify="first"``, a shard file is damaged.
    """

    def __init__(self, request: LoadRequest, manifest: Manifest) -> None:
        self.request = request
        self.manifest = manifest
        self.folder = request.folder
        self.verify = bool(request.verify)
        self.indexes = Indexes(request.folder, manifest, request.rank)
        if self.verify:
            check_total(request.folder, manifest, self.merged_index)
        if request.verify == "first":
            self.indexes.read_all()
            _verify_all(request.folder, manifest, self.merged_index)
            self.verify = False

    @property
    def merged_index(self) -> Any:
        """The merged index of the ranks read so far; call `Indexes.need` before loading."""
        return self.indexes.merged_index

    def load_new(self, section: int, keys: list[str], cutting: Any) -> dict[str, Any]:
        """Return new arrays or, with mmap, views of the files."""
        mmap, progress = self.request.mmap, self.request.progress
        verify = self.verify and not mmap
        arrays: dict[str, Any] = {}

        def read(folder: str, some: list[str], cuts: Any) -> None:
            arrays.update(
                self.merged_index.load(folder, section, some, cuts, verify, mmap, progress)
            )

        _folder.read_batches(self.folder, self.merged_index, section, keys, cutting, verify, read)
        return arrays

    def names_fit(self, section: int, keys: list[str], filling: Any, names: Names) -> list[str]:
        """Return the keys to read into a target; raise if names do not match.

        With `names`, each selected name must exist in the checkpoint and in the target.
        """
        have = set(keys)
        known = filling.known
        unfilled = [name for name in known if name not in have and name not in filling.optional]
        lacking, _ = names.select(self.without_tied(unfilled, keys, filling), section)
        unexpected = [name for name in keys if name not in known]
        lenient = section == 1 and self.request.missing != "error"
        if unexpected or (lacking and not lenient):
            raise _names_error([] if lenient else lacking, unexpected, unfilled, self.folder)
        if self.request.missing == "zeros":
            for name in lacking:
                filling.zero(name)
        return [name for name in keys if name in filling.arrays]

    def without_tied(self, unfilled: list[str], keys: list[str], filling: Any) -> list[str]:
        """Return the names whose arrays receive no value under another name.

        Hugging Face folders store tied weights under one of their names.
        """
        if not unfilled or self.manifest.weights is None:
            return unfilled
        arrays = filling.arrays
        order = [name for name in (*unfilled, *keys) if name in arrays]
        [tied] = _core.targets_tied([(order, arrays)])
        left_out = set(tied) - set(keys)
        return [name for name in unfilled if name not in left_out]

    def shape_of(
        self, shape: tuple[int, ...], layout: Steps, axes: tuple[int | None, ...] | None
    ) -> tuple[int, ...]:
        """Return the shape to load into a target that does not know its part of the tensor."""
        steps, index, world = self.request.cutting
        if self.request.own or (steps is None and (world == 0 or len(layout) != 1)):
            return shape
        if steps is None:
            steps = ((layout[0][0], world),)
        else:
            steps, index = _core.layout_project(steps, index, len(shape), axes)
        return Layout._of(steps).shape(shape, index)

    def cuts(self, filling: Any, keys: list[str]) -> Any:
        """Return how tensors are cut, for the core: one cut for all keys, or a list by key."""
        if isinstance(filling, _ArrayTarget):
            return self.request.cutting
        if self.request.own:
            return filling.cuts(keys)
        filling.whole()
        return self.request.cutting

    def check(self, section: int, filling: Any, keys: list[str], cuts: Any) -> None:
        """Raise the errors of `fill` about shapes and dtypes, before anything is changed."""
        self.merged_index.fits(self.folder, section, keys, cuts, filling.arrays)

    def fill(self, section: int, filling: Any, keys: list[str], cuts: Any) -> None:
        """Read into arrays; shapes and dtypes are checked before the first byte is written."""
        progress = self.request.progress

        def read(folder: str, some: list[str], some_cuts: Any) -> None:
            self.merged_index.load_into(
                folder, section, some, some_cuts, filling.arrays, self.verify, progress
            )

        merged = self.merged_index
        _folder.read_batches(self.folder, merged, section, keys, cuts, self.verify, read)
        filling.done()

    def lacking(self, keys: list[list[str]]) -> dict[str, tuple[str, str]]:
        """Return the optimizer states that the checkpoint lacks.

        A parameter lacks a state if another parameter has it, with that parameter's shape. The
        result maps the lacking key to its parameter and to the key of an existing state of that
        name. `keys` are the loaded keys of both sections. If the saved optimizer lists the
        parameters that it trains, only these are considered.
        """
        saved = _restore(self.manifest.optimizer, {}, self.folder)
        groups = getattr(saved, "param_groups", ())
        trained = {str(name) for group in groups for name in group.get("params", ())}
        chosen = set(keys[1])
        shapes: dict[str, tuple[int, ...]] = {}
        states: dict[str, str] = {}
        for section, key, parameter, state, _, shape, _, axes, *_ in self.merged_index.tensors():
            if section == "params":
                shapes[key] = shape
            elif state and axes is None and shapes.get(parameter) == shape and key in chosen:
                states.setdefault(state, key)
        parameters = [name for name in keys[0] if shapes[name]]
        parameters = [name for name in parameters if name in trained] or parameters
        return {
            f"{name}.{state}": (name, like)
            for name in parameters
            for state, like in states.items()
            if f"{name}.{state}" not in chosen
        }

    def refuse_lacking(self, keys: list[list[str]]) -> None:
        """With ``missing="error"``, raise if the checkpoint lacks optimizer states."""
        lacking = list(self.lacking(keys)) if self.request.missing == "error" else []
        if lacking:
            raise _names_error(lacking, [], [], self.folder)

    def add_zeros(self, keys: list[list[str]], parameters: Any, arrays: dict[str, Any]) -> None:
        """Add the lacking states of parameters as zeros."""
        import numpy as np

        for key, (name, like) in self.lacking(keys).items():
            arrays[key] = np.zeros(parameters[name].shape, arrays[like].dtype)


def _restore(kind: dict[str, Any] | None, arrays: dict[str, Any], path: str) -> StateDict | None:
    return None if kind is None else restore_kind(arrays, kind, path)


def _is_numbered(loader: Loader, keys: list[str], optimizer: Any, module: Any) -> bool:
    """Return whether optimizer states are identified by parameter order instead of names."""
    every = loader.merged_index.keys(1)
    if every and all(map(_NUMBERED.match, every)):
        # the module's parameter order is then also torch's order
        return module is not None or any("param_names" in g for g in optimizer.param_groups)
    if keys and module is None and not all("param_names" in g for g in optimizer.param_groups):
        raise CompatibilityError(
            f"{loader.folder} stores optimizer states under names of parameters, such as "
            f"{keys[0]!r}: pass the module too, "
            "into={'model': module, 'optimizer': optimizer}"
        )
    return False


def _optimizer_target(
    loader: Loader, keys: list[str], optimizer: Any, module: Any, chosen_names: Names
) -> Any:
    """Return the states of a torch optimizer as targets; create those that do not exist yet."""
    chosen = set(keys)
    found = loader.merged_index.tensors()
    records = {
        key: OptimizerRecord(parameter, state, loader.shape_of(shape, layout, axes), dtype, axes)
        for section, key, parameter, state, dtype, shape, layout, axes, *_ in found
        if section == "optim_state" and key in chosen
    }
    names = module
    if _is_numbered(loader, keys, optimizer, module):
        names = [f"param_{i}" for i in range(sum(len(g["params"]) for g in optimizer.param_groups))]

    def read(wanted: list[str]) -> dict[str, Any]:
        whole = (None, 0, 0)
        loader.indexes.need([(1, wanted, whole)])
        return loader.load_new(1, wanted, whole)

    saved: Any = _restore(loader.manifest.optimizer, {}, loader.folder)
    if not hasattr(saved, "param_groups"):  # the optimizer was saved as a plain dict
        saved = OptimizerStateDict()

    def meant(others: list[str]) -> list[str]:
        return chosen_names.select(others, 1)[0]

    fill = backend_of(optimizer).fill_optimizer
    return fill(optimizer, module, records, saved, read, names, meant)


def _prepare_targets(loader: Loader, targets: list[Any]) -> list[_Ready]:
    """Return section, target, keys and cuts of each target; raise if one does not match."""
    ready: list[_Ready] = []
    names, keys = chosen_keys(loader.merged_index, loader.request.names, loader.folder)
    module = targets[0] if is_module(targets[0]) else None
    for section, target in enumerate(targets):
        if target is None:
            continue
        filling: Any
        if module is not None and target is module:
            filling = backend_of(module).fill_module(module)
        elif is_optimizer(target):
            filling = _optimizer_target(loader, keys[section], target, module, names)
        else:
            filling = _ArrayTarget(target)
        chosen = loader.names_fit(section, keys[section], filling, names)
        ready.append((section, filling, chosen, loader.cuts(filling, chosen)))
    if targets[1] is not None:
        loader.refuse_lacking(keys)
    loader.indexes.need((section, chosen, cuts) for section, _, chosen, cuts in ready)
    for section, filling, chosen, cuts in ready:
        loader.check(section, filling, chosen, cuts)
    return _drop_tied_keys(ready)


def _drop_tied_keys(ready: list[_Ready]) -> list[_Ready]:
    """Drop keys whose array shares memory with a later key: one read fills both."""
    tied = _core.targets_tied([(keys, filling.arrays) for _, filling, keys, _ in ready])
    found = []
    for (section, filling, keys, cuts), others in zip(ready, tied, strict=True):
        left_out = set(others)
        kept = [i for i, key in enumerate(keys) if key not in left_out]
        if isinstance(cuts, list):  # one for each key
            cuts = [cuts[i] for i in kept]
        found.append((section, filling, [keys[i] for i in kept], cuts))
    return found


def _targets(manifest: Manifest, into: Any, folder: str) -> list[Any]:
    """Return the targets of the two sections; raise if a target's section was not saved."""
    found: list[Any] = []
    for name, kind in (("model", manifest.model), ("optimizer", manifest.optimizer)):
        found.append(_target(into, name))
        if found[-1] is not None and kind is None:
            lacking = CompatibilityError(f"{folder} holds no {name}")
            lacking.path = folder
            raise lacking
    return found


def _load_into_targets(loader: Loader) -> LoadedState:
    """Check all arrays of ``into``, then fill them."""
    manifest = loader.manifest
    targets = _targets(manifest, loader.request.into, loader.folder)
    for one in _prepare_targets(loader, targets):
        loader.fill(*one)
    return LoadedState(targets[0], targets[1], manifest.metadata, manifest.step)


def _load_new_state(loader: Loader) -> LoadedState:
    """Load new arrays or, with mmap, views of the files."""
    manifest = loader.manifest
    _, chosen = chosen_keys(loader.merged_index, loader.request.names, loader.folder)
    loader.refuse_lacking(chosen)
    results: list[Any] = [None, None]
    kinds = (manifest.model, manifest.optimizer)
    loader.indexes.need(
        (section, chosen[section], loader.request.cutting)
        for section, kind in enumerate(kinds)
        if kind is not None
    )
    for section, kind in enumerate(kinds):
        if kind is None:
            continue
        arrays = loader.load_new(section, chosen[section], loader.request.cutting)
        if section == 1 and loader.request.missing == "zeros" and results[0] is not None:
            loader.add_zeros(chosen, results[0], arrays)
        results[section] = _restore(kind, arrays, loader.folder)
    return LoadedState(results[0], results[1], manifest.metadata, manifest.step)


def _has_torch(into: Any) -> bool:
    return into is not None and any(
        is_module(target) or is_optimizer(target)
        for target in (_target(into, "model"), _target(into, "optimizer"))
    )


def _load_together(group: ProcessGroup, request: LoadRequest) -> LoadedState:
    """Fill the torch objects of all ranks from one checkpoint, or raise on all ranks.

    No rank changes anything before every rank has checked its targets.
    """

    def agree_on(manifest: Manifest | None, error: BaseException | None, attempt: int) -> bool:
        generation = "" if manifest is None else manifest.generation
        again = False
        can_retry = manifest is not None and attempt < _folder.TRIES - 1
        if can_retry and isinstance(error, FileNotFoundError):
            try:
                again = _folder.is_replaced(request.folder, request.root, generation)
            except MLStateError as other:
                error = other
        return agree(group, generation, error, again=again)

    for attempt in range(_folder.TRIES):
        loader = manifest = None
        error: BaseException | None = None
        targets: list[Any] = []
        ready: list[_Ready] = []
        try:
            manifest = _folder.read_manifest(request.folder, request.root)
            loader = Loader(request, manifest)
            targets = _targets(manifest, request.into, request.folder)
            ready = _prepare_targets(loader, targets)
        except BaseException as caught:
            error = caught
        if not agree_on(manifest, error, attempt):
            continue
        assert loader is not None
        assert manifest is not None
        try:
            for one in ready:
                loader.fill(*one)
        except BaseException as caught:
            error = caught
        if agree_on(manifest, error, attempt):
            return LoadedState(targets[0], targets[1], manifest.metadata, manifest.step)
    raise StoreError(f"the checkpoint was replaced at each of {_folder.TRIES} attempts to load it")


def ranks_of(
    rank: int | None,
    world_size: int | None,
    layout: Layout | str | None,
    group: ProcessGroup | None,
) -> tuple[Steps | None, int, int]:
    """Return the part to load: steps, index, world (0: all of every tensor)."""
    if group is not None:
        check_group(group)
        if rank is not None or world_size is not None:
            raise TypeError("give group= or rank= and world_size=, not both")
        rank, world_size = group.rank, group.world_size
    if (rank is None) != (world_size is None) and not isinstance(layout, Layout):
        raise TypeError("pass rank= and world_size= together, or neither")
    if rank is None:
        if layout is None or layout == "whole":
            return None, 0, 0
        raise TypeError("layout= requires rank= (which part to load)")
    if world_size is None:
        assert isinstance(layout, Layout)
        world_size = layout.parts
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} does not exist")
    steps = steps_of(layout, world_size)
    if steps == ():
        return steps, 0, 0
    if isinstance(layout, Layout) and layout.parts != world_size:
        raise ValueError(f"{layout!r} has {layout.parts} parts for {world_size} ranks")
    return steps, rank, world_size


def _verify_all(folder: str, manifest: Manifest, merged: Any) -> None:
    """Read and verify all files; raise the first problem."""
    from ._verify import verify_files

    _, problems = verify_files(folder, manifest, merged, None)
    if problems:
        raise problems[0].as_error(folder)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    root: str = _folder.MANIFEST,
    _manifest: Manifest | None = None,
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
    storage_options: Mapping[str, Any] | None = None,
) -> LoadedState:
    """Load one root; see `mlstate.load`. `_manifest` is its manifest if already read."""
    folder = checkpoint_folder(path, storage_options)
    if mmap:
        refuse_remote(folder, "mmap=True", "load without it")
    root = _folder.current_root(folder, root)
    cutting = ranks_of(rank, world_size, layout, group)
    listed = None if names is None else listed_names(names)
    if verify not in (True, False, "first"):
        raise ValueError(f"verify must be True, False or 'first', got {verify!r}")
    if missing not in MISSING:
        raise ValueError(f"missing must be one of {', '.join(MISSING)}, got {missing!r}")
    if into is not None:
        _check_into(into)
        if mmap:
            raise ValueError(
                "mmap=True returns views of the files and cannot fill into=: pass only one of them"
            )
    request = LoadRequest(
        folder,
        root,
        listed,
        rank if group is None else group.rank,
        cutting,
        into,
        layout is None and rank is None and world_size is None,
        mmap,
        verify,
        missing,
        progress,
    )
    if group is not None and group.world_size > 1 and _has_torch(into):
        return _load_together(group, request)
    load_root = _load_new_state if into is None else _load_into_targets

    def read(found: Manifest) -> LoadedState:
        return load_root(Loader(request, found))

    return _folder.read_root(folder, root, read, _manifest)


@set_module("mlstate.checkpoint")
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
    storage_options: Mapping[str, Any] | None = None,
) -> LoadedState:
    """
    Load a checkpoint, or any part of it.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of the checkpoint, or of a Hugging Face model (``model.safetensors``, or
        ``model.safetensors.index.json`` with its files); or the URL of a checkpoint in an object
        store.
    names : str or iterable of str, optional
        Tensors to load. Each name is a parameter (selects its optimizer states too), a layer
        (selects everything below it), or one tensor. An exact name wins, even ``"w[0]"``; any
        other string is a glob such as ``"layers.*.weight"``.
    rank, world_size : int, optional
        Load only the part of one rank. Without `layout`, tensors are cut as they were saved,
        for `world_size` ranks; tensors that were saved whole are loaded whole.
    layout : Layout, "rows", "flat" or "whole", optional
        Layout to load, independent of the saved layout. Optimizer states are cut along the same
        axes as their parameter, as far as they have these axes.
    group : ProcessGroup, optional
        Alternative to `rank` and `world_size`. The ranks do not wait for each other, except if
        `into` holds torch modules or optimizers. Then all ranks must call `load`; before
        anything is changed, they check together that every target matches and that all read
        the same checkpoint.
    into : mapping or object, optional
        ``{"model": state, "optimizer": state}``, or an object with these attributes. Existing
        arrays of the right shape and dtype are filled, and no new ones are made. Torch modules
        and optimizers are filled in place, including DDP, FSDP2 and FSDP1 modules. Sharded modules
        know their part of each tensor, so `group`, `rank` and `layout` do not cut for them; a
        given `rank` or `layout` cuts for modules that are not sharded. Optimizer states that do
        not exist yet are created, and the optimizer's groups receive the saved values. A
        section without a target is not loaded. With `names`, the selected names must exist in
        the checkpoint and in `into`; everything else in `into` is unchanged.
    mmap : bool, default False
        Return read-only arrays over memory-mapped files: data is read on first access. Tensors
        whose part spans several shards, or a sparse or compressed one, are assembled in new
        memory.
    verify : bool or "first", default True
        Verify checksums while reading. Mapped arrays are not verified. With ``"first"``, the
        whole checkpoint is read and verified before anything is loaded.
    missing : {"skip", "zeros", "error"}, default "skip"
        How to treat optimizer states that the checkpoint lacks: leave them out, make them
        zeros, or raise. A parameter lacks a state if another parameter has it with that
        parameter's shape. If the saved optimizer lists the parameters that it trains, only
        these are considered. With `into`, states that exist in `into` and were not saved are
        lacking too: ``"skip"`` leaves such arrays unchanged, and removes such states from a
        torch optimizer, which then creates them anew.
    progress, storage_options
        As for `save`.

    Returns
    -------
    LoadedState
        ``model``, ``optimizer``, ``metadata``, ``step``. Each state has the class that was
        saved. Arrays below 4 MiB may be views of shared blocks of 4 to 20 MiB; a block stays
        allocated as long as any of its arrays exists. bfloat16 and 8-bit floats have the dtypes
        that `load_file` returns.

    Raises
    ------
    StoreError
        The operating system refused. Also a `FileNotFoundError` if there is no checkpoint.
    FormatError
        The manifest, an index or a file is malformed, or a part of a tensor was not stored.
    ChecksumError
        Bytes changed since they were written. (A `FormatError`.)
    TensorNotFoundError
        One of `names` matches no tensor. (A `KeyError`.)
    CompatibilityError
        `into` has other names, shapes or dtypes. `into` is unchanged.
    TypeError, ValueError
        A torch object in `into` is refused for one of the reasons of `save`, or arrays of
        `into` are read-only or overlap without being the same array. `into` is unchanged.

    Notes
    -----
    Only the requested byte ranges are read; with verification, all checksummed 1 MiB blocks
    that contain them. Memory is allocated after the files were opened. A checksum mismatch is
    found while reading: `into` then has undefined content, unless ``verify="first"``. If an
    array is in `into` under several names of a section, such as tied weights, it receives the
    value of the last name. Non-contiguous targets are filled last, in their order. If a file is
    truncated while it is mapped, access ends the process (SIGBUS), as with every mapping;
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
        storage_options=storage_options,
    )
