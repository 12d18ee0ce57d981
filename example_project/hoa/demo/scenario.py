"""The scenario: replica A stands still, B takes over, A goes on as if nothing had happened."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date

from django_redis import get_redis_connection

from hoa.demo.guards import VARIANTS
from hoa.demo.replicas import PATIENCE, Replica, Unexpected
from hoa.demo.timeline import Timeline, Write
from hoa.demo.verdict import Observed, observe
from hoa.meters import MeterService
from hoa.models import Organization

MONTH = date(2026, 11, 1)


def play(variant: str, organization: Organization, write: Write, ttl: float) -> Observed:
    """Let two replicas charge the organization under the variant's guard, and write how it goes."""
    with ExitStack() as stack:
        meters = stack.enter_context(MeterService(hold=True))
        a, b = (
            stack.enter_context(start_replica(name, variant, organization, meters, ttl))
            for name in "AB"
        )

        for replica in (a, b):
            replica.next_event()  # it is ready
        timeline = Timeline(write)
        timeline.demo(f"{a} and {b} are ready")

        a.go()
        follow(a, timeline, until="month_not_run")
        meters.arrived(1)
        a.pause()
        timeline.demo("replica A is paused in that call (SIGSTOP)")
        lock_key = VARIANTS[variant].lock_key(organization)
        wait_until(lambda: not get_redis_connection().exists(lock_key))
        timeline.demo(f"the lock of replica A has run out in Redis (ttl {ttl:g} s)")

        b.go()
        follow(b, timeline, until="month_not_run")
        meters.arrived(2)
        timeline.demo("replica A goes on (SIGCONT) and gets its answer; B's has to wait")
        meters.let_go(1)
        a.resume()
        ending_of_a = follow(a, timeline, until="ended")

        timeline.demo("replica B gets its answer")
        meters.let_go(2)
        ending_of_b = follow(b, timeline, until="ended")
    return observe(organization, MONTH, {"A": ending_of_a, "B": ending_of_b})


def start_replica(
    name: str, variant: str, organization: Organization, meters: MeterService, ttl: float
) -> Replica:
    arguments = [variant, str(organization.pk), f"{MONTH:%Y-%m}", f"--ttl={ttl}"]
    return Replica(name, arguments, {"METERS_URL": meters.url})


def follow(replica: Replica, timeline: Timeline, *, until: str) -> str:
    """Show the replica's events up to that one, and return how it ended, if it did."""
    while True:
        event = replica.next_event()
        timeline.replica(replica, event)
        if event["step"] == until:
            return str(event.get("ending", ""))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise Unexpected(f"The lock was still there after {PATIENCE} s.")
        time.sleep(0.02)
