"""The end of a recomputation: after the operator that saved the last tensor, not within it."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any


class StopRecompute(Exception):  # noqa: N818 (ends a run early; not an error)
    """All saved tensors were recomputed."""


def _overrides() -> Any:
    import torch

    return torch.overrides


@cache
def _end_mode() -> Any:
    """Return the class of modes that end a run at the next call of torch in Python."""
    import torch

    class EndMode(torch.overrides.TorchFunctionMode):
        frame: Any  # that called the operator which saved the last tensor
        at: int  # the instruction that it is at

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            begin: Any = sys._getframe(1)
            caller = begin
            while caller is not None and caller is not self.frame:
                caller = caller.f_back
            if caller not in (None, begin) and caller.f_lasti == self.at:
                return func(*args, **(kwargs or {}))  # a part of that operator
            raise StopRecompute

    return EndMode


class RecomputeEnd:
    """A context of a recomputation that ends after the operator that saved its last tensor.

    An operator may fill a tensor after it saved it, as RReLU its noise, so the run ends only at the
    next call of torch, with StopRecompute.
    """

    def __init__(self) -> None:
        self._mode: Any = None

    def __enter__(self) -> RecomputeEnd:
        return self

    def request(self) -> None:
        """End the run after the current operator; call it from the pack hook of a saved tensor."""
        self._mode = _end_mode()()
        self._mode.frame = sys._getframe(2)  # below this call and the hook
        self._mode.at = self._mode.frame.f_lasti
        _overrides()._push_mode(self._mode)

    def __exit__(self, *_: object) -> None:
        """Remove the request, also below modes that were entered around the operator."""
        if self._mode is None:
            return
        others = []
        while (mode := _overrides()._pop_mode()) is not self._mode:
            others.append(mode)
        for mode in reversed(others):
            _overrides()._push_mode(mode)
        self._mode.frame = self._mode = None
