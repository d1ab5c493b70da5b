"""Publishers and followers under faults: each seed is a folder with versions, and some faults.

    LD_PRELOAD=shim.so python follow_faults.py KIND FIRST COUNT [DEFECT]

After each fault, followers that had several versions before it, a new follower, and the folder of
``mlstate follow`` have the bits of one version, the newest. Then a new publisher continues, and all
of them follow it. See `seeded_faults.run_program` for the arguments; KIND is a key of KINDS. DEFECT
is one of DEFECTS: code that is wrong on purpose.
"""

import contextlib
import ctypes
import errno
import io
import json
import os
import random
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import replay
from fault_children import SHIM, run_child, start_child, wait_for
from fault_harness import ERRORS, KILLED, LOST_ERROR
from follow_versions import (
    EMPTY,
    Copy,
    Folder,
    Versions,
    count_lines,
    follow_once,
    interrupt_at,
    number_of_folder,
    read_tree,
)
from json_checksums import text_with_checksum
from seeded_faults import (
    choose_fault,
    choose_kill,
    judge_end,
    put_state,
    run_program,
    states_without_power,
)

import mlstate
from mlstate._common import arrays
from mlstate.checkpoint._store.open_path import open_files
from mlstate.cli import command_line
from mlstate.errors import MLStateError, StoreError
from mlstate.follow import Publisher, _follower
from mlstate.follow._version import KEY, lineage_of
from mlstate.threads import set_num_threads

FAULTS = 12  # of a folder


# ---- judges; each runs in a separate process, which has the followers' arrays ----


def attempt(complaints, label, call):
    """Return the result of a call; an assertion that fails is a complaint."""
    try:
        return call()
    except AssertionError as error:
        complaints.append(f"{label}: {error}")
    except (MLStateError, OSError, ValueError) as error:
        complaints.append(f"{label}: raised {error!r}")
    return None


def advance_all(copies, allowed, label):
    """Advance followers; complain unless all have one of the allowed versions, the same one."""
    complaints, numbers = [], set()
    for copy in copies:
        result = attempt(complaints, f"{label}, {copy}", copy.advance)
        if result is None:
            continue
        if isinstance(result[0], Exception):
            complaints.append(f"{label}, {copy}: {result[0]!r}")
        elif result[0] not in allowed:
            complaints.append(f"{label}, {copy}: has {result[0]}, not one of {sorted(allowed)}")
        else:
            numbers.add(result[0])
    if len(numbers) > 1:
        complaints.append(f"{label}: followers have the versions {sorted(numbers)}")
    return complaints


def judge_kept(folder, chance):
    """Complain unless a new follower reaches a kept version, chosen at random."""
    newest = open_files(folder.path, reads=True).find_manifest()
    if newest is None:
        return []
    versions = lineage_of(newest, folder.path).versions
    first = next(number for number, version in enumerate(versions) if version.has_model)
    step = chance.choice(versions[first:]).step
    complaints, copy = [], Copy(folder.path, folder.versions)

    def reach():
        assert copy.follower.advance(step) == step
        copy.number()

    attempt(complaints, f"kept step {step}", reach)
    return complaints


def judge_command(folder, allowed):
    """Complain unless the folder of the command has one of the allowed versions."""
    complaints, target = [], folder.root / "hf"

    def follow():
        status, text = follow_once(folder.path, target)
        number = number_of_folder(target, folder.versions)
        if EMPTY in allowed and number == EMPTY:
            return
        assert status == 0, text
        assert number in allowed, f"has {number}, not one of {sorted(allowed)}"

    attempt(complaints, "mlstate follow", follow)
    return complaints


def judge_next(folder):
    """Complain unless a new publisher continues, and all follow; nothing is left over then."""
    complaints, first = [], folder.before + folder.more
    publisher = None
    for number, kinds in ((first, {"anchor"}), (first + 1, {"anchor", "delta", "both"})):
        ended = []
        publisher = folder.publish([number], lambda *values, to=ended: to.append(values), publisher)
        if ended[-1][0] != "done" or ended[-1][2] not in kinds:
            return [*complaints, f"a new publisher: {ended[-1]}"]
        complaints += advance_all(folder.copies, {number}, f"after version {number}")
    return complaints + judge_files(folder.path)


