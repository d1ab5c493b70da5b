# pyright: strict
"""A user's first script, which `tools/wheel_test.sh` runs and checks with an installed package.

Warnings are errors; mypy and pyright check it in their strict modes.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mlstate
from mlstate.activation import Chain, plan
from mlstate.kv import create_attention_size_mask


def check_checkpoints(folder: Path) -> None:
    weights: dict[str, NDArray[Any]] = {"w": np.ones((3, 4), np.float32), "b": np.zeros(4)}
    mlstate.save(folder / "run", weights, metadata={"note": "first"})
    assert mlstate.verify(folder / "run")
    state = mlstate.load(folder / "run")
    assert np.array_equal(state.model["w"], weights["w"])
    assert state.metadata["note"] == "first"
    target = {name: np.zeros_like(array) for name, array in weights.items()}
    mlstate.load_into(target, state.model)
    assert mlstate.diff(target, weights).identical
    mlstate.save_file(weights, folder / "weights.safetensors")
    assert sorted(mlstate.load_file(folder / "weights.safetensors")) == ["b", "w"]
    with mlstate.CheckpointManager(folder / "steps", keep=2) as manager:
        for step in range(3):
            weights["b"] += 1
            manager.save(step, weights)
        print("steps:", manager.steps())


def check_caches() -> None:
    cache = np.ones((2, 1, 256, 64), np.float16)
    longer = mlstate.transition_kv_state(cache, 512, 180)
    back = mlstate.compact_kv_state(longer, 256, 180)
    assert np.array_equal(back[:, :, :180], cache[:, :, :180])
    print("mask:", create_attention_size_mask(8, 4, 6).shape)


def check_plans() -> None:
    chain = Chain([1.0] * 4, [2.0] * 4, [1000] * 5, [4000] * 4)
    print("plan:", plan(chain, 12_000))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        check_checkpoints(Path(folder))
    check_caches()
    check_plans()
    print("library:", [path.name for path in Path(mlstate.get_library_dir()).iterdir()])


main()
