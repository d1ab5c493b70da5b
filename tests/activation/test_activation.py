"""The public module `mlstate.activation`: its names, and the cost of importing it."""

import subprocess
import sys

from mlstate import activation


def test_all_names_are_there_once_and_sorted():
    assert len(set(activation.__all__)) == len(activation.__all__)
    assert sorted(activation.__all__, key=lambda n: (n[0].islower(), n)) == activation.__all__
    assert all(hasattr(activation, name) for name in activation.__all__)


def test_importing_it_loads_no_framework():
    code = (
        "import sys, mlstate.activation as a; a.ActivationManager(a.MemoryAwareStrategy());"
        "print(*{'torch', 'matplotlib', 'importlib.metadata'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("\n", "")
