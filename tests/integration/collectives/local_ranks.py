"""The ranks of test_local_processes.py: functions that LocalGroup.run can pickle.

`python local_ranks.py` joins the group that a launcher describes; `python local_ranks.py wait
FOLDER` runs ranks that wait for Ctrl-C.
"""

import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
from group_model import inputs, raises, reduced, same_bits

from mlstate import CollectiveError
from mlstate.collectives import LocalGroup

LONG = 60.0  # seconds, more than any test waits
LARGE = 3_000_001  # float32 elements: more than the shared memory


# ---- success ----


def every_operation(group, scale=1):
    """One call of each operation, compared with NumPy."""
    world, rank = group.world_size, group.rank
    everyones = [array * np.float32(scale) for array in inputs(world, 10_000 * world, "float32")]
    contribution, total = everyones[rank], reduced(everyones, "sum")
    same_bits(group.all_reduce(contribution), total)
    output = group.reduce_scatter(contribution)
    same_bits(output, total[rank * 10_000 : (rank + 1) * 10_000])
    same_bits(group.all_gather(output), total)
    rows = np.arange(2 * world) + 100 * rank
    expected = [100 * r + 2 * rank + i for r in range(world) for i in (0, 1)]
    assert group.all_to_all(rows).tolist() == expected
    copy = everyones[world - 1].copy() if rank == world - 1 else np.zeros_like(contribution)
    same_bits(group.broadcast(copy, root=world - 1), everyones[world - 1])
    texts = [b"%d" % r * 1000 * r for r in range(world)]
    assert group.gather_bytes(texts[rank]) == texts
    assert group.all_reduce(contribution, async_op=True).wait(LONG).tobytes() == total.tobytes()
    group.barrier()
    return rank, os.getpid()


def arrays_larger_than_the_memory_that_is_shared(group):
    everyones = inputs(group.world_size, LARGE, "float32")
    total = reduced(everyones, "sum")
    contribution = everyones[group.rank]
    same_bits(group.all_reduce(contribution), total)
    counts = [LARGE] + [0] * (group.world_size - 1)
    output = group.reduce_scatter(contribution, counts=counts)
    same_bits(output, total if group.rank == 0 else total[:0])
    gathered = group.all_gather(contribution)
    same_bits(gathered, np.concatenate(everyones))
    texts = [array.tobytes() for array in everyones]
    assert group.gather_bytes(texts[group.rank]) == texts
    return output


def nested_runs(group):
    """Each rank starts another group, and continues."""
    inner = LocalGroup.run(every_operation, 2, start_method="fork", timeout=LONG)
    assert [rank for rank, _ in inner] == [0, 1]
    assert os.getpid() not in [process for _, process in inner]
    return every_operation(group)[0]


def forked_children_are_refused(group):
    """A forked child is refused; neither its exit nor its exec changes anything."""
    for leave in (os._exit, sys.exit):
        group.barrier()
        process = os.fork()
        if process == 0:
            try:
                raises(CollectiveError, "was forked from the one that joined", group.barrier)
                raises(CollectiveError, "was forked", group.all_reduce, np.zeros(2), async_op=True)
                group.abort()
                group.close()
            except BaseException as error:
                print(error, file=sys.stderr)
                os._exit(1)
            if leave is os._exit:
                os._exit(0)
            os.execv("/bin/true", ["true"]) if Path("/bin/true").exists() else os._exit(0)
        assert os.waitpid(process, 0)[1] == 0
        every_operation(group)


# ---- failures ----


class OddError(Exception):
    """Cannot be unpickled: it takes two arguments and stores one."""

    def __init__(self, first, second):
        super().__init__(first)


def fail(group, who, kind):
    """One rank fails, the others wait for it."""
    if group.rank != who:
        group.barrier(timeout=LONG)
        return None
    if kind == "odd":
        raise OddError("of the user", 2)
    if kind == "module":
        module = sys.modules["of_one_rank"] = types.ModuleType("of_one_rank")
        module.OwnError = type("OwnError", (Exception,), {"__module__": "of_one_rank"})
        raise module.OwnError("of the user")
    if kind == "exit":
        sys.exit(3)
    if kind == "end":
        os._exit(3)
    if kind == "result":
        return threading.Lock()
    raise KeyError("of the user")


