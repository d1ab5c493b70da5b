"""Run scenarios under faults and judge the result.

MLSTATE_FAULTS sets the amount: "few" (the default, for the ordinary test run: each scenario and
each kind of fault, but not each pair of them), "slice" (some minutes in all) or "all" (every call
of every kind).
"""

import collections
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import scenarios

HERE = Path(__file__).resolve().parent
AMOUNT = os.environ.get("MLSTATE_FAULTS", "few")
WARNINGS = (
    "-Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wcast-qual -Wvla -Wundef -Werror"
)
KILLED = -signal.SIGKILL
TRIED = collections.Counter()  # by kind; printed after the tests
# Errors to fail each call with. The ordinary test run tries the first.
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
# CPython 3.11 loses the MemoryError if an exception passes through a generator without memory
LOST_ERROR = re.compile("error return without exception set$|<function .*__enter__ at .* NULL")


def amount(few, some, every=None):
    """The amount for MLSTATE_FAULTS; None means all."""
    return {"few": few, "slice": some, "all": every}[AMOUNT]


def spread(count, most):
    """Numbers from 1 to `count`, at most `most` of them, including the first and the last."""
    if most is None or count <= most:
        return list(range(1, count + 1))
    if most == 1:
        return [1]
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)})


def turns(scenario, count, each):
    """Which of a test's `count` cases this scenario tries; all unless MLSTATE_FAULTS is "few".

    For "few" it is `each` of them, starting after those of the previous scenario.
    """
    if AMOUNT != "few":
        return set(range(count))
    return {(scenario * each + number) % count for number in range(min(each, count))}


