"""Requests and bytes of many followers of one folder, local and in an object store.

``python benchmarks/followers_table.py [--followers N]`` prints a table in Markdown. A publisher
changes 1 % of a small model in each step. The followers are in a few processes, which work at the
same time, and are checked against the published weights. In the store (moto's S3 server, on this
machine) its log counts the requests and the bytes of answers without headers; in the folder the
system counts the read calls and the bytes that they return.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from harness import load
from processes import Processes, answer
from remote_server import BUCKET, RemoteServer, storage_options

from mlstate.follow import Follower, Publisher

PROCESSES = 4
TENSORS, SHAPE, CHANGED = 4, (64, 1024), 0.01
ANCHOR_EVERY = 8
LARGE = 10_000  # followers, on paper

Arrays = dict[str, np.ndarray]
Counts = tuple[int, int]  # requests or reads, and bytes


def weights_of(step: int) -> Arrays:
    """Return the weights of a step; 1 % of the elements change in each."""
    random = np.random.default_rng(0)
    weights = {f"layers.{i}": random.standard_normal(SHAPE, np.float32) for i in range(TENSORS)}
    weights = {name: array.astype(np.float16) for name, array in weights.items()}
    for _ in range(step):
        for array in weights.values():
            array.flat[random.integers(array.size, size=int(CHANGED * array.size))] += 1
    return weights


def read_counts() -> Counts:
    """Return the read calls of this process, and the bytes that they returned."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["syscr"]), int(counts["rchar"])


def serve(pipe: Connection, count: int, path: str, options: dict[str, Any] | None) -> None:
    """Hold followers until the pipe is closed."""
    followers: list[tuple[Follower, Arrays]] = []

    def counted(call: Callable[[], object]) -> Counts:
        before = read_counts()
        call()
        return tuple(b - a for a, b in zip(before, read_counts(), strict=True))  # type: ignore[return-value]

    def start() -> None:
        for _ in range(count):
            copy = {f"layers.{i}": np.zeros(SHAPE, np.float16) for i in range(TENSORS)}
            followers.append((Follower(path, into=copy, storage_options=options), copy))

    def poll() -> None:
        for follower, _ in followers:
            assert follower.poll() is None

    def advance() -> None:
        for follower, _ in followers:
            follower.advance()

    def check(step: int) -> None:
        expected = weights_of(step)
        for follower, copy in followers:
            assert follower.version == step
            assert all(np.array_equal(copy[name], expected[name]) for name in expected)

    commands = {"poll": partial(counted, poll), "advance": partial(counted, advance)}
    answer(pipe, commands | {"start": start, "check": check})


def run(
    path: str,
    followers: int,
    options: dict[str, Any] | None = None,
    server: RemoteServer | None = None,
    cache: str | None = None,
) -> list[tuple[str, float, float, float]]:
    """Return name, requests and bytes per follower, and seconds of each operation of all.

    `cache`: beginning of the name of a cache folder for each process, as for a host.
    """
    publisher = Publisher(path, anchor_every=ANCHOR_EVERY, storage_options=options)
    hosts = [options] * PROCESSES
    if options is not None and cache is not None:
        hosts = [options | {"cache_folder": f"{cache}{host}"} for host in range(PROCESSES)]
    workers = Processes(serve, [(followers // PROCESSES, path, each) for each in hosts])
    rows = []
    step = -1

    def publish(count: int) -> None:
        nonlocal step
        for _ in range(count):
            step += 1
            publisher.publish(step, weights_of(step))

    def ask(name: str, command: str) -> None:
        if server is not None:
            server.take()
        start = time.perf_counter()
        answers = workers.ask(command)
        seconds = time.perf_counter() - start
        if server is None:
            requests, nbytes = (sum(numbers) for numbers in zip(*answers, strict=True))
        else:
            counts = server.take()
            nbytes = counts.pop("received")
            requests = sum(counts.values()) - counts.pop("sent", 0)
        workers.ask("check", step)
        rows.append((name, requests / followers, nbytes / followers, seconds))

    try:
        workers.ask("start")
        publish(1)
        ask("first version", "advance")
        ask("poll, nothing new", "poll")
        publish(1)
        ask("next step", "advance")
        publish(5)
        ask("5 steps at once", "advance")
        publish(ANCHOR_EVERY - 6)
        ask("the rest of the chain", "advance")
    finally:
        workers.close()
    return rows


def print_table(title: str, label: str, rows: list[Any], followers: int) -> None:
    """Print the figures of one place."""
    heads = f"| {title} | {label} each | bytes each | {label} of {followers:,} | MB | seconds |"
    print(heads + f" {label} of {LARGE:,} | MB |")
    print("| --- |" + " --- |" * 7)
    for name, requests, nbytes, seconds in rows:
        cells = [f"{requests:.2f}", f"{nbytes:,.0f}"]
        cells += [f"{requests * followers:,.0f}", f"{nbytes * followers / 1e6:,.2f}"]
        cells += [f"{seconds:.1f}", f"{requests * LARGE:,.0f}", f"{nbytes * LARGE / 1e6:,.1f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--followers", type=int, default=1000)
    followers = parser.parse_args().followers // PROCESSES * PROCESSES
    nbytes = sum(array.nbytes for array in weights_of(0).values())
    print(f"{followers:,} followers of {nbytes:,} bytes in {PROCESSES} processes; {load()}\n")
    with tempfile.TemporaryDirectory() as folder, RemoteServer() as server:
        rows = run(f"{folder}/weights", followers)
        print_table("local folder", "reads", rows, followers)
        options = storage_options(server.endpoint)
        rows = run(f"s3://{BUCKET}/weights", followers, options, server)
        print_table("object store", "requests", rows, followers)
        rows = run(f"s3://{BUCKET}/cached", followers, options, server, f"{folder}/cache")
        print_table(f"object store, {PROCESSES} caches", "requests", rows, followers)


if __name__ == "__main__":
    main()
