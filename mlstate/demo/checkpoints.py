"""The demo's third part: the model's weights as a checkpoint.

The weights are saved at two steps. A flipped bit in the newer checkpoint is found, and the older
one replaces it. Then one of four ranks loads its quarter.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..checkpoint import CheckpointManager, load, verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..checkpoint.records import ShardRecord
    from ..state import ModelStateDict

__all__ = ["Kept", "show_checkpoints"]

STEPS = (1000, 2000)
RANK, RANKS = 1, 4  # the rank that loads a part, and the number of ranks


class Kept(NamedTuple):
    """Results of the checkpoint part."""

    found: str  # the problem that `verify` reported for the flipped bit
    repaired: bool  # whether the older checkpoint replaced the damaged one, bit for bit


def _flip(folder: str, shard: ShardRecord) -> int:
    """Flip one bit in the middle of a shard's bytes; return the offset of its byte in the file.

    `folder`: of the checkpoint.
    """
    assert shard.path is not None and shard.offset is not None
    at = shard.offset + shard.nbytes // 2
    with (Path(folder) / shard.path).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    return at


def show_checkpoints(weights: ModelStateDict, say: Callable[[str], None]) -> Kept:
    """Save two checkpoints, damage the newer one, repair it, and load a part.

    `say` is called with each text of the output.
    """
    with tempfile.TemporaryDirectory(prefix="mlstate-demo-") as folder:
        manager = CheckpointManager(folder, keep=2)
        model = weights.copy()
        name = "layers.3.out.weight"
        say(f"\n11. Checkpoints of two steps; only {name} changes between them")
        for step in STEPS:
            checkpoint = manager.save(step, model=model)
            written = checkpoint.written or {}
            say(
                f"   step {step}: {written['new_bytes']:,} of {checkpoint.nbytes:,} bytes written, "
                f"{written['new_shards']} of {len(checkpoint.shards())} shards"
            )
            model[name] = model[name] * 2

        [shard] = [shard for shard in checkpoint.shards() if shard.key == name]
        say(f"\n12. One bit flips at byte {_flip(folder, shard):,} of a file of step {STEPS[1]}")
        report = verify(folder)
        problems_text = "; ".join(
            f"{p.name}: {p.kind}, within bytes {p.offset:,} to {p.offset + p.length:,}"
            for p in report.problems
        )
        say(f"   verify: {problems_text or 'good'}")
        verify(folder, repair=True)
        restored = load(folder)
        repaired = restored.step == STEPS[0] and restored.model == weights and bool(verify(folder))
        good = "every bit is as it was" if repaired else "NOT as it was"
        say(f"   verify, repair=True: back at step {restored.step}, {good}")

        part = load(folder, rank=RANK, world_size=RANKS, layout="rows").model[name]
        say(f"   load, rank {RANK} of {RANKS}, rows: {name} {weights[name].shape} -> {part.shape}")
        return Kept(problems_text, repaired)
