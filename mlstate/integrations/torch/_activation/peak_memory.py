"""How much memory torch allocates, and when: from its allocators, not from a model of them."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.set_module import set_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_MARK = "mlstate.mark"
_LOG_LEVEL = "KINETO_LOG_LEVEL"  # of the library behind torch's profiler
_NO_TRACEPOINTS = "6"  # it prints "USDT" lines at level 5


@set_module("mlstate.integrations.torch")
class MemoryUse(NamedTuple):
    """Memory that torch allocated during a call; `measure_peak` makes these.

    Attributes
    ----------
    peak_bytes : int
        The most that was held at once, of what was allocated since the call began.
    left_bytes : int
        What of it was still held when the call returned, its result included.
    curve : list of (float, int)
        Seconds since the beginning, and bytes held from then on: one entry per allocation and
        per release. Empty for accelerators, whose allocators tell the peak only.

    Examples
    --------
    >>> import torch
    >>> from mlstate.integrations.torch import measure_peak
    >>> use = measure_peak(lambda: torch.ones(1000) + torch.ones(1000))
    >>> use.peak_bytes, use.left_bytes, len(use.curve)
    (12000, 4000, 5)
    """

    peak_bytes: int
    left_bytes: int
    curve: list[tuple[float, int]]


class Span(NamedTuple):
    """Bytes held when a span began, at its worst moment, and when it ended."""

    before: int
    peak: int
    after: int


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from printing; it reads its level once, at its first start."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _NO_TRACEPOINTS
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


class Allocations:
    """Watches an allocator of torch, in spans that begin and end with `mark`.

    Bytes are counted from zero at the first mark. On the CPU they come from the allocator's
    events in torch's profiler: every tensor, and what operators allocate for themselves as
    tensors; not what libraries such as oneDNN take from the system by themselves. On CUDA they
    come from the allocator's statistics, in blocks of 512 bytes.

    Parameters
    ----------
    device : torch.device
        The CPU, or a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._profile: Any = None
        self._marks = 0
        self._read: list[tuple[int, int]] = []  # at each mark: held, peak since the one before
        self.curve: list[tuple[float, int]] = []

    def __enter__(self) -> Allocations:
        import torch

        if self._on_cpu:
            if torch._C._autograd._profiler_enabled():
                raise RuntimeError("a profiler of torch runs already: memory is measured by it")
            self._profile = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
            with _quiet_profiler():
                self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profile is not None:
            self._profile.__exit__(*error)
            if error[0] is None:
                self._read_events(self._profile.kineto_results.experimental_event_tree())
            self._profile = None

    def mark(self) -> None:
        """End one span and begin the next."""
        import torch

        self._marks += 1
        if self._on_cpu:
            with torch.autograd.profiler.record_function(_MARK):
                return
        torch.cuda.synchronize(self._device)
        held = torch.cuda.memory_allocated(self._device)
        self._read.append((held, torch.cuda.max_memory_allocated(self._device)))
        torch.cuda.reset_peak_memory_stats(self._device)

    def _read_events(self, roots: Any) -> None:
        held = peak = 0
        began = None
        sizes: dict[int, int] = {}  # of what was allocated meanwhile, by address
        for at, event in sorted(_memory_and_marks(roots), key=lambda one: one[0]):
            if event is None:
                began = at if began is None else began
                self._read.append((held, peak))
                peak = held
                continue
            # torch may know an older size for an address that it did not see allocated
            if event.alloc_size > 0:
                change = sizes[event.ptr] = event.alloc_size
            else:
                change = -sizes.pop(event.ptr, 0)
            if began is not None and change:
                held += change
                peak = max(peak, held)
                self.curve.append(((at - began) * 1e-9, held))

    def spans(self) -> list[Span]:
        """Return the spans between marks, once the watching is over."""
        base = self._read[0][0] if self._read else 0
        return [
            Span(before[0] - base, after[1] - base, after[0] - base)
            for before, after in zip(self._read, self._read[1:], strict=False)
        ]


def _memory_and_marks(roots: Any) -> Iterator[tuple[int, Any]]:
    """Go through a tree of events: when memory was taken or released, and None for marks."""
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.name == _MARK:
            yield event.start_time_ns, None
        elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields


@set_module("mlstate.integrations.torch")
def measure_peak(function: Callable[[], Any], *, device: Any = "cpu") -> MemoryUse:
    """Call a function and measure the memory that torch allocates meanwhile.

    Parameters
    ----------
    function : callable
        Called without arguments, once.
    device : torch.device or str, default "cpu"
        Whose memory is measured: the CPU, or a CUDA device.

    Returns
    -------
    MemoryUse
        Peak, what is left, and the curve.

    Raises
    ------
    RuntimeError
        On a CPU: a profiler of torch runs already.
    ValueError
        The device is neither a CPU nor CUDA.

    Notes
    -----
    What was there before the call is not counted, nor is its release. To compare with a plan:
    the plan counts the chain's input, which was there before; it does not count parameters'
    gradients, so let these exist (``zero_grad(set_to_none=False)``).

    The CPU's figures come from torch's profiler and are exact to the byte for what goes
    through torch's allocator. If ``KINETO_LOG_LEVEL`` is not set, and nothing used torch's
    profiler before, the library behind it prints nothing in this process from then on.

    Examples
    --------
    >>> import torch
    >>> from mlstate.integrations.torch import measure_peak
    >>> measure_peak(lambda: torch.ones(1000).exp()).peak_bytes
    8000
    """
    import torch

    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"memory is measured on cpu and cuda, not on {where}")
    with Allocations(where) as watched:
        watched.mark()
        result = function()
        watched.mark()
    (span,) = watched.spans()
    del result
    return MemoryUse(span.peak, span.after, watched.curve)
