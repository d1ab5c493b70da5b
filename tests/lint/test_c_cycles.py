"""C files do not depend on each other in cycles, by includes or by calls."""

import re
from graphlib import CycleError, TopologicalSorter

import house
import pytest

FILES = house.c_files(house.CORE, house.BINDINGS)
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
# A definition starts in the first column: everything up to the name, and the parameters.
FUNCTION = re.compile(r"^(?!static |typedef |#)[A-Za-z_][^;{}#=()]*?\b(mls\w*)\s*\([^;{}]*\)\s*\{")
TABLE = re.compile(r"^(?!static |extern |typedef )[A-Za-z_][\w \*]*?\b(mls\w+)(?:\[[^\]]*\])? = \{")


def definitions(path):
    """Names of the functions and tables that a source defines with external linkage."""
    if path.suffix != ".c":
        return set()
    code = house.c_code(path)
    return {
        match.group(1)
        for expression in (FUNCTION, TABLE)
        for match in re.finditer(expression.pattern, code, re.MULTILINE)
    }


def test_no_two_files_need_each_other():
    home = {name: path for path in FILES for name in definitions(path)}
    assert len(home) > 500, "the expression for definitions misses most of them"
    by_name = {path.name: path for path in FILES}
    graph = {}
    for path in FILES:
        needed = {by_name[name.split("/")[-1]] for name in INCLUDE.findall(path.read_text("utf-8"))}
        if path.suffix == ".c":
            words = set(re.findall(r"\bmls\w+", house.c_code(path)))
            needed |= {home[word] for word in words if word in home}
        graph[house.relative(path)] = {house.relative(other) for other in needed - {path}}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("these files need each other: " + " -> ".join(error.args[1]))
