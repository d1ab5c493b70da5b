"""Errors of the engine become reasons with an errno, and without secrets."""

import errno

import pytest

from mlstate.checkpoint._folder._remote.object_store import RETRIED, engine_reason

SECRETS = "AKIAHIDDEN sig=hidden"


def named(kind, text, base=Exception):
    """Return an exception of a class with this name, as the engine raises it."""
    return type(kind, (base,), {})(f"{text} {SECRETS}\n\nDebug source: {SECRETS}")


def answered(status, code, kind="GenericError", base=Exception):
    text = f"non-2xx status code: {status} Some Text: <Error><Code>{code}</Code>"
    return named(kind, text, base)


CASES = [
    (answered(404, "NoSuchBucket"), errno.ENOENT, "bucket does not exist (HTTP 404 NoSuchBucket)"),
    (answered(404, "NoSuchKey", "N", FileNotFoundError), errno.ENOENT, "object does not exist"),
    (answered(404, "NoSuchUpload", "N", FileNotFoundError), errno.EIO, "upload is unknown"),
    (answered(403, "SignatureDoesNotMatch"), errno.EACCES, "access denied (HTTP 403 Signature"),
    (answered(401, "x", "UnauthenticatedError"), errno.EACCES, "access denied"),
    (named("GenericError", "Error performing token request"), errno.EACCES, "no credentials found"),
    (answered(412, "x", "PreconditionError"), errno.EEXIST, "changed by another writer"),
    (answered(412, "x", "AlreadyExistsError"), errno.EEXIST, "changed by another writer"),
    (answered(409, "ConditionalRequestConflict", "AlreadyExistsError"), errno.EAGAIN, "progress"),
    (answered(503, "SlowDown"), errno.EAGAIN, "limits the rate of requests"),
    (answered(429, "x"), errno.EAGAIN, "limits the rate of requests"),
    (answered(500, "InternalError"), errno.EIO, "the store failed (HTTP 500 InternalError)"),
    (answered(400, "RequestTimeout"), errno.EIO, "the store failed"),
    (answered(416, "InvalidRange"), errno.ERANGE, "ends before the requested range"),
    (answered(400, "KeyTooLongError"), errno.EINVAL, "refused the request (HTTP 400 KeyTooLong"),
    (answered(501, "x", "NotImplementedError"), errno.EINVAL, "does not support the request"),
    (
        named("E", "Bulk delete request failed for key a: Denied (code: 403)"),
        errno.EACCES,
        "HTTP 403",
    ),
    (
        named("E", "Bulk delete request failed for key a: Busy (code: 503)"),
        errno.EAGAIN,
        "HTTP 503",
    ),
    (named("E", "Version required for conditional update"), errno.EINVAL, "gives no version"),
    (named("GenericError", "kind: Connect"), errno.ECONNREFUSED, "cannot connect"),
    (named("GenericError", "operation timed out"), errno.ETIMEDOUT, "did not answer in time"),
    (named("GenericError", "builder error"), errno.EINVAL, "allow_http"),
    (named("InvalidPathError", "bad"), errno.EINVAL, "does not accept this name"),
    (named("GenericError", "unexpected end"), errno.EIO, "the connection broke"),
]


@pytest.mark.parametrize(("error", "number", "text"), CASES, ids=lambda one: str(one)[:30])
def test_a_reason_has_an_errno_and_no_secret(error, number, text):
    reason = engine_reason(error)
    assert reason.errno == number
    assert text in reason.strerror
    assert "hidden" not in str(reason).lower()
    assert isinstance(reason, OSError)


def test_only_passing_failures_are_repeated():
    assert {errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNREFUSED} == RETRIED
