"""Import the helpers of tests/ that benchmarks share with the tests."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
FOLDERS = ("support", "integration/checkpoint")


def import_from_tests(name: str) -> Any:
    """Return a helper module of tests/, or None if the tests are missing."""
    for folder in FOLDERS:
        if str(TESTS / folder) not in sys.path:
            sys.path.append(str(TESTS / folder))
    return importlib.import_module(name) if importlib.util.find_spec(name) else None
