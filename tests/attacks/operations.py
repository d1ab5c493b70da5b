"""The registry of operations: each is attacked in every way.

A new operation is a subclass of `Operation`, and one entry here.
"""

import atexit
import errno
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import ClassVar

import changed_objects
import numpy as np
import pytest
from any_format import read_any, write_any
from fake_states import use_fake_arrays
from follow_histories import DEFECTIVE, FOLLOW
from operation import Operation, Read
from prompt_histories import PromptHistory
from saves import LOSSY, SAVES, MoveTiers, SaveCheckpoint
from toy_caches import HYBRID, TOKENS, check_every_match, prefilled, store_at

import mlstate
from mlstate import coreai
from mlstate.checkpoint import (
    CheckpointManager,
    TieredState,
    export_huggingface,
    export_huggingface_async,
    prune,
    reshard,
)
from mlstate.checkpoint._files.safetensors_verify import verify_file
from mlstate.collectives import LocalGroup, SingleGroup
from mlstate.errors import CollectiveError, FormatError
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit

OLD = {"a": np.arange(8, dtype=np.float32), "b": np.zeros(3000), "c": np.ones((4, 4))}
NEW = {"a": np.arange(8, dtype=np.float32) + 1, "b": np.ones(3000), "c": np.ones((4, 4))}
LITTER = "0123456789abcdef"


def same(actual, state):
    """Whether a state equals the saved one."""
    return all(np.array_equal(actual[name], state[name]) for name in state)


def which_of(actual):
    """Return "old" or "new" for a state; raise for any other one."""
    assert same(actual, OLD) or same(actual, NEW), "neither the old state nor the new"
    return "old" if same(actual, OLD) else "new"


def unused_files(folder):
    """Return the temporary and unused files in a checkpoint."""
    report = mlstate.verify(folder)
    return [*report.leftover, *report.strange, *map(str, folder.rglob("*.tmp"))]


# ---- checkpoints ----


class Verify(Operation):
    """Verify a checkpoint, a file of tensors, and a model of Core AI."""

    name = "verify"
    reads = may_go_on = True

    def prepare(self, folder):
        mlstate.save(folder / "ckpt", OLD)
        mlstate.save_file(OLD, folder / "w.safetensors")
        model = folder / "m.aimodel"
        model.mkdir()
        for name, data in {
            "main.mlirb": b"program",
            "main.hash": hashlib.sha256(b"program").digest(),
            "metadata.json": b"{}",
        }.items():
            (model / name).write_bytes(data)

    def call(self, folder):
        mlstate.verify(folder / "ckpt")
        verify_file(folder / "w.safetensors")
        coreai.verify(folder / "m.aimodel")


class Repair(Operation):
    """Replace a damaged step by an older one."""

    name = "repair"
    folder = "ckpt"
    may_go_on = True  # the report has the problems that remain
    damage = (-1, os.SEEK_END)  # the place of a wrong byte in a file
    repaired = OLD
    steps = (1, 2)

    def prepare(self, folder):
        manager = CheckpointManager(folder / "ckpt", keep=3)
        for step in (1, 2):
            manager.save(step, OLD)
        path = next(iter(manager.save(3, NEW).files()))
        with (folder / "ckpt" / path).open("r+b") as file:
            file.seek(*self.damage)
            file.write(b"x")

    def call(self, folder):
        mlstate.verify(folder / "ckpt", repair=True)

    def outcome(self, folder):
        manager = CheckpointManager(folder / "ckpt", keep=None)
        try:
            model = mlstate.load(folder / "ckpt").model
        except FormatError:
            return "old"
        steps = tuple(manager.steps())
        if manager.latest_step() == 4:
            assert same(model, NEW) and steps == (*self.steps, 4)[-3:], steps
            return "next"
        assert same(model, self.repaired) and steps == self.steps, steps
        return "new"

    def call_again(self, folder):
        self.call(folder)
        CheckpointManager(folder / "ckpt", keep=3).save(4, NEW)
        return "next"

    def left(self, folder, was_killed):
        left = unused_files(folder / "ckpt")  # only `prune` deletes a temporary file of a repair
        return [name for name in left if not (was_killed and name.endswith(".tmp"))]


class Mend(Repair):
    """Rewrite a damaged header."""

    name = "mend"
    damage = (4000, os.SEEK_SET)
    repaired = NEW
    steps = (1, 2, 3)


