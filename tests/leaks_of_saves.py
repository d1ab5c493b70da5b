"""Cases of `test_leaks`: saves that go on while the state changes."""

import itertools

import numpy as np
from leak_cases import case, each, raises

from mlstate import checkpoint, errors

FEW = 60


@case(
    "save_async",
    "SaveHandle",
    "SaveHandle.staged",
    "SaveHandle.wait",
    "SaveHandle.done",
    "SaveHandle.progress",
    "SaveHandle.cancel",
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
        handle = checkpoint.save_async(path, model, strided, max_staging_bytes=300)
        handle.staged(), handle.progress(), handle.wait(), handle.done(), repr(handle)
        handle = checkpoint.save_async(path, model, staging=staging)
        handle.wait(), handle.cancel(), repr(staging)
        checkpoint.Staging(5000)

    def cancelled():
        handle = checkpoint.save_async(path, strided)
        if handle.cancel():
            raises(errors.StoreError, handle.wait)()

    def stopped():
        checkpoint.save_async(path, {"new": model["layers.0.w"]}, progress=lambda _: 1 / 0).wait()

    return each(
        run,
        cancelled,
        raises(ZeroDivisionError, stopped),
        raises(errors.StoreError, lambda: checkpoint.save_async(file, model).wait()),
        raises(TypeError, checkpoint.save_async, path, {"a": object()}),
        raises(ValueError, checkpoint.save_async, path, model, max_staging_bytes=-1),
    ), [model, strided]
