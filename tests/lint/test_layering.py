"""Dependencies point one way: core <- bindings <- package <- integrations <- command line.

Inside each, folders have an order too: `CORE_ORDER`, `BINDING_ORDER`, `PACKAGE_ORDER`.
"""

import ast
import graphlib
import re

import house
import pytest

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
# fmt: off
C_LIBRARY = {
    "assert", "errno", "fenv", "float", "inttypes", "limits", "math", "stdarg", "stdatomic",
    "stdbool", "stddef", "stdint", "stdio", "stdlib", "string", "time",
}
POSIX = {
    "dirent", "fcntl", "pthread", "sched", "signal", "sys/auxv", "sys/file", "sys/mman",
    "sys/random", "sys/stat", "sys/sysctl", "sys/types", "sys/uio", "sys/utsname", "unistd",
}
LINUX = {"linux/futex", "sys/syscall", "sys/vfs"}  # each within its own #if
APPLE = {"mach/mach"}  # likewise
INTRINSICS = {"arm_acle", "arm_neon", "cpuid", "immintrin", "nmmintrin", "wmmintrin", "x86intrin"}
# fmt: on

# Each folder includes or imports only itself and folders of the lines above its own.
CORE_ORDER = (
    ("base", "simd"),
    ("runtime", "array", "activation"),
    ("crc32c", "sharding", "planning"),
    ("array/copy",),
    ("io", "kv", "state", "state/diff", "gradients/reduce"),
    ("safetensors", "gradients", "follow"),
    ("collectives", "checkpoint/storage"),
    ("checkpoint/index",),
    ("checkpoint/read",),
    ("checkpoint/write", "checkpoint/ranks", "prompts"),
)
BINDING_ORDER = (
    ("common",),
    ("arguments",),
    ("array",),
    ("dictionaries",),
    ("activation", "checkpoint", "gradients", "io", "kv", "prompts", "runtime", "state"),
    ("follow",),
    (".",),
)
# A folder without a line belongs to the folder that it is in; `.` is the package's own modules.
PACKAGE_ORDER = (
    ("_types", "_version", "_core"),
    ("errors",),
    ("_common",),
    ("_exports",),
    ("_sharding",),
    ("threads", "state", "kv", "activation", "collectives", "_info"),
    ("coreai", "coreml", "fsdp", "_safetensors"),
    ("checkpoint/_folder/_remote",),
    ("checkpoint/_folder",),
    ("checkpoint/_store",),
    ("distributed",),
    ("checkpoint", "prompts"),
    ("plot", "follow"),
    (".",),
    ("integrations/torch/_tensors",),
    ("integrations/torch/_activation", "integrations/torch/_checkpoint"),
    ("integrations/torch/_collectives", "integrations/torch/_gradients"),
    ("integrations/torch", "integrations/mpi", "integrations"),
    ("integrations/lightning", "integrations/transformers", "integrations/mlx"),
    ("testing", "demo"),
    ("cli",),
    ("__main__",),
)
ALLOWED_BACK = {
    ("kv", "coreml"): "mlstate.kv has two functions of mlstate.coreml, imported on first use",
}

# Frameworks and tools that `import mlstate` must not need: imported on use only.
OPTIONAL = {
    "torch",
    "coremltools",
    "coreai",
    "matplotlib",
    "zstandard",
    "obstore",
    "ml_dtypes",
    "safetensors",
    "mpi4py",
    "tqdm",
    "rich",
    "shtab",
    "transformers",
    "mlx",
    "mlx_lm",
    "yaml",
}
ALLOWED = {"numpy"}


def includes(path):
    return INCLUDE.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", house.c_files(house.CORE), ids=house.relative)
def test_core_includes_only_itself_and_the_c_and_posix_libraries(path):
    allowed = {f"{name}.h" for name in C_LIBRARY | POSIX | LINUX | APPLE | INTRINSICS}
    for bracket, name in includes(path):
        if bracket == '"':
            assert (house.CORE / name).is_file(), f'#include "{name}" leaves csrc/core'
        else:
            assert name in allowed, f"#include <{name}> is neither C11 nor POSIX"


