"""Signals and the log: each event once, and nobody who listens can break the lock."""

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis
from django.db import DatabaseError, connection, transaction
from django.test import override_settings
from services import Services

from django_fencing import signals
from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import LeaseLost, LockHeld, StaleToken, StoreUnavailable
from django_fencing.grants import Holder
from django_fencing.locks import FencedLock, fenced_atomic, fenced_lock
from django_fencing.models import Fence
from django_fencing.resources import ResourceLike, resolve
from tests.helpers import (
    SECONDS,
    acquired,
    cache_at,
    committing,
    counted_calls,
    expire,
    in_threads,
    keys_of,
    row_locked,
    started,
    statements,
    taken_over,
)
from tests.shop.models import Job, JobProxy, UrgentJob

ROOT = Path(__file__).parents[1]

NAMES = (
    "lease_acquired",
    "lock_contended",
    "lease_extended",
    "lease_released",
    "lease_lost",
    "token_refused",
)
SIGNALS = {name: getattr(signals, name) for name in NAMES}

pytestmark = committing("default")

Event = tuple[str, Any, dict[str, Any]]


@contextmanager
def receiving(receiver: Callable[..., Any], *names: str) -> Iterator[None]:
    """Connect a receiver to these signals, or to all."""
    with ExitStack() as connected:
        for name in names or NAMES:
            SIGNALS[name].connect(receiver, weak=False)
            connected.callback(SIGNALS[name].disconnect, receiver)
        yield


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Collect what is sent: the signal's name, its sender, its values."""
    collected: list[Event] = []

    def receive(signal: Any, sender: Any, **values: Any) -> None:
        collected.append((signal.name, sender, values))

    with receiving(receive):
        yield collected


def names_of(events: list[Event]) -> list[str]:
    """Return the names of the signals that were sent."""
    return [name for name, _, _ in events]


@pytest.fixture(params=["row", "name"])
def resource(request: pytest.FixtureRequest, job: Job, name: str) -> ResourceLike:
    """Return a resource of each kind."""
    return (Job, job.pk) if request.param == "row" else name


def by_lock(resource: ResourceLike) -> None:
    with fenced_lock(resource):
        pass


def by_lock_without_registering(resource: ResourceLike) -> None:
    with fenced_lock(resource, register=False) as lease, lease.atomic():
        pass


def by_transaction(resource: ResourceLike) -> None:
    with fenced_atomic(resource):
        pass


def by_decorator(resource: ResourceLike) -> None:
    with_fenced_lock(lambda: resource)(lambda: None)()


def by_hand(resource: ResourceLike) -> None:
    lease = fenced_lock(resource).acquire()
    lease.release()
    lease.release()


WAYS = [by_lock, by_lock_without_registering, by_transaction, by_decorator, by_hand]
in_each_way = pytest.mark.parametrize("lock", WAYS)


# Each signal


@in_each_way
def test_acquiring_and_releasing_are_sent_once(
    lock: Callable[..., None], resource: ResourceLike, events: list[Event]
) -> None:
    """With the name, the lease, and the model of what is locked."""
    lock(resource)

    model = Fence if isinstance(resource, str) else Job
    assert names_of(events) == ["lease_acquired", "lease_released"]
    (_, sender, values), (_, _, at_the_end) = events
    lease = values["lease"]
    assert sender is model
    assert values == at_the_end == {"resource": resolve(resource).name, "lease": lease}
    assert Fence.objects.count() == (1 if model is Fence else 0)
    row = model._base_manager.get(pk=resolve(resource).pk)
    assert (row.last_fence_token, row.last_fence_holder) == (lease.token, lease.holder.id)


@in_each_way
def test_a_lock_that_is_held_is_sent_once(
    lock: Callable[..., None], resource: ResourceLike, events: list[Event]
) -> None:
    """With who asks, who holds it, and for how long yet."""
    (lease,) = in_threads(fenced_lock(resource, ttl=30, register=False).acquire)
    events.clear()

    with pytest.raises(LockHeld) as caught:
        lock(resource)

    ((name, _, values),) = events
    assert name == "lock_contended"
    assert values == {
        "resource": lease.resource,
        "holder": values["holder"],
        "held_by": caught.value.held_by,
        "retry_after": caught.value.retry_after,
    }
    assert isinstance(values["holder"], Holder)
    assert values["holder"].function.startswith("tests.test_signals.by_")
    assert "tests.helpers" in values["held_by"] or "pid" in values["held_by"]
    assert 20 < values["retry_after"] <= 30


