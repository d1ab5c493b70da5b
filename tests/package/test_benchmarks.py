"""The guard fails for slow operations, and the benchmark page shows the stored results."""

import importlib
import json
import re
import sys
import time
from pathlib import Path

import child
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
MIB = 1 << 20

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs a checkout"),
]


@pytest.fixture
def module(monkeypatch):
    """Import a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


class Clock:
    """A clock that calls advance by given times."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def taking(self, *seconds):
        """A call that takes these times in turn."""
        turn = iter(range(1 << 30))

        def call():
            self.now += seconds[next(turn) % len(seconds)]

        return call


def measured(module, simple, mlstate_times, nbytes=4 * MIB, tensors=1, seconds=100.0, fixed_us=0.0):
    paired, clock = module("paired"), Clock()
    case = paired.Case(
        clock.taking(*simple), clock.taking(*mlstate_times), tensors, fixed_us=fixed_us
    )
    (pair,) = paired.measure_pairs(case, nbytes, (1,), seconds, lambda count: None, clock)
    return pair


@pytest.mark.parametrize("name", ["moe_model", "mpi_jobs", "resume_jobs"])
def test_benchmarks_find_the_helpers_of_the_tests(module, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if Path(p).parent != ROOT / "tests"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    helper = module("from_tests").import_from_tests(name)
    assert (ROOT / "tests") in Path(helper.__file__).parents
    assert module("from_tests").import_from_tests("no_such_helper") is None


# ---- the statistic ----


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (12, 3), (24, 7), (48, 17), (96, 38)])
def test_median_interval_uses_binomial_ranks(module, count, rank):
    interval = module("paired").median_interval([float(n) for n in range(count, 0, -1)])
    assert interval == (rank, count + 1 - rank)


@pytest.mark.parametrize(
    ("mlstate_seconds", "verdict", "rounds"),
    [(0.010, "ok", 6), (0.0104, "ok", 6), (0.0112, "SLOW", 6), (0.050, "SLOW", 6)],
)
def test_a_constant_ratio_is_decided_after_six_rounds(module, mlstate_seconds, verdict, rounds):
    pair = measured(module, [0.010], [mlstate_seconds])
    assert (pair.verdict(), len(pair.ours)) == (verdict, rounds)


def test_single_slow_round_is_tolerated(module):
    pair = measured(module, [0.010], [0.010] * 6 + [0.090])
    assert pair.verdict() == "ok"


def test_a_ratio_at_the_bound_stays_open(module):
    pair = measured(module, [0.010], [0.009, 0.0125])
    assert pair.verdict() == "open"
    assert len(pair.ours) == 96


def test_an_undecided_pair_ends_when_its_time_is_over(module):
    pair = measured(module, [0.010], [0.009, 0.0125], seconds=0.4)
    assert pair.verdict() == "open"
    assert 6 <= len(pair.ours) < 30


def test_clearly_faster_long_call_ends_after_two_rounds(module):
    pair = measured(module, [1.0], [0.5])
    assert (pair.verdict(), len(pair.ours)) == ("ok", 2)


@pytest.mark.parametrize(
    ("extra_us", "tensors", "verdict"),
    [(5.5, 1, "ok"), (6.5, 1, "SLOW"), (900, 1000, "ok"), (1100, 1000, "SLOW")],
)
def test_small_operations_may_cost_microseconds(module, extra_us, tensors, verdict):
    pair = measured(module, [10e-6], [10e-6 + extra_us * 1e-6], MIB, tensors)
    assert pair.verdict() == verdict


@pytest.mark.parametrize(
    ("extra_us", "nbytes", "verdict"),
    [
        (250, MIB, "ok"),
        (400, MIB, "SLOW"),
        (250, 4 * MIB, "ok"),
        (400, 4 * MIB, "SLOW"),
        (250, 16 * MIB, "SLOW"),
    ],
)
def test_fixed_cost_is_allowed_up_to_4_mib(module, extra_us, nbytes, verdict):
    pair = measured(module, [1e-3], [1e-3 + extra_us * 1e-6], nbytes, fixed_us=250)
    assert pair.verdict() == verdict


def test_with_a_fixed_cost_a_good_ratio_is_enough_at_4_mib(module):
    pair = measured(module, [0.1], [0.104], fixed_us=250)
    assert (pair.verdict(), pair.extra[0] > pair.allowed_us) == ("ok", True)


