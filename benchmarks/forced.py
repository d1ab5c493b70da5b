"""Processes that each force one variant by the environment, and their turns.

mlstate reads `MLSTATE_COPY` and `MLSTATE_CPU` at import, so a variant needs its own process.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

from harness import option_parser

WARM_UP = 2  # rounds


def server_parser(text: str) -> argparse.ArgumentParser:
    """Return a parser with the options of the benchmarks and of their servers."""
    parser = option_parser(text, "few rounds")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def answer(
    calls_of: Callable[[str], dict[str, Callable[[], object]]], threads: int, repeats: int = 1
) -> None:
    """Answer lines "case, tab, name" with the nanoseconds of `repeats` calls."""
    import mlstate

    mlstate.set_num_threads(threads)
    cases: dict[str, dict[str, Callable[[], object]]] = {}
    for line in sys.stdin:
        case, name = line.rstrip("\n").split("\t")
        if case not in cases:
            cases.clear()
            cases[case] = calls_of(case)
            cases[case][name]()
        call = cases[case][name]
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        print(time.perf_counter_ns() - start, flush=True)


class Server:
    """A process that forces a variant: it runs `script` with --serve, which calls `answer`."""

    def __init__(self, script: str, forced: dict[str, str], *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, script, "--serve", *options],
            env={**os.environ, **forced},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, case: str, name: str) -> int:
        """Return the nanoseconds of a call."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(case, name, sep="\t", file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def take_turns(
    case: str, asks: dict[str, tuple[Server, str]], rounds: int, unit: float
) -> dict[str, list[float]]:
    """Ask each server for its call once a round, in a shuffled order; times by name."""
    samples: dict[str, list[float]] = {name: [] for name in asks}
    order = random.Random(7)
    for turn in range(WARM_UP + rounds):
        for name in order.sample(list(asks), len(asks)):
            server, call = asks[name]
            elapsed = server.ask(case, call)
            if turn >= WARM_UP:
                samples[name].append(elapsed * unit)
    return samples
