"""How an acquisition waits for a lock that is held: in line, until woken or out of time."""

import random
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator

from django_fencing.grants import Holder, Refusal
from django_fencing.resources import Resource
from django_fencing.stores.base import LATENESS, Store
from django_fencing.timing import now

# The longest that a waiter blocks before it asks again: so much a lost wake-up costs.
_SLICE = 1.0

# Where a waiter cannot block, the pause between two attempts grows from the first to the second,
# with jitter, and stays below the 100 ms for which the lock is kept for those whose turn is near.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25
_PAUSE_OF_THE_FIRST, _FIRST = 0.06, 2

# How long the first in line waits for the lease to have run out.
_MARGIN = 0.002

# How long the store may take to answer: a connection that is stuck does not eat the whole wait.
_LEAST_PATIENCE, _MOST_PATIENCE = 0.4, 1.0


class Waiting:
    """
    The waiting of one acquisition, for so many seconds.

    `came` is when it came into the line, as the store counts; 0 if it has not.
    """

    def __init__(self, seconds: float, cancelled: threading.Event | None) -> None:
        self.came = 0
        self.in_line = False
        self._seconds = seconds
        self._deadline = now() + seconds
        self._cancelled = cancelled
        self._longest = _SHORTEST_PAUSE  # of the pauses
        self._refusal: Refusal | None = None  # the newest answer, None if there was none

    def attempts(self, store: Store, resource: Resource, holder: Holder) -> Iterator[None]:
        """
        Yield at each attempt: the last one comes at the deadline.

        Raise CancelledError as soon as the waiting is cancelled.
        """
        while True:
            self._refusal = None
            yield
            if (rest := self.rest) <= 0:
                return
            self._block(rest, store, resource, holder)

    def note(self, refusal: Refusal) -> None:
        """Note the store's answer to this attempt."""
        self._refusal, self.came = refusal, refusal.came
        self.in_line = refusal.place is not None

    @property
    def rest(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._deadline - now())

    @property
    def rest_for_the_row(self) -> float:
        """For how long the database may wait; nobody can wake it when the waiting is cancelled."""
        return self.rest if self._cancelled is None else 0.0

    @property
    def slice(self) -> float:
        """For how long the next block may last; 0 at the last attempt."""
        return min(_SLICE, self.rest)

    @property
    def patience(self) -> float | None:
        """For how long the store may take to answer, None if as long as its client waits."""
        if not self._seconds:
            return None
        return min(max(_LEAST_PATIENCE, self.rest), _MOST_PATIENCE)

    def _block(self, rest: float, store: Store, resource: Resource, holder: Holder) -> None:
        """Wait until it is worth while to ask again, at most for a slice."""
        if self._refusal is None:
            self._pause(rest, near=False)
            return
        length = min(_SLICE, rest)
        if self._refusal.place == 0 and self._refusal.remaining is not None:
            length = min(length, self._refusal.remaining + _MARGIN)
        # The block of the last slice may end late, and the attempt at the deadline may not.
        is_last = length == rest
        block = max(0.0, rest - LATENESS) if is_last else length
        woken = store.wait(resource, holder, block, cancelled=self._cancelled) if block else False
        if woken is None:
            self._pause(rest, near=(self._refusal.place or 0) < _FIRST)
        elif is_last and not woken:
            self._sleep(self.rest)

    def _pause(self, rest: float, *, near: bool) -> None:
        """Sleep where it cannot block; who is `near` its turn for less long."""
        longest = min(self._longest, _PAUSE_OF_THE_FIRST) if near else self._longest
        self._sleep(min(rest, random.uniform(longest / 2, longest)))  # noqa: S311 - jitter
        self._longest = min(2 * self._longest, _LONGEST_PAUSE)

    def _sleep(self, seconds: float) -> None:
        if self._cancelled is None:
            time.sleep(seconds)
        elif self._cancelled.wait(seconds):
            raise CancelledError