@pytest.mark.parametrize("path", house.c_files(house.BINDINGS), ids=house.relative)
def test_bindings_include_only_project_headers(path):
    for bracket, name in includes(path):
        if bracket == '"':
            inside = (house.BINDINGS / name).is_file() or (house.CORE / name).is_file()
            assert inside, f'#include "{name}" is of neither csrc/python nor csrc/core'


# What a Swift package compiles, and libmlstate_kv.a holds.
KV_FOLDERS = ("base", "runtime", "array", "kv")
KV_WITHOUT = "csrc/core/array/copy/measure_copies.c"  # it needs checksums


def test_kv_library_needs_only_its_folders():
    headers = {"array", "base", "kv", "runtime", "simd"}
    folders = [house.CORE / name for name in KV_FOLDERS]
    for path in house.c_files(house.PUBLIC, *folders):
        if house.relative(path.with_suffix(".c")) == KV_WITHOUT:
            continue
        for bracket, name in includes(path):
            is_public = path.parent == house.PUBLIC and (house.INCLUDE / name).is_file()
            assert bracket == "<" or is_public or name.split("/")[0] in headers, path
    for file in ("tools/core.mk", "Package.swift"):
        text = (house.ROOT / file).read_text(encoding="utf-8")
        listed = re.search(r"^KV_FOLDERS := (.*)$", text, re.MULTILINE)
        names = listed[1].split() if listed else re.findall(r'"csrc/core/(\w+)",', text)
        assert tuple(names) == KV_FOLDERS and KV_WITHOUT in text, file


@pytest.mark.parametrize("path", house.c_files(house.INCLUDE), ids=house.relative)
def test_public_headers_include_only_the_c_library(path):
    assert {name for _, name in includes(path)} <= {"stddef.h", "stdint.h"}


def imports(path):
    """(line, absolute module name, "top" | "typing" | "inner") of every import of a file."""
    package = house.module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    imported = []

    def names(node):
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        start = package[: len(package) - node.level + 1] if node.level else []
        parent = ".".join(start + ([node.module] if node.module else []))
        return [f"{parent}.{alias.name}" for alias in node.names]

    def walk(nodes, where):
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported.extend((node.lineno, name, where) for name in names(node))
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                walk(node.body, "typing")
                walk(node.orelse, where)
            else:
                inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                walk(ast.iter_child_nodes(node), "inner" if inner else where)

    walk(ast.parse(path.read_text(encoding="utf-8")).body, "top")
    return imported


@pytest.mark.parametrize("path", house.python_files(), ids=house.relative)
def test_no_optional_framework_is_imported_at_the_top(path):
    bad = [
        f"{house.relative(path)}:{line}: import {name}"
        for line, name, where in imports(path)
        if where == "top" and name.split(".")[0] in OPTIONAL
    ]
    assert not bad, "import it inside the function that needs it:\n" + "\n".join(bad)


