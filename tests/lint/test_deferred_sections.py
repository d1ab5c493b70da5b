"""A section of deferred interrupts runs to its end: it contains neither `yield` nor `await`."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mlstate"
PAUSES = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_section(node):
    """Return whether a statement is `with deferred_interrupts()`."""
    if not isinstance(node, ast.With):
        return False
    return any("deferred_interrupts" in ast.unparse(item.context_expr) for item in node.items)


def pauses_in(node):
    """Return the lines of the pauses in a statement, except in functions that it defines."""
    lines = [node.lineno] if isinstance(node, PAUSES) else []
    for child in ast.iter_child_nodes(node):
        lines += [] if isinstance(child, DEFINITIONS) else pauses_in(child)
    return lines


def pauses_of(source):
    """Return the lines at which sections of a source pause."""
    sections = filter(is_section, ast.walk(ast.parse(source)))
    return [line for section in sections for line in pauses_in(section)]


def test_no_section_of_deferred_interrupts_pauses():
    assert {
        str(path): lines
        for path in PACKAGE.rglob("*.py")
        if "deferred_interrupts" in (text := path.read_text()) and (lines := pauses_of(text))
    } == {}


@pytest.mark.parametrize("pause", ["yield", "yield from x", "x = yield", "f((yield))"])
def test_a_section_that_pauses_is_refused(pause):
    source = (
        f"def f():\n    with _core.deferred_interrupts():\n        if x:\n            {pause}\n"
    )
    assert pauses_of(source) == [4]
    assert not pauses_of(f"with deferred_interrupts():\n    def f():\n        {pause}\n")
