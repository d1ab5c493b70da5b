"""Tables of versions in the earlier form, which has a dict for each tensor."""

import numpy as np


def encode_by_tensor(changes, rank):
    """The state ``follow`` of a rank in the earlier form."""
    tensors = {}
    for name, (part, crc32c, delta) in changes.items():
        tensors[name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "layout": [list(step) for step in part.layout.steps],
            "part": part.number,
            "crc32c": crc32c,
            "gaps": None if delta is None else delta.gaps,
            "values": None if delta is None else delta.values.view(np.uint8),
        }
    return {"rank": rank, "tensors": tensors}
