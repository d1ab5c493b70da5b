"""Log records of deletions, repairs and damage, for ``logging.getLogger("mlstate")``.

The package does not import `logging`, because this takes milliseconds. A program that reads the
records has imported it, because it provides all handlers.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logging import Logger


@cache
def _logger() -> Logger:
    """Return the logger of the package; called only if `logging` is imported."""
    import logging

    logger = logging.getLogger("mlstate")
    logger.addHandler(logging.NullHandler())  # otherwise Python prints warnings by default
    return logger


def is_logged(level: str) -> bool:
    """Return whether the logger accepts records of a level, such as ``"INFO"``."""
    logging = sys.modules.get("logging")
    return logging is not None and _logger().isEnabledFor(getattr(logging, level))


def log(level: str, text: str, *values: object) -> None:
    """Log a record if `logging` is imported and the level is enabled."""
    if is_logged(level):
        _logger().log(getattr(sys.modules["logging"], level), text, *values)
