"""A bad line to Redis: it loses, delays and doubles the scripts that pass over it."""

import queue
import select
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

# Of a pool whose connections repeat a command that got no answer, in each redis-py since 5.2.
REPEATING = {
    "retry": Retry(NoBackoff(), 3),
    "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
}

SECONDS = 20  # after which whoever waits for a held-back script fails its test


class Fault(Enum):
    """What happens to one script."""

    NONE = "it passes"
    REQUEST_LOST = "the connection ends before the server has the script"
    REPLY_LOST = "the server runs the script, and the connection ends before the reply"
    HELD_BACK = "nothing moves until deliver(): the client runs into its timeout"
    DOUBLED = "the server runs the script twice, and the client gets the second reply"


class Proxy(socketserver.ThreadingUnixStreamServer):
    """
    Passes bytes between the clients of its own Unix socket and that of the server.

    The next scripts (EVALSHA, EVAL) meet the faults in `plan`, then all pass. While `cut` is
    set, no connection lives for longer than it takes to connect.
    """

    def __init__(self, upstream: str, path: Path) -> None:
        super().__init__(str(path), _Connection)
        self.upstream = upstream
        self.url = f"unix://{path}?db=0"
        self.plan: list[Fault] = []
        self.cut = threading.Event()
        self.held_back: queue.Queue[bytes] = queue.Queue()
        self.clients: set[socket.socket] = set()

    def fault_of(self, request: bytes) -> Fault:
        is_script = b"\r\nEVAL" in request
        return self.plan.pop(0) if is_script and self.plan else Fault.NONE

    def deliver(self) -> bytes:
        """Send the oldest script that was held back to the server, and return the reply."""
        request = self.held_back.get(timeout=SECONDS)
        with self.connect() as server:
            return _answer(server, request)

    def connect(self) -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        server.settimeout(SECONDS)
        server.connect(self.upstream)
        return server

    def hang_up(self) -> None:
        """End the connections of all clients, and every new one at once."""
        self.cut.set()
        for client in list(self.clients):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        self.server.clients.add(self.request)
        try:
            if self.server.cut.is_set():
                return
            # A client that went away, or a server that was stopped, ends the connection only.
            with suppress(ConnectionError), self.server.connect() as server:
                self._pass_on(server)
        finally:
            self.server.clients.discard(self.request)

    def _pass_on(self, server: socket.socket) -> None:
        while True:
            (sender, *_), _, _ = select.select([self.request, server], [], [])
            data = sender.recv(65536)
            if not data:
                return
            if sender is server:
                self.request.sendall(data)
            elif not self._send(server, data):
                return

    def _send(self, server: socket.socket, request: bytes) -> bool:
        """Send `request` with its fault; say whether the connection lives on."""
        fault = self.server.fault_of(request)
        if fault is Fault.REQUEST_LOST:
            return False
        if fault is Fault.REPLY_LOST:
            _answer(server, request)
            return False
        if fault is Fault.HELD_BACK:
            self.server.held_back.put(request)
            return True
        if fault is Fault.DOUBLED:
            _answer(server, request)
        server.sendall(request)
        return True


def _answer(server: socket.socket, request: bytes) -> bytes:
    server.sendall(request)
    return server.recv(65536)


@contextmanager
def proxied(upstream: str, path: Path) -> Iterator[Proxy]:
    """Run a proxy at `path` in front of the Unix socket `upstream`."""
    with Proxy(upstream, path) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield proxy
        finally:
            proxy.hang_up()
            proxy.shutdown()
            thread.join(SECONDS)
