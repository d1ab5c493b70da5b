"""Interrupt calls at each line, or by signals, and check the state; test_interrupts.py runs it.

    python interrupts.py lines CASE MOST
    python interrupts.py signals CASE TRIES SEED
    python interrupts.py storm CASE SIGNALS SEED

Each case runs in its own process, whose descriptors and threads are counted, and whose exit is part
of the test. The output is one line of JSON. `MOST` is the number of lines to try (0: all).
"""

import _thread
import ast
import atexit
import faulthandler
import functools
import gc
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import MappingProxyType

import changed_objects
import numpy as np
import pytest
from any_format import read_any, write_any
from fake_states import use_fake_arrays
from toy_caches import HYBRID, TOKENS, check_every_match, prefilled, store_at

import mlstate
from mlstate import coreai, follow
from mlstate._core import deferred_interrupts
from mlstate.checkpoint import (
    CheckpointManager,
    TieredState,
    export_huggingface,
    export_huggingface_async,
    prune,
    reshard,
    save_async,
)
from mlstate.checkpoint._files.safetensors_verify import verify_file
from mlstate.collectives import LocalGroup, SingleGroup
from mlstate.errors import CollectiveError
from mlstate.fsdp import FSDP, FSDPBackwardHook, FSDPShardingUnit

PACKAGE = str(Path(mlstate.__file__).parent) + os.sep
SECONDS = 20  # limit for threads to end
OLD = {"a": np.arange(8, dtype=np.float32), "b": np.zeros(3000), "c": np.ones((4, 4))}
NEW = {"a": np.arange(8, dtype=np.float32) + 1, "b": np.ones(3000), "c": np.ones((4, 4))}
NEAR = {**OLD, "b": np.where(np.arange(3000) % 40, 0.0, 1.0), "c": OLD["c"] + np.eye(4)}
EMPTY = {name: np.zeros_like(array) for name, array in OLD.items()}
LITTER = "0123456789abcdef"

# Lines at which Python itself allows no cleanup, by reason; they are found from the source.
WITH_EXIT = "the tracer is called between a `with` block and __exit__; no signal handler is"
TRY = "the line of a `try` has no instruction that can raise, so a `with` around it does not end"


# ---- cases: prepare a folder, then the call that is interrupted ----


class Save:
    """mlstate.save over an older checkpoint; the other cases replace some of the methods."""

    files = (PACKAGE,)
    options = MappingProxyType({})
    kept = error = None  # the interrupt; another exception that followed it
    rounds = 1  # calls in a storm before a check

    def prepare(self, folder):
        """Prepare the inputs of the call."""
        mlstate.save(folder / "ckpt", OLD, **self.options)

    def begin_round(self):
        """Prepare another call of a storm."""

    def call(self, folder):
        """Make the call that is interrupted."""
        mlstate.save(folder / "ckpt", NEW, **self.options)

    def check(self, folder):
        """Check the folder, and save to it again."""
        model = mlstate.load(folder / "ckpt").model
        assert same(model, OLD) or same(model, NEW), "neither the old state nor the new"
        mlstate.save(folder / "ckpt", NEW, **self.options)
        clean(folder / "ckpt")
        assert same(mlstate.load(folder / "ckpt").model, NEW)


class New(Save):
    """mlstate.save into a folder that does not exist."""

    def prepare(self, folder):
        """Prepare nothing."""

    def check(self, folder):
        mlstate.save(folder / "ckpt", NEW)
        clean(folder / "ckpt")


class Incremental(Save):
    """An incremental save over older files."""

    options = MappingProxyType({"incremental": True, "pack_below_bytes": 0})


class Asynchronous(Save):
    """save_async and wait; a save whose handle was lost continues to its end."""

    files = (PACKAGE, threading.__file__)

    def call(self, folder):
        save_async(folder / "ckpt", NEW).wait()

    def check(self, folder):
        super().check(folder)
        save_async(folder / "ckpt", OLD).wait()
        clean(folder / "ckpt")


class Load(Save):
    """mlstate.load."""

    def call(self, folder):
        mlstate.load(folder / "ckpt")


