#!/usr/bin/env python3
"""Change one operator, bound, constant or call at a time; record which tests fail.

    mutants.py --map            first: run each test file alone, note the lines that it reaches;
                                delete build/mutants/map before it if sources have changed
    mutants.py                  try 150 mutants of csrc and 150 of mlstate, and print a summary
    mutants.py --only FILE      try mutants of these sources only
    mutants.py --baseline FILE  also name the mutants that only an earlier run noticed

A mutant is tried with the C and Python tests that reach its line: first those whose lines are
mostly of its source or whose names are like it, and no more than fit the time of a side
(--seconds).  A test file without a map is tried if its name is like the source.  A test that fails
must fail again.  The draw depends on the seed and on the mutated line only, so that other versions
get the same mutants.  Outcomes are appended to --results, and those there are not tried again.  All
of it happens in copies, below build/mutants.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tokenize
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from code_lines import C_TOKENS
from copy_tree import ROOT, copy_tree

WORK = ROOT / "build" / "mutants"
OBJECTS = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"  # of setup.py
SEED = 54
TIMEOUT = -1000  # an exit status that no process has
PYTEST = ["-m", "pytest", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-x"]
# Not tests of one side: rules of the house, other machines, long attacks, C tests from Python.
LEFT_OUT = ("core/", "lint/", "gpu/", "hosts/", "faults/", "leaks/", "package/test_core_c.py")

BOUNDS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
BOTH = BOUNDS | {"==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "/": "*", "%": "*"}
BOTH |= {"+=": "-=", "-=": "+=", "&": "|", "<<": ">>", ">>": "<<"}
OPERATORS = {
    "c": BOTH | {"&&": "||", "||": "&&", "|": "&"},  # in Python, types have |
    "python": BOTH
    | {"and": "or", "or": "and", "is not": "is", "is": "is not", "not in": "in", "in": "not in"}
    | {"//": "*"},
}
NEGATION = {"c": r"!(?=[\w(])", "python": r"\bnot (?!in\b)"}
TRUTHS = {"true": "false", "false": "true", "True": "False", "False": "True"}
CALL = {"c": r"^ +(?!assert)([\w.>\[\]-]+\(.*\);)$", "python": r"^ +([\w.]+\(.*\))$"}
COMMON_WORDS = {"c", "core", "csrc", "mlstate", "py", "python", "test", "tests"}  # of paths
NO_CALL = {"c": "(void)0;", "python": "pass"}

Test = dict[
    str, Any
]  # a test file: its name, time, failures without mutants, reached lines as bits


class Mutant(NamedTuple):
    """One change of a source."""

    source: str  # relative to the root
    line: int
    kind: str
    before: str  # the line, without indentation
    after: str
    repeat: int  # the number of equal changes of equal lines before it in the source
    text: str  # the changed source


# ---- mutants ----


def blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def code_only(text: str, language: str) -> str:
    """Return a source whose comments, strings and directives are replaced by spaces."""
    if language == "c":
        return re.sub(r"^#.*(?:\\\n.*)*", blank, C_TOKENS.sub(blank, text), flags=re.MULTILINE)
    starts = [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            text = text[:start] + re.sub(r"[^\n]", " ", text[start:end]) + text[end:]
    return text


def changes(code: str, language: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield kind, start, end and the new text of each possible change."""
    operators = OPERATORS[language]
    longest_first = sorted(map(re.escape, operators), key=len, reverse=True)
    for match in re.finditer(rf"(?<= )(?:{'|'.join(longest_first)})(?=\s)", code):
        yield "bound" if match[0] in BOUNDS else "operator", *match.span(), operators[match[0]]
    for match in re.finditer(NEGATION[language], code):
        yield "operator", *match.span(), ""
    for match in re.finditer(r"(?<![\w.])(?:\d+|true|false|True|False)(?![\w.])", code):
        yield "constant", *match.span(), TRUTHS.get(match[0]) or str(int(match[0]) + 1)
    for match in re.finditer(CALL[language], code, flags=re.MULTILINE):
        yield "call", *match.span(1), NO_CALL[language]


