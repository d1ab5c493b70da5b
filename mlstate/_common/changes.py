"""How several arrays or attributes of an object change together: the only place of this rule.

After any exception, an interrupt too, the object is unchanged, or it is empty and reports no token.
A number of tokens or a version never belongs to other elements. There are three ways, in this order
of preference:

prepare   Compute all new values in other memory, then assign one attribute, or `exchange`.
undo      Note in an `UndoLog` how to restore a value, then write it.
empty     Set the number of tokens to 0, write the arrays, set the number. An `UndoLog` has the
          call that empties. For arrays that keep their memory, without a copy of them.

===================================================  =========================================
user                                                 way
===================================================  =========================================
`CacheState`: `resize`, `quantize`, `dequantize`     prepare
`CacheState.restore`                                 empty
`mlstate.load`, states: a `CacheState`, `KVState`    empty
`PromptStore.restore`: CacheState, KVState, array    empty
`PromptStore.restore`: RollingKVState                prepare
transformers, `to_cache(into=)`                      prepare; static and linear layers: empty
mlx-lm, `to_cache(into=)`                            prepare
`StateManager` of Core ML and Core AI                prepare
`transition_coreml_state`, `compact_coreml_state`    undo
`TieredState`: moves, the end of `use`               prepare
`Follower.advance`                                   undo; with two buffers: prepare
===================================================  =========================================
"""

from __future__ import annotations

from collections import deque
from operator import call
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import MLStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from functools import partial

T = TypeVar("T")

_TRIES = 8  # of a restoration that interrupts end


def exchange(changes: Iterable[partial[Any]]) -> None:
    """Make prepared changes in one call, which no signal handler and no other thread can split.

    `changes`: calls of functions in C, such as ``partial(vars(layer).update, values)``. The caller
    keeps the former values until the call ends, because a finalizer can run Python code.
    """
    deque(map(call, changes), maxlen=0)


class UndoLog:
    """How to restore what a change has overwritten; an exception in `run` restores it.

    The change calls `note` before each write. An interrupt does not end the restoration: it is
    repeated, and the first exception is raised after it. If a value cannot be restored, the error
    becomes an MLStateError that names it, and an interrupt gets a note.
    """

    def __init__(self, failure: str = "nothing was changed", remedy: str = "") -> None:
        """Create an empty log.

        `failure`, `remedy`: texts for values that cannot be restored, such as "the states were not
        moved", and the remedy.
        """
        self._failure, self._remedy = failure, remedy
        self._steps: list[tuple[str, Callable[[], object]]] = []

    def note(self, label: str, restore: Callable[[], object]) -> None:
        """Note how to restore a value; `restore` can be called again. `label`: for errors."""
        self._steps.append((label, restore))

    def run(self, change: Callable[[], T]) -> T:
        """Return the result of `change`, which notes and writes values; restore them if it raises.

        A ``with`` statement has a gap before its exit: an interrupt there ends it.
        """
        try:
            return change()
        except BaseException as error:
            self.roll_back(error)
            raise

    def roll_back(self, error: BaseException | None = None) -> None:
        """Restore all values, the last one first; those that fail stay in the log.

        `error`: the exception that ended the change.
        """
        failures: list[BaseException] = []
        interrupts: list[BaseException] = []
        texts = []
        for step in reversed(self._steps):
            failure = _run_to_end(step[1], interrupts)
            if failure is None:
                self._steps.remove(step)
            else:
                failures.append(failure)
                texts.append(f"{step[0]}: {failure}")
        is_interrupt = error is not None and not isinstance(error, Exception)
        first = error if is_interrupt else next(iter(interrupts), None)
        if failures:
            text = f"{self._failure}: {error}. Former values could not be written back: "
            text += "; ".join(texts) + (f". {self._remedy}" if self._remedy else "")
            if first is None:
                raise MLStateError(text) from error
            first.add_note(text)
        if first is not None and first is not error:
            raise first from error


def _run_to_end(
    restore: Callable[[], object], interrupts: list[BaseException]
) -> BaseException | None:
    """Call `restore` until no interrupt ends it; return its error, or None.

    `interrupts`: gets the exceptions of the others.
    """
    failure: BaseException | None = None
    for _ in range(_TRIES):
        try:
            restore()
            return None
        except BaseException as caught:
            failure = caught
            if isinstance(caught, Exception):
                break
            interrupts.append(caught)
    return failure
