"""Leak cases of asynchronous and planned saves, of exports, and of loads of several kinds."""

import itertools
import shutil
import warnings

import numpy as np
import pytest
from leak_cases import case, each, raises, with_members

import mlstate
from mlstate import checkpoint, errors, kv

FEW = 60


@case(
    "save_async",
    *with_members("SaveHandle", "staged wait done progress cancel times"),
    *with_members("SaveTimes", "blocked_seconds"),
    "Staging",
    calls=FEW,
)
def asynchronous_saves(tmp_path):
    model = {f"layers.{i}.w": np.ones((9, 5 + i), np.float32) for i in range(4)}
    strided = {"a": np.ones((6, 4), np.float16).T, "s": checkpoint.Shard(model["layers.0.w"])}
    path, staging, numbers = tmp_path / "ckpt", checkpoint.Staging(200), itertools.count()
    file = tmp_path / "file"
    file.write_bytes(b"")

    def run():
        model["layers.1.w"][0] = next(numbers)
        handle = checkpoint.save_async(path, model, strided, max_staging_bytes=300, overwrite=True)
        handle.staged(), handle.progress(), handle.wait(), handle.done(), repr(handle)
        handle.times().blocked_seconds, handle._repr_html_()
        handle = checkpoint.save_async(path, model, staging=staging, overwrite=True)
        handle.wait(), handle.cancel(), repr(staging)
        checkpoint.Staging(5000)

    def cancelled():
        handle = checkpoint.save_async(path, strided, overwrite=True)
        if handle.cancel():
            raises(errors.StoreError, handle.wait)()
            handle.times(), handle._repr_html_()

    def stopped():
        checkpoint.save_async(
            path, {"new": model["layers.0.w"]}, overwrite=True, progress=lambda _: 1 / 0
        ).wait()

    return each(
        run,
        cancelled,
        raises(ZeroDivisionError, stopped),
        raises(errors.StoreError, lambda: checkpoint.save_async(file, model).wait()),
        raises(TypeError, checkpoint.save_async, path, {"a": object()}),
        raises(ValueError, checkpoint.save_async, path, model, max_staging_bytes=-1),
    ), [model, strided]


@case("plan_save", "plan_load", "SavePlan", "LoadPlan", "FileRead", calls=FEW)
def planned_saves_and_loads(tmp_path):
    model = {f"layers.{i}.w": np.ones((9, 5 + i), np.float32) for i in range(4)}
    rows = checkpoint.Layout.rows(3)
    state = {"layers.0.w.m": rows.shard(np.ones((9, 5)).T.copy().T, 1)}
    source, path = tmp_path / "source", tmp_path / "ckpt"
    checkpoint.save(source, model, {"layers.1.w.m": np.ones((9, 6))})
    checkpoint.reshard(source, path, layout="flat", world_size=3)

    def run():
        repr(checkpoint.plan_save(model, state, rank=1, world_size=3, layout="flat"))
        checkpoint.plan_save(model, rank=2, world_size=3)
        plan = checkpoint.plan_load(path, names=["layers.1", "layers.2.w"])
        repr(plan), plan.files, plan.nbytes
        checkpoint.plan_load(path, rank=1, world_size=2, layout="rows", verify=False)
        checkpoint.load(path, names=["layers.3"], rank=2, world_size=5, layout="flat")

    return each(
        run,
        raises(ValueError, checkpoint.plan_save, model, rank=3, world_size=3),
        raises(ValueError, checkpoint.plan_save, model, pack_below_bytes=-1),
        raises(errors.TensorNotFoundError, checkpoint.plan_load, path, names=["nothing"]),
        raises(errors.StoreError, checkpoint.plan_load, tmp_path / "nowhere"),
    ), [model, state]


