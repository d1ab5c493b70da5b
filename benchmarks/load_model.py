"""Load a file into a real model in a new process and print, as JSON, milliseconds and MiB.

``python load_model.py NAME FOLDER`` with a name of `CALLS`; `bench_state.py` starts it many times.
The model, a transformer encoder with other weights, and all imports are complete before the clock
starts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from resident import forget_peak, peak

import mlstate
from mlstate import state


def model() -> torch.nn.Module:
    """Some 19 million parameters."""
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def load_into(module: torch.nn.Module, folder: Path) -> None:
    weights = mlstate.load_file(folder / "weights.safetensors", mmap=True)
    state.load_into(module.state_dict(), weights)


def load_into_verified(module: torch.nn.Module, folder: Path) -> None:
    state.load_into(module.state_dict(), mlstate.load_file(folder / "weights.safetensors"))


def to_torch(module: torch.nn.Module, folder: Path) -> None:
    weights = mlstate.load_file(folder / "weights.safetensors", mmap=True)
    module.load_state_dict(weights.to_torch())


def torch_load(module: torch.nn.Module, folder: Path) -> None:
    module.load_state_dict(torch.load(folder / "weights.pt"))


def torch_load_mmap(module: torch.nn.Module, folder: Path) -> None:
    module.load_state_dict(torch.load(folder / "weights.pt", mmap=True))


def safetensors_torch(module: torch.nn.Module, folder: Path) -> None:
    import safetensors.torch

    module.load_state_dict(safetensors.torch.load_file(folder / "weights.safetensors"))


CALLS = {
    "torch.load + load_state_dict": torch_load,
    "torch.load(mmap=True) + load_state_dict": torch_load_mmap,
    "safetensors.torch + load_state_dict": safetensors_torch,
    "mlstate.load_file + load_into": load_into_verified,
    "mlstate.load_file(mmap=True) + load_into": load_into,
    "mlstate.load_file(mmap=True) + to_torch": to_torch,
}


def write(folder: Path) -> int:
    """Write the files to load; return the bytes of the weights."""
    weights = model().state_dict()
    torch.save(weights, folder / "weights.pt")
    arrays = mlstate.StateDict.from_torch(weights)
    mlstate.save_file(arrays, folder / "weights.safetensors")
    return arrays.nbytes


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "write":
        print(write(folder))
        return
    module = model()
    call = CALLS[name]
    if "safetensors" in name:
        import safetensors.torch  # noqa: F401
    before = forget_peak()
    start = time.perf_counter_ns()
    call(module, folder)
    elapsed = (time.perf_counter_ns() - start) * 1e-6
    print(json.dumps({"ms": elapsed, "extra_mib": peak() - before}))


if __name__ == "__main__":
    main()
