"""What is saved over what, how it is read back, and which files may lie there afterwards.

Each scenario has three states, "A", "B" and "C", which differ in the bytes of nearly
every tensor, and in which tensors they have: so a mix of two is none of them.
"""

import contextlib
import errno
import io
import os
import re
from typing import ClassVar

import numpy as np

import mlstate

TENSORS = {
    # name: shape, dtype, and the states that have it
    "embed.weight": ((300, 257), "<f4", "ABC"),
    "layer.0.weight": ((64, 64), "<f4", "ABC"),
    "layer.0.bias": ((64,), "<f8", "ABC"),
    "layer.1.weight": ((1030, 256), "<f4", "ABC"),
    "only.a": ((5,), "<i4", "A"),
    "only.b": ((7, 3), "<u2", "BC"),
    "empty": ((0, 3), "<f4", "ABC"),
    "frozen": ((10_000,), "<f4", "ABC"),  # the same in all
    "step": ((), "<i8", "ABC"),
}


def tensors(which, grow=1):
    """The arrays of a state: the same ones in every process."""
    state = {}
    for number, (name, (shape, dtype, states)) in enumerate(TENSORS.items()):
        if which in states:
            if name == "layer.1.weight":
                shape = (shape[0] * grow, shape[1])
            seed = (number, 0 if name == "frozen" else ord(which))
            raw = np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize)
            state[name] = np.frombuffer(raw, dtype).reshape(shape)
    return state


def differences(got, expected):
    """What makes `got` something else than `expected`; empty where they are the same."""
    if got.keys() != expected.keys():
        return [f"names {sorted(got)}"]
    return [
        name
        for name, array in expected.items()
        if got[name].dtype != array.dtype
        or got[name].shape != array.shape
        or got[name].tobytes() != array.tobytes()
    ]


class SaveFile:
    """One safetensors file, replaced."""

    name = "save_file"
    ranks = 1
    grow = 1
    heavy = False  # fewer points are tried in the ordinary test run

    # Calls whose failure need not be told, and why that does no harm.
    harmless: ClassVar = {
        "sync_file_range": "a hint to the system; the sync that counts comes later",
        "close_read": "nothing was written through it",
        "stat": "only asks for the owner, which is kept where it can be",
        "unlink": "what is left behind is a temporary file",
    }

    def missing(self):
        """Why it cannot run here, or None."""
        return

    def prepare(self):
        """Whatever takes long, once, before children are forked."""
        self.states = {which: tensors(which, self.grow) for which in "ABC"}

    def enter(self, rank, world_size, meeting):
        """Begin a child; `meeting` is a path outside the root for ranks to find each other."""

    def save(self, root, which):
        """Save a state into the folder."""
        mlstate.save_file(self.states[which], f"{root}/state", {"which": which})

    def load(self, root):
        """What a reader finds: which state the metadata name, and the arrays."""
        path = f"{root}/state"  # os.fspath of a Path hides it when memory runs out
        return mlstate.checkpoint.load_metadata(path)["which"], mlstate.load_file(path)

    def other_complaints(self, root):
        """What else is wrong with a folder that loads."""
        return []

    def strangers(self, root, was_killed):
        """Files that should not be there once a save has ended."""
        found = [p.relative_to(root).as_posix() for p in sorted(root.rglob("*"))]
        if was_killed:  # as save_file's documentation says
            found = [name for name in found if not re.fullmatch(r"\.mlstate-\w{16}\.tmp", name)]
        return [name for name in found if name != "state"]


class SaveLargeFile(SaveFile):
    """Large enough that writing starts before the end (sync_file_range)."""

    name = "save_large_file"
    grow = 9
    heavy = True


class Careless(SaveFile):
    """What the harness must find out: writes into the file itself, is silent about some
    errors and mistaken about others, and leaves what it cannot remove."""

    name = "careless"
    harmless: ClassVar = {}

    def save(self, root, which):
        packed = io.BytesIO()
        np.savez(packed, __which__=np.array(which), **self.states[which])
        (root / "other").write_bytes(b"")
        (root / "other").rename(root / f"old-{which}")
        with contextlib.suppress(OSError):
            (root / f"old-{which}").unlink()
        try:
            fd = os.open(root / "state", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.write(fd, packed.getvalue())
        except OSError:
            return
        try:
            os.fsync(fd)
        except OSError as error:
            raise mlstate.StoreError(errno.ENOSPC, "no room") from error
        os.close(fd)

    def load(self, root):
        with (root / "state").open("rb") as raw, np.load(raw) as file:
            arrays = dict(file)
        return str(arrays.pop("__which__")), arrays


class Forgetful(Careless):
    """Replaces a file by renaming, but without one of the two syncs."""

    def __init__(self, forgets):
        self.name = f"forgets-{forgets}"
        self.forgets = forgets

    def save(self, root, which):
        with (root / "temporary").open("wb") as file:
            np.savez(file, __which__=np.array(which), **self.states[which])
            file.flush()
            if self.forgets != "file":
                os.fsync(file.fileno())
        (root / "temporary").rename(root / "state")
        folder = os.open(root, os.O_RDONLY)
        if self.forgets != "folder":
            os.fsync(folder)
        os.close(folder)


def by_name(*scenarios):
    """Scenarios by their names."""
    return {scenario.name: scenario for scenario in scenarios}


ALL = by_name(SaveFile(), SaveLargeFile())
BAD = by_name(Careless(), *(Forgetful(what) for what in ("file", "folder", "nothing")))