@case("export_huggingface", "export_huggingface_async", calls=150)
def hugging_face_folders(tmp_path):
    model = {f"layers.{i}.w": np.ones((9, 5 + i), np.float32) for i in range(4)}
    model["columns"] = np.ones((6, 4), np.float16).T
    numbers = itertools.count()
    source = tmp_path / "source"
    checkpoint.export_huggingface(source, model, max_shard_bytes=400)
    wrong = tmp_path / "wrong"
    checkpoint.export_huggingface(wrong, model, max_shard_bytes=400)
    index = wrong / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "../model-00001"))

    def run():
        target = tmp_path / str(next(numbers))
        checkpoint.export_huggingface(target, model, files_from=source, max_shard_bytes=400)
        checkpoint.load(target, rank=1, world_size=2, layout="rows")
        checkpoint.load(target, into={"model": {"columns": np.ones((4, 6), np.float16)}},
                        names="columns")  # fmt: skip
        repr(checkpoint.inspect(target)), checkpoint.verify(target)
        checkpoint.load(target, mmap=True)
        shutil.rmtree(target)
        checkpoint.export_huggingface_async(target, model).wait()
        shutil.rmtree(target)

    return each(
        run,
        raises(errors.StoreError, checkpoint.export_huggingface, source, model, overwrite=False),
        raises(TypeError, checkpoint.export_huggingface, tmp_path / "m", {"a": [1]}),
        raises(
            errors.StoreError,
            lambda: checkpoint.export_huggingface_async(source, model, overwrite=False).wait(),
        ),
        raises(TypeError, checkpoint.export_huggingface_async, tmp_path / "m", {"a": [1]}),
        raises(errors.FormatError, checkpoint.load, wrong),
    ), [model]


def _paths(tmp_path):
    """Return a checkpoint and files with the same tensors."""
    model = {f"layers.{i}.w": np.ones((9, 5 + i), np.float32) for i in range(4)}
    mlstate.save(tmp_path / "ckpt", model)
    mlstate.save_file(model, tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", **model)
    return [tmp_path / name for name in ("ckpt", "a.safetensors", "a.npz")]


@case("load", "diff", "inspect", calls=FEW)
def paths_of_files(tmp_path):
    paths = _paths(tmp_path)

    def run():
        for path in paths:
            loaded = mlstate.load(path, rank=1, world_size=3, layout="rows")
            mlstate.load(path, names="layers.1"), mlstate.inspect(path)
            assert not mlstate.diff(paths[0], loaded).identical
            assert mlstate.diff(path, paths[0], rtol=1e-3).identical

    return each(
        run,
        raises(errors.TensorNotFoundError, mlstate.load, paths[2], names="missing"),
        raises(TypeError, mlstate.rename, mlstate.load(paths[1]), {"a": "b"}),
    ), []


@case("load", calls=150)
def files_of_torch(tmp_path):
    torch = pytest.importorskip("torch", reason="reads files of torch")
    path, wrong = tmp_path / "a.pt", tmp_path / "wrong.pt"
    torch.save({f"layers.{i}.w": torch.ones(9, 5 + i) for i in range(4)}, path)
    wrong.write_bytes(path.read_bytes()[:-200])

    def run():
        mlstate.load(path, rank=1, world_size=3, layout="rows")

    return each(run, raises(errors.FormatError, mlstate.load, wrong)), []


@case("load", calls=200)
def folders_of_dcp(tmp_path):
    torch = pytest.importorskip("torch", reason="reads files of torch")
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed is not initialized
        dcp.save({"model": {"w": torch.ones(9, 5)}}, checkpoint_id=tmp_path / "dcp")

    def run():
        mlstate.load(tmp_path / "dcp", rank=1, world_size=3, layout="rows")

    return run, []


@case("save", "load", "KVState", "RollingKVState", "CacheState", calls=FEW)
def caches_among_the_states(tmp_path):
    grown, rolling = kv.KVState((2, 1, 8, 4), capacity=16), kv.RollingKVState((2, 1, 8, 4))
    entry = kv.CacheEntry("0.keys", "full", (1, 2, 8, 4), "float16")
    hybrid = kv.CacheState(kv.CacheSpec([entry]), {"0.keys": np.ones((1, 2, 8, 4), "f2")}, 3)
    states = {"grown": grown, "rolling": rolling, "hybrid": hybrid}
    path, small = tmp_path / "ckpt", kv.KVState((2, 1, 4, 4))

    def run():
        mlstate.save(path, states=states)
        mlstate.load(path), mlstate.load(path, into={"states": states})

    return each(
        run,
        raises(errors.CompatibilityError, mlstate.load, path, into={"states": {"grown": small}}),
        raises(TypeError, mlstate.save, path, states),
    ), []


@case("verify", calls=FEW)
def verified_names(tmp_path):
    path, file = _paths(tmp_path)[:2]

    def run():
        assert mlstate.verify(path, names="layers.[12].*") and mlstate.verify(file, names="layers")

    return each(run, raises(ValueError, mlstate.verify, path, names="layers", repair=True)), []
