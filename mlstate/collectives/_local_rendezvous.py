"""How processes of one host find each other: socket, ranks that are late, missing or duplicate.

Rank 0 listens; the other ranks connect and send their rank. When all have connected, rank 0
closes the listener and sends each rank a descriptor of the shared memory. That memory has no
name in the file system, so nothing remains if a process is killed.

Both sides send lines of JSON. A line with "error" ends the rendezvous for all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from .. import _core
from ._arguments import failed

if TYPE_CHECKING:
    import socket

    from ..errors import CollectiveError

LINUX = sys.platform == "linux"
VERSION = 1  # of these messages and of the shared memory; equal on all ranks
LINE_BYTES = 4096  # longest line
RETRY_SECONDS = 0.01  # between attempts to connect while rank 0 does not listen yet
GRACE_SECONDS = 1.0  # late ranks still get the error during this time


class _PeerLostError(Exception):
    """The other process closed its socket."""


def _join_error(rank: int, reason: str) -> CollectiveError:
    """Return the error of `LocalGroup.join` on this `rank`; `reason`: cause and remedy."""
    return failed("LocalGroup.join", rank, reason)


# ---- socket address ----


def _socket_address(name: str) -> str:
    """Return the address of the Unix socket on which rank 0 of the job `name` listens.

    On Linux it is an abstract name, elsewhere a path. It differs between users.
    """
    import hashlib

    digest = hashlib.sha256(name.encode()).hexdigest()[:24]
    label = f"mlstate-{os.getuid()}-{digest}"
    if LINUX:
        return f"\0{label}"  # abstract; vanishes with its last socket
    import tempfile

    return os.path.join(tempfile.gettempdir(), f"{label}.sock")


def _get_credentials(peer: socket.socket) -> tuple[int, int]:
    """Return process id (0: unknown) and user id of the process at the other end of `peer`."""
    import socket
    import struct

    if not LINUX:
        return 0, os.getuid()  # the socket's file has mode 0600
    ucred = struct.Struct("3i")  # process, user, group
    data = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size)
    process, user, _ = ucred.unpack(data)
    return process, user


def _is_other_user(peer: socket.socket) -> bool:
    """Return whether the other process belongs to another user."""
    return _get_credentials(peer)[1] != os.getuid()


def _open_listener(address: str) -> socket.socket | None:
    """Return a socket that listens at `address`; the caller closes it.

    None if another process listens there: the caller then tries to connect. Raises OSError, with
    the address as its file name, if no process can listen there.
    """
    import errno
    import socket

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if address.startswith("\0"):
            listener.bind(address)
        else:
            _remove_stale(address)
            listener.bind(address)
            os.chmod(address, 0o600)
        listener.listen(128)
    except OSError as error:
        was_bound = bool(listener.getsockname())  # then another process removed the file
        listener.close()
        if was_bound or error.errno == errno.EADDRINUSE:
            return None
        number, text = error.errno or errno.ENAMETOOLONG, error.strerror or str(error)
        raise OSError(number, text, address.replace("\0", "@")) from error
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket file at `path` if its process was killed, so that none listens there."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError:
            pass  # no such file, or not known to be stale: `bind` decides


# ---- lines ----


def _send_line(peer: socket.socket, message: dict[str, Any]) -> None:
    """Send a message as a line of JSON; if the other process is gone, do nothing."""
    with contextlib.suppress(OSError):
        peer.sendall(json.dumps(message).encode() + b"\n")


def _receive_line(peer: socket.socket, deadline: float) -> tuple[dict[str, Any], int]:
    """Return a line's message, and the file descriptor that came with it, or -1.

    The caller owns the descriptor. `deadline`: on `time.monotonic`. Raises `_PeerLostError` if the
    other process is gone or sends something else, and TimeoutError after the deadline.
    """
    import socket

    data, descriptors = b"", [-1]  # the last descriptor is returned, others are closed
    try:
        while not data.endswith(b"\n"):
            peer.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                chunk, received, _, _ = socket.recv_fds(peer, LINE_BYTES, 1)
            except TimeoutError:
                raise
            except OSError:
                chunk, received = b"", []
            descriptors += received
            if not chunk or len(data) > LINE_BYTES:
                raise _PeerLostError
            data += chunk
        return _parse_line(data), descriptors.pop()
    finally:
        for unused in descriptors[1:]:
            os.close(unused)


def _receive_hello(peer: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the message in the first line of another process.

    A descriptor that came with it is closed: only rank 0 sends one. Raises as `_receive_line`.
    """
    message, descriptor = _receive_line(peer, deadline)
    if descriptor >= 0:
        os.close(descriptor)
    return message