# ---- the guard ----


def run_guard(module, call, *options):
    """Run the guard on one operation that replaces an empty call."""
    rows, paired, guard = module("guard_rows"), module("paired"), module("bench_guard")

    def build(nbytes, tensors):
        return paired.Case(paired.no_op, call)

    operation = rows.Operation("injected", "nothing", build, sizes=(MIB, 4 * MIB))
    return guard.main(["--only", "injected", *options], (operation,))


def test_a_slow_operation_fails_the_guard_and_is_named(module, capsys, tmp_path):
    assert run_guard(module, lambda: time.sleep(1e-3), "--folder", str(tmp_path)) == 1
    printed = capsys.readouterr().out
    for threads in ("1 thread:", "2 threads:"):
        assert f"SLOW injected, 1 MiB, {threads}" in printed
        assert f"SLOW injected, 4 MiB, {threads}" in printed


def test_a_row_that_is_slow_only_once_passes(module, tmp_path):
    built = []
    paired, rows, guard = module("paired"), module("guard_rows"), module("bench_guard")

    def build(nbytes, tensors):
        built.append(nbytes)
        slow = len(built) == 1
        return paired.Case(
            lambda: time.sleep(0 if slow else 2e-3), lambda: time.sleep(2e-3 if slow else 0)
        )

    operation = rows.Operation("injected", "nothing", build, sizes=(4 * MIB,), threads=(1,))
    assert guard.main(["--only", "injected", "--folder", str(tmp_path)], (operation,)) == 0
    assert built == [4 * MIB, 4 * MIB]


def test_the_guard_runs_as_a_script(tmp_path):
    command = [sys.executable, FOLDER / "bench_guard.py", "--quick", "--json"]
    command += ["--only", "kv.decode_mask", "--sizes", "65536", "--folder", tmp_path]
    done = child.finished(command, folder=ROOT)
    assert done.returncode in (0, 1), done.stderr  # times on a busy machine may vary either way
    document = json.loads(done.stdout)
    assert [table["title"] for table in document["tables"]] == ["kv.decode_mask"]
    assert [row["threads"] for row in document["tables"][0]["rows"]] == [1, 2]
    assert not list(tmp_path.iterdir())


def test_a_slow_row_alone_is_measured_again(module, monkeypatch):
    rows, guard = module("guard_rows"), module("bench_guard")
    asked = []

    def measure_size(operation, nbytes, tensors, threads):
        asked.append(threads)
        return [{"threads": count, "verdict": "ok", "again": True} for count in threads]

    monkeypatch.setattr(guard, "measure_size", measure_size)
    operation = rows.Operation("injected", "nothing", lambda nbytes, tensors: None)
    first = [{"threads": 1, "verdict": "ok"}, {"threads": 2, "verdict": "SLOW"}]
    confirmed = guard.confirmed(operation, first, (MIB, 1))
    assert asked == [(2,)]
    assert confirmed == [first[0], {"threads": 2, "verdict": "ok", "again": True}]
    assert guard.confirmed(operation, first[:1], (MIB, 1)) == first[:1]
    assert asked == [(2,)]


def test_the_page_lists_each_fixed_cost_and_memory_has_none(module, tmp_path):
    rows, files = module("guard_rows"), module("guard_files")
    page = module("summary").PAGE.read_text(encoding="utf-8")
    listed = page.partition("## Where mlstate loses")[2]
    assert not any(operation.fixed_us for operation in rows.MEMORY)
    others = (*module("guard_ranks").RANKS, *files.operations(tmp_path))
    costly = [operation for operation in others if operation.fixed_us]
    assert costly
    for operation in costly:
        assert operation.why
        assert f"| `{operation.name}` | {operation.fixed_us:,.0f} |" in listed


def test_simple_collectives_match_mlstate(module):
    np, ranks = module("numpy"), module("guard_ranks")
    rows = module("guard_rows")
    a, b = rows.filled(4096, "f4", 1), rows.filled(4096, "f4", 2)
    half = len(a) // 2
    gathered = np.concatenate((a[:half], b[half:]))
    for operation, expected in (
        ("all_reduce", [a + b, a + b]),
        ("all_gather", [gathered, gathered]),
        ("broadcast", [np.zeros_like(a), a]),
    ):
        outs, barrier = [np.zeros_like(a), np.zeros_like(a)], ranks.threading.Barrier(2)
        parts = [ranks.simple_part(operation, r, (a, b), outs, barrier) for r in range(2)]
        peer = ranks.Peer()
        peer.run(*parts)
        peer.close([])
        for out, right in zip(outs, expected, strict=True):
            assert np.array_equal(out, right), operation


