"""The interface to frameworks such as torch, and a registry of their backends.

The package calls a framework through a `Backend` and imports no integration by name. An
integration registers its backend when it is imported. The registry imports it on the first
use of a framework.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from types import TracebackType

    from ..activation._chain import Chain
    from ..activation._recompute_check import RecomputeReport
    from ..checkpoint._files.convert import Parts
    from .atomic_file import Target

# Frameworks by the module that users import, and the integration that registers each.
_INTEGRATIONS = {"torch": "mlstate.integrations.torch"}
_registered: dict[str, Backend] = {}


class OptimizerRecord(NamedTuple):
    """A checkpoint's description of an optimizer state."""

    parameter: str
    state: str | None
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int | None, ...] | None


class AppliedStrategy(Protocol):
    """Blocks of a model whose decisions an `ActivationManager` makes, until removed."""

    blocks: tuple[str, ...]

    def remove(self) -> None:
        """Restore the blocks; further calls do nothing."""

    def __enter__(self) -> AppliedStrategy: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class ModuleHooks(Protocol):
    """Hooks on the parameters of a module, until they are removed."""

    parameters: dict[str, Any]
    is_full: bool
    unsent: dict[str, int]

    def begin_pass(self, on_end: Callable[[], None], rank: int) -> Callable[[], Any]: ...
    def outdated(self) -> str: ...
    def keep_unsent(self, name: str) -> None: ...
    def take(self, name: str, token: Any) -> tuple[Any, Callable[[], None] | None]: ...
    def take_missing(self, name: str, token: Any) -> tuple[Any, Callable[[], None] | None]: ...
    def gather_full(self, buckets: Iterable[Any], group: Any, timeout: float | None) -> None: ...
    def drop_full(self) -> None: ...
    def remove(self) -> None: ...


class Backend(Protocol):
    """Operations on one framework's tensors, modules and optimizers.

    The functions of torch that `integrations/torch/_backend.py` lists describe each.
    """

    # ---- recognition ----

    def is_module(self, value: object) -> bool: ...
    def is_optimizer(self, value: object) -> bool: ...
    def is_mine(self, value: object) -> bool: ...

    # ---- process groups ----

    def wrapped_group(self, value: object) -> Any: ...

    # ---- tensors ----

    def arrays_of(self, state: Any) -> dict[str, Any]: ...
    def tensors_of(self, state: Mapping[str, Any], *, copy: bool = False) -> dict[str, Any]: ...
    def device_of(self, device: Any) -> Any: ...
    def dtype_of(self, name: str) -> Any: ...
    def why_not_plain(self, tensor: Any) -> str: ...
    def refuse_unstorable(self, name: str, tensor: Any, label: str = "") -> None: ...
    def write_into_tensor(self, out: Any, write: Callable[[Any], Any]) -> Any: ...
    def note_written(self, tensors: Iterable[Any]) -> None: ...
    def move_kv(self, source: Any, move: Any, out: Any) -> Any: ...

    # ---- states of modules and optimizers ----

    def saved_module(
        self, module: Any, ranks: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]: ...
    def tied_names(self, module: Any) -> set[str]: ...
    def saved_optimizer(
        self, optimizer: Any, module: Any, ranks: int
    ) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def is_plain_optimizer(self, optimizer: Any) -> bool: ...
    def fill_module(self, module: Any) -> Any: ...
    def own_load(
        self,
        filling: Any,
        entries: Mapping[str, Any],
        metadata: Mapping[str, dict[str, Any]] | None,
        units: list[Any],
        *,
        strict: bool,
    ) -> Any: ...
    def fill_optimizer(
        self,
        optimizer: Any,
        module: Any,
        records: dict[str, OptimizerRecord],
        saved: Any,
        read: Callable[[list[str]], dict[str, Any]],
        names: Any,
        meant: Callable[[list[str]], list[str]],
        *,
        shapes: Mapping[str, tuple[int, ...]],
        strict: bool,
        complete: bool,
        cast: bool,
    ) -> Any: ...
    def optimizer_state(
        self, optimizer: Any, names: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def optimizer_dict(
        self, osd: Any, optimizer: Any, names: Any, *, copy: bool = False
    ) -> dict[str, Any]: ...
    def reduce_state(self, state: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]: ...
    def part_of(self, name: str, value: Any, replica: int = 0) -> Any: ...
    def module_state(
        self, module: Any, *, fill: bool = False
    ) -> tuple[dict[str, Any], Callable[[], None] | None]: ...
    def optimizer_parts(
        self, optimizer: Any, module: Any, *, fill: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None] | None]: ...
    def needs_all_ranks(self, source: Any, module: Any) -> str: ...

    # ---- files ----

    def read_pt(self, path: Path) -> Parts: ...
    def write_pt(
        self, target: Target, model: Any, optimizer: Any, metadata: Mapping[str, Any]
    ) -> None: ...
    def read_tree(self, path: Path) -> Any: ...
    def write_tree(self, tree: Any, file: IO[bytes]) -> None: ...
    def read_dcp(self, path: Path) -> Parts: ...
    def write_dcp(
        self, target: Target, model: Any, optimizer: Any, metadata: Mapping[str, Any]
    ) -> None: ...

    # ---- tiers ----

    def accelerator(self, values: Iterable[Any], device: Any) -> Any: ...
    def on_device(self, array: Any, device: Any) -> Any: ...
    def in_memory(self, tensor: Any) -> Any: ...
    def give_memory(self, tensor: Any, source: Any) -> None: ...
    def has_given_away(self) -> bool: ...
    def is_given_away(self, tensor: Any) -> bool: ...
    def tensors_of_optimizer(self, optimizer: Any, module: Any) -> dict[str, Any]: ...
    def optimizer_groups(self, optimizer: Any, names: list[str]) -> dict[str, Any]: ...

    # ---- gradients ----

    def readable(self, tensor: Any) -> Any: ...
    def copy_of(self, tensor: Any, dtype: str | None) -> Any: ...
    def item_bytes(self, dtype: str, like: Any) -> int: ...
    def tensor_in(self, memory: Any, dtype: str, like: Any) -> Any: ...
    def add_gradient(self, total: Any, tensor: Any) -> None: ...
    def norm_partial(self, tensor: Any) -> tuple[float, int]: ...
    def why_not_reduced(self, tensor: Any) -> str: ...
    def parameters_of(self, module: Any) -> Mapping[str, Any]: ...
    def reduce_on_device(
        self, group: Any, entry: Any, terms: Any, timeout: float | None
    ) -> tuple[float, int]: ...
    def hook_module(
        self,
        module: Any,
        units: Mapping[str, Any],
        receive: Callable[[str, Any], None],
        *,
        is_full: bool,
        keep: bool,
    ) -> ModuleHooks: ...

    # ---- activations ----

    def profile_chain(
        self,
        module: Any,
        sample: Any,
        *,
        blocks: Any = None,
        repeats: int = 5,
        offload: bool | str | os.PathLike[str] = False,
    ) -> Chain: ...
    def apply_plan(
        self,
        plan: Any,
        module: Any = None,
        *,
        blocks: Any = None,
        offload_to: str | os.PathLike[str] | None = None,
        observe: Callable[[str, int], None] | None = None,
    ) -> Any: ...
    def apply_strategy(self, manager: Any, module: Any, blocks: Any) -> AppliedStrategy: ...
    def check_recompute(
        self, module: Any, plan: Any, sample: Any, *, blocks: Any = None
    ) -> RecomputeReport: ...
    def operator_contexts(self, saved: Iterable[str]) -> tuple[Any, Any]: ...
    def cuda_memory(self, source: str) -> tuple[int, int, int, str]: ...


