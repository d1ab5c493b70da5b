"""Publishers and followers with random histories: each seed is a folder with versions.

After each fault, followers that had several versions before it, a new follower, and the folder of
``mlstate follow`` have the bits of one version, the newest. Then a new publisher continues, and all
of them follow it.
"""

import argparse
import contextlib
import ctypes
import errno
import io
import json
import os
import random
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from typing import ClassVar

from children import start_child, wait_for
from follow_versions import EMPTY, Copy, Folder, Versions, follow_once, number_of_folder
from json_checksums import text_with_checksum
from operation import Operation

import mlstate
from mlstate._common import arrays
from mlstate.checkpoint._store.open_path import open_files
from mlstate.cli import command_line
from mlstate.errors import MLStateError, StoreError
from mlstate.follow import Publisher, _follower
from mlstate.follow._version import KEY, lineage_of
from mlstate.threads import set_num_threads


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


def judge_files(path):
    """Complain about a damaged file, and about one that no version needs."""
    report = mlstate.verify(path)
    if not report or report.leftover or report.strange:
        return [f"files: {report.problems} {report.leftover} {report.strange}"]
    return []


def append_all(values, *more):
    """Append values as one item."""
    values.append(more)


class FollowOperation(Operation):
    """A folder with versions, and followers of them; the seed is the history."""

    may_go_on = True
    points_of_seed = 4
    part = ("_follower.py", "_delta.py", "_publisher.py", "_version.py")

    def make_states(self):
        warnings.simplefilter("ignore")
        set_num_threads(1)

    def prepare(self, folder):
        self.history = Folder(self.seed, folder)


class Publish(FollowOperation):
    """A publisher publishes versions, and continues after an exception."""

    name = "publish"
    # the files of old versions then stay until the next one is published
    leaves: ClassVar = (*Operation.leaves, "open_folder", "list")
    seeded: ClassVar = {
        "faults": (12, 24, 2_700), "lines": (1, 12, 400), "power": (12, 20, 1_500),
        "damage": (12, 12, 1_500), "race": (2, 3, 100),
    }  # fmt: skip

    def call(self, folder):
        history = self.history
        history.publish(range(history.before, history.before + history.more), self.note)

    def allowed(self):
        """The versions that may be the newest: the last that returned, or one begun after it."""
        notes = [values for values in self.notes if values[0] in ("start", "done")]
        done = max((n for kind, n, *_ in notes if kind == "done"), default=self.history.before - 1)
        return {done} | {n for kind, n, *_ in notes if kind == "start" and n > done}

    def outcome(self, folder):
        history, allowed, complaints = self.history, self.allowed(), []
        chance = random.Random(f"{self.seed} {self.notes}")
        history.publisher = None  # of the process under test
        kind = chance.choice(("whole", "half"))
        history.copies.append(Copy(history.path, history.versions, kind))
        complaints += advance_all(history.copies, allowed, "followers")
        attempt(complaints, "kept", lambda: complaints.extend(judge_kept(history, chance)))
        if chance.random() < 0.15:
            complaints += judge_command(history, allowed)
        assert not complaints, complaints
        return "new"

    def call_again(self, folder):
        history, publisher = self.history, None
        first = history.before + history.more
        for number, kinds in ((first, {"anchor"}), (first + 1, {"anchor", "delta", "both"})):
            notes = []
            publisher = history.publish([number], partial(append_all, notes), publisher)
            assert notes[-1][0] == "done" and notes[-1][2] in kinds, notes
            complaints = advance_all(history.copies, {number}, f"after version {number}")
            assert not complaints, complaints
        self.note("done", number)
        return "new"

    def left(self, folder, was_killed):
        return [] if was_killed else judge_files(self.history.path)


class Follow(FollowOperation):
    """A follower advances; its arrays have the version before or the newest, bit for bit."""

    name = "follow"
    reads = in_memory = True
    seeded: ClassVar = {
        "faults": (12, 24, 2_400), "lines": (12, 24, 1_200), "python": (1, 24, 1_000)
    }  # fmt: skip

    def make_states(self):
        super().make_states()
        arrays._memory_of = memory_of

    def prepare(self, folder):
        super().prepare(folder)
        self.copy = self.history.copies[self.seed % len(self.history.copies)]
        self.before, self.newest = self.copy.number(), self.history.before - 1

    def call(self, folder):
        result, _ = self.copy.advance()
        if isinstance(result, BaseException):
            raise result
        assert result == self.newest, f"is silently at {result}, not at {self.newest}"

    def outcome(self, folder):
        number = self.copy.number()
        assert number in (self.before, self.newest), f"has {number} after {self.before}"
        return "new"

    def call_again(self, folder):
        assert self.copy.advance()[0] == self.newest, "does not go on"
        return "new"


