"""The operations that save a state over another one, and writers that lose data on purpose.

Each has three states, "A", "B" and "C": it saves B over A, and then C. They differ in the bytes of
nearly every tensor and in the names of their tensors, so a mix of two equals none of them.
"""

import contextlib
import errno
import gc
import io
import json
import os
import re
import threading
import warnings
from typing import ClassVar

import numpy as np
from operation import Operation, differences, tensors

import mlstate.checkpoint  # also loads the C library, before processes are forked
import mlstate.follow
from mlstate.checkpoint import CheckpointManager
from mlstate.errors import CheckpointWarning

OUTCOMES = {"A": "old", "B": "new", "C": "next"}


class SaveFile(Operation):
    """One safetensors file, replaced."""

    name = "save_file"
    starts: ClassVar = ("old", "nothing")
    grow = 1
    older = None  # the state that a load may fall back to, with a warning
    harmless: ClassVar = {
        "sync_file_range": "a hint to the system; the sync that counts comes later",
        "close_read": "nothing was written through it",
        "stat": "only asks for the owner, which is kept where it can be",
        "unlink": "what is left behind is a temporary file",
    }

    def make_states(self):
        self.states = {which: tensors(which, self.grow) for which in "ABC"}

    def prepare(self, root):
        self.save(root, "A")

    def call(self, root):
        self.save(root, "B")

    def call_again(self, root):
        self.save(root, "C")
        return "next"

    def outcome(self, root):
        which, arrays = self.load(root)
        wrong = differences(arrays, self.states[which])
        assert not wrong, f"loads as {which} with other content: {wrong}"
        self.check(root)
        return OUTCOMES[which]

    def check(self, root):
        """Raise AssertionError if a folder that loads is wrong in another way."""

    def save(self, root, which):
        """Save a state into the folder."""
        mlstate.save_file(self.states[which], f"{root}/state", {"which": which}, overwrite=True)

    def load(self, root, *, mmap=False):
        """Return which state the metadata name, and the loaded arrays."""
        path = f"{root}/state"  # a str, because os.fspath of a Path hides a MemoryError
        which = mlstate.checkpoint.load_metadata(path)["which"]
        return which, mlstate.load_file(path, mmap=mmap)

    def left(self, root, was_killed):
        names = [p.relative_to(root).as_posix() for p in sorted(root.rglob("*"))]
        if was_killed:  # save_file documents that a killed process leaves this file
            names = [name for name in names if not re.fullmatch(r"\.mlstate-\w{16}\.tmp", name)]
        return [name for name in names if name != "state"]


class SaveLargeFile(SaveFile):
    """So large that writeback starts before the end (sync_file_range)."""

    name = "save_large_file"
    grow = 9
    is_heavy = True


# ---- folders ----


def strings_of(value):
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_of(inner)


def named_by(folder, root):
    """The paths in the checkpoint `folder` that the manifest `root` and its indexes name."""
    manifest = json.loads((folder / root).read_bytes())
    indexes = {f"index/{manifest['generation']}.{n}.json" for n in range(manifest["world_size"])}
    texts = {t for name in indexes for t in strings_of(json.loads((folder / name).read_bytes()))}
    return indexes | {text for text in texts if re.fullmatch(r"\w+/.+\.safetensors", text)}


def lacking(folder, root):
    """The files that an existing manifest needs and that are missing or unreadable."""
    try:
        return [f"{root} lacks {name}" for name in named_by(folder, root)
                if not (folder / name).exists()]  # fmt: skip
    except (OSError, ValueError) as error:
        return [f"{root} is of no use: {error}"]