def _parse_line(data: bytes) -> dict[str, Any]:
    """Return the message in a line; raise `_PeerLostError` if it is not a JSON object."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise _PeerLostError from None
    if not isinstance(message, dict):
        raise _PeerLostError
    return message


# ---- memory ----


def make_memory(size: int) -> int:
    """Return a descriptor of `size` zero bytes of unnamed shared memory; the caller closes it.

    Raises OSError if there is not enough memory.
    """
    if LINUX:
        import fcntl

        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create("mlstate-group", flags)
        try:
            os.posix_fallocate(descriptor, 0, size)  # fails now, not with SIGBUS on use
            # so that no rank can make it shorter while others use it
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    import tempfile

    descriptor, path = tempfile.mkstemp(prefix="mlstate-group-")
    try:
        os.unlink(path)
        os.ftruncate(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


# ---- rank 0 ----


class _Host:
    """Rank 0 during the rendezvous; the caller closes the listener."""

    def __init__(self, name: str, world_size: int, listener: socket.socket) -> None:
        self._name = name
        self._world_size = world_size
        self._listener = listener
        self.ranks: dict[int, socket.socket] = {}  # connections of the known ranks
        self._unidentified: list[socket.socket] = []  # connected, but have not sent their rank

    def close(self) -> None:
        """Close all connections."""
        for peer in (*self._unidentified, *self.ranks.values()):
            peer.close()

    def send_error(self, reason: str) -> CollectiveError:
        """Send an error to all ranks, also to slightly late ones; return it as an exception.

        Waits up to `GRACE_SECONDS` for ranks that have not connected.
        """
        informed = len(self.ranks) + len(self._unidentified)
        for peer in (*self.ranks.values(), *self._unidentified):
            _send_line(peer, {"error": reason})
        end = time.monotonic() + GRACE_SECONDS
        while informed < self._world_size - 1 and time.monotonic() < end:
            self._listener.settimeout(max(end - time.monotonic(), 1e-3))
            with contextlib.suppress(OSError):
                peer, _ = self._listener.accept()
                self._unidentified.append(peer)
                _send_line(peer, {"error": reason})
                informed += 1
        return _join_error(0, reason)

    def gather(self, deadline: float, seconds: float) -> None:
        """Accept connections and read their ranks, until all ranks have connected.

        Raises CollectiveError at the deadline, and for ranks that contradict each other; all ranks
        get that error. `deadline`: on `time.monotonic`. `seconds`: the whole time limit, for the
        error.
        """
        import select

        while len(self.ranks) < self._world_size - 1:
            left = deadline - time.monotonic()
            if left <= 0:
                missing = [r for r in range(1, self._world_size) if r not in self.ranks]
                raise self.send_error(
                    f"ranks {missing} of job {self._name!r} did not join within {seconds:g} s; "
                    "start them, with this name and on this host"
                )
            waiting = [self._listener, *self._unidentified, *self.ranks.values()]
            poll = select.poll()  # select() refuses large descriptors
            for waiting_socket in waiting:
                poll.register(waiting_socket, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(min(left, 1.0) * 1000)}
            self._handle_sockets(
                [waiting_socket for waiting_socket in waiting if waiting_socket.fileno() in ready],
                deadline,
            )

    def _handle_sockets(self, ready: list[socket.socket], deadline: float) -> None:
        """Accept new processes, read their ranks, and drop ranks whose connection has ended.

        `ready`: sockets with something to read, the listener or connections. `deadline`: of the
        rendezvous, on `time.monotonic`. Raises CollectiveError for a conflict, as `_register_rank`.
        """
        for peer in ready:
            if peer is self._listener:
                self._accept_peer()
            elif peer in self._unidentified:
                self._unidentified.remove(peer)
                try:
                    # at most a second, so that a silent process does not block the others
                    self._register_rank(
                        peer, _receive_hello(peer, min(deadline, time.monotonic() + 1))
                    )
                except (_PeerLostError, TimeoutError):
                    peer.close()
            else:  # known ranks send nothing more: this one is gone, and may reconnect
                rank = next(rank for rank, joined in self.ranks.items() if joined is peer)
                self.ranks.pop(rank).close()

    def _accept_peer(self) -> None:
        """Accept a connection; its rank is not known yet. Other users' processes are refused."""
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        if _is_other_user(peer):
            peer.close()
        else:
            self._unidentified.append(peer)

    def _register_rank(self, peer: socket.socket, hello: dict[str, Any]) -> None:
        """Register the process at `peer` with the rank in its first message, `hello`.

        Raises CollectiveError for a conflict, which ends the rendezvous for all ranks. A process
        with an invalid rank gets an error line; then `_PeerLostError` is raised, and the rendezvous
        continues.
        """
        rank, world_size, version = map(hello.get, ("rank", "world_size", "version"))
        if type(version) is not int or type(world_size) is not int:
            raise _PeerLostError
        if type(rank) is not int or not 0 <= rank < world_size:
            reason = (
                f"rank {json.dumps(rank)[:40]} is not a rank of a group with world_size="
                f"{world_size}; pass an int from 0 to {world_size - 1}"
            )
            _send_line(peer, {"error": reason})
            raise _PeerLostError
        self._unidentified.append(peer)  # so that `send_error` reaches it
        if version != VERSION:
            raise self.send_error(
                f"rank {rank} has another version of mlstate; install the same everywhere"
            )
        if world_size != self._world_size:
            raise self.send_error(
                f"rank {rank} expects {world_size} ranks, rank 0 expects "
                f"{self._world_size}; pass the same world_size to all"
            )
        if rank == 0 or rank in self.ranks:
            raise self.send_error(
                f"two processes of job {self._name!r} claim to be rank {rank}; give each process "
                "its own rank, and each job its own name"
            )
        process = _get_credentials(peer)[0]
        rank_of = {_get_credentials(joined)[0]: other for other, joined in self.ranks.items()}
        rank_of[os.getpid()] = 0  # this process is rank 0
        same_process = rank_of.get(process) if process else None  # 0: unknown
        if same_process is not None:  # file locks belong to processes, not to ranks
            raise self.send_error(
                f"ranks {same_process} and {rank} are one process; LocalGroup.threads makes a "
                "group of threads"
            )
        self._unidentified.remove(peer)
        self.ranks[rank] = peer


