"""Packages that take part in a benchmark if they are installed."""

from importlib import import_module
from typing import Any


def optional(name: str) -> Any:
    """Import a module, or return None if its package is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None
