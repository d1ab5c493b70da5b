"""Versions of a model, followers of them, and a publisher's folder, for follow_histories.py."""

import contextlib
import io
import random
import warnings

import ml_dtypes
import numpy as np
from operation import describe

import mlstate
from mlstate.checkpoint import Layout, Shard
from mlstate.cli import command_line
from mlstate.errors import CheckpointWarning, MLStateError
from mlstate.follow import Follower, Publisher

HALF = Layout.axis(1, 2)
EMPTY = -1  # number of the version of arrays that never followed


# ---- the versions ----


class Versions:
    """The models of successive versions and their steps: all versions have other bytes.

    The tensor "number" has publisher and number of the version, so a mixture names one of its
    versions. `steps` mostly increase; a step that does not is a trainer that fell back.
    """

    def __init__(self, seed, count, publisher=0, *, falls_back=True):
        width = 2 * random.Random(seed).randint(1, 19)
        chance = np.random.default_rng((seed, publisher))
        size = 80_000 if seed % 16 == 0 else 40  # a separate file, or a shared one
        model = {
            "layers.0": chance.standard_normal((8, width)).astype("f4"),
            "layers.1": chance.standard_normal((4, size)).astype("f2"),
            "norm": chance.standard_normal(24).astype(ml_dtypes.bfloat16),
            "empty": np.zeros((0, 4), np.float32),
            "number": np.zeros(2, np.int64),
        }
        self.models, self.steps = [], []
        for number in range(count):
            for array in model.values():
                share = 0.02 if chance.random() < 0.9 else 0.9
                chosen = chance.random(array.size) < share
                chosen[: min(1, array.size)] = True
                array.flat[chosen] = chance.standard_normal(int(chosen.sum()))
            model["number"][:] = publisher, number
            self.models.append({name: array.copy() for name, array in model.items()})
            step = self.steps[-1] if number else 0
            self.steps.append(step + (not falls_back or chance.random() < 0.85))


class Copy:
    """A follower and its arrays: whole tensors, the right halves, or new arrays each time."""

    def __init__(self, path, versions, kind="whole", number=EMPTY):
        self.kind, self.versions = kind, versions
        into = {}
        for name, array in versions.models[0].items():
            part = np.zeros_like(self._part_of(array))
            is_part = part.shape != array.shape
            into[name] = Shard(part, HALF, 1, shape=array.shape) if is_part else part
        self.follower = Follower(path, into=into, double_buffer=kind == "double")
        if number != EMPTY:
            self.follower.advance(versions.steps[number])

    def __repr__(self):
        return f"{self.kind} follower"

    def _part_of(self, array):
        is_half = self.kind == "half" and array.ndim == 2 and array.shape[0]
        return array[:, array.shape[1] // 2 :] if is_half else array

    def number(self):
        """Return the version that the arrays have, bit for bit; raise if there is none."""
        state, step = self.follower.state, self.follower.version
        if step is None:
            assert not any(array.view(np.uint8).any() for array in state.values()), (
                "a mixture: no version, but not empty"
            )
            return EMPTY
        number = int(state["number"][1])
        model, expected = self.versions.models[number], self.versions.steps[number]
        assert step == expected, f"version {step}, but the arrays have step {expected}"
        for name, array in model.items():
            same = state[name].tobytes() == np.ascontiguousarray(self._part_of(array)).tobytes()
            assert same, f"a mixture: {name!r} is not of version {number}"
        return number

    def advance(self):
        """Advance; return the new version, or an exception of mlstate, and whether it warned.

        Raises AssertionError if the arrays have no version, if poll contradicts advance, or if
        another lineage causes no warning.
        """
        before, lineage = self.number(), self.follower._state.lineage
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                polled = self.follower.poll()
                step = self.follower.advance()
            except (MLStateError, MemoryError) as error:
                assert self.number() == before, f"moved in spite of {error!r}"
                return error, bool(caught)
        assert all(issubclass(each.category, CheckpointWarning) for each in caught), caught
        number = self.number()
        assert step == self.follower.version, f"returned {step}"
        assert polled == (None if number == before else step), f"poll returned {polled}"
        is_other = before != EMPTY and self.follower._state.lineage != lineage
        assert caught or not is_other, "another lineage caused no warning"
        self.follower.verify()
        return number, bool(caught)


# ---- a folder ----


class Folder:
    """Published versions in a folder, followers at several of them, and its initial files."""

    def __init__(self, seed, root, *, most_before=6, more=3):
        chance = random.Random(seed)
        self.root, self.path, self.more = root, f"{root}/weights", more
        self.before = chance.randrange(most_before)
        self.versions = Versions(seed, self.before + more + 3)
        self.options = {
            "anchor_every": chance.choice((1, 2, 3, 10)), "keep": chance.choice((None, None, 2, 3)),
            "base": "memory" if self.before else chance.choice(("memory", "disk")),
        }  # fmt: skip
        self.publisher, self.copies = None, [Copy(self.path, self.versions)]
        kinds = ["whole", "half", "double"]
        for number in range(self.before):
            self.publisher = self.publisher or Publisher(self.path, **self.options)
            self.publisher.publish(self.versions.steps[number], self.versions.models[number])
            if chance.random() < 0.5:
                self.copies.append(Copy(self.path, self.versions, chance.choice(kinds), number))

    def publish(self, numbers, report=lambda *_: None, publisher=None):
        """Publish versions; report each start, return and exception."""
        for number in numbers:
            report("start", number)
            try:
                if publisher is None:
                    publisher = self.publisher or Publisher(self.path, **self.options)
                kind = publisher.publish(self.versions.steps[number], self.versions.models[number])
            except (MLStateError, MemoryError) as error:
                report("raised", *describe(error))
            except KeyboardInterrupt:
                report("interrupted", number)
            else:
                report("done", number, kind)
        return publisher


def follow_once(path, folder):
    """Run ``mlstate follow --once``; return its exit status and its error output."""
    out, err = io.StringIO(), io.StringIO()
    words = ["follow", str(path), "--into", str(folder), "--once"]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command_line.run_command_line(words)
    return status, err.getvalue()


def number_of_folder(folder, versions):
    """Return the version that a Hugging Face folder has; raise if it has none."""
    if not folder.exists():
        return EMPTY
    state = mlstate.load_file(folder / "model.safetensors")
    number = int(state["number"][1])
    model = versions.models[number]
    assert state.keys() == model.keys(), f"has {sorted(state)}"
    for name, array in model.items():
        assert state[name].tobytes() == array.tobytes(), f"a mixture: {name!r} of {number}"
    return number
