"""Protocol of integrations for states of modules and optimizers: from and to torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class StateBackend(Protocol):
    """Operations on states of a framework's modules and optimizers."""

    def optimizer_state(self, optimizer: Any, names: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return an optimizer's arrays by name, and keywords of an `OptimizerStateDict`.

        See `OptimizerStateDict.from_torch` for `names`.
        """

    def optimizer_dict(
        self, osd: Any, optimizer: Any, names: Any, *, copy: bool = False
    ) -> dict[str, Any]:
        """Return a dict for ``load_state_dict``; see `OptimizerStateDict.to_torch`."""

    def module_entries(self, module: Any) -> dict[str, Any]:
        """Return the entries that `save` stores of a module on one rank, tensors first."""

    def module_target(
        self, module: Any, source: Mapping[str, Any], *, strict: bool
    ) -> tuple[Any, dict[str, Any], Any]:
        """Return how to load `source`, entries by name, into a module: three values.

        The first has the memory to write: `arrays` by name, `loads_itself` for names that a
        submodule loads, and `finish`, to call after the write. The second has the tensors of
        submodules that load themselves, by name. The third is the prepared load of these, with
        `apply` and `undo`, or None. `strict`: also load those without an entry in `source`.
        """