class SaveCheckpoint(SaveFile):
    """A checkpoint folder, saved again with model and optimizer."""

    name = "checkpoint"
    folder = "ckpt"
    harmless: ClassVar = {
        **SaveFile.harmless,
        "open": "what cannot be compared with what is to be saved is written again",
        "read": "as open",
        "pread": "as open",
        "rmdir": "as unlink",
        "flock:ENOLCK": "a file system without locks; who writes there is on his own",
        "unlock": "closing the file, or the end of the process, does it too",
        "fcntl": "asks to go past the system's cache, which is not needed",
    }
    pack_below_bytes = 100_000  # some tensors share files, others have their own
    options: ClassVar = {}  # options of the save

    def make_states(self):
        """The optimizer has moments of each parameter."""
        self.states, self.parts = {}, {}
        for which in "ABC":
            model = self.model(which)
            moments = {
                f"{name}.{moment}": np.roll(array, shift)
                for name, array in model.items()
                for moment, shift in (("m", 1), ("v", 2))
                if array.nbytes < 1 << 20
            }
            self.parts[which] = model, moments
            self.states[which] = together(model, moments)

    def model(self, which):
        """The parameters of a state."""
        return tensors(which)

    def state(self, which):
        """The content of a save: model and optimizer."""
        model, moments = self.parts[which]
        optimizer = mlstate.OptimizerStateDict(moments, optimizer_type="adam", step=ord(which))
        return mlstate.ModelStateDict(model), optimizer

    def save(self, root, which):
        model, optimizer = self.state(which)
        mlstate.save(
            f"{root}/{self.folder}", model=model, optimizer=optimizer, metadata={"which": which},
            pack_below_bytes=self.pack_below_bytes, **self.options,
        )  # fmt: skip

    def load(self, root, *, mmap=False):
        checkpoint = mlstate.load(f"{root}/{self.folder}", mmap=mmap)
        which = checkpoint.metadata["which"]
        assert checkpoint.optimizer.step == ord(which), "the optimizer's step is another state's"
        return which, together(checkpoint.model, checkpoint.optimizer)

    def check(self, root):
        """The folder must also verify."""
        report = mlstate.checkpoint.verify(f"{root}/{self.folder}")
        assert report, f"verify: {report.problems}"

    def roots(self, folder):
        """Manifests that must exist, except the newest."""
        return []

    def expected_files(self, folder):
        """The files that the manifests need."""
        expected_names = {"lock", "manifest.json"}
        for name in ["manifest.json", *self.roots(folder)]:
            with contextlib.suppress(OSError, ValueError):  # judge_content reports it
                expected_names |= {name, *named_by(folder, name)}
        return expected_names

    def left(self, root, was_killed):
        folder = root / self.folder
        if not folder.exists():
            return sorted(p.name for p in root.iterdir())
        files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
        others = {p.name for p in root.iterdir()} - {self.folder}
        return sorted(files - self.expected_files(folder)) + sorted(others)


def together(model, optimizer):
    """Model and optimizer in one dict."""
    return {
        **{f"model {name}": np.asarray(array) for name, array in model.items()},
        **{f"optimizer {name}": np.asarray(array) for name, array in optimizer.items()},
    }


class SaveStep(SaveCheckpoint):
    """A manager's third step, which prunes the first."""

    name = "manager"
    older = "C"  # step 1; "A" is step 2, "B" step 3

    def renew(self):
        self.manager = None  # of a call that was interrupted

    def save(self, root, which):
        if self.manager is None:
            self.manager = CheckpointManager(f"{root}/{self.folder}", keep=2)
        with self.manager as manager:
            if which == "A":
                self.save_step(manager, 1, self.older)
            newest = manager.latest_step() or 0
            self.save_step(manager, newest + 1, which)

    def save_step(self, manager, step, which):
        model, optimizer = self.state(which)
        manager.save(
            step, model=model, optimizer=optimizer, metadata={"which": which}, **self.options
        )

    def load(self, root, *, mmap=False):
        with CheckpointManager(f"{root}/{self.folder}", keep=2) as manager:
            checkpoint = manager.restore_latest(mmap=mmap)
        return checkpoint.metadata["which"], together(checkpoint.model, checkpoint.optimizer)

    def check(self, root):
        """Every manifest must be complete, not only the newest."""
        folder = root / self.folder
        complaints = [text for name in self.roots(folder) for text in lacking(folder, name)]
        assert not complaints, complaints
        # power may fail between writing a first step's own manifest and manifest.json
        if (folder / "manifest.json").exists():
            super().check(root)

    def roots(self, folder):
        return [p.relative_to(folder).as_posix() for p in (folder / "roots").glob("*.json")]


def some_rows(which, share, of):
    """The parameters of a state: `share` of the rows of large ones, and the others from `of`."""
    model = tensors(which)
    for name, array in model.items():
        if array.ndim == 2 and array.nbytes > 1 << 18:
            rows = np.random.default_rng(ord(which)).random(len(array)) < share
            model[name] = np.where(rows[:, None], array, of(name))
    return model


class SaveSparse(SaveCheckpoint):
    """Rows of zeros are not stored; all moments of one parameter are zero."""

    name = "sparse"
    options: ClassVar = {"sparse": True}

    def model(self, which):
        state = some_rows(which, 0.3, lambda name: np.float32(0))
        return {**state, "layer.0.weight": np.zeros_like(state["layer.0.weight"])}


class SaveIncremental(SaveStep):
    """A manager's third step: a layer over the layer of the second, over the first step's shard.

    The first step is pruned, but its shard is still needed.
    """

    name = "incremental"
    options: ClassVar = {"sparse": True, "incremental": True, "pack_below_bytes": 100_000}

    def model(self, which):
        return some_rows(which, 0.0 if which == self.older else 0.2, tensors(self.older).get)


