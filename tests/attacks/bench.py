"""Make an operation's call under a fault, in forked processes, and judge the folder."""

import errno
import os
import re
import shutil
import signal
import warnings
from functools import partial
from pathlib import Path

from children import SHIM, arm, start_child, wait_for
from injected_errors import Injected
from operation import describe

KILLED = -signal.SIGKILL
# CPython 3.11 loses the MemoryError if an exception passes through a generator without memory
LOST_ERROR = re.compile(
    "error return without exception set$|<function .*__enter__ at .* NULL"
    "|expected str, bytes or os.PathLike object, not PosixPath$"  # of os.fspath
)
# CPython's messages for files and locks without memory
NO_MEMORY = re.compile("can't allocate (read )?lock")


def counted_calls():
    """Names of the calls that the shim counts, read from its header."""
    text = (Path(__file__).parent / "shim.h").read_text(encoding="utf-8")
    return [line.split("(")[1].split(",")[0] for line in text.split("\n") if "    X(" in line]


CALLS = [*counted_calls(), "change", "memory", "thread"]


class End:
    """How a process of an operation ended."""

    def __init__(self, notes, status):
        self.notes, self.status = notes, status
        values_by_name = {name: values for name, *values in notes}
        self.returned = "returned" in values_by_name
        self.result = values_by_name.get("returned", [None])[0]
        self.counts, self.hits, self.warned = values_by_name.get("end", ({}, 0, []))
        self.raised = [values for name, *values in notes if name == "raised"]

    def __repr__(self):
        return f"{self.status} {self.notes}"


class Bench:
    """An operation, and the folder in which it is attacked."""

    def __init__(self, operation, top, seed=0):
        self.operation, self.seed = operation, seed
        operation.seed = seed
        self.root, self.prepared = top / "root", top / "prepared"
        self.meeting, self.counted = top / "meeting", {}
        operation.renew()
        self.root.mkdir(parents=True)
        if operation.prepare_ranks > 1:
            ends = self.run("prepare", operation.prepare_ranks)
            assert all(end.returned for end in ends), ends
        else:
            operation.prepare(self.root)
        shutil.copytree(self.root, self.prepared, symlinks=True)

    def restore(self, start="old"):
        """Fill the folder with its old content, or leave it empty."""
        shutil.rmtree(self.root)
        if start == "old":
            shutil.copytree(self.prepared, self.root, symlinks=True)
        else:
            self.root.mkdir()

    # ---- calls ----

    def run(self, method, ranks, fault="", rank=0, log=""):
        """Call a method of the operation in each rank's process, with a fault in one of them."""
        self.meeting.unlink(missing_ok=True)
        acts = [
            partial(self.act, method, number, ranks, fault if number == rank else "", log)
            for number in range(ranks)
        ]
        children = [start_child(act, log) for act in acts]
        return [End(*wait_for(*child, 60)) for child in children]

    def act(self, method, rank, ranks, fault, log, report):
        """Call a method of the operation under a fault, and report how it ended."""
        operation, result = self.operation, None
        operation.note, os.environ["MLS_FAULT_HINT"] = report, operation.hint
        if ranks > 1:
            operation.enter(rank, ranks, str(self.meeting))
        operation.renew()
        call, _, number = fault.rpartition(":")[0].partition(":")
        if call == "python":  # one of Python's own allocations fails
            import _testcapi
        make_call = partial(getattr(operation, method), self.root)
        if call in ("line", "part"):
            files = operation.part if call == "part" else ".py"
            make_call = partial(Injected(int(number), KeyboardInterrupt, files), make_call)
        if call in ("python", "line", "part"):
            fault = ""
        arm(self.root, fault, log)
        try:
            with warnings.catch_warnings(record=True) as warned:
                if call == "python":
                    # CPython 3.11 crashes without memory for a pair of `dict.items`: keep some
                    list(zip(range(200), range(200), strict=True))
                    _testcapi.set_nomemory(int(number), int(number) + 1)
                try:
                    result = make_call()
                finally:
                    if call == "python":
                        _testcapi.remove_mem_hooks()
            report("returned", result if method == "call_again" else None)
        except BaseException as error:
            report("raised", *describe(error))
            error.__traceback__ = None
        SHIM.mls_shim_disarm()
        counts = {name: SHIM.mls_shim_count(name.encode()) for name in CALLS}
        report("end", counts, SHIM.mls_shim_hits(), [str(each.message) for each in warned])
        if result is not None and method == "call":
            operation.compare(result)
        if operation.in_memory and method == "call":
            operation.outcome(self.root)
            operation.call_again(self.root)

    def counts(self, start="old"):
        """How often an undisturbed call makes each call of the system: a dict for each rank."""
        if start not in self.counted:
            self.restore(start)
            ends = self.run("call", self.operation.ranks)
            assert all(end.returned and end.status == 0 for end in ends), ends
            self.counted[start] = [end.counts for end in ends]
        return self.counted[start]

    def try_fault(self, fault, rank=0, start="old"):
        """Make the call with one fault; return complaints."""
        operation = self.operation
        self.restore(start)
        ends = self.run("call", operation.ranks, fault, rank)
        complaints = judge_ends(operation, ends, fault, rank)
        killed = any(end.status == KILLED for end in ends)
        may_leave = killed or fault.partition(":")[0] in operation.leaves
        notes = [note for end in ends for note in end.notes]
        if operation.may_go_on and ends[rank].hits:
            notes = [note for note in notes if note[0] != "returned"]
        if not operation.in_memory:
            complaints += self.judge(notes, start, may_leave)
        where = fault + (f" in rank {rank}" if len(ends) > 1 else "")
        where += " over nothing" if start == "nothing" else ""
        return [f"{where}: {text}" for text in complaints]

    # ---- judges ----

    def judge(self, notes, start="old", may_leave=True, goes_on=True):
        """Complaints of a new process about the folder, and about the next call in it."""
        returned = ["returned", None] in notes
        is_new = returned and (self.operation.is_durable or not self.operation.after_power)
        allowed = {"new"} if is_new else {start, "new"}
        self.operation.notes = notes
        return self.complaints_of(partial(self.judge_folder, allowed, start, may_leave, goes_on))

    def complaints_of(self, act):
        """Call `act(report)` in a new process; return the complaints that it reports."""
        reports, status = wait_for(*start_child(act), 60)
        complaints = [text for name, *texts in reports if name == "complaint" for text in texts]
        return complaints + ([] if status == 0 else [f"the judge ended with {status}: {reports}"])

    def judge_folder(self, allowed, start, may_leave, goes_on, report):
        """Report complaints; runs in a new process."""
        operation = self.operation
        operation.renew()
        try:
            is_new = self.expect(allowed) not in ("old", "nothing")
            # after the commit, an error may leave files
            if not may_leave and not (is_new and operation.folder):
                assert not operation.left(self.root, False), "left files"
            if not goes_on:
                return
            for end in self.run("call_again", operation.ranks):
                assert end.returned and end.status == 0, f"the next call: {end}"
                operation.notes = [*operation.notes, *end.notes]
            self.expect({end.result})
            left = operation.left(self.root, may_leave)
            assert not left, f"after the next call there is still {left}"
        except AssertionError as error:
            report("complaint", str(error))

    def expect(self, allowed):
        """Return the outcome; raise AssertionError unless it is an allowed one."""
        try:
            outcome = self.operation.outcome(self.root)
        except FileNotFoundError as error:
            outcome = "nothing"
            assert outcome in allowed, f"cannot load: {error}"
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"cannot load: {type(error).__name__}: {error}") from error
        assert outcome in allowed, f"has the {outcome} content, not {' or '.join(sorted(allowed))}"
        return outcome


