"""The effect of a wrong gradient on one rank, for each engine and the library below it.

``python benchmarks/fault_table.py [--engines ...] [--faults ...] [--runs N] [--json FILE]`` prints
a table in Markdown. Three ranks reduce four gradients; rank 1 makes a fault. Each run has a time
limit: hanging ranks are killed and reported as such.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fault_rank import LEFT_OUT, ODD, SECONDS, WORLD
from from_tests import import_from_tests
from processes import end, rank_environment, start_process
from summary import markdown

HERE = Path(__file__).resolve().parent
ENGINES = {
    "threads": "LocalGroup (threads)",
    "processes": "LocalGroup (processes)",
    "gloo": "TorchGroup (gloo)",
    "raw gloo": "raw gloo",
    "mpi mpich": "MPIGroup (MPICH)",
    "raw mpi mpich": "raw MPICH",
    "mpi openmpi": "MPIGroup (Open MPI)",
    "raw mpi openmpi": "raw Open MPI",
}
FAULTS = {
    "order": "`a`, `b` passed in the other order",
    "order of calls": "`b` called before `a`, one by one",
    "contents": "contents of `a` and `b` exchanged",
    "missing gradient": "no gradient of `b`",
    "missing call": "`b` not called, one by one",
    "skipped step": "a step left out, then the next",
    "no call": "no call at all",
    "dtype": "`b` is float64",
    "shape": "`b` is (5, 3), not (4, 3)",
    "NaN": "NaN in `b`",
    "killed rank": "killed (SIGKILL) meanwhile",
}
START_SECONDS = 90.0  # until all ranks have joined
LIMIT = 12.0  # seconds without news, after which ranks hang

MOST_FAILURES = 3  # jobs whose ranks do not join

Reports = dict[int, dict[str, Any]]  # by rank


# ---- jobs ----


def reason_against(engine: str) -> str:
    """Why an engine cannot take part; empty if it can."""
    if "gloo" in engine and importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if "mpi" in engine and import_from_tests("mpi_jobs").home(engine.split()[-1]) is None:
        return f"{engine.split()[-1]} is not installed (see tools/mpi.sh)"
    return ""


def started(engine: str, arguments: list[str], job: str, log: Any) -> list[Any]:
    """Start the processes of a job, each in a new session."""
    environment = rank_environment(MLSTATE_JOB=job, WORLD_SIZE=str(WORLD))
    command = [sys.executable, *arguments]
    if engine == "threads":
        commands = [(command, environment)]
    elif "mpi" in engine:
        mpi_jobs = import_from_tests("mpi_jobs")
        name = engine.split()[-1]
        commands = [(mpi_jobs.command(name, WORLD, *arguments), mpi_jobs.environment(name))]
    else:
        commands = [(command, {**environment, "RANK": str(rank)}) for rank in range(WORLD)]
    return [start_process(command, variables, log) for command, variables in commands]


def read(folder: Path) -> list[dict[str, Any]]:
    """All complete lines that the ranks have written so far."""
    lines = []
    for rank in range(WORLD):
        path = folder / f"rank-{rank}"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines += [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
    return lines


def wait_for(processes: list[Any], folder: Path, engine: str) -> bool:
    """Wait until a job ends; returns False if it hangs."""
    size, since = -1, time.monotonic()
    while any(process.poll() is None for process in processes):
        waiting = len(list(folder.glob("here-*")))
        news = len(read(folder)) + waiting
        if news != size:
            size, since = news, time.monotonic()
        if time.monotonic() - since > (LIMIT if waiting == WORLD else START_SECONDS):
            return False
        time.sleep(0.05)
    return True


def job(engine: str, fault: str, first: int, last: int, folder: Path) -> list[Reports]:
    """Start ranks, and return their reports of each run, as far as they got.

    Returns nothing if they did not join: a busy machine is not the fault under test.
    """
    folder.mkdir()
    arguments = [str(HERE / "fault_rank.py"), engine, fault, str(first), str(last), str(folder)]
    with (folder / "log").open("wb") as log:
        processes = started(engine, arguments, f"faults {os.getpid()} {folder.name}", log)
        try:
            done = wait_for(processes, folder, engine)
            codes = [process.poll() for process in processes]
        finally:
            end(processes)
    if len(list(folder.glob("here-*"))) < WORLD:
        return []
    runs: dict[int, Reports] = {}
    for line in read(folder):
        runs.setdefault(line["run"], {})[line["rank"]] = line  # the last report of a run counts
    reports = [runs[run] for run in sorted(runs)] or [{}]
    for rank in range(WORLD):  # ranks that did not finish the last run
        line = reports[-1].setdefault(rank, {"parts": {}, "said": "", "outcome": ""})
        if line.get("usable") is None:
            line["usable"] = False
            if not line["outcome"]:
                line["outcome"] = ended(done, codes[rank % len(codes)], "mpi" in engine)
                line["said"] = (folder / "log").read_text(errors="replace")[-400:]
    return reports


def ended(done: bool, code: int | None, mpi: bool) -> str:
    """Describe how a rank ended that reported nothing of a run."""
    if not done:
        return "hangs"
    if mpi:
        return "the job is aborted"
    return f"is aborted ({signal.Signals(-code).name})" if code and code < 0 else "ends"


# ---- the table ----


def verdict(reports: Reports) -> str:
    """Summarize the reports of a run, except a killed rank's."""
    counts: Counter[str] = Counter()
    for line in reports.values():
        outcome, outcomes = line["outcome"], set(line["parts"].values())
        wrong = ", ".join(name for name, text in line["parts"].items() if text == "wrong")
        if outcome != "no error":
            outcome += f", wrong sums of {wrong}" if wrong else ""
        elif wrong:
            outcome = f"silently wrong sums of {wrong}"
        elif "NaN" in outcomes:
            outcome = "NaN passes"
        else:
            outcome = "all sums right" if outcomes == {"right"} else "no error, sums are missing"
        if outcome != LEFT_OUT:
            counts[outcome] += 1
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(
        f"{text} ({count} of {sum(counts.values())})" for text, count in counts.items()
    )


