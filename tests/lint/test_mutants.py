"""tools/mutants.py changes code only, and its tests tell a mutant that is noticed from another."""

import mutants
import pytest

PYTHON = '''"""A sum < 3."""
LIMIT = 3  # < 4


def is_below(numbers):
    check(numbers)
    return bool(numbers) and sum(numbers) < LIMIT
'''
C = """#define LIMIT 3 /* < 4 */
int is_below(const int *numbers, int n) {
    check(numbers, "a < b");
    return n > 0 && !is_empty(numbers);
}
"""
TEST = """from toy import check, is_below
def test_the_limit_is_not_below():
    assert is_below([2])
    assert not is_below([3])
"""


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        (
            "toy.py",
            PYTHON,
            [
                ("bound", "return bool(numbers) and sum(numbers) <= LIMIT"),
                ("call", "pass"),
                ("constant", "LIMIT = 4  # < 4"),
                ("operator", "return bool(numbers) or sum(numbers) < LIMIT"),
            ],
        ),
        (
            "toy.c",
            C,
            [
                ("bound", "return n >= 0 && !is_empty(numbers);"),
                ("call", "(void)0;"),
                ("constant", "return n > 1 && !is_empty(numbers);"),
                ("operator", "return n > 0 && is_empty(numbers);"),
                ("operator", "return n > 0 || !is_empty(numbers);"),
            ],
        ),
    ],
)
def test_each_operator_bound_constant_and_call_is_changed(source, text, expected):
    found = [(mutant.kind, mutant.after) for mutant in mutants.mutants(source, text, -1)]
    assert sorted(found) == expected


def test_a_mutant_is_killed_or_survives_and_the_source_is_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "WORK", tmp_path)
    tree = tmp_path / "python"
    (tree / "tests").mkdir(parents=True)
    text = PYTHON + "\n\ndef check(numbers):\n    pass\n"
    (tree / "toy.py").write_text(text)
    (tree / "tests" / "test_toy.py").write_text(TEST)
    test = {
        "test": "tests/test_toy.py",
        "seconds": 5,
        "fails": [],
        "lines": {"toy.py": (1 << 20) - 1},
    }
    rows = [
        mutants.try_mutant(mutant, [test], seconds=60)
        for mutant in mutants.mutants("toy.py", text, -1)
        if mutant.kind in ("bound", "call")
    ]
    assert [(row["kind"], row["python"]["outcome"], row["c"]["outcome"]) for row in rows] == [
        ("bound", "killed", "not reached"),
        ("call", "survived", "not reached"),
    ]
    assert rows[0]["python"]["test"] == "tests/test_toy.py::test_the_limit_is_not_below"
    assert (tree / "toy.py").read_text() == text
