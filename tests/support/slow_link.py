"""A relay in front of a local server: limited bytes per second, and a server that falls silent."""

import contextlib
import socket
import threading
import time

BLOCK = 16 << 10


class SlowLink:
    """Relays connections to a server; a context manager.

    Attributes
    ----------
    up, down : float
        Bytes per second that all connections together send and receive.
    silent_after : int or None
        After this many bytes of answers, nothing is relayed, and connections stay open.
    """

    def __init__(self, target, *, up=1e9, down=1e9, silent_after=None):
        self._target = target
        self.up, self.down, self.silent_after = up, down, silent_after
        self._free = {"up": 0.0, "down": 0.0}  # when a direction may send again
        self._lock = threading.Lock()
        self._open = []
        self.answered = 0

    def __enter__(self):
        self._listener = socket.socket()
        # small buffers, so that the sender notices the rate of the link
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BLOCK)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self.endpoint = "http://{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        with self._lock:
            for each in (self._listener, *self._open):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target)
                with self._lock:
                    self._open += [client, server]
                for where, ends in (("up", (client, server)), ("down", (server, client))):
                    threading.Thread(target=self._relay, args=(where, *ends), daemon=True).start()

    def _pause(self, where, nbytes):
        """Wait until the link has sent some bytes."""
        rate = self.up if where == "up" else self.down
        with self._lock:
            begin = max(self._free[where], time.monotonic())
            self._free[where] = begin + nbytes / rate
        time.sleep(max(0.0, self._free[where] - time.monotonic()))

    def _is_silent(self, nbytes):
        with self._lock:
            self.answered += nbytes
            return self.silent_after is not None and self.answered > self.silent_after

    def _relay(self, where, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(BLOCK):
                if where == "down" and self._is_silent(len(data)):
                    return
                self._pause(where, len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
