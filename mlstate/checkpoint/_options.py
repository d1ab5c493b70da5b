"""The keywords that `save`, `save_async` and the methods of `CheckpointManager` share."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

from .._common.arguments import check_flags, check_int
from .._common.text import names_hint
from ._store import codecs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .._sharding.layout import Layout
    from ..collectives import ProcessGroup

Function = TypeVar("Function", bound="Callable[..., Any]")


class SaveOptions(TypedDict, total=False):
    """Keywords of every function that saves; `save` documents them."""

    states: Mapping[str, Any] | None
    metadata: Mapping[str, Any] | None
    group: ProcessGroup | None
    layout: Layout | str | None
    pack_below_bytes: int
    sparse: bool
    incremental: bool
    compress: str | None
    progress: Callable[[int], object] | None
    lock_timeout: float


PACK_BELOW = 262144
_HINTS = SaveOptions.__annotations__
DEFAULTS = cast(
    "SaveOptions",
    dict.fromkeys(_HINTS)
    | {"pack_below_bytes": PACK_BELOW, "sparse": False, "incremental": False, "lock_timeout": 0},
)


def check_timeout(seconds: float) -> float:
    """Return the seconds to wait for the lock; raise unless they are a number of at least 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"lock_timeout must be a number of seconds, got {type(seconds).__name__}")
    if not seconds >= 0:
        raise ValueError(f"lock_timeout must be 0 or more seconds, got {seconds}")
    return float(seconds)


def show_options(function: Function) -> Function:
    """Decorate a function with ``**options``: its signature shows each keyword and default."""
    signature_of_function = signature(function)
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=value, annotation=hint.__forward_arg__)
        for (name, value), hint in zip(DEFAULTS.items(), _HINTS.values(), strict=True)
    ]
    parameters = [*signature_of_function.parameters.values()]
    function.__signature__ = signature_of_function.replace(parameters=parameters[:-1] + options)  # type: ignore[attr-defined]
    return function


def complete_options(function: Callable[..., Any], options: SaveOptions) -> SaveOptions:
    """Return the options of a call with defaults; raise for an unknown keyword or a wrong value.

    `states`, `metadata`, `group` and `layout` are checked when they are used.
    """
    for name in options:
        if name not in DEFAULTS:
            hint = names_hint(name, signature(function).parameters, listed=False)
            raise TypeError(
                f"{function.__qualname__}() got an unexpected keyword argument {name!r}{hint}"
            )
    options = {**DEFAULTS, **options}
    check_flags(sparse=options["sparse"], incremental=options["incremental"])
    options["pack_below_bytes"] = check_int("pack_below_bytes", options["pack_below_bytes"], 0)
    if options["compress"] is not None:
        codecs.check(options["compress"])
    options["lock_timeout"] = check_timeout(options["lock_timeout"])
    return options