def judge_files(path):
    """Complain about a damaged file, and about one that no version needs."""
    report = mlstate.verify(path)
    if not report or report.leftover or report.strange:
        return [f"files: {report.problems} {report.leftover} {report.strange}"]
    return []


def judge(folder, allowed, seed):
    """Complaints about a folder whose newest version must be one of the allowed ones."""
    chance = random.Random(seed)
    folder.publisher = None  # of the process under test
    folder.copies.append(Copy(folder.path, folder.versions, chance.choice(("whole", "half"))))
    complaints = advance_all(folder.copies, allowed, "followers")
    attempt(complaints, "kept", lambda: complaints.extend(judge_kept(folder, chance)))
    if chance.random() < 0.15:
        complaints += judge_command(folder, allowed)
    return complaints + judge_next(folder)


def judge_apart(act):
    """Call `act`, which returns complaints, in a separate process."""
    reports, status, _ = run_child(lambda report: report("complaints", act()))
    texts = [text for values in reports if values[0] == "complaints" for text in values[1]]
    broken = [values for values in reports if values[0] == "broken"]
    return texts + ([] if status == 0 else [f"the judge ended with {status}: {broken}"])


def allowed_after(folder, reports):
    """The versions that may be the newest: the last one that returned, or one begun after it."""
    done = max((n for kind, n, *_ in reports if kind == "done"), default=folder.before - 1)
    return {done} | {n for kind, n, *_ in reports if kind == "start" and n > done}


def count_calls(folder, act):
    """Return how often `act` makes each call, and changes files, without a fault."""
    names = [*ERRORS, "change"]

    def count(report):
        act(lambda *_: None)
        report("counts", {name: SHIM.mls_shim_count(name.encode()) for name in names})

    reports, status, _ = run_child(count, root=folder.root)
    assert status == 0, reports
    folder.restore()
    return reports[-1][1]


def try_each(folder, faults, try_one):
    """Call `try_one(number, fault)` for each; return the number of states, and complaints."""
    states, complaints = 0, []
    for number, fault in enumerate(faults):
        is_state, result = try_one(number, fault)
        states += is_state
        complaints += [f"{fault}: {text}" for text in result]
        folder.restore()
    return states, complaints


# ---- the kinds ----


def disturb_publisher(seed, root, choose):
    """A publisher under faults; it publishes further versions."""
    folder, chance = Folder(seed, root), random.Random(seed + 1)
    numbers = range(folder.before, folder.before + folder.more)
    act = lambda report: folder.publish(numbers, report)  # noqa: E731
    counts = count_calls(folder, act)

    def try_one(number, fault):
        reports, status, hits = run_child(act, fault, root=root)
        allowed = allowed_after(folder, reports)
        result = judge_end(fault, reports, status)
        result += judge_apart(lambda: judge(folder, allowed, seed * 100 + number))
        return bool(hits) or status == KILLED, result

    return try_each(folder, [choose(chance, counts) for _ in range(FAULTS)], try_one)


def fail_power(seed, root):
    """The power fails at some points of a publication; each leaves several states of the disk."""
    folder, chance = Folder(seed, root, more=2), random.Random(seed + 1)
    numbers = range(folder.before, folder.before + folder.more)
    act = lambda report: folder.publish(numbers, report)  # noqa: E731
    complaints, seen = [], set()
    for label, reports, state in states_without_power(root, act, chance, points=3, samples=4):
        allowed = allowed_after(folder, reports)
        key = (replay.digest(state), *sorted(allowed))
        if key in seen:
            continue
        seen.add(key)
        put_state(state, root)
        result = judge_apart(lambda: judge(folder, allowed, seed + len(seen)))  # noqa: B023
        complaints += [f"{label}: {text}" for text in result]
    return len(seen), complaints


