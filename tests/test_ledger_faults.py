"""The ledger under fire: it blocks, loses and leaves nothing."""

import unittest
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
from django.conf import settings
from django.contrib import admin
from django.core.signals import request_finished
from django.db import connection, transaction
from django.test import TestCase, override_settings

from django_fencing import ledger
from django_fencing.exceptions import LeaseLost, StaleToken, UnfencedWrite
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import FenceEvent
from tests.helpers import (
    committing,
    expire,
    in_threads,
    started,
    taken_over,
    wait_until,
    waits_for_row,
)
from tests.shop.models import Job
from tests.test_operations import protected

pytestmark = committing("default", "other", "sqlite")


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    ledger._pending.clear()
    yield
    ledger._pending.clear()


def lose(name: str, client: Any) -> None:
    lease = fenced_lock(name).acquire()
    expire(client, name)
    with suppress(LeaseLost):
        lease.extend()
    lease.release()


@contextmanager
def locked_ledger() -> Iterator[Any]:
    """Let another session lock the ledger's table."""
    session = connection.copy()
    with session.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("LOCK TABLE django_fencing_fenceevent IN ACCESS EXCLUSIVE MODE")
    try:
        yield session.close
    finally:
        session.close()


def test_a_ledger_whose_table_is_locked_does_not_block_the_refused(name: str, client: Any) -> None:
    """A migration or VACUUM FULL holds the ledger's table: nobody else's work waits for it."""
    lock = fenced_lock(name)
    first = lock.acquire()
    second = taken_over(lock, client)

    def refused(pause: Any) -> None:
        with suppress(StaleToken), first.atomic():
            pass
        pause()

    with locked_ledger() as unlock, started(refused) as body:
        wait_until(lambda: body.stands or waits_for_row(seconds=3))
        stood = body.stands
        unlock()
    second.release()
    assert stood


def test_a_healed_counter_whose_ledger_is_locked_keeps_nobody_from_the_lock(
    name: str, private_redis: Any
) -> None:
    fenced_lock(name).acquire().release()
    private_redis.flushall()

    def locked(pause: Any) -> None:
        with fenced_lock(name):
            pause()

    with locked_ledger() as unlock, started(locked) as body:
        wait_until(lambda: body.stands or waits_for_row(seconds=3))
        stood = body.stands
        unlock()
    assert stood


def test_two_threads_that_write_at_once_lose_nothing(name: str, client: Any) -> None:
    """One takes the last event between the other's look and its hand."""

    class Racing(deque):  # type: ignore[type-arg]
        raced = True

        def popleft(self) -> Any:
            if len(self) == 1 and not self.raced:
                self.raced = True
                taken.append(super().popleft())  # another thread's flush()
            return super().popleft()

    taken: list[Any] = []
    pending = Racing()
    with mock.patch.object(ledger, "_pending", pending):
        with transaction.atomic():
            for number in (1, 2):
                one = f"{name}:{number}"
                lease = fenced_lock_in_thread(one)
                expire(client, one)
                with suppress(LeaseLost):
                    lease.extend()
        pending.raced = False
        ledger.flush()
    assert len(taken) == 1
    assert FenceEvent.objects.count() == 1


def fenced_lock_in_thread(name: str) -> Any:
    (lease,) = in_threads(fenced_lock(name).acquire)
    return lease


def test_an_event_that_cannot_be_written_takes_no_other_with_it(name: str, client: Any) -> None:
    """The text of an error is somebody else's, and may hold what PostgreSQL does not take."""
    names = [f"{name}:{number}" for number in (1, 2, 3)]
    leases = [fenced_lock(one).acquire() for one in names]
    with transaction.atomic():
        for number, lease in enumerate(leases):
            reason = "said \0 by the server" if number == 1 else "gone"
            lease._ending.lose(lease, reason)
    ledger.flush()
    assert FenceEvent.objects.count() >= 2


def test_an_event_whose_reason_holds_a_nul_is_kept(name: str, client: Any) -> None:
    lease = fenced_lock(name).acquire()
    lease._ending.lose(lease, "said \0 \udc80 by the server")
    assert FenceEvent.objects.count() == 1


def test_an_interrupt_while_the_ledger_is_written_loses_no_event(name: str, client: Any) -> None:
    lease = fenced_lock(name).acquire()
    with transaction.atomic():
        lease._ending.lose(lease, "gone")
    interrupted = mock.patch.object(FenceEvent.objects, "using", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        ledger.flush()
    ledger.flush()
    assert FenceEvent.objects.count() == 1


def test_the_end_of_a_request_leaves_no_connection_open(name: str, client: Any) -> None:
    """Django has closed it by then, and nobody closes it again before the next request."""

    def request(pause: Any) -> bool:
        lease = fenced_lock(name).acquire()
        with transaction.atomic():
            lease._ending.lose(lease, "gone")
        request_finished.send(None)
        return connection.connection is None

    assert connection.settings_dict["CONN_MAX_AGE"] == 0
    with started(request) as body:
        assert body.finish() is True


def test_a_store_that_fails_to_tell_who_has_overtaken_keeps_the_refusal(
    name: str, client: Any
) -> None:
    """Whatever it raises, the caller's error is StaleToken."""
    lock = fenced_lock(name)
    first = lock.acquire()
    taken_over(lock, client)
    failing = mock.patch.object(type(first._store), "inspect", side_effect=NotImplementedError)
    with failing, pytest.raises(StaleToken), first.atomic():
        pass


def test_a_test_case_refuses_what_a_transaction_of_its_own_would(job: Job) -> None:
    """The registration is presented for the fenced transaction, also where that is a savepoint."""

    class Case(TestCase):
        def runTest(self) -> None:
            job = Job.objects.create()
            with fenced_atomic(job) as row:
                row.save()
            with pytest.raises(UnfencedWrite), transaction.atomic():
                Job.objects.filter(pk=job.pk).update(amount=9)

    with protected("Job", require_lease=True):
        run(Case)


def run(case: Any) -> None:
    result = unittest.TestResult()
    unittest.TestSuite([case()])(result)
    assert result.wasSuccessful(), result.errors + result.failures


def test_long_tenants_are_told_apart(name: str, client: Any) -> None:
    tenant = "t" * 190
    with override_settings(FENCING={**settings.FENCING, "NAMESPACE": tenant}):
        lose(name, client)
    assert FenceEvent.objects.get().namespace == tenant


def test_a_tenant_in_another_normal_form_sees_its_ledger(name: str, client: Any) -> None:
    tenant = "Zu\u0308rich"
    with override_settings(FENCING={**settings.FENCING, "NAMESPACE": tenant}):
        lose(name, client)
        assert admin.site._registry[FenceEvent].get_queryset(None).count() == 1  # type: ignore[arg-type]


def test_a_thread_without_a_database_gets_no_connection_by_the_ledger(
    name: str, client: Any
) -> None:
    """With register=False nothing of the database was asked; nobody closes what is opened."""

    def find_out() -> Any:
        lease = fenced_lock(name, register=False).acquire()
        expire(client, name)
        with suppress(LeaseLost):
            lease.extend()
        return connection.connection

    assert in_threads(find_out) == [None]