def mutants(source: str, text: str, lines: int) -> Iterator[Mutant]:
    """Yield the mutants of a source on its lines with code, the bits of `lines`."""
    language = language_of(source)
    repeats: collections.Counter[tuple[str, str]] = collections.Counter()
    for kind, start, end, new in changes(code_only(text, language), language):
        line = text.count("\n", 0, start) + 1
        if lines >> line & 1:
            first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
            before = text[first:last].strip()
            after = (text[first:start] + new + text[end:last]).strip()
            changed = text[:start] + new + text[end:]
            yield Mutant(source, line, kind, before, after, repeats[before, after], changed)
            repeats[before, after] += 1


def language_of(path: str) -> str:
    return "python" if path.endswith(".py") else "c"


def draw(language: str, code: dict[str, int]) -> Iterator[Mutant]:
    """Yield the mutants of a language in the order of the seed, the kinds in turn."""

    def all_of(source: str) -> Iterator[Mutant]:
        return mutants(source, (WORK / language / source).read_text(), code[source])

    kinds: dict[str, list[tuple[bytes, str, int]]] = collections.defaultdict(list)
    for source in (source for source in code if language_of(source) == language):
        for i, mutant in enumerate(all_of(source)):
            name = f"{SEED}|{source}|{mutant.before}|{mutant.after}|{mutant.repeat}"
            kinds[mutant.kind].append((hashlib.sha256(name.encode()).digest(), source, i))
    turns = itertools.zip_longest(*(sorted(kinds[kind]) for kind in sorted(kinds)))
    for _, source, i in filter(None, itertools.chain.from_iterable(turns)):
        yield next(itertools.islice(all_of(source), i, None))


# ---- tests ----


def crowding() -> float:
    """Return how many times longer a process takes now than on a quiet machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def run(
    command: list[Any], folder: Path, seconds: float, grace: float = 0, **variables: str
) -> tuple[int, str]:
    """Run a command with its children; return its exit status and output."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MLSTATE_")} | variables
    with subprocess.Popen(
        command,
        cwd=folder,
        env=variables | {"PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            for number, wait in ((signal.SIGINT, grace), (signal.SIGKILL, 60)):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)  # after SIGINT, coverage.py notes the lines
                    process.wait(timeout=wait)
            return TIMEOUT, process.communicate()[0]
        return process.returncode, output


def command(tests: list[str], skipped: list[str] | None = None) -> list[Any]:
    """Return the command of a C test, or test files of Python without the tests `skipped`."""
    if language_of(tests[0].partition("::")[0]) == "python":
        return [sys.executable, *PYTEST, *tests, *(f"--deselect={name}" for name in skipped or ())]
    return [f"build/core/tests/{tests[0].removeprefix('tests/core/').removesuffix('.c')}"]


def build(tree: Path, tests: list[str], coverage: str = "") -> tuple[int, str]:
    """Compile the changed files of a tree, and link C tests; return exit status and output."""
    variables = {"MLSTATE_COVERAGE": "1"} if coverage else {}
    setup = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    status, output = run(setup, tree, 900, **variables)
    if status == 0 and tests:
        make = ["make", "-s", "-j2", "-f", "tools/core.mk", "BUILD=build/core", "OPT=-O0"]
        make += [f"EXTRA={coverage}", f"LIB={OBJECTS}/libmlstate.a"]
        status, output = run([*make, *(command([test])[0] for test in tests)], tree, 900)
    return status, output


def failures(output: str) -> list[str]:
    """Return the tests that failed by the summary of pytest or of a C test."""
    failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, flags=re.MULTILINE)
    return sorted(set(failed))


def gcov(tree: Path, objects: list[Path]) -> Iterator[tuple[str, int, int]]:
    """Yield source, line and count of each line with code in objects compiled for coverage."""
    if objects:
        call = ["gcov", "-j", "-t", *objects]
        reports = subprocess.run(call, cwd=tree, capture_output=True, text=True, check=True).stdout
        for file in itertools.chain.from_iterable(
            json.loads(report)["files"] for report in reports.splitlines()
        ):
            if file["file"].startswith("csrc/"):
                for line in file["lines"]:
                    yield file["file"], line["line_number"], line["count"]


def lines_with_code(tree: Path) -> dict[str, int]:
    """Return the lines with code of each source, as bits."""
    lines: collections.Counter[str] = collections.Counter()
    for source, line, _ in gcov(tree, list((tree / OBJECTS).rglob("*.gcno"))):
        lines[source] |= 1 << line
    for path in (tree / "mlstate").rglob("*.py"):
        codes = [compile(path.read_text(), path, "exec")]
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if hasattr(constant, "co_lines")]
            for _, _, line in code.co_lines():
                lines[str(path.relative_to(tree))] |= 1 << (line or 0)
    return lines