def _host_group(
    name: str, world_size: int, listener: socket.socket, deadline: float, seconds: float
) -> Any:
    """Run the rendezvous as rank 0, and return rank 0's link to the group.

    After the memory is sent, each rank answers "joined" or an error. Only if all have joined, all
    get "go". `listener` is closed once all ranks have connected. `deadline`: on `time.monotonic`.
    `seconds`: the whole time limit, for the error. Raises CollectiveError, which the other ranks
    raise too.
    """
    import socket

    host = _Host(name, world_size, listener)
    try:
        host.gather(deadline, seconds)
        listener.close()
        link = _make_group(host, world_size)
        for rank, peer in host.ranks.items():
            try:
                answer, _ = _receive_line(peer, deadline)
            except (_PeerLostError, TimeoutError):
                answer = {"error": f"rank {rank} went away while the group was made; start anew"}
            if "error" in answer:
                for other in host.ranks.values():
                    _send_line(other, answer)
                raise _join_error(0, answer["error"])
        for peer in host.ranks.values():
            peer.settimeout(None)
            _send_line(peer, {"go": True})
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
        return link
    finally:
        host.close()


def _make_group(host: _Host, world_size: int) -> Any:
    """Create the shared memory, send its descriptor to all ranks, and return rank 0's link.

    Raises CollectiveError if there is not enough memory; all ranks get that error.
    """
    import socket

    try:
        descriptor = make_memory(_core.local_measure(world_size))
    except OSError as error:
        reason = f"there is no shared memory for {world_size} ranks ({error})"
        for peer in host.ranks.values():
            _send_line(peer, {"error": reason})
        raise _join_error(0, reason) from error
    # Sent first: no other descriptor of the file may be closed once the lock is held.
    for peer in host.ranks.values():
        with contextlib.suppress(OSError):
            socket.send_fds(peer, [b'{"memory": true}\n'], [descriptor])
    return _core.local_join(world_size, 0, descriptor)  # owns the descriptor, after errors too


