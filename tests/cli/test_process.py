"""The command line as a process: Ctrl-C at any moment, failing streams, no colour."""

import contextlib
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import child
import numpy as np
import pytest
from any_format import read_any
from command_table import COMMANDS, call_of

import mlstate
from mlstate.cli import main

ROOT = Path(mlstate.__file__).parents[1]
COMMAND = [sys.executable, "-m", "mlstate"]
# the script that pip writes as bin/mlstate
SCRIPT = [sys.executable, "-c", "from mlstate.cli import run_process; run_process()"]
STARTED = """
import mlstate.cli
print("started", flush=True)
mlstate.cli.run_process()
"""
# short sleeps: a signal that arrives just before one is handled after it
SLOW = """
import time
print("importing", flush=True)
for _ in range(600):
    time.sleep(0.1)
"""
NOT_MEASURED = pytest.mark.skipif("COVERAGE_FILE" in os.environ, reason="coverage imports it first")


@pytest.fixture
def place(tmp_path):
    """A small checkpoint and a run of two steps."""
    mlstate.save(tmp_path / "ckpt", {"w": np.ones((4, 4))}, {"w.m": np.zeros((4, 4))}, step=1)
    with mlstate.checkpoint.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.full(3, step)})
    return tmp_path


def environment(*folders, **variables):
    """Variables for a process that finds the package, after the modules in `folders`."""
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    return {**os.environ, "PYTHONPATH": path, **variables}


