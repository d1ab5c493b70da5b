"""The demo's fourth part: gradients of two ranks.

Two threads train a small network on the demo's own source code, each on half of it. Then one of
them has a gradient with NaN, and one with another shape.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..collectives import LocalGroup
from ..errors import CollectiveError
from ..fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit
from . import source_text, verdict
from .model import softmax

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..collectives import ProcessGroup
    from .model import CharModel, Floats

__all__ = ["Reduced", "show_gradients"]

# Small enough for BLAS to use one thread: more threads would slow down the two ranks.
RANKS, STEPS, BATCH, RATE, SEED = 2, 50, 32, 1.0, 0
BEFORE, HIDDEN = 4, 32  # characters of context, and the width of the hidden layer
BUCKETS = {"25 MiB": 25 << 20, "16 KiB": 16 << 10, "one gradient": 0}
SECONDS = 60.0  # timeout of each operation


class Reduced(NamedTuple):
    """Results of the gradient part."""

    losses: tuple[float, float]  # before the first step and after the last
    identical: bool  # sums for all bucket sizes, and the ranks' weights at the end
    told: list[str]  # the error of each rank about the two bad gradients
    kept: list[str]  # parameters whose gradients were reduced nevertheless


# ---- the network ----


class _Network:
    """Predicts a character from the preceding ones, using the demo model's embeddings."""

    def __init__(self, model: CharModel, embedding: Floats) -> None:
        """Encode the text, and draw weights; `embedding`: (characters, width)."""
        self.tokens = np.array(model.encode(source_text("model.py", model.vocabulary)))
        self.embedding = embedding.astype(np.float32)
        characters, width = embedding.shape
        generator = np.random.default_rng(SEED)

        def drawn(rows: int, columns: int) -> Floats:
            """Return a random matrix that keeps the scale of its input."""
            wide = generator.standard_normal((rows, columns), np.float32)
            return wide / np.float32(rows**0.5)

        self.weights: dict[str, Floats] = {
            "hidden.weight": drawn(BEFORE * width, HIDDEN),
            "hidden.bias": np.zeros(HIDDEN, np.float32),
            "out.weight": drawn(HIDDEN, characters),
            "out.bias": np.zeros(characters, np.float32),
        }

    def samples(self, group: Any, step: int) -> tuple[Floats, object]:
        """Return the batch of a step: contexts, and the character that follows each.

        It is from this rank's part of the text, and depends only on `step` and the rank. Contexts
        are rows of embeddings, (BATCH, BEFORE * width).
        """
        share = (len(self.tokens) - BEFORE) // group.world_size  # characters of a rank
        generator = np.random.default_rng([SEED, step, group.rank])
        starts = group.rank * share + generator.integers(0, share, BATCH)  # of the contexts
        context = self.tokens[starts[:, None] + np.arange(BEFORE)]
        return self.embedding[context].reshape(BATCH, -1), self.tokens[starts + BEFORE]

    def backward(
        self, weights: dict[str, Floats], samples: tuple[Floats, Any]
    ) -> tuple[float, Iterator[tuple[str, Floats]]]:
        """Return the mean loss of a batch, and an iterator over the gradients, last layer first.

        The iterator yields (name, gradient) and computes each when it is asked for it. `samples`:
        from the method `samples`.
        """
        x, labels = samples
        hidden = np.tanh(x @ weights["hidden.weight"] + weights["hidden.bias"])
        chances = softmax(hidden @ weights["out.weight"] + weights["out.bias"])
        rows = np.arange(len(labels))
        loss = float(-np.log(chances[rows, labels]).mean())

        def gradients() -> Iterator[tuple[str, Floats]]:
            """Yield the name and the gradient of each weight, in order of the backward pass."""
            error = chances.copy()
            error[rows, labels] -= 1
            error /= len(labels)
            yield "out.bias", error.sum(0)
            yield "out.weight", hidden.T @ error
            inner = error @ weights["out.weight"].T * (1 - hidden**2)
            yield "hidden.bias", inner.sum(0)
            yield "hidden.weight", x.T @ inner

        return loss, gradients()


def _units(group: Any, weights: dict[str, Floats]) -> dict[str, FSDPShardingUnit]:
    """Return a sharding unit for each weight by name: it holds this rank's part of the gradient."""
    return {
        name: FSDPShardingUnit(
            name, array.shape, array.dtype, group.rank, world_size=group.world_size
        )
        for name, array in weights.items()
    }


