"""The file operations of `bench_guard.py`, each with the simple code that it replaces.

`FILES` is the table. A durable write of the simple code does what a careful user does: a
temporary file, fsync, rename, fsync of the folder. Files to read are in the page cache.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_states import reload_page_cache, sync
from guard_rows import (
    GIB,
    KIB,
    MANY,
    MIB,
    SINGLE,
    SIZES,
    Arrays,
    Operation,
    state_of,
    touched_state,
)
from optional import optional
from paired import Case

import mlstate
from mlstate.checkpoint import Checkpoint, Staging, save_async
from mlstate.follow import Follower, Publisher
from mlstate.prompts._pending import PendingPuts

safetensors = optional("safetensors.numpy")
FILE_SIZES = tuple(size for size in SIZES if size < GIB)
STATE_BYTES = 512  # of the array in a named state
SHOWN = 200_000  # tensors of a checkpoint that is shown
PARTS = 4  # arrays of a checkpoint, unless it has 1,000


DURABLE = "temporary file, fsync, os.replace, fsync of the folder"
EACH = "for each tensor: array.tofile, fsync; then a JSON manifest in the same way"
READ = "json.load of the manifest; for each tensor: np.fromfile"
CHECK = ", zlib.crc32 compared with the stored value"
READ_FIRST = "commit record, index and manifest are read and checked"
CHECKED_TARGETS = "the same, and the targets are checked against the manifest; threads start"
SORTED = "a row of text for each tensor, sorted by the numbers in the names"
TENSORS: dict[str, Any] = {"many": True, "needs": safetensors}
SMALL: dict[str, Any] = {"sizes": (64 * KIB, MIB), "needs": safetensors}
FOLLOWED: dict[str, Any] = {"sizes": (MANY * 8 * KIB,), "threads": (1,)}
IN_MEMORY = ("staging", "following")  # functions below; their writes to disk are not timed
FILES: list[tuple[str, str, Any, tuple[Any, ...], dict[str, Any]]] = []  # the table


def operation(name: str, simple: str, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
    """Add an operation to the table; the function makes its case from a folder and these."""

    def add(build: Any) -> Any:
        FILES.append((name, simple, build, arguments, {"sizes": FILE_SIZES} | options))
        return build

    return add


def operations(root: Path) -> list[Operation]:
    """Return the table; files are written below `root`."""
    return [
        Operation(name, simple, partial(in_folder, build, root, arguments), **options)
        for name, simple, build, arguments, options in FILES
    ]


def in_folder(build: Any, root: Path, arguments: Any, nbytes: int, tensors: int) -> Case:
    """Make a case in an empty folder, which it removes at its end."""
    if build.__name__ in IN_MEMORY and Path("/dev/shm").is_dir():
        root = Path("/dev/shm") / root.name
    folder = root / build.__name__
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case: Case = build(folder, *arguments, nbytes, tensors)
    close = case.close

    def close_and_remove() -> None:
        close()
        shutil.rmtree(folder)

    case.close = close_and_remove
    return case


def replace_durably(path: Path, temporary: Path) -> None:
    """Put a written file in the place of another one, durably."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def file_of(array: Any, folder: Path) -> None:
    """Save one array with NumPy, atomically and durably."""
    temporary = folder / "simple.npy.tmp"
    with temporary.open("wb") as file:
        np.save(file, array)
    replace_durably(folder / "simple.npy", temporary)


def safetensors_of(state: Arrays, folder: Path) -> None:
    """Save a state with safetensors, atomically and durably."""
    temporary = folder / "simple.safetensors.tmp"
    safetensors.save_file(state, temporary)
    replace_durably(folder / "simple.safetensors", temporary)


def check_sum(array: Any, expected: int | None) -> None:
    """Raise if an array's bytes differ from the saved checksum, if there is one."""
    if expected is not None and zlib.crc32(array) != expected:
        raise ValueError("the file is damaged")


