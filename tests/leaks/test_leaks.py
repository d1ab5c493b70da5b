"""Every public function releases what it acquires: references, Python blocks, C memory.

A case is a function that prepares its inputs and returns the call to repeat and the inputs whose
reference counts must not change. `test_every_public_name_has_a_case` fails if a public function,
class or method has no case, so a new name needs a case here.
"""

import _thread
import copy
import ctypes
import gc
import importlib
import inspect
import itertools
import logging
import os
import pickle
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from threading import Thread

import leaks_of_coreai  # noqa: F401 - its cases
import leaks_of_coreml  # noqa: F401 - its cases
import leaks_of_follow  # noqa: F401 - its cases
import leaks_of_gradients  # noqa: F401 - its cases
import leaks_of_planned_models  # noqa: F401 - its cases
import leaks_of_plans  # noqa: F401 - its cases
import leaks_of_prompts  # noqa: F401 - its cases
import leaks_of_saves  # noqa: F401 - its cases
import leaks_of_schedules  # noqa: F401 - its cases
import leaks_of_strategies  # noqa: F401 - its cases
import leaks_of_tiers  # noqa: F401 - its cases
import numpy as np
import pytest
from golden.pickled_objects import PUBLIC
from leak_cases import CALLS, CASES, case, each, methods, raises, with_members
from leaks_of_kv import cache

import mlstate
from mlstate import (
    activation,
    checkpoint,
    collectives,
    coreml,
    distributed,
    errors,
    state,
    testing,
    threads,
)
from mlstate.collectives._engine import Engine

pytestmark = pytest.mark.long

MODULES = [
    importlib.import_module(name)
    for name in PUBLIC
    if not name.startswith(("mlstate.integrations", "mlstate.plot"))  # of optional packages
]
FEW = 40  # number of calls for cases that wait for the disk
FIRST, SHORT = 12, 20  # calls while caches fill, and in a round that is enough for most cases
ROUNDS = 6  # each twice as long as the previous one: since Python 3.13 some caches fill slowly
FEW_BYTES = 4  # allowed bytes a call

# Names that cannot be called: protocols for annotations.
NOT_CALLED = {
    "CheckpointStrategy",
    *methods(activation.CheckpointStrategy),
    "MLStateLike",
    "MLStateLike.read_state",
    "MLStateLike.write_state",
    "ProcessGroup",
    *methods(collectives.ProcessGroup),
    "Stateful",
    "Stateful.get_state_dict",
    "Stateful.load_state_dict",
}


def members(thing):
    """Public names of a class, and of its engine."""
    classes = [thing, *(base for base in thing.__mro__ if base is Engine)]
    return {name: vars(owner)[name] for owner in classes for name in vars(owner) if name[0] != "_"}


# ---- files ----


@case("save_file", "load_file", "load_metadata")
def files(tmp_path):
    path = tmp_path / "state.safetensors"
    w, step = cache()[:, :, ::2], np.int64(7)
    state, texts = {"w": w, "step": step}, {"run": "a"}
    return each(
        lambda: checkpoint.save_file(state, path, texts),
        lambda: checkpoint.load_file(path),
        lambda: checkpoint.load_file(path, mmap=True),
        lambda: checkpoint.load_metadata(path),
    ), [path, w, step, state, texts]


@case()
def refused_files(tmp_path):
    good, cut = tmp_path / "good.safetensors", tmp_path / "cut.safetensors"
    checkpoint.save_file({"w": np.arange(9.0)}, good)
    cut.write_bytes(good.read_bytes()[:-3])
    flipped = tmp_path / "flipped.safetensors"
    flipped.write_bytes(good.read_bytes()[:-1] + b"\xff")
    bad_state = {"a": np.zeros(2), "b": object()}
    bad_dtype = {"a": np.zeros(2), "b": np.zeros(2, complex)}
    return each(
        raises(errors.FormatError, checkpoint.load_file, cut),
        raises(errors.FormatError, checkpoint.load_file, cut, mmap=True),
        raises(errors.ChecksumError, checkpoint.load_file, flipped),
        raises(errors.StoreError, checkpoint.load_file, tmp_path / "none"),
        raises((TypeError, ValueError), checkpoint.save_file, bad_state, good, overwrite=True),
        raises(ValueError, checkpoint.save_file, bad_dtype, good, overwrite=True),
        raises(TypeError, checkpoint.save_file, {3: np.zeros(2)}, good),
        raises(OSError, checkpoint.save_file, {}, tmp_path / "none" / "x"),
    ), [good, cut, flipped, bad_state, bad_dtype]