@in_each_way
def test_nothing_is_lost_or_released_where_nothing_was_acquired(
    lock: Callable[..., None], resource: ResourceLike, events: list[Event]
) -> None:
    """A store that is away is no event of a lease."""
    with cache_at("redis://127.0.0.1:1?db=0"), pytest.raises(StoreUnavailable):
        lock(resource)

    assert events == []


@pytest.mark.parametrize(
    ("model", "sender"), [(UrgentJob, UrgentJob), (JobProxy, JobProxy), (Job, Job)]
)
def test_the_sender_is_the_model_of_the_row(model: Any, sender: Any, events: list[Event]) -> None:
    """So a receiver may listen to one model alone."""
    row = model.objects.create()
    heard: list[str] = []

    def listen(signal: Any, **values: Any) -> None:
        heard.append(signal.name)

    signals.lease_acquired.connect(listen, sender=sender)
    try:
        by_lock(row)
        by_lock("another")
    finally:
        signals.lease_acquired.disconnect(listen, sender=sender)

    assert [one for _, one, _ in events] == [sender, sender, Fence, Fence]
    assert heard == ["lease_acquired"]


def test_waiting_is_contended_once_however_often_it_asks(name: str, events: list[Event]) -> None:
    """Each acquisition that finds the lock held, and none that does not."""
    (lease,) = in_threads(lambda: acquired(name))

    with counted_calls() as calls:
        for _ in range(2):
            with pytest.raises(LockHeld):
                acquired(name, wait=0.3)
    lease.release()
    acquired(name)

    assert calls == ["EVALSHA", "BLPOP", "EVALSHA"] * 2
    assert names_of(events) == [
        "lease_acquired",
        "lock_contended",
        "lock_contended",
        "lease_released",
        "lease_acquired",
    ]


@pytest.mark.parametrize("lock", [fenced_lock, fenced_atomic])
def test_a_row_that_stays_locked_is_contention(
    name: str, events: list[Event], lock: Callable[..., Any]
) -> None:
    """Nobody holds a lease, and somebody's transaction keeps the lock from everybody else."""
    with fenced_atomic(name):
        pass
    events.clear()
    with row_locked(name), pytest.raises(LockHeld), lock(name, ttl=0.2):
        pass

    assert names_of(events)[-1] == "lock_contended"
    assert events[-1][2]["held_by"] is None


def test_a_lock_that_is_got_after_all_was_contended(name: str, events: list[Event]) -> None:
    """The holder gives it back at the very moment when it is asked for."""
    (lease,) = in_threads(lambda: acquired(name))

    def give_back(**values: Any) -> None:
        lease.release()

    with receiving(give_back, "lock_contended"):
        mine = acquired(name, wait=SECONDS)

    assert names_of(events) == [
        "lease_acquired",
        "lock_contended",
        "lease_released",
        "lease_acquired",
    ]
    assert events[-1][2]["lease"] is mine
    assert events[1][2]["holder"] is mine.holder


def test_extending_is_sent_with_the_new_end(resource: ResourceLike, events: list[Event]) -> None:
    """Each time, as it is known by then."""
    lengths = []

    def look(lease: Any, **values: Any) -> None:
        lengths.append((lease.ttl, lease.remaining > 55))

    lease = fenced_lock(resource, ttl=30, register=False).acquire()
    with receiving(look, "lease_extended"):
        lease.extend(60)
        lease.extend()

    assert names_of(events) == ["lease_acquired", "lease_extended", "lease_extended"]
    assert events[1][2] == {"resource": lease.resource, "lease": lease}
    assert lengths == [(60, True), (60, True)]


def test_a_loss_is_sent_once_however_often_it_is_found_out(
    resource: ResourceLike, events: list[Event], client: Any
) -> None:
    """With the reason."""
    lease = fenced_lock(resource).acquire()
    expire(client, resource)

    for ask in (lease.ensure_held, lease.extend, lease.ensure_held):
        with pytest.raises(LeaseLost):
            ask()
    assert not lease.release()
    assert not lease.release()

    assert names_of(events) == ["lease_acquired", "lease_lost"]
    _, sender, values = events[1]
    assert sender is (Fence if isinstance(resource, str) else Job)
    assert values == {
        "resource": lease.resource,
        "lease": lease,
        "reason": "it ran out, another holder has it, or the store has lost it",
    }


