"""Skip tests whose packages are missing, without importing the packages.

Each worker imports all files of tests, and packages such as Lightning take seconds.
"""

import importlib.util

import pytest


def needs(*packages):
    """Return the mark that skips tests if one of the packages is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
