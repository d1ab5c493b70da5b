"""`storage_options`: names, defaults, limits: timeouts, concurrency, part size, cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...._common.budget import parse_size
from ...._common.local_path import local_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

# The options of the engine's HTTP client; the engine crashes if its configuration has them.
CLIENT_KEYS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "disable_system_certificates",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_max_frame_size",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "read_timeout",
    "timeout",
    "user_agent",
)
_PASSED = ("client_options", "retry_config", "credential_provider")
# The least value of each number, which has the number's type.
_LEAST = {
    "timeout_seconds": 0.0,
    "part_bytes": 5 << 20,  # of S3, except for the last part
    "max_concurrency": 1,
    "orphan_seconds": 0.0,
    "cache_bytes": 0,
}


class StoreOptions(NamedTuple):
    """The checked `storage_options` of a store."""

    config: dict[str, Any]  # of the engine, for the scheme: credentials, region, endpoint
    passed: dict[str, Any]  # other keywords of the engine
    timeout_seconds: float = 120.0  # for one request with its repetitions; uploads have more
    part_bytes: int = 8 << 20  # of large objects, which are written and read in parts
    max_concurrency: int = 8  # simultaneous requests
    scratch_folder: str | None = None  # for temporary files; None: the system's
    orphan_seconds: float | None = None  # age of unneeded objects that `prune` deletes
    cache_folder: str | None = None  # keeps what loads read; None: nothing is kept
    cache_bytes: int | None = None  # of all files in `cache_folder`; None: no limit

    def __repr__(self) -> str:  # the configuration holds credentials
        return f"StoreOptions(timeout_seconds={self.timeout_seconds}, ...)"


def _take_number(options: dict[str, Any], name: str, least: float) -> Any:
    """Remove the number `name` from `options`, and return it, or its default if it is missing.

    `least` has the required type. A number of bytes may be a text such as ``"8MiB"``. Raises
    ValueError if it is below `least`, TypeError for another type.
    """
    default = StoreOptions._field_defaults[name]
    value = options.pop(name, default)
    if value is None and default is None:
        return None
    if isinstance(value, str) and name.endswith("_bytes"):
        value = parse_size(f"storage_options[{name!r}]", value)
    if isinstance(value, bool) or not isinstance(value, type(least) | int):
        kind = "an int" if isinstance(least, int) else "a number"
        raise TypeError(f"storage_options[{name!r}] must be {kind}, got {type(value).__name__}")
    if not value >= least:
        raise ValueError(f"storage_options[{name!r}] must be {least} or more, got {value}")
    return value


def _take_folder(options: dict[str, Any], name: str) -> str | None:
    """Remove the local folder `name` from `options`, and return its path, or None without one."""
    path = options.pop(name, None)
    return None if path is None else local_folder(path)


def _take_keywords(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the engine's keywords from `options`, and return them with those of its client."""
    keywords = {name: options.pop(name) for name in _PASSED if name in options}
    client = {name: options.pop(name) for name in CLIENT_KEYS if name in options}
    if client and hasattr(keywords.setdefault("client_options", {}), "keys"):
        keywords["client_options"] = {**client, **keywords["client_options"]}
    return keywords


def take_options(options: Mapping[str, Any] | None) -> StoreOptions:
    """Return the checked `storage_options`; unknown keys belong to the engine.

    Raises TypeError or ValueError, which name the key, and no value of the engine's keys, which may
    be a credential.
    """
    if options is not None and not hasattr(options, "keys"):
        raise TypeError(f"storage_options must be a mapping, got {type(options).__name__}")
    left = {} if options is None else dict(options)
    wrong = [key for key in left if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"keys of storage_options must be str, got {type(wrong[0]).__name__}")
    fields = {name: _take_number(left, name, least) for name, least in _LEAST.items()}
    fields |= {name: _take_folder(left, name) for name in ("scratch_folder", "cache_folder")}
    if fields["cache_folder"] is None and fields["cache_bytes"] is not None:
        raise ValueError("storage_options['cache_bytes'] needs 'cache_folder'")
    passed = _take_keywords(left)
    return StoreOptions(left, passed, **fields)
