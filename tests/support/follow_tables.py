"""Tables of versions: changed ones, and the earlier form, which has a dict for each tensor."""

import numpy as np

from mlstate import _core


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


def unpack(table):
    """Split the numbers of a table, in place, into `columns`, `shapes` and `names`."""
    rows, lengths = table["rows"], table["lengths"]
    numbers = table["table"]
    table["columns"] = numbers[: 9 * rows].reshape(9, rows).copy()
    table["shapes"] = numbers[9 * rows :][:lengths]
    table["names"] = numbers[9 * rows + lengths :].view(np.uint8)[: table["name_bytes"]]
    return table


def pack(table):
    """Undo `unpack`, with the checksum of the changed table."""
    columns, shapes, names = (table.pop(name) for name in ("columns", "shapes", "names"))
    table |= {"rows": columns.shape[1], "lengths": shapes.size, "name_bytes": names.size}
    words = np.append(names, np.zeros(-names.size % 8, np.uint8)).view(np.uint64)
    table["table"] = np.concatenate([columns.reshape(-1), shapes, words])
    table["crc32c"] = _core.array_crc32c(table["table"], 0)
    return table
