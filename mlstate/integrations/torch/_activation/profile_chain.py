"""`Chain.from_torch`: seconds and bytes of each block, forward and backward, and copy speeds."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._common.local_path import local_path
from ....activation._chain import Chain
from .block_calls import BlockCall, SampledModel, discard_saved, loss_of, seed_of
from .offload import Host
from .peak_memory import Allocations, Span
from .tensors import storage_bytes, tensors_in, time_after_work

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    import torch

    from ...._types import NDArray

_RATE_BYTES = 64 << 20  # of the tensor whose copies are timed


def _call_key(call: BlockCall) -> tuple[Any, ...]:
    """Return a key that is equal for calls with equivalent tensors.

    These have equal shapes, strides, dtypes and devices, and require gradients alike.
    """
    return tuple((t.shape, t.stride(), t.dtype, t.device, flag) for t, flag in call.tensors())


def _block_key(block: object) -> Any:
    """Return a key that is equal for blocks with equal modules and parameter shapes.

    A block that is not a module equals only itself.
    """
    import torch

    if not isinstance(block, torch.nn.Module):
        return id(block)
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = tuple((name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors)
    return type(block), repr(block), block.training, shapes


class _Times:
    """Measures the time of blocks."""

    def __init__(self, repeats: int, device: torch.device) -> None:
        self._repeats = repeats
        self._device = device
        self._runs: list[list[tuple[float, float]]] = []  # by block: forward, backward
        self._keys: list[tuple[Any, ...]] = []  # by block: `_call_key` of its call

    def __call__(self, call: BlockCall) -> None:
        """Run a block forward and backward several times, and add the seconds of each run.

        A first run is a warm-up and does not count.
        """
        runs = []
        for _ in range(self._repeats + 1):
            run = call.bind()
            forward_start = time_after_work(self._device)
            out = run()
            forward_end = time_after_work(self._device)
            loss = seed_of(out)
            del out
            backward_start = time_after_work(self._device)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            backward_end = time_after_work(self._device)
            runs.append((forward_end - forward_start, backward_end - backward_start))
        self._runs.append(runs[1:])  # without the warm-up run
        self._keys.append(_call_key(call))

    def of_blocks(self, keys: list[Any]) -> tuple[list[float], list[float], list[float]]:
        """Return by block: median seconds forward, median seconds backward, and spread.

        Blocks with equal `keys` and argument shapes share their measurements. The spread is
        relative: the distance of the quartiles divided by the median.
        """
        runs_by_key: dict[Any, list[tuple[float, float]]] = {}
        all_keys = list(zip(keys, self._keys, strict=True))
        for key, runs in zip(all_keys, self._runs, strict=True):
            runs_by_key.setdefault(key, []).extend(runs)
        medians = {key: _median_and_spread(np.array(runs)) for key, runs in runs_by_key.items()}
        forward, backward, spread = zip(*(medians[key] for key in all_keys), strict=True)
        return list(forward), list(backward), list(spread)


def _median_and_spread(runs: NDArray) -> tuple[float, float, float]:
    """Return median seconds forward and backward, and the relative spread of their sum.

    `runs`: a row (forward, backward) for each run.
    """
    low, middle, high = np.quantile(runs.sum(1), [0.25, 0.5, 0.75])
    forward, backward = np.median(runs, 0).tolist()
    return forward, backward, float((high - low) / middle) if middle else 0.0


class _Bytes:
    """Measures the memory of blocks; `of_blocks` returns the results after the recording."""

    def __init__(self, watched: Allocations) -> None:
        self._watched = watched
        # bytes of the first block's input, then of each block's output; and of their gradients
        self.activations: list[int] = []
        self.gradients: list[int] = []

    def __call__(self, call: BlockCall) -> None:
        """Run a block, and add bytes of its activation and gradient; marks separate its phases.

        The phases are: a run without saved tensors, freeing, a run with them, the loss, the
        backward run.
        """
        import torch

        if not self.activations:
            entering = call.tensors()
            self.activations.append(sum(storage_bytes(t for t, _ in entering).values()))
            self.gradients.append(sum(t.nbytes for t, flag in entering if flag))
        mark = self._watched.mark
        torch.clear_autocast_cache()
        mark()
        run = call.bind()
        with discard_saved():
            out = run()
        tensors = [tensor.detach() for tensor in tensors_in(out)]
        del out
        mark()
        del run  # frees tensors that the block stored in a cache argument
        self.activations.append(sum(storage_bytes(tensors).values()))
        del tensors
        torch.clear_autocast_cache()
        mark()
        run = call.bind()
        out = run()
        mark()
        self.gradients.append(sum(t.nbytes for t in tensors_in(out) if t.requires_grad))
        loss = seed_of(out)
        del out
        mark()
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
        del loss, run
        mark()

    def of_blocks(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Return by block: saved bytes; temporary bytes of forward, saving and backward runs.

        Call it after the recording.
        """
        spans = self._watched.spans()
        saved_bytes: list[int] = []
        forward_temporary: list[int] = []
        saving_temporary: list[int] = []
        backward_temporary: list[int] = []
        for i, out in enumerate(self.activations[1:]):
            # 6 marks for each block; the sixth span is between two blocks
            forward, _, save, _, back = spans[6 * i : 6 * i + 5]
            # the rest is outside of the blocks: in autocast's cache, and in a cache argument
            rest = max(0, forward.after - forward.before - out)
            before = save.before + rest
            saved = max(save.after - before, out)
            gradients = self.gradients[i] + self.gradients[i + 1]
            saved_bytes.append(saved)
            forward_temporary.append(max(0, forward.peak - forward.before - out - rest))
            saving_temporary.append(max(0, save.peak - before - saved))
            # negative if autograd frees saved tensors before it allocates the gradient
            least = -min(self.gradients[i], saved + self.gradients[i + 1])
            backward_temporary.append(max(least, back.peak - before - saved - gradients))
        return saved_bytes, forward_temporary, saving_temporary, backward_temporary