def reach(test: str, tree: Path, seconds: float) -> Test:
    """Run a test file alone, and its processes; return its time and the lines."""
    from coverage import CoverageData

    folder = tree / "build" / "reached" / test
    folder.mkdir(parents=True, exist_ok=True)
    call = command([test])
    if language_of(test) == "python":
        call = [sys.executable, "-m", "coverage", "run", *(w for w in call[1:] if w != "-x")]
    start = time.monotonic()
    where = {"GCOV_PREFIX": str(folder), "COVERAGE_FILE": str(folder / "coverage")}
    status, output = run(call, tree, seconds, grace=60, **where)
    elapsed = (time.monotonic() - start) / crowding()
    if language_of(test) == "c":  # without coverage it takes a fraction of the time
        start = time.monotonic()
        run(call, WORK / "c", seconds)
        elapsed = (time.monotonic() - start) / crowding()
    lines: collections.Counter[str] = collections.Counter()
    counters = list(folder.rglob("*.gcda"))
    for file in counters:  # gcov expects the compiler's notes in the same folder
        notes = Path("/", file.relative_to(folder)).with_suffix(".gcno")
        file.with_suffix(".gcno").symlink_to(notes)
    for source, line, count in gcov(tree, counters):
        lines[source] |= bool(count) << line
    for file in folder.glob("coverage.*"):
        data = CoverageData(file)
        data.read()
        for source in data.measured_files():
            for line in data.lines(source) or ():
                lines[os.path.relpath(source, tree)] |= 1 << line
    shutil.rmtree(folder)
    fails = failures(output)
    return {"test": test, "seconds": elapsed, "status": status, "fails": fails, "lines": lines}


def map_tests(seconds: float, folders: list[str]) -> None:
    """Note the lines of each test file in a file, two at a time; keep those that exist."""
    tree = WORK / "covered"
    copy_tree(tree)
    copy_tree(WORK / "c")
    tests = all_tests()
    c_tests = [test for test in tests if test.endswith(".c")]
    for folder, coverage in ((tree, "--coverage"), (WORK / "c", "")):
        status, output = build(folder, c_tests, coverage)
        if status:
            sys.exit(output)
    (WORK / "code.json").write_text(json.dumps(lines_with_code(tree)))
    (WORK / "map").mkdir(exist_ok=True)

    def note(test: str) -> None:
        target = WORK / "map" / f"{test.replace('/', '.')}.json"
        if not target.exists():
            target.write_text(json.dumps(reach(test, tree, seconds)))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(note, (test for test in tests if test.startswith(tuple(folders)))))


def all_tests() -> list[str]:
    """Return the test files of both sides."""
    paths = sorted((ROOT / "tests").rglob("test_*.*"))
    tests = [str(path.relative_to(ROOT)) for path in paths if path.suffix in (".c", ".py")]
    return [
        t for t in tests if t.endswith(".c") or not t.removeprefix("tests/").startswith(LEFT_OUT)
    ]


def known_tests() -> list[Test]:
    """Return all test files; those not mapped yet have no `lines`."""
    tests = []
    for test in all_tests():
        path = WORK / "map" / f"{test.replace('/', '.')}.json"
        unknown = {"test": test, "seconds": 5, "fails": [], "lines": {}}
        tests.append(json.loads(path.read_text()) if path.exists() else unknown)
    return tests


