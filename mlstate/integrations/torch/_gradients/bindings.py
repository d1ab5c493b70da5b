"""Parameters that were replaced, added or unfrozen after hooks were registered.

A parameter that was replaced (as ``load_state_dict(assign=True)`` does), added or unfrozen since
has no hook: its gradient would stay unreduced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .._tensors.state import table_value

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch


class _Binding(NamedTuple):
    """A parameter under its name in one module."""

    table: dict[str, Any]  # the module's parameters
    key: str
    parameter: torch.nn.Parameter
    name: str
    address: int  # of the tensor in C++, which has the hook: swap_tensors gives it away
    has_hook: bool
    was_frozen: bool


class Bindings:
    """The parameters of a module; the ones in `hooked` have hooks."""

    def __init__(self, module: torch.nn.Module, hooked: Collection[str]) -> None:
        """Record each parameter of each submodule, to detect a later replacement.

        `hooked`: names of the parameters that have hooks.
        """
        self._module = module
        # a shared parameter has its hook under its first name
        has_hook = {id(p): name in hooked for name, p in module.named_parameters()}
        self._bindings: list[_Binding] = []
        self._tables: list[tuple[dict[str, Any], int]] = []  # and their lengths
        for path, child in module.named_modules():
            self._tables += [(t, len(t)) for t in (child._modules, child._parameters)]
            for key, parameter in child._parameters.items():
                if parameter is not None:
                    name = f"{path}.{key}" if path else key
                    binding = _Binding(
                        child._parameters,
                        key,
                        parameter,
                        name,
                        address=parameter._cdata,
                        has_hook=has_hook[id(parameter)],
                        was_frozen=not parameter.requires_grad,
                    )
                    self._bindings.append(binding)

    def change(self) -> tuple[str, str]:
        """Return the name of a parameter that was replaced, added or unfrozen, and a text on it.

        Both are "" if none was. Only parameters that need a hook count: with a hook, or requiring a
        gradient.
        """
        for binding in self._bindings:
            current = table_value(binding.table, binding.key)
            if current is binding.parameter:
                if not binding.has_hook and binding.was_frozen and current.requires_grad:
                    return binding.name, f"{binding.name!r} was unfrozen"
                if binding.has_hook and current._cdata != binding.address:
                    return binding.name, f"{binding.name!r} was replaced"
            elif binding.has_hook or (current is not None and current.requires_grad):
                return binding.name, f"{binding.name!r} was replaced"
        if all(len(table) == count for table, count in self._tables):
            return "", ""
        bound_ids = {id(binding.parameter) for binding in self._bindings}
        return next(
            (
                (name, f"{name!r} was added")
                for name, parameter in self._module.named_parameters()
                if parameter.requires_grad and id(parameter) not in bound_ids
            ),
            ("", ""),
        )

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer has one of the parameters, as recorded or as they are now."""
        bound_ids = {id(binding.parameter) for binding in self._bindings}
        bound_ids |= {id(parameter) for parameter in self._module.parameters()}
        return any(id(p) in bound_ids for group in optimizer.param_groups for p in group["params"])
