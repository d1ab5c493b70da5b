"""A function that other processes call: its reference, and the call with its warnings."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from ..collectives._local_launch import message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..collectives._local_launch import Message, RankProcess

    # message, category, file name, line of a warning
    CaughtWarning = tuple[Warning | str, type[Warning], str, int]


FAILURE_SECONDS = 10.0  # for the other ranks to end after one has failed


class FunctionReference(NamedTuple):
    """A function for another process: its module, the module's file, and the pickled function."""

    module: str
    file: str | None
    pickled: bytes

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionReference:
        """Return the reference of a function; raise TypeError if it is not importable."""
        inner: Any = function
        while isinstance(inner, functools.partial):
            inner = inner.func
        module = getattr(inner, "__module__", None) or type(inner).__module__
        try:
            pickled = pickle.dumps(function)
        except Exception as error:
            raise TypeError(
                f"run_ranks: {function!r} cannot be sent to other processes ({error}); define it "
                'at the top of a module, or pass engine="threads"'
            ) from error
        return cls(module, getattr(sys.modules.get(module), "__file__", None), pickled)

    def load(self) -> Callable[..., Any]:
        """Return the function; its module is imported by its name, or else from its file."""
        if self.module not in sys.modules:
            try:
                spec = importlib.util.find_spec(self.module)
            except ModuleNotFoundError:  # of a package that pytest named after the folder
                spec = None
            if spec is None and self.file is not None:
                spec = importlib.util.spec_from_file_location(self.module, self.file)
            if spec is not None and spec.loader is not None:
                module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
        return pickle.loads(self.pickled)  # type: ignore[no-any-return]


def call_as_rank(function: FunctionReference, group: Any) -> tuple[Message, list[CaughtWarning]]:
    """Call a function with the group of this rank; return the message and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        message = message_of(lambda: _call(function.load(), group))
    return message, [(w.message, w.category, w.filename, w.lineno) for w in caught]


def _call(function: Callable[..., Any], group: Any) -> Any:
    """Call a function; its warnings are recorded, those of the import of its module are not."""
    warnings.simplefilter("default")
    return function(group)


def receive_warnings(ranks: list[RankProcess]) -> tuple[list[CaughtWarning], bool]:
    """Return the warnings of all ranks, and whether all ranks may be called again."""
    caught: list[CaughtWarning] = []
    is_usable = True
    for rank in ranks:
        if rank.message is None:
            return caught, False
        try:
            rank_warnings, is_intact = rank.pipe.recv()
        except Exception:  # it ended, or a warning cannot be read here
            return caught, False
        caught += rank_warnings
        is_usable = is_usable and is_intact
    return caught, is_usable


def issue_warnings(caught: Iterable[CaughtWarning]) -> None:
    """Issue the warnings of the ranks in this process, equal ones once."""
    for message, category, file, line in {(str(w[0]), *w[1:]): w for w in caught}.values():
        warnings.warn_explicit(message, category, file, line)
