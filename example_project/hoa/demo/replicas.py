"""Replicas: processes that the demo starts, pauses, and never leaves behind."""

import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, Any, Self, cast

from django.conf import settings

Event = dict[str, Any]

# Far more than any step takes, so that a demo that goes wrong ends all the same.
PATIENCE = 15


class Unexpected(Exception):
    """The demo did not go as it has to; the message says where."""


class Replica:
    """
    One `manage.py demo_replica` process, for the length of a block.

    It works from go() on. Its events, lines of JSON, are read one by one. At the end of the
    block it is killed if it still runs, paused or not.
    """

    def __init__(self, name: str, arguments: list[str], environ: dict[str, str]) -> None:
        self.name = name
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(  # noqa: S603 - the project's own command
            [
                sys.executable,
                str(settings.BASE_DIR / "manage.py"),
                "demo_replica",
                f"--parent={os.getpid()}",
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environ},
            process_group=0,  # Ctrl-C is for the demo alone
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __str__(self) -> str:
        return f"replica {self.name} (pid {self._process.pid})"

    def go(self) -> None:
        """Let the replica begin."""
        stdin = cast("IO[bytes]", self._process.stdin)
        stdin.write(b"go\n")
        stdin.flush()

    def next_event(self) -> Event:
        """Return the next event. Raise Unexpected if there is none in time."""
        try:
            event = self._events.get(timeout=PATIENCE)
        except queue.Empty:
            raise Unexpected(f"Replica {self.name} told nothing for {PATIENCE} s.") from None
        if event is None:
            raise Unexpected(f"Replica {self.name} ended before it was to.")
        return event

    def pause(self) -> None:
        """Stop the process as a frozen container would be. Return when it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise Unexpected(f"Replica {self.name} ended when it was to be paused.")

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _read(self) -> None:
        for line in cast("IO[bytes]", self._process.stdout):
            self._events.put(json.loads(line))
        self._events.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()  # which also ends a paused one
        self._reader.join()
        self._process.communicate()


def end_with(parent: int) -> None:
    """End this process as soon as its parent has ended, even while it is paused (on Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        sys.exit(1)
