"""States of Core ML and Core AI models: choice of a function, damaged files, notebook table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .._common.regular_file import open_regular
from .._common.report import Table
from .._common.store_error import store_error
from .._common.text import count_text, names_hint, shorten
from ..errors import FormatError
from ._arguments import incompatible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


Spec = TypeVar("Spec")  # has a name, shape, dtype and nbytes


class FunctionStates(dict[str, Spec]):
    """The states of one function of a model by name; `functions` has those of all functions."""

    functions: dict[str, dict[str, Spec]]
    function: str
    default_function: str | None

    def __init__(
        self,
        functions: Mapping[str, Mapping[str, Spec]],
        function: str,
        *,
        default_function: str | None = None,
    ) -> None:
        """Become the mapping of the states of `function`, which is a key of `functions`.

        `functions`: states by name, for each function. `default_function`: the function that the
        model runs by default, or None.
        """
        super().__init__(functions[function])
        self.functions = {name: dict(states) for name, states in functions.items()}
        self.function = function
        self.default_function = default_function

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        """Return a row for each state."""
        count = count_text(len(self), "state")
        title = f"{type(self).__name__}: {count} of function {shorten(self.function, 100)!r}"
        others = [name for name in self.functions if name != self.function]
        if others:
            title += f"; other functions: {quoted(others)}"
        return state_table(title, self.values())


def choose_function(functions: Mapping[str, object], function: str | None) -> str:
    """Return `function`, or raise CompatibilityError if it is not a key of `functions`.

    None means that neither the caller nor the model named one, which is an error too.
    """
    if not isinstance(function, str):
        text = (
            f"the model has {len(functions)} functions and names no default: "
            "choose one with function= (--source-function or --target-function on the command "
            f"line): {quoted(functions)}"
        )
        raise incompatible(text, "function", "a function's name", None)
    if function not in functions:
        text = f"the model has no function {function!r}{names_hint(function, functions)}"
        raise incompatible(text, function, quoted(functions), function)
    return function


# ---- files ----


def format_error(path: str, text: str) -> FormatError:
    """Return a FormatError about the file `path`, which is damaged or of another format."""
    return FormatError(f"{path}: {text}", path=path)


def read_file(path: str, most_bytes: int) -> bytes:
    """Return the content of the file `path` of a model.

    Raises FormatError if it has more than `most_bytes` bytes or is not a regular file, and
    StoreError if it cannot be read.
    """
    try:
        with open_regular(path) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise store_error(error, "cannot read", path) from error
    if len(data) > most_bytes:
        raise format_error(path, f"more than {most_bytes} bytes")
    return data


def read_metadata(path: str) -> Any:
    """Return the JSON document in `path`, a metadata.json; raise FormatError if it is not JSON."""
    text = read_file(path, 64 << 20)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise format_error(path, f"not JSON: {error}") from error


# ---- text ----


def quoted(names: Iterable[str], limit: int = 8) -> str:
    """Return names for a message, at most `limit` of them."""
    listed = list(names)
    text = ", ".join(map(repr, listed[:limit])) or "none"
    return text if len(listed) <= limit else f"{text} and {len(listed) - limit} more"


def shape_text(shape: Sequence[int | None] | None) -> str:
    """Return a shape as text such as 2x1x256x32; a dynamic dimension is ``?``."""
    if shape is None:
        return "-"
    return "x".join("?" if length is None else str(length) for length in shape)


def state_table(title: str, specs: Iterable[Any]) -> Table:
    """Return a row with name, shape, dtype and bytes for each state."""
    rows = [
        (s.name, shape_text(s.shape), s.dtype, "?" if s.nbytes is None else s.nbytes) for s in specs
    ]
    return Table(title, ["state", "shape", "dtype", "bytes [B]"], rows)