class _Outside:
    """Runs a model's step with blocks that save nothing, and measures all that is outside of them.

    A run has six marks: its begin, the first block's call, the last block's return, the end of the
    forward pass with the loss, the gradient of the last block's output, and the end of the
    backward pass. The gradient of the first block's input follows at once.
    """

    def __init__(self, model: SampledModel, loss: Any) -> None:
        """Prepare for runs of `model`; `loss`: as for `loss_of`."""
        self._model = model
        self._loss = loss
        self._existing = model.existing()
        self._has_loss = False  # the model's own, or of `loss`
        self.has_head = False  # something runs after the last block
        # allocated by the run: the first block's input; with the last one's output; with its input
        self._fresh_input = self._fresh_used = self._fresh_between = 0

    def __call__(self, mark: Callable[[], object]) -> None:
        """Run a step, and call `mark` at each mark."""
        import torch

        first: list[torch.Tensor] = []  # the first block's input
        entered: list[torch.Tensor] = []  # the last block's input
        returned: set[int] = set()  # its outputs, by identity
        crossed: list[bool] = []  # the backward pass reached them

        def enter(call: BlockCall) -> None:
            if not first:
                first.extend(call.inputs)
                mark()
            entered[:] = call.inputs

        def cross() -> None:
            crossed.append(True)
            mark()

        def leave(out: Any) -> Any:
            used = [*first, *tensors_in(out)]
            fresh_bytes = map(self._count_fresh, (first, used, [*used, *entered]))
            self._fresh_input, self._fresh_used, self._fresh_between = fresh_bytes
            entered.clear()
            out = _bridge([root, *first], out, cross)
            returned.update(map(id, tensors_in(out)))
            mark()
            return out

        root = torch.zeros((), requires_grad=True)  # lets outputs require gradients in any case
        torch.clear_autocast_cache()
        mark()
        out = self._model.measure_blocks(enter, leave)
        others = [t for t in tensors_in(out) if t.requires_grad and id(t) not in returned]
        self.has_head = self._loss is not None or bool(others)
        del others
        loss = seed_of(out)
        if self.has_head:
            loss, self._has_loss = loss_of(out, self._loss)
        del out
        mark()
        if loss is not None:
            torch.autograd.backward(loss)
        if not crossed:
            mark()
        mark()

    def _count_fresh(self, tensors: list[torch.Tensor]) -> int:
        sizes = storage_bytes(tensors)
        return sum(size for key, size in sizes.items() if key not in self._existing)

    def seconds(self, repeats: int) -> float:
        """Return the median seconds of some runs, after a warm-up."""
        runs = []
        for _ in range(repeats + 1):
            times: list[float] = []
            self(partial(_add_time, times, self._model.device))
            runs.append(times[1] - times[0] + times[5] - times[2])
        return median(runs[1:])

    def costs(self, spans: list[Span], memory: _Bytes) -> tuple[int, int, int]:
        """Return the bytes outside of the blocks, of the head, and of what else must fit.

        The latter is the peak before the first block and after its backward run. `spans`: of the
        last run. `memory`: of the blocks.
        """
        before, _, forward, backward, after = spans
        in_forward = forward.before - self._fresh_between
        # such as the gradient of tied weights: its first part waits for the second
        in_backward = after.before - self._fresh_input - memory.gradients[-1]
        outside = max(0, in_forward, in_backward if self.has_head else 0)
        head = max(forward.peak, backward.peak) - self._fresh_used - outside
        least = max(before.peak, after.peak) + memory.activations[0] - self._fresh_input
        return outside, max(head, memory.gradients[-1]) if self.has_head else 0, least

    def note(self) -> str:
        """Return a sentence about the loss, for reports."""
        if not self.has_head:
            return (
                "the loss is not covered: pass loss= to Chain.from_torch, or a sample with which "
                "the model returns it"
            )
        if self._has_loss:
            return ""
        return (
            "the model returned no loss, so the memory of a cross-entropy is assumed: pass loss= "
            "to Chain.from_torch for another one"
        )


