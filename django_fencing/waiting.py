"""When to ask again for a lock that is held."""

import random
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator

from django_fencing.timing import now

# The pause between two attempts grows from the first to the second, with jitter.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25


def attempts(wait: float, cancelled: threading.Event | None = None) -> Iterator[float]:
    """
    Yield the seconds that are left at each attempt: the last one comes at the deadline.

    Raise CancelledError as soon as `cancelled` is set.
    """
    deadline = now() + wait
    pause = _SHORTEST_PAUSE
    while True:
        yield max(0.0, deadline - now())
        if (rest := deadline - now()) <= 0:
            return
        length = min(rest, random.uniform(pause / 2, pause))  # noqa: S311 - jitter
        if cancelled is None:
            time.sleep(length)
        elif cancelled.wait(length):
            raise CancelledError
        pause = min(2 * pause, _LONGEST_PAUSE)
