"""The daemon thread of this process that renews all leases that ask for it."""

import heapq
import itertools
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol
from weakref import ref

from django.db import connections

from django_fencing.timing import now

# Seconds for which the thread stays when there is nothing to renew.
_LINGER = 0.1


class Renewable(Protocol):
    """What is renewed. It is not kept from the garbage collector."""

    @property
    def _is_renewed(self) -> bool:
        """Whether it may have to be renewed again."""

    def _renew(self) -> float | None:
        """Renew, and return in how many seconds to do so again, None if never."""


# When, which of those of the same moment, and what.
_Due = tuple[float, int, "ref[Renewable]"]


class Renewer:
    """The thread, which begins with the first lease to renew and ends after the last one."""

    def __init__(self) -> None:
        # SimpleQueue.put() is safe in a finalizer, which may run inside of any function.
        self._inbox: SimpleQueue[_Due | None] = SimpleQueue()
        self._numbers = itertools.count()
        self._running = False
        self._starting = threading.Lock()

    def add(self, lease: Renewable, after: float) -> None:
        """Renew `lease` in so many seconds for the first time."""
        item = (now() + after, next(self._numbers), ref(lease, self._gone()))
        with self._starting:
            self._inbox.put(item)
            if not self._running:
                thread = threading.Thread(target=self._run, name="fencing-renewal", daemon=True)
                self._running = True
                thread.start()

    def look(self) -> None:
        """Let the thread see which leases have ended."""
        self._inbox.put(None)

    def _gone(self) -> Callable[[object], None]:
        inbox = self._inbox
        return lambda _: inbox.put(None)

    def _run(self) -> None:
        due: list[_Due] = []
        while True:
            rest = max(0.0, due[0][0] - now()) if due else _LINGER
            try:
                item = self._inbox.get(timeout=rest)
            except Empty:
                if not due and self._ends():
                    return
                while due and due[0][0] <= now():
                    _, number, reference = heapq.heappop(due)
                    if (after := self._renew(reference)) is not None:
                        heapq.heappush(due, (now() + after, number, reference))
                continue
            if item is None:
                due = [one for one in due if _goes_on(one[2])]
                heapq.heapify(due)
            else:
                heapq.heappush(due, item)

    def _renew(self, reference: "ref[Renewable]") -> float | None:
        lease = reference()
        try:
            return None if lease is None else lease._renew()
        finally:
            for connection in connections.all(initialized_only=True):  # of signals' receivers
                connection.close()

    def _ends(self) -> bool:
        with self._starting:
            self._running = not self._inbox.empty()
            return not self._running


def _goes_on(reference: "ref[Renewable]") -> bool:
    lease = reference()
    return lease is not None and lease._is_renewed


renewer = Renewer()

# A child process has its parent's leases in memory, and not its thread.
os.register_at_fork(after_in_child=renewer.__init__)  # type: ignore[misc]