def write_each(state: Arrays, folder: Path, *, sums: bool = False) -> None:
    """Save each array to a separate file, and a manifest last; all of it durable."""
    folder.mkdir()
    for name, array in state.items():
        with (folder / name).open("wb", buffering=0) as file:
            array.tofile(file)
            os.fsync(file.fileno())
    temporary = folder / "manifest.tmp"
    entries = {n: [a.dtype.str, a.shape, zlib.crc32(a) if sums else None] for n, a in state.items()}
    temporary.write_text(json.dumps(entries))
    replace_durably(folder / "manifest.json", temporary)


def read_each(folder: Path) -> Arrays:
    """Load the files of `write_each`."""
    manifest = json.loads((folder / "manifest.json").read_text())
    arrays = {}
    for name, (dtype, shape, expected) in manifest.items():
        array = np.fromfile(folder / name, dtype)
        check_sum(array, expected)
        arrays[name] = array.reshape(shape)
    return arrays


def map_each(folder: Path) -> Arrays:
    """Map the files of `write_each`."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return {
        name: np.memmap(folder / name, dtype, "r", shape=tuple(shape))
        for name, (dtype, shape, _) in manifest.items()
    }


def read_into(folder: Path, target: Arrays) -> None:
    """Load the files of `write_each` into existing arrays."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, (_, _, expected) in manifest.items():
        with (folder / name).open("rb", buffering=0) as file:
            view, done = memoryview(target[name]).cast("B"), 0
            while done < len(view):
                done += file.readinto(view[done:])
        check_sum(target[name], expected)


def read_npy(path: Path, expected: int) -> Any:
    """Load one array, and compare its checksum."""
    array = np.load(path)
    check_sum(array, expected)
    return array


def read_safetensors(path: Path, sums: dict[str, int]) -> Arrays:
    """Load a state with safetensors, and compare the checksums."""
    state: Arrays = safetensors.load_file(path)
    for name, array in state.items():
        check_sum(array, sums[name])
    return state


@operation("save_file, safetensors", f"safetensors.save_file, {DURABLE}", "safetensors", **TENSORS)
@operation("save_file", f"np.save, {DURABLE}", "numpy")
def saving_file(folder: Path, how: str, nbytes: int, tensors: int) -> Case:
    """Save one state file."""
    state = state_of(nbytes, tensors)
    simple = partial(safetensors_of, state, folder)
    if how == "numpy":
        simple = partial(file_of, next(iter(state.values())), folder)
    save = partial(mlstate.save_file, state, folder / "ours.safetensors")
    return Case(simple, save, tensors)


@operation("load_file mmap=True", 'np.load(mmap_mode="r")', "mmap")
@operation(
    "load_file, safetensors unchecked",
    "safetensors.load_file, which ignores the checksums",
    "unchecked",
    **SMALL,
)
@operation(
    "load_file, safetensors' file", "safetensors.load_file, neither checks", "foreign", **SMALL
)
@operation(
    "load_file, safetensors",
    f"safetensors.load_file; for each tensor{CHECK}",
    "safetensors",
    **TENSORS,
)
@operation("load_file verify=False", "np.load", "verify=False")
@operation("load_file", f"np.load{CHECK}", "numpy")
def loading_file(folder: Path, how: str, nbytes: int, tensors: int) -> Case:
    """Load one state file."""
    state = state_of(nbytes, tensors)
    path, npy = folder / "ours.safetensors", folder / "simple.npy"
    mlstate.save_file(state, path)
    np.save(npy, next(iter(state.values())))
    reload_page_cache(folder)
    sums = {name: zlib.crc32(array) for name, array in state.items()}
    load = partial(mlstate.load_file, path)
    ways: dict[str, Any] = {
        "numpy": (partial(read_npy, npy, next(iter(sums.values()))), load),
        "verify=False": (partial(np.load, npy), partial(load, verify=False)),
        "mmap": (partial(np.load, npy, mmap_mode="r"), partial(load, mmap=True, verify=False)),
    }
    if safetensors is not None:
        foreign = folder / "foreign.safetensors"
        safetensors.save_file(state, foreign)
        ways["safetensors"] = (partial(read_safetensors, path, sums), load)
        ways["unchecked"] = (partial(safetensors.load_file, path), load)
        ways["foreign"] = (
            partial(safetensors.load_file, foreign),
            partial(mlstate.load_file, foreign),
        )
    return Case(*ways[how], tensors)


