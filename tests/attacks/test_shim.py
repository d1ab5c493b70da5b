"""The harness itself: the shim works and sees every call, and lossy writers are detected."""

import errno
import json
import re
import shutil
import signal
import subprocess
import sys

import operations
import preload
import pytest
from amounts import amount

CHILD = """
import ctypes, json, os, sys
from pathlib import Path
shim = ctypes.CDLL(None)
root = Path(sys.argv[1])
with open(root.parent / "outside", "wb") as f:
    shim.mls_shim_arm()
    f.write(b"x"); f.flush()
told = []
def attempt(name, function):
    try:
        told.append([name, function()])
    except OSError as error:
        told.append([name, -error.errno])
fd = -1
def create():
    global fd
    fd = os.open(root / "a", os.O_CREAT | os.O_RDWR)
attempt("create", create)
attempt("write", lambda: os.write(fd, b"12345678"))
attempt("pwrite", lambda: os.pwrite(fd, b"abcdef", 8))
attempt("pwritev", lambda: os.pwritev(fd, [b"gh", b"ij"], 14))
attempt("truncate", lambda: os.ftruncate(fd, 17))
attempt("fsync", lambda: os.fsync(fd))
attempt("close", lambda: os.close(fd))
attempt("closed", lambda: os.fstat(fd) and None)
attempt("mkdir", lambda: os.mkdir(root / "d"))
attempt("rename", lambda: os.rename(root / "a", root / "d" / "b"))
attempt("unlink", lambda: os.unlink(root / "d" / ".." / "d" / "b"))
attempt("rmdir", lambda: os.rmdir(root / "d"))
shim.mls_shim_disarm()
counts = {c: shim.mls_shim_count(c.encode()) for c in sys.argv[2].split()}
print(json.dumps([told, counts]))
"""
CALLS = "create write pwrite truncate fsync close mkdir rename unlink rmdir change"


def run_child(shim, tmp_path, fault="", trace=()):
    root = tmp_path / "root"
    root.mkdir()
    return subprocess.run(
        [*trace, sys.executable, "-c", CHILD, str(root), CALLS],
        env=preload.environment(shim, MLS_FAULT_ROOT=str(root), MLS_FAULT=fault),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_calls_are_counted_below_the_root_and_after_arming_only(shim, tmp_path):
    done = run_child(shim, tmp_path)
    assert done.returncode == 0, done.stderr
    calls, counts = json.loads(done.stdout)
    calls = dict(calls)
    assert calls.pop("closed") == -errno.EBADF
    assert calls.pop("write") == 8 and calls.pop("pwrite") == 6 and calls.pop("pwritev") == 4
    assert set(calls.values()) == {None}
    assert counts == {
        "create": 1, "write": 1, "pwrite": 2, "truncate": 1, "fsync": 1, "close": 1, "mkdir": 1,
        "rename": 1, "unlink": 1, "rmdir": 1, "change": 11,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "changed"),
    [
        ("write:1:ENOSPC", {"write": -errno.ENOSPC}),
        ("write:1:short", {"write": 4}),
        ("pwrite:2:EIO", {"pwritev": -errno.EIO}),
        ("pwrite:1+:EDQUOT", {"pwrite": -errno.EDQUOT, "pwritev": -errno.EDQUOT}),
        ("pwrite:2:short", {"pwritev": 2}),
        ("close:1:EIO", {"close": -errno.EIO, "closed": -errno.EBADF}),
        ("rename:1:EACCES", {"rename": -errno.EACCES, "unlink": -errno.ENOENT}),
        ("rename:1:after-EIO", {"rename": -errno.EIO}),
        ("rename:2:EIO", {}),
    ],
)
def test_fault_affects_only_the_selected_call(shim, tmp_path, fault, changed):
    done = run_child(shim, tmp_path, fault)
    assert done.returncode == 0, done.stderr
    calls = dict(json.loads(done.stdout)[0])
    usual = dict.fromkeys(calls) | {
        "write": 8, "pwrite": 6, "pwritev": 4, "closed": -errno.EBADF,
    }  # fmt: skip
    assert calls == usual | changed


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ("pwrite:1:kill-before", b"12345678"),
        ("pwrite:1:kill-half", b"12345678abc"),
        ("pwrite:1:kill-after", b"12345678abcdef"),
        ("change:4:kill-half", b"12345678abcdefgh"),
    ],
)
def test_a_kill_comes_before_in_or_after_the_call(shim, tmp_path, fault, left):
    assert run_child(shim, tmp_path, fault).returncode == -signal.SIGKILL
    assert (tmp_path / "root" / "a").read_bytes() == left


