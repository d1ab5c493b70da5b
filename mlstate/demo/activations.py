"""The demo's fifth part: a network within a memory budget.

Ten blocks of NumPy read the demo's own source code. Some merge neighbouring characters, so that
the first blocks need most memory. Plans choose which blocks to recompute in the backward pass. The
memory that NumPy allocates is measured.
"""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..activation import Chain, IntervalStrategy, Plan, plan
from ..errors import CapacityError
from . import source_text, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .._types import NDArray
    from .model import CharModel

__all__ = ["Planned", "show_activations"]

CHARACTERS, HIDDEN, BLOCKS, SEED = 2048, 256, 10, 0  # HIDDEN: width between a block's matrices
MERGE = (2, 5, 8)  # blocks that merge two positions into one
SECONDS = 1e-9  # of one multiplication; times are computed, so all machines get the same plan
FLOAT = 4  # bytes of a float32
MIB = 1024.0**2


class Planned(NamedTuple):
    """Results of the memory budget part."""

    peaks: dict[str, tuple[int, int]]  # predicted and measured bytes of each plan
    overheads: dict[str, float]  # predicted time relative to the plain run, minus one
    identical: bool  # the gradients of all plans
    refused: str  # the error about a budget that is too small


class _Block:
    """Two matrices with a tanh between them; with `merge`, two positions are first joined."""

    def __init__(self, generator: np.random.Generator, width: int, merge: bool) -> None:
        """Draw the matrices; `width`: elements of a position in the block's input and output."""
        inside = 2 * width if merge else width
        self.first: NDArray = generator.standard_normal((inside, HIDDEN), np.float32)
        self.first /= np.float32(inside**0.5)
        self.second: NDArray = generator.standard_normal((HIDDEN, width), np.float32)
        self.second /= np.float32(HIDDEN**0.5)
        self.gradients = [np.zeros_like(self.first), np.zeros_like(self.second)]

    def forward(self, x: NDArray) -> tuple[NDArray, NDArray]:
        """Return the output, and the hidden values that the backward pass needs.

        `x`: (positions, width). With `merge`, the output has half as many positions.
        """
        hidden = x.reshape(-1, len(self.first)) @ self.first
        np.tanh(hidden, out=hidden)
        return hidden @ self.second, hidden

    def backward(self, x: NDArray, hidden: NDArray, gradient: NDArray) -> NDArray:
        """Store the matrices' gradients, and return the gradient of the input `x`.

        `hidden`: from `forward`; it is overwritten. `gradient`: of the output.
        """
        inner = gradient @ self.second.T
        np.matmul(hidden.T, gradient, out=self.gradients[1])
        # the derivative of tanh
        np.square(hidden, out=hidden)
        np.subtract(1, hidden, out=hidden)
        inner *= hidden
        np.matmul(x.reshape(-1, len(self.first)).T, inner, out=self.gradients[0])
        return (inner @ self.first.T).reshape(x.shape)


