"""The ledger: what was refused, lost or healed is there afterwards, and disturbs nobody."""

import asyncio
import logging
import os
import re
import unittest
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.core.signals import request_finished
from django.db import connection, transaction
from django.db.models import F
from django.test import TestCase, override_settings

from django_fencing import ledger
from django_fencing.conf import conf
from django_fencing.exceptions import LeaseLost, StaleToken
from django_fencing.locks import fenced_lock
from django_fencing.models import Fence, FenceEvent
from tests.helpers import (
    commit,
    committing,
    expire,
    in_threads,
    statements,
    taken_over,
    wait_until,
)

pytestmark = committing("default", "other", "sqlite")

Kind = FenceEvent.Kind


def refused(name: str, client: Any, **options: Any) -> Any:
    """Let a lease be overtaken, and its late write refused; return both leases."""
    lock = fenced_lock(name, **options)
    first = lock.acquire()
    second = taken_over(lock, client)
    with pytest.raises(StaleToken), first.atomic():
        pass
    return first, second


def kept_off(**values: Any) -> Any:
    """Override FENCING, with the rest as it is."""
    return override_settings(FENCING={**settings.FENCING, **values})


def test_a_refused_token_is_noted_with_who_has_overtaken_it(name: str, client: Any) -> None:
    """In one sentence, as far as the store still knows."""
    first, second = refused(name, client)

    event = FenceEvent.objects.get()
    host, pid = first.holder.host, os.getpid()
    assert (event.kind, event.resource, event.token) == (Kind.REFUSED, name, 1)
    assert event.holder == first.holder.id
    assert re.fullmatch(
        rf"token 1 of {host} pid {pid} refused: "
        rf"2 of {host} pid {pid} registered \d+\.\d s earlier",
        event.message,
    )
    second.release()


def test_a_refused_token_is_noted_after_its_successor_has_gone(name: str, client: Any) -> None:
    """Then the store knows no more than the fence does."""
    lock = fenced_lock(name)
    first = lock.acquire()
    taken_over(lock, client).release()
    with pytest.raises(StaleToken), first.atomic():
        pass

    assert FenceEvent.objects.get().message.endswith("2 is registered, and its lease has ended")


def test_a_store_that_is_away_takes_nothing_from_the_ledger(name: str, private_redis: Any) -> None:
    """The refusal is the database's, and is told as such."""
    lock = fenced_lock(name)
    first = lock.acquire()
    taken_over(lock, private_redis)
    with (
        override_settings(
            CACHES={
                "default": {
                    "BACKEND": "django_redis.cache.RedisCache",
                    "LOCATION": "redis://127.0.0.1:1/0",
                }
            }
        ),
        pytest.raises(StaleToken),
        first.atomic(),
    ):
        pass

    assert FenceEvent.objects.get().message.endswith("refused: 2 is registered")


def test_a_lost_lease_is_noted_once(name: str, client: Any) -> None:
    """However often it is found out."""
    lease = fenced_lock(name).acquire()
    expire(client, name)
    for ask in (lease.extend, lease.ensure_held, lease.extend):
        with pytest.raises(LeaseLost):
            ask()
    lease.release()

    event = FenceEvent.objects.get()
    assert (event.kind, event.token) == (Kind.LOST, 1)
    assert event.message.endswith(
        "lost: it ran out, another holder has it, or the store has lost it"
    )


def test_a_lease_that_its_renewal_loses_is_noted(name: str, client: Any) -> None:
    """From the thread that tells of it, whose connection is closed again."""
    lease = fenced_lock(name, ttl=0.3, renew=True).acquire()
    expire(client, name)

    wait_until(lambda: FenceEvent.objects.exists())
    assert FenceEvent.objects.get().kind == Kind.LOST
    lease.release()


