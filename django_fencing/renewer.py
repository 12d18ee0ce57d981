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

from django_fencing.signals import logger
from django_fencing.timing import now

# Seconds for which the thread stays when there is nothing to renew.
_LINGER = 0.1

# Seconds after which it goes on with a lease in which something unforeseen has happened.
_RECOVERY = 0.5


class Renewable(Protocol):
    """What is renewed. It is not kept from the garbage collector."""

    @property
    def _is_renewed(self) -> bool:
        """Whether it may have to be renewed again."""

    @property
    def _renewed_within(self) -> float:
        """Seconds from now after which it has to be renewed at the latest."""

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
        self._starting = threading.RLock()

    def add(self, lease: Renewable, after: float) -> None:
        """Renew `lease` in so many seconds for the first time."""
        inbox = self._inbox
        reference = ref(lease, lambda _: inbox.put(None))
        with self._starting:
            inbox.put((now() + after, next(self._numbers), reference))
            if not self._running:
                threading.Thread(target=self._run, name="fencing-renewal", daemon=True).start()
                self._running = True

    def look(self) -> None:
        """Let the thread see which leases have ended, and which are due earlier."""
        self._inbox.put(None)

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
                    if (after := _renewed(reference)) is not None:
                        heapq.heappush(due, (now() + after, number, reference))
                continue
            if item is None:
                due = [_sooner(one) for one in due if _goes_on(one[2])]
                heapq.heapify(due)
            else:
                heapq.heappush(due, item)

    def _ends(self) -> bool:
        with self._starting:
            self._running = not self._inbox.empty()
            return not self._running


def aside(tell: Callable[[], object]) -> None:
    """Call `tell` in a thread of its own: a receiver that takes its time holds up no renewal."""
    name = "fencing-announcement"
    try:
        threading.Thread(target=_told, args=(tell,), name=name, daemon=True).start()
    except RuntimeError:  # there can be no more threads, or the interpreter ends
        _told(tell)


def _told(tell: Callable[[], object]) -> None:
    try:
        tell()
    except BaseException:  # noqa: BLE001 - nobody else hears of it
        logger.exception("announcement_failed")
    finally:
        for connection in connections.all(initialized_only=True):
            connection.close()


def _renewed(reference: "ref[Renewable]") -> float | None:
    lease = reference()
    try:
        return None if lease is None else lease._renew()
    except BaseException:  # noqa: BLE001 - the other leases are renewed on
        logger.exception("renewal_failed")
        return _RECOVERY


def _goes_on(reference: "ref[Renewable]") -> bool:
    lease = reference()
    return lease is not None and lease._is_renewed


def _sooner(one: _Due) -> _Due:
    when, number, reference = one
    lease = reference()
    return one if lease is None else (min(when, now() + lease._renewed_within), number, reference)


renewer = Renewer()

# A child process has its parent's leases in memory, and not its thread.
os.register_at_fork(after_in_child=renewer.__init__)  # type: ignore[misc]