def unsupported():
    """Why libraries cannot be preloaded on this machine, or None."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return "the shim is for 64-bit Linux"
    if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or ""):
        return "the shim is for glibc"
    if os.environ.get("MLSTATE_UNDER_SANITIZER"):
        return "sanitizers preload a library of their own"
    if shutil.which(os.environ.get("CC", "cc")) is None:
        return "no C compiler"
    return None


def build(folder, name, *sources):
    """Compile sources of this folder into `folder`/`name`.so."""
    library = folder / f"{name}.so"
    command = [
        os.environ.get("CC", "cc"), "-std=c11", "-O1", "-g", "-fPIC", "-shared",
        "-fvisibility=hidden", "-D_GNU_SOURCE", *WARNINGS.split(),
        *(str(HERE / source) for source in sources), "-o", str(library), "-ldl", "-lpthread",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def environment(library, **more):
    """The environment of a child: the same modules, the preloaded library, no threads of NumPy."""
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "LD_PRELOAD": str(library), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **more,
    }  # fmt: skip


class Server:
    """A process that has prepared one scenario and forks a child for each fault."""

    def __init__(self, library, scenario, errors):
        self.scenario = scenario
        self.errors = errors
        with errors.open("ab") as log:
            program = str(HERE / "fault_server.py")
            self.process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", program, scenario.name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env=environment(library),
            )  # fmt: skip
        self.expect("ready")

    def expect(self, word):
        line = self.process.stdout.readline()
        if word not in line:
            raise RuntimeError(f"the server ended: {self.errors.read_text()[-2000:]}")
        return line

    def run(self, root, which, *, fault=None, rank=0, log=None, seconds=60, mmap=False, **settings):
        """Save `which` into `root`, or load if that is None, with a fault in one rank.

        Return how each rank ended.
        """
        common = {"MLS_FAULT_ROOT": str(root), "MLS_FAULT_SYNC": "no", "MLS_FAULT": ""}
        common["MLS_FAULT_HINT"] = "lock"
        common |= {"MLS_FAULT_LOG": str(log or ""), **settings}
        settings = [dict(common) for _ in range(self.scenario.ranks)]
        settings[rank]["MLS_FAULT"] = fault or ""
        meeting = root.parent / f"meeting-{root.name}"
        request = {"root": str(root), "which": which, "settings": settings, "seconds": seconds,
                   "meeting": str(meeting), "mmap": mmap}  # fmt: skip
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ends = json.loads(self.expect("exit"))
        meeting.unlink(missing_ok=True)
        broken = [end["told"]["broken"] for end in ends if "broken" in end["told"]]
        assert not broken, broken
        return ends

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


class Bench:
    """A scenario's server, and copies of a folder that holds state A."""

    def __init__(self, library, scenario, folder, **settings):
        self.scenario = scenario
        self.settings = settings
        self.counted = {}
        scenario.prepare()
        self.folder = folder
        self.server = Server(library, scenario, folder / "errors.txt")
        self.template = folder / "template"
        self.template.mkdir()
        ends = self.clean(self.template, "A")
        assert all(end["told"].get("returned") for end in ends), ends
        self.used = 0

    def clean(self, root, which):
        return self.server.run(root, which, **self.settings)

    def most(self, few, some):
        """The number of points to try: fewer for heavy scenarios, unless all are requested."""
        if self.scenario.heavy:
            few, some = min(few, 1), max(1, some // 3)
        return amount(few, some)

    def fresh(self, start="A"):
        """A new folder with A in it, or an empty one ("-")."""
        self.used += 1
        root = self.folder / f"case-{self.used}"
        if start == "-":
            root.mkdir()
        else:
            shutil.copytree(self.template, root, symlinks=True)
        return root

    def counts(self, which="B", start="A"):
        """How often a save of B over A, or a load (None), makes each call: a dict for each rank."""
        if (which, start) not in self.counted:
            root = self.fresh(start)
            ends = self.server.run(root, which, **self.settings)
            assert all(end["told"].get("returned") for end in ends), ends
            shutil.rmtree(root)
            self.counted[which, start] = [end["told"]["counts"] for end in ends]
        return self.counted[which, start]

    def try_fault(self, fault, rank=0, start="A"):
        """Save B over A with one fault; return complaints, one a line."""
        TRIED["faults"] += 1
        root = self.fresh(start)
        ends = self.server.run(root, "B", fault=fault, rank=rank, **self.settings)
        call = fault.partition(":")[0]
        complaints = judge_ends(self.scenario, ends, fault, rank)
        complaints += self.judge_folder(root, ends, call, start)
        shutil.rmtree(root, ignore_errors=True)
        where = f"{self.scenario.name} {fault}" + (f" in rank {rank}" if len(ends) > 1 else "")
        where += " over nothing" if start == "-" else ""
        return [f"{where}: {text}" for text in complaints]

    def try_loading(self, fault, **how_to_load):
        """Load A with one fault; return complaints."""
        TRIED["faults"] += 1
        root = self.fresh()
        ends = self.server.run(root, None, fault=fault, **how_to_load, **self.settings)
        report = ends[0]["told"]
        complaints = judge_ends(self.scenario, ends, fault, 0)
        good = ["A", self.scenario.older] if report.get("warned") else ["A"]
        if report.get("returned") and (report["loaded"] not in good or report["wrong"]):
            complaints.append(f"loaded {report['loaded']} with wrong {report['wrong']}")
        complaints += judge_content(self.scenario, root, "A")
        shutil.rmtree(root, ignore_errors=True)
        return [f"{self.scenario.name} loading, {fault}: {text}" for text in complaints]

    def judge_folder(self, root, ends, call, start):
        """Complaints about the folder's content, and about the next save."""
        complaints = []
        returned = any(end["told"].get("returned") for end in ends)
        killed = any(end["exit"] == KILLED for end in ends)
        complaints += judge_content(self.scenario, root, "B" if returned else start + "B")
        # A save that cannot remove files leaves some, and so does an error after B is committed;
        # the next save is judged below.
        committed = self.scenario.folder and judge_content(self.scenario, root, start)
        if not (killed or committed or call in ("unlink", "rmdir", "change")):
            complaints += [f"left {n}" for n in self.scenario.strangers(root, False)]
        return complaints + self.judge_next(root, killed or call in ("unlink", "rmdir", "change"))

    def judge_next(self, root, may_have_left):
        """A clean save into the folder works, and leaves only the files it should."""
        ends = self.clean(root, "C")
        complaints = [f"next save: {e}" for e in ends if not e["told"].get("returned")]
        complaints += [f"after the next save: {c}" for c in judge_content(self.scenario, root, "C")]
        left = self.scenario.strangers(root, may_have_left)
        return complaints + [f"after the next save there is still {name}" for name in left]

    def close(self):
        self.server.close()


def judge_ends(scenario, ends, fault, rank):
    """Complaints about how the processes ended.

    A save may not return after a failed call, because it could not keep its promise. Loads and
    failed allocations are judged by their arrays.
    """
    complaints = []
    call, turn, how = fault.split(":")
    for number, end in enumerate(ends):
        if end["exit"] == KILLED and number == rank and how.startswith("kill"):
            continue
        if end["exit"] != 0:
            complaints.append(f"rank {number} ended with {end['exit']}")
        elif "raised" in end["told"]:
            complaints += judge_exception(end["told"], number == rank, call, how)
    report = ends[rank]["told"]
    harmless = {"memory", "python", *scenario.harmless}
    may_go_on = how == "EINTR" or not harmless.isdisjoint((call, f"{call}:{how}", f"{call}:{turn}"))
    may_go_on = may_go_on or report.get("warned") or "loaded" in report
    if how.startswith("kill"):
        if ends[rank]["exit"] != KILLED and report.get("hits"):
            complaints.append("was not killed")
    elif how == "short" or call == "thread":
        if not report.get("returned"):
            complaints.append(f"gave up: {report}")
    elif report.get("returned") and report["hits"] and not may_go_on:
        complaints.append("said nothing")
    return complaints


def judge_exception(report, is_own, call, how):
    """An exception must be the right one: a StoreError with the system's error number."""
    raised = report["raised"]
    if call in ("memory", "python") and is_own:
        # CPython's messages for files and locks without memory
        good = "MemoryError" in raised or re.match(r"can't allocate (read )?lock", report["text"])
        good = good or (call == "python" and LOST_ERROR.match(report["text"]))
        return [] if good else [f"raised {raised[0]}: {report['text']}"]
    if not is_own:
        good = {"CollectiveError", "StoreError"}.intersection(raised)
        return [] if good else [f"another rank raised {raised[0]}: {report['text']}"]
    if "StoreError" not in raised or "OSError" not in raised:
        return [f"raised {raised[0]}: {report['text']}"]
    number = how.removeprefix("after-")
    expected = getattr(errno, number, None)
    if report["errno"] != expected:
        return [f"raised with errno {report['errno']} instead of {expected}: {report['text']}"]
    return []


def judge_content(scenario, root, allowed):
    """Complaints unless the folder holds one of the `allowed` states ("-": none), complete."""
    try:
        which, arrays = scenario.load(root)
    except FileNotFoundError as error:
        return [] if "-" in allowed else [f"cannot load: {error}"]
    except Exception as error:
        return [f"cannot load: {type(error).__name__}: {error}"]
    if which not in scenario.states:
        return [f"loads as {which!r}"]
    wrong = scenarios.differences(arrays, scenario.states[which])
    if wrong:
        return [f"loads as {which} with other content: {wrong}"]
    if which not in allowed:
        return [f"loads {which}, not {' or '.join(allowed)}"]
    return scenario.other_complaints(root)
