"""The water meters: what reads them over HTTP, and the small service that is asked."""

import json
import threading
import zlib
from collections.abc import Callable, Iterable
from datetime import date
from decimal import Decimal
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, cast
from urllib.parse import parse_qs, urlencode, urlsplit
from urllib.request import ProxyHandler, build_opener

from django.conf import settings

TIMEOUT = 10  # seconds for a connection and for each part of the reply

_opener = build_opener(ProxyHandler({}))  # the meters are at home: HTTP_PROXY is not for them


class MetersUnavailable(Exception):
    """The meters could not be asked, or gave no usable answer."""


def read_meters(labels: Iterable[str], month: date) -> dict[str, Decimal]:
    """Return the cubic metres that each meter counted in the month. Raise MetersUnavailable."""
    labels = list(labels)
    query = urlencode({"month": f"{month:%Y-%m}", "meter": labels}, doseq=True)
    try:
        with _opener.open(f"{settings.METERS_URL}/readings?{query}", timeout=TIMEOUT) as reply:
            readings = json.load(reply)
        return {label: Decimal(readings[label]) for label in labels}
    except (OSError, HTTPException, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise MetersUnavailable(
            f"The meters at {settings.METERS_URL} cannot be read: {error}"
        ) from error


def reading(label: str, month: str) -> Decimal:
    """Make up what the meter counted, the same at each call: 0.0 to 19.9 cubic metres."""
    return Decimal(zlib.crc32(f"{label} {month}".encode()) % 200) / 10


class MeterService:
    """
    Serve readings on the loopback interface while its block runs.

    Each reply comes after `delay` seconds or, if the service is to `hold` them, when it is let
    go by its number: the first request is 1. `report` is told of each request.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        delay: float = 0,
        hold: bool = False,
        report: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.delay = delay
        self.hold = hold
        self.report = report
        self._changed = threading.Condition()
        self._arrived = 0
        self._let_go: set[int] = set()
        self._closed = False
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.meters = self
        # The default looks for the end of the service twice a second only.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def arrived(self, number: int, *, seconds: float = 10) -> None:
        """Return when the request has arrived. Raise TimeoutError if it does not."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= number, seconds):
                raise TimeoutError(f"Request {number} has not arrived within {seconds:g} s")

    def let_go(self, number: int) -> None:
        """Let the request be answered: one that has arrived, or that is to come."""
        with self._changed:
            self._let_go.add(number)
            self._changed.notify_all()

    def answer(self, query: str) -> dict[str, str]:
        """Return the readings that the query asks for, when they may go out."""
        asked = parse_qs(query)
        (month,) = asked.get("month", [""])
        with self._changed:
            self._arrived += 1
            number = self._arrived
            self._changed.notify_all()
            self.report(f"Request {number} asks for {month}.")
            if self.hold:
                self._changed.wait_for(lambda: self._closed or number in self._let_go)
            else:
                self._changed.wait_for(lambda: self._closed, self.delay)
        return {label: str(reading(label, month)) for label in asked.get("meter", [])}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    meters: MeterService
    daemon_threads = False  # so that closing waits for the last replies

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked is gone; that is no event."""


class _Handler(BaseHTTPRequestHandler):
    timeout = TIMEOUT

    def do_GET(self) -> None:
        readings = cast("_Server", self.server).meters.answer(urlsplit(self.path).query)
        body = json.dumps(readings).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the service reports in its own words."""