class Verify(Save):
    """mlstate.verify."""

    def call(self, folder):
        mlstate.verify(folder / "ckpt")


class Repair(Save):
    """mlstate.verify that replaces a damaged step by an older one."""

    damage = (-1, os.SEEK_END)  # the place of a wrong byte in a file

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

    def check(self, folder):
        self.call(folder)
        manager = CheckpointManager(folder / "ckpt", keep=3)
        manager.save(4, NEW)
        clean(folder / "ckpt")
        assert manager.steps() == [1, 2, 4]


class Mend(Repair):
    """mlstate.verify that rewrites a damaged header."""

    damage = (4000, os.SEEK_SET)

    def check(self, folder):
        self.call(folder)
        clean(folder / "ckpt")
        manager = CheckpointManager(folder / "ckpt", keep=None)
        assert manager.steps() == [1, 2, 3]
        assert same(manager.restore_latest().model, NEW)


class Prune(Save):
    """mlstate.prune of files that a dead writer left."""

    def prepare(self, folder):
        super().prepare(folder)
        litter(folder / "ckpt")

    def call(self, folder):
        prune(folder / "ckpt")

    def check(self, folder):
        self.call(folder)
        super().check(folder)


class Manager(Save):
    """A manager that saves two steps and deletes the oldest."""

    def prepare(self, folder):
        manager = CheckpointManager(folder / "ckpt", keep=2)
        for step in (1, 2):
            manager.save(step, OLD)

    def call(self, folder):
        self.manager = CheckpointManager(folder / "ckpt", keep=2)
        self.manager.save(3, NEW)
        self.manager.delete(2)

    def check(self, folder):
        manager = self.manager or CheckpointManager(folder / "ckpt", keep=2)
        restored = manager.restore_latest()
        assert same(restored.model, OLD if restored.step < 3 else NEW)
        for step in (4, 5):
            manager.save(step, NEW)
        assert manager.steps() == [4, 5], manager.steps()
        clean(folder / "ckpt")

    manager = None


class ManagerAsync(Manager):
    """The same, asynchronously."""

    files = (PACKAGE, threading.__file__)

    def call(self, folder):
        self.manager = CheckpointManager(folder / "ckpt", keep=2)
        self.manager.save_async(3, NEW)
        self.manager.save_async(3, NEW)
        self.manager.close()

    def check(self, folder):
        manager = self.manager or CheckpointManager(folder / "ckpt", keep=2)
        manager.save_async(4, NEW)
        manager.close()
        super().check(folder)


class Reshard(Save):
    """mlstate.reshard."""

    def call(self, folder):
        reshard(folder / "ckpt", folder / "cut", layout="rows", world_size=2, overwrite=True)

    def check(self, folder):
        self.call(folder)
        clean(folder / "cut")
        assert same(mlstate.load(folder / "cut").model, OLD)


class Convert(Save):
    """mlstate.convert to files of other formats."""

    def call(self, folder):
        write_any(folder / "file.npz", *read_any(folder / "ckpt")[:4], overwrite=True)
        write_any(folder / "file.safetensors", *read_any(folder / "file.npz")[:4], overwrite=True)

    def check(self, folder):
        self.call(folder)
        assert not list(folder.glob("*.tmp"))


class Export(Save):
    """An export as a Hugging Face folder, with other files."""

    def prepare(self, folder):
        (folder / "source").mkdir()
        (folder / "source" / "config.json").write_text("{}")

    def call(self, folder):
        export_huggingface(folder / "hf", NEW, files_from=folder / "source", max_shard_bytes=9000)

    def check(self, folder):
        if (folder / "hf").exists():
            assert same(mlstate.load(folder / "hf").model, NEW)
            shutil.rmtree(folder / "hf")
        self.call(folder)
        assert same(mlstate.load(folder / "hf").model, NEW)
        left = {path.name for path in folder.iterdir()}
        assert left == {"hf", "source"}, left


class ExportAsync(Export):
    """The same, asynchronously; an export whose handle was lost continues to its end."""

    files = (PACKAGE, threading.__file__)

    def call(self, folder):
        export_huggingface_async(folder / "hf", NEW, files_from=folder / "source").wait()


