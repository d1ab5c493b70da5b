"""Records of deletions, repairs and damage, for ``logging.getLogger("mlstate")``.

The package does not import `logging`, which takes milliseconds: a program that reads the records
has imported it, because every handler comes from there.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


@cache
def _logger() -> Logger:
    import logging

    logger = logging.getLogger("mlstate")
    logger.addHandler(logging.NullHandler())  # or Python prints warnings of its own accord
    return logger


def is_logged(level: str) -> bool:
    """Whether a record of this level, such as ``"INFO"``, reaches any handler's logger."""
    logging = sys.modules.get("logging")
    return logging is not None and _logger().isEnabledFor(getattr(logging, level))


def log(level: str, text: str, *values: object) -> None:
    """Add a record, unless nothing in this process can read it."""
    if is_logged(level):
        _logger().log(getattr(sys.modules["logging"], level), text, *values)