class SaveCompressed(SaveIncremental):
    """The same with rounded numbers: comparing, layering and writing work on compressed data."""

    name = "compressed"
    is_heavy = True
    options: ClassVar = {**SaveIncremental.options, "compress": "zlib"}

    def model(self, which):
        model = super().model(which)
        for name, array in model.items():
            if array.dtype == np.float32 and array.size > 10_000:
                model[name] = (array.view(np.uint32) & 0xFFFF_0000).view(np.float32)
        return model


class PublishSteps(SaveStep):
    """A new publisher's anchor, which has the published state, and a delta; a follower loads."""

    name = "publisher"
    older = None
    options: ClassVar = {}

    def make_states(self):
        self.states = {which: self.model(which) for which in "ABC"}

    def model(self, which):
        """States with the same tensors; every 50th element differs."""
        model = {name: array.copy() for name, array in tensors("A").items()}
        for name, array in tensors(which).items():
            if name in model and array.size:
                model[name].reshape(-1)[::50] = array.reshape(-1)[::50]
        return model

    def load_step(self, root):
        """Return the step that a new follower has, and its arrays."""
        arrays = {name: np.zeros_like(array) for name, array in self.states["A"].items()}
        follower = mlstate.follow.Follower(f"{root}/{self.folder}", into=arrays)
        with warnings.catch_warnings():  # before the first commit
            warnings.filterwarnings("ignore", ".*nothing is published here yet", CheckpointWarning)
            step = follower.advance()
        if step is None:
            raise FileNotFoundError(errno.ENOENT, "nothing is published")
        return step, arrays

    def save(self, root, which):
        publisher = mlstate.follow.Publisher(f"{root}/{self.folder}")
        step = ord(which) % 3
        if os.path.lexists(f"{root}/{self.folder}/manifest.json"):
            before, arrays = self.load_step(root)
            publisher.publish(before, arrays)
            step += before - before % 3 + 3
        publisher.publish(step, self.states[which])

    def load(self, root, *, mmap=False):
        step, arrays = self.load_step(root)
        return {ord(which) % 3: which for which in "ABC"}[step % 3], arrays


class SaveAsync(SaveCheckpoint):
    """A checkpoint written while its state is overwritten, as soon as that is allowed.

    Only part of the state fits the staging memory: the rest is written before.
    """

    name = "async"
    interrupted: ClassVar = (threading.__file__,)
    harmless: ClassVar = SaveCheckpoint.harmless | {
        f"{call}:{turn}": "looks for a manager's steps; the thread looks again"
        for call, turn in (("open_folder", 1), *(("list", turn) for turn in range(1, 5)))
    }
    budget = 900_000

    def save(self, root, which):
        model, moments = (
            {name: array.copy() for name, array in state.items()} for state in self.parts[which]
        )
        optimizer = mlstate.OptimizerStateDict(moments, optimizer_type="adam", step=ord(which))
        handle = mlstate.checkpoint.save_async(
            f"{root}/{self.folder}", model=model, optimizer=optimizer, metadata={"which": which},
            pack_below_bytes=self.pack_below_bytes, max_staging_bytes=self.budget,
        )  # fmt: skip
        try:
            handle.staged()
            overwrite(model, moments)
        finally:  # ending here without waiting would equal a kill
            handle.wait()


def overwrite(*states):
    """Overwrite the whole state, as training does."""
    for state in states:
        for array in state.values():
            array[...] = 7


class SaveStepAsync(SaveStep):
    """A manager's third step, started while the second is still being written."""

    name = "async-manager"
    interrupted: ClassVar = (threading.__file__,)

    def save_step(self, manager, step, which):
        model, optimizer = self.state(which)
        model = {name: array.copy() for name, array in model.items()}
        handle = manager.save_async(
            step, model=model, optimizer=optimizer, metadata={"which": which}
        )
        handle.staged()
        overwrite(model)


