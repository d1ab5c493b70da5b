"""The options of an object store: checked, and passed to the engine."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._common.local_path import local_folder
from .engine_errors import engine_reason, is_engine_error

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMES = ("s3", "gs", "az")
_ENVIRONMENT = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
# The options of the engine's HTTP client; the engine crashes if its configuration has them.
_CLIENT_KEYS = (
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
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)\Z", re.DOTALL)
_PASSED = ("client_options", "retry_config", "credential_provider")
_LEAST_PART = 5 << 20  # of S3, except for the last part
# The engine repeats failed parts of large objects until the timeout; this package repeats
# everything else.
_ENGINE_RETRIES = 0
_PART_RETRIES = 1 << 20
_LEAST_SILENCE = 1.0  # seconds without a byte of an answer, after which a request is repeated
_MOST_CONNECT = 5.0  # seconds to connect
_NO_LIMIT = 86400.0  # seconds of a request that is limited by its silence
SMALL = 16 << 10  # bytes of a request that fit into the buffers of a connection
_LEAST_RATE = 512 << 10  # bytes per second of all simultaneous uploads together


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

    def upload_seconds(self, nbytes: int) -> float:
        """Return the time limit of a request that sends `nbytes` bytes, without repetitions.

        The engine does not count sent bytes as progress. So the limit grows with the bytes of all
        requests that share the connection to the store.
        """
        return self.timeout_seconds + nbytes * self.max_concurrency / _LEAST_RATE

    def _time_limits(self, nbytes: int) -> dict[str, str]:
        """Return the time limits of an engine whose requests send at most `nbytes` bytes.

        Of small requests, only a silent server is limited: after two silent attempts, or one
        attempt and its stalled answer, `timeout_seconds` are over.
        """
        silence = max(self.timeout_seconds / 2, _LEAST_SILENCE)
        limits = {"connect_timeout": min(silence, _MOST_CONNECT)}
        if nbytes <= SMALL:
            limits |= {"read_timeout": silence, "timeout": _NO_LIMIT}
        else:
            limits |= {"timeout": self.upload_seconds(nbytes)}
        return {name: f"{round(1000 * seconds)}ms" for name, seconds in limits.items()}

    def open_engine(
        self, url: str, *, upload_bytes: int = 0, for_parts: bool = False
    ) -> tuple[Any, Any]:
        """Import the engine; return it and a store for a URL.

        `upload_bytes` is the largest number of bytes that a request sends. With `for_parts`, the
        store repeats failed requests until `timeout_seconds`. The text of an error has no values
        of the configuration.
        """
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ImportError(
                f"{url}: object stores need the package obstore: pip install 'mlstate[remote]'"
            ) from None
        from datetime import timedelta

        keywords = dict(self.passed)
        limits = self._time_limits(upload_bytes)
        client = keywords.get("client_options", _client_environment(url))
        if hasattr(client, "keys"):  # otherwise the engine refuses it
            keywords["client_options"] = {**limits, **client}
        keywords["retry_config"] = {
            "max_retries": _PART_RETRIES if for_parts else _ENGINE_RETRIES,
            "retry_timeout": timedelta(seconds=self.timeout_seconds),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=5),
            },
            **keywords.get("retry_config", {}),
        }
        failed = None
        try:
            open_store: Any = from_url
            return obstore, open_store(url, config=self.config, **keywords)
        except Exception as error:
            if not is_engine_error(error) and not isinstance(error, TypeError):
                raise
            failed = ValueError(f"{url}: {_refusal_text(error)}")
        raise failed


def _client_environment(url: str) -> dict[str, str]:
    """Return the client's options in the environment, such as AWS_ALLOW_HTTP.

    The engine ignores them if it is given `client_options`.
    """
    prefix = _ENVIRONMENT[url.partition("://")[0]]
    settings = {name: os.environ.get(f"{prefix}{name.upper()}") for name in _CLIENT_KEYS}
    return {name: value for name, value in settings.items() if value is not None}


def _refusal_text(error: Exception) -> str:
    """Return why the engine refuses a configuration, without any of its values."""
    key = re.search(r"Configuration key: '([A-Za-z_0-9]{1,60})' is not valid", str(error))
    if key is not None:
        return f"storage_options has an unknown key: {key[1]!r}"
    if "MissingAccount" in str(error):
        return (
            "the account is missing: pass storage_options={'account_name': ...} or set "
            "AZURE_STORAGE_ACCOUNT_NAME"
        )
    if "MissingRegion" in str(error):
        return "the region is missing: pass storage_options={'region': ...} or set AWS_REGION"
    if re.search(r"GCP credential error: |Azure error: Invalid Access Key", str(error)):
        return (
            "a credential cannot be read: check the key, token or file of the store in "
            "storage_options and the environment"
        )
    return (
        f"the store's engine refuses the URL or storage_options ({type(error).__name__}: "
        f"{engine_reason(error).strerror if not isinstance(error, TypeError) else 'wrong type'})"
    )


def _number(options: dict[str, Any], name: str, least: float, default: Any) -> Any:
    value = options.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, type(default) | int):
        kind = "an int" if isinstance(default, int) else "a number"
        raise TypeError(f"storage_options[{name!r}] must be {kind}, got {type(value).__name__}")
    if not value >= least:
        raise ValueError(f"storage_options[{name!r}] must be {least} or more, got {value}")
    return value


def take_options(options: Mapping[str, Any] | None) -> StoreOptions:
    """Check `storage_options`; keys that mlstate does not know belong to the engine.

    Texts of errors name the key, and no value of the engine's keys.
    """
    if options is not None and not hasattr(options, "keys"):
        raise TypeError(f"storage_options must be a mapping, got {type(options).__name__}")
    left = {} if options is None else dict(options)
    wrong = [key for key in left if not isinstance(key, str)]
    if wrong:
        raise TypeError(f"keys of storage_options must be str, got {type(wrong[0]).__name__}")
    default = StoreOptions({}, {})
    scratch = left.pop("scratch_folder", None)
    numbers = {
        name: _number(left, name, least, getattr(default, name))
        for name, least in (
            ("timeout_seconds", 0.0),
            ("part_bytes", _LEAST_PART),
            ("max_concurrency", 1),
        )
    }
    for name, least in (("orphan_seconds", 0.0), ("cache_bytes", 0)):
        if left.get(name, 0) is None:
            del left[name]
        if name in left:
            numbers[name] = _number(left, name, least, least)
    cache = left.pop("cache_folder", None)
    if cache is None and "cache_bytes" in numbers:
        raise ValueError("storage_options['cache_bytes'] needs 'cache_folder'")
    passed = {name: left.pop(name) for name in _PASSED if name in left}
    client = {name: left.pop(name) for name in _CLIENT_KEYS if name in left}
    if client and hasattr(passed.setdefault("client_options", {}), "keys"):
        passed["client_options"] = {**client, **passed["client_options"]}
    return StoreOptions(
        left,
        passed,
        scratch_folder=None if scratch is None else local_folder(scratch),
        cache_folder=None if cache is None else local_folder(cache),
        **numbers,
    )


def split_url(text: str) -> tuple[str, str] | None:
    """Return the lower-case scheme and the rest of a URL; None if a text is not a URL."""
    match = _URL.match(text)
    return None if match is None else (match[1].lower(), match[2])


def check_url(text: str) -> str:
    """Return the URL of a checkpoint without a slash at the end; refuse wrong ones."""
    parts = split_url(text)
    assert parts is not None
    scheme, rest = parts
    if scheme not in SCHEMES:
        schemes = ", ".join(f"{scheme_name}://" for scheme_name in SCHEMES)
        raise ValueError(
            f"{_redacted(text)}: unknown scheme {scheme!r}; object stores have {schemes}, and all "
            "other checkpoints are local folders"
        )
    bucket, _, path = rest.rstrip("/").partition("/")
    where = "storage_options, the environment or the engine's configuration"
    if "@" in bucket or "?" in rest or "#" in rest:
        raise ValueError(
            f"{_redacted(text)}: a URL of a checkpoint has no user, query or fragment; credentials "
            f"belong in {where}"
        )
    if not bucket or not path:
        raise ValueError(
            f"{text}: the URL must name a bucket and a path in it, such as {scheme}://bucket/run"
        )
    for name in path.split("/"):
        if name in ("", ".", "..") or not name.isprintable() or "\\" in name or "%" in name:
            raise ValueError(
                f"{text}: the name {name!r} in the path is not possible in a store: names are not "
                r"empty, . or .., and have no control characters, % or \ "
            )
    if len(path.encode()) > _LONGEST_PATH:
        raise ValueError(
            f"{text[:80]}...: the path has {len(path.encode())} bytes, and a store accepts "
            f"{_LONGEST_PATH} before the names of a checkpoint"
        )
    return f"{scheme}://{bucket}/{path}"


_LONGEST_PATH = 1024 - 256  # names of a checkpoint have at most 240 bytes, and keys 1024


def _redacted(text: str) -> str:
    """Return a URL for a message, without a part that may hold credentials."""
    start, _, rest = text.partition("://")
    return f"{start}://{re.split('[?#]', rest)[0].rpartition('@')[2]}"