@pytest.mark.parametrize(
    "fault", ["nonsense", "write:0:EIO", "write:x:EIO", "sing:1:EIO", "write:1:EWHAT"]
)
def test_invalid_setting_ends_the_process(shim, tmp_path, fault):
    done = run_child(shim, tmp_path, fault)
    assert done.returncode < 0 and "shim: " in done.stderr


# The system calls that may change files; the shim must see each of them.
CHANGES = (
    "open,openat,openat2,creat,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,"
    "truncate,ftruncate,fallocate,fsync,fdatasync,syncfs,sync,rename,renameat,renameat2,unlink,"
    "unlinkat,mkdir,mkdirat,rmdir,link,linkat,symlink,symlinkat,fchmod,fchown,io_uring_setup,mmap"
)


def changes_traced(trace, root):
    """The number of calls in strace's output that changed a file below `root`."""
    count = 0
    for line in trace.read_text(encoding="utf-8", errors="replace").splitlines():
        call, _, rest = line.split(None, 1)[1].partition("(")
        if str(root) not in rest:
            continue
        writes = re.search(r"O_WRONLY|O_RDWR|O_CREAT", rest)
        if call.startswith("open"):
            count += writes is not None
        else:
            assert call != "mmap" or "MAP_SHARED" not in rest or "PROT_WRITE" not in rest, line
            count += call != "mmap"
    return count


CHANGING = [
    each.name
    for each in operations.ALL
    if each.forks and each.ranks == 1 and not (each.reads or each.in_memory or each.seeded)
]


@pytest.mark.parametrize(
    "operation", amount(["checkpoint", "async-manager", "tiers"], CHANGING, CHANGING)
)
def test_shim_counts_every_file_change(shim, tmp_path, operation):
    """The kernel's trace of a call equals the counts of the shim."""
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-qq", "true"], capture_output=True).returncode:
        pytest.skip("strace is not installed, or may not trace here")
    root, log = tmp_path / "root", tmp_path / "trace"
    root.mkdir()
    prepared = operations.find(operation)
    prepared.make_states()
    prepared.renew()
    prepared.prepare(root)
    code = (
        "import ctypes, os, sys, operations; from pathlib import Path\n"
        "root, operation = Path(sys.argv[2]), operations.find(sys.argv[1])\n"
        "operation.make_states(); operation.renew()\n"
        "shim = ctypes.CDLL(None); shim.mls_shim_arm(); operation.call(root)\n"
        "shim.mls_shim_disarm()\n"
        "print(shim.mls_shim_count(b'change') - shim.mls_shim_count(b'close'))\n"
        "sys.stdout.flush(); os._exit(0)"
    )
    done = subprocess.run(
        [strace, "-f", "-y", "-qq", "-s", "0", "-o", str(log), "-e", f"trace={CHANGES}",
         sys.executable, "-c", code, operation, str(root)],
        env=preload.environment(shim, MLS_FAULT_ROOT=str(root)),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == changes_traced(log, root) > 0


# ---- writers that lose data ----


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("write:1:EIO", "cannot load"),
        ("write:1:EIO", "said nothing"),
        ("write:1:kill-half", "cannot load"),
        ("write:1:kill-before", "cannot load"),
        ("create:2:ENOSPC", "said nothing"),
        ("create:2:ENOSPC", "has the old content, not new"),
        ("unlink:1:EIO", "after the next call there is still ['old-B']"),
        ("rename:1:EIO", "raised OSError"),
        ("fsync:1:EIO", "raised with errno 28 instead of 5"),
    ],
)
def test_a_careless_writer_is_found_out(attack, shim, fault, complaint):
    complaints = attack("careless", "fault", fault, library=shim)
    assert any(complaint in text for text in complaints), complaints