@pytest.mark.parametrize("lock", [by_lock, by_transaction, by_decorator])
def test_a_loss_that_the_end_finds_out_is_sent(
    lock: Callable[..., None], resource: ResourceLike, events: list[Event], client: Any
) -> None:
    """Instead of a release."""

    def lapse(**values: Any) -> None:
        expire(client, resource)

    with receiving(lapse, "lease_acquired"):
        lock(resource)

    assert names_of(events) == ["lease_acquired", "lease_lost"]
    assert "before its release" in events[1][2]["reason"]


def test_a_lease_that_cannot_be_given_back_is_lost(name: str, events: list[Event]) -> None:
    """It runs out by itself."""
    with ExitStack() as stack, fenced_lock(name, register=False):
        stack.enter_context(cache_at("redis://127.0.0.1:1?db=0"))

    assert names_of(events) == ["lease_acquired", "lease_lost"]
    assert "not given back" in events[1][2]["reason"]


def test_a_refused_token_is_sent_with_the_error_and_is_no_loss_too(
    resource: ResourceLike, events: list[Event], client: Any
) -> None:
    """What the database has said comes first, and is enough."""
    lock = fenced_lock(resource)
    with suppress(StaleToken), lock as older:
        newer = taken_over(lock, client)
        with pytest.raises(StaleToken) as caught, older.atomic():
            raise AssertionError
        with pytest.raises(LeaseLost):
            older.ensure_held()
    newer.release()

    assert names_of(events) == [
        "lease_acquired",
        "lease_acquired",
        "token_refused",
        "lease_released",
    ]
    assert events[2][2] == {"resource": older.resource, "lease": older, "error": caught.value}
    assert events[2][2]["error"].fence_token == newer.token
    assert events[3][2]["lease"] is newer


def test_a_lease_that_cannot_be_registered_is_lost_once(
    job: Job, events: list[Event], client: Any
) -> None:
    """Somebody else keeps the row locked."""
    lease = fenced_lock(job, ttl=0.2, register=False).acquire()

    def attempt() -> None:
        with pytest.raises(LeaseLost), lease.atomic():
            raise AssertionError

    with transaction.atomic():
        Job.objects.select_for_update().get(pk=job.pk)
        in_threads(attempt)

    assert names_of(events).count("lease_lost") == 1
    assert "could not be registered" in events[-1][2]["reason"]


# What receivers do


class OwnError(Exception):
    """Something that nobody expects."""


def everything(resource: ResourceLike, client: Any) -> None:
    """Let each of the six events happen, and check that each does what it does."""
    with fenced_atomic(resource) as row:
        assert row.last_fence_token == 1
    lock = fenced_lock(resource)
    with lock as lease:
        with pytest.raises(LockHeld, match="is held by"):
            in_threads_raising(fenced_lock(resource).acquire)
        with lease.atomic():
            lease.extend(60)
        assert client.pttl(keys_of(resource).lease) > 50_000
    assert not client.exists(keys_of(resource).lease)
    older = lock.acquire()
    newer = taken_over(lock, client)
    with pytest.raises(StaleToken), older.atomic():
        raise AssertionError
    with newer.atomic():
        pass
    expire(client, resource)
    with pytest.raises(LeaseLost):
        newer.ensure_held()
    assert not newer.release()


def in_threads_raising(function: Callable[[], Any]) -> None:
    """Run `function` in a thread, and raise what it raises."""
    (result,) = in_threads(function)
    if isinstance(result, Exception):
        raise result


def test_each_event_is_sent_while_everything_happens(
    resource: ResourceLike, events: list[Event], client: Any
) -> None:
    """What the next tests rely on."""
    everything(resource, client)

    assert {*names_of(events)} == {*NAMES}


