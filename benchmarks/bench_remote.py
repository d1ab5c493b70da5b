"""Checkpoints in an object store compared with obstore, boto3 and torch DCP.

``python benchmarks/bench_remote.py [--quick] [--json] [--store]``; needs moto[server] and obstore.
boto3, and torch with s3fs, take part if they are installed. The store is moto's S3 server in
another process of this machine, so the figures contain no network. See docs/object_stores.md.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import numpy as np
from harness import Report, Run, main
from remote_clients import RANKS, Arrays, Boto3, Client, Dcp, Mlstate, Obstore, expect, part_of
from remote_server import RemoteServer
from resident import forget_peak, peak, trim
from rows import Lines, Row, Way, verdict

MIB = 1 << 20
SIZES = (64, 256)  # MiB of the state
METHODS = ("PUT", "GET", "POST")
NEEDED = ("moto", "flask", "obstore")


def way_of(server: RemoteServer, call: Callable[[], Any], expected: Arrays | None = None) -> Way:
    """Measure time, processor time, memory, requests and bytes of a call.

    `expected` is the state that it must return.
    """

    def measure() -> dict[str, float]:
        trim()
        server.take()
        before = forget_peak()
        cpu, start = time.process_time(), time.perf_counter()
        result = call()
        elapsed = time.perf_counter() - start
        figures = {"ms": elapsed * 1e3, "CPU ms": (time.process_time() - cpu) * 1e3}
        figures["peak MiB"] = peak() - before
        if expected is not None and result is not None:
            expect(result, expected)
        counts = server.take()
        figures |= {f"{name} MiB": counts.pop(name, 0) / MIB for name in ("sent", "received")}
        figures |= {name: counts.pop(name, 0) for name in METHODS} | {"other": 0}
        figures["other"] = sum(counts.values())
        return figures | (result if isinstance(result, dict) and "staged ms" in result else {})

    return Way(measure, measures_itself=True)


def make_state(mib: int) -> Arrays:
    """Return float32 tensors of 16 MiB, or of half the state if it is small."""
    nbytes = min(16, mib // 2) * MIB
    draw = np.random.default_rng(1)
    return {
        f"layer.{i}": draw.standard_normal((nbytes // 4096, 1024), np.float32)
        for i in range(mib * MIB // nbytes)
    }


def rows_of(clients: dict[str, Any], server: RemoteServer, mib: int) -> Iterator[Row]:
    """Compare writes and reads of a whole state, and reads of one eighth of the rows."""
    client = clients["mlstate"]
    versions = dict.fromkeys(name for each in clients.values() for name in each.versions())
    size = f"{len(client.state)} tensors, {mib} MiB"
    options: dict[str, Any] = {
        "note": ", ".join([f"moto {metadata.version('moto')}", *versions]),
        "frees": False,
        "rounds": 64 / max(mib, 64),
        "base": "",
    }

    saves = {f"{name} save": way_of(server, each.save) for name, each in clients.items()}
    own_saves = {
        "mlstate save": saves.pop("mlstate save"),
        "mlstate save_async": way_of(server, client.save_async),
    }
    yield Row(f"save: {size}", own_saves, saves, **options)
    loads = {f"{n} load": way_of(server, each.load, each.state) for n, each in clients.items()}
    yield Row(f"load: {size}", {"mlstate load": loads.pop("mlstate load")}, loads, **options)
    part = part_of(client.state)
    nbytes = sum(array.nbytes for array in part.values())
    names = "mlstate load", "mlstate load, verify=False"
    calls = client.rows, partial(client.rows, verify=False)

    def judge(lines: Lines) -> list[str]:
        for line in lines.values():
            line.extra["bytes / rows"] = f"{line.extra['received MiB'] * MIB / nbytes:.4f}"
        ratios = {name: float(lines[name].extra["bytes / rows"]) for name in names}
        return [verdict(f"[{name}] bytes / rows", ratio, 1.1) for name, ratio in ratios.items()]

    yield Row(
        f"load one of {RANKS} parts of the rows: {size}",
        {name: way_of(server, call, part) for name, call in zip(names, calls, strict=True)},
        {"obstore get_ranges": way_of(server, clients["obstore"].rows, part)},
        judge=judge,
        **options,
    )


def kinds_of(report: Report) -> list[type[Client]]:
    """Return the clients whose packages are installed; print the reason for the others."""
    kinds: list[type[Client]] = []
    for kind in (Mlstate, Obstore, Boto3, Dcp):
        missing = kind.missing()
        if missing:
            report.log(f"{kind.name} does not take part: not installed: {missing}")
        else:
            kinds.append(kind)
    return kinds


def measuring(run: Run) -> Iterator[Row]:
    """Measure each size of the state in a new bucket."""
    warnings.filterwarnings("ignore", module="torch")
    kinds = kinds_of(run.report)
    missing = ", ".join(name for name in NEEDED if find_spec(name) is None)
    if missing:
        run.log(f"nothing was measured: not installed: {missing}")
        return
    with RemoteServer() as server:
        for mib in (16,) if run.quick else SIZES:
            server.reset()
            state = make_state(mib)
            clients = {kind.name: kind(state, server.endpoint, run.folder) for kind in kinds}
            yield from rows_of(clients, server, mib)


if __name__ == "__main__":
    title = "mlstate: checkpoints in an object store"
    parts = {"remote": measuring}
    main(__doc__, "remote", title, parts, quick="one round of 16 MiB", rounds=(4, 1))
