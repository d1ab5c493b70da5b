"""Protocol of integrations for saves and loads of modules and optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._states.excluded import Excluded


class OptimizerRecord(NamedTuple):
    """A checkpoint's description of an optimizer state.

    `parameter`: its parameter's name, or the whole key of a state without a parameter. `state`: its
    own name, such as ``exp_avg``; empty without a parameter. `shape`: of the part to load. `dtype`:
    the stored one. `axes`: the parameter's axis for each axis, None for the same axes.
    """

    parameter: str
    state: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[int | None, ...] | None


class OptimizerRequest(NamedTuple):
    """What a load wants of the states of an optimizer. `strict` and `cast` are as for `load`."""

    module: Any  # has the parameters, or None
    records: dict[str, OptimizerRecord]  # the stored states by key
    saved: Any  # their parameter groups and learning rate
    read: Callable[[list[str]], dict[str, Any]]  # returns stored arrays by key
    names: Any  # of the parameters in the optimizer's order, or the module that gives them
    meant: Callable[[list[str]], list[str]]  # returns the keys of a list that the user chose
    elsewhere: frozenset[str]  # parameters that only optimizers of other ranks have
    shapes: Mapping[str, tuple[int, ...]]  # of the stored parameters, by name
    strict: bool
    complete: bool  # the user chose all names
    cast: bool


class CheckpointBackend(Protocol):
    """Operations on a framework's modules and optimizers as parts of a checkpoint."""

    def saved_module(
        self, module: Any, ranks: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return a module's tensors, its other entries, and the framework's metadata.

        `ranks`: number of ranks that save together. Raises if the module is sharded over more.
        """

    def saved_optimizer(
        self, optimizer: Any, module: Any, ranks: int, excluded: Excluded
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return an optimizer's states by name, and keywords of an `OptimizerStateDict`.

        `module`: has the parameters, and gives their names; None without one. `ranks`: number of
        ranks that save together. `excluded`: states to leave out.
        """

    def tied_names(self, module: Any) -> set[str]:
        """Return the names of a module's state whose tensor has an earlier name."""

    def fits_table(self, optimizer: Any) -> bool:
        """Return whether a table of tensors by parameter can hold all of an optimizer's state."""

    def divided_state(self, optimizer: Any, state: dict[str, Any], where: str) -> dict[str, Any]:
        """Return a state for the optimizer's ``load_state_dict``, divided as its parameters.

        `state`: with whole tensors, and this rank's parts of others. `where`: its name in errors.
        """

    def fill_module(self, module: Any) -> Any:
        """Return this rank's memory for a module's state, by the names of `saved_module`."""

    def parameter_names(self, optimizer: Any, module: Any, names: Any) -> list[str]:
        """Return the names of an optimizer's parameters.

        `module`: has the parameters, or None. `names`: as in an `OptimizerRequest`.
        """

    def fill_optimizer(self, optimizer: Any, request: OptimizerRequest) -> Any:
        """Return this rank's memory for an optimizer's states, and create those that it lacks."""