def test_the_simple_load_refuses_damaged_files(module, tmp_path):
    files = module("guard_files")
    state = {"w": module("numpy").ones(1024, "f4")}
    files.write_each(state, tmp_path / "folder", sums=True)
    (tmp_path / "folder" / "w").write_bytes(bytes(4096))
    for load in (files.read_each, lambda folder: files.read_into(folder, state)):
        with pytest.raises(ValueError, match="damaged"):
            load(tmp_path / "folder")


def test_both_ways_of_each_operation_run_at_its_smallest_size(module, tmp_path):
    rows, files = module("guard_rows"), module("guard_files")
    for operation in (*rows.MEMORY, *module("guard_ranks").RANKS, *files.operations(tmp_path)):
        if operation.needs is None:
            continue
        case = operation.build(min(operation.sizes), 1)
        for before, call, after in (
            (case.before_simple, case.simple, case.after_simple),
            (case.before_ours, case.ours, case.after_ours),
        ):
            before()
            call()
            after()
        case.close()


# ---- object stores ----


def test_store_benchmark_counts_bytes_and_requests():
    for package in ("moto.server", "obstore"):
        pytest.importorskip(package)
    command = [sys.executable, FOLDER / "bench_remote.py", "--quick", "--json"]
    done = child.finished(command, folder=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    save, load, part = json.loads(done.stdout)["tables"]
    for table, moved, requests in ((save, "sent MiB", "PUT"), (load, "received MiB", "GET")):
        counted = [row for row in table["rows"] if moved in row]
        assert {row["name"].split()[0] for row in counted} >= {"mlstate", "obstore"}
        for row in counted:
            assert float(row[moved]) >= 16 and row[requests] >= 1, row
    assert len(part["aims"]) == 2
    assert all(aim.endswith(", met") for aim in part["aims"])


def test_store_client_without_its_package_is_skipped(module, monkeypatch, capsys):
    bench, ways, harness = module("bench_remote"), module("remote_clients"), module("harness")
    monkeypatch.setattr(ways.Obstore, "needs", ("json",))
    monkeypatch.setattr(ways.Mlstate, "needs", ())
    monkeypatch.setattr(ways.Boto3, "needs", ("json", "no_such_package"))
    monkeypatch.setattr(ways.Dcp, "needs", ("no_such_package", "nor_this"))
    kinds = bench.kinds_of(harness.Report("test", as_json=False))
    assert kinds == [ways.Mlstate, ways.Obstore]
    printed = capsys.readouterr().out
    assert "boto3 does not take part: not installed: no_such_package\n" in printed
    assert "torch DCP does not take part: not installed: no_such_package, nor_this\n" in printed


# ---- attention sizes ----


def test_the_window_with_sinks_is_the_attention_of_the_mask(module):
    bench, np = module("bench_attention"), module("numpy")
    kv = module("mlstate.kv")
    keys, values = np.random.default_rng(1).standard_normal((2, 3, 50, 8))
    query = np.random.default_rng(2).standard_normal((3, 1, 8))
    for sinks in (0, 4):
        mask = kv.create_decode_mask(50, 12, 49, sinks=sinks, dtype="f8")[0]
        window = bench.attend_window(query, keys, values, 49 - 12, sinks)
        np.testing.assert_allclose(bench.attend(query, keys, values, mask), window, rtol=1e-12)


def test_prompts_have_full_attention_and_the_rest_a_reduced_one(module):
    bench = module("bench_attention")
    rows = bench.reduced_rows(16, 4)[0, 0]
    seen = (rows == 0).sum(axis=1)
    assert seen[: bench.PROMPT].tolist() == list(range(1, bench.PROMPT + 1))
    assert set(seen[bench.PROMPT :].tolist()) == {17 + 4}
    assert bench.same_start([1, 2, 3], [1, 2, 4]) == 2 and bench.same_start([1], [1]) == 1


def test_the_page_on_attention_shows_the_stored_results(module):
    """Run ``python benchmarks/attention_figures.py --write`` after results were stored."""
    figures, stored = module("attention_figures"), module("stored")
    document, tables = figures.find_tables(stored.stored_files())
    page = figures.PAGE.read_text(encoding="utf-8")
    assert page == figures.filled_in(page, tables)
    assert document["date"] in page
    for name in re.findall(r"figures/(\w+\.svg)", page):
        text = (figures.FIGURES / name).read_text(encoding="utf-8")
        ink = figures.INKS[name.removesuffix(".svg").rpartition("_")[2]]
        assert "<svg" in text and f"fill: {ink}" in text


# ---- stored results ----

XEON = (
    "processor: 0\nmodel name\t: Intel(R) Xeon(R) CPU @ 2.50GHz\ncpu family\t: 6\nmodel\t\t: 85\n"
)
EPYC = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n"
GRAVITON = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        (XEON, "intel-xeon-cpu-2-50ghz-family-6-model-85"),
        (EPYC, "amd-epyc-family-25-model-1"),
        (GRAVITON, "arm64-implementer-0x41-part-0xd40"),
    ],
)
def test_each_processor_has_a_results_folder(module, text, folder):
    stored = module("stored")
    assert stored.slug_of(stored.parse_cpu_info(text)) == folder