def _chain(width: int) -> Chain:
    """Return the chain of the blocks, with counted multiplications and bytes.

    `width`: elements of a position.
    """
    rows = [CHARACTERS]  # positions of the input and of each block's output
    for i in range(BLOCKS):
        rows.append(rows[-1] // 2 if i in MERGE else rows[-1])
    inside = [2 * width if i in MERGE else width for i in range(BLOCKS)]  # rows of a first matrix
    forward = [rows[i + 1] * HIDDEN * (inside[i] + width) * SECONDS for i in range(BLOCKS)]
    hidden = [rows[i + 1] * HIDDEN * FLOAT for i in range(BLOCKS)]
    outputs = [n * width * FLOAT for n in rows]
    return Chain(
        forward,
        [2 * seconds for seconds in forward],  # of the backward passes
        outputs,  # bytes of the input and of each block's output
        # bytes that a block saves for its backward pass, its output included
        [h + o for h, o in zip(hidden, outputs[1:], strict=True)],
        forward_temporary_bytes=hidden,
        backward_temporary_bytes=hidden,
    )


def _run(schedule: Plan, blocks: Sequence[_Block], x: NDArray) -> int:
    """Run a forward and backward pass by the steps of a plan; the blocks store their gradients.

    `schedule`: the plan. Its steps are "forward" of a block, "save" (forward that also keeps the
    hidden values), "drop" of a block's input, and "backward". `x`: the input of the first block,
    (positions, width). Returns the peak memory that NumPy allocated, plus `x`, in bytes.
    """
    activations: dict[int, NDArray] = {0: x}
    saved: dict[int, NDArray] = {}
    gradient: NDArray | None = None
    tracemalloc.start()
    for kind, i in schedule.steps():
        if kind == "drop":
            del activations[i]
        elif kind == "backward":
            if gradient is None:
                gradient = activations[i + 1].copy()  # the loss is half the sum of all squares
            gradient = blocks[i].backward(activations[i], saved.pop(i), gradient)
            del activations[i + 1]
        else:
            activations[i + 1], hidden = blocks[i].forward(activations[i])
            if kind == "save":
                saved[i] = hidden
            del hidden
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak + x.nbytes


def _ways(chain: Chain) -> dict[str, Plan]:
    """Return four plans of `chain` by their label in the table.

    The last one has the peak of recomputing every block, but takes less time.
    """
    middle = (chain.plain_peak_bytes + chain.least_budget_bytes) // 2
    every = Plan.from_strategy(chain, IntervalStrategy(1))
    return {
        "keep everything": Plan.from_recomputed(chain, []),
        "plan, middle budget": plan(chain, middle),
        "every block again": every,
        "plan, the same peak": plan(chain, every.predicted_peak_bytes),
    }


def show_activations(model: CharModel, embedding: Any, say: Callable[[str], None]) -> Planned:
    """Run a network with several plans, and compare memory, time and gradients.

    `embedding`: the model's character embeddings, (characters, width). `say` is called with each
    text of the output.
    """
    tokens = model.encode(source_text("model.py", model.vocabulary)[:CHARACTERS])
    x = embedding.astype(np.float32)[np.array(tokens)]
    generator = np.random.default_rng(SEED)
    blocks = [_Block(generator, x.shape[1], i in MERGE) for i in range(BLOCKS)]
    chain = _chain(x.shape[1])

    say(f"\n15. A network of {BLOCKS} blocks reads {CHARACTERS} characters, within a memory budget")
    say("   What the forward pass saves for the backward pass, block by block, MiB:")
    say("   " + " ".join(f"{nbytes / MIB:.2f}" for nbytes in chain.saved_bytes))
    say("   Less is kept where some of it is computed again, which takes time:\n")
    say("   way to run it         time     peak, MiB: predicted  measured  computed again")
    ways, expected, identical = _ways(chain), None, True
    peaks = {}
    for label, planned in ways.items():
        measured = _run(planned, blocks, x)
        peaks[label] = planned.predicted_peak_bytes, measured
        gradient_bytes = b"".join(g.tobytes() for block in blocks for g in block.gradients)
        expected = expected or gradient_bytes
        identical = identical and gradient_bytes == expected
        again = ", ".join(map(str, planned.recomputed)) or "-"
        say(
            f"   {label:<20} {planned.overhead:>+6.1%} {planned.predicted_peak_bytes / MIB:>21.2f}"
            f" {measured / MIB:>9.2f}  {again}"
        )
    say(f"\n   gradients of all four: {verdict(identical)}")
    refused = ""
    try:
        plan(chain, chain.least_budget_bytes // 2)
    except CapacityError as error:
        refused = str(error)
        say(f"   half of the least budget: CapacityError: {error}")
    return Planned(peaks, {n: p.overhead for n, p in ways.items()}, identical, refused)