# ---- work of each rank ----


def _train(group: Any, network: _Network) -> tuple[list[float], dict[str, Floats]]:
    """Train the network on one rank: reduce gradients as they are computed, and update weights.

    Each rank updates its part of a weight, and gathers the others. Returns this rank's loss before
    each step, and the weights at the end.
    """
    weights = dict(network.weights)
    units = _units(group, weights)
    hook = FSDPBackwardHook(FSDP(group, op="mean"))
    hook.use_units(units)
    losses = []
    for step in range(STEPS):
        loss, gradients = network.backward(weights, network.samples(group, step))
        for name, gradient in gradients:
            hook.add_gradient(name, gradient)
        hook.finish()
        for name, unit in units.items():
            part = unit.layout.take(weights[name], group.rank) - RATE * unit.local_gradient
            weights[name] = group.all_gather(part, counts=unit.counts).reshape(unit.shape)
        losses.append(loss)
    return losses, weights


def _reduce(group: ProcessGroup, network: _Network, bucket_bytes: int) -> dict[str, Any]:
    """Reduce the gradients of the first step in buckets of `bucket_bytes`.

    Returns this rank's parts of the sums by name.
    """
    units = _units(group, network.weights)
    _, gradients = network.backward(network.weights, network.samples(group, 0))
    fsdp = FSDP(group, bucket_bytes=bucket_bytes)
    FSDPBackwardHook(fsdp).scatter_multiple(units, dict(gradients))
    return {name: unit.local_gradient for name, unit in units.items()}


def _spoil(group: ProcessGroup, network: _Network) -> tuple[str, list[str]]:
    """Reduce gradients, two of them bad on rank 1.

    Returns the text of this rank's error, and the names of the gradients that were reduced.
    """
    units = _units(group, network.weights)
    hook = FSDPBackwardHook(FSDP(group))
    hook.use_units(units)
    gradients = dict(network.backward(network.weights, network.samples(group, 0))[1])
    if group.rank == 1:
        gradients["hidden.weight"][0, 0] = np.nan
        gradients["out.bias"] = gradients["out.bias"][:-1]
    message = ""
    try:
        for name, gradient in gradients.items():
            hook.add_gradient(name, gradient)
        hook.finish()
    except CollectiveError as error:
        message = str(error)
    return message, [name for name, unit in units.items() if unit.local_gradient is not None]


# ---- script ----


def show_gradients(model: CharModel, embedding: Floats, say: Callable[[str], None]) -> Reduced:
    """Train on two ranks, compare bucket sizes, and report two bad gradients.

    `embedding`: the model's character embeddings, (characters, width). `say` is called with each
    text of the output.
    """
    network = _Network(model, embedding)
    groups = LocalGroup.threads(RANKS, timeout=SECONDS)

    def on_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of ``function(group, network, *args)``, in a thread for each rank."""
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(lambda group: function(group, network, *args), groups))

    say(f"\n13. {RANKS} ranks train a small network on this demo's source code")
    (losses, weights), (other_losses, other_weights) = on_ranks(_train)
    identical = all(weights[n].tobytes() == other_weights[n].tobytes() for n in weights)
    ends = (losses[0] + other_losses[0]) / 2, (losses[-1] + other_losses[-1]) / 2
    say(
        f"   loss {ends[0]:.2f} -> {ends[1]:.2f} in {STEPS} steps; weights of the ranks: "
        f"{verdict(identical)}"
    )
    sums = {label: on_ranks(_reduce, size) for label, size in BUCKETS.items()}
    parts = sums["25 MiB"]
    for rank, part in enumerate(parts):
        size = sum(array.nbytes for array in part.values())
        say(f"   rank {rank} keeps {size:,} bytes of {len(part)} gradients")
    same = all(
        other[rank][name].tobytes() == part[name].tobytes()
        for other in sums.values()
        for rank, part in enumerate(parts)
        for name in part
    )
    say(f"   sums in buckets of {', '.join(BUCKETS)}: {verdict(same)}")

    say("\n14. Rank 1 has a NaN in one gradient, and another shape in a second one")
    outcomes = on_ranks(_spoil)
    messages = [text for text, _ in outcomes]
    for text in messages:
        for line in text.splitlines():
            say(f"   {line}")
    stored_names: list[str] = outcomes[0][1]
    say(f"   reduced on both ranks: {', '.join(stored_names)}")
    for group in groups:
        group.close()
    return Reduced(ends, identical and same, messages, stored_names)