class Files(Save):
    """Single files: safetensors, and the files of a Core AI model."""

    def prepare(self, folder):
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
        mlstate.save_file(NEW, folder / "w.safetensors")
        mlstate.load_file(folder / "w.safetensors")
        mlstate.load_file(folder / "w.safetensors", mmap=True)
        verify_file(folder / "w.safetensors")
        coreai.verify(folder / "m.aimodel")

    def check(self, folder):
        arrays = mlstate.load_file(folder / "w.safetensors")
        assert same(arrays, OLD) or same(arrays, NEW)
        self.call(folder)
        assert {path.name for path in folder.iterdir()} == {"w.safetensors", "m.aimodel"}


SERVER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from gcs_server import GcsServer
with GcsServer() as server:
    print(json.dumps(server.options()), flush=True)
    sys.stdin.read()
"""


class Prompts(Save):
    """A restore and puts of a store of prompts, one of them asynchronous."""

    def __init__(self):
        self.states = {count: prefilled(HYBRID, TOKENS[:count]) for count in (40, 64, 100)}

    def prepare(self, folder):
        with store_at(folder) as store:
            store.put(TOKENS[:40], self.states[40])

    def call(self, folder):
        with store_at(folder) as store:
            with store.match(TOKENS) as match:
                store.restore(match, into=self.states[64])
            store.put(TOKENS, self.states[100])
            store.put(TOKENS[:40], self.states[40], asynchronous=True)

    def check(self, folder):
        assert self.states[64].length in (0, 40, 64), "a partly restored cache has tokens"
        with store_at(folder) as store:
            (length,) = check_every_match(store, [TOKENS], HYBRID)
            assert length in (40, 100) and not store.verify()
            assert store.put(TOKENS, self.states[100]) == 100


class Store(Save):
    """A save to an object store, and loads with and without a cache; in a server's process."""

    server = None

    def options(self, folder):
        """Return the options for the server, which runs until this process ends."""
        if Store.server is None:
            support = str(Path(__file__).parent.parent / "support")
            Store.server = subprocess.Popen(
                [sys.executable, "-c", SERVER, support], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            Store.access = json.loads(Store.server.stdout.readline())
        (folder / "scratch").mkdir(exist_ok=True)
        return {
            **Store.access,
            "scratch_folder": str(folder / "scratch"),
            "cache_folder": str(folder / "cache"),
        }

    def prepare(self, folder):
        mlstate.save("gs://bucket/run", OLD, storage_options=self.options(folder))

    def call(self, folder):
        options = self.options(folder)
        mlstate.save("gs://bucket/run", NEW, storage_options=options)
        for _ in range(2):
            mlstate.load("gs://bucket/run", storage_options=options)

    def check(self, folder):
        options = self.options(folder)
        model = mlstate.load("gs://bucket/run", storage_options=options).model
        assert same(model, OLD) or same(model, NEW)
        left = [*(folder / "scratch").iterdir(), *(folder / "cache").rglob("*.tmp")]
        assert not left, left
        self.call(folder)


class Publish(Save):
    """A publisher writes an anchor and deltas into a folder with versions."""

    publisher = None

    def prepare(self, folder):
        follow.Publisher(folder / "ckpt").publish(0, OLD)

    def call(self, folder):
        self.publisher = follow.Publisher(folder / "ckpt", anchor_every=2)
        for step, state in enumerate((NEAR, OLD, NEAR)):
            self.publisher.publish(step, state)

    def check(self, folder):
        into = {name: np.zeros_like(array) for name, array in OLD.items()}
        follow.Follower(folder / "ckpt", into=into).advance()
        assert same(into, OLD) or same(into, NEAR), "neither the old state nor the new"
        publisher = self.publisher or follow.Publisher(folder / "ckpt")
        publisher.publish(9, NEW)
        clean(folder / "ckpt")
        follow.Follower(folder / "ckpt", into=into).advance()
        assert same(into, NEW)


class Follow(Save):
    """Followers with one buffer and with two advance by deltas, and go back to an anchor."""

    def __init__(self):
        self.followers = []

    def prepare(self, folder):
        publisher = follow.Publisher(folder / "ckpt")
        for step, state in enumerate((OLD, NEAR, OLD, NEAR)):
            publisher.publish(step, state)

    def call(self, folder):
        for double_buffer in (False, True):
            into = {name: np.zeros_like(array) for name, array in OLD.items()}
            follower = follow.Follower(folder / "ckpt", into=into, double_buffer=double_buffer)
            self.followers.append(follower)
            for step in (0, 1, 3, 0):
                follower.advance(step)

    def check(self, folder):
        for follower in self.followers:
            states = {None: EMPTY, 0: OLD, 1: NEAR, 3: NEAR}
            assert same(follower.state, states[follower.version]), follower.version
            follower.verify()
            assert follower.advance() == 3
            assert same(follower.state, NEAR)


class Tiers(New):
    """Units that are used and moved, within a budget."""

    tiers = None

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

    def check(self, folder):
        if self.tiers is None:
            self.kept = None  # drops the object, which holds the lock
            gc.collect()
            shutil.rmtree(folder / "tiers", ignore_errors=True)
            self.call(folder)
        for number, name in enumerate("abc"):
            with self.tiers.use(name) as unit:
                assert (unit.parameter == number).all()
            self.tiers.demote(name, to="cold")
        self.tiers.close()
        assert len(list((folder / "tiers").glob("*.safetensors"))) == 3
        shutil.rmtree(folder / "tiers")


class Group(New):
    """Asynchronous operations of a group."""

    group = None

    def call(self, folder):
        (self.group,) = LocalGroup.threads(1)
        works = [self.group.all_reduce(np.ones(3), async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        self.group.barrier()

    def check(self, folder):
        group = self.group or LocalGroup.threads(1)[0]
        for wait in (True, False):
            try:
                group.all_reduce(np.ones(3), async_op=wait, timeout=5)
            except CollectiveError as error:  # the interrupt came in an operation
                assert "not done" not in str(error), error
        group.close()


class Reductions(New):
    """Gradients that are reduced in a backward pass and without one."""

    hook = None

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

    def check(self, folder):
        if self.hook is None:
            return
        try:
            self.hook.finish()  # a pass that has begun continues
        except CollectiveError as error:
            assert "under way" not in str(error), error
        self.reduce()
        parts = [unit.local_gradient.tolist() for unit in self.units.values()]
        assert parts == [[4.0, 4.0], [3.0, 3.0]], parts


class Change(New):
    """A change in place: the object keeps its content, or is empty, and can be changed again."""

    def __init__(self, functions, contents):
        (self.make, self.operate, self.content), self.contents = functions, contents
        self.target = self.make()

    rounds = 50

    def call(self, folder):
        self.operate(self.target)

    def begin_round(self):
        """Check the target, and replace it by a new one."""
        content = self.content(self.target)
        assert content is None or content in self.contents, "neither the old content nor the new"
        self.target = self.make()

    def check(self, folder):
        target = self.target
        self.begin_round()
        self.operate(target)
        assert self.content(target) == self.contents[1]


def change_of(case):
    """Return a function that makes the `Change` of a case of changed_objects.py."""

    @functools.cache
    def prepared():
        folder = tempfile.mkdtemp(prefix="interrupts-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        make, operate, content = functions = case(Path(folder))
        target = make()
        before = content(target)
        operate(target)
        return functions, (before, content(target))

    return lambda: Change(*prepared())


use_fake_arrays(pytest.MonkeyPatch())
CHANGES = {
    case.__name__: change_of(case)
    for case in [*changed_objects.CASES, *changed_objects.TRANSFORMERS, *changed_objects.MLX]
}
CASES = {
    **CHANGES,
    "save": Save,
    "new": New,
    "incremental": Incremental,
    "async": Asynchronous,
    "load": Load,
    "prompts": Prompts,
    "verify": Verify,
    "repair": Repair,
    "mend": Mend,
    "prune": Prune,
    "manager": Manager,
    "manager_async": ManagerAsync,
    "reshard": Reshard,
    "convert": Convert,
    "export": Export,
    "export_async": ExportAsync,
    "files": Files,
    "store": Store,
    "publish": Publish,
    "follow": Follow,
    "tiers": Tiers,
    "group": Group,
    "reductions": Reductions,
}


def same(actual, state):
    """Whether a state equals the saved one."""
    return all(np.array_equal(actual[name], state[name]) for name in state)


def litter(folder):
    """Leave the files that a killed writer leaves."""
    names = [f"params/w.0-1.{LITTER}-0.safetensors", f"index/{LITTER}.0.json"]
    for name in [*names, f".mlstate-{LITTER}.tmp", f"roots/.mlstate-{LITTER}.tmp"]:
        (folder / name).write_bytes(b"x")


def clean(folder):
    """Check that no temporary or unused file remains."""
    report = mlstate.verify(folder)
    assert report, report
    temporary = [str(path) for path in folder.rglob("*.tmp")]
    assert not report.leftover and not report.strange and not temporary, (report, temporary)


# ---- lines ----


@functools.cache
def with_blocks(file):
    """Pairs (line of a `with`, its last line), by the block's first line."""
    tree = ast.parse(Path(file).read_text())
    blocks = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.With):
            for line in range(node.lineno, node.body[0].lineno):
                blocks[line] = node.end_lineno
            blocks[node.lineno] = node.end_lineno
    return blocks


@functools.cache
def try_statements(file):
    """Return the lines of the word `try`."""
    tree = ast.parse(Path(file).read_text())
    return {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Try)}


class Tracer:
    """Raises KeyboardInterrupt at one line event of this thread; 0: only counts them."""

    def __init__(self, files, at):
        self.files = files
        self.at = at
        self.count = 0
        self.where = None
        self.last = {}

    def __call__(self, frame, event, argument):
        """Trace a call."""
        return self.local if frame.f_code.co_filename.startswith(self.files) else None

    def local(self, frame, event, argument):
        """Trace a line."""
        if event == "line":
            line, code = frame.f_lineno, frame.f_code
            end = with_blocks(code.co_filename).get(line)
            before = self.last.get(id(frame), -1)
            self.last[id(frame)] = line
            self.count += 1
            # in a section, a signal would be handled at its end
            if self.count >= self.at > 0 and not deferred_interrupts.is_active():
                leaves = end is not None and line < before <= end
                name = f"{Path(code.co_filename).name}:{line} {code.co_qualname}"
                reason = WITH_EXIT if leaves else None
                reason = TRY if line in try_statements(code.co_filename) else reason
                self.where = (name, reason)
                self.at = 0
                if not self.where[1]:
                    raise KeyboardInterrupt
        elif event == "return":
            self.last.pop(id(frame), None)
        return self.local


def run_traced(case, folder, at):
    """Make the call with an interrupt at a line; return the tracer."""
    tracer = Tracer(case.files, at)
    try:
        sys.settrace(tracer)
        case.call(folder)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return tracer


def spread(count, most):
    """Numbers from 1 to `count`, at most `most` of them (0: all)."""
    if not 0 < most < count:
        return list(range(1, count + 1))
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)})


