"""When to ask again for a lock that is held."""

import random
import time
from collections.abc import Iterator

from django_fencing.timing import now

# The pause between two attempts grows from the first to the second, with jitter.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25


def attempts(wait: float) -> Iterator[float]:
    """Yield the seconds that are left at each attempt: the last one comes at the deadline."""
    deadline = now() + wait
    pause = _SHORTEST_PAUSE
    while True:
        yield max(0.0, deadline - now())
        if (rest := deadline - now()) <= 0:
            return
        time.sleep(min(rest, random.uniform(pause / 2, pause)))  # noqa: S311 - jitter
        pause = min(2 * pause, _LONGEST_PAUSE)
