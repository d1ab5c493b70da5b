"""Translate the engine's errors to reasons that contain no credentials.

The texts of the engine contain answers of the server and URLs, which may repeat key ids and
signatures. Only the status and the error code of the answer are used, never the text.
"""

from __future__ import annotations

import errno
import re

# of the reasons below: a later attempt may succeed
RETRIED = {errno.EIO, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EAGAIN}

# of an answer, or of one deletion in a batch
_STATUS = re.compile(r"non-2xx status code: (\d{3})|request failed for key .*\(code: (\d{3})\)")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>|\"code\": ?\"([A-Za-z]{1,60})\"")
_THROTTLED = ("SlowDown", "ServerBusy", "TooManyRequests", "Throttling")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_DENIED = ("PermissionDeniedError", "UnauthenticatedError")
_CONFLICTS = ("AlreadyExistsError", "PreconditionError")
_UNSUPPORTED = ("NotSupportedError", "NotImplementedError")
# Without credentials, the engine asks the metadata service of a virtual machine for a token.
_ASKS_FOR_TOKEN = ("169.254.169.254", "/latest/api/token", "token request")
_VARIABLES = {
    "Generic GCS error": "GOOGLE_SERVICE_ACCOUNT",
    "Generic MicrosoftAzure error": "AZURE_STORAGE_ACCOUNT_KEY",
}
_IN_PROGRESS = ("ConditionalRequestConflict", "OperationAborted")


def _answer_text(text: str) -> tuple[str, str]:
    """Return the error code of the server's answer, and a short text with status and code."""
    status, code_match = _STATUS.search(text), _CODE.search(text)
    code = "" if code_match is None else code_match[1] or code_match[2]
    parts = ["HTTP", status[1] or status[2] if status else "", code]
    return code, " ".join(filter(None, parts)) if status or code else ""


def _failure_of(text: str, answer: str, code: str) -> tuple[int, str]:
    """Return errno and text for a failure without an own class in the engine."""
    lowered = text.partition("Debug source")[0].lower()
    if code in _THROTTLED or answer.startswith(("HTTP 429", "HTTP 503")):
        return errno.EAGAIN, f"the store limits the rate of requests or is overloaded ({answer})"
    if code in _IN_PROGRESS:
        return errno.EAGAIN, f"another request for this object is in progress ({answer})"
    if code == "InvalidRange" or answer.startswith("HTTP 416"):
        return errno.ERANGE, f"the object ends before the requested range ({answer})"
    if answer.startswith(("HTTP 5", "HTTP 408")) or code == "RequestTimeout":
        return errno.EIO, f"the store failed ({answer})"
    if answer:
        return errno.EINVAL, f"the store refused the request ({answer})"
    if "kind: Connect" in text:
        return errno.ECONNREFUSED, "cannot connect to the store's endpoint"
    if "timed out" in text or "TimedOut" in text or "kind: Timeout" in text:
        return errno.ETIMEDOUT, "the store did not answer in time"
    if "builder error" in lowered or "URL scheme is not allowed" in text:
        return errno.EINVAL, (
            "the endpoint cannot be used; an http:// endpoint needs "
            "storage_options={'client_options': {'allow_http': True}}"
        )
    return errno.EIO, "the connection broke, or the answer was not complete"


def is_engine_error(error: Exception) -> bool:
    """Return whether the engine raises such an exception; others are mistakes of the caller."""
    is_obstore = type(error).__module__.partition(".")[0] == "obstore"
    return is_obstore or isinstance(error, OSError | ValueError | NotImplementedError)


def engine_reason(error: Exception) -> OSError:
    """Return an engine's exception as an OSError with a safe text, of the class for its errno."""
    kind, text = type(error).__name__, str(error)
    code, answer = _answer_text(text)
    note = f" ({answer})" if answer else ""
    if code == "NoSuchUpload":  # its completion was repeated after a lost answer
        return OSError(errno.EIO, f"the outcome of the upload is unknown{note}")
    if code in _NO_BUCKET:
        return FileNotFoundError(errno.ENOENT, f"the bucket does not exist{note}")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, f"the object does not exist{note}")
    if any(part in text.partition("Debug source")[0] for part in _ASKS_FOR_TOKEN):
        names = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        for start, variable in _VARIABLES.items():
            names = variable if text.startswith(start) else names
        return PermissionError(
            errno.EACCES,
            f"no credentials found: set the store's environment variables, such as {names}, or "
            "pass them in storage_options",
        )
    if kind in _DENIED or answer.startswith(("HTTP 401", "HTTP 403")):
        return PermissionError(errno.EACCES, f"access denied{note}: check the credentials")
    if kind in _CONFLICTS and code not in _IN_PROGRESS:
        return FileExistsError(errno.EEXIST, f"the object was changed by another writer{note}")
    if kind == "InvalidPathError" or isinstance(error, ValueError):
        return OSError(errno.EINVAL, "the store does not accept this name")
    if "required for conditional update" in text:
        return OSError(
            errno.EINVAL,
            "the endpoint gives no version (ETag or generation) of an object, which conditional "
            "writes need",
        )
    if kind in _UNSUPPORTED:
        return OSError(errno.EINVAL, f"the endpoint does not support the request{note}")
    number, reason = _failure_of(text, answer, code)
    return OSError(number, reason)