def disturb_followers(seed, root, choose, disturb, error=""):
    """Advance followers under faults, in separate processes.

    `choose(count)` returns faults, `disturb(copy, fault)` advances once under one of them; it
    returns the new version, or an exception. `error`: name of the exception that a fault causes.
    """
    folder, chance = Folder(seed, root), random.Random(seed + 1)
    newest, states, complaints = folder.before - 1, 0, []
    for copy in folder.copies:
        for fault in choose(folder, copy, chance):

            def act(report, copy=copy, fault=fault):
                before = copy.number()
                result = disturb(copy, fault)
                number = copy.number()
                if isinstance(result, BaseException):
                    report("raised", 0, type(result).__name__, getattr(result, "errno", None))
                    assert number in (before, newest), f"has {number} after {before}"
                else:
                    assert number == newest, f"is silently at {number}, not at {newest}"
                SHIM.mls_shim_disarm()
                assert copy.advance()[0] == newest, "does not go on"
                assert SHIM.mls_shim_count(b"change") == 0, "a follower changed a file"

            reports, status, _ = run_child(act, fault if ":" in fault else "", root=root)
            states += 1
            result = judge_end(fault if ":" in fault else error, reports, status)
            complaints += [f"{copy}, {fault}: {text}" for text in result]
    return states, complaints


def fail_follower(seed, root):
    """One call of a follower fails once, or from then on."""

    def choose(folder, copy, chance):
        counts = count_calls(folder, lambda _: copy.advance())
        return [choose_fault(chance, counts) for _ in range(FAULTS)] if any(counts.values()) else []

    return disturb_followers(seed, root, choose, lambda copy, _: copy.advance()[0])


PARTS = ("/mlstate/", "/mlstate/follow/")  # all code, or its part that changes the arrays


def choose_lines(folder, chance, call, *arguments):
    """Lines that a call executes, and the part of the code in which they are counted."""
    counts, faults = {}, []
    for part in PARTS:  # in separate processes, because a second call may have nothing to do
        act = lambda report, part=part: report(count_lines(part, call, *arguments))  # noqa: E731
        counts[part] = run_child(act)[0][0][0]
        folder.restore()
    for _ in range(FAULTS):
        part = chance.choice(PARTS)
        faults.append(f"line {chance.randint(1, counts[part])} {part}")
    return faults


def interrupt_follower(seed, root):
    """Ctrl-C at a line of a follower's code."""

    def choose(folder, copy, chance):
        return choose_lines(folder, chance, copy.follower.advance)

    def disturb(copy, fault):
        _, number, part = fault.split()
        try:
            interrupt_at(int(number), part, copy.follower.advance)
        except KeyboardInterrupt as error:
            return error
        return None

    return disturb_followers(seed, root, choose, disturb, "KeyboardInterrupt")


def interrupt_publisher(seed, root):
    """Ctrl-C at a line of a publisher's code; then it publishes further versions."""
    folder, chance = Folder(seed, root), random.Random(seed + 1)
    first, end = folder.before, folder.before + folder.more
    publisher = folder.publisher or Publisher(folder.path, **folder.options)

    def publish(report):
        return folder.publish([first], report, publisher)

    def try_one(number, fault):
        _, line, part = fault.split()

        def act(report):
            interrupt_at(int(line), part, publish, report)
            folder.publish(range(first + 1, end), report, publisher)

        ended, status, _ = run_child(act)
        allowed = allowed_after(folder, ended)
        result = judge_end("line", ended, status)
        return True, result + judge_apart(lambda: judge(folder, allowed, seed + number))

    faults = choose_lines(folder, chance, publish, lambda *_: 0)
    return try_each(folder, faults, try_one)


def memory_of(array):
    """Return what `_common.arrays._memory_of` does; NumPy crashes there without memory."""
    address = ctypes.c_void_p.from_address(id(array) + 16).value  # PyArrayObject.data
    return arrays._Memory(address or 0, max(array.itemsize, 1), array.shape, array.strides)


def exhaust_memory(seed, root):
    """One of the allocations of Python fails in a follower."""
    import _testcapi

    arrays._memory_of = memory_of

    def choose(folder, copy, chance):
        return [f"allocation {chance.randint(1, 3000)}" for _ in range(FAULTS)]

    def disturb(copy, fault):
        number = int(fault.split()[1])
        try:
            _testcapi.set_nomemory(number, number + 1)
            copy.follower.advance()
        except BaseException as error:
            _testcapi.remove_mem_hooks()
            # CPython loses some of them (see fault_harness)
            return MemoryError() if LOST_ERROR.match(str(error)) else error
        finally:
            _testcapi.remove_mem_hooks()
        return None

    return disturb_followers(seed, root, choose, disturb, "MemoryError")


