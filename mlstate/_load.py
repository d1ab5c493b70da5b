"""Loading a sharded checkpoint; public through `mlstate.checkpoint`."""

from __future__ import annotations

import os
import re
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from . import _core, _folder
from ._agreement import agree
from ._collective_args import check_group
from ._compatibility import SHOWN, join, rename_hint
from ._indexes import Indexes
from ._layout import Layout, Steps, steps_of
from ._names import Names, listed_names
from ._optimizer_state import OptimizerStateDict
from ._path import local_folder
from ._set_module import set_module
from ._state_kind import restore_kind
from ._text import names_hint
from .errors import (
    CompatibilityError,
    MLStateError,
    StoreError,
    TensorNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ._manifest import Manifest
    from ._state_dict import StateDict
    from .collectives import ProcessGroup

    _Ready: TypeAlias = tuple[int, Any, list[str], Any]  # section, filling, keys, cuts

_NUMBERED = re.compile(r"param_\d+\.", re.ASCII)  # of an optimizer that was saved by itself
MISSING = ("skip", "zeros", "error")


@set_module("mlstate.checkpoint")
class LoadedState:
    """What a checkpoint gave.

    Attributes
    ----------
    model : ModelStateDict, StateDict or None
        The model's arrays; None where none were saved. What was given as ``into["model"]``
        where there was that.
    optimizer : OptimizerStateDict, StateDict or None
        The same for the optimizer.
    metadata : dict
        What was saved, as JSON has it: tuples are lists there, and keys of dicts texts.
    step : int or None
        As it was saved.

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
                return f"<{type(state).__name__}: filled>"  # a module's length counts modules
            count = len(state)
            return f"<{type(state).__name__}: {count} tensor{'s' if count != 1 else ''}>"

        return (
            f"LoadedState(model={shown(self.model)}, optimizer={shown(self.optimizer)}, "
            f"metadata={self.metadata!r}, step={self.step})"
        )

    def _repr_html_(self) -> str:
        from ._checkpoint_html import loaded_html

        return loaded_html(self)


# ---- which tensors ----


def chosen_keys(
    catalog: Any, listed: list[str] | None, folder: str
) -> tuple[Names, list[list[str]]]:
    """Return how names are meant, and the keys of both sections that they mean."""
    sections = [catalog.keys(section) for section in (0, 1)]
    names = Names(listed, *sections)
    chosen = []
    used: set[str] = set()
    for section, every in enumerate(sections):
        keys, meant = names.select(every, section)
        chosen.append(keys)
        used |= meant
    unused = [name for name in listed or () if name not in used]
    if unused:
        hint = names_hint(unused[0], chain.from_iterable(sections))
        error = TensorNotFoundError(f"Tensor {unused[0]!r} not found in checkpoint{hint}")
        error.name, error.path = unused[0], folder
        raise error
    return names, chosen


# ---- where to ----


def _target(into: Any, name: str) -> Any:
    """The part of `into` that one section goes to."""
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


class _Filling:
    """Arrays of the caller that one section is read into."""

    optional: frozenset[str] = frozenset()  # names that a checkpoint need not have

    def __init__(self, target: Any) -> None:
        torch = sys.modules.get("torch")
        self.tensors: list[Any] = []
        arrays = dict(target)
        if torch is not None:
            self.tensors = [v for v in arrays.values() if isinstance(v, torch.Tensor)]
            if self.tensors:
                from .integrations.torch import arrays_of

                arrays = arrays_of(arrays)
        self.arrays = arrays
        self.known = arrays.keys()
        self.zeros: list[str] = []

    def zero(self, name: str) -> None:
        self.zeros.append(name)

    def done(self) -> None:
        for name in self.zeros:
            self.arrays[name][...] = 0
        if self.tensors:
            from .integrations.torch._memory import note_written

            note_written(self.tensors)


def _refuse(
    missing: list[str], unexpected: list[str], unfilled: list[str], path: str
) -> CompatibilityError:
    """Say in torch's words which names do not go together, and what may have been meant."""
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


class Loader:
    """How one load goes; everything about it but the section."""

    def __init__(
        self,
        folder: str,
        manifest: Manifest,
        *,
        cutting: tuple[Steps | None, int, int],
        own: bool,
        mmap: bool,
        verify: bool,
        missing: str,
        progress: Callable[[int], object] | None,
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.indexes: Indexes
        self.cutting = cutting
        self.own = own  # torch's objects know themselves which parts they have
        self.mmap = mmap
        self.verify = verify
        self.missing = missing
        self.progress = progress

    @property
    def catalog(self) -> Any:
        """What was read of the indexes; `Indexes.need` comes before anything is loaded."""
        return self.indexes.catalog

    def fresh(self, section: int, keys: list[str], *, whole: bool = False) -> dict[str, Any]:
        """New arrays, or views of the files."""
        cutting = (None, 0, 0) if whole else self.cutting
        self.indexes.need([(section, keys, cutting)])
        return self.catalog.load(  # type: ignore[no-any-return]
            self.folder,
            section,
            keys,
            cutting,
            self.verify and not self.mmap,
            self.mmap,
            self.progress,
        )

    def names_fit(self, section: int, keys: list[str], filling: Any, names: Names) -> list[str]:
        """Return the keys to read into a filling; refuse other names.

        Names that were asked for are meant on both sides: each must arrive, and be filled.
        """
        have = set(keys)
        known = filling.known
        unfilled = [name for name in known if name not in have and name not in filling.optional]
        lacking, _ = names.select(unfilled, section)
        unexpected = [name for name in keys if name not in known]
        lenient = section == 1 and self.missing != "error"
        if unexpected or (lacking and not lenient):
            raise _refuse([] if lenient else lacking, unexpected, unfilled, self.folder)
        if self.missing == "zeros":
            for name in lacking:
                filling.zero(name)
        return [name for name in keys if name in filling.arrays]

    def shape_of(
        self, shape: tuple[int, ...], layout: Steps, axes: tuple[int | None, ...] | None
    ) -> tuple[int, ...]:
        """Return the shape of what goes into memory that does not say which part it is."""
        steps, index, world = self.cutting
        if self.own or (steps is None and (world == 0 or len(layout) != 1)):
            return shape
        if steps is None:
            steps = ((layout[0][0], world),)
        else:
            steps, index = _core.layout_project(steps, index, len(shape), axes)
        return Layout._of(steps).shape(shape, index)

    def cuts(self, filling: Any, keys: list[str]) -> Any:
        """What the core is to know of how tensors are cut: all alike, or each for itself."""
        if isinstance(filling, _Filling):
            return self.cutting
        if self.own:
            return filling.cuts(keys)
        filling.whole()
        return self.cutting

    def check(self, section: int, filling: Any, keys: list[str], cuts: Any) -> None:
        """Refuse what `fill` would, before anything is changed."""
        self.catalog.fits(self.folder, section, keys, cuts, filling.arrays)

    def fill(self, section: int, filling: Any, keys: list[str], cuts: Any) -> None:
        """Read into arrays; shapes and dtypes are checked before the first byte is written."""
        self.catalog.load_into(
            self.folder, section, keys, cuts, filling.arrays, self.verify, self.progress
        )
        filling.done()

    def lacking(self, keys: list[list[str]]) -> dict[str, tuple[str, str]]:
        """States of their parameter's shape that others have: that parameter, and such a one.

        `keys` are those of both sections that are loaded. Of a torch optimizer, what it does
        not train needs no states.
        """
        saved = _restore(self.manifest.optimizer, {}, self.folder)
        groups = getattr(saved, "param_groups", ())
        trained = {str(name) for group in groups for name in group.get("params", ())}
        chosen = set(keys[1])
        shapes: dict[str, tuple[int, ...]] = {}
        states: dict[str, str] = {}
        for section, key, parameter, state, _, shape, _, axes, *_ in self.catalog.tensors():
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
        """With ``missing="error"``, say which states the checkpoint lacks."""
        lacking = list(self.lacking(keys)) if self.missing == "error" else []
        if lacking:
            raise _refuse(lacking, [], [], self.folder)

    def add_zeros(self, keys: list[list[str]], parameters: Any, arrays: dict[str, Any]) -> None:
        """Give parameters the states that they lack, as zeros."""
        import numpy as np

        for key, (name, like) in self.lacking(keys).items():
            arrays[key] = np.zeros(parameters[name].shape, arrays[like].dtype)


def _restore(kind: dict[str, Any] | None, arrays: dict[str, Any], path: str) -> StateDict | None:
    return None if kind is None else restore_kind(arrays, kind, path)


def _is_module(target: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.nn.Module)


def _is_optimizer(target: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.optim.Optimizer)


def _numbered(loader: Loader, keys: list[str], optimizer: Any, module: Any) -> bool:
    """Whether an optimizer's states go by the order of its parameters, and not by names."""
    every = loader.catalog.keys(1)
    if every and all(map(_NUMBERED.match, every)):
        # then that order is what torch goes by too
        return module is not None or any("param_names" in g for g in optimizer.param_groups)
    if keys and module is None and not all("param_names" in g for g in optimizer.param_groups):
        raise CompatibilityError(
            f"{loader.folder} has the optimizer's states by names of parameters, such as "
            f"{keys[0]!r}: give the module too, "
            "into={'model': module, 'optimizer': optimizer}"
        )
    return False


def _optimizer_filling(
    loader: Loader, keys: list[str], optimizer: Any, module: Any, chosen_names: Names
) -> Any:
    """Where a torch optimizer has its states; those that it has not yet are made."""
    from .integrations.torch._training import OptimizerFilling, Record

    chosen = set(keys)
    found = loader.catalog.tensors()
    records = {
        key: Record(parameter, state, loader.shape_of(shape, layout, axes), dtype, axes)
        for section, key, parameter, state, dtype, shape, layout, axes, *_ in found
        if section == "optim_state" and key in chosen
    }
    names = module
    if _numbered(loader, keys, optimizer, module):
        names = [f"param_{i}" for i in range(sum(len(g["params"]) for g in optimizer.param_groups))]

    def read(wanted: list[str]) -> dict[str, Any]:
        return loader.fresh(1, wanted, whole=True)

    saved: Any = _restore(loader.manifest.optimizer, {}, loader.folder)
    if not hasattr(saved, "param_groups"):  # it was saved as a plain dict
        saved = OptimizerStateDict()

    def meant(others: list[str]) -> list[str]:
        return chosen_names.select(others, 1)[0]

    return OptimizerFilling(optimizer, module, records, saved, read, names, meant)


def _fillings(loader: Loader, listed: list[str] | None, targets: list[Any]) -> list[_Ready]:
    """What is to be filled: section, filling, keys, cuts; an error for what does not fit."""
    ready: list[_Ready] = []
    names, keys = chosen_keys(loader.catalog, listed, loader.folder)
    module = targets[0] if _is_module(targets[0]) else None
    for section, target in enumerate(targets):
        if target is None:
            continue
        filling: Any
        if module is not None and target is module:
            from .integrations.torch._training import fill_module

            filling = fill_module(module)
        elif _is_optimizer(target):
            filling = _optimizer_filling(loader, keys[section], target, module, names)
        else:
            filling = _Filling(target)
        chosen = loader.names_fit(section, keys[section], filling, names)
        ready.append((section, filling, chosen, loader.cuts(filling, chosen)))
    if targets[1] is not None:
        loader.refuse_lacking(keys)
    loader.indexes.need((section, chosen, cuts) for section, _, chosen, cuts in ready)
    for section, filling, chosen, cuts in ready:
        loader.check(section, filling, chosen, cuts)
    return _once(ready)


def _once(ready: list[_Ready]) -> list[_Ready]:
    """Leave out what shares its memory with a later key: all are filled at the same time."""
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
    """Where the two sections go; an error for one that was not saved."""
    found: list[Any] = []
    for name, kind in (("model", manifest.model), ("optimizer", manifest.optimizer)):
        found.append(_target(into, name))
        if found[-1] is not None and kind is None:
            lacking = CompatibilityError(f"{folder} holds no {name}")
            lacking.path = folder
            raise lacking
    return found


def _one_load(loader: Loader, listed: list[str] | None, into: Any) -> LoadedState:
    manifest = loader.manifest
    if into is not None:
        targets = _targets(manifest, into, loader.folder)
        for one in _fillings(loader, listed, targets):
            loader.fill(*one)
        return LoadedState(targets[0], targets[1], manifest.metadata, manifest.step)
    _, chosen = chosen_keys(loader.catalog, listed, loader.folder)
    loader.refuse_lacking(chosen)
    results: list[Any] = [None, None]
    kinds = (manifest.model, manifest.optimizer)
    loader.indexes.need(
        (section, chosen[section], loader.cutting)
        for section, kind in enumerate(kinds)
        if kind is not None
    )
    for section, kind in enumerate(kinds):
        if kind is None:
            continue
        arrays = loader.fresh(section, chosen[section])
        if section == 1 and loader.missing == "zeros" and results[0] is not None:
            loader.add_zeros(chosen, results[0], arrays)
        results[section] = _restore(kind, arrays, loader.folder)
    return LoadedState(results[0], results[1], manifest.metadata, manifest.step)


def _has_torch(into: Any) -> bool:
    return into is not None and any(
        _is_module(target) or _is_optimizer(target)
        for target in (_target(into, "model"), _target(into, "optimizer"))
    )


def _load_together(
    group: ProcessGroup,
    make: Callable[[Manifest], Loader],
    open_first: Callable[[Loader], None],
    folder: str,
    root: str,
    listed: list[str] | None,
    into: Any,
) -> LoadedState:
    """Fill torch's objects of all ranks from one checkpoint, or say on all why not.

    Nothing is changed on any rank before all have found that everything fits.
    """

    def tell(loader: Loader | None, error: BaseException | None, attempt: int) -> bool:
        generation = "" if loader is None else loader.manifest.generation
        again = False
        can_retry = loader is not None and attempt < _folder.TRIES - 1
        if can_retry and isinstance(error, FileNotFoundError):
            try:
                again = _folder.is_replaced(folder, root, generation)
            except MLStateError as other:
                error = other
        return agree(group, generation, error, again=again)

    for attempt in range(_folder.TRIES):
        loader = None
        error: BaseException | None = None
        targets: list[Any] = []
        ready: list[_Ready] = []
        try:
            loader = make(_folder.read_manifest(folder, root))
            open_first(loader)
            targets = _targets(loader.manifest, into, loader.folder)
            ready = _fillings(loader, listed, targets)
        except BaseException as caught:
            error = caught
        if not tell(loader, error, attempt):
            continue
        assert loader is not None
        try:
            for one in ready:
                loader.fill(*one)
        except BaseException as caught:
            error = caught
        if tell(loader, error, attempt):
            manifest = loader.manifest
            return LoadedState(targets[0], targets[1], manifest.metadata, manifest.step)
    raise StoreError(f"the checkpoint was replaced at each of {_folder.TRIES} attempts to load it")


def ranks_of(
    rank: int | None,
    world_size: int | None,
    layout: Layout | str | None,
    group: ProcessGroup | None,
) -> tuple[Steps | None, int, int]:
    """Which part is wanted: steps, index, world (0: all of everything)."""
    if group is not None:
        check_group(group)
        if rank is not None or world_size is not None:
            raise TypeError("give group= or rank= and world_size=, not both")
        rank, world_size = group.rank, group.world_size
    if (rank is None) != (world_size is None) and not isinstance(layout, Layout):
        raise TypeError("rank= and world_size= go together")
    if rank is None:
        if layout is None or layout == "whole":
            return None, 0, 0
        raise TypeError("layout= says how to cut: say by rank= which part is wanted")
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


def _verified_first(folder: str, manifest: Manifest, catalog: Any) -> None:
    """Look at everything before anything is touched."""
    from ._verify import Problem

    _, problems = catalog.verify(folder, None)
    if problems:
        raise Problem(*problems[0]).as_error(folder)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    root: str = _folder.MANIFEST,
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
    """Load one root; see `mlstate.load`."""
    folder = local_folder(path)
    steps, index, world = ranks_of(rank, world_size, layout, group)
    listed = listed_names(names)
    if verify not in (True, False, "first"):
        raise ValueError(f"verify must be True, False or 'first', got {verify!r}")
    if missing not in MISSING:
        raise ValueError(f"missing must be one of {', '.join(MISSING)}, got {missing!r}")
    if into is not None:
        _check_into(into)
        if mmap:
            raise ValueError("mmap=True makes views of the files: it cannot fill into=")
    own = layout is None and rank is None and world_size is None

    def make(manifest: Manifest) -> Loader:
        return Loader(
            folder,
            manifest,
            cutting=(steps, index, world),
            own=own,
            mmap=mmap,
            verify=bool(verify),
            missing=missing,
            progress=progress,
        )

    def open_first(loader: Loader) -> None:
        own_rank = rank if group is None else group.rank
        loader.indexes = Indexes(folder, loader.manifest, listed, own_rank)
        if verify == "first":
            loader.indexes.read_all()
            _verified_first(folder, loader.manifest, loader.catalog)
            loader.verify = False

    if group is not None and group.world_size > 1 and _has_torch(into):
        return _load_together(group, make, open_first, folder, root, listed, into)

    def read(manifest: Manifest) -> LoadedState:
        loader = make(manifest)
        open_first(loader)
        return _one_load(loader, listed, into)

    return _folder.read_root(folder, root, read)