@operation(
    "save",
    EACH,
    many=True,
    fixed_us=4000.0,
    why="lock, index, manifest and commit record: extra syncs",
)
def saving(folder: Path, nbytes: int, tensors: int) -> Case:
    """Save a checkpoint to a folder that does not exist."""
    parts = tensors if tensors > 1 else PARTS
    state = state_of(nbytes, parts)

    simple, saved = folder / "simple", folder / "ours"
    return Case(
        partial(write_each, state, simple),
        partial(mlstate.save, saved, state),
        parts,
        before_simple=partial(shutil.rmtree, simple, ignore_errors=True),
        before_ours=partial(shutil.rmtree, saved, ignore_errors=True),
    )


@operation("load mmap=True", "the same, np.memmap", "mmap", many=True)
@operation(
    "load into=",
    f"the same, file.readinto(target){CHECK}",
    "into=",
    many=True,
    fixed_us=180.0,
    why=CHECKED_TARGETS,
)
@operation("load verify=False", READ, "verify=False", fixed_us=60.0, why=READ_FIRST)
@operation("load", READ + CHECK, "fresh", many=True, fixed_us=30.0, why=READ_FIRST)
def loading(folder: Path, how: str, nbytes: int, tensors: int) -> Case:
    """Load a checkpoint."""
    parts = tensors if tensors > 1 else PARTS
    state = state_of(nbytes, parts)
    simple, mlstate_folder = folder / "simple", folder / "ours"
    write_each(state, simple, sums=how in ("fresh", "into="))
    mlstate.save(mlstate_folder, state)
    reload_page_cache(folder)
    read, load = partial(read_each, simple), partial(mlstate.load, mlstate_folder)
    ways: dict[str, Any] = {
        "fresh": (read, load),
        "verify=False": (read, partial(load, verify=False)),
        "mmap": (partial(map_each, simple), partial(load, mmap=True, verify=False)),
    }
    if how == "into=":
        targets = [touched_state(state) for _ in range(2)]
        ways[how] = (
            partial(read_into, simple, targets[0]),
            partial(load, into={"model": targets[1]}),
        )
    return Case(*ways[how], parts)