def memory_of(array):
    """Return what `_common.arrays._memory_of` does; NumPy crashes there without memory."""
    address = ctypes.c_void_p.from_address(id(array) + 16).value  # PyArrayObject.data
    return arrays._Memory(address or 0, max(array.itemsize, 1), array.shape, array.strides)


class FollowCommand(FollowOperation):
    """The command that follows with a folder: the folder has the old version or the new one."""

    name = "mlstate follow"
    seeded: ClassVar = {"faults": (7, 24, 600)}

    def prepare(self, folder):
        super().prepare(folder)
        history, self.target = self.history, folder / "hf"
        while history.before < 2:
            history.publish([history.before], publisher=history.publisher)
            history.before += 1
        older = [copy for copy in history.copies if copy.follower.version is not None]
        self.newest = history.before - 1
        self.old = older[0].number() if older else EMPTY
        if self.old != EMPTY:
            state = history.versions.models[self.old]
            mlstate.checkpoint.export_huggingface(str(self.target), state)

    def call(self, folder):
        words = ["follow", self.history.path, "--into", str(self.target), "--once"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert command_line._parse_and_run(words, argparse.Namespace()) == 0

    def outcome(self, folder):
        number = number_of_folder(self.target, self.history.versions)
        assert number in (self.old, self.newest), f"the folder has {number}"
        return "new" if number == self.newest else "old"


# ---- damage ----


def damage(bench):
    """Files change, disappear, or are replayed; then publishers go on."""
    history, chance, complaints = bench.operation.history, random.Random(bench.seed + 1), []
    if history.before < 2:
        return 0, []
    for turn in range(12):
        bench.restore()
        label, allowed = damage_folder(history, chance)
        may_refuse = label.startswith(("exchange", "chain"))  # no checksum reveals it
        seed = bench.seed * 100 + turn

        def act(report, allowed=allowed, may_refuse=may_refuse, seed=seed):
            for text in judge_damaged(history, allowed, may_refuse, seed):
                report("complaint", text)

        complaints += [f"{label}: {text}" for text in bench.complaints_of(act)]
    return 12, complaints


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


def race(bench):
    """Publishers, followers, the command and a pruner at the same time; some are killed."""
    seed, root = bench.seed, bench.root.parent / "race"
    root.mkdir()
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

    def act(report):
        for text in judge_race(path, everything, allowed):
            report("complaint", text)

    return 1, complaints + bench.complaints_of(act)


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


def judge_race(path, everything, allowed):
    """All followers reach the newest version, and the next publisher continues."""
    copies = [Copy(path, everything), Copy(path, everything, "half")]
    complaints = advance_all(copies, allowed, "after the race")
    publisher = Publisher(path)
    for number in (len(everything.models) - 2, len(everything.models) - 1):
        publisher.publish(everything.steps[number], everything.models[number])
        complaints += advance_all(copies, {number}, "after the race, next")
    return complaints + judge_files(path)


Publish.own_attacks = {"damage": damage, "race": race}


# ---- followers that are wrong on purpose ----


def forget_log(log):
    """Restore nothing."""
    log.clear()


def advance_nowhere(self, manifest, step):
    """Do as if the arrays had the newest version."""


def wrong(operation, name, *defect):
    """An operation whose process has a defect."""
    operation = type(operation)()
    operation.name = name
    operation.seeded = dict.fromkeys(("faults", "lines"), (60, 60, 60))
    make_states = operation.make_states

    def make_defect():
        make_states()
        setattr(*defect)

    operation.make_states = make_defect
    return operation


FOLLOW = [Publish(), Follow(), FollowCommand()]
DEFECTIVE = [
    wrong(FOLLOW[1], "no undo", _follower, "roll_back", forget_log),
    wrong(FOLLOW[0], "stale", _follower.Follower, "_follow", advance_nowhere),
]
