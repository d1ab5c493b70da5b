"""The process under attack: prepares one operation, then disturbs its call in forked processes.

    LD_PRELOAD=shim.so python attack.py OPERATION FOLDER

A request is one line of JSON on standard input: the name of an attack, and its arguments. The
answer is the number of points tried, and complaints. Modules are imported once, so a point costs
milliseconds.
"""

import importlib.util
import json
import os
import random
import shutil
import socket  # the lock names this machine; CPython cannot compile it without memory  # noqa: F401
import sys
from functools import partial
from pathlib import Path

import operations
import replay
from amounts import SEED, amount, choose, spread
from bench import Bench
from children import start_child, wait_for
from injected_errors import Injected

import mlstate

# Errors to fail each call with.
ERRORS = {
    "open": ["EIO", "EMFILE", "EACCES", "EINTR"],
    "open_folder": ["EIO", "EMFILE", "EACCES"],
    "create": ["ENOSPC", "EIO", "EMFILE", "EROFS", "EINTR"],
    "close": ["EIO", "ENOSPC", "EDQUOT", "EINTR"],
    "close_read": ["EIO"],
    "read": ["EIO", "EINTR", "short"],
    "pread": ["EIO", "EINTR", "short"],
    "write": ["ENOSPC", "EIO", "EINTR", "short"],
    "pwrite": ["ENOSPC", "EIO", "EDQUOT", "EINTR", "short", "after-EIO"],
    "copy": ["ENOSPC", "EIO", "EINTR", "short"],
    "truncate": ["EIO", "ENOSPC", "EINTR"],
    "allocate": ["ENOSPC", "EIO", "EINTR"],
    "fsync": ["EIO", "ENOSPC", "EINTR"],
    "fsync_folder": ["EIO", "ENOSPC", "EINTR"],
    "fdatasync": ["EIO", "ENOSPC", "EINTR"],
    "syncfs": ["EIO", "ENOSPC"],
    "sync_file_range": ["EIO", "ENOSPC", "ENOSYS"],
    "rename": ["EIO", "EACCES", "ENOSPC", "after-EIO"],
    "unlink": ["EIO", "EACCES"],
    "mkdir": ["ENOSPC", "EIO"],
    "rmdir": ["EIO"],
    "link": ["ENOSPC", "EIO"],
    "symlink": ["ENOSPC", "EIO"],
    "mode": ["EIO", "EROFS"],
    "mmap": ["ENOMEM", "EACCES"],
    "stat": ["EIO", "EACCES", "ENOMEM"],
    "list": ["EIO", "ENOMEM"],
    "flock": ["EIO", "ENOLCK", "EINTR"],
    "unlock": ["EIO"],
    "fcntl": ["EINVAL", "EIO", "EINTR"],
}
ONWARD = [("pwrite", "ENOSPC"), ("write", "ENOSPC"), ("create", "ENOSPC"), ("change", "EIO"),
          ("mmap", "ENOMEM")]  # fmt: skip
ALLOCATORS = ("mlstate/_core.", "_multiarray_umath.")
KILLS = ["kill-before", "kill-after", "kill-half"]


def try_points(bench, groups, most):
    """Try (fault, rank, start) in lists, at most some of them; return their number, complaints."""
    if bench.operation.seeded:
        most = bench.operation.points_of_seed
    points = choose(groups, most, (bench.operation.name, bench.seed))
    return len(points), [text for point in points for text in bench.try_fault(*point)]


def faults(bench):
    """One call fails, or all calls from one on, or the process is killed at a change of a file."""
    groups = []
    for start in bench.operation.starts:
        for rank, counts in enumerate(bench.counts(start)):
            kinds = [("change", KILLS, "")]
            if start == "old":
                kinds += [(call, errors, "") for call, errors in ERRORS.items()]
                kinds += [(call, [error], "+") for call, error in ONWARD]
            groups += [
                [(f"{call}:{n}{onward}:{how}", rank, start)
                 for n in range(1, counts[call] + 1) for how in errors]
                for call, errors, onward in kinds
            ]  # fmt: skip
    is_short = bench.operation.is_heavy or bench.operation.reads
    return try_points(bench, groups, amount(3 if is_short else 8, 50 if is_short else 150))


def memory(bench):
    """An allocation of the library, of NumPy or of Python fails, or the start of a thread."""
    is_heavy = bench.operation.is_heavy
    tried, complaints = (0, []) if is_heavy or bench.operation.ranks > 1 else python(bench)
    for allocator in ALLOCATORS:
        os.environ["MLS_ALLOC_OBJECT"] = allocator
        bench.counted.clear()
        groups = [
            [(f"{call}:{n}:{how}", rank, "old") for n in range(1, counts[call] + 1)]
            for rank, counts in enumerate(bench.counts())
            for call, how in (("memory", "ENOMEM"), ("thread", "EAGAIN"))
        ]
        done, texts = try_points(bench, groups, amount(2 if is_heavy else 3, 20))
        tried += done
        complaints += [f"{allocator} {text}" for text in texts]
    return tried, complaints