def test_a_processor_without_a_name_falls_back_on_the_machine(module, monkeypatch, tmp_path):
    stored = module("stored")
    monkeypatch.setattr(stored, "CPU_INFO", tmp_path / "missing")
    monkeypatch.setattr(stored.sys, "platform", "other")
    monkeypatch.setattr(stored.platform, "processor", lambda: "")
    monkeypatch.setattr(stored.platform, "machine", lambda: "riscv64")
    assert stored.processor() == {"name": "riscv64", "slug": "riscv64"}


def test_benchmarks_of_one_day_share_a_file(module, tmp_path):
    stored = module("stored")
    where = {"name": "A", "slug": "a"}

    def store(benchmark, title, median):
        rows = [{"name": "x", "median": median}]
        run = {"command": f"run {title}", "tables": [{"title": title, "rows": rows}]}
        return stored.store(benchmark, run, "2026-01-02", where, tmp_path)

    store("kv", "one", 1.0)
    store("kv", "two", 2.0)
    store("kv", "one", 3.00001)
    path = store("file", "one", 4.0)
    (document,) = stored.stored_files(tmp_path)
    assert path == tmp_path / "a" / "2026-01-02.json"
    tables = document["benchmarks"]["kv"]["tables"]
    assert {t["title"]: (t["command"], t["rows"][0]["median"]) for t in tables} == {
        "one": ("run one", 3.0),
        "two": ("run two", 2.0),
    }
    assert list(document["benchmarks"]) == ["file", "kv"]


def test_stored_results_record_machine_and_date(module):
    stored = module("stored")
    paths = sorted(stored.RESULTS.glob("*/*.json"))
    assert paths
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        assert document["processor"]["name"]
        assert (document["processor"]["slug"], document["date"]) == (path.parent.name, path.stem)
        for run in document["benchmarks"].values():
            assert {"title", "machine", "command", "load", "tables"} <= run.keys(), path


def test_the_page_shows_the_stored_results(module):
    """Run ``python benchmarks/summary.py --write`` after results were stored."""
    summary, stored = module("summary"), module("stored")
    page = summary.PAGE.read_text(encoding="utf-8")
    assert page == summary.filled_in(page, stored.stored_files())
    assert page.count("\n") <= 200


def test_the_summary_takes_the_newest_run_and_marks_losses(module):
    summary = module("summary")
    key = summary.KEYS[0]

    def document(date, median):
        rows = [{"name": key.ours, "median": median}, {"name": key.other, "median": 10.0}]
        run = {"tables": [{"title": key.table + " at", "unit": "ms", "rows": rows}]}
        processor = {"name": "P", "slug": "p"}
        return {"processor": processor, "date": date, "benchmarks": {key.benchmark: run}}

    old, new = document("2026-01-01", 5.0), document("2026-01-02", 20.0)
    assert summary.summary([new, old]).splitlines()[2].endswith("| **20 ms, 0.5x** |")
    assert summary.summary([old]).splitlines()[2].endswith("| 5 ms, 2x |")
