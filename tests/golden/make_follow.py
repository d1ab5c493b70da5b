"""Write the golden folder of versions whose tables have columns.

The folder ``follow`` was written before, by the same program: its tables have a dict for each
tensor.
"""

from pathlib import Path

import numpy as np

from mlstate.follow import Publisher

FOLDER = Path(__file__).parent / "follow_columns"


def model(step):
    """The weights of a step."""
    weights = {
        "a.weight": np.arange(600, dtype=np.float32).reshape(20, 30),
        "größe": np.linspace(-1, 1, 400).astype(np.float16),
        "ids": np.arange(5, dtype=np.int64),
        "scale": np.array(1.5),
    }
    for number in range(step):
        weights["a.weight"][3 + number, 7] = -0.0
        weights["größe"][300 * number] = number + 0.5
        weights["ids"][number] = -number
    return weights


if __name__ == "__main__":
    publisher = Publisher(FOLDER, anchor_every=2)
    assert [publisher.publish(step, model(step)) for step in range(3)] == [
        "anchor",
        "delta",
        "both",
    ]
