"""Cases of `test_leaks`: calls that must give back all they take."""

import pytest

CALLS = 100
CASES = []


def case(*names, calls=CALLS):
    """Register a case that covers the public `names` ("Class.method" for methods)."""

    def register(function):
        function.calls = calls
        CASES.append(pytest.param(function, id=function.__name__))
        function.names = names
        return function

    return register


def raises(error, call, *args, **kwargs):
    """A call that must end in `error`, which takes its traceback along when it is dropped."""

    def run():
        try:
            call(*args, **kwargs)
        except error:
            return
        raise AssertionError(f"{call} raised nothing")

    return run


def each(*calls):
    """All `calls`, one after the other."""

    def run():
        for call in calls:
            call()

    return run