def start(command, place, *folders, **variables):
    return subprocess.Popen(
        command,
        cwd=place,
        env=environment(*folders, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def shell(line, place, **variables):
    """Run `mlstate ...` in a shell."""
    line = line.replace("mlstate", f'"{sys.executable}" -m mlstate')
    command = ["bash", "-o", "pipefail", "-c", line]
    return child.finished(command, folder=place, **environment(**variables))


# ---- Ctrl-C ----


def interrupt(process):
    """Send the signal that Ctrl-C sends; return the exit status and standard error."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    return process.returncode, err


def interrupt_import(command, place, folder):
    """Interrupt a command when it imports a module of `folder`."""
    with start(command, place, folder) as process:
        assert process.stdout.readline() == "importing\n"
        return interrupt(process)


@pytest.fixture
def slow(place):
    """Make a module that prints when it is imported, and sleeps."""

    def make(module, code=SLOW):
        folder = place / "slow" / module
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(code)
        return folder.parent

    return make


@pytest.mark.parametrize("command", [COMMAND, SCRIPT], ids=["module", "script"])
@pytest.mark.parametrize("module", ["numpy", "argparse", pytest.param("json", marks=NOT_MEASURED)])
def test_an_interrupt_while_modules_are_imported(place, slow, command, module):
    assert interrupt_import([*command, "inspect", "ckpt"], place, slow(module)) == (130, "")


def test_interrupt_swallowed_by_an_import_ends_the_process(place, slow):
    lines = SLOW.replace("\n", "\n    ")
    code = f"try:\n    pass{lines}\nexcept BaseException: pass"
    command = [*COMMAND, "inspect", "ckpt"]
    assert interrupt_import(command, place, slow("argparse", code)) == (130, "")


def test_an_interrupt_while_a_command_imports_its_framework(place, slow):
    command = [*COMMAND, "convert", "ckpt", "out.pt"]
    assert interrupt_import(command, place, slow("torch")) == (130, "")
    assert not (place / "out.pt").exists()


def test_an_interrupt_while_python_exits(place, slow):
    code = f"import atexit\natexit.register(lambda: exec({SLOW!r}))\nfrom tqdm_of_nobody import x"
    folder = slow("tqdm", code)  # imported by the progress line, which needs a terminal
    terminal, other = pty.openpty()
    command = [*COMMAND, "verify", "ckpt"]
    with subprocess.Popen(
        command, cwd=place, env=environment(folder), stdout=subprocess.PIPE, stderr=other, text=True
    ) as process:
        os.close(other)
        assert process.stdout.readline().startswith("ckpt: good")
        assert process.stdout.readline() == "importing\n"
        assert interrupt(process)[0] == 130
    output = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert "Traceback" not in output and "Exception" not in output


def test_an_ignored_interrupt_stays_ignored(place, slow):
    folder = slow("torch", SLOW.replace("600", "5") + "raise ImportError")
    command = ["bash", "-c", "trap '' INT; exec \"$@\"", "-", *COMMAND, "convert", "ckpt", "x.pt"]
    status, err = interrupt_import(command, place, folder)
    assert status == 2
    assert "mlstate[torch]" in err


ANY_MOMENT = [
    ["convert", "large.safetensors", "out.npz", "--overwrite"],
    ["convert", "large.safetensors", "out", "--overwrite"],
    ["reshard", "run", "out", "--layout", "rows=2", "--overwrite"],
    ["verify", "large.safetensors"],
]


@pytest.mark.parametrize("moments", [3, pytest.param(6, marks=pytest.mark.long)])
@pytest.mark.parametrize("arguments", ANY_MOMENT, ids=" ".join)
def test_interrupt_never_leaves_a_partial_file(place, arguments, moments):
    mlstate.save_file({"w": np.zeros(2_000_000)}, place / "large.safetensors")
    begin = time.monotonic()
    with start([*COMMAND, *arguments], place) as complete_run:
        assert complete_run.communicate(timeout=60)[1] == ""
    seconds = time.monotonic() - begin
    before = {path.name for path in place.iterdir()}
    chance = random.Random(7)
    for _ in range(moments):
        with start([sys.executable, "-c", STARTED, *arguments], place) as process:
            assert process.stdout.readline() == "started\n"  # the start of Python is not under test
            time.sleep(chance.uniform(0, seconds))
            status, err = interrupt(process)
        # Python dies by the signal once it has removed its handlers
        assert (status in (0, 130, -signal.SIGINT), err) == (True, ""), status
        assert {path.name for path in place.iterdir()} == before
        for name in before & {"out", "out.npz"}:
            assert read_any(place / name)[0] is not None


# ---- streams ----


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["--help", "inspect ckpt", "inspect ckpt --json", "info"])
def test_a_full_disk_is_one_line_and_status_2(place, command):
    done = shell(f"mlstate {command} >/dev/full", place)
    assert (done.returncode, done.stderr) == (2, "mlstate: No space left on device\n")


@pytest.mark.parametrize("command", ["--help", "verify --help", "--version", "inspect ckpt --json"])
def test_reader_without_input_is_ignored(place, command):
    done = shell(f"mlstate {command} | (exec <&-; sleep 0.7)", place)
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_do_not_go_to_standard_output(place):
    done = shell("mlstate inspect nothing 2>&-", place)
    assert (done.returncode, done.stdout) == (2, "")
    done = shell("mlstate inspect nothing 2>&1 | (exec <&-; sleep 0.7)", place)
    assert done.returncode == 2


def test_a_closed_standard_output_leaves_the_exit_status(place):
    done = shell("mlstate diff ckpt run >&-", place)
    assert (done.returncode, done.stderr) == (1, "")


def test_names_that_standard_output_cannot_show_are_escaped(place):
    done = shell("mlstate convert ckpt ü.npz", place, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\xfc.npz (npz): ")


def test_unloadable_library_prints_one_line_with_status_2(place):
    done = shell("mlstate inspect ckpt", place, MLSTATE_CPU="sse9")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("mlstate: MLSTATE_CPU: instruction set 'sse9'")


CALLS = {
    name: call_of(name, source="ckpt", other="ckpt", target=f"{name}-out")
    for name, row in COMMANDS.items()
    if row.reads_checkpoints or name == "info"
}


LINES = [*map(" ".join, CALLS.values()), "--help", "unknown", "verify nothing", "diff ckpt run"]
ALL_LINES = """
import sys
from mlstate.cli import main
for line in sys.argv[1:]:
    print(line, "ended with", main(line.split()), flush=True)
"""


def assert_all_ran(output):
    """Every command printed a text and ended."""
    for line in LINES:
        text, _, output = output.partition(f"{line} ended with ")
        status, _, output = output.partition("\n")
        assert text and status.strip() in ("0", "1", "2"), line


def test_pipes_and_no_color_disable_colours(place):
    command = [sys.executable, "-c", ALL_LINES, *LINES]
    pipe = ["bash", "-c", '"$@" 2>&1', "-", *command]
    done = child.finished(pipe, folder=place, **environment())
    assert_all_ran(done.stdout)
    assert "\x1b" not in done.stdout
    for path in place.glob("*-out"):
        shutil.rmtree(path)
    terminal, other = pty.openpty()
    variables = environment(NO_COLOR="1", TERM="xterm-256color")
    with subprocess.Popen(command, cwd=place, env=variables, stdout=other, stderr=other):
        os.close(other)
        output = b""
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal as EIO
            while chunk := os.read(terminal, 10_000):
                output += chunk
    os.close(terminal)
    assert_all_ran(output.decode())
    assert b"\x1b[3" not in output and b"\x1b[1" not in output


@pytest.mark.parametrize("command", CALLS.values(), ids=" ".join)
def test_json_is_all_that_is_printed(place, command, monkeypatch, capfd):
    monkeypatch.chdir(place)
    assert main([*command, "--json"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert isinstance(json.loads(out), dict)