# ---- state dicts ----


def weights(prefix="", dtype=np.float32):
    return {f"{prefix}layers.{i}.{n}": np.full((3, 4), i, dtype) for i in range(3) for n in "wb"}


@case(
    *with_members(
        "StateDict", "get_tensor get_tensor_or_none has_tensor remove_tensor digest astype update"
    )
)
def state_dicts(_):
    arrays = weights()
    array, name = next(iter(arrays.values())), next(iter(arrays))

    def run():
        created = state.StateDict(arrays, extra=array)
        created[name] = array
        created |= {"x": array}
        created.update([("y", array)])
        created.setdefault("z", array)
        other = {"q": array} | created.copy() | state.StateDict.fromkeys("ab", array)
        assert created != other and created == pickle.loads(pickle.dumps(created))
        created.get_tensor(name), created.get_tensor_or_none("none"), created.has_tensor(name)
        created.remove_tensor("x")
        created.astype("bfloat16")
        created.digest(), created.nbytes, repr(created), created._repr_html_()
        del created["y"]

    return run, [arrays, array, name]


@case()
def refused_state_dicts(_):
    arrays, bad = weights(), {"good": np.ones(1), "bad": object()}
    created = state.StateDict(arrays)
    return each(
        raises(TypeError, state.StateDict, bad),
        raises(TypeError, created.update, bad),
        raises(TypeError, created.update, list(bad.items())),
        raises(TypeError, created.__ior__, bad),
        raises(TypeError, created.setdefault, "x"),
        raises(TypeError, created.__setitem__, 3, np.ones(1)),
        raises(ValueError, created.__setitem__, "\ud800", np.ones(1)),
        raises(errors.TensorNotFoundError, created.__getitem__, "none"),
        raises(errors.TensorNotFoundError, created.__delitem__, "none"),
    ), [arrays, bad, created]


@case(
    "ModelStateDict",
    "StateDict.get_layer_state",
    "StateDict.set_layer_state",
    "StateDict.layer_names",
)
def model_states(_):
    arrays = weights()

    def run():
        model = state.ModelStateDict(arrays, model_type="x", layer_count=3)
        model.set_layer_state("layers.1", model.get_layer_state("layers.0"))
        model.layer_names(), model.layer_names(1)
        model["layers.9.w"] = arrays["layers.0.w"]  # the index is rebuilt
        model.get_layer_state("layers.9"), model.get_layer_state("none")
        raises(ValueError, model.get_layer_state, "layers.")()
        copy.copy(model)

    return run, [arrays]


@case(
    *with_members("OptimizerStateDict", "create parameters state_names get_state set_state"),
    "OptimizerType",
)
def optimizer_states(_):
    array, kind = np.ones(3), state.OptimizerType("adam")

    def run():
        adam = state.OptimizerStateDict.create(kind)
        adam.set_state("w", "m", array)
        adam.parameters(), adam.state_names("w"), adam.get_state("w")
        raises(ValueError, adam.set_state, "w", "a.b", array)()

    return run, [array, kind]


@case(
    "StateDict.from_torch",
    "StateDict.to_torch",
    "OptimizerStateDict.from_torch",
    "OptimizerStateDict.to_torch",
)
def torch_states(_):
    torch = pytest.importorskip("torch", reason="converts torch tensors")
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    half = torch.ones(3, dtype=torch.bfloat16)

    def run():
        created = state.StateDict.from_torch(layer.state_dict() | {"half": half})
        created.to_torch()
        moments = state.OptimizerStateDict.from_torch(optimizer, layer)
        moments.to_torch(optimizer, layer)

    return run, [layer, optimizer, half]


