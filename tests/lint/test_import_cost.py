"""`import mlstate` is nearly free; its modules cost little more than NumPy."""

import sys

import child
import numpy as np
import pytest

import mlstate

# The standard library's own costly ones, and all optional frameworks.
# fmt: off
FORBIDDEN = [
    "argparse", "asyncio", "concurrent.futures", "dataclasses", "http", "importlib.metadata",
    "logging", "multiprocessing", "sqlite3", "ssl", "unittest", "xml",
    "coreai", "coremltools", "matplotlib", "ml_dtypes", "mpi4py", "pandas", "rich", "safetensors",
    "scipy", "shtab", "torch", "tqdm",
]
# fmt: on

# Modules of the standard library that are used, those that NumPy imports excepted; `inspect` is
# among them because it makes the signatures of `load` and `save`, and not every NumPy imports it.
OF_IMPORT = {"__future__", "importlib", "importlib.machinery", "warnings"}
OF_FIRST_LOAD = {"bisect", "copy", "dataclasses", "errno", "inspect", "json"}

IMPORTED = """
import sys
for name in sys.argv[1].split(","):
    __import__(name)
before = set(sys.modules)
import mlstate
for folder in sys.argv[2:]:
    mlstate.load(folder)
new = set(sys.modules) - before
print(*sorted(name for name in new if name.split(".")[0] in sys.stdlib_module_names))
"""

CALLS_OF_IMPORT = """
import sys, numpy
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
from mlstate import coreai, coreml, errors, kv, state, threads
sys.setprofile(None)
print(calls)
"""


def test_import_loads_no_slow_module():
    names = child.run("import mlstate, sys; print(*sys.modules)").split()
    assert not {"numpy", "typing", "mlstate._core", "mlstate.state"} & set(names)


def test_modules_load_only_numpy():
    loaded = "import sys, numpy; before = set(sys.modules); "
    loaded += "from mlstate import coreai, coreml, errors, kv, state, threads; "
    names = child.run(loaded + "print(*(set(sys.modules) - before))").split()
    heavy = [n for n in names if any(n == f or n.startswith(f + ".") for f in FORBIDDEN)]
    assert not heavy, f"import these where they are used: {sorted(heavy)}"


@pytest.mark.parametrize("loads", [False, True], ids=["import", "first load"])
def test_no_unused_module_of_the_standard_library_is_imported(loads, tmp_path):
    mlstate.save(tmp_path / "own", {"w": np.ones((2, 3), np.float32), "b": np.zeros(3)})
    used = ["numpy", *OF_IMPORT, *OF_FIRST_LOAD] if loads else OF_IMPORT
    # -S: the .pth files of an environment import modules too
    command = [sys.executable, "-S", "-c", IMPORTED, ",".join(used)]
    process = child.finished(command + [tmp_path / "own"] * loads, **child.PATHS)
    assert process.returncode == 0, process.stderr
    assert not process.stdout.split(), (
        f"not used here: {process.stdout.strip()}; import them inside the functions that use them, "
        "or the file that imports them where it is used (`python -X importtime` shows which); a "
        "module that every call needs belongs in the list above"
    )


def test_demo_and_command_line_are_not_loaded():
    names = child.run("import mlstate.state, sys; print(*sys.modules)").split()
    late = [
        n for n in names if n.startswith(("mlstate.cli", "mlstate.demo", "mlstate.integrations"))
    ]
    assert not late


CALLS = """
import sys, tempfile, numpy as np, mlstate
from mlstate.kv import transition_kv_state
array = np.ones((1, 2, 4, 8), np.float16)
transition_kv_state(array, 8, 2, out=np.zeros((1, 2, 8, 8), np.float16))
path = tempfile.mkdtemp()
mlstate.save(path, {"w": array})
mlstate.load(path, into={"model": {"w": array}})
mlstate.load_into({"w": array}, {"w": array + 1})
print(*sys.modules)
"""


def test_calls_with_arrays_do_not_import_masked_arrays():
    assert "numpy.ma" not in child.run(CALLS).split()


def test_import_makes_few_calls():
    # -S: the .pth files of an environment add calls to each import
    process = child.finished([sys.executable, "-S", "-c", CALLS_OF_IMPORT], **child.PATHS)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 60_000, "made at import; make them at the first use"
