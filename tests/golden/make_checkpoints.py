"""Write the checkpoints that are missing here; existing ones represent users' folders.

Usage: python tests/golden/make_checkpoints.py

An existing folder is never rewritten: every version of mlstate must load it.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np

import mlstate
from mlstate.checkpoint import Layout, Shard, reshard

HERE = Path(__file__).resolve().parent / "checkpoints"


def table(step):
    """Rows that are mostly zero; from step 1 on one more row is not."""
    array = np.zeros((64, 24), np.float32)
    array[::16] = np.arange(96, dtype=np.float32).reshape(4, 24) + 0.5
    if step:
        array[9] = -1
    return array


def model(step=0):
    """Parameters of several dtypes and sizes, some empty, with names that need escapes."""
    return mlstate.ModelStateDict(
        {
            "embed.weight": table(step),
            "layer.0.weight": np.arange(42, dtype=np.float64).reshape(6, 7) / 3,
            "layer.0.bias": np.arange(6, dtype=np.int16) - 3,
            'a "quoted" \\ name.ä': np.array([True, False, True]),
            "empty": np.zeros((0, 3), np.uint8),
            "scalar": np.array(2.5, np.float16),
            "long": (np.arange((1 << 20) + 9) % 251).astype(np.uint8),
        },
        model_type="golden",
        layer_count=1,
    )


def optimizer():
    """States shaped like their parameters, one of another shape, and one without a parameter."""
    state = mlstate.OptimizerStateDict.create("adafactor")
    state["layer.0.weight.m"] = np.linspace(0, 1, 42, dtype=np.float32).reshape(6, 7)
    state["layer.0.weight.row"] = np.arange(6, dtype=np.float32)
    state["count"] = np.int64(7)
    return state


def small(state):
    """A state without its long tensor."""
    return {name: array for name, array in state.items() if name != "long"}


def save_dense(folder):
    """One rank, whole tensors, one of them of two blocks."""
    mlstate.save(folder, model(), optimizer(), step=3, metadata={"run": ["golden", 1.5, None]})


def save_ranks(folder):
    """Two ranks, rows of each tensor."""
    with tempfile.TemporaryDirectory() as work:
        mlstate.save(Path(work) / "one", small(model()), optimizer(), step=4)
        reshard(Path(work) / "one", folder, layout="rows", world_size=2)


def save_layers(folder):
    """Rows that are not zero, then one changed row."""
    for step in (0, 1):
        mlstate.save(
            folder,
            {"zeros": np.zeros((50, 32), np.float32), **small(model(step))},
            step=step,
            sparse=True,
            incremental=step > 0,
            pack_below_bytes=64,
        )


def save_compressed(folder):
    """A compressed tensor, and one that is also sparse."""
    counts = np.arange(8192, dtype=np.int64).reshape(512, 16) % 9
    sparse = np.zeros((4096, 16), np.int32)
    sparse[1024:1536] = np.random.default_rng(5).integers(0, 1 << 20, (512, 16))
    state = {"counts": counts, "sparse": sparse, "plain": np.arange(5, dtype=np.int8)}
    mlstate.save(folder, state, step=5, sparse=True, compress="zlib", pack_below_bytes=64)


def save_shard(folder):
    """One part of a tensor divided by two layouts, with a tier and a version."""
    layout = Layout.axis(1, 2) * Layout.flat(3)
    array = np.arange(35, dtype=np.float32).reshape(5, 7)
    part = layout.shard(array, 4, tier="cold", version=9)
    assert isinstance(part, Shard)
    mlstate.save(folder, {"w": part}, step=6)


SAVES = {
    "dense": save_dense,
    "ranks": save_ranks,
    "layers": save_layers,
    "compressed": save_compressed,
    "shard": save_shard,
}


def main():
    """Write the missing checkpoints."""
    HERE.mkdir(exist_ok=True)
    for name, save in SAVES.items():
        folder = HERE / f"{name}-3"
        if not folder.exists():
            save(folder)
            (folder / "lock").unlink(missing_ok=True)
            shutil.rmtree(folder / "roots", ignore_errors=True)


if __name__ == "__main__":
    main()