@case(
    "keys_match",
    "shapes_match",
    "get_missing_keys",
    "get_unexpected_keys",
    "check_compatibility",
    *with_members("CompatibilityResult", "add_error add_warning is_loadable"),
    "Difference",
)
def comparisons(_):
    a, b = weights(), weights("module.", np.float64) | {"layers.0.w": np.ones(2)}

    def run():
        for source, target in ((a, b), (b, a), (a, a)):
            state.keys_match(source, target), state.shapes_match(source, target)
            state.get_missing_keys(source, target), state.get_unexpected_keys(source, target)
            result = state.check_compatibility(source, target)
            result.add_error("x")
            result.add_warning("y")
            str(result), result._repr_html_(), result.is_loadable(strict=False)

    return each(run, raises(TypeError, state.keys_match, a, 3)), [a, b]


@case("diff", "StateDiff", "TensorChange")
def differences(_):
    a, b = weights(), weights() | {"new": np.ones(1), "layers.0.w": np.ones((3, 4), ">f4")}

    def run():
        difference = state.diff(a, b)
        str(difference), difference._repr_html_()

    strange = {"layers.0.w": np.zeros(2, "M8[s]")}
    return each(
        run,
        raises(errors.CompatibilityError, state.diff, strange, {"layers.0.w": np.ones(2, "M8[s]")}),
    ), [a, b, strange]


@case("load_into", "rename")
def loads(_):
    target, source = weights(), weights("module.")
    frozen = {"w": np.zeros(3)}
    frozen["w"].flags.writeable = False

    def run():
        state.load_into(target, state.rename(source, {"module.": ""}))
        state.load_into(target, weights(dtype=np.float16), cast=True)

    return each(
        run,
        raises(errors.CompatibilityError, state.load_into, target, source),
        raises(ValueError, state.load_into, frozen, {"w": np.ones(3)}),
        raises(
            ValueError,
            state.load_into,
            {"w": target["layers.0.w"]},
            {"w": target["layers.0.w"][::-1]},
        ),
        raises(
            errors.CompatibilityError,
            state.rename,
            {"m.a": frozen["w"], "a": frozen["w"]},
            {"m.": ""},
        ),
    ), [target, source, frozen]


# ---- sharded checkpoints ----