def note(folder, group, text):
    """Leave a text for the test, atomically."""
    path = Path(folder) / f"rank{group.rank}"
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def survive(group, folder, call):
    """Report what a call raised and after how long, and check that the group is unusable."""
    began = time.monotonic()
    try:
        call()
    except CollectiveError as error:
        took = time.monotonic() - began
        again = raises(CollectiveError, "is unusable", group.gather_bytes, b"")
        text = f"{took:.3f}\n{error}\n{again}\n{group!r}"
        note(folder, group, text)
        return text
    note(folder, group, "0\nnothing was raised")
    return None


OPERATIONS = {
    "reduce_scatter": lambda group: group.reduce_scatter(np.ones(12 << 18), timeout=LONG),
    "all_gather": lambda group: group.all_gather(np.ones(12 << 18), timeout=LONG),
    "all_reduce": lambda group: group.all_reduce(np.ones(12 << 18), timeout=LONG),
    "all_to_all": lambda group: group.all_to_all(np.ones(12 << 18), timeout=LONG),
    "broadcast": lambda group: group.broadcast(np.ones(12 << 18), root=1, timeout=LONG),
    "barrier": lambda group: group.barrier(timeout=LONG),
    "gather_bytes": lambda group: group.gather_bytes(bytes(12 << 20), timeout=LONG),
}


def be_killed_in(group, folder, name, who=1):
    """One rank is killed while it takes part in operations in a loop."""
    pids = [int(text) for text in group.gather_bytes(b"%d" % os.getpid())]
    if group.rank == who:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        note(folder, group, str(pids[who]))

    def call():
        while True:
            OPERATIONS[name](group)

    return survive(group, folder, call)


def be_killed_while_waiting(group, folder):
    """The last rank kills one that waits for it, and only then makes the call."""
    pids = [int(text) for text in group.gather_bytes(b"%d" % os.getpid())]
    last = group.world_size - 1
    if group.rank == last:
        os.kill(pids[1], signal.SIGKILL)

    def call():
        for _ in range(3):  # the rank may have sent all that the first operation needs
            group.all_reduce(np.ones(9), timeout=LONG)

    return survive(group, folder, call)


def be_stopped(group, folder):
    """One rank is stopped (SIGSTOP); the others do not wait for ever."""
    pids = [int(text) for text in group.gather_bytes(b"%d" % os.getpid())]
    if group.rank == 1:
        for _ in range(2):  # it may have taken part in the first before it stopped
            group.all_reduce(np.ones(9), timeout=LONG)
        return
    if group.rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
    while Path(f"/proc/{pids[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)

    def call():
        for _ in range(3):  # the rank may have taken part in the first before it stopped
            group.all_reduce(np.ones(9), timeout=2.0)

    survive(group, folder, call)
    if group.rank == 0:
        os.kill(pids[1], signal.SIGCONT)


def be_interrupted(group, folder):
    """One rank is interrupted (Ctrl-C) while it waits for the last one."""
    pids = [int(text) for text in group.gather_bytes(b"%d" % os.getpid())]

    def call():
        group.all_gather(np.ones(1), timeout=LONG)

    if group.rank == group.world_size - 1:
        time.sleep(0.1)  # probably long enough for it to wait; other moments make no difference
        os.kill(pids[0], signal.SIGINT)
        end = time.monotonic() + LONG
        while "interrupted" not in repr(group) and time.monotonic() < end:
            time.sleep(0.01)
    if group.rank:
        survive(group, folder, call)
        return
    try:
        call()
    except KeyboardInterrupt:
        note(folder, group, f"0\nKeyboardInterrupt\n{group!r}")


def wait_for_ever(group, folder):
    if group.rank == 0:
        group.gather_bytes(b"")
        note(folder, group, "here")
        threading.Event().wait(LONG)
    group.gather_bytes(b"")
    group.barrier(timeout=LONG)


def main():
    if sys.argv[1:2] == ["wait"]:
        try:
            LocalGroup.run(wait_for_ever, 3, sys.argv[2], start_method=sys.argv[3])
        except KeyboardInterrupt:
            sys.exit(130)
        sys.exit("nobody pressed a key")
    with LocalGroup.from_env(timeout=LONG) as group:
        every_operation(group)
        # one write, so that lines of several ranks do not mix
        os.write(1, b"%d of %d ok\n" % (group.rank, group.world_size))


if __name__ == "__main__":
    main()
