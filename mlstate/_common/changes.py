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
`StateManager` of Core ML and Core AI                prepare; `refill`: undo
`transition_coreml_state`, `compact_coreml_state`    undo
`TieredState`: moves, the end of `use`               prepare
`Follower.advance`                                   undo; with two buffers: prepare
===================================================  =========================================
"""

from __future__ import annotations

from collections import deque
from operator import call
from typing import TYPE_CHECKING, Any, TypeVar

from .. import _core
from ..errors import MLStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from functools import partial

T = TypeVar("T")


def exchange(changes: Iterable[partial[Any]]) -> None:
    """Make prepared changes in one call, which no signal handler and no other thread can split.

    `changes`: calls of functions in C, such as ``partial(vars(layer).update, values)``. The caller
    keeps the former values until the call ends, because a finalizer can run Python code.
    """
    deque(map(call, changes), maxlen=0)


class UndoLog:
    """How to restore what a change has overwritten; an exception in `run` restores it.

    The change calls `note` before each write. A signal waits until the values are restored. If one
    cannot be restored, the error becomes an MLStateError that names it, and an interrupt gets a
    note.
    """

    def __init__(self, failure: str = "nothing was changed", remedy: str = "") -> None:
        """Create an empty log.

        `failure`, `remedy`: texts for values that cannot be restored, such as "the states were not
        moved", and the remedy.
        """
        self._failure, self._remedy = failure, remedy
        self._steps: list[tuple[str, Callable[[], object]]] = []

    def note(self, label: str, restore: Callable[[], object]) -> None:
        """Note how to restore a value. `label`: for errors."""
        self._steps.append((label, restore))

    def run(self, change: Callable[[], T]) -> T:
        """Return the result of `change`, which notes and writes values; restore them if it raises.

        The last one is restored first.
        """
        with _core.deferred_interrupts() as section:
            try:
                with section.allowed():
                    return change()
            except BaseException as error:
                self._roll_back(error)
                raise

    def _roll_back(self, error: BaseException) -> None:
        """Restore all values after `error`, the exception that ended the change."""
        texts = []
        for label, restore in reversed(self._steps):
            try:
                restore()
            except BaseException as failure:
                texts.append(f"{label}: {failure}")
        if texts:
            text = f"{self._failure}: {error}. Former values could not be written back: "
            text += "; ".join(texts) + (f". {self._remedy}" if self._remedy else "")
            if isinstance(error, Exception):
                raise MLStateError(text) from error
            error.add_note(text)