@operation(
    "load of many states", "twice a load of one state with as many dicts", sizes=(MIB // 4, MIB)
)
def loading_states(folder: Path, nbytes: int, tensors: int) -> Case:
    """Load named states of one array and one number each, or twice one state of as many dicts."""
    count = nbytes // STATE_BYTES
    states = {f"s{i}": {"array": np.ones(STATE_BYTES // 4, SINGLE), "i": i} for i in range(count)}
    mlstate.save(folder / "ours", states=states)
    mlstate.save(folder / "simple", states={"all": states})

    def load_twice() -> None:
        for _ in range(2):
            mlstate.load(folder / "simple")

    load = partial(mlstate.load, folder / "ours")
    return Case(load_twice, load, tensors)


@operation("HTML of many tensors", SORTED, Checkpoint._repr_html_, sizes=(SHOWN * SINGLE.itemsize,))
@operation("repr of many tensors", SORTED, repr, sizes=(SHOWN * SINGLE.itemsize,))
def showing(folder: Path, show: Any, nbytes: int, tensors: int) -> Case:
    """Show a checkpoint of many tensors by `show`, or make a row for each in the same order."""
    count = nbytes // SINGLE.itemsize
    state = {f"layers.{i // 20}.w{i % 20}": np.ones(1, SINGLE) for i in range(count)}
    checkpoint = mlstate.save(folder / "ours", state)

    def order(item: tuple[str, Any]) -> list[Any]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]

    def make_rows() -> str:
        rows = sorted(state.items(), key=order)
        return "\n".join(f"{name} {each.dtype} {each.shape} {each.nbytes}" for name, each in rows)

    ours = partial(show, checkpoint)
    return Case(make_rows, ours, tensors)


@operation(
    "save_async, staged",
    "for each tensor: np.copyto(kept, tensor)",
    sizes=tuple(size for size in FILE_SIZES if size <= 64 * MIB),
    many=True,
    fixed_us=550.0,
    why="a thread starts that writes, and the memory for it is shared out",
)
def staging(folder: Path, nbytes: int, tensors: int) -> Case:
    """Start a save, and wait until training may continue; the writing is not timed."""
    state = state_of(nbytes, tensors)
    target = touched_state(state)
    memory = Staging(nbytes)
    handle: list[Any] = [None]

    def clear() -> None:
        shutil.rmtree(folder / "ours", ignore_errors=True)

    def stage() -> None:
        handle[0] = save_async(folder / "ours", state, staging=memory)
        handle[0].staged()

    def copy() -> None:
        for name, array in target.items():
            np.copyto(array, state[name])

    return Case(copy, stage, tensors, before_ours=clear, after_ours=lambda: handle[0].wait())


@operation("advance, 1 % changed", "twice mlstate.load of the 1,000 tensors", "advance", **FOLLOWED)
@operation("publish, 1 % changed", "twice mlstate.save of the 1,000 tensors", "publish", **FOLLOWED)
def following(folder: Path, how: str, nbytes: int, tensors: int) -> Case:
    """Publish a version of `MANY` tensors, or follow it; or save or load them twice."""
    state, simple = state_of(nbytes, MANY), folder / "simple"
    publisher = Publisher(folder / "ours", anchor_every=1 << 20)
    follower = Follower(folder / "ours", into=touched_state(state))
    publisher.publish(0, state)
    follower.advance()
    step = [0]

    def change() -> None:
        step[0] += 1
        for number, array in enumerate(state.values()):
            array[(step[0] + number) % 100 :: 100] += 1  # 1 % of the elements

    def publish() -> None:
        publisher.publish(step[0], state)

    def change_and_publish() -> None:
        change()
        publish()

    def save_twice() -> None:
        for name in ("a", "b"):
            mlstate.save(simple / name, state)

    def load_twice() -> None:
        for name in ("a", "b"):
            mlstate.load(simple / name)

    if how == "publish":
        clear = partial(shutil.rmtree, simple, ignore_errors=True)
        return Case(save_twice, publish, MANY, before_simple=clear, before_ours=change)
    save_twice()
    return Case(load_twice, follower.advance, MANY, before_ours=change_and_publish)


@operation(
    "PromptStore.put, submission",
    "ThreadPoolExecutor.submit(work, array.copy())",
    sizes=(64 * KIB,),
    threads=(1,),
    fixed_us=3.0,
    why="the put gets its place in the queue, in a section that no signal interrupts",
)
def submitting(folder: Path, nbytes: int, tensors: int) -> Case:
    """Give the copy of an array to a thread; its work is not timed."""
    array = np.ones(nbytes, np.uint8)
    tokens, records = np.arange(600), [(0, 256, b"", [array])]
    pool, puts = ThreadPoolExecutor(1), PendingPuts(1 << 30)
    handle: list[Any] = [None]

    def simple() -> None:
        handle[0] = pool.submit(len, [array.copy()])

    def submit() -> None:
        handle[0] = puts.submit(tokens, records, len)

    def wait() -> None:
        handle[0].result()

    def close() -> None:
        puts.close()
        pool.shutdown()

    return Case(simple, submit, after_simple=wait, after_ours=wait, close=close)
