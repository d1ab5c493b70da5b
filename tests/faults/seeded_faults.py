"""What follow_faults.py and prompt_faults.py share: the choice of faults, and the main program.

Both run with the shim preloaded, so no test may import this module.
"""

import errno
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import replay
from fault_children import arm, run_child
from fault_harness import ERRORS, KILLED

KILLS = ["kill-before", "kill-after", "kill-half"]


def judge_end(fault, reports, status, others=()):
    """Complaints about how a process under a fault ended.

    It may raise the fault's own error, also as a StoreError with its number or one of `others`.
    """
    how = fault.rpartition(":")[2]
    broken = [values for values in reports if values[0] == "broken"]
    complaints = []
    if status not in (0, KILLED) or (status and not how.startswith("kill")):
        complaints.append(f"ended with {status}: {broken}")
    numbers = {getattr(errno, how.removeprefix("after-"), None), *others}
    for _, _, name, raised in (values for values in reports if values[0] == "raised"):
        is_good = name == how or (name.startswith("Store") and raised in numbers)
        if not is_good and (name, how) not in (("MemoryError", "ENOMEM"), ("FormatError", "short")):
            complaints.append(f"raised {name} with errno {raised}")
    return complaints


# ---- the faults of a seed ----


def choose_fault(chance, counts):
    """A call that fails once, or from then on; `counts` has the number of each call."""
    call = chance.choice([name for name in ERRORS if counts.get(name)])
    how = chance.choice(ERRORS[call])
    onward = "+" if how != "EINTR" and chance.random() < 0.15 else ""  # else it never ends
    return f"{call}:{chance.randint(1, counts[call])}{onward}:{how}"


def choose_kill(chance, counts):
    """A change of a file at which the process is killed."""
    return f"change:{chance.randint(1, counts['change'])}:{chance.choice(KILLS)}"


def states_without_power(root, act, chance, points, samples):
    """Record a child; yield states of the disk that a power failure leaves at some points.

    Each comes with a description and the child's reports until then.
    """
    disk, log = replay.Disk(root), root.parent / f"{root.name}-recorded"
    run_child(act, root=root, log=log)
    entries = replay.parse(log.read_bytes())
    log.unlink()
    chosen = set(chance.sample(range(len(entries)), min(points, len(entries))))
    reports = []
    for number, entry in enumerate(entries):
        disk.apply(entry)
        if entry.kind == "N":
            reports.append(json.loads(entry.name))
        if number in chosen:
            for state in replay.states(disk, chance, samples):
                yield f"power, entry {number} {entry}", reports, state


def put_state(state, root):
    """Replace the content of a folder by a state of the disk."""
    shutil.rmtree(root)
    root.mkdir()
    replay.materialise(state, root)


# ---- the program ----


def run_program(kinds, hint):
    """Try seeds until there are enough states; print their number, and complaints, as JSON.

    The arguments of the program are a key of `kinds`, the first seed and the number of states.
    Each kind is called with a seed and an empty folder, and returns its states and complaints.
    `hint` names the files for which the shim's MLS_FAULT_HINT is.
    """
    kind, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    states, complaints, seed = 0, [], first
    os.environ |= {"MLS_FAULT_HINT": hint, "MLS_FAULT_SYNC": "no"}
    with tempfile.TemporaryDirectory() as top:
        arm(top)
        while states < count and len(complaints) <= 50:
            root = Path(top) / f"case-{seed}"
            root.mkdir()
            done, result = kinds[kind](seed, root)
            states += done
            complaints += [f"seed {seed}: {text}" for text in result]
            shutil.rmtree(root)
            seed += 1
    print(json.dumps({"states": states, "complaints": complaints, "seeds": [first, seed]}))