class SaveByRanks(SaveCheckpoint):
    """Two processes, each with its own rows of the large tensors."""

    name = "ranks"
    ranks = prepare_ranks = 2
    marks: ClassVar = ("torch",)
    is_heavy = True
    # After the commit, rank 0 lists the roots twice, to plan which rank deletes which old files.
    harmless: ClassVar = SaveCheckpoint.harmless | {
        f"{call}:{turn}": "rank 0 lists the old files once more, and deletes them itself"
        for call, turns in (("open_folder", (8, 9)), ("list", range(5, 13)))
        for turn in turns
    }

    def missing(self):
        import torch.distributed as dist

        return None if dist.is_gloo_available() else "torch has no gloo"

    needs: ClassVar = ("torch",)

    def make_states(self):
        import torch.distributed  # before the fork: it takes seconds  # noqa: F401

        super().make_states()

    def enter(self, rank, world_size, meeting):
        from datetime import timedelta

        import torch.distributed as dist

        from mlstate.integrations.torch import TorchGroup

        store = dist.FileStore(meeting, world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=10)
        )
        self.group = TorchGroup()
        self.group.barrier()  # connected, before a fault can end one of them

    def save(self, root, which):
        from mlstate.checkpoint import Layout, Shard

        rows = Layout.rows(self.ranks)

        def share(state):
            for name, array in list(state.items()):
                if array.ndim == 2:
                    rows_of_rank = rows.take(array, self.group.rank)
                    state[name] = Shard(rows_of_rank, rows, self.group.rank, shape=array.shape)
            return state

        model, optimizer = self.state(which)
        mlstate.save(
            f"{root}/{self.folder}", model=share(model), optimizer=share(optimizer),
            metadata={"which": which}, group=self.group, pack_below_bytes=self.pack_below_bytes,
        )  # fmt: skip


# ---- tiers ----


class MoveTiers(SaveFile):
    """A unit of a tiered state: promoted, changed and demoted again."""

    name = "tiers"
    folder = "tiers"
    unit = "layer.1.weight"
    harmless: ClassVar = {
        **SaveCheckpoint.harmless,
        "mmap": "what cannot be compared with what is to be written is written again",
    }

    def make_states(self):
        """One parameter; the other tensors of a state become its optimizer states."""
        self.states = {}
        for which in "ABC":
            arrays = {name.replace(".", "_"): a for name, a in tensors(which).items()}
            self.states[which] = {"which": np.array(ord(which)), **arrays}

    def save(self, root, which):
        parameter, states = self.parts(which)
        folder = f"{root}/{self.folder}"
        try:
            tiers = mlstate.checkpoint.TieredState.open(folder)
        except FileNotFoundError:
            tiers = mlstate.checkpoint.TieredState(None, None, folder)
        with tiers:
            if self.unit not in tiers:
                arrays = {f"{self.unit}.{name}": array for name, array in states.items()}
                tiers.add({self.unit: parameter}, arrays)
            else:
                tiers.promote(self.unit)
                with tiers.use(self.unit) as unit:
                    unit.parameter[:] = parameter
                    unit.states = states
            tiers.demote(self.unit, to="cold")

    def parts(self, which):
        """The parameter of a state, and its other tensors."""
        states = {name: array.copy() for name, array in self.states[which].items()}
        return states.pop(self.unit.replace(".", "_")), states

    def load(self, root, *, mmap=False):
        """Read the unit's file without changing it."""
        stored = mlstate.load_file(f"{root}/{self.folder}/{self.unit}.safetensors", mmap=mmap)
        prefix = f"optim_state/{self.unit}."
        arrays = {name.removeprefix(prefix): array for name, array in stored.items()}
        arrays[self.unit.replace(".", "_")] = arrays.pop(f"params/{self.unit}")
        return chr(arrays["which"]), arrays

    def check(self, root):
        """The next process must also be able to open it."""
        # A signal just before `with` leaves the lock with an object of the kept exception.
        self.kept = None
        gc.collect()
        folder = f"{root}/{self.folder}"
        with mlstate.checkpoint.TieredState.open(folder) as tiers, tiers.use(self.unit) as unit:
            arrays = {self.unit.replace(".", "_"): unit.parameter, **unit.states}
        which = chr(arrays["which"])
        wrong = differences(arrays, self.states[which])
        assert not wrong, f"opens as {which} with other content: {wrong}"

    left = SaveCheckpoint.left

    def expected_files(self, folder):
        return {"lock", f"{self.unit}.safetensors"}


# ---- writers that lose data, which the attacks must find ----


class Careless(SaveFile):
    """A defective writer that the harness must detect.

    It writes into the file itself, ignores some errors, misinterprets others, and leaves files that
    it cannot remove.
    """

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
    """Replaces a file by renaming, but omits one of the two syncs."""

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


SAVES = [
    SaveFile(), SaveLargeFile(), SaveCheckpoint(), SaveStep(), SaveSparse(), SaveIncremental(),
    SaveCompressed(), PublishSteps(), SaveAsync(), SaveStepAsync(), SaveByRanks(), MoveTiers(),
]  # fmt: skip
LOSSY = [Careless(), *(Forgetful(step) for step in ("file", "folder", "nothing"))]