def python(bench):
    """One of Python's own allocations fails."""
    if importlib.util.find_spec("_testcapi") is None:
        return 0, []
    numbers = amount((0, 7, 30), range(0, 200, 20), range(400))
    if bench.operation.seeded:
        numbers = range(3000)
    return try_points(bench, [[(f"python:{n}:ENOMEM", 0, "old") for n in numbers]], None)


def lines(bench):
    """Ctrl-C at a line of mlstate; interrupts.py also counts the resources."""
    groups = []
    for call, files in (("line", ".py"), ("part", bench.operation.part)):
        bench.restore()

        def count(report, files=files):
            injected = Injected(0, KeyboardInterrupt, files)
            injected(partial(bench.operation.call, bench.root))
            report(injected.count)

        ((number,),), _ = wait_for(*start_child(count))
        groups.append([(f"{call}:{n}:KeyboardInterrupt", 0, "old") for n in range(1, number + 1)])
    return try_points(bench, groups, amount(8, 100))


def fault(bench, text):
    """One given fault."""
    return 1, bench.try_fault(text)


def power(bench):
    """The power fails after some changes of files; each point leaves several states of the disk."""
    tried, complaints = 0, []
    for start in bench.operation.starts:
        done, texts = power_failures(bench, start)
        tried, complaints = tried + done, complaints + texts
    return tried, complaints


def power_failures(bench, start):
    """Record a call, and judge the states that a power failure could leave."""
    bench.operation.after_power = True
    few = 1 if bench.operation.is_heavy else 3
    bench.restore(start)
    disk, log = replay.Disk(bench.root), bench.root.parent / "recorded"
    ends = bench.run("call", bench.operation.ranks, log=log)
    assert all(end.returned for end in ends), ends
    entries = replay.parse(log.read_bytes())
    content = replay.content_of(bench.root)
    log.unlink()
    chance, notes, complaints, seen = random.Random(f"{SEED} {bench.seed}"), [], [], set()
    if bench.operation.seeded:
        chosen = set(chance.sample(range(1, len(entries) + 1), min(5, len(entries))))
    else:
        chosen = set(spread(len(entries), amount(few, 3 * few)))
        telling = [number for number, entry in enumerate(entries, 1) if entry.kind in "RDSN"]
        chosen.update(telling[n - 1] for n in spread(len(telling), amount(3 * few, 5 * few)))
        chosen.add(len(entries))
    for number, entry in enumerate(entries, 1):
        disk.apply(entry)
        if entry.kind == "N":
            notes.append(json.loads(entry.name))
        for state in replay.states(disk, chance, amount(1, 2, 20)) if number in chosen else ():
            key = (replay.digest(state), len(notes))
            if key in seen:
                continue
            seen.add(key)
            shutil.rmtree(bench.root)
            bench.root.mkdir()
            replay.materialise(state, bench.root)
            texts = bench.judge(notes, start, goes_on=len(seen) % amount(10, 5, 2) == 0)
            complaints += [f"after entry {number} ({entry}): {text}" for text in texts]
    if replay.tree(disk, chance, "all", "all") != content:
        complaints.append("the recording lacks changes")
    return len(seen), complaints


ATTACKS = {each.__name__: each for each in (faults, memory, python, lines, fault, power)}


def attack(operation, top, name, *arguments):
    """Attack an operation; return the number of points tried, and complaints."""
    function = {**ATTACKS, **operation.own_attacks}[name]
    if not operation.seeded:
        return function(Bench(operation, top / name), *arguments)
    tried, complaints, seed = 0, [], 0
    while tried < amount(*operation.seeded[name]) and len(complaints) <= 50:
        seed += 1
        done, texts = function(Bench(operation, top / str(seed), seed), *arguments)
        shutil.rmtree(top / str(seed))
        tried += done
        complaints += [f"seed {seed}, {text}" for text in texts]
    return tried, complaints


def main():
    """Prepare an operation, and answer requests."""
    operation = operations.find(sys.argv[1])
    for name in mlstate.__all__:  # CPython cannot compile without memory
        getattr(mlstate, name)
    operation.make_states()
    for line in sys.stdin:
        result = attack(operation, Path(sys.argv[2]), *json.loads(line))
        print("tried", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