@case("checksum", calls=FEW)
def checksums_of_foreign_files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    checkpoint.save_file({"w": np.ones(300, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    checkpoint.checksum(damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.write(b"x")

    def run():
        checkpoint.checksum(folder, overwrite=True)
        checkpoint.load(folder), checkpoint.verify(folder)
        checkpoint.load_file(folder / "model.safetensors")
        assert checkpoint.verify(damaged).problems

    return each(
        run,
        raises(errors.ChecksumError, checkpoint.load, damaged),
        raises(errors.StoreError, checkpoint.checksum, damaged),
        raises(ValueError, checkpoint.checksum, "s3://bucket/x"),
    ), []


@case(
    "save",
    "load",
    "verify",
    "inspect",
    *with_members("Checkpoint", "files load shards tensors verify"),
    "LayerRecord",
    "LoadedState",
    "ShardRecord",
    "TensorRecord",
    "VerifyReport",
    *with_members("Problem", "as_error"),
    calls=FEW,
)
def checkpoints(tmp_path):
    model, path = weights(), tmp_path / "ckpt"
    moments = {f"{name}.m": np.ones_like(array) for name, array in model.items()}
    strided = {"a": np.ones((6, 4), np.float16).T, "s": checkpoint.Shard(model["layers.0.w"])}
    targets = {name: np.empty_like(array) for name, array in model.items()}
    checkpoint.save(path, model, moments)
    table, sparse = np.zeros((200, 64), np.float32), tmp_path / "sparse"
    table[::9] = 1
    coded = np.arange(200 * 64, dtype=np.float32).reshape(200, 64)
    damaged = tmp_path / "damaged"
    shard = checkpoint.save(damaged, model).shards()[0]
    with (damaged / shard.path).open("r+b") as file:
        file.seek(shard.offset)
        file.write(b"\xff\xff\xff\xff")

    def run():
        options = {"overwrite": True}
        checkpoint.save(path, strided, moments, metadata={"a": [1]}, step=3, **options)
        options |= {"layout": "rows", "progress": lambda count: None}
        saved = checkpoint.save(path, model, moments, **options)
        saved.tensors(), saved.shards(), saved.files(), repr(saved), saved._repr_html_()
        saved.load(names="layers.0"), saved.load(mmap=True), saved.load(into={"model": targets})
        saved.load(rank=0, world_size=2, layout="rows", verify=False, missing="zeros")
        repr(saved.verify()), saved.verify()._repr_html_()
        for change in (0, 1):
            table[3:5] += change
            coded[::2] += change
            options = {"sparse": True, "incremental": True, "pack_below_bytes": 0}
            tables = {"table": table, "coded": coded}
            saved = checkpoint.save(sparse, tables, compress="zlib", **options)
            saved.shards(), saved.load(), saved.load(mmap=True), saved.verify()
        into = {name: np.empty_like(array) for name, array in tables.items()}
        saved.load(into={"model": into}, verify=False)

    def look():
        repr(checkpoint.inspect(damaged))
        for problem in checkpoint.verify(damaged).problems:
            problem.as_error("x")

    def stop(_):
        raise ZeroDivisionError

    return each(
        run,
        look,
        raises(errors.ChecksumError, checkpoint.load, damaged),
        raises(errors.StoreError, checkpoint.load, tmp_path / "none"),
        raises(errors.TensorNotFoundError, checkpoint.load, path, names="none"),
        raises(errors.CompatibilityError, checkpoint.load, path, into={"model": {"x": model}}),
        raises(TypeError, checkpoint.save, path, {"a": object()}, overwrite=True),
        raises(ZeroDivisionError, checkpoint.save, path, strided, overwrite=True, progress=stop),
    ), [model, moments, strided, targets]


@case(
    "CheckpointManager",
    *methods(checkpoint.CheckpointManager),
    "reshard",
    "convert",
    "prune",
    "PruneReport",
    calls=FEW,
)
def steps_of_a_run(tmp_path):
    model = weights()
    numbers = itertools.count()

    def run():
        warnings.simplefilter("ignore", UserWarning)  # keep=3 deletes steps of the previous manager
        with checkpoint.CheckpointManager(tmp_path / "run", keep=3) as manager:
            step = next(numbers)
            manager.save(step, model)
            manager.save_async(step + 1_000_000, model, max_staging_bytes=100).staged()
            manager.delete(step)
            manager.checkpoint(step + 1_000_000), manager.latest_step(), manager.steps()
            manager.restore(step + 1_000_000), manager.restore_latest()
        checkpoint.reshard(
            tmp_path / "run", tmp_path / "cut", layout="flat", world_size=2, overwrite=True
        )
        mlstate.convert(tmp_path / "run", tmp_path / "copy.npz")
        repr(checkpoint.prune(tmp_path / "run", keep=1, dry_run=True))

    return run, [model]


@case("Layout", *methods(checkpoint.Layout, "steps", "parts"), "Shard")
def layouts(_):
    array = np.ones((5, 3))

    def run():
        both = checkpoint.Layout.axis(1, 2) * checkpoint.Layout.flat(2)
        pickle.loads(pickle.dumps(both)), repr(both), hash(both), both == both.steps
        both.shape((5, 3), 1), both.take(array, 3), checkpoint.Layout.whole()
        shard = checkpoint.Layout.rows(2).shard(array, 1, version=3, tier="hot")
        repr(shard), state.StateDict(x=shard)

    return each(
        run,
        raises(ValueError, checkpoint.Layout, [("flat", 2), (0, 2)]),
        raises(TypeError, checkpoint.Shard, array, checkpoint.Layout.rows(2)),
        raises(ValueError, checkpoint.Layout.rows(2).take, array, 2),
    ), [array]


# ---- collectives ----


@case(
    "ReduceOp",
    "Work",
    "Work.wait",
    "Work.done",
    "Work.set_result",
    "Work.set_error",
    "SingleGroup",
    *(f"SingleGroup.{n}" for n in members(collectives.SingleGroup)),
)
def single_groups(_):
    array, data = np.ones((2, 3)), b"some bytes"

    def run():
        group = collectives.SingleGroup()
        group.all_reduce(array, op=collectives.ReduceOp("mean"), async_op=True).wait()
        group.reduce_scatter(array), group.all_gather(array), group.all_to_all(array)
        group.broadcast(array), group.barrier(), group.gather_bytes(data)
        raises(ValueError, group.all_gather, array, counts=[1])()
        group.abort() or group.close()
        raises(errors.CollectiveError, group.barrier)()
        work = collectives.Work("barrier", 0)
        work.set_error(errors.CollectiveError("gone"))
        raises(errors.CollectiveError, work.wait)()
        work.done()

    return run, [array, data]


@case(
    "LocalGroup",
    *(f"LocalGroup.{n}" for n in members(collectives.LocalGroup) if n != "run"),
    calls=100,
)
def local_groups(_):
    array, big, data = np.ones((2, 3)), np.ones((2, 40_000), np.float32), b"some bytes"
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MLSTATE_JOB": "leaks"}

    def work(group):
        group.all_reduce(array, op="mean", async_op=True).wait()
        group.reduce_scatter(array), group.all_gather(array), group.all_to_all(array)
        group.reduce_scatter(big, out=big[:1].copy()), group.all_reduce(big, out=big.copy())
        group.broadcast(array.copy()), group.barrier(), group.gather_bytes(data)
        raises(errors.CollectiveError, group.all_gather, array[group.rank :])()
        raises(ValueError, group.all_gather, array, counts=[1])()

    def run():
        groups = collectives.LocalGroup.threads(2)
        helper = Thread(target=work, args=(groups[1],))
        helper.start()
        work(groups[0])
        helper.join()
        raises(errors.CollectiveError, groups[0].barrier, timeout=0.01)()
        groups[0].abort(), groups[0].close()  # the other group stays open
        raises(errors.CollectiveError, groups[0].barrier)()
        with collectives.LocalGroup.join("leaks", 0, 1) as group:
            group.barrier()
        os.environ.update(variables)
        collectives.LocalGroup.from_env().close()
        for name in variables:
            del os.environ[name]
        raises(errors.CollectiveError, collectives.LocalGroup.from_env)()

    return run, [array, big, data]


@case("LocalGroup.run", calls=10)
def local_processes(_):
    method = "fork" if sys.version_info < (3, 12) else "spawn"

    def run():
        results = collectives.LocalGroup.run(max, 1, LastOfAll(), start_method=method)
        assert type(results[0]) is LastOfAll

    return run, []


@case("run_ranks")
def ranks_of_a_test(_):
    array = np.ones(3)
    return lambda: testing.run_ranks(2, lambda group: group.all_reduce(array)), [array]


@case(
    "digest",
    "TensorDigest",
    "DigestDiff",
    *with_members("Digest", "diff to_json from_json"),
    *methods(state.records.DigestDiff),
)
def digests(_):
    array, other = np.arange(12.0).reshape(3, 4), np.arange(12.0).reshape(4, 3).T
    first = mlstate.digest({"w": array})
    return each(
        lambda: str(first.diff(mlstate.digest({"w": other, "v": other}))),
        lambda: state.Digest.from_json(first.to_json()) == first,
        raises(mlstate.FormatError, state.Digest.from_json, "{}"),
        raises(mlstate.CompatibilityError, mlstate.digest, {"w": np.array([object()])}),
    ), [array, other]


@case("assert_same_bits", "assert_digest", calls=FEW)
def compared_bits(folder):
    array, other = np.arange(12.0).reshape(3, 4), np.arange(12.0).reshape(4, 3).T
    path = folder / "golden.json"
    return each(
        lambda: testing.assert_same_bits({"w": array}, {"w": array}),
        raises(AssertionError, testing.assert_same_bits, {"w": array}, {"w": other}),
        lambda: testing.assert_digest({"w": array}, path, update=True),
        raises(AssertionError, testing.assert_digest, {"w": other}, path),
    ), [array, other]


class LastOfAll:
    """An object greater than any number."""

    def __gt__(self, other):
        return True


# ---- states of several ranks ----


@case(
    "RankDifference",
    "DistributedStateCollector",
    *methods(distributed.DistributedStateCollector),
    calls=100,
)
def collected_states(_):
    array = np.arange(60.0).reshape(5, 12)
    replicated, other, target = np.ones(3), np.zeros(3), np.zeros(3)
    layout = checkpoint.Layout.axis(1, 2)
    states = [{"w": layout.shard(array, index), "b": replicated} for index in range(2)]
    single = {"w": checkpoint.Layout.rows(1).shard(array, 0), "b": replicated}

    def run():
        collector = distributed.DistributedStateCollector(collectives.SingleGroup())
        collector.collect_local_state(single)
        collector.merge_states(states)
        collector.compare_states([{"b": replicated}, {"b": other}])
        raises(errors.CompatibilityError, collector.merge_states, states[:1])()
        raises(
            errors.CompatibilityError, collector.merge_states, [{"b": replicated}, {"b": other}]
        )()
        collector.gather_full_state(single, max_bytes=64)
        collector.broadcast_state({"b": target}, source={"b": other})
        raises(errors.CompatibilityError, collector.broadcast_state, {"b": target}, source={})()
        raises(TypeError, collector.gather_full_state, 5)()

    return run, [array, replicated, other, target]


# ---- other functions ----


@case("get_num_threads", "set_num_threads")
def thread_counts(_):
    before = threads.get_num_threads()
    return each(
        lambda: threads.set_num_threads(before),
        raises((ValueError, TypeError), threads.set_num_threads, -1),
    ), []


@case("info")
def described_machine(_):
    facts = mlstate.info()  # measures copy speeds once
    return lambda: (str(mlstate.info()), facts.to_dict(), facts._repr_html_()), []


@case("get_include", "get_library_dir")
def folders_of_the_c_library(_):
    return each(mlstate.get_include, mlstate.get_library_dir), []


@case(*(name for name in errors.__all__))
def raised_errors(_):
    name = "layers.3.k"
    classes = [getattr(errors, name) for name in errors.__all__]

    def run():
        for cls in classes:
            error = cls(f"{name} is wrong")
            error.name = name
            str(error)

    return run, [name, *classes]


@case("StateShapeWarning")
def warned(_):
    return lambda: coreml.StateShapeWarning("37 is no multiple of 32"), []


# ---- the tests ----


def public_names():
    """Functions, classes, and the public methods of classes, of every public module."""
    for module in MODULES:
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                yield name
                for member, value in members(thing).items():
                    function = getattr(value, "__func__", value)
                    if inspect.isroutine(function):
                        yield f"{name}.{member}"
            elif callable(thing):
                yield name


def test_every_public_name_has_a_case():
    covered = set()
    for parameter in CASES:
        covered.update(parameter.values[0].names)
    missing = sorted(set(public_names()) - covered - NOT_CALLED)
    assert not missing, f"add a case for {', '.join(missing)}"


class _MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns; `uordblks` is the bytes in use."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


try:
    libc = ctypes.CDLL(None)
    mallinfo = libc.mallinfo2
    mallinfo.restype, libc.malloc.restype = _MallocInfo, ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
except (OSError, TypeError, AttributeError):
    mallinfo = None  # no glibc here: Python's blocks are counted alone


def c_bytes():
    """The bytes that malloc has handed out, mapped blocks included, or 0."""
    if mallinfo is None:
        return 0
    info = mallinfo()
    return info.uordblks + info.hblkhd


def fill_thread_cache():
    """Fill glibc's cache of freed blocks: mallinfo2 counts a cached block as handed out."""
    if mallinfo is not None:
        blocks = [libc.malloc(size) for size in range(24, 1033, 16) for _ in range(7)]
        for block in blocks:
            libc.free(block)


@pytest.fixture(scope="module", autouse=True)
def unlogged():
    """Disable logging, because pytest keeps each record."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Exclude existing objects from collections: with torch they are many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # the garbage of the cases is frozen too
    gc.collect()
    gc.freeze()


THREADS = _thread._count()  # before any case


def settle():
    """Let idle threads end, and bring the caches of Python and of malloc into one state.

    A thread that ends keeps about 30 blocks until its last step, which can be late under load.

    Python's cache of 4,096 looked-up attributes fills slowly, because an attribute that C looks
    up by name takes another entry each time.
    """
    latest = time.monotonic() + 0.3  # some threads stay
    time.sleep(0.005)
    while _thread._count() > THREADS and time.monotonic() < latest:
        time.sleep(0.005)
    gc.collect()
    ctypes.pythonapi.PyType_ClearCache()
    fill_thread_cache()


def measured(call, calls=CALLS):
    """(blocks, C bytes) that this many calls leave behind."""
    settle()
    blocks, memory = sys.getallocatedblocks(), c_bytes()
    for _ in itertools.repeat(None, calls):
        call()
    settle()
    return sys.getallocatedblocks() - blocks, c_bytes() - memory


def leavings(call, calls):
    """What `calls` calls leave behind in each of several rounds, or nothing if they do not leak.

    A leak shows in every round, a filling cache in fewer and fewer: one round clean of blocks and
    one clean of bytes are enough. Most calls leave nothing at all, and short rounds prove it: the
    number of blocks changes by less than a third of a block a call, C memory by less than the
    smallest allocation a call, in either direction. Other calls keep and free memory now and then,
    and need longer rounds.
    """
    clean, rounds = set(), []
    for number in range(-3, ROUNDS):
        if number < 0:
            left = measured(call, SHORT)
            within_limits = [abs(left[0]) < SHORT // 3, abs(left[1]) < SHORT * FEW_BYTES]
        else:
            times = calls << number
            left = measured(call, times)
            within_limits = [left[0] < max(times // 6, 32), left[1] < times * FEW_BYTES]
        clean.update(kind for kind in (0, 1) if within_limits[kind])
        if len(clean) == 2:
            return []
        rounds.append(left)
    return rounds


@pytest.fixture
def folder(tmp_path):
    """A folder in memory, if possible: thousands of saves need not wait for the disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.skipif(sys.getallocatedblocks() == 0, reason="counts the blocks of pymalloc")
@pytest.mark.parametrize("prepare", CASES)
def test_calls_leak_no_memory_or_references(prepare, folder):
    call, inputs = prepare(folder)
    for _ in range(FIRST):  # caches fill
        call()
    gc.collect()  # cycles left by failed calls are collected; they are not leaks
    gc.freeze()
    counts = [sys.getrefcount(thing) for thing in inputs]
    left = leavings(call, prepare.calls)
    assert not left, (
        f"(blocks, bytes of C) left by {SHORT} calls, thrice, "
        f"then by {prepare.calls} and each time twice as many: {left}"
    )
    after = [sys.getrefcount(thing) for thing in inputs]
    assert after == counts, "a call took or dropped references of its inputs"


@pytest.mark.skipif(sys.getallocatedblocks() == 0, reason="counts the blocks of pymalloc")
def test_a_leak_would_be_seen():
    leaked = []
    # a few blocks of earlier tests may be freed meanwhile
    assert measured(lambda: leaked.append(object()))[0] >= CALLS - CALLS // 6
    if mallinfo is not None:
        assert measured(lambda: leaked.append(np.empty(1000)))[1] >= CALLS * 8000
    assert leavings(lambda: leaked.append(object()), CALLS)
    times = itertools.count()
    assert leavings(lambda: next(times) % 2 or leaked.append(object()), CALLS)
    assert not leavings(object, CALLS)