def register(name: str, backend: Backend) -> None:
    """Register the backend of a framework, by the module that users import."""
    _registered[name] = backend


def registered() -> list[Backend]:
    """Return the backends of frameworks that this process has used."""
    return list(_registered.values())


def backend_named(name: str) -> Backend:
    """Return the backend of a framework, which need not be imported yet."""
    found = _registered.get(name)
    if found is None:
        import_module(_INTEGRATIONS[name])
        found = _registered[name]
    return found


def torch_backend(what: str) -> Backend:
    """Return torch's backend; an ImportError names `what` needs torch, and the extra."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ImportError(
            f"{what} need torch: pip install 'mlstate[torch]'", name="torch"
        ) from None
    return backend_named("torch")


def backend_of(value: object) -> Backend:
    """Return the backend of a tensor, module or optimizer; raise TypeError if there is none.

    Only imported frameworks are asked, because no other can have created the value.
    """
    for name in _INTEGRATIONS:
        if sys.modules.get(name) is not None:
            found = backend_named(name)
            if found.is_mine(value):
                return found
    raise TypeError(f"{type(value).__name__} is not a tensor, module or optimizer of a framework")


def is_module(value: object) -> bool:
    """Return whether a value is a module of an imported framework."""
    return any(backend.is_module(value) for backend in _backends_for(value))


def is_optimizer(value: object) -> bool:
    """Return whether a value is an optimizer of an imported framework."""
    return any(backend.is_optimizer(value) for backend in _backends_for(value))


def wrapped_group(value: object) -> Any:
    """Return the `ProcessGroup` for a group of an imported framework; None if it is not one."""
    groups = (backend.wrapped_group(value) for backend in _backends_for(value))
    return next((group for group in groups if group is not None), None)


def _backends_for(value: object) -> list[Backend]:
    """Return the backends that may know a value; a dict needs none, so none is imported."""
    if value is None or isinstance(value, dict):
        return []
    return [backend_named(name) for name in _INTEGRATIONS if sys.modules.get(name) is not None]
