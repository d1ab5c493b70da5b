"""`load` from an index: new arrays, memory with `cast=`, `verify="first"`, `missing=`, all ranks.

load -> LoadRequest        the arguments, checked
-> Loader             a root, and its sections of tensors
-> _load_new_state    new arrays, or
prepare, fill      targets; see _load_targets.py
"""

from __future__ import annotations

import os
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from .._common.arguments import check_flags, is_flag
from .._common.backend import TensorBackend, is_module, torch_backend
from .._common.caller import find_caller
from .._common.converted import converted, is_converted
from .._common.dtypes import numpy_dtype
from .._common.text import names_hint
from .._sharding.layout import Cuts, Cutting
from ..collectives._arguments import optional_group
from ..collectives._consensus import agree
from ..errors import MLStateError, StoreError, TensorNotFoundError
from ._folder.names import SECTIONS
from ._folder.protocol import TensorParts
from ._load_arguments import checked_cast, checked_device, ranks_of
from ._load_targets import ALL_NAMES, check_into, names_error, needs_all_ranks, prepare
from ._loaded_state import LoadedState
from ._options import LOAD_DEFAULTS, complete_options, show_options
from ._quantized.pairs import find_pairs
from ._sections import OPTIMIZER, STATES, rename_sections, sections_of
from ._states.modules import shown_states
from ._states.restore import apply_all, load_tree, undo_all
from ._steps.step_choice import choose_root
from ._store.checkpoint_files import TRIES, CheckpointFiles
from ._store.name_globs import Names, listed_names
from ._store.open_path import RootPath, open_root_path
from ._store.rank_indexes import Indexes
from ._store.weight_files import listed_only_error, warn_of_total, without_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Unpack

    from .. import _core
    from ..collectives import ProcessGroup
    from ._load_targets import Prepared
    from ._load_whole import WholePath
    from ._options import LoadOptions
    from ._quantized.pairs import Pairs
    from ._sections import Section
    from ._states.restore import Action
    from ._store.manifest import Manifest
    from ._store.weight_files import WeightFiles

MISSING = ("skip", "zeros", "error")
_LAYOUT = 6  # index of the layout's steps in a row of `MergedIndex.tensors`
_CAST_BYTES = 64 << 20  # of the tensors that are converted at the same time


# ---- selecting tensors ----


def chosen_names(
    sections: list[list[str]],
    listed: list[str] | None,
    folder: str,
    weights: WeightFiles | None = None,
    is_renamed: bool = False,
) -> tuple[Names, list[list[str]]]:
    """Return the name matcher and, for model and optimizer, the names to load.

    `sections`: all names of both. `listed`: names or globs of the caller, None for all; raises
    TensorNotFoundError for one without a match. `folder`: path for errors. `weights`: of a Hugging
    Face folder. `is_renamed`: the names in `sections` are new ones, which the index of `weights`
    lacks.
    """
    if listed is None:
        return ALL_NAMES, sections
    names = Names(listed, *sections)
    chosen = []
    used: set[str] = set()
    for section, every in enumerate(sections):
        keys, meant = names.select(every, section)
        chosen.append(keys)
        used |= meant
    unused = [name for name in listed if name not in used]
    if unused:
        listed_only = listed_only_error(None if is_renamed else weights, unused[0], folder)
        if listed_only is not None:
            raise listed_only
        hint = names_hint(unused[0], chain.from_iterable(sections))
        hint += "; names= takes the names after rename=" if is_renamed else ""
        error = TensorNotFoundError(f"Tensor {unused[0]!r} not found in checkpoint{hint}")
        error.name, error.path = unused[0], folder
        raise error
    return names, chosen


# ---- loading ----


class LoadRequest(NamedTuple):
    """The arguments of a load, checked; the fields before `options` replace options."""

    files: CheckpointFiles
    root: str  # path in the folder
    names: list[str] | None
    rank: int | None  # its index is preferred if several list the same tensors
    world_size: int | None  # if `rank` is given
    cutting: Cutting  # as `ranks_of` returns it
    by_target: bool  # torch objects determine which part of a tensor they receive
    cast: bool  # to the dtypes of `into`
    dtype: str  # of the floats of a new state; "" for the stored ones
    options: LoadOptions
    choose_again: Callable[[], str] | None = None  # of step="best": returns the root of the best
    written: set[tuple[str, str]] | None = None  # targets that a failed load fills: state and name