def disturb_command(seed, root, choose):
    """The command that follows with a folder, under faults: the folder has the old or the new."""
    folder, chance = Folder(seed, root), random.Random(seed + 1)
    if folder.before < 2:
        return 0, []
    target, versions = root / "hf", folder.versions
    older = [copy for copy in folder.copies if copy.follower.version is not None]
    newest = folder.before - 1
    number = older[0].number() if older else EMPTY
    if number != EMPTY:
        state = versions.models[number]
        mlstate.checkpoint.export_huggingface(str(target), state)
    folder.files = read_tree(root)

    def act(report):
        report("start", newest)
        status, text = follow_once(folder.path, target)
        report("done" if status == 0 else "failed", newest, text)

    counts = count_calls(folder, act)

    def try_one(_, fault):
        reports, status, _ = run_child(act, fault, root=root)
        is_done = any(values[0] == "done" for values in reports)
        result = [] if status in (0, KILLED) else [f"ended with {status}: {reports}"]

        def check():
            problems = []
            has = attempt(problems, "folder", lambda: number_of_folder(target, versions))
            if has not in ({newest} if is_done else {number, newest}):
                problems.append(f"the folder has {has}")
            return problems + judge_command(folder, {newest})

        return True, result + judge_apart(check)

    faults = [choose(chance, counts) for _ in range(FAULTS)]
    return try_each(folder, faults, try_one)


def damage(seed, root):
    """Files change, disappear, or are replayed; then publishers go on."""
    folder, chance = Folder(seed, root, most_before=8), random.Random(seed + 1)
    if folder.before < 2:
        return 0, []

    def try_one(turn, damaged):
        label, allowed = damaged
        may_refuse = label.startswith(("exchange", "chain"))  # no checksum reveals it
        judge_seed = seed * 100 + turn
        return True, judge_apart(lambda: judge_damaged(folder, allowed, may_refuse, judge_seed))

    return try_each(folder, (damage_folder(folder, chance) for _ in range(FAULTS)), try_one)


def damage_folder(folder, chance):
    """Damage something; return a description, and the versions that followers may have then."""
    weights, newest = Path(folder.path), folder.before - 1
    files = sorted(path for path in weights.rglob("*") if path.is_file() and path.name != "lock")
    path = chance.choice(files)
    if chance.random() < 0.25:
        path = weights / "manifest.json"
    data = bytearray(path.read_bytes())
    roots = sorted((weights / "roots").iterdir())
    kinds = ["flip"] * 4 + ["cut", "extend", "delete", "zeros", "exchange", "old root", "chain"]
    kind = chance.choice(kinds)
    label = f"{kind} {path.relative_to(weights)}"
    if kind == "flip" and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[chance.randrange(len(data) + 1) :]
    elif kind == "extend":
        data += chance.randbytes(chance.randint(1, 200))
    elif kind == "zeros":
        data = bytearray(len(data))
    elif kind == "delete":
        path.unlink()
        # without a manifest nothing is published
        return label, {newest, EMPTY} if path.name == "manifest.json" else {newest}
    elif kind == "exchange":
        other = chance.choice(files)
        label += f" {other.relative_to(weights)}"
        data, content = bytearray(other.read_bytes()), bytes(data)
        if other != weights / "manifest.json":
            other.write_bytes(content)
    elif kind == "old root":
        data = bytearray(chance.choice(roots).read_bytes())
        (weights / "manifest.json").write_bytes(data)
        return f"{kind} {json.loads(data)['step']}", None
    elif kind == "chain":
        label = f"{kind} {change_chain(weights, chance)}"
        return label, {newest}
    path.write_bytes(data)
    # a manifest that was exchanged with a root is a return to an older version
    return label, None if kind == "exchange" else {newest}