def likeness(source: str, test: str) -> float:
    """Return the share of words that two paths have in common."""
    a, b = (set(re.findall("[a-z]+", path)) - COMMON_WORDS for path in (source, test))
    return len(a & b) / len(a | b)


def choose(mutant: Mutant, tests: list[Test], side: str, seconds: float) -> tuple[int, list[Test]]:
    """Return how many tests of a side reach a mutant, and those that fit a time, best first."""
    ranks: list[tuple[float, Test]] = []
    for test in (test for test in tests if language_of(test["test"]) == side):
        like = likeness(mutant.source, test["test"])
        reached = test["lines"].get(mutant.source, 0)
        if reached >> mutant.line & 1 or (not test["lines"] and like):
            size = sum(lines.bit_count() for lines in test["lines"].values())
            like += reached.bit_count() / max(size, 1)
            ranks.append((like / (10 + test["seconds"]), test))
    ranked = [test for _, test in sorted(ranks, key=lambda rank: rank[0], reverse=True)]
    ends = itertools.accumulate(test["seconds"] for test in ranked)
    within = [test for test, end in zip(ranked, ends, strict=True) if end <= seconds]
    return len(ranked), within or ranked[:1]


# ---- outcomes ----


def batches(tests: list[Test]) -> Iterator[list[Test]]:
    """Yield tests that run together: one C test, or 10 seconds of test files of Python."""
    batch: list[Test] = []
    for test in tests:
        batch.append(test)
        if test["test"].endswith(".c") or sum(each["seconds"] for each in batch) > 10:
            yield batch
            batch = []
    if batch:
        yield batch


def outcome(tests: list[Test], tree: Path) -> tuple[str, str]:
    """Run the tests of one side until one fails, twice; return the outcome and that test."""
    skipped = [name for test in tests for name in test["fails"]]
    for batch in batches(tests):
        names = [test["test"] for test in batch]
        limit = 3 * sum(test["seconds"] for test in batch) + 10
        limit *= crowding()
        while True:
            status, output = run(command(names, skipped), tree, limit)
            if status == TIMEOUT:
                return "timeout", " ".join(names)
            if status == 0 or status == 5:  # 5: all tests were skipped
                break
            failed = failures(output)
            again = command(failed[:1] if failed and names[0].endswith(".py") else names, skipped)
            if run(again, tree, limit)[0]:
                return "killed", failed[0] if failed else f"{names[0]}: exit status {status}"
            skipped += failed  # it fails now and then
            if names[0].endswith(".c"):
                break
    return "survived", ""


def is_valid(mutant: Mutant) -> bool:
    """Return whether Python compiles a mutant."""
    try:
        compile(mutant.text, mutant.source, "exec")
    except SyntaxError:
        return False
    return True


def compiled_of(tree: Path, source: str) -> list[Path]:
    """Return the objects whose compilation read a source, and the extension module."""
    rules = [rule for rule in (tree / "build").rglob("*.d") if source in rule.read_text()]
    modules = (tree / "build").glob("lib.*/mlstate/_core*")
    return [*(rule.with_suffix(".o") for rule in rules), *modules]


def try_mutant(mutant: Mutant, tests: list[Test], seconds: float) -> dict[str, Any]:
    """Return the outcomes of both sides; the source is restored."""
    row: dict[str, Any] = {"source": mutant.source, "line": mutant.line, "kind": mutant.kind}
    row |= {"before": mutant.before, "after": mutant.after, "repeat": mutant.repeat}
    language = language_of(mutant.source)
    tree = WORK / language
    path = tree / mutant.source
    text, times = path.read_text(), path.stat()
    chosen = {side: choose(mutant, tests, side, seconds) for side in OPERATORS}
    path.write_text(mutant.text)
    try:
        if language == "c":
            status, _ = build(tree, [test["test"] for test in chosen["c"][1]])
        if status if language == "c" else not is_valid(mutant):
            return row | {"valid": False}
        for side, (reaching, files) in chosen.items():
            result, test = outcome(files, tree) if files else ("not reached", "")
            row[side] = {"outcome": result, "test": test, "reaching": reaching}
            row[side]["chosen"] = len(files)
    finally:  # the file has its old time: objects of the mutant would count as current
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if language == "c":
            for compiled in compiled_of(tree, mutant.source):
                compiled.unlink(missing_ok=True)
    return row | {"valid": True}