def descriptors():
    """The open descriptors, without the engine's connections to a store."""
    names = []
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            names.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    return sorted(name for name in names if not name.startswith("socket:"))


def threads_end():
    """Wait until only this thread runs."""
    end = time.monotonic() + SECONDS
    time.sleep(0.005)  # a thread that begins to run is not counted yet
    while _thread._count() > 0 and time.monotonic() < end:
        time.sleep(0.001)
    assert len(threading.enumerate()) == 1, threading.enumerate()


class Bench:
    """The folders of one case, each prepared and tried once."""

    def __init__(self, name):
        self.make = CASES[name]
        self.root = Path(tempfile.mkdtemp(prefix="interrupts-"))
        self.model = self.root / "model"
        self.model.mkdir()
        self.make().prepare(self.model)
        self.failures = []
        self.try_once(lambda case, folder: case.call(folder))  # imports, and files that stay open
        self.open = descriptors()

    def try_once(self, call):
        """Interrupt a call and check the state; return the defect as text, or None."""
        folder = self.root / "work"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.model, folder)
        case = self.make()
        faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
        result = wrong = None
        try:
            result = call(case, folder)
            if case.error is not None:
                raise case.error
            threads_end()
            case.check(folder)
            case.manager = case.kept = case.tiers = None
            gc.collect()
            left = descriptors()
            open_before, self.open = getattr(self, "open", left), left
            new = Counter(left) - Counter(open_before)
            assert not new, f"open: {new}"
            threads_end()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"[:400]
        faulthandler.cancel_dump_traceback_later()
        return result, wrong


