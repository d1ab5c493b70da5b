"""Sharded checkpoints in plain NumPy: the model that tests compare with."""

from pathlib import Path

import numpy as np

import mlstate

STEPS = [
    (),
    ((0, 1),),
    ((0, 3),),
    ((1, 2),),
    (("flat", 4),),
    ((1, 2), (0, 3)),
    ((0, 2), (0, 2)),
    ((1, 2), ("flat", 3)),
    ((0, 7),),
]


def cut(count, parts, index):
    """Start and end of a part, divided as torch.chunk does."""
    each = -(-count // parts) if count else 0
    return min(index * each, count), min((index + 1) * each, count)


def part(array, steps, index):
    """Part `index` of an array divided by `steps`, numbered row-major."""
    digits = []
    for _, parts in reversed(steps):
        digits.append(index % parts)
        index //= parts
    for (axis, parts), digit in zip(steps, reversed(digits), strict=True):
        if axis == "flat":
            flat = array.reshape(-1)
            start, end = cut(flat.size, parts, digit)
            array = flat[start:end]
        else:
            start, end = cut(array.shape[axis], parts, digit)
            array = array[(slice(None),) * axis + (slice(start, end),)]
    return array


def parts_of(steps):
    return int(np.prod([parts for _, parts in steps], dtype=int))


def same(a, b):
    """Whether two states have the same names, dtypes, shapes and bits."""
    assert sorted(a) == sorted(b)
    for name, array in a.items():
        other = np.asarray(b[name])
        array = np.asarray(array)
        assert (array.dtype, array.shape) == (other.dtype, other.shape), name
        assert array.tobytes() == other.tobytes(), name
    return True


def good(path, model, optimizer=None):
    """Check that the checkpoint verifies and holds these arrays."""
    loaded = mlstate.load(path)
    report = mlstate.verify(path)
    assert report, report
    return same(loaded.model, model) and (optimizer is None or same(loaded.optimizer, optimizer))


def views_of(base):
    """Arrays whose memory is not contiguous or not in native order, by the kind of memory."""
    return {
        "fortran": np.asfortranarray(base),
        "reversed": base[::-1],
        "every other": np.repeat(base, 2, axis=1)[:, ::2],
        "swapped": base.astype(base.dtype.newbyteorder(">")),
    }


def files_of(folder):
    """The bytes of all files in a folder and its folders, by their paths."""
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def flipped(data, at, mask=1):
    """Bytes with changed bits in one of them."""
    copy = bytearray(data)
    copy[at] ^= mask
    return bytes(copy)


def flip(path, at, mask=1):
    """Change bits of one byte of a file."""
    path = Path(path)
    path.write_bytes(flipped(path.read_bytes(), at, mask))


def flip_shard(folder, shard, at=0, mask=1):
    """Change bits of one byte of a shard."""
    flip(Path(folder, shard.path), shard.offset + at, mask)
