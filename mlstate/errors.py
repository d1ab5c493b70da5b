"""The exceptions and warnings of mlstate: classes, fields, and builtin classes they derive from.

All exceptions derive from `MLStateError` and from a builtin exception class; all warnings, except
those of deprecations, from `MLStateWarning`. Their fields describe
the failure: ``name``, ``expected``, ``got``, ``path``, ``offset``, ``rank`` (None if a field does
not apply).

Examples
--------
>>> import numpy as np, mlstate
>>> cache = np.zeros((2, 1, 512, 4), np.float16)
>>> try:
...     mlstate.compact_kv_state(cache, 256, 300)
... except mlstate.errors.CapacityError as error:
...     print(error.expected, "|", error.got)
0..256 | 300
"""

from ._core import (
    CapacityError,
    ChecksumError,
    CollectiveError,
    CompatibilityError,
    FormatError,
    MLStateError,
    StoreError,
    StoreNotFoundError,
    StorePermissionError,
    TensorNotFoundError,
)


def _set_fields(self: MLStateError, *args: object, **fields: object) -> None:
    """Create an error with the text in `args`, and its fields by keyword."""
    super(MLStateError, self).__init__(*args)
    for field, value in fields.items():
        setattr(self, field, value)


_REMEDY = (
    "To recover from damage, copy or download the file again, or load an older step by step=N; "
    "`mlstate verify PATH` lists all damage"
)
# Texts that name the remedy, such as "download it again", or are not about damage.
_TOLD = (" again", ": delete it", ": update mlstate", "not a prompt store", "not a regular file")


def _add_remedy(self: FormatError, *args: object, **fields: object) -> None:
    """Create an error of a file; a note tells how to recover from damage if the text does not."""
    _set_fields(self, *args, **fields)
    text = str(self)
    if not any(words in text for words in _TOLD):
        self.add_note(_REMEDY)


MLStateError.__init__ = _set_fields  # type: ignore[method-assign]
FormatError.__init__ = _add_remedy  # type: ignore[method-assign, assignment]


class GradientMismatchError(CollectiveError, ValueError):
    """On this rank, a gradient of the call is missing, has no unit, or does not fit its unit."""


class GradientNamesError(GradientMismatchError):
    """Gradients and sharding units that were passed together do not have the same names."""


class UnstorableError(CompatibilityError, TypeError, BufferError):
    """A value of a save cannot be stored: files cannot name its type, or it has no elements."""


class MLStateWarning(UserWarning):
    """A warning of mlstate: the call succeeded, but its result may surprise the caller."""


class CheckpointWarning(MLStateWarning):
    """A save, a load or a conversion left something out, or passed over a damaged step."""


class GradientWarning(MLStateWarning, RuntimeWarning):
    """Gradients may be missing or wrong.

    An optimizer steps over parameters without gradients, or a recomputed block gets arguments that
    changed since its first run.
    """


__all__ = [
    "CapacityError",
    "CheckpointWarning",
    "ChecksumError",
    "CollectiveError",
    "CompatibilityError",
    "FormatError",
    "GradientMismatchError",
    "GradientNamesError",
    "GradientWarning",
    "MLStateError",
    "MLStateWarning",
    "StoreError",
    "StoreNotFoundError",
    "StorePermissionError",
    "TensorNotFoundError",
    "UnstorableError",
]


def __dir__() -> list[str]:
    """List the public names alone."""
    return sorted(__all__)