# Faults that mlstate finds in the arguments of a call, so that no rank stores anything.
REFUSED = ("missing gradient", "dtype", "shape")
# The parameters that a fault affects; "b" if a fault is not listed.
FAULTY = {
    "order": "ab",
    "order of calls": "ab",
    "contents": "ab",
    "skipped step": "abcd",
    "no call": "abcd",
    "killed rank": "abcd",
}


def is_applicable(engine: str, fault: str) -> bool:
    """Whether a fault applies: other packages take no dicts, and threads are not killed."""
    if engine.startswith("raw"):
        return fault not in ("order", "missing gradient")
    return not (engine == "threads" and fault == "killed rank")


def others_right(engine: str, reports: Reports, fault: str) -> bool | None:
    """Whether all unaffected gradients are right; None if there are none."""
    if fault in REFUSED and not engine.startswith("raw"):
        return None
    names = [name for name in "abcd" if name not in FAULTY.get(fault, "b")]
    if not names:
        return None
    return all(line["parts"].get(name) == "right" for line in reports.values() for name in names)


def row(engine: str, fault: str, runs: int, most: int, folder: Path) -> dict[str, Any]:
    """Run a fault `most` times, with as many jobs as that needs."""
    run_reports: list[Reports] = []
    jobs = failures = 0
    while len(run_reports) < runs and jobs - failures < most:
        jobs += 1
        place = folder / f"{engine}-{fault}-{jobs}".replace(" ", "-")
        before = len(run_reports)
        run_reports += job(engine, fault, before, runs, place)
        failures += len(run_reports) == before
        if failures > MOST_FAILURES:
            raise SystemExit(f"{engine}: the ranks do not meet: {(place / 'log').read_text()}")
    lines = [line for reports in run_reports for line in reports.values()]
    right = [others_right(engine, reports, fault) for reports in run_reports]
    usable = [
        all(line["usable"] for line in reports.values() if line["outcome"] != LEFT_OUT)
        for reports in run_reports
    ]
    return {
        "engine": engine,
        "fault": fault,
        "runs": len(run_reports),
        "jobs": jobs,
        "outcomes": dict(Counter(map(verdict, run_reports))),
        "others": None if right[0] is None else sum(map(bool, right)),
        "usable": sum(usable),
        "verified": dict(Counter(line["seen"] for line in lines if line.get("seen") is not None)),
        "said": next((line["said"] for line in reversed(lines) if line.get("said")), ""),
    }


def cells_of(result_row: dict[str, Any]) -> list[tuple[str, ...]]:
    """Write a row's cells without the engine: a line for each outcome, the most frequent first."""
    runs = result_row["runs"]
    lines: list[tuple[str, ...]] = []
    for text, count in sorted(result_row["outcomes"].items(), key=lambda item: -item[1]):
        others = "none" if result_row["others"] is None else f"{result_row['others']} of {runs}"
        rest = ["", ""] if lines else [others, f"{result_row['usable']} of {runs}"]
        if result_row["verified"] and not lines:
            names = ", ".join(f"`{name}`" for name in max(result_row["verified"]).split())
            text += f"; `verify_gradients` names {names}" if names else "; nothing is named"
        lines.append((text, f"{count} of {runs}", *rest))
    return lines


def names_of(engines: list[str], fault: str) -> str:
    """Name engines; if all engines of mlstate are meant, name them together."""
    mlstate_engines = {
        name for name in ENGINES if not name.startswith("raw") and is_applicable(name, fault)
    }
    if mlstate_engines <= set(engines):
        rest = [ENGINES[name] for name in engines if name not in mlstate_engines]
        return ", ".join(["all groups of mlstate", *rest])
    return ", ".join(ENGINES[name] for name in engines)


def table(rows: list[dict[str, Any]]) -> str:
    """Write the table in Markdown; engines with the same results share lines."""
    alike: dict[Any, list[str]] = {}
    for fault in FAULTS:
        for result_row in rows:
            if result_row["fault"] == fault:
                engines = alike.setdefault((fault, tuple(cells_of(result_row))), [])
                engines.append(result_row["engine"])
    cells = []
    for (fault, listed), engines in alike.items():
        first, *others = listed
        cells.append([FAULTS[fault], names_of(engines, fault), *first])
        cells += [["", "", *other] for other in others]
    head = [f"rank {ODD}", "engine", "what the ranks see", "in", "others right", "usable after"]
    return markdown(head, cells)


def main() -> None:
    """Print the table that the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--jobs", type=int, default=5, help="at most, where each run needs one of its own"
    )
    parser.add_argument("--json", type=Path, help="write all that is known here, too")
    options = parser.parse_args()
    rows, left_out = [], []
    with tempfile.TemporaryDirectory(prefix="mlstate-faults-") as name:
        for engine in options.engines:
            reason = reason_against(engine)
            if reason:
                left_out.append(f"{ENGINES[engine]} is left out: {reason}")
                continue
            for fault in options.faults:
                if not is_applicable(engine, fault):
                    continue
                result_row = row(engine, fault, options.runs, options.jobs, Path(name))
                print(f"{engine}, {fault}: {result_row['outcomes']}", file=sys.stderr, flush=True)
                rows.append(result_row)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table(rows))
    print(
        f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} processors, "
        f"{WORLD} ranks, timeout {SECONDS:g} s."
    )
    for text in left_out:
        print(text)


if __name__ == "__main__":
    main()