class Loader:
    """Loads one root, the manifest of a checkpoint or of a step.

    `sections` are model, optimizer, and the named states with tensors.
    """

    def __init__(self, request: LoadRequest, manifest: Manifest) -> None:
        """Read the indexes that `request` needs and choose the names to load.

        `manifest`: of the root to load. With `verify="first"`, all files are verified here;
        otherwise no tensor is read yet.
        """
        if request.options["rename"] is None:
            manifest = without_missing(request.files.folder, manifest, request.names)
        self.request = request
        self.options = request.options
        self.manifest = manifest
        self.folder = request.files.path
        self.verify = bool(request.options["verify"])
        self.indexes = Indexes(request.files, manifest, request.rank)
        self.sections = sections_of(self.merged_index, manifest)
        self.pairs = self._find_pairs()
        if request.options["rename"] is not None:
            rename_sections(self.sections, request.options["rename"])
        if self.verify:
            warn_of_total(request.files.folder, manifest, self.merged_index)
        if request.options["verify"] == "first":
            self.indexes.read_all()
            _verify_all(request.files, manifest, self.merged_index)
            self.verify = False

    def _find_pairs(self) -> Pairs | None:
        """Return the quantized weights that `cast` decodes, with their scales; None without such.

        The model's codes get the names of their values, and the names of scales are removed.
        """
        if not self.request.dtype or self.manifest.weights is None:
            return None

        def tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
            """Return dtype and shape of each stored tensor, by key."""
            rows = self.merged_index.tensors()
            return {key: (dtype, shape) for _, key, _, _, dtype, shape, *_ in rows}

        pairs = find_pairs(self.request.files.folder, tensors)
        if pairs is not None:
            self.sections[0].replace(pairs.renamed(self.sections[0].names))
        return pairs

    @property
    def merged_index(self) -> _core.MergedIndex:
        """The merged index of the ranks read so far; call `need` before loading."""
        return self.indexes.merged_index

    @property
    def named(self) -> dict[str, Section]:
        """The sections of the named states with tensors, by name; nested values have none."""
        tensors = (name for name, kind in self.states.items() if kind["kind"] != "tree")
        return dict(zip(tensors, self.sections[STATES:], strict=True))

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """Descriptions of the named states."""
        return self.manifest.states or {}

    def chosen(self) -> tuple[Names, list[list[str]]]:
        """Return the name matcher, and the selected names of the model and of the optimizer."""
        names = [section.names for section in self.sections[:STATES]]
        weights, is_renamed = self.manifest.weights, bool(self.request.options["rename"])
        return chosen_names(names, self.request.names, self.folder, weights, is_renamed)

    def need(self, requests: Iterable[tuple[Section, list[str], Cuts]]) -> None:
        """Read the indexes that list the requested parts, given as section, names and cutting."""
        self.indexes.need((each.number, each.keys(names), cuts) for each, names, cuts in requests)

    def load_keys(self, section: int, keys: list[str], cutting: Cutting) -> dict[str, Any]:
        """Read the tensors `keys` into new arrays, by key, and first the indexes that list them."""
        self.indexes.need([(section, keys, cutting)])
        return self._load(section, keys, cutting, mmap=False)

    def _load(
        self, section: int, keys: list[str], cutting: Cutting, *, mmap: bool
    ) -> dict[str, Any]:
        """Read tensors into new arrays, by key; `mmap`: into unverified views of the files."""
        progress, verify = self.options["progress"], self.verify and not mmap
        parts = TensorParts(self.merged_index, section, keys, cutting)
        return self.request.files.folder.load(parts, verify, mmap, progress)

    def dtypes_and_shapes(
        self, section: Section, names: list[str]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of the tensors `names` of a section, by name, after conversion.

        Raises FormatError if the scales of a quantized weight are missing or do not fit.
        """
        label, dtype = SECTIONS[section.number], self.request.dtype
        stored = {
            key: (stored_dtype, shape)
            for section_name, key, _, _, stored_dtype, shape, *_ in self.merged_index.tensors()
            if section_name == label
        }
        by_codes = self.pairs.by_codes if self.pairs is not None and section.number == 0 else {}
        converted_tensors = {}
        for name, key in zip(names, section.keys(names), strict=True):
            result_dtype, shape = stored[key]
            if key in by_codes:
                by_codes[key].check()
                result_dtype, shape = dtype, by_codes[key].shape
            elif dtype and not section.is_optimizer and is_converted(result_dtype, dtype):
                result_dtype = dtype
            converted_tensors[name] = result_dtype, shape
        return converted_tensors

    def load_state(self, section: Section, names: list[str], extra: dict[str, object]) -> Any:
        """Return a new state of the class that was saved, of the tensors `names`.

        `extra`: further arrays to add to it.
        """
        keys = section.keys(names)
        arrays_loaded = self._pair_values(section, keys)
        others = [key for key in keys if key not in arrays_loaded] if arrays_loaded else keys
        for batch, dtype in self._batches(section, others):
            loaded = self._load(
                section.number, batch, self.request.cutting, mmap=self.options["mmap"]
            )
            while loaded:  # frees each array before the next one is converted
                key, array = loaded.popitem()
                arrays_loaded[key] = converted(array, dtype) if dtype else array
        arrays = {name: arrays_loaded[key] for name, key in zip(names, keys, strict=True)} | extra
        if (device := self.options["device"]) is not None:
            tensors = torch_backend("tensors on a device=", TensorBackend).tensors_of(arrays)
            arrays = {name: each.to(device) for name, each in tensors.items()}
        return section.restore(arrays, self.folder)

    def _pair_values(self, section: Section, keys: list[str]) -> dict[str, Any]:
        """Return the values of those `keys` of a section that are quantized.

        Each key is of the codes, the stored numbers that scales multiply. Raises FormatError if the
        scales are missing or do not fit.
        """
        if self.pairs is None or section.number != 0:
            return {}
        chosen = [pair for key in keys if (pair := self.pairs.by_codes.get(key)) is not None]
        for pair in chosen:
            pair.check()

        def read(key: str, cutting: Cutting) -> Any:
            return self._load(section.number, [key], cutting, mmap=False)[key]

        cutting, dtype = self.request.cutting, self.request.dtype
        return {pair.codes: pair.load(read, cutting, dtype) for pair in chosen}

    def _batches(self, section: Section, keys: list[str]) -> list[tuple[list[str], str]]:
        """Return batches of keys to load at the same time, each with a dtype to convert to, or "".

        A batch to convert has one tensor, or tensors of few bytes. Optimizers keep their dtypes:
        their states are more precise than the weights, and count steps.
        """
        dtype = "" if section.is_optimizer else self.request.dtype
        if not dtype:
            return [(keys, "")]
        sizes: dict[str, int] = {}
        for section_name, key, _, _, stored, shape, *_ in self.merged_index.tensors():
            if section_name == SECTIONS[section.number] and is_converted(stored, dtype):
                sizes[key] = prod(shape) * numpy_dtype(stored).itemsize
        batches: list[tuple[list[str], str]] = [([key for key in keys if key not in sizes], "")]
        room = 0
        for key in filter(sizes.__contains__, keys):
            if len(batches) == 1 or sizes[key] > room:
                batches.append(([], dtype))
                room = _CAST_BYTES
            batches[-1][0].append(key)
            room -= sizes[key]
        return batches

    def lacking(self, names: list[list[str]]) -> dict[str, tuple[str, str]]:
        """Return the optimizer states that the checkpoint lacks: {key: (parameter, existing key)}.

        A parameter lacks a state if another parameter has it, with that parameter's shape. The
        existing key is of such a state. `names`: the loaded names of model and optimizer. If the
        saved optimizer lists the parameters that it trains, only these are considered.
        """
        saved = self.sections[OPTIMIZER].restore({}, self.folder)
        groups = getattr(saved, "param_groups", ())
        trained = {str(name) for group in groups for name in group.get("params", ())}
        chosen = set(names[OPTIMIZER])
        names_by_key = [section.names_by_key() for section in self.sections[:STATES]]
        shapes: dict[str, tuple[int, ...]] = {}
        states: dict[str, str] = {}
        for section, key, _, state, _, shape, _, axes, *_ in self.merged_index.tensors():
            if section == "params" and key in names_by_key[0]:  # not a scale of quantized weights
                shapes[names_by_key[0][key]] = shape
            elif section == "optim_state" and state and axes is None:
                name = names_by_key[OPTIMIZER][key]
                if name in chosen and shapes.get(name.rpartition(".")[0]) == shape:
                    states.setdefault(state, name)
        parameters = [name for name in names[0] if shapes[name]]
        # all of them, if the saved optimizer lists none of these
        parameters = [name for name in parameters if name in trained] or parameters
        return {
            f"{name}.{state}": (name, like)
            for name in parameters
            for state, like in states.items()
            if f"{name}.{state}" not in chosen
        }

    def refuse_lacking(self, names: list[list[str]]) -> None:
        """With ``missing="error"``, raise if the checkpoint lacks optimizer states."""
        lacking = list(self.lacking(names)) if self.options["missing"] == "error" else []
        if lacking:
            raise names_error(lacking, [], [], self.folder)

    def zeros(self, names: list[list[str]], parameters: Any) -> dict[str, Any]:
        """Return zeros for the optimizer states that parameters lack, by key.

        `names`: the loaded ones of model and optimizer. `parameters`: the loaded model, for shapes.
        """
        import numpy as np

        shapes = {name: tuple(parameters[name].shape) for name in names[0]}
        dtypes = {}
        by_key = self.sections[OPTIMIZER].names_by_key()
        for section, key, _, _, dtype, *_ in self.merged_index.tensors():
            if section == "optim_state":
                dtypes[by_key[key]] = numpy_dtype(dtype)
        return {
            key: np.zeros(shapes[name], dtypes[like])
            for key, (name, like) in self.lacking(names).items()
        }


def _load_into_targets(request: LoadRequest, manifest: Manifest) -> LoadedState:
    """Check the targets of ``into``, fill and return them.

    `manifest`: of the root of `request`. After an error while arrays are filled, objects get their
    old states back, but the content of the arrays is undefined.
    """
    loader = Loader(request, manifest)
    prepared = prepare(loader)
    apply_all(prepared.actions)
    try:
        prepared.fill(loader)
    except BaseException as error:
        undo_all(prepared.actions, error)
        raise
    return _result(loader, prepared)


def _result(loader: Loader, prepared: Prepared) -> LoadedState:
    manifest = loader.manifest
    return LoadedState(
        prepared.model, prepared.optimizer, manifest.metadata, manifest.step, prepared.states
    )


def expects_parts(options: LoadOptions) -> bool:
    """Return whether a caller asks for one rank's part as it was saved, so without a layout."""
    if options["rank"] is None or options["world_size"] == 1 or options["layout"] is not None:
        return False
    return options["into"] is None and options["group"] is None


def warn_of_whole_tensors(options: LoadOptions, path: str) -> None:
    """Warn a caller who expects parts: all tensors were saved whole."""
    find_caller().warn(
        f"{path}: no tensor was saved in parts, so rank {options['rank']} of "
        f"{options['world_size']} gets all of each tensor: pass layout='rows' or another layout "
        "for a part of each, or layout='whole' for all without this warning"
    )


def _is_whole(loader: Loader) -> bool:
    """Return whether a checkpoint has tensors, and each rank saved all of them and equal states."""
    if any("ranks" in kind for kind in loader.states.values()):
        return False
    layouts = [
        each[_LAYOUT] for each in loader.merged_index.tensors() if each[0] in SECTIONS[:STATES]
    ]
    return bool(layouts) and not any(layouts)


def _load_new_state(request: LoadRequest, manifest: Manifest) -> LoadedState:
    """Load the requested tensors into new arrays or, with ``mmap``, as views of the files.

    Named states are loaded unless the request has names. Warns a caller who asks for one rank's
    part if all tensors were saved whole.
    """
    loader = Loader(request, manifest)
    manifest = loader.manifest
    if expects_parts(request.options) and _is_whole(loader):
        warn_of_whole_tensors(request.options, loader.folder)
    _, chosen = loader.chosen()
    loader.refuse_lacking(chosen)
    named = {} if request.names is not None else loader.named
    selections = [*zip(loader.sections, chosen, strict=False)]
    selections += [(section, section.names) for section in named.values()]
    loader.need(
        (each, names, request.cutting) for each, names in selections if each.kind is not None
    )
    results: list[Any] = []
    has_zeros = loader.options["missing"] == "zeros"
    for section, names in selections:
        extra: dict[str, Any] = {}
        if section.number == OPTIMIZER and has_zeros and results[0] is not None:
            extra = loader.zeros(chosen, results[0])
        state = loader.load_state(section, names, extra) if section.kind is not None else None
        results.append(state)
    states: dict[str, Any] = dict(zip(named, results[STATES:], strict=True))
    if request.names is None and loader.states:
        for name, kind in loader.states.items():
            if kind["kind"] == "tree":
                states[name] = load_tree(loader, name, kind)
        states = shown_states({name: states[name] for name in loader.states})
    return LoadedState(results[0], results[1], manifest.metadata, manifest.step, states)


def _load_together(group: ProcessGroup, request: LoadRequest) -> LoadedState:
    """Fill the torch objects and named states of all ranks and return them, or raise on all ranks.

    No rank changes anything before every rank has checked its targets. If an object of one rank
    refuses its state, every rank undoes its changes. All begin again if the checkpoint is replaced,
    or if the best step is deleted or differs between ranks, and raise StoreError if that happens
    `TRIES` times.
    """
    root, choose_again = request.root, request.choose_again

    def agree_on(manifest: Manifest | None, error: BaseException | None, attempt: int) -> bool:
        """Return whether all ranks read the same checkpoint; False: all open it again.

        `manifest`, `error`: of this rank, or None. `attempt`: from 0; with `TRIES`, no other
        follows. Raises on all ranks if one has an error that a newer manifest does not explain.
        """
        generation = "" if manifest is None else manifest.generation
        again = False
        if attempt < TRIES - 1 and isinstance(error, FileNotFoundError):
            try:
                if choose_again is not None and not request.files.folder.exists(root):
                    again = True  # by the retention of a manager
                elif manifest is not None:
                    again = request.files.is_replaced(root, generation)
            except MLStateError as other:
                error = other
        return agree(group, generation, error, again=again)

    applied: list[Action] = []
    for attempt in range(TRIES):
        loader = manifest = prepared = None
        error: BaseException | None = None
        try:
            undo_all(applied, StoreError("the checkpoint was replaced"))  # of the last attempt
            applied = []
            root = choose_again() if attempt > 0 and choose_again is not None else root
            manifest = request.files.read_manifest(root)
            loader = Loader(request, manifest)
            prepared = prepare(loader)
        except BaseException as caught:
            error = caught
        if not agree_on(manifest, error, attempt):
            continue
        assert loader is not None
        assert prepared is not None
        try:
            apply_all(prepared.actions)
            applied = prepared.actions
        except BaseException as caught:
            error = caught
        try:
            agree_on(manifest, error, TRIES)  # raises if a rank failed
            try:
                prepared.fill(loader)
            except BaseException as caught:
                error = caught
            if agree_on(manifest, error, attempt):
                return _result(loader, prepared)
        except BaseException as caught:
            undo_all(applied, caught)
            raise
    raise StoreError(f"the checkpoint was replaced at each of {TRIES} attempts to load it")


def _verify_all(files: CheckpointFiles, manifest: Manifest, merged: _core.MergedIndex) -> None:
    """Read and verify all files; raise the first problem."""
    from ._verify import verify_files

    _, problems = verify_files(files, manifest, merged, None)
    if problems:
        raise problems[0].as_error(files.path)


def find_whole(
    path: object, files: CheckpointFiles, error: StoreError | None = None
) -> WholePath | None:
    """Return the path of another program's file or folder that is read whole, else None.

    `error`: why it is not a checkpoint; raised if it is not of another program either. Folders are
    looked at only after such an error.
    """
    if not isinstance(path, RootPath) and (error is not None or files.folder.file):
        from ._load_whole import whole_path

        foreign = whole_path(files.folder)
        if foreign is not None:
            return foreign
    if error is not None:
        raise error
    return None


def _check_request(
    path: str | os.PathLike[str],
    step: int | str | None,
    monitor: str | None,
    mode: str | None,
    options: LoadOptions,
) -> tuple[LoadRequest, Manifest | None]:
    """Check the arguments of a load; return the request, and the manifest if it is read already.

    That is so if `path` is a `RootPath` with a manifest, and no step is chosen. Otherwise it is
    None, and the caller replaces the root of the request by the one that `open_root` finds. `step`,
    `monitor`, `mode`: which step to load. Replaces ``into``, ``names`` and ``device`` in `options`
    by their checked forms: a module that is ``into`` becomes its model. Raises TypeError or
    ValueError for arguments that do not fit one another.
    """
    if is_module(options["into"]):
        options["into"] = {"model": options["into"]}
    into, mmap = options["into"], options["mmap"]
    verify, missing = options["verify"], options["missing"]
    rank, world_size, layout = options["rank"], options["world_size"], options["layout"]
    check_flags(mmap=mmap, strict=options["strict"])
    group = optional_group(options["group"])
    cast, dtype = checked_cast(options["cast"], into, mmap=mmap)
    files, root, manifest, written, _ = open_root_path(path, options["storage_options"])
    if mmap:
        files.folder.require_local("mmap=True", "load without it")
    cutting = ranks_of(rank, world_size, layout, group)
    names = options["names"] = listed_names(options["names"])  # an iterator is read once
    if not is_flag(verify) and not (isinstance(verify, str) and verify == "first"):
        raise ValueError(f"verify must be True, False or 'first', got {verify!r}")
    files = files if verify else CheckpointFiles(files.folder, checked=False)
    if not isinstance(missing, str) or missing not in MISSING:
        raise ValueError(f"missing must be one of {', '.join(MISSING)}, got {missing!r}")
    options["device"] = checked_device(options["device"], mmap=mmap)
    if into is not None:
        check_into(into)
        if mmap:
            raise ValueError(
                "mmap=True returns views of the files and cannot fill into=: pass only one of them"
            )
    choose_again = None
    if (step, monitor, mode) != (None, None, None):
        choose = partial(choose_root, files, root, step, monitor, mode)
        root, manifest = choose(), None
        choose_again = choose if step == "best" else None
    # by the user's arguments: `group` sets rank and world size later
    by_target = layout is None and rank is None and world_size is None
    if group is not None:
        rank, world_size = group.rank, group.world_size
    request = LoadRequest(
        files=files,
        root=root,
        names=names,
        rank=rank,
        world_size=world_size,
        cutting=cutting,
        by_target=by_target,
        cast=cast,
        dtype=dtype,
        options=options,
        choose_again=choose_again,
        written=set() if written is None else written,
    )
    return request, manifest


def open_loader(root_path: RootPath, options: LoadOptions) -> Loader:
    """Return a loader of all tensors of a root, for a caller that reads one after the other."""
    options = complete_options(load, options, LOAD_DEFAULTS)
    request, manifest = _check_request(root_path, None, None, None, options)
    if manifest is None:
        manifest = request.files.read_manifest(request.root)
    return Loader(request, manifest)


@show_options(LOAD_DEFAULTS)
def load(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    monitor: str | None = None,
    mode: str | None = None,
    **options: Unpack[LoadOptions],
) -> LoadedState:
    """
    Load a checkpoint, or any part of it.

    Parameters
    ----------
    path : str or os.PathLike
        Folder of the checkpoint, or of a Hugging Face model (``model.safetensors``, or
        ``model.safetensors.index.json`` with its files, or the names of PEFT, diffusers and
        Mistral); or one ``.safetensors`` file or index; or the URL of one of these in an object
        store. An index that differs from the headers of its files causes a warning. Or the path of
        a file ``.safetensors``, ``.npz``, ``.pt`` (weights only: no code of it runs) or ``.ckpt``,
        or of a folder of torch.distributed.checkpoint. All but the first are read whole; ``mmap``,
        ``missing``, ``verify="first"`` and torch optimizers in ``into`` are refused for these.
    step : int, "latest" or "best", optional
        The step of a run, the folder of a `CheckpointManager`. Default: the newest.
    monitor : str, optional
        With ``step="best"``: the key of the metric in the metadata of the steps.
    mode : {"min", "max"}, optional
        With ``step="best"``: whether the smallest or the largest value of `monitor` is best.
        Default: the smallest.
    names : str or iterable of str, optional
        Tensors to load. Each name is a parameter (selects its optimizer states too), a layer
        (selects everything below it), or one tensor. An exact name wins, even ``"w[0]"``; any other
        string is a glob such as ``"layers.*.weight"``.
    rank, world_size : int, optional
        Load only the part of one rank. Without `layout`, tensors are cut as they were saved, for
        `world_size` ranks; tensors that were saved whole are loaded whole, with a
        `CheckpointWarning` if none was saved in parts.
    layout : Layout or str, optional
        Layout to load, independent of the saved layout. Optimizer states are cut along the same
        axes as their parameter, as far as they have these axes.
    group : ProcessGroup, optional
        Alternative to `rank` and `world_size`. The ranks do not wait for each other, except if
        `into` holds torch modules or optimizers. Then all ranks must call `load`; before anything
        is changed, they check together that every target matches and that all read the same
        checkpoint.
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
        Return read-only arrays over memory-mapped files: data is read on first access. Tensors
        whose part spans several shards, or a sparse or compressed one, are assembled in new memory.
    verify : bool or "first", default True
        Verify checksums while reading. Mapped arrays are not verified. With ``"first"``, the whole
        checkpoint is read and verified before anything is loaded.
    missing : {"skip", "zeros", "error"}, default "skip"
        How to treat optimizer states that the checkpoint lacks: leave them out, make them zeros, or
        raise. A parameter lacks a state if another parameter has it with that parameter's shape. If
        the saved optimizer lists the parameters that it trains, only these are considered. With
        `into`, states that exist in `into` and were not saved are lacking too: ``"skip"`` leaves
        such arrays unchanged, and removes such states from a torch optimizer, which then creates
        them anew.
    strict : bool, default True
        Require the same names in the checkpoint and in each target of `into`. If False, fill only
        the tensors that both have. A shape mismatch always raises.
    cast : bool or dtype, default False
        With True, convert between float16, bfloat16, float32 and float64 if a target of `into` has
        another dtype, rounding to nearest. This needs memory for these tensors. With one of these
        four dtypes, of NumPy, ml_dtypes or torch, or its name, return the floating-point tensors of
        the model, and of named states that are modules or dicts of tensors alone, in this dtype.
        8-bit floats are converted by their values. If the ``config.json`` of a Hugging Face folder
        has a ``quantization_config``, the result has the values of weights with scales instead of
        both: of the methods fp8, mxfp4, and compressed-tensors with 8-bit floats. Integers, bool
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
        The manifest, an index or a file is malformed, or a part of a tensor was not stored. With a
        dtype as `cast`, the scales of a quantized weight are missing or have a wrong shape.
    ChecksumError
        Bytes changed since they were written. (A `FormatError`.)
    TensorNotFoundError
        One of `names` matches no tensor. (A `KeyError`.)
    CompatibilityError
        `into` has other names, shapes or dtypes, or an object refuses its state; or two names would
        become the same by `rename`; or an object of `into` has two names with different values in
        the checkpoint. `into` is unchanged. With a dtype as `cast`, a Hugging Face
        folder is quantized by a method whose values mlstate cannot compute.
    TypeError, ValueError
        A torch object in `into` is refused for one of the reasons of `save`, or arrays of `into`
        are read-only or overlap without being the same array. `into` is unchanged.
    MLStateError
        A device failed during the copy to a tensor of `into` on it; the message names the tensor.
        The content of `into` is then undefined, also with ``verify="first"``.

    Notes
    -----
    Only the requested byte ranges are read; with verification, all checksummed 1 MiB blocks
    that contain them. Memory is allocated after the files were opened. A checksum mismatch is
    found while reading: `into` then has undefined content, unless ``verify="first"``. If an
    array is in `into` under several names of a section, such as tied weights, it receives the
    value of the last name. Non-contiguous targets are filled last, in their order. Objects
    without ``state_dict()`` are restored after all others, as this cannot be undone. If a file is
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
    options = complete_options(load, options, LOAD_DEFAULTS)
    try:
        return _load_step(path, step, monitor, mode, options)
    except FileNotFoundError:
        if step != "best" or options["group"] is not None:
            raise
    # the retention of a manager may delete the best step between the choice and the reading
    return _load_step(path, step, monitor, mode, options)


def _load_step(
    path: str | os.PathLike[str],
    step: int | str | None,
    monitor: str | None,
    mode: str | None,
    options: LoadOptions,
) -> LoadedState:
    """Load a step, as `load` describes it; all `options` are present.

    Files of other programs without an index are read whole. Torch targets of a group are filled by
    all ranks together.
    """
    request, manifest = _check_request(path, step, monitor, mode, options)
    files, root, into = request.files, request.root, options["into"]
    group = optional_group(options["group"])
    is_together = group is not None and group.world_size > 1 and needs_all_ranks(into)
    # The ranks open the best step together: one that finds it deleted must not raise alone.
    if manifest is None and not (is_together and request.choose_again):
        foreign = find_whole(path, files)
        if foreign is None:
            try:
                root, manifest = files.open_root(root)
            except StoreError as error:
                foreign = find_whole(path, files, error)
        if foreign is not None:
            from ._load_whole import load_whole

            return load_whole(foreign, request)
        request = request._replace(root=root)
    if group is not None and is_together:
        return _load_together(group, request)
    load_root = _load_new_state if into is None else _load_into_targets
    return files.read_root(root, partial(load_root, request), manifest)
