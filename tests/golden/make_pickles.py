"""Write the pickles that are missing here; existing ones represent users' files.

Usage: python tests/golden/make_pickles.py

An existing file is never rewritten: every version of mlstate must load it.
"""

import pickle
from pathlib import Path

import torch
from pickled_objects import OBJECTS, model_state, optimizer_state, state_dict

HERE = Path(__file__).resolve().parent / "pickles"
STATES = {"state_dict": state_dict, "model_state": model_state, "optimizer_state": optimizer_state}


def main():
    """Write the missing pickles."""
    HERE.mkdir(exist_ok=True)
    for name, make in OBJECTS.items():
        path = HERE / f"{name}.pickle"
        if not path.exists():
            path.write_bytes(pickle.dumps(make(), 4))
    for name, make in STATES.items():
        path = HERE / f"{name}.pt"
        if not path.exists():
            torch.save(make(), path)


if __name__ == "__main__":
    main()