def judge_ends(operation, ends, fault, rank):
    """Complaints about how the processes ended.

    A call that fails once may not return, because it could not keep its promise.
    """
    complaints = []
    call, turn, how = fault.split(":")
    for number, end in enumerate(ends):
        if end.status == KILLED and number == rank and how.startswith("kill"):
            continue
        if end.status != 0:
            complaints.append(f"rank {number} ended with {end}")
        for raised in end.raised:
            complaints += judge_exception(operation, raised, number == rank, call, how)
    end = ends[rank]
    harmless = {"memory", "python", *operation.harmless}
    may_go_on = how == "EINTR" or not harmless.isdisjoint((call, f"{call}:{how}", f"{call}:{turn}"))
    may_go_on = may_go_on or end.warned or end.raised or operation.may_go_on
    if how.startswith("kill"):
        if end.status != KILLED and end.hits:
            complaints.append("was not killed")
    elif how == "short" or call == "thread":
        if not end.returned:
            complaints.append(f"gave up: {end}")
    elif end.returned and end.hits and not may_go_on:
        complaints.append("said nothing")
    if operation.reads and end.counts.get("change", 0) > 0:
        complaints.append("changed a file")
    return complaints


def judge_exception(operation, raised, is_own, call, how):
    """An exception must be the right one: a StoreError with the system's error number."""
    names, number, text = raised
    if names[0] in (how, *operation.errors):  # an interrupt, or an allowed one
        return []
    if call in ("memory", "python") and is_own:
        is_lost = call == "python" and LOST_ERROR.match(text)
        good = "MemoryError" in names or NO_MEMORY.match(text) or is_lost
        return [] if good else [f"raised {names[0]}: {text}"]
    if not is_own:
        good = {"CollectiveError", "StoreError"}.intersection(names)
        return [] if good else [f"another rank raised {names[0]}: {text}"]
    if (names[0], how) in (("MemoryError", "ENOMEM"), ("FormatError", "short")):
        return []
    if "StoreError" not in names or "OSError" not in names:
        return [f"raised {names[0]}: {text}"]
    expected = getattr(errno, "EIO" if how == "short" else how.removeprefix("after-"), None)
    if number not in (expected, *operation.errors):
        return [f"raised with errno {number} instead of {expected}: {text}"]
    return []