def change_chain(weights, chance):
    """Let the newest root name other versions before it, with a correct checksum."""
    document = json.loads((weights / "manifest.json").read_bytes())
    chain = document["metadata"][KEY]["chain"]
    if not chain:
        return "unchanged"
    how = chance.choice(("drop", "repeat", "reorder", "rename", "kind"))
    row = chance.randrange(len(chain))
    other = chance.randrange(len(chain))
    if how == "drop":
        del chain[row]
    elif how == "repeat":
        chain.insert(row, chain[row])
    elif how == "reorder":
        chain[row], chain[other] = chain[other], chain[row]
    elif how == "rename":
        chain[row][1] = chain[other][1]
    else:
        chain[row][3] = chance.choice(("anchor", "delta", "both"))
    text = text_with_checksum(document)
    name = f"{document['sequence']:08d}.{document['generation']}.json"
    for path in (weights / "manifest.json", weights / "roots" / name):
        path.write_bytes(text)
    return how


def judge_damaged(folder, allowed, may_refuse, seed):
    """Complaints after damage: exceptions are allowed, other content and silence are not."""
    complaints, chance = [], random.Random(seed)
    publisher, first = folder.publisher, folder.before + folder.more
    folder.copies.append(Copy(folder.path, folder.versions))
    for copy in folder.copies:
        before = copy.number()
        result = attempt(complaints, str(copy), copy.advance)
        if result is None or isinstance(result[0], Exception):
            continue
        number, warned = result
        if allowed is not None and number not in allowed:
            complaints.append(f"{copy}: has {number}, not one of {sorted(allowed)}")
        elif number < before and not warned:
            complaints.append(f"{copy}: went from {before} to {number} silently")
    if chance.random() < 0.2:
        target = folder.root / "hf"

        def follow():
            status, _ = follow_once(folder.path, target)
            number = number_of_folder(target, folder.versions)
            assert status or allowed is None or number in allowed, f"has {number}"

        attempt(complaints, "mlstate follow", follow)
    if chance.random() < 0.5:  # the publisher continues; followers may need the next anchor
        ended = []
        folder.publish([folder.before], lambda *values: ended.append(values), publisher)
        for copy in folder.copies:
            attempt(complaints, f"{copy}, next version", copy.advance)
    ended = []
    publisher = Publisher(folder.path)
    folder.publish([first], lambda *values: ended.append(values), publisher)
    if ended[-1][0] != "done":
        is_refused = may_refuse and ended[-1][2] == "FormatError"
        return complaints + ([] if is_refused else [f"a new publisher: {ended[-1]}"])
    return complaints + advance_all(folder.copies, {first}, "after the next anchor")


# ---- races ----


def race(seed, root):
    """Publishers, followers, the command and a pruner at the same time; some are killed."""
    chance = random.Random(seed + 1)
    path, stop = f"{root}/weights", root / "stop"
    publishers = chance.randint(1, 3)
    numbers = range(12)
    sets = [Versions(seed, len(numbers) + 2, p, falls_back=False) for p in range(publishers + 1)]
    everything = Everything(sets)
    roles = [lambda report, p=p: publish_in_race(path, everything, p, numbers, report)
             for p in range(publishers)]  # fmt: skip
    kinds = chance.sample(["whole", "half", "double"], 2)
    roles += [lambda report, kind=kind: follow_in_race(path, everything, kind, stop, report)
              for kind in kinds]  # fmt: skip
    roles.append(lambda report: command_in_race(path, root / "hf", everything, stop, report))
    if chance.random() < 0.5:
        roles.append(lambda report: prune_in_race(path, stop, report))
    children = [start_child(role) for role in roles]
    killed = set()
    if chance.random() < 0.6:
        time.sleep(chance.random() * 0.15)
        victim = chance.randrange(publishers)
        os.kill(children[victim][0], signal.SIGKILL)
        killed.add(victim)
    complaints, reports = [], {}
    for number, (child, pipe) in enumerate(children):
        if number == publishers:
            stop.touch()
        reports[number], status = wait_for(child, pipe)
        if status != 0 and number not in killed:
            complaints.append(f"role {number} ended with {status}: {reports[number][-1:]}")
    for number in range(publishers, len(children)):
        complaints += [f"role {number}: {values[1]}" for values in reports[number]]
    allowed = set()
    for number in range(publishers):
        begun = [values[1] for values in reports[number] if values[0] == "start"]
        done = [values[1] for values in reports[number] if values[0] == "done"]
        last = done[-1] if done else EMPTY
        allowed |= {each for each in (last, *begun) if each >= last}
    stop.unlink()
    return 1, complaints + judge_apart(lambda: judge_race(path, root, everything, allowed))