def try_all(results: Path, count: int, only: list[str], seconds: float, again: bool) -> None:
    """Try the first `count` mutants of each language in turn; append the outcomes."""
    code = json.loads((WORK / "code.json").read_text())
    for language in OPERATORS:
        copy_tree(WORK / language)
        status, output = build(WORK / language, [])
        if status:
            sys.exit(output)
    earlier = {identity(row): row for row in read(results)}
    queues = {language: draw(language, code) for language in OPERATORS}
    counts = collections.Counter[str]()
    while min(counts[language] for language in queues) < count:
        for language, queue in queues.items():
            mutant = next(queue)
            row = earlier.get(identity(mutant._asdict()))
            is_wanted = row is None or (again and row["valid"] and noticed_by(row) == "survived")
            if is_wanted and (not only or mutant.source in only):
                row = try_mutant(mutant, known_tests(), seconds)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(describe(row), flush=True)
            counts[language] += row is None or row["valid"]


# ---- the summary ----


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["source"], row["before"], row["after"], row["repeat"]


def read(results: Path) -> list[dict[str, Any]]:
    """Return the last outcome of each mutant."""
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    return list({identity(row): row for row in rows}.values())


def noticed_by(row: dict[str, Any]) -> str:
    """Return the sides whose tests notice a mutant, or "survived"."""
    sides = [side for side in OPERATORS if row[side]["outcome"] in ("killed", "timeout")]
    return " and ".join(sides) or "survived"


def describe(row: dict[str, Any]) -> str:
    """Return where a mutant is, its change, and what noticed it."""
    sides = [
        f"{side}: {row[side]['outcome']} {row[side]['test']}" for side in OPERATORS if side in row
    ]
    change = f"{row['source']}:{row['line']}  {row['before']}  ->  {row['after']}"
    return f"{change}\n    {'; '.join(sides) or 'does not compile'}"


def summary(results: Path, baseline: Path | None) -> None:
    """Print how many mutants each side notices, the survivors, and those lost since a baseline."""
    rows = [row for row in read(results) if row["valid"]]
    for language in OPERATORS:
        some = [row for row in rows if language_of(row["source"]) == language]
        counts = collections.Counter(noticed_by(row) for row in some)
        timeouts = sum("timeout" in (row["c"]["outcome"], row["python"]["outcome"]) for row in some)
        print(f"{language}: {len(some)} mutants, {dict(counts)}; {timeouts} by a timeout")
    for row in rows:
        if noticed_by(row) == "survived":
            print(f"survived: {describe(row)}")
    earlier = [row for row in read(baseline) if row["valid"]] if baseline else []
    noticed = {identity(row) for row in earlier if noticed_by(row) != "survived"}
    for row in rows:
        if noticed_by(row) == "survived" and identity(row) in noticed:
            print(f"lost: {describe(row)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--map", nargs="*", metavar="TESTS", help="only files and folders TESTS")
    parser.add_argument("--count", type=int, default=150, help="mutants of csrc, and of mlstate")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60, help="of tests of a side for a mutant")
    parser.add_argument("--again", action="store_true", help="also try survivors again")
    parser.add_argument("--results", type=Path, default=WORK / "results.jsonl")
    parser.add_argument("--baseline", type=Path, help="results of another version")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("stopped"))  # the mutated source is restored
    if arguments.map is not None:
        map_tests(90, arguments.map or ["tests/"])
        return
    chosen = (arguments.count, arguments.only, arguments.seconds, arguments.again)
    try_all(arguments.results, *chosen)
    summary(arguments.results, arguments.baseline)


if __name__ == "__main__":
    main()
