"""Limits for the length of files and functions."""

import statistics

import house
import pytest

lizard = pytest.importorskip("lizard", reason="lizard measures the functions")

MEDIAN_LINES = 15
P90_LINES = 50
MAX_LINES = 120
P90_COMPLEXITY = 9
MAX_PYTHON_COMPLEXITY = 18
SIMPLE = ("mlstate/checkpoint/", "mlstate/integrations/torch/_checkpoint/")
MAX_FILE_LINES = 900
HEADER_COMMENTS = 0.40
C_TESTS_PER_CORE_LINE = 0.5


def functions(*folders):
    rows = []
    for path in house.c_files(*folders):
        analysis = lizard.analyze_file(str(path))
        rows += [(f.length, f.cyclomatic_complexity, f.name, path) for f in analysis.function_list]
    assert rows
    return rows


def percentile_90(values):
    return sorted(values)[int(0.9 * len(values))]


@pytest.mark.parametrize("folder", [house.CORE, house.BINDINGS, house.PUBLIC], ids=house.relative)
def test_functions_are_short_and_simple(folder):
    rows = functions(folder)
    lines = [f[0] for f in rows]
    too_long = [f"{house.relative(p)}: {n} has {x} lines" for x, _, n, p in rows if x > MAX_LINES]
    assert not too_long, "\n".join(too_long)
    assert statistics.median(lines) <= MEDIAN_LINES
    assert percentile_90(lines) <= P90_LINES
    complexity = percentile_90([f[1] for f in rows])
    worst = sorted(rows, key=lambda f: -f[1])[:8]
    assert complexity <= P90_COMPLEXITY, [(c, n, house.relative(p)) for _, c, n, p in worst]


def test_functions_of_checkpoints_are_simple():
    paths = [path for path in house.python_files() if house.relative(path).startswith(SIMPLE)]
    rows = [
        (function.cyclomatic_complexity, f"{house.relative(path)}: {function.name}")
        for path in paths
        for function in lizard.analyze_file(str(path)).function_list
    ]
    assert len(rows) > 500
    complex_ones = sorted((row for row in rows if row[0] > MAX_PYTHON_COMPLEXITY), reverse=True)
    assert not complex_ones, "split these functions by their steps:\n" + "\n".join(
        f"{complexity:3} {name}" for complexity, name in complex_ones
    )


def source_files():
    kinds = {".c", ".h", ".py", ".pyi", ".sh", ".mk"}
    return [path for path in house.tracked_files() if path.suffix in kinds]


@pytest.mark.parametrize("path", source_files(), ids=house.relative)
def test_file_can_be_read_in_one_sitting(path):
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES, f"{house.relative(path)} has {lines} lines: split it"


def counted(path):
    """(non-blank lines, lines with a comment) of a C file."""
    total = comments = 0
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if not text:
            continue
        total += 1
        opened = text.rfind("/*")
        comments += inside or opened >= 0 or "//" in text
        if inside:
            inside = "*/" not in text
        elif opened >= 0:
            inside = "*/" not in text[opened:]
    return total, comments


def test_headers_are_commented():
    paths = [
        p for p in house.c_files(house.CORE, house.BINDINGS, house.INCLUDE) if p.suffix == ".h"
    ]
    counts = {house.relative(path): counted(path) for path in paths}
    total, comments = (sum(column) for column in zip(*counts.values(), strict=True))
    poorest = sorted(counts, key=lambda name: counts[name][1] / counts[name][0])[:8]
    missing = int(HEADER_COMMENTS * total) - comments
    assert comments >= HEADER_COMMENTS * total, (
        f"{comments / total:.0%} of lines are comments, {HEADER_COMMENTS:.0%} asked "
        f"({missing} lines); "
        f"poorest: {', '.join(poorest)}"
    )


def code_lines(folder):
    """Lines with code: the core's many comments need no tests."""
    return sum(sum(map(bool, house.c_code(p).split("\n"))) for p in house.c_files(folder))


def test_c_tests_are_half_the_core():
    core, tests = code_lines(house.CORE), code_lines(house.TESTS / "core")
    assert tests >= C_TESTS_PER_CORE_LINE * core, f"{tests} lines test {core} lines of core"