class Everything:
    """The versions of several publishers: their numbers follow each other."""

    def __init__(self, sets):
        self.each = len(sets[0].models)
        self.models, self.steps = [], []
        for publisher, versions in enumerate(sets):
            for number, model in enumerate(versions.models):
                model["number"][1] = publisher * self.each + number
                self.models.append(model)
                self.steps.append(versions.steps[number])


def publish_in_race(path, everything, publisher, numbers, report):
    """Publish versions; a publisher that another one has replaced starts again."""
    chance, process = random.Random(publisher), None
    for number in numbers:
        process = process or Publisher(path, anchor_every=chance.choice((2, 4)))
        number += publisher * everything.each
        report("start", number)
        try:
            process.publish(everything.steps[number], everything.models[number])
            report("done", number)
        except StoreError as error:
            if error.errno not in (errno.EEXIST, errno.EBUSY):
                raise
            process = None
        time.sleep(chance.random() * 0.01)


def follow_in_race(path, everything, kind, stop, report):
    """Follow; report complaints."""
    copy = Copy(path, everything, kind)
    while not stop.exists():
        try:
            follow_newest(copy)
        except AssertionError as error:
            report("wrong", str(error))
            return


def follow_newest(copy):
    """Advance once; other processes may publish between `poll` and `advance`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = copy.number()
        try:
            copy.follower.poll()
            copy.follower.advance()
        except MLStateError as error:
            assert copy.number() == before
            raise AssertionError(repr(error)) from error
        copy.number()


def command_in_race(path, target, everything, stop, report):
    """Follow with a folder, as the command does."""
    while not stop.exists():
        status, text = follow_once(path, target)
        try:
            number_of_folder(target, everything)
        except AssertionError as error:
            report("wrong", str(error))
        # before the first commit a folder may have a root, but no manifest
        if status and "manifest.json" not in text and "no such folder" not in text:
            report("wrong", text)


def prune_in_race(path, stop, report):
    """Delete versions again and again."""
    words = ["publish", "prune", path, "--keep", "2", "--lock-timeout", "5"]
    while not stop.exists():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = command_line.run_command_line(words)
        if status not in (0, 2):
            report("wrong", f"prune ended with {status}")


def judge_race(path, root, everything, allowed):
    """All followers reach the newest version, and the next publisher continues."""
    copies = [Copy(path, everything), Copy(path, everything, "half")]
    complaints = advance_all(copies, allowed, "after the race")
    publisher = Publisher(path)
    for number in (len(everything.models) - 2, len(everything.models) - 1):
        publisher.publish(everything.steps[number], everything.models[number])
        complaints += advance_all(copies, {number}, "after the race, next")
    return complaints + judge_files(path)


KINDS = {
    "fail_publisher": partial(disturb_publisher, choose=choose_fault),
    "kill_publisher": partial(disturb_publisher, choose=choose_kill),
    "fail_command": partial(disturb_command, choose=choose_fault),
    "kill_command": partial(disturb_command, choose=choose_kill),
    **{
        function.__name__: function
        for function in (
            interrupt_publisher, fail_power, fail_follower, interrupt_follower, exhaust_memory,
            damage, race,
        )
    },
}  # fmt: skip


def forget_log(log):
    """Restore nothing."""
    log.clear()


def advance_nowhere(self, manifest, step):
    """Do as if the arrays had the newest version."""


DEFECTS = {
    "no undo": (_follower, "roll_back", forget_log),
    "stale": (_follower.Follower, "_follow", advance_nowhere),
}


if __name__ == "__main__":
    for name in sys.argv[4:]:
        setattr(*DEFECTS[name])
    warnings.simplefilter("ignore")
    set_num_threads(1)
    run_program(KINDS, hint="lock")
