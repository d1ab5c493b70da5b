"""Files that the repository must contain, and files that it must not."""

import ast
import functools
import re

import house
import pytest
from file_purposes import purpose_of, source_files

THIS = "tests/lint/test_repository.py"
# Modules without behaviour.
UNTESTED = {"__init__", "__main__", "_version", "_types"}

FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(work|root|home)/\w|/Users/\w|[A-Z]:\\\\?Users",
    "a package index": r"--(extra-)?index-url|--find-links|pythonhosted|PIP_INDEX|\bnexus\.",
    "an issue number": r"(?i)(?<!numpy )(?<!coremltools )(?<!torch )\bissues? #?\d|\(#\d+\)",
    "how it was written": r"(?i)\b(this|earlier|later|previous|next|each|another) session\b",
    "a marker of unfinished work": r"\b(TODO|FIXME|XXX|HACK)\b",
    "a merge conflict": r"^(<<<<<<<|>>>>>>>) ",
}


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_no_file_holds(kind):
    pattern = re.compile(FORBIDDEN[kind], re.MULTILINE)
    bad = []
    for path, text in house.text_files():
        if house.relative(path) == THIS or path.name == "LICENSE":
            continue
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            bad.append(f"{house.relative(path)}:{line}: {match.group()!r}")
    assert not bad, "\n".join(bad)


def test_no_large_or_built_file_is_kept():
    built = {".so", ".o", ".a", ".pyc", ".whl", ".egg", ".dylib"}
    for path in house.tracked_files():
        assert path.suffix not in built, house.relative(path)
        assert path.stat().st_size < 2 << 20, house.relative(path)


def test_each_source_file_tells_its_purpose():
    assert [path for path in source_files() if not purpose_of(path)] == []


@pytest.mark.parametrize("path", house.python_files(), ids=house.relative)
def test_each_module_has_a_docstring_and_all(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not tree.body:
        return
    assert ast.get_docstring(tree), f"{house.relative(path)} has no docstring"
    public = not any(part.startswith("_") for part in path.relative_to(house.PACKAGE).parts)
    if public:
        assigned = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(target, ast.Name)
        }
        assert "__all__" in assigned, f"{house.relative(path)} has no __all__"


@functools.cache
def imported_by(path):
    """Stems of the package's modules that a module imports from, at once or on first use."""
    stems = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            names = [node.module or "", *(alias.name for alias in node.names)]
            stems.update(name.rsplit(".", 1)[-1] for name in names)
        elif (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "_NAMES"
            and isinstance(node.value, ast.Dict)
        ):
            keys = [ast.unparse(key).strip("'") for key in node.value.keys]
            stems.update(key.rsplit(".", 1)[-1] for key in keys)
    return stems


def module_name(path):
    return path.parent.name if path.stem == "__init__" else path.stem


def is_private(path):
    return any(part.startswith("_") for part in path.relative_to(house.PACKAGE).parts)


def test_each_module_has_a_test():
    """`x.py` has a test_x.py; `_y.py` has one, or serves a module that has one."""
    files = list(house.TESTS.rglob("test_*.py"))
    tests, folders = {path.stem for path in files}, {path.parent.name for path in files}
    tested = set()
    missing = {}
    for path in house.python_files():
        parts = path.relative_to(house.PACKAGE).with_suffix("").parts
        name = "_".join(part for part in parts if part != "__init__").lstrip("_")
        if path.stem in UNTESTED and path.parent == house.PACKAGE:
            continue
        stem = module_name(path)
        test_names = (f"test_{name}", f"test_{parts[0]}", f"test_{stem.lstrip('_')}")
        if tests.intersection(test_names) or (path.stem == "__init__" and stem in folders):
            tested.add(path)
        elif path.stem != "__init__" or "\nfrom ." in path.read_text(encoding="utf-8"):
            missing[path] = f"tests/test_{name}.py"
    grew = True
    while grew:  # a private module is tested through the tested modules that import it
        served = set().union(*(imported_by(path) for path in tested))
        grew = {path for path in missing if is_private(path) and module_name(path) in served}
        tested |= grew
        for path in grew:
            del missing[path]
    assert not missing, "\n".join(f"{house.relative(p)}: no {t}" for p, t in missing.items())
