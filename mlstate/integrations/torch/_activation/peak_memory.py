"""`measure_peak`: peak of torch's memory in a call, on CPU or CUDA; `cuda_memory` in use now."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.set_module import set_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_MARK = "mlstate.mark"
_LOG_LEVEL = "KINETO_LOG_LEVEL"  # read by the library behind torch's profiler
_NO_TRACEPOINTS = "6"  # it prints "USDT" lines at level 5


@set_module("mlstate.integrations.torch.records")
class MemoryUse(NamedTuple):
    """Memory that torch allocated during a call; `measure_peak` returns it.

    Attributes
    ----------
    peak_bytes : int
        Largest memory held at once, counting only allocations during the call.
    left_bytes : int
        Memory of these allocations still held at the return, including the result.
    curve : list of (float, int)
        Seconds since the start, and bytes held from then on: one entry per allocation and
        release. Empty for accelerators, whose allocators report only the peak.

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
    """Bytes held at the start of a span, at its peak, and at its end."""

    before: int
    peak: int
    after: int


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    """Suppress output of the profiler's library, which reads its log level once, at first start."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _NO_TRACEPOINTS
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


class Allocations:
    """Records an allocator of torch, in spans that start and end with `mark`.

    Bytes are relative to the first mark. On the CPU they come from the allocator's events in
    torch's profiler: all tensors, and temporaries that operators allocate as tensors, but not
    memory that libraries such as oneDNN allocate directly. On CUDA they come from the allocator's
    statistics, in blocks of 512 bytes.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepare to record the allocator of `device`, which is the CPU or a CUDA device."""
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._profile: Any = None
        self._marks = 0
        self._read: list[tuple[int, int]] = []  # by mark: bytes held, peak since the last mark
        # seconds since the first mark, and bytes held from then on; only on the CPU
        self.curve: list[tuple[float, int]] = []

    def __enter__(self) -> Allocations:
        """Start to record allocations; on the CPU with torch's profiler.

        Raises RuntimeError if a profiler is running already.
        """
        import torch

        if self._on_cpu:
            if torch._C._autograd._profiler_enabled():
                raise RuntimeError(
                    "a torch profiler is already running, and measuring memory "
                    "needs it: stop it first"
                )
            self._profile = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
            with _quiet_profiler():
                self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop to record; on the CPU read the profiler's events, unless the block failed."""
        if self._profile is not None:
            self._profile.__exit__(*error)
            if error[0] is None:
                self._read_events(self._profile.kineto_results.experimental_event_tree())
            self._profile = None

    def mark(self) -> None:
        """End one span of measuring and start the next; see `spans`.

        On CUDA it waits for the device and resets torch's peak.
        """
        import torch

        self._marks += 1
        if self._on_cpu:
            with torch.autograd.profiler.record_function(_MARK):
                return
        torch.cuda.synchronize(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        self._read.append((allocated, torch.cuda.max_memory_allocated(self._device)))
        torch.cuda.reset_peak_memory_stats(self._device)

    def _read_events(self, roots: Any) -> None:
        """Add bytes held and peak at each mark to `_read`, and the live bytes over time to `curve`.

        `roots`: the profiler's tree of events. Only allocations and releases after the first mark
        are added up.
        """
        live_bytes = peak = 0
        began = None
        sizes: dict[int, int] = {}  # sizes of recorded allocations, by address
        for at, event in sorted(_memory_and_marks(roots), key=lambda timed_event: timed_event[0]):
            if event is None:
                began = at if began is None else began
                self._read.append((live_bytes, peak))
                peak = live_bytes
                continue
            # torch may report an old size for an address whose allocation was not recorded
            if event.alloc_size > 0:
                change = sizes[event.ptr] = event.alloc_size
            else:
                change = -sizes.pop(event.ptr, 0)
            if began is not None and change:
                live_bytes += change
                peak = max(peak, live_bytes)
                self.curve.append(((at - began) * 1e-9, live_bytes))

    def spans(self) -> list[Span]:
        """Return the spans between marks, in order, with bytes relative to the first mark.

        Call it after the recording.
        """
        base = self._read[0][0] if self._read else 0
        return [
            Span(before[0] - base, after[1] - base, after[0] - base)
            for before, after in zip(self._read, self._read[1:], strict=False)
        ]


def _memory_and_marks(roots: Any) -> Iterator[tuple[int, Any]]:
    """Yield (nanoseconds, memory event of the CPU) from the profiler's tree of events.

    The event is None for a mark. The times are not in order.
    """
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
    """Call a function and measure the memory that torch allocates during the call.

    Parameters
    ----------
    function : callable
        Called once, without arguments.
    device : torch.device or str, default "cpu"
        The device to measure: the CPU, or a CUDA device.

    Returns
    -------
    MemoryUse
        Peak, remaining memory, and the curve.

    Raises
    ------
    RuntimeError
        On a CPU, if a torch profiler is already running.
    ValueError
        If the device is neither a CPU nor CUDA.

    Notes
    -----
    Memory allocated before the call is not counted, nor is its release. For comparison with a
    plan: the plan counts the first block's input, which may exist before the call. It does not
    count gradients of parameters, so allocate these first (one backward pass, and then
    ``zero_grad(set_to_none=False)``).

    On the CPU, the values come from torch's profiler and are exact to the byte for torch's
    allocator. If ``KINETO_LOG_LEVEL`` is not set and torch's profiler was not used before, its
    library is silenced for the rest of the process.

    Examples
    --------
    >>> import torch
    >>> from mlstate.integrations.torch import measure_peak
    >>> measure_peak(lambda: torch.ones(1000).exp()).peak_bytes
    8000
    """
    import torch

    torch_device = torch.device(device)
    if torch_device.type not in ("cpu", "cuda"):
        raise ValueError(f"memory is measured on cpu and cuda, not on {torch_device}")
    with Allocations(torch_device) as watched:
        watched.mark()
        result = function()
        watched.mark()
    (span,) = watched.spans()
    del result
    return MemoryUse(span.peak, span.after, watched.curve)


def cuda_memory(source: str) -> tuple[int, int, int, str]:
    """Return bytes in use, their peak and total of a CUDA device, and its name.

    `source`: "cuda" for the current device, or "cuda:N". Raises RuntimeError if there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(f"source {source!r}: torch has no CUDA device here")
    device = torch.device(source)
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise RuntimeError(f"source {source!r}: torch has {torch.cuda.device_count()} CUDA devices")
    return (
        torch.cuda.memory_allocated(number),
        torch.cuda.max_memory_allocated(number),
        torch.cuda.get_device_properties(number).total_memory,
        f"cuda:{number}",
    )
