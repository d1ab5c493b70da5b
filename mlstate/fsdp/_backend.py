"""Protocols that the torch integration implements for gradients: `GradientBackend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


class ModuleHooks(Protocol):
    """Hooks on the parameters of a module, until they are removed.

    A `token` is what `begin_pass` returned for the current pass; None: no pass of the module.
    """

    parameters: dict[str, Any]  # by name, in the module's order
    is_full: bool  # reduced full gradients are stored in the parameters
    # by name, for parameters whose gradient has sums of `no_sync` passes: the number of in-place
    # changes that the framework counted for the gradient, after the last of these passes
    unsent: dict[str, int]

    def begin_pass(self, on_end: Callable[[], None], rank: int) -> Callable[[], Any]:
        """Call `on_end` at the end of the running backward pass, unless an error aborts the pass.

        Returns the pass's token: a weak reference, which returns None after the pass. `rank`: of
        this process, for the CollectiveError if the pass runs inside another one.
        """

    def outdated(self) -> tuple[str, str]:
        """Return a parameter whose gradient would stay unreduced, and why; ("", "") if none."""

    def keep_unsent(self, name: str) -> None:
        """Note that a `no_sync` pass has added to a parameter's gradient."""

    def take(self, name: str, token: Any) -> tuple[Any, Callable[[], None] | None]:
        """Return a parameter's gradient, and remove it from the parameter unless it is to be kept.

        The second value is None, or a function that restores the gradient after a failure.
        """

    def take_missing(self, name: str, token: Any) -> tuple[Any, Callable[[], None] | None]:
        """Return, as `take`, a gradient of `no_sync` passes that this pass did not add to.

        (None, None) if the parameter has no such gradient.
        """

    def gather_full(self, buckets: Iterable[Any], group: Any, timeout: float | None) -> None:
        """Gather the parts of reduced gradients, and add them to each parameter's gradient.

        `buckets`: sequences of sharding units whose local gradients are reduced. `timeout`:
        seconds, None for the group's. After an error some gradients are reduced and others not: the
        caller calls `drop_full`.
        """

    def add_earlier(self) -> None:
        """Add the gradients of earlier passes that were set aside, at the end of a pass."""

    def drop_full(self) -> None:
        """Remove all gradients, because not all are reduced."""

    def remove(self) -> None:
        """Remove the hooks."""


class GradientBackend(Protocol):
    """Operations on a framework's gradients, and hooks that receive them."""

    def readable(self, tensor: Any) -> Any:
        """Return `tensor` in a form that the core can read, or None if only the framework can."""

    def copy_of(self, tensor: Any, dtype: str | None) -> Any:
        """Return a copy of `tensor` to add others to, in C order if it is strided.

        `dtype`: of the copy; None: of the tensor.
        """

    def item_bytes(self, dtype: str, like: Any) -> int:
        """Return the size of an element of `dtype` in bytes; `like`: a tensor of the framework."""

    def tensor_in(self, memory: Any, dtype: str, like: Any) -> Any:
        """Return a tensor of `dtype` over `memory` with the shape of `like`.

        It keeps the memory alive.
        """

    def sum_sparse(self, total: Any, tensor: Any) -> Any:
        """Return the sum of both in new memory, or None if both are dense."""

    def add_gradient(self, total: Any, tensor: Any) -> None:
        """Add `tensor` to `total` in place, by the framework's operation; both are dense.

        For devices and subclasses that the core cannot read.
        """

    def norm_partial(self, tensor: Any) -> tuple[float, int]:
        """Return the sum of squares and the number of non-finite elements."""

    def why_not_reduced(self, tensor: Any) -> str:
        """Return why a parameter or gradient cannot be reduced, or an empty string."""

    def parameters_of(self, module: Any) -> Mapping[str, Any]:
        """Return the parameters of a module by name; a shared one has only its first name."""

    def reduce_on_device(
        self, group: Any, entry: Any, terms: Any, timeout: float | None
    ) -> tuple[float, int]:
        """Reduce a gradient that is not in main memory, together with all ranks of `group`.

        Stores this rank's part in `entry.out`. Returns the part's sum of squares and its number of
        non-finite elements. `terms`: op, divisor and dtype. `timeout`: seconds, None for the
        group's.
        """

    def hook_module(
        self,
        module: Any,
        units: Mapping[str, Any],
        receive: Callable[[str, Any], None],
        *,
        is_full: bool,
        keep: bool,
        accumulate: bool,
    ) -> ModuleHooks:
        """Register hooks on those parameters of `module` that have a sharding unit.

        `units`: sharding units by parameter name. `receive` is called with a name and its parameter
        when its gradient is computed. `is_full`: reduced gradients are stored in
        ``parameter.grad``. `keep`: unreduced ones stay there. `accumulate`: local gradients are
        sums over passes.
        """