@pytest.mark.parametrize("path", house.python_files(), ids=house.relative)
def test_only_numpy_is_imported_from_outside(path):
    import sys

    allowed = set(sys.stdlib_module_names) | ALLOWED | OPTIONAL | {"mlstate"}
    bad = [
        f"{house.relative(path)}:{line}: import {name}"
        for line, name, _ in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert not bad, "not in the dependencies:\n" + "\n".join(bad)


def places_of(order):
    """Return {folder: its line in an order}."""
    return {folder: line for line, folders in enumerate(order) for folder in folders}


def arrows_back(arrows, order):
    """Return the arrows (from, to, where) that do not point to a line above."""
    place = places_of(order)
    return [
        f"{where}: {source} needs {other}"
        for source, other, where in arrows
        if source != other and (source, other) not in ALLOWED_BACK and place[other] >= place[source]
    ]


@pytest.mark.parametrize(
    ("root", "order"),
    [(house.CORE, CORE_ORDER), (house.BINDINGS, BINDING_ORDER)],
    ids=["core", "python"],
)
def test_folders_include_only_folders_above_them(root, order):
    arrows = [
        (
            path.parent.relative_to(root).as_posix(),
            name.rpartition("/")[0] or ".",
            f"{house.relative(path)}: {name}",
        )
        for path in house.c_files(root)
        for bracket, name in includes(path)
        if bracket == '"' and (root / name).is_file()
    ]
    assert len(arrows) > 100
    assert {source for source, _, _ in arrows} <= set(places_of(order)), "a folder without a line"
    bad = arrows_back(arrows, order)
    assert not bad, "\n".join(bad)


def package_folder(parts):
    """Return the longest beginning of a module's path that has a line in the package's order."""
    order = places_of(PACKAGE_ORDER)
    for length in range(len(parts), 0, -1):
        name = "/".join(parts[:length])
        if name in order:
            return name
    return None


def test_packages_import_only_packages_above_them():
    arrows = []
    for path in house.python_files():
        own_folder = package_folder(house.module_name(path).split(".")[1:]) or "."
        for line, name, where in imports(path):
            other = package_folder(name.split(".")[1:])
            if where != "typing" and name.startswith("mlstate.") and other:
                arrows.append((own_folder, other, f"{house.relative(path)}:{line}"))
    assert len(arrows) > 500
    bad = arrows_back(arrows, PACKAGE_ORDER)
    assert not bad, "\n".join(bad)


def runtime_imports():
    """Return {module: modules of the package that it imports}, also inside functions.

    A package loads the names on first use that its `__init__` imports for type checkers.
    """
    modules = {house.module_name(path): path for path in house.python_files()}
    graph = {}
    for module, path in modules.items():
        targets = set()
        for _, name, where in imports(path):
            while name not in modules and name.startswith("mlstate.") and name != "mlstate._core":
                name = name.rpartition(".")[0]
            if name in modules and (where != "typing" or path.name == "__init__.py"):
                targets.add(name)
        graph[module] = targets - {module}
    assert sum(map(len, graph.values())) > 500
    return graph


def cycles_of(graph):
    """Return a text for each set of nodes that reach each other, with the arrows inside it."""
    reached = {}
    for start in graph:
        reached[start], left = set(), [start]
        while left:
            new = graph[left.pop()] - reached[start]
            reached[start] |= new
            left.extend(new)
    cycles = {frozenset(b for b in reached[a] if a in reached[b]) for a in graph} - {frozenset()}
    return [
        f"a cycle of {len(cycle)}:\n"
        + "\n".join(
            f"  {node} -> {', '.join(sorted(graph[node] & cycle))}" for node in sorted(cycle)
        )
        for cycle in sorted(cycles, key=sorted)
    ]


def test_modules_have_no_cycle_of_imports():
    cycles = cycles_of(runtime_imports())
    remedy = "move the code that both files need to a third one, or pass a function"
    assert not cycles, "\n".join([f"{remedy}; imports inside functions count:", *cycles])


MOST_FLOORS = 9


def test_checkpoint_has_few_floors():
    """Rooms are the files and folders directly in the folder; a room is above its imports."""
    package = "mlstate.checkpoint"
    graph = {}
    for module, targets in runtime_imports().items():
        if module.startswith(package):
            room, *others = (".".join(name.split(".")[:3]) for name in (module, *targets))
            inside = {other for other in others if other.startswith(package)}
            graph[room] = graph.get(room, set()) | inside - {room}
    cycles = cycles_of(graph)
    assert not cycles, "\n".join(["rooms import each other:", *cycles])
    floors = []
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()
    while sorter.is_active():
        floors.append(sorter.get_ready())
        sorter.done(*floors[-1])
    table = "\n".join(f"{n}: {', '.join(sorted(rooms))}" for n, rooms in enumerate(floors, 1))
    assert len(floors) <= MOST_FLOORS, f"{len(floors)} floors, from below:\n{table}"
