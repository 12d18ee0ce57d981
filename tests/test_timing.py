"""Durations and the clock."""

import time
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from django_fencing import timing
from django_fencing.timing import now, seconds


@pytest.mark.parametrize(
    ("value", "length"),
    [
        (30, 30.0),
        (1.5, 1.5),
        (Decimal("0.25"), 0.25),
        (timedelta(minutes=5), 300.0),
        (0.001, 0.001),
        (86_400, 86_400.0),
    ],
)
def test_numbers_and_timedeltas_are_seconds(value: Any, length: float) -> None:
    """Every kind of duration means seconds."""
    assert seconds("ttl", value, most=86_400) == length


@pytest.mark.parametrize(
    "value", [True, False, None, "30", b"30", [], Fraction(1, 2), 1j], ids=repr
)
def test_what_is_no_duration_is_a_type_error_that_names_the_argument(value: Any) -> None:
    """A bool is not one second and a text is not parsed."""
    with pytest.raises(TypeError, match="^ttl must be a number of seconds or a timedelta"):
        seconds("ttl", value, most=86_400)


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        0.0004,
        float("nan"),
        float("inf"),
        -float("inf"),
        10**400,
        1e16,
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("Infinity"),
        timedelta(0),
        timedelta(seconds=-1),
        timedelta(days=2),
        86_400.001,
    ],
    ids=lambda value: repr(value)[:30],
)
def test_odd_durations_are_a_value_error_that_names_the_argument(value: Any) -> None:
    """Nothing that is below 1 ms, beyond the maximum or not finite passes."""
    with pytest.raises(ValueError, match="^wait must be at least 0.001 and at most 86400 seconds"):
        seconds("wait", value, most=86_400)


def test_zero_passes_where_it_means_one_attempt() -> None:
    """Zero is a wait, and what lies between zero and 1 ms is none."""
    assert seconds("wait", 0, most=10, zero=True) == 0

    with pytest.raises(ValueError, match="^wait must be 0, or at least 0.001"):
        seconds("wait", 0.0004, most=10, zero=True)


def test_the_clock_is_the_one_that_counts_suspend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives CLOCK_BOOTTIME; elsewhere the monotonic clock serves."""
    assert now() == pytest.approx(time.clock_gettime(time.CLOCK_BOOTTIME), abs=5)

    monkeypatch.setattr(timing, "_CLOCK", None)

    assert now() == pytest.approx(time.monotonic(), abs=5)
