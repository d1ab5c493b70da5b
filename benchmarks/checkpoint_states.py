"""The states that `bench_checkpoint.py` saves, and the cost of their bytes for the system alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
Shape = tuple[int, ...]

PAGE = 4096
MOST = 1 << 30  # bytes in one system call, whose limit is 2 GiB
DIRECT = getattr(os, "O_DIRECT", 0)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of mallopt


def transformer(width: int, layers: int, words: int, positions: int) -> dict[str, Shape]:
    """Parameter shapes of a model like GPT-2."""
    shapes: dict[str, Shape] = {"wte.weight": (words, width), "wpe.weight": (positions, width)}
    for i in range(layers):
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{i}.{norm}.weight"] = shapes[f"h.{i}.{norm}.bias"] = (width,)
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes[f"h.{i}.{name}.weight"] = (rows, columns)
            shapes[f"h.{i}.{name}.bias"] = (columns,)
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


def adam(quick: bool) -> Arrays:
    """Adam's m and v of a model of 124 million parameters in 148 tensors: 996 MB."""
    shapes = transformer(64, 2, 1000, 64) if quick else transformer(768, 12, 50257, 1024)
    random = np.random.default_rng(1)
    return {
        f"{name}.{part}": random.random(shape, np.float32)
        for name, shape in shapes.items()
        for part in ("m", "v")
    }


def small(quick: bool) -> Arrays:
    """20,000 tensors of 1 to 64 KiB: 668 MB."""
    random = np.random.default_rng(2)
    sizes = random.integers(256, 16384, 200 if quick else 20_000, endpoint=True)
    return {
        f"block.{i // 2}.weight.{'mv'[i % 2]}": random.random(int(size), np.float32)
        for i, size in enumerate(sizes)
    }


STATES = {"A": adam, "B": small}


def bytes_of(arrays: Iterable[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


def keep_memory() -> None:
    """Make malloc keep freed memory and use it for all sizes, so that no call meets new pages."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def touch(arrays: Iterable[np.ndarray]) -> None:
    """Read a byte of every page."""
    for array in arrays:
        array.reshape(-1).view(np.uint8)[::PAGE].max()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_below(path: Path) -> Iterator[Path]:
    return (file for file in sorted(path.rglob("*")) if file.is_file())


def written() -> int:
    """Bytes of this process's write calls."""
    return _passed("wchar")


def read() -> int:
    """Bytes of this process's read calls, without mapped files."""
    return _passed("rchar")


def _passed(field: str) -> int:
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(text.partition(f"{field}:")[2].split()[0])


def clear(folder: Path) -> None:
    """Empty a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def clear_and_wait(folder: Path) -> None:
    """Empty a folder on a disk, and wait until all writes have finished."""
    clear(folder)
    os.sync()


def write_all(fd: int, view: memoryview) -> None:
    """Write with as few system calls as possible."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + MOST], done)


def read_all(fd: int, view: memoryview) -> None:
    """Read with as few system calls as possible."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done : done + MOST]], done)
        if count == 0:
            raise EOFError(f"the file ends {len(view) - done} bytes early")
        done += count


def own_pages(size: int) -> memoryview:
    """Page-aligned memory, in huge pages if NumPy's own would be."""
    if sys.platform != "linux":
        return memoryview(mmap.mmap(-1, size))
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def takes_direct(folder: Path) -> bool:
    """Whether files of a folder support direct I/O."""
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | DIRECT))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return DIRECT != 0


class Raw:
    """The bytes of a state in one block of memory, each array page-aligned.

    The alignment allows O_DIRECT with the same memory; reads go into a second block. Both are
    touched beforehand.
    """

    def __init__(self, state: Arrays) -> None:
        self.pieces: list[tuple[int, int]] = []  # offset, bytes
        end = 0
        for array in state.values():
            self.pieces.append((end, array.nbytes))
            end += -(-array.nbytes // PAGE) * PAGE
        self.source, self.target = own_pages(end), own_pages(end)
        bytes_ = np.frombuffer(self.source, np.uint8)
        for (offset, size), array in zip(self.pieces, state.values(), strict=True):
            bytes_[offset : offset + size] = array.reshape(-1).view(np.uint8)
        np.frombuffer(self.target, np.uint8)[:] = 1

    def copy(self) -> None:
        """Call memcpy once for everything."""
        np.copyto(np.frombuffer(self.target, np.uint8), np.frombuffer(self.source, np.uint8))

    def write_one(self, path: Path, *, durable: bool, direct: bool = False) -> None:
        """Write one file."""
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | (DIRECT if direct else 0), 0o600)
        try:
            write_all(fd, self.source)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)

    def write_each(self, folder: Path, *, direct: bool = False) -> None:
        """Write a file for each array; files and names are durable."""
        folder.mkdir()
        for i, (offset, size) in enumerate(self.pieces):
            fd = os.open(folder / f"{i}", os.O_CREAT | os.O_WRONLY | (DIRECT if direct else 0))
            try:
                end = offset + (-(-size // PAGE) * PAGE if direct else size)
                write_all(fd, self.source[offset:end])
                if direct:
                    os.ftruncate(fd, size)
                os.fsync(fd)
            finally:
                os.close(fd)
        sync(folder)

    def read_one(self, path: Path) -> None:
        """Read one file whole."""
        fd = os.open(path, os.O_RDONLY)
        try:
            read_all(fd, self.target)
        finally:
            os.close(fd)

    def map_one(self, path: Path) -> None:
        """Map the one file and touch it."""
        touch([np.memmap(path, np.uint8, "r")])


def reload_page_cache(path: Path) -> None:
    """Read all files below a folder, or one file, into the page cache from the disk.

    A write leaves large folios in the cache, and a direct write leaves none. Copies from large
    folios are up to twice as fast: this way files that were written in any way are read at the same
    speed.
    """
    for file in files_below(path) if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
        try:
            if sys.platform == "linux":
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    read_through(path)


def read_through(path: Path) -> None:
    """Read all files below a folder, or one file, in steps of a MiB into the same memory."""
    buffer = memoryview(bytearray(1 << 20))
    for file in files_below(path) if path.is_dir() else [path]:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