class Prune(Operation):
    """Delete the files that a dead writer left."""

    name = "prune"
    is_durable = False  # the next prune deletes the files again
    harmless = SaveCheckpoint.harmless

    def prepare(self, folder):
        mlstate.save(folder / "ckpt", OLD)
        names = [f"params/w.0-1.{LITTER}-0.safetensors", f"index/{LITTER}.0.json"]
        for name in [*names, f".mlstate-{LITTER}.tmp", f"roots/.mlstate-{LITTER}.tmp"]:
            (folder / "ckpt" / name).write_bytes(b"x")

    def call(self, folder):
        prune(folder / "ckpt")

    def outcome(self, folder):
        assert same(mlstate.load(folder / "ckpt").model, OLD)
        return "old" if unused_files(folder / "ckpt") else "new"


class Delete(Operation):
    """Delete a step of a manager."""

    name = "delete"
    folder = "ckpt"
    errors: ClassVar = (errno.ENOENT,)
    harmless = SaveCheckpoint.harmless

    def renew(self):
        self.manager = None  # of a call that was interrupted

    def prepare(self, folder):
        manager = CheckpointManager(folder / "ckpt", keep=None)
        for step, state in enumerate((OLD, NEW, OLD)):
            manager.save(step, state)

    def call(self, folder):
        self.manager = self.manager or CheckpointManager(folder / "ckpt", keep=None)
        if 1 in self.manager.steps():
            self.manager.delete(1)

    def outcome(self, folder):
        manager = self.manager or CheckpointManager(folder / "ckpt", keep=None)
        step = manager.latest_step()
        assert same(manager.restore_latest().model, OLD)
        steps = [each for each in manager.steps() if each != 3]
        assert steps in ([0, 1, 2], [0, 2]), steps
        assert 1 not in steps or same(manager.restore(1).model, NEW)
        return "next" if step == 3 else "old" if 1 in steps else "new"

    def call_again(self, folder):
        self.call(folder)
        self.manager.save(3, OLD)
        return "next"

    def left(self, folder, was_killed):
        return unused_files(folder / "ckpt")


class Reshard(Operation):
    """Replace a checkpoint by one that is cut for two ranks."""

    name = "reshard"
    harmless = MoveTiers.harmless
    errors: ClassVar = ("FormatError",)  # of a header that cannot be read
    folder = "cut"

    def prepare(self, folder):
        mlstate.save(folder / "ckpt", OLD)
        self.call(folder)
        mlstate.save(folder / "ckpt", NEW)

    def call(self, folder):
        reshard(folder / "ckpt", folder / "cut", layout="rows", world_size=2, overwrite=True)

    def outcome(self, folder):
        return which_of(mlstate.load(folder / "cut").model)

    def left(self, folder, was_killed):
        return unused_files(folder / "cut")


class Convert(Operation):
    """Convert a checkpoint to files of other formats."""

    name = "convert"
    folder = "."
    leaves = (*Operation.leaves, "stat")
    harmless: ClassVar = {
        **SaveCheckpoint.harmless,
        "close": "the file was synced before",
        "change": "the last one is an unlink",
    }

    def prepare(self, folder):
        mlstate.save(folder / "ckpt", OLD)
        self.call(folder)
        mlstate.save(folder / "ckpt", NEW)

    def call(self, folder):
        write_any(folder / "file.npz", *read_any(folder / "ckpt")[:4], overwrite=True)
        write_any(folder / "file.safetensors", *read_any(folder / "ckpt")[:4], overwrite=True)

    def outcome(self, folder):
        which_of(np.load(folder / "file.npz"))
        return which_of(mlstate.load_file(folder / "file.safetensors"))

    def left(self, folder, was_killed):
        return [] if was_killed else list(map(str, folder.glob(".*")))


class Export(Operation):
    """Export a Hugging Face folder, with other files."""

    name = "export"
    errors: ClassVar = (errno.EISDIR,)  # if `stat` fails
    harmless: ClassVar = {**SaveCheckpoint.harmless, "close": "the file was synced before"}

    def prepare(self, folder):
        (folder / "source").mkdir()
        (folder / "source" / "config.json").write_text("{}")

    def call(self, folder):
        export_huggingface(folder / "hf", NEW, files_from=folder / "source", max_shard_bytes=9000)

    def outcome(self, folder):
        if not (folder / "hf").exists():
            return "old"
        assert (folder / "hf" / "config.json").exists()
        assert same(mlstate.load(folder / "hf").model, NEW)
        return "new"

    def call_again(self, folder):
        shutil.rmtree(folder / "hf", ignore_errors=True)
        return super().call_again(folder)

    def left(self, folder, was_killed):
        names = {path.name for path in folder.iterdir()} - {"hf", "source"}
        return [] if was_killed else sorted(names)