def try_lines(name, most):
    """Try the lines of a case."""
    bench = Bench(name)
    tracer, wrong = bench.try_once(lambda case, folder: run_traced(case, folder, 0))
    assert wrong is None, wrong
    tried, skipped = {}, {}
    for at in spread(tracer.count, most):
        done, wrong = bench.try_once(lambda case, folder, at=at: run_traced(case, folder, at))
        if done.where is None:  # the call took fewer lines than before
            continue
        line, reason = done.where
        into = tried if reason is None else skipped.setdefault(reason, {})
        into[line] = into.get(line, 0) + 1
        if wrong is not None:
            bench.failures.append(f"{at} {line}: {wrong}")
    return {"count": tracer.count, "tried": tried, "skipped": skipped, "failures": bench.failures}


# ---- signals ----


def run_signalled(case, folder, delay, later=()):
    """Make the call with a signal after `delay` seconds; return whether it arrived in time.

    `later` has the seconds until further signals, each after the one before: during the clean-up.
    The exceptions are kept until the end, with the frames of their tracebacks.
    """
    pending = list(later)
    case.signals = 0

    def interrupt(number, frame):
        case.signals += 1
        if pending:
            signal.setitimer(signal.ITIMER_REAL, pending.pop())
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    came = False
    with deferred_interrupts() as section:
        try:
            with section.allowed():
                signal.setitimer(signal.ITIMER_REAL, delay)
                case.call(folder)
        except KeyboardInterrupt as error:
            came, case.kept = True, error
        except Exception as error:
            case.error = error
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return came