def _bridge(first: list[torch.Tensor], out: Any, mark: Callable[[], object]) -> Any:
    """Return a block's output `out` that depends on `first`, such as an earlier block's input.

    A backward pass calls `mark`, and gives `first` gradients of ones. One of `first` requires a
    gradient.
    """
    import torch
    from torch.utils import _pytree

    class Bridge(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
            ctx.like = [(t.shape, t.dtype, t.device, t.requires_grad) for t in inputs]
            ctx.set_materialize_grads(False)
            return tuple(tensor.detach() for tensor in outputs)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            mark()
            return tuple(
                torch.ones(s, dtype=t, device=d) if flag else None for s, t, d, flag in ctx.like
            )

    leaves, spec = _pytree.tree_flatten(out)
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not outputs:
        return out
    apply: Any = Bridge.apply
    bridged = iter(apply(*first))
    ids = set(map(id, outputs))
    outputs.clear()  # the graph must not hold their memory
    return _pytree.tree_unflatten([next(bridged) if id(x) in ids else x for x in leaves], spec)


def _add_time(times: list[float], device: torch.device) -> None:
    times.append(time_after_work(device))


def _measure_rates(offload: Any, device: torch.device) -> dict[str, float]:
    """Return the speeds of copies to the host and back, as arguments of `Chain`.

    `offload`: True for main memory, or the folder of files. The median of three copies of 64 MiB
    counts.
    """
    import torch

    folder = None if offload is True else local_path(offload)
    tensor = torch.zeros(_RATE_BYTES, dtype=torch.uint8, device=device)
    seconds: list[tuple[float, float]] = []
    for _ in range(4):  # the first copy is a warm-up
        host = Host(folder)
        put_start = time_after_work(device)
        offloaded = host.put(tensor)
        put_end = time_after_work(device)
        host.get(offloaded)
        seconds.append((put_end - put_start, time_after_work(device) - put_end))
    put_seconds, get_seconds = (median(column) for column in zip(*seconds[1:], strict=True))
    return {
        "offload_bytes_per_second": _RATE_BYTES / put_seconds,
        "load_bytes_per_second": _RATE_BYTES / get_seconds,
    }


def profile_chain(
    module: object,
    sample: Any,
    *,
    blocks: Any = None,
    repeats: int = 5,
    offload: bool | str | os.PathLike[str] = False,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Chain:
    """Measure a torch model and its blocks; see `Chain.from_torch`."""
    if repeats < 1:
        raise ValueError(f"repeats must be 1 or more, got {repeats}")
    model = SampledModel(module, sample, blocks, None)
    times, outside = _Times(repeats, model.device), _Outside(model, loss)
    with model.untouched():
        model.measure_blocks(times)
        outside_seconds = outside.seconds(repeats)
        with Allocations(model.device) as watched:
            memory = _Bytes(watched)
            model.measure_blocks(memory)
        with Allocations(model.device) as watched_outside:
            outside(watched_outside.mark)
    saved, forward, saving, backward = memory.of_blocks()
    outside_bytes, head_bytes, least = outside.costs(watched_outside.spans(), memory)
    # nothing else is held while the first block runs backward
    held = outside_bytes + memory.activations[0] + saved[0] + sum(memory.gradients[:2])
    backward[0] = max(backward[0], least - held)
    measured = zip(saved, forward, saving, backward, strict=True)
    keys = [(_block_key(b), *bytes_) for b, bytes_ in zip(model.blocks, measured, strict=True)]
    forward_seconds, backward_seconds, spread = times.of_blocks(keys)
    return Chain(
        forward_seconds,
        backward_seconds,
        memory.activations,
        saved,
        gradient_bytes=memory.gradients,
        forward_temporary_bytes=forward,
        saving_temporary_bytes=saving,
        backward_temporary_bytes=backward,
        seconds_spread=spread,
        names=model.names,
        outside_bytes=outside_bytes,
        head_bytes=head_bytes,
        outside_seconds=outside_seconds if outside_bytes or head_bytes else 0.0,
        note=outside.note(),
        **(_measure_rates(offload, model.device) if offload else {}),
    )