class ExportAsync(Export):
    """The same, asynchronously; an export whose handle was lost continues to its end."""

    name = "export async"
    interrupted: ClassVar = (threading.__file__,)

    def call(self, folder):
        export_huggingface_async(folder / "hf", NEW, files_from=folder / "source").wait()


class Prompts(Operation):
    """A restore and puts of a store of prompts, one of them asynchronous."""

    name = "prompts"
    may_go_on = True  # `put` returns the number of tokens that are stored

    def make_states(self):
        self.states = {count: prefilled(HYBRID, TOKENS[:count]) for count in (40, 64, 100)}

    def renew(self):
        self.states[64] = prefilled(HYBRID, TOKENS[:64])

    def prepare(self, folder):
        with store_at(folder) as store:
            store.put(TOKENS[:40], self.states[40])

    def call(self, folder):
        with store_at(folder) as store:
            with store.match(TOKENS) as match:
                store.restore(match, into=self.states[64])
            store.put(TOKENS, self.states[100])
            store.put(TOKENS[:40], self.states[40], asynchronous=True)

    def outcome(self, folder):
        assert self.states[64].length in (0, 40, 64, 100), "a partly restored cache has tokens"
        with store_at(folder) as store:
            (length,) = check_every_match(store, [TOKENS], HYBRID)
            # a kill may tear the header of a put that did not return
            damage = [each for each in store.verify() if "header" not in each[2]]
            assert length in (40, 100), f"{length} tokens, damage {damage}"
            # a power failure may tear the payload of a put that did not return
            assert not damage or self.after_power, damage
        return "old" if length == 40 else "new"


SERVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from gcs_server import GcsServer
with GcsServer() as server:
    print(json.dumps(server.options()), flush=True)
    sys.stdin.read()
