"""A function that other processes call: its reference, the call, and the answers of the ranks."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from ..collectives._local_launch import GRACE_SECONDS, collect_messages, find_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..collectives._local_launch import RankProcess

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


class Answer(NamedTuple):
    """The result of a function on a rank, its warnings, and whether the group can still be used."""

    result: Any
    warnings: list[CaughtWarning]
    is_intact: bool


def answer_of(function: FunctionReference, group: Any) -> Answer:
    """Call a function with the group of this rank; warnings of the imports are ignored."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        loaded = function.load()
        warnings.simplefilter("default")
        result = loaded(group)
    is_intact = group._ended in ("", "closed")
    issued = [(w.message, w.category, w.filename, w.lineno) for w in caught]
    return Answer(result, issued, is_intact)


def collect_results(ranks: list[RankProcess], seconds: float) -> list[Any]:
    """Return the results of the messages of all ranks, or raise the first error.

    `seconds`: the timeout; ranks that are at work have `GRACE_SECONDS` more.
    """
    deadline = time.monotonic() + seconds + GRACE_SECONDS
    collect_messages(ranks, deadline, FAILURE_SECONDS)
    messages = [rank.message for rank in ranks if rank.message and rank.has_result()]
    if len(messages) < len(ranks):
        raise find_error("run_ranks", ranks, seconds)
    return [result for _, result, _ in messages]


def results_with_warnings(answers: list[Answer]) -> list[Any]:
    """Return the results of all ranks; issue their warnings in this process, equal ones once."""
    caught = [warning for answer in answers for warning in answer.warnings]
    for message, category, file, line in {(str(w[0]), *w[1:]): w for w in caught}.values():
        warnings.warn_explicit(message, category, file, line)
    return [answer.result for answer in answers]
