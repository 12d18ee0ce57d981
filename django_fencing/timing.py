"""Durations as the caller writes them, and the clock by which a lease counts its validity."""

import math
import time
from datetime import timedelta
from decimal import Decimal

# The shortest time that Redis can count.
SHORTEST = 0.001

Duration = int | float | Decimal | timedelta


def seconds(name: str, value: Duration, *, most: float, zero: bool = False) -> float:
    """
    Return the duration `value` in seconds.

    Raise TypeError for anything but int, float, Decimal and timedelta (bool and text included),
    and ValueError for NaN, for less than 1 ms (0 passes if `zero`) and for more than `most`.
    """
    if isinstance(value, bool) or not isinstance(value, Duration):
        raise TypeError(f"{name} must be a number of seconds or a timedelta, not {value!r}.")
    length = value.total_seconds() if isinstance(value, timedelta) else _as_float(value)
    if (zero and length == 0) or SHORTEST <= length <= most:
        return length
    least = "0, or at least 0.001" if zero else "at least 0.001"
    raise ValueError(f"{name} must be {least} and at most {most:g} seconds, not {value!r}.")


def _as_float(value: int | float | Decimal) -> float:
    try:
        return float(value)
    except (OverflowError, ValueError):  # 10**400; a signalling NaN
        return math.nan


# CLOCK_BOOTTIME counts the time in suspend, which CLOCK_MONOTONIC leaves out (clock_gettime(2)).
_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


def now() -> float:
    """Return the seconds of a clock that neither jumps nor, where Linux gives one, stops."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