"""


class Store(Operation):
    """A save to an object store, and loads with and without a cache; in a server's process."""

    name = "store"
    needs: ClassVar = ("obstore",)
    forks = False
    options = None

    def options_of(self, folder):
        """Return the options for the server, which runs until this process ends."""
        if Store.options is None:
            support = str(Path(__file__).parent.parent / "support")
            Store.server = subprocess.Popen(
                [sys.executable, "-c", SERVER, support], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            Store.options = json.loads(Store.server.stdout.readline())
        (folder / "scratch").mkdir(exist_ok=True)
        folders = {f"{name}_folder": str(folder / name) for name in ("scratch", "cache")}
        return {**Store.options, **folders}

    def prepare(self, folder):
        mlstate.save("gs://bucket/run", OLD, storage_options=self.options_of(folder))

    def call(self, folder):
        options = self.options_of(folder)
        mlstate.save("gs://bucket/run", NEW, storage_options=options)
        for _ in range(2):
            mlstate.load("gs://bucket/run", storage_options=options)

    def outcome(self, folder):
        options = self.options_of(folder)
        return which_of(mlstate.load("gs://bucket/run", storage_options=options).model)

    def left(self, folder, was_killed):
        return [*(folder / "scratch").iterdir(), *(folder / "cache").rglob("*.tmp")]


class TierBudget(Operation):
    """Units that are used and moved, within a budget."""

    name = "tier budget"
    is_heavy = True
    harmless = MoveTiers.harmless

    def renew(self):
        self.tiers = None

    def call(self, folder):
        weights = {name: np.full(8, number, np.float32) for number, name in enumerate("abc")}
        self.tiers = TieredState(weights, {}, folder / "tiers", warm_budget_bytes=70)
        for name in "abc":
            with self.tiers.use(name):
                pass
        self.tiers.demote("c", to="cold")
        self.tiers.promote("c")
        self.tiers.state_dicts()
        self.tiers.rebalance()

    def outcome(self, folder):
        gc.collect()  # of an interrupted constructor, whose object holds the lock
        if self.tiers is None:
            return "new"  # only the process of the call has all units
        for number, name in enumerate("abc"):
            with self.tiers.use(name) as unit:
                assert (unit.parameter == number).all()
            self.tiers.demote(name, to="cold")
        self.tiers.close()
        assert len(list((folder / "tiers").glob("*.safetensors"))) == 3
        return "new"

    def call_again(self, folder):
        self.tiers = self.kept = None
        gc.collect()
        shutil.rmtree(folder / "tiers", ignore_errors=True)
        return super().call_again(folder)


# ---- objects in memory ----


class Group(Operation):
    """Asynchronous operations of a group."""

    name = "group"
    errors: ClassVar = ("StoreError",)  # of shared memory
    is_heavy = True  # a thread of Python that starts without memory may hang
    reads = may_go_on = in_memory = True

    def renew(self):
        self.group = None

    def call(self, folder):
        (self.group,) = LocalGroup.threads(1)
        works = [self.group.all_reduce(np.ones(3), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        self.group.barrier()

    def outcome(self, folder):
        group = self.group or LocalGroup.threads(1)[0]
        for wait in (True, False):
            try:
                group.all_reduce(np.ones(3), async_op=wait, timeout=5)
            except CollectiveError as error:  # the interrupt came in an operation
                assert "not done" not in str(error), error
        group.close()
        return "new"


class Reductions(Operation):
    """Gradients that are reduced in a backward pass and without one."""

    name = "reductions"
    errors: ClassVar = ("CollectiveError",)  # names the gradient
    reads = may_go_on = in_memory = True

    def renew(self):
        self.hook = None

    def call(self, folder):
        hook = FSDPBackwardHook(FSDP(SingleGroup()))
        self.units = {name: FSDPShardingUnit(name, (2,), "float64", 0) for name in "ab"}
        hook.use_units(self.units)
        self.hook = hook
        for _ in range(2):
            self.reduce()

    def reduce(self):
        """Reduce gradients in a pass and without one."""
        for name in self.units:
            self.hook.add_gradient(name, np.full(2, 3.0))
        self.hook.finish()
        self.hook.scatter_gradient(self.units["a"], np.full(2, 4.0))

    def outcome(self, folder):
        if self.hook is not None:
            try:
                self.hook.finish()  # a pass that has begun continues
            except CollectiveError as error:
                assert "under way" not in str(error), error
            self.reduce()
            parts = [unit.local_gradient.tolist() for unit in self.units.values()]
            assert parts == [[4.0, 4.0], [3.0, 3.0]], parts
        return "new"


class Change(Operation):
    """A change in place: the object keeps its content, or is empty, and can be changed again."""

    in_memory = True
    errors: ClassVar = ("MLStateError",)  # names the state that is kept
    rounds = 50

    def __init__(self, case, needs=()):
        self.case, self.name, self.needs = case, case.__name__, needs
        self.forks = not needs  # torch and MLX have threads

    def make_states(self):
        use_fake_arrays(pytest.MonkeyPatch())
        folder = tempfile.mkdtemp(prefix="changes-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        self.make, self.operate, self.content = self.case(Path(folder))
        self.renew()
        contents = [self.content(self.target)]
        self.operate(self.target)
        self.contents = [*contents, self.content(self.target)]

    def renew(self):
        self.target = self.make()

    def call(self, folder):
        self.operate(self.target)

    def outcome(self, folder):
        content = self.content(self.target)
        assert content is None or content in self.contents, "neither the old content nor the new"
        return "new" if content == self.contents[1] else "old"


MANY = ("torch", "transformers")
ALL = [
    *SAVES,
    *(Read(save) for save in SAVES),
    *(Read(save, mmap=True) for save in SAVES),
    *(each() for each in (Verify, Repair, Mend, Prune, Delete, Reshard, Convert, Export)),
    *(each() for each in (ExportAsync, Prompts, Store, TierBudget, Group, Reductions)),
    *FOLLOW,
    PromptHistory(),
    *map(Change, changed_objects.CASES),
    *(Change(case, MANY) for case in changed_objects.TRANSFORMERS),
    *(Change(case, ("mlx", "mlx_lm")) for case in changed_objects.MLX),
]


def find(name):
    """The operation with a name."""
    return next(each for each in [*ALL, *LOSSY, *DEFECTIVE] if each.name == name)
