"""Exports of a public module: `dir` lists them, some are loaded on first use, all explain calls."""

from __future__ import annotations

TYPE_CHECKING = False  # `import mlstate` needs this file, and importing typing takes milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any


def show_exports(
    namespace: dict[str, Any],
    names: Mapping[str, Iterable[str]] | None = None,
    modules: Iterable[str] = (),
) -> None:
    """Let `dir` of a public module list the names of ``__all__``, and wrong calls tell the remedy.

    Call this at the end of the module, with `globals`. `names` are loaded on first use, given by
    the relative module that has them, such as ``{"._info": ["info"]}``; `modules` are submodules
    that are imported on first use.
    """
    module_of = {name: module for module, members in (names or {}).items() for name in members}

    def load(name: str) -> Any:
        """Import a public name or submodule at its first use; raises AttributeError if unknown."""
        from importlib import import_module

        package = namespace["__name__"]
        if name in modules:
            return import_module(f".{name}", package)  # the import also binds the name
        if name not in module_of:
            from ._common.wrong_calls import missing_name

            raise missing_name(package, name, [*namespace["__all__"]])
        namespace[name] = getattr(import_module(module_of[name], package), name)
        explain(name)
        return namespace[name]

    def explain(name: str) -> None:
        """Let wrong calls of a public name tell the remedy."""
        from ._common.wrong_calls import explained

        namespace[name] = explained(namespace[name])

    for name in namespace["__all__"]:
        if callable(namespace.get(name)):  # else it is loaded on first use, or no call
            explain(name)
    if module_of or modules:
        namespace["__getattr__"] = load
    namespace["__dir__"] = lambda: sorted(namespace["__all__"])
