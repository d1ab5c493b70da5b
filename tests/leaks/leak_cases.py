"""Cases of `test_leaks`: calls that must release all they allocate."""

import pytest

CALLS = 100
CASES = []


def case(*names, calls=CALLS):
    """Register a case that covers these public `names` ("Class.method" for methods)."""

    def register(function):
        function.calls = calls
        CASES.append(pytest.param(function, id=function.__name__))
        function.names = names
        return function

    return register


def with_members(name, listed):
    """A class and some of its members, separated by spaces, as `case` names them."""
    return [name, *(f"{name}.{member}" for member in listed.split())]


def methods(thing, *but):
    """The public members of a class, as `case` names them."""
    names = (name for name in vars(thing) if name[0] != "_" and name not in but)
    return [f"{thing.__name__}.{name}" for name in names]


def raises(error, call, *args, **kwargs):
    """A call that must raise `error`, whose traceback is dropped afterwards."""

    def run():
        try:
            call(*args, **kwargs)
        except error:
            return
        raise AssertionError(f"{call} raised nothing")

    return run


def each(*calls):
    """A function that makes all `calls` in turn."""

    def run():
        for call in calls:
            call()

    return run