def run_timed(case, folder):
    """Make the call; return the seconds it took."""
    start = time.perf_counter()
    case.call(folder)
    return time.perf_counter() - start


def try_signals(name, tries, seed):
    """Interrupt a case at random moments."""
    bench = Bench(name)
    seconds, _ = bench.try_once(run_timed)
    chance = random.Random(seed)
    came = 0
    for number in range(tries):
        delay = chance.uniform(1e-6, seconds)
        in_time, wrong = bench.try_once(
            lambda case, folder, delay=delay: run_signalled(case, folder, delay)
        )
        came += in_time
        if wrong is not None:
            bench.failures.append(f"{number} {delay * 1e3:.3f} ms: {wrong}")
    return {"tried": tries, "came": came, "failures": bench.failures}


def try_storm(name, count, seed, most=6):
    """Interrupt calls of a case until `count` signals were handled, 1 to `most` for each call."""
    bench = Bench(name)
    seconds = min(bench.try_once(run_timed)[0] for _ in range(5))
    chance = random.Random(seed)

    def run(case, folder):
        handled = 0
        for _ in range(case.rounds):
            case.begin_round()
            later = [10 ** chance.uniform(-5, -3) for _ in range(chance.randrange(most))]
            run_signalled(case, folder, chance.uniform(1e-6, seconds), later)
            handled += case.signals
        return handled

    tries = signals = 0
    while signals < count and len(bench.failures) < 20:
        handled, wrong = bench.try_once(run)
        tries, signals = tries + 1, signals + (handled or 0)
        if wrong is not None:
            bench.failures.append(f"{tries}: {wrong}")
    return {"tried": tries, "signals": signals, "failures": bench.failures}


def main(kind, name, *numbers):
    """Print the result as JSON."""
    kinds = {"lines": try_lines, "signals": try_signals, "storm": try_storm}
    result = kinds[kind](name, *map(int, numbers))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
