"""Save or load a state in a new process and print the additional memory it took.

`bench_checkpoint.py` starts ``python checkpoint_memory.py WHAT NAME STATE PATH QUICK`` for each
measurement and watches the process from outside during the call. It counts anonymous and shared
memory, but not pages of mapped files, which the system can reclaim.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
import warnings
from pathlib import Path

from checkpoint_peers import ways
from checkpoint_states import STATES
from resident import forget_peak, peak

WHAT = ("save", "load")
LOOK_SECONDS = 0.001


def own_mib(pid: int) -> float:
    """Memory of a process that belongs to no file, as the system reports it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0.0
    fields = (text.partition(f"{name}:")[2].split() for name in ("RssAnon", "RssShmem"))
    return sum(int(field[0]) for field in fields if field) / 1024


def peak_of(operation: str, name: str, letter: str, path: Path, quick: bool) -> dict[str, float]:
    """Measure one call in a new process."""
    command = [sys.executable, __file__, operation, name, letter, str(path), str(int(quick))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{operation} by {name} did not get ready")
        before = most = own_mib(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], LOOK_SECONDS)[0]:
            most = max(most, own_mib(process.pid))
        figures = json.loads(process.stdout.readline())
    return {"own_mib": most - before, **figures}


def main() -> None:
    operation, name, letter, path, quick = sys.argv[1:]
    warnings.simplefilter("ignore")
    target, warm = Path(path), Path(f"{path}-warm")
    kind = ways()[name]
    call = getattr(kind(STATES[letter](True)), operation if operation == "save" else "load")
    kind(STATES[letter](True)).save(warm)  # the first call imports modules and starts thread pools
    if operation == "load":
        call(warm)
    way = kind(STATES[letter](quick == "1") if operation == "save" else {})
    if operation == "load" and name.startswith("torch DCP"):
        way = kind(STATES[letter](quick == "1"))
    call = way.save if operation == "save" else getattr(way, "load_verified", way.load)
    before = forget_peak()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter_ns()
    result = call(target)
    elapsed = (time.perf_counter_ns() - start) * 1e-6
    most = peak()
    print(json.dumps({"all_mib": most - before, "ms": elapsed}), flush=True)
    del result


if __name__ == "__main__":
    main()
