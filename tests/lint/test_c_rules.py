"""Rules for C that compilers do not check."""

import re

import house
import pytest

ALL = house.c_files(house.CORE, house.BINDINGS, house.PUBLIC)
SOURCES = [path for path in ALL if path.suffix == ".c"]

# Tables that CPython's API takes as pointers to non-const; it does not write to them.
API_TABLES = {"PyMethodDef", "PyModuleDef", "PyModuleDef_Slot", "PyType_Slot", "PyType_Spec"}
API_TABLES |= {"PyMemberDef", "PyGetSetDef"}


@pytest.mark.parametrize("path", SOURCES, ids=house.relative)
def test_heap_is_reached_through_mem_only(path):
    if path == house.CORE / "base/memory.c":
        return
    bad = house.matches(r"\b(malloc|calloc|realloc|reallocarray|free|strdup|strndup)\s*\(", path)
    assert not bad, "use mls_alloc and mls_free (mem.h):\n" + "\n".join(bad)


@pytest.mark.parametrize("path", ALL, ids=house.relative)
def test_no_function_that_cannot_be_used_safely(path):
    names = "strcpy|strcat|strncpy|strncat|sprintf|vsprintf|gets|strtok|alloca|atoi|atol|tmpnam"
    bad = house.matches(rf"\b({names}|mktemp|setjmp|longjmp|system|strerror)\s*\(", path)
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("path", house.c_files(house.BINDINGS), ids=house.relative)
def test_texts_of_files_are_not_kept_for_good(path):
    keys = re.findall(r"\bPyDict_SetItemString\s*\([^,]*,\s*([^,]+)", house.c_code(path))
    bad = [key for key in keys if not key.startswith('"')]
    assert not bad, f"Python interns these keys: use mlspy_dict_set: {bad}"


@pytest.mark.parametrize("path", ALL, ids=house.relative)
def test_no_mutable_static(path):
    if path == house.BINDINGS / "runtime/py_deferred_interrupts.c":
        return  # a process has one table of signal handlers
    code = house.c_code(path)
    bad = []
    for match in re.finditer(r"^[ \t]*static\s+([^;={(]*)([;={(])", code, re.MULTILINE):
        declaration, end = match.groups()
        words = re.findall(r"\w+", declaration)
        if end == "(" or "const" in words or "inline" in words:
            continue  # a function, or read-only
        if not API_TABLES.intersection(words):
            line = code.count("\n", 0, match.start()) + 1
            bad.append(f"{house.relative(path)}:{line}: static {declaration.strip()}")
    assert not bad, "keep it in the module's state or the caller's storage:\n" + "\n".join(bad)


@pytest.mark.parametrize("path", house.c_files(house.BINDINGS), ids=house.relative)
def test_the_gil_is_taken_back(path):
    code = house.c_code(path)
    pairs = [
        (r"\bPy_BEGIN_ALLOW_THREADS\b", r"\bPy_END_ALLOW_THREADS\b"),
        (r"\bPyEval_SaveThread\b", r"\bPyEval_RestoreThread\b"),
        (r"\bPyGILState_Ensure\b", r"\bPyGILState_Release\b"),
        (r"\bPy_BEGIN_CRITICAL_SECTION2?\b", r"\bPy_END_CRITICAL_SECTION2?\b"),
    ]
    for opening, closing in pairs:
        opened, closed = (len(re.findall(p, code)) for p in (opening, closing))
        assert opened == closed, f"{opening} {opened} times, {closing} {closed} times"


@pytest.mark.parametrize("path", house.c_files(house.BINDINGS), ids=house.relative)
def test_no_way_out_while_the_gil_is_released(path):
    code = house.c_code(path)
    pattern = r"Py_BEGIN_ALLOW_THREADS.*?Py_END_ALLOW_THREADS"
    pattern += r"|^ *(?:MLSPY_WITHOUT_GIL|WHILE_LOCKED|RUN_\w+)\(.*?\);\n"
    for match in re.finditer(pattern, code, re.DOTALL | re.MULTILINE):
        line = code.count("\n", 0, match.start()) + 1
        escape = re.search(r"\b(return|goto|Py\w*_\w+\s*\()", match.group())
        assert not escape, f"{house.relative(path)}:{line}: {escape.group()} without the GIL"


@pytest.mark.parametrize("path", house.c_files(house.CORE), ids=house.relative)
def test_core_names_carry_the_prefix(path):
    """Types, macros and constants of headers: mls_noun, MLS_X."""
    if path.suffix != ".h":
        return
    code = house.c_code(path)
    macros = re.findall(r"^\s*#\s*define\s+(\w+)", code, re.MULTILINE)
    types = re.findall(r"^}\s*(\w+);", code, re.MULTILINE)
    bad = [name for name in macros if not name.startswith(("MLS_", "mls_"))]
    bad += [name for name in types if not name.startswith("mls_")]
    assert not bad, f"{house.relative(path)} defines {bad}"


def test_each_core_source_has_a_c_test():
    tests = {path.stem for path in (house.TESTS / "core").rglob("test_*.c")}
    missing = [
        f"csrc/core/{path.name}: tests/core/test_{house.base_name(path.stem)}.c"
        for path in house.CORE.rglob("*.c")
        if f"test_{house.base_name(path.stem)}" not in tests
    ]
    assert not missing, "no test:\n" + "\n".join(missing)


def test_each_instruction_set_has_a_scalar_source():
    stems = {path.stem for path in house.CORE.rglob("*.c")}
    for stem in stems:
        if house.base_name(stem) != stem:
            assert house.base_name(stem) in stems, f"{stem}.c has no {house.base_name(stem)}.c"