def test_a_healed_counter_is_noted(
    name: str, private_redis: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What it proposed, where the fence was, and what came of it; the log says it too."""
    fenced_lock(name).acquire().release()
    private_redis.flushall()
    with fenced_lock(name) as lease:
        pass

    event = FenceEvent.objects.get()
    assert (event.kind, event.token, lease.token) == (Kind.HEALED, lease.token, 1_000_002)
    assert event.message == f"the counter proposed 1, the fence was at 1: {lease.token} is next"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages == [f"counter_healed resource={name} fence_token=1 token={lease.token}"]


@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_a_counter_that_has_run_out_is_no_fault(name: str, private_redis: Any, alias: str) -> None:
    """A name that is locked once a month leaves no counter for longer than IDLE_TTL."""
    fences = Fence.objects.using(alias)
    with kept_off(DATABASE=alias):
        fenced_lock(name).acquire().release()
        private_redis.flushall()
        idle = timedelta(seconds=conf.idle_ttl)
        fences.update(registered_at=F("registered_at") - idle + timedelta(minutes=5))
        fenced_lock(name).acquire().release()
        just_before = list(FenceEvent.objects.using(alias).values_list("kind", flat=True))
        private_redis.flushall()
        fences.update(registered_at=F("registered_at") - idle)
        with fenced_lock(name) as lease:
            pass

    assert just_before == [Kind.HEALED]
    assert FenceEvent.objects.using(alias).count() == 1
    assert lease.token > 2_000_000


def test_what_is_found_out_in_a_transaction_is_written_when_it_has_ended(
    name: str, client: Any
) -> None:
    """Also where it is rolled back, and on the way there is no statement of the ledger in it."""
    with statements() as sent, suppress(LeaseLost), fenced_lock(name) as lease, lease.atomic():
        expire(client, name)
        with suppress(LeaseLost):
            lease.ensure_held()
        inside = list(sent)
        raise LeaseLost("rolled back")

    assert not any("fenceevent" in sql for sql in inside)
    assert FenceEvent.objects.get().kind == Kind.LOST


def test_a_foreign_transaction_is_waited_for(name: str, client: Any) -> None:
    """A lease may be lost while the caller has a transaction of its own."""
    lease = fenced_lock(name).acquire()
    expire(client, name)
    with transaction.atomic():
        with suppress(LeaseLost):
            lease.extend()
        transaction.set_rollback(True)
    before = FenceEvent.objects.count()
    request_finished.send(None)

    assert (before, FenceEvent.objects.count()) == (0, 1)


def test_an_event_loop_is_not_blocked(name: str, client: Any) -> None:
    """Django would refuse the statement there; a thread without a loop writes it later."""
    lease = fenced_lock(name).acquire()
    expire(client, name)

    async def extend() -> None:
        with suppress(LeaseLost):
            lease.extend()

    asyncio.run(extend())
    before = FenceEvent.objects.count()
    ledger.flush()

    assert (before, FenceEvent.objects.count()) == (0, 1)


def test_a_ledger_that_cannot_be_written_breaks_nobody(
    name: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The event is in the log then, and the error is the one that it would be."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_fencing_fenceevent RENAME TO away")
    try:
        with caplog.at_level(logging.WARNING, "django_fencing"):
            _, second = refused(name, client)
            commit(second)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE away RENAME TO django_fencing_fenceevent")

    [line] = [line for line in caplog.messages if line.startswith("ledger_failed")]
    assert "token 1 of" in line
    second.release()
    assert not FenceEvent.objects.exists()


def test_an_outer_transaction_of_a_test_survives_a_ledger_that_fails(
    name: str, client: Any
) -> None:
    """Django's TestCase wraps every test in one: the ledger has a savepoint of its own there."""

    class Case(TestCase):
        def runTest(self) -> None:
            with connection.cursor() as cursor:
                cursor.execute("ALTER TABLE django_fencing_fenceevent RENAME TO away")
            refused(name, client)[1].release()
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
                cursor.execute("ALTER TABLE away RENAME TO django_fencing_fenceevent")
            refused(name, client)[1].release()
            assert FenceEvent.objects.count() == 1

    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)  # which opens the transactions
    assert result.wasSuccessful(), result.errors + result.failures


def test_it_can_be_switched_off(name: str, client: Any) -> None:
    """Then nothing is asked and nothing written."""
    with kept_off(LEDGER=False), statements() as sent:
        refused(name, client)[1].release()

    assert not any("fenceevent" in sql for sql in sent)
    assert not FenceEvent.objects.exists()


def test_a_setting_that_makes_no_sense_breaks_nobody(
    name: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The checks tell it before."""
    with kept_off(LEDGER="no"), caplog.at_level(logging.WARNING, "django_fencing"):
        refused(name, client)[1].release()

    assert any("LEDGER" in line for line in caplog.messages)


def test_threads_write_each_event_once(name: str, client: Any) -> None:
    """They share what is pending."""
    leases = [fenced_lock(f"{name}:{number}").acquire() for number in range(8)]
    for lease in leases:
        expire(client, lease.resource)

    def find_out(lease: Any) -> None:
        with transaction.atomic(), suppress(LeaseLost):
            lease.extend()
        ledger.flush()

    in_threads(*(lambda lease=lease: find_out(lease) for lease in leases))
    ledger.flush()

    assert FenceEvent.objects.count() == len(leases)
    assert len(set(FenceEvent.objects.values_list("holder", flat=True))) == len(leases)


def test_a_fork_does_not_write_what_its_parent_has_noted(name: str, client: Any) -> None:
    """The child begins with nothing pending."""
    lease = fenced_lock(name).acquire()
    expire(client, name)
    with transaction.atomic(), suppress(LeaseLost):
        lease.extend()
    child = os.fork()
    if not child:
        os._exit(len(ledger._pending))
    _, status = os.waitpid(child, 0)
    ledger.flush()

    assert os.waitstatus_to_exitcode(status) == 0
    assert FenceEvent.objects.count() == 1