@pytest.mark.parametrize(
    "error",
    [
        OwnError("own"),
        LockHeld("held"),
        StaleToken("stale"),
        StoreUnavailable("away"),
        DatabaseError("database"),
        AssertionError("assert"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_receiver_that_raises_changes_nothing(
    resource: ResourceLike, client: Any, error: Exception
) -> None:
    """Also where its error looks like one of the lock's own."""
    heard = []

    def fail(signal: Any, **values: Any) -> None:
        heard.append(signal.name)
        raise error

    with receiving(fail):
        everything(resource, client)

    assert {*heard} == {*NAMES}


def test_receivers_after_one_that_raises_are_called(name: str, events: list[Event]) -> None:
    """And Django logs the error of the one."""

    def fail(**values: Any) -> None:
        raise OwnError

    with receiving(fail, "lease_released"):
        heard: list[str] = []
        with receiving(lambda signal, **values: heard.append(signal.name), "lease_released"):
            acquired(name).release()

    assert heard == ["lease_released"]


@pytest.mark.parametrize("swallowed", [True, False])
def test_a_statement_of_a_receiver_that_fails_does_not_abort_the_transaction(
    resource: ResourceLike, swallowed: bool
) -> None:
    """PostgreSQL would refuse all that follows."""

    def fail(**values: Any) -> None:
        with suppress(DatabaseError if swallowed else ()), connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    with receiving(fail), fenced_lock(resource) as lease, lease.atomic():
        lease.extend()
        Job.objects.create(amount=77)
        lease.extend()

    assert Job.objects.filter(amount=77).count() == 1


def test_a_receiver_that_breaks_its_savepoint_does_not_abort_the_transaction(
    resource: ResourceLike,
) -> None:
    """It marks the transaction as one to roll back."""

    def fail(**values: Any) -> None:
        with transaction.atomic(savepoint=False):
            raise OwnError

    def mark(**values: Any) -> None:
        transaction.set_rollback(True)

    for receiver in (fail, mark):
        with (
            receiving(receiver, "lease_extended"),
            fenced_lock(resource) as lease,
            lease.atomic(),
        ):
            lease.extend()
            Job.objects.create(amount=77)

    assert Job.objects.filter(amount=77).count() == 2


def test_a_loss_inside_of_the_transaction_is_told_without_harm(
    resource: ResourceLike, client: Any
) -> None:
    """The body may go on: the fence decides."""

    def fail(**values: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    with receiving(fail), fenced_lock(resource) as lease, lease.atomic():
        expire(client, resource)
        with pytest.raises(LeaseLost):
            lease.ensure_held()
        Job.objects.create(amount=77)

    assert Job.objects.filter(amount=77).exists()


def test_an_aborted_transaction_does_not_break_what_is_announced_in_it(
    resource: ResourceLike, events: list[Event]
) -> None:
    """The body has swallowed an error of the database, and extends its lease."""
    with fenced_lock(resource, ttl=30) as lease, lease.atomic():
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        lease.extend(60)
        assert lease.remaining > 50


def test_what_a_receiver_writes_belongs_to_the_transaction_it_is_in(
    resource: ResourceLike,
) -> None:
    """It is committed with the body's work, or goes with it."""

    def write(**values: Any) -> None:
        Job.objects.create(amount=77)

    def extend(fail: bool) -> None:
        with suppress(OwnError), fenced_lock(resource) as lease, lease.atomic():
            lease.extend()
            if fail:
                raise OwnError

    with receiving(write, "lease_extended"):
        extend(fail=True)
        assert not Job.objects.filter(amount=77).exists()
        extend(fail=False)

    assert Job.objects.filter(amount=77).count() == 1


def test_a_receiver_may_take_a_lock_and_ask_the_database(resource: ResourceLike, name: str) -> None:
    """Outside of the fenced transaction it is free to do so, and what it writes stays."""

    def audit(signal: Any, resource: str, **values: Any) -> None:
        if not resource.startswith("audit"):
            with fenced_atomic(f"audit:{name}:{signal.name}"):
                Job.objects.create(note=signal.name)

    with receiving(audit, "lease_acquired", "lease_released", "lock_contended"):
        for lock in WAYS:
            lock(resource)
        lease = acquired(name)
        with pytest.raises(LockHeld):
            acquired(name)
        lease.release()

    counts = {one: Job.objects.filter(note=one).count() for one in NAMES}
    assert counts["lease_acquired"] == counts["lease_released"] == len(WAYS) + 1
    assert counts["lock_contended"] == 1


def test_a_coroutine_function_that_receives_on_the_event_loop_breaks_nothing(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Django cannot call it there: neither the block nor its own error may notice."""

    async def receive(**kwargs: Any) -> None: ...

    async def main() -> None:
        with fenced_lock(name, register=False) as lease:
            lease.extend()
            raise KeyError(name)

    with receiving(receive), pytest.raises(KeyError):
        asyncio.run(main())

    failed = [line for line in caplog.messages if line.startswith("receiver_failed ")]
    assert [line.partition("signal=")[2] for line in failed] == [
        "lease_acquired",
        "lease_extended",
        "lease_released",
    ]
    assert fenced_lock(name).acquire().release()


def test_a_receiver_may_take_the_lock_that_was_released(resource: ResourceLike) -> None:
    """It is free by then."""
    again = []

    def take(**values: Any) -> None:
        signals.lease_released.disconnect(take)
        again.append(fenced_lock(resource).acquire().release())

    with receiving(take, "lease_released"):
        by_lock(resource)

    assert again == [True]


@pytest.mark.parametrize("event", ["lease_released", "lease_lost"])
def test_a_receiver_may_release_the_lease_again(name: str, client: Any, event: str) -> None:
    """It hears what the first release has found, and hangs nobody."""
    heard = []

    def release(lease: Any, **values: Any) -> None:
        heard.append(lease.release())

    def run(pause: Any) -> bool:
        lease = acquired(name)
        if event == "lease_lost":
            expire(client, name)
        return lease.release()

    with receiving(release, event), started(run) as body:
        assert body.finish() is (event == "lease_released")

    assert heard == [event == "lease_released"]


def test_a_receiver_of_another_model_costs_nothing(job: Job) -> None:
    """Neither a savepoint nor a call."""

    def listen(**values: Any) -> None:
        raise AssertionError

    signals.lease_extended.connect(listen, sender=UrgentJob)
    try:
        with (
            fenced_lock(job) as lease,
            lease.atomic(),
            statements() as sent,
            counted_calls() as calls,
        ):
            lease.extend()
    finally:
        signals.lease_extended.disconnect(listen, sender=UrgentJob)

    assert sent == []
    assert calls == ["EVALSHA"]


# The log


LINE = re.compile(r"([a-z_]+)((?: [a-z_]+=(?:[^\s\"=]+|\"(?:[^\"\\]|\\.)*\"))*)")
PAIR = re.compile(r" ([a-z_]+)=([^\s\"=]+|\"(?:[^\"\\]|\\.)*\")")


def parsed(line: str) -> tuple[str, dict[str, str]]:
    """Read a line as any program would: an event, and pairs of keys and values."""
    assert line.isascii()
    assert line.isprintable()
    match = LINE.fullmatch(line)
    assert match, line
    pairs = PAIR.findall(match[2])
    assert len({key for key, _ in pairs}) == len(pairs)
    return match[1], {
        key: json.loads(value) if value.startswith('"') else value for key, value in pairs
    }


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[str, str, dict[str, str]]]]:
    """Return what reads the app's log: level, event and values of each line."""
    caplog.set_level(logging.DEBUG, "django_fencing")

    def lines() -> list[tuple[str, str, dict[str, str]]]:
        records = [record for record in caplog.records if record.name == "django_fencing"]
        messages = [(record.levelname, *parsed(record.getMessage())) for record in records]
        return [line for line in messages if line[1] != "store_used"]

    return lines


def test_each_event_is_one_line(resource: ResourceLike, client: Any, log: Any) -> None:
    """At its level, with the resource and the token."""
    everything(resource, client)

    lines = log()
    assert [event for _, event, _ in lines] == [
        "lease_acquired",
        "lease_released",
        "lease_acquired",
        "lock_contended",
        "lease_extended",
        "lease_released",
        "lease_acquired",
        "lease_acquired",
        "token_refused",
        "lease_lost",
    ]
    levels = {event: level for level, event, _ in lines}
    assert levels == {
        "lease_acquired": "INFO",
        "lock_contended": "INFO",
        "lease_extended": "DEBUG",
        "lease_released": "INFO",
        "lease_lost": "INFO",
        "token_refused": "INFO",
    }
    name = resolve(resource).name
    assert all(values["resource"] == name for _, _, values in lines)
    tokens = [values["token"] for _, event, values in lines if event != "lock_contended"]
    assert tokens == ["1", "1", "2", "2", "2", "3", "4", "3", "4"]


def test_a_loss_that_no_error_tells_of_is_a_warning(name: str, client: Any, log: Any) -> None:
    """Where the body has committed nothing is raised, and the log alone tells it."""
    with fenced_lock(name):
        expire(client, name)

    level, event, values = log()[-1]
    assert (level, event) == ("WARNING", "lease_lost")
    assert values["reason"] == "it ended before its release; what was committed stands"


def test_the_lines_say_who_and_for_how_long(name: str, log: Any) -> None:
    """The holder is the one of the fence and of the admin."""
    with fenced_lock(name, ttl=30, register=False) as lease:
        in_threads(lambda: acquired(name))
        lease.extend(60)
        lease._since -= 12.5  # as if it were held for so long

    lines = {event: values for _, event, values in log()}
    assert lines["lease_acquired"]["holder"] == str(lease.holder.id)
    assert lines["lease_acquired"]["by"] == str(lease.holder)
    assert float(lines["lease_acquired"]["ttl"]) == 30
    assert float(lines["lease_extended"]["ttl"]) == 60
    assert 12.5 <= float(lines["lease_released"]["held"]) < 30
    assert f"pid {os.getpid()}" in lines["lock_contended"]["held_by"]
    assert 20 < float(lines["lock_contended"]["retry_after"]) <= 30
    assert "tests.helpers.acquired" in lines["lock_contended"]["by"]


def test_a_refused_token_says_what_is_registered(name: str, client: Any, log: Any) -> None:
    """Who reads the log need not ask the database."""
    lock = fenced_lock(name)
    older = lock.acquire()
    newer = taken_over(lock, client)

    with pytest.raises(StaleToken), older.atomic():
        raise AssertionError

    level, event, values = log()[-1]
    assert (level, event) == ("INFO", "token_refused")
    assert values["token"] == str(older.token)
    assert values["fence_token"] == str(newer.token)


FORGERIES = [
    "\nlease_released resource=other token=1",
    '" token=9 x="',
    "\r\n\x1b[31mred",
    "a=b c=d",
    "back\\slash \\n",
    "ä 日本 🔒",
    "\x7f\x85\u2028\u2029\u202e",
    "\t",
    " ",
    '"',
]


@pytest.mark.parametrize("text", FORGERIES, ids=range(len(FORGERIES)))
def test_no_name_can_forge_a_line(name: str, text: str, log: Any) -> None:
    """Whatever it is made of, it is one value of one line, and can be read again."""
    acquired(f"{name}{text}").release()

    lines = log()

    assert [event for _, event, _ in lines] == ["lease_acquired", "lease_released"]
    assert [values["resource"] for _, _, values in lines] == [f"{name}{text}"] * 2
    assert [values["token"] for _, _, values in lines] == ["1", "1"]


@pytest.mark.parametrize("text", FORGERIES, ids=range(len(FORGERIES)))
def test_no_function_or_host_can_forge_a_line(name: str, client: Any, text: str, log: Any) -> None:
    """Neither of this process nor of what another has written into Redis."""
    with mock.patch("django_fencing.flow._host", return_value=f"host{text}"):
        lock = FencedLock(resource=name, register=False, function=f"work{text}")
        lock.acquire()
    client.hset(keys_of(name).lease, mapping={"host": f"x{text}", "function": f"y{text}"})
    in_threads(lambda: acquired(name))

    (_, first, mine), (_, second, other) = log()

    assert (first, second) == ("lease_acquired", "lock_contended")
    assert mine["by"].startswith(f"work{text} (host host{text}, pid ")
    assert other["held_by"].startswith(f"y{text} (host x{text}, pid ")


def test_a_logger_that_is_off_costs_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """No line is made."""
    caplog.set_level(logging.ERROR, "django_fencing")

    with mock.patch.object(signals, "key_values", side_effect=AssertionError):
        acquired(name).release()

    assert caplog.records == []


# Which store it is


def log_of_a_process(code: str, redis_url: str) -> list[str]:
    """Run `code` in a process of its own, and return the lines of the app's log."""
    program = """
        import logging, sys
        import django
        logging.basicConfig(level="INFO", stream=sys.stdout, format="%(name)s|%(message)s")
        django.setup()
        from django_fencing.locks import fenced_lock
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "example_project")])
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(code)],
        env=os.environ
        | {
            "PYTHONPATH": paths,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "REDIS_URL": redis_url,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    prefix = "django_fencing|"
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def test_a_process_says_once_which_store_it_has_got(
    private_services: Services, private_redis: Any, name: str
) -> None:
    """At its first grant: class, alias, server and version, and not the password."""
    private_redis.acl_setuser(
        "app", enabled=True, passwords=["+hush7"], commands=["+@all"], keys=["*"]
    )
    url = private_services.redis_url.replace("unix://", "unix://app:hush7@")

    lines = log_of_a_process(
        f"""
        lock = fenced_lock({name!r}, register=False)
        with lock:
            try:
                fenced_lock({name!r}, register=False).acquire()
            except Exception:
                pass
        with lock:
            pass
        """,
        url,
    )

    (first, *rest) = [parsed(line) for line in lines]
    assert first[0] == "store_used"
    assert first[1] == {
        "store": "django_fencing.stores.redis.RedisStore",
        "alias": "default",
        "server": "valkey",
        "version": private_redis.info()["valkey_version"],
    }
    assert [event for event, _ in rest] == [
        "lease_acquired",
        "lock_contended",
        "lease_released",
        "lease_acquired",
        "lease_released",
    ]
    assert "hush7" not in "".join(lines)


@pytest.fixture
def introduced() -> Iterator[None]:
    """Let this process have said nothing of its store yet."""
    with mock.patch("django_fencing.stores.base._introduced", set()):
        yield


def stores_used(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """Return what was said of the store."""
    records = [record for record in caplog.records if record.name == "django_fencing"]
    lines = [parsed(record.getMessage()) for record in records]
    return [values for event, values in lines if event == "store_used"]


@pytest.mark.parametrize("forbidden", ["-info", "-config", "-@dangerous", "-@admin"])
def test_a_server_that_does_not_tell_its_version_gives_locks(
    name: str,
    private_services: Services,
    private_redis: Any,
    introduced: None,
    caplog: pytest.LogCaptureFixture,
    forbidden: str,
) -> None:
    """An ACL may forbid to ask; what is unknown is called so."""
    private_redis.acl_setuser(
        "shy", enabled=True, passwords=["+hush7"], commands=["+@all", forbidden], keys=["*"]
    )
    caplog.set_level(logging.INFO, "django_fencing")

    with cache_at(private_services.redis_url.replace("unix://", "unix://shy:hush7@")):
        with fenced_lock(name) as lease:
            lease.ensure_held()
        acquired(name).release()

    (values,) = stores_used(caplog)
    assert values["server"].startswith(("valkey", "unknown"))
    assert "hush7" not in caplog.text


def test_nothing_is_said_before_the_first_grant(
    name: str, introduced: None, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither of a store that is away nor where the lock is held."""
    caplog.set_level(logging.INFO, "django_fencing")
    keys = keys_of(name)
    client.hset(keys.lease, "holder", "another process")

    with cache_at("redis://127.0.0.1:1?db=0"), pytest.raises(StoreUnavailable):
        acquired(name)
    with pytest.raises(LockHeld):
        acquired(name)
    assert stores_used(caplog) == []
    client.delete(keys.lease)

    acquired(name)
    assert len(stores_used(caplog)) == 1


def test_a_client_of_ones_own_is_called_so(
    name: str,
    introduced: None,
    private_services: Services,
    private_redis: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No alias of a cache names it."""
    caplog.set_level(logging.INFO, "django_fencing")

    with (
        redis.Redis.from_url(private_services.redis_url) as own,
        override_settings(FENCING={"CLIENT_FACTORY": lambda: own}),
    ):
        acquired(name)

    (values,) = stores_used(caplog)
    assert values["client_factory"] == "True"
    assert "alias" not in values


def test_another_store_is_said_too(
    name: str, introduced: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each once, whatever the order."""
    caplog.set_level(logging.INFO, "django_fencing")

    for prefix in ("one", "two", "one"):
        with override_settings(FENCING={"PREFIX": prefix}):
            acquired(name).release()

    assert len(stores_used(caplog)) == 2
