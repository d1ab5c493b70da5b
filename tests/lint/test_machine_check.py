"""If mlstate cannot be built on this machine, one line names the missing tool."""

import os
import sys

import child
import house
import pytest

SCRIPT = house.ROOT / "tools" / "check_machine.sh"

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a POSIX shell script")


def check(**environment):
    variables = {"PYTHON": sys.executable, "CC": "cc"} | environment
    done = child.finished(["sh", SCRIPT], **variables)
    return done.returncode, done.stderr


def fake(tmp_path, name, text):
    """A fake program in the place of Python or the compiler."""
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def python_with(tmp_path, case):
    """This Python, but with a case of a shell for its second argument."""
    script = f'case "$2" in {case} ;; *) exec "{sys.executable}" "$@" ;; esac'
    return fake(tmp_path, "python3", script)


def assert_one_line(result, *words):
    code, error = result
    assert code == 1
    assert error.count("\n") == 1, error
    assert error.startswith("mlstate cannot be built here: ")
    for word in words:
        assert word in error, error


def test_this_machine_is_fit():
    assert check() == (0, "")


def test_no_python():
    assert_one_line(check(PYTHON="no-such-python"), "no Python", "no-such-python")


def test_old_python(tmp_path):
    old = fake(
        tmp_path, "python3", 'case "$2" in pass) ;; *"print("*) echo 3.9.2 ;; *) exit 1 ;; esac'
    )
    assert_one_line(check(PYTHON=old), "3.9.2", "3.11 or newer", "PYTHON=")


def test_no_venv(tmp_path):
    lacking = python_with(tmp_path, "*ensurepip*) exit 1")
    assert_one_line(check(PYTHON=lacking), "no venv module")


def test_no_compiler():
    assert_one_line(check(CC="no-such-cc"), "no working C compiler", "no-such-cc")


def test_compiler_that_does_not_work(tmp_path):
    assert_one_line(check(CC=fake(tmp_path, "cc", "exit 1")), "no working C compiler")


def test_no_python_headers(tmp_path):
    lacking = python_with(tmp_path, f'*get_path*) echo "{tmp_path}"')
    assert_one_line(check(PYTHON=lacking), "no Python.h")
