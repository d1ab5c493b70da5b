"""Children of a process with the shim preloaded, which report what happens in them."""

import contextlib
import ctypes
import json
import os
import signal
import time

SHIM = ctypes.CDLL(None)
SECONDS = 30  # until a process hangs


def arm(root, fault="", log=""):
    """Start the shim in this process, for all files below `root`."""
    os.environ |= {"MLS_FAULT_ROOT": str(root), "MLS_FAULT": fault, "MLS_FAULT_LOG": str(log)}
    SHIM.mls_shim_arm()


def start_child(act, log=""):
    """Fork a process that calls `act(report)`; return its number and the pipe of its reports.

    With a log, each report is also a note in the shim's recording.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        return child, read_end
    status = 1

    def report(*values):
        line = json.dumps(values).encode()
        if log:
            SHIM.mls_shim_note(line)
        os.write(write_end, line + b"\n")

    try:
        act(report)
        status = 0
    except BaseException as error:
        SHIM.mls_shim_disarm()
        report("broken", repr(error))
    os._exit(status)


def wait_for(child, pipe, seconds=SECONDS):
    """Wait until a child ends; return its reports, as lists, and its status.

    The status is negative for a signal, and "hang" if the child had to be killed.
    """
    deadline, pieces, status = time.monotonic() + seconds, [], None
    os.set_blocking(pipe, False)
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(pipe, 1 << 16):
                pieces.append(piece)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = "hang"
        else:
            time.sleep(0.0005)
    os.close(pipe)
    return [json.loads(line) for line in b"".join(pieces).splitlines()], status
