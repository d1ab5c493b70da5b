"""The line of the user's program that a warning names (stacklevel)."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple


class Caller(NamedTuple):
    """The line that called this package; a save names it in its warnings, also in a thread."""

    path: str
    line: int
    names: dict[str, Any]  # the global names of its module

    def warn(self, text: str, category: type[Warning] | None = None) -> None:
        """Issue a warning, by default a CheckpointWarning, that points at the user's line."""
        import warnings

        from ..errors import CheckpointWarning

        registry = self.names.setdefault("__warningregistry__", {})  # as `warnings.warn` does
        module = self.names.get("__name__", "<string>")
        category = category or CheckpointWarning
        warnings.warn_explicit(text, category, self.path, self.line, module, registry)


def find_caller() -> Caller:
    """Return the line outside this package that called it.

    Without such a line, as in a function that ``atexit`` calls, return the first line of the stack.
    """
    frame = sys._getframe(1)
    with suppress(ValueError):  # the stack ends
        for depth in count(2):  # not by `f_back`, which is None if memory is short
            if not str(frame.f_globals.get("__name__")).startswith("mlstate."):
                break
            frame = sys._getframe(depth)
    return Caller(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
