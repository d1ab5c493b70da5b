"""Keywords, defaults of all saves and loads: `pack_below_bytes`, `sparse`, `lock_timeout`."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ForwardRef, TypedDict, TypeVar, cast

from .._common.arguments import check_callback, check_flags
from ._store import codecs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from .._sharding.layout import Layout
    from ..collectives import ProcessGroup

Function = TypeVar("Function", bound="Callable[..., Any]")
OptionsT = TypeVar("OptionsT", "SaveOptions", "LoadOptions")


class SaveOptions(TypedDict, total=False):
    """Keywords of every function that saves; `save` documents them."""

    states: Mapping[str, object] | None
    metadata: Mapping[str, object] | None
    group: ProcessGroup | None
    layout: Layout | str | None
    pack_below_bytes: int | str
    sparse: bool
    incremental: bool
    compress: str | None
    digest: bool
    progress: Callable[[int], object] | None
    lock_timeout: float
    exclude: str | Iterable[str] | None


class LoadOptions(TypedDict, total=False):
    """Keywords of every function that loads; `load` documents them."""

    names: str | Iterable[str] | None
    rank: int | None
    world_size: int | None
    layout: Layout | str | None
    group: ProcessGroup | None
    into: object
    mmap: bool
    verify: bool | str
    missing: str
    strict: bool
    cast: object
    device: Any
    rename: Mapping[str, str] | None
    progress: Callable[[int], object] | None
    storage_options: Mapping[str, object] | None


_SAVE_FLAGS = ("sparse", "incremental", "digest")
_FLAGS = ("mmap", "strict", *_SAVE_FLAGS)
PACK_BELOW = 262144
PACK_BELOW_MOST = (1 << 63) - 1
_HINTS: dict[str, ForwardRef] = {**SaveOptions.__annotations__, **LoadOptions.__annotations__}
SAVE_DEFAULTS = cast(
    "SaveOptions",
    dict.fromkeys(SaveOptions.__annotations__)
    | {"pack_below_bytes": PACK_BELOW, **dict.fromkeys(_SAVE_FLAGS, False), "lock_timeout": 0},
)
LOAD_DEFAULTS = cast(
    "LoadOptions",
    dict.fromkeys(LoadOptions.__annotations__)
    | {"mmap": False, "verify": True, "missing": "skip", "strict": True, "cast": False},
)


def check_timeout(seconds: float) -> float:
    """Return ``lock_timeout=`` in seconds; raise unless it is a number of at least 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"lock_timeout must be a number of seconds, got {type(seconds).__name__}")
    if not seconds >= 0:
        raise ValueError(f"lock_timeout must be 0 or more seconds, got {seconds}")
    return float(seconds)


def show_options(defaults: SaveOptions | LoadOptions) -> Callable[[Function], Function]:
    """Return a decorator for functions with ``**options``.

    The signature of such a function then shows the keywords and values of `defaults` instead.
    """
    options = [
        Parameter(
            name, Parameter.KEYWORD_ONLY, default=value, annotation=_HINTS[name].__forward_arg__
        )
        for name, value in defaults.items()
    ]

    def decorate(function: Function) -> Function:
        """Set the signature of `function`, whose last parameter is ``**options``."""
        documented = signature(function)
        parameters = [*documented.parameters.values()][:-1] + options
        function.__signature__ = documented.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def complete_options(
    function: Callable[..., object], options: OptionsT, defaults: OptionsT
) -> OptionsT:
    """Return the keywords of a call, completed by `defaults`.

    Raises TypeError for an unknown keyword, where `function` is named; also if ``progress`` cannot
    be called, or a flag is no bool.
    """
    for name in options:
        if name not in defaults:
            raise TypeError(
                f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
            )
    completed: Any = {**defaults, **options}
    check_flags(**{name: completed[name] for name in _FLAGS if name in completed})
    check_callback("progress", completed["progress"])
    return completed  # type: ignore[no-any-return]


def complete_save_options(function: Callable[..., object], options: SaveOptions) -> SaveOptions:
    """Return the keywords of a save, completed by defaults; check codec and timeout.

    `function`: as for `complete_options`. Raises TypeError or ValueError for a wrong keyword or
    value, ImportError if the codec's package is missing.
    """
    options = complete_options(function, options, SAVE_DEFAULTS)
    options["lock_timeout"] = check_timeout(options["lock_timeout"])
    if options["compress"] is not None:
        codecs.check(options["compress"])
    return options
