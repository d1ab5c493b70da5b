"""Limits for the length and complexity of functions."""

import statistics

import house
import pytest

lizard = pytest.importorskip("lizard", reason="lizard measures the functions")
code_lines = pytest.importorskip("code_lines", reason="needs tools/ of a checkout")

MEDIAN_LINES = 15
P90_LINES = 50
MAX_LINES = 120
P90_COMPLEXITY = 9
MAX_PYTHON_COMPLEXITY = 18
SIMPLE = ("mlstate/checkpoint/", "mlstate/integrations/torch/_checkpoint/")


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


def test_lines_of_code_are_counted_by_language():
    python = '"""A docstring."""\n\nx = """text\nof a value"""  # a comment\n'
    c = "/* A comment.\n * More. */\nint x; // why\n\n#define Y 1\n"
    assert code_lines.python_lines(python) == code_lines.c_lines(c) == 2


def test_helpers_are_outside_tests():
    text = "def make():\n    return 1\n\n\ndef test_make():\n    # why\n    assert make()\n"
    assert code_lines.lines_of_tests(text) == 2


def test_each_capability_has_files():
    names = map(house.relative, house.tracked_files())
    capabilities = {code_lines.capability_of(name) for name in names}
    assert capabilities == {*code_lines.CAPABILITIES, "shared"}