# ---- other ranks ----


def _join_group(name: str, rank: int, world_size: int, address: str, deadline: float) -> Any:
    """Join the rendezvous at `address` as `rank`, and return this rank's link to the group.

    None if rank 0 does not listen or has ended that rendezvous: the caller tries again. `deadline`:
    on `time.monotonic`. Raises CollectiveError for an error of rank 0, and TimeoutError.
    """
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
        try:
            host.settimeout(max(deadline - time.monotonic(), 1e-3))
            host.connect(address)
        except OSError:
            return None
        if _is_other_user(host):
            raise _join_error(
                rank, f"another user of this host uses the job name {name!r}; choose a name"
            )
        _send_line(host, {"version": VERSION, "rank": rank, "world_size": world_size})
        try:
            answer, descriptor = _receive_line(host, deadline)
        except _PeerLostError:
            return None  # that rendezvous was over, or rank 0 was killed: try again
        if "error" in answer or descriptor < 0:
            raise _join_error(rank, str(answer.get("error", "rank 0 sent no memory")))
        try:
            link = _core.local_join(world_size, rank, descriptor)
        except Exception as error:
            _send_line(host, {"error": f"rank {rank} cannot join: {error}"})
            raise
        _send_line(host, {"joined": True})
        try:
            answer, _ = _receive_line(host, deadline)
        except _PeerLostError:
            answer = {"error": "rank 0 went away while the group was made; start anew"}
        if "error" in answer:
            link.close()
            raise _join_error(rank, str(answer["error"]))
        return link


def meet(name: str, rank: int, world_size: int, seconds: float) -> Any:
    """Wait up to `seconds` for all ranks of the job `name`, and return this rank's link to them.

    Raises CollectiveError if ranks are missing then, or contradict each other, OSError if rank 0
    cannot listen.
    """
    address = _socket_address(name)
    deadline = time.monotonic() + seconds
    while True:
        if rank == 0:
            listener = _open_listener(address)
            if listener is not None:
                with listener:
                    try:
                        return _host_group(name, world_size, listener, deadline, seconds)
                    finally:
                        if not address.startswith("\0"):
                            with contextlib.suppress(FileNotFoundError):
                                os.unlink(address)
        # Rank 0 gets here if another process listens, probably a second rank 0.
        try:
            link = _join_group(name, rank, world_size, address, deadline)
        except TimeoutError:
            raise _join_error(
                rank,
                f"not all ranks of job {name!r} joined within {seconds:g} s; see the error "
                "on rank 0",
            ) from None
        if link is not None:
            return link
        if time.monotonic() >= deadline:
            raise _join_error(
                rank,
                f"rank 0 of job {name!r} did not start within {seconds:g} s; start it, with this "
                "name, on this host and as this user",
            )
        time.sleep(RETRY_SECONDS)
