"""The demo's sixth part: checkpoints during training, and experts in files.

Four experts learn which character follows another one in the demo's own source code, each for one
kind of character. Checkpoints are written during training; training that resumes from one of them
ends with the same bits. Then the least used expert moves to a file and back.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._common.text import bytes_text
from ..checkpoint import CheckpointManager, TieredState
from ..state import ModelStateDict, OptimizerStateDict
from . import source_text, verdict
from .model import softmax

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._types import NDArray
    from .model import CharModel

__all__ = ["Trained", "show_training"]

KINDS = ("letter", "space", "digit", "sign")  # kind of the preceding character; an expert each
STEPS, EVERY, RATE, SEED = 60, 20, 0.01, 0  # EVERY: steps from one checkpoint to the next
CHARACTERS, BATCH = 4096, 512


class Trained(NamedTuple):
    """Results of the training part."""

    losses: tuple[float, float]  # before the first step and after the last
    steps: list[int]  # of the checkpoints written during training
    identical: bool  # checkpoints, resumed training, and experts after the move
    tiers: list[str]  # of each expert while one of them was in a file


class _Task:
    """Characters as embeddings, the expert for each, and the characters that follow."""

    def __init__(self, model: CharModel, embedding: Any) -> None:
        """Encode the text of this demo's source code, and find the expert for each character.

        `embedding`: the model's character embeddings, (characters, width).
        """
        text = source_text("activations.py", model.vocabulary)[: CHARACTERS + 1]
        tokens = np.array(model.encode(text))
        kinds = [0 if c.isalpha() else 1 if c == " " else 2 if c.isdigit() else 3 for c in text]
        self.inputs: NDArray = embedding.astype(np.float32)[tokens[:-1]]
        self.kinds = np.array(kinds[:-1])
        self.targets = tokens[1:]
        self.width, self.count = self.inputs.shape[1], len(model.vocabulary)

    def errors(self, weight: NDArray, rows: NDArray) -> tuple[NDArray, NDArray]:
        """Return the loss of each row, and its gradient with respect to the logits.

        `weight`: of one expert, (width, characters). `rows`: indices of characters of the text.
        """
        chances = softmax(self.inputs[rows] @ weight)
        each = np.arange(len(rows))
        losses = -np.log(chances[each, self.targets[rows]])
        chances[each, self.targets[rows]] -= 1  # the gradient of the cross entropy
        return losses, chances

    def loss(self, model: ModelStateDict) -> float:
        """Return the mean loss over all characters, each predicted by its expert in `model`."""
        each = [
            self.errors(model[f"{kind}.weight"], np.flatnonzero(self.kinds == number))[0]
            for number, kind in enumerate(KINDS)
        ]
        return float(np.concatenate(each).mean())


def _begin(task: _Task) -> tuple[ModelStateDict, OptimizerStateDict]:
    """Return untrained experts and the state of their optimizer, all of zeros.

    The model has a weight for each of `KINDS`; the optimizer has its Adam moments, "m" and "v".
    """
    model = ModelStateDict(model_type="experts", layer_count=len(KINDS))
    optimizer = OptimizerStateDict.create("adam")
    for kind in KINDS:
        model[f"{kind}.weight"] = np.zeros((task.width, task.count), np.float32)
        for moment in ("m", "v"):
            zeros = np.zeros((task.width, task.count), np.float32)
            optimizer.set_state(f"{kind}.weight", moment, zeros)
    return model, optimizer


def _step(task: _Task, step: int, model: ModelStateDict, optimizer: OptimizerStateDict) -> None:
    """Run step number `step` of Adam on the experts in `model`, in place.

    The batch depends only on the step number, so that resumed training has the same bits. Experts
    without characters in the batch are unchanged.
    """
    optimizer.step = step
    drawn = np.random.default_rng((SEED, step)).integers(0, len(task.targets), BATCH)
    for number, kind in enumerate(KINDS):
        rows = drawn[task.kinds[drawn] == number]
        if not len(rows):
            continue
        name = f"{kind}.weight"
        gradient = task.inputs[rows].T @ task.errors(model[name], rows)[1] / np.float32(len(rows))
        m, v = optimizer[f"{name}.m"], optimizer[f"{name}.v"]
        m += np.float32(0.1) * (gradient - m)  # beta1 is 0.9
        v += np.float32(0.01) * (np.square(gradient) - v)  # beta2 is 0.99
        model[name] -= np.float32(RATE) * m / (np.sqrt(v) + np.float32(1e-6))


def _digests(model: ModelStateDict, optimizer: OptimizerStateDict) -> tuple[str, str]:
    """Return a digest of the bits of each state."""
    return model.digest(), optimizer.digest()


def _train(
    task: _Task, folder: Path, say: Callable[[str], None]
) -> tuple[ModelStateDict, OptimizerStateDict, bool]:
    """Train with checkpoints in `folder`, then train once more from the first of them.

    Returns the states at the end, and whether every checkpoint has the bits of its step and the
    resumed training ended with the same bits.
    """
    model, optimizer = _begin(task)
    expected = {}  # digests of the states, by the step that saved them
    with CheckpointManager(folder, keep=None) as manager:
        for step in range(1, STEPS + 1):
            _step(task, step, model, optimizer)
            if step % EVERY == 0:
                expected[step] = _digests(model, optimizer)
                handle = manager.save_async(step, model=model, optimizer=optimizer)
                handle.staged()
                blocked_ms = handle.times().blocked_seconds * 1e3
                say(f"   step {step}: loss {task.loss(model):.2f}, held up for {blocked_ms:.1f} ms")
    same = True
    for step, digests in expected.items():
        state = manager.restore(step)
        assert isinstance(state.model, ModelStateDict)
        assert isinstance(state.optimizer, OptimizerStateDict)
        same = same and _digests(state.model, state.optimizer) == digests
    say(f"   checkpoints of steps {manager.steps()}: {verdict(same, 'the bits of their steps')}")

    middle = manager.restore(EVERY)
    assert isinstance(middle.model, ModelStateDict)
    assert isinstance(middle.optimizer, OptimizerStateDict)
    for step in range(EVERY + 1, STEPS + 1):
        _step(task, step, middle.model, middle.optimizer)
    again = _digests(middle.model, middle.optimizer) == _digests(model, optimizer)
    say(f"   resumed from step {EVERY}: {verdict(again)} at step {STEPS}")
    return model, optimizer, same and again


def _bits(tiers: TieredState, names: list[str]) -> bytes:
    """Return the bytes of the experts `names` and their moments, in any tier."""
    states = [shard for state in tiers.state_dicts() for shard in state.items()]
    return b"".join(
        np.ascontiguousarray(shard.array).tobytes()
        for key, shard in states
        if any(key.startswith(name) for name in names)
    )


def _move(
    model: ModelStateDict, optimizer: OptimizerStateDict, folder: Path, say: Callable[[str], None]
) -> tuple[list[str], bool]:
    """Move one expert of `model`, and its moments in `optimizer`, to a file in `folder` and back.

    Returns the tier of each expert, such as "cold" for a file, while that one was there, and
    whether all bits are equal afterwards.
    """
    names = [f"{kind}.weight" for kind in KINDS]
    name, others = names[2], [*names[:2], names[3]]
    with TieredState(model, optimizer, folder) as tiers:
        before, unmoved = _bits(tiers, [name]), _bits(tiers, others)
        tiers.demote(name, to="cold")
        places = [str(tiers.tier(each)) for each in tiers]
        [file] = list(folder.glob("*.safetensors"))
        say(f"   demoted: {name} with m and v, to a file of {bytes_text(file.stat().st_size)}")
        say("   " + ", ".join(f"{k}: {at}" for k, at in zip(KINDS, places, strict=True)))
        same = _bits(tiers, others) == unmoved
        tiers.promote(name)
        back = _bits(tiers, [name]) == before
        say(f"   promoted: {verdict(back)}; the other experts: {verdict(same, 'untouched')}")
    return places, same and back


def show_training(model: CharModel, embedding: object, say: Callable[[str], None]) -> Trained:
    """Train experts, save them meanwhile, and move one between tiers.

    `embedding`: the model's character embeddings, (characters, width). `say` is called with each
    text of the output.
    """
    task = _Task(model, embedding)
    before = task.loss(_begin(task)[0])
    say(f"\n16. {len(KINDS)} experts learn while their checkpoints are written")
    with tempfile.TemporaryDirectory(prefix="mlstate-demo-") as folder:
        weights, optimizer, good = _train(task, Path(folder) / "run", say)
        after = task.loss(weights)
        steps = CheckpointManager(Path(folder) / "run").steps()
        say(f"\n17. The expert for what follows a {KINDS[2]} waits on the disk")
        places, is_equal = _move(weights, optimizer, Path(folder) / "tiers", say)
    return Trained((before, after), steps, good and is_equal, places)
