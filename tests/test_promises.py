"""No stale commit, no lost update: each interleaving with its twin, which shows the fault."""

import random
import threading
from collections import Counter as Tally
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest
from django.conf import settings
from django.core.cache import caches
from django.db import OperationalError, connections, transaction
from django.test import override_settings

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import LeaseLost, LockHeld, StaleToken, StoreUnavailable
from django_fencing.grants import Holder
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.resources import Resource, resolve
from django_fencing.stores.redis import RedisStore
from tests.helpers import (
    SECONDS,
    closing,
    commit,
    committing,
    in_threads,
    keys_of,
    started,
    wait_until,
    waits_for_row,
)
from tests.replica import (
    FENCED,
    At,
    Work,
    by_fenced_atomic,
    by_fenced_lock,
    by_plain_lock,
    by_textbook_rule,
    by_unregistered_lock,
)
from tests.shop.models import Counter, Entry, Job

POSTGRESQL = ("default", "repeatable", "snapshot")

pytestmark = committing(*POSTGRESQL)
on_sqlite = committing("default", "sqlite")

Pause = Callable[[], None]
Way = Callable[[At, Work], None]


@pytest.fixture(params=[*POSTGRESQL, pytest.param("sqlite", marks=on_sqlite)])
def alias(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["row", "name"])
def work(request: pytest.FixtureRequest, alias: str, name: str) -> Work:
    """Return a value of 0 that a row protects, or a name."""
    value = Counter.objects.using(alias).create()
    if request.param == "name":
        return Work(resource=name, alias=alias, pk=value.pk)
    job = Job.objects.using(alias).create()
    return Work(resource=(Job, job.pk), alias=alias, pk=value.pk)


def up_to(point: str, way: Way) -> Callable[[Pause, Work], None]:
    """Return `way` as what pauses at one of its points."""

    def paused(pause: Pause, work: Work) -> None:
        way(lambda here: pause() if here == point else None, work)

    return paused


def overlap(way: Way, work: Work, expire: Callable[[], Any]) -> list[Any]:
    """Let A read, end its lease, let B read as far as it may, then A write, and B: what P2 tells.

    Return the two outcomes.
    """
    with started(up_to("read", way), work) as a:
        a.reach_pause()
        expire()
        with started(up_to("read", way), work) as b:
            wait_until(lambda: b.stands or waits(way, work))
            return [a.finish(), b.finish()]


def waits(way: Way, work: Work) -> bool:
    """Say whether the body holds its lease and waits for the row, where it reads under a lock."""
    if way not in (by_unregistered_lock, by_fenced_atomic):
        return False
    client = caches["default"].client.get_client()
    return bool(client.exists(work.lease)) and (work.alias == "sqlite" or waits_for_row(work.alias))


# P2: no lost update


def test_a_read_under_the_lock_is_not_overwritten_by_an_older_holder(work, client):
    """A(1) reads, its lease runs out, B(2) reads: A cannot write any more, and B can."""
    a, b = overlap(by_fenced_lock, work, partial(client.delete, work.lease))

    assert isinstance(a, StaleToken)
    assert (a.token, a.fence_token) == (1, 2)
    assert b is None
    assert (work.value, work.fence) == (1, 2)


@pytest.mark.parametrize("way", [by_unregistered_lock, by_fenced_atomic])
def test_a_read_inside_the_fenced_transaction_waits_for_the_older_holder(work, client, way):
    """A(1) reads, its lease runs out: B(2) reads after A's commit, and both have counted."""
    assert overlap(way, work, partial(client.delete, work.lease)) == [None, None]

    assert (work.value, work.fence) == (2, 2)


def test_a_plain_lock_loses_the_update(work):
    """The twin: the same interleaving under a lock of django-redis ends in a lost update."""
    expire = partial(caches["default"].delete, work.plain_lock)

    assert overlap(by_plain_lock, work, expire) == [None, None]

    assert work.value == 1


def test_the_textbook_rule_refuses_what_is_late_and_lower(work):
    """That much it does: A(1) reads, B(2) reads and writes, and A cannot write any more."""
    with started(up_to("read", by_textbook_rule), work) as a:
        a.reach_pause()
        by_textbook_rule(lambda here: None, work)

        assert isinstance(a.finish(), StaleToken)

    assert (work.value, work.fence) == (1, 2)


def test_the_textbook_rule_loses_the_update(work):
    """The twin: refusing what is lower than the last token *written* accepts both writes."""
    assert overlap(by_textbook_rule, work, lambda: None) == [None, None]

    assert (work.value, work.fence) == (1, 2)


@pytest.mark.parametrize("way", FENCED)
def test_the_protected_row_itself_keeps_the_newer_write(job, client, way):
    """The row carries both the fence and the value, and is written with save()."""

    def add(pause: Pause) -> None:
        if way is by_fenced_lock:
            with fenced_lock(job) as lease:
                pause()
                with lease.atomic() as row:
                    row.amount = lease.row.amount + 1
                    row.save()
        elif way is by_unregistered_lock:
            with fenced_lock(job, register=False) as lease, lease.atomic() as row:
                pause()
                row.amount += 1
                row.save()
        else:
            with fenced_atomic(job) as row:
                pause()
                row.amount += 1
                row.save(update_fields=["amount"])

    with started(add) as a:
        a.reach_pause()
        client.delete(resolve(job).keys.lease)
        with started(add) as b:
            wait_until(lambda: b.stands or waits_for_row())
            outcomes = [a.finish(), b.finish()]

    committed = outcomes.count(None)
    assert committed == (1 if way is by_fenced_lock else 2)
    row = Job.objects.get()
    assert (row.amount, row.last_fence_token) == (job.amount + committed, 2)


def test_holders_whose_leases_run_out_at_any_moment_lose_no_update(work, client):
    """Six threads count, while leases and counters vanish from Redis under them."""
    keys = resolve(work.resource, work.alias).keys

    def count(seed: int) -> Tally[str]:
        chance = random.Random(seed)
        return Tally(outcome(chance.choice(FENCED), chance) for _ in range(12))

    def outcome(way: Way, chance: random.Random) -> str:
        try:
            way(lambda here: vanish(chance), work)
        except (LockHeld, LeaseLost, OperationalError) as error:
            return str(getattr(error.__cause__, "sqlstate", type(error).__name__))
        return "committed"

    def vanish(chance: random.Random) -> None:
        if chance.random() < 0.2:
            client.delete(*chance.choice([(keys.lease,), (keys.token,), (keys.lease, keys.token)]))

    patient = override_settings(FENCING=settings.FENCING | {"WAIT": 0.5})
    with patient, ThreadPoolExecutor(6) as pool:
        outcomes = sum(pool.map(partial(closing, count), range(6)), Tally())

    assert outcomes.keys() <= {"committed", "LockHeld", "LeaseLost", "StaleToken", "40001"}
    assert work.value == outcomes["committed"] > 20


# P2 where the database opens transactions at a level of which Django may not know


def charge(pause: Pause, work: Work) -> str:
    """Charge, and pause before the commit. The row of the fence is locked, and not changed."""
    with fenced_lock(work.resource, using=work.alias) as lease, lease.atomic():
        Entry.objects.using(work.alias).create()
        pause()
        return "charged"


@pytest.mark.parametrize("alias", POSTGRESQL, indirect=True)
@pytest.mark.parametrize("entry", [fenced_lock, fenced_atomic])
def test_a_waiting_transaction_sees_what_the_older_holder_committed(work, client, entry):
    """Its snapshot is not older than the row lock that it waited for, whoever sets the level."""

    def charge_later(_: Pause) -> str:
        charges = Entry.objects.using(work.alias)
        if entry is fenced_atomic:
            with fenced_atomic(work.resource, using=work.alias):
                return "charged before" if charges.exists() else "not seen"
        with fenced_lock(work.resource, using=work.alias, register=False) as lease, lease.atomic():
            return "charged before" if charges.exists() else "not seen"

    with started(charge, work) as a:
        a.reach_pause()
        client.delete(work.lease)
        with started(charge_later) as b:
            wait_until(partial(waits_for_row, work.alias))
            assert [a.finish(), b.finish()] == ["charged", "charged before"]


@pytest.mark.parametrize("alias", ["repeatable", "snapshot"], indirect=True)
def test_registering_inside_such_a_transaction_would_charge_twice(alias, client):
    """The twin: the holder waits for the row lock inside its snapshot, and misses the charge."""
    job = Job.objects.using(alias).create()
    work = Work(resource=(Job, job.pk), alias=alias, pk=job.pk)

    def charge_in_snapshot(_: Pause) -> str:
        with transaction.atomic(using=alias):
            fence = Job.objects.using(alias).filter(pk=job.pk, last_fence_token__lt=2)
            assert fence.update(last_fence_token=2, last_fence_holder=uuid4()) == 1
            return "charged before" if Entry.objects.using(alias).exists() else "charged again"

    with started(charge, work) as a:
        a.reach_pause()
        with started(charge_in_snapshot) as b:
            wait_until(partial(waits_for_row, alias))
            assert [a.finish(), b.finish()] == ["charged", "charged again"]


def test_the_snapshot_alias_has_a_level_that_django_does_not_know():
    """What the tests above rely on."""
    connection = connections["snapshot"]
    with transaction.atomic(using="snapshot"), connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('transaction_isolation')")

        assert cursor.fetchone() == ("repeatable read",)

    assert connection.isolation_level.name == "READ_COMMITTED"


# P1: no stale commit


def test_an_older_lease_cannot_commit_once_a_newer_one_has_registered(work, client):
    """The newer one has not even begun to write."""
    a = fenced_lock(work.resource, using=work.alias).acquire()
    client.delete(work.lease)
    b = fenced_lock(work.resource, using=work.alias).acquire()

    with pytest.raises(StaleToken) as caught:
        commit(a, partial(work.write, 99))

    assert (caught.value.token, caught.value.fence_token) == (1, 2)
    assert caught.value.fence_holder == b.holder.id
    assert (work.value, work.fence, a.lost) == (0, 2, True)


def test_an_unregistered_older_lease_does_not_even_begin(work, client):
    """It finds the newer fence, and the store says that its lease is gone."""
    a = fenced_lock(work.resource, using=work.alias, register=False).acquire()
    client.delete(work.lease)
    fenced_lock(work.resource, using=work.alias).acquire()

    with pytest.raises(LeaseLost):
        commit(a, partial(work.write, 99))

    assert (work.value, work.fence) == (0, 2)


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_a_lease_whose_transactions_failed_does_not_come_after_a_newer_one(work, client, attempts):
    """However often it has tried: it never registered, so the newer one is the first."""
    a = fenced_lock(work.resource, using=work.alias, register=False).acquire()
    for _ in range(attempts):
        with a.atomic():
            transaction.set_rollback(True, using=work.alias)
    client.delete(work.lease)
    b = fenced_lock(work.resource, using=work.alias).acquire()

    with pytest.raises(LeaseLost):
        commit(a, partial(work.write, 99))

    with b.atomic():
        work.write(work.value + 1)
    assert (work.value, work.fence) == (1, b.token)


def test_a_lease_that_a_failover_brings_back_does_not_come_after_a_newer_one(work, client):
    """What it read in a transaction that failed is older than what the newer one has written."""
    a = fenced_lock(work.resource, using=work.alias, register=False).acquire()
    with a.atomic():
        transaction.set_rollback(True, using=work.alias)
    replicated = client.hgetall(work.lease)
    client.delete(work.lease)
    in_threads(partial(by_fenced_lock, lambda here: None, work))
    client.hset(work.lease, mapping=replicated)
    client.pexpire(work.lease, 60_000)

    with pytest.raises(StaleToken):
        commit(a, partial(work.write, 99))

    assert (work.value, work.fence) == (1, 2)


def test_a_newer_holder_cannot_register_while_an_older_one_is_about_to_commit(work, client):
    """Whoever has checked keeps the row: the newer one is refused, or comes after the commit."""

    def overtake() -> Lease:
        return fenced_lock(work.resource, using=work.alias, ttl=0.2).acquire()

    with started(up_to("written", by_fenced_lock), work) as a:
        a.reach_pause()
        client.delete(work.lease)
        if work.alias != "sqlite":
            with pytest.raises(LockHeld):
                overtake()
            assert not client.exists(work.lease)
        assert a.finish() is None

    newer = overtake()
    assert (work.value, work.fence) == (1, newer.token)


@pytest.mark.parametrize("alias", [pytest.param("sqlite", marks=on_sqlite)], indirect=True)
@pytest.mark.parametrize("way", FENCED)
def test_the_check_locks_a_database_that_has_no_row_locks(work, client, way):
    """Before anything is written, nobody else can begin to write."""

    def begin_to_write() -> None:
        with connections["sqlite"].cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 0")
            cursor.execute("BEGIN IMMEDIATE")

    with started(up_to("locked", way), work) as a:
        a.reach_pause()
        (refusal,) = in_threads(begin_to_write)
        assert "database is locked" in str(refusal)
        assert a.finish() is None

    assert in_threads(begin_to_write) == [None]


@pytest.mark.parametrize("newer_first", [True, False])
def test_the_fence_ends_at_the_highest_token_in_either_order(work, client, newer_first):
    """Two holders that registered nothing yet: the lower token never comes after the higher."""
    older = fenced_lock(work.resource, using=work.alias, register=False).acquire()
    client.delete(work.lease)
    newer = fenced_lock(work.resource, using=work.alias, register=False).acquire()
    outcomes = []

    for lease in (newer, older) if newer_first else (older, newer):
        try:
            with lease.atomic():
                work.write(lease.token)
                outcomes.append(lease.token)
        except LeaseLost:
            outcomes.append(None)

    assert outcomes == ([2, None] if newer_first else [1, 2])
    assert (work.value, work.fence) == (2, 2)


@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_comparing_before_writing_moves_the_fence_backwards(work):
    """The twin: read the mark, compare, write, as articles show it, at READ COMMITTED."""
    mark = Counter.objects.create(value=4)

    def compare_and_write(pause: Pause, token: int) -> None:
        with transaction.atomic():
            mark.refresh_from_db()
            if mark.value > token:
                raise StaleToken("A newer token has written.")
            pause()
            Counter.objects.filter(pk=mark.pk).update(value=token)
            work.write(token)

    with started(compare_and_write, 5) as a:
        a.reach_pause()
        compare_and_write(lambda: None, 6)
        assert a.finish() is None

    mark.refresh_from_db()
    assert (mark.value, work.value) == (5, 5)
    with pytest.raises(StaleToken):
        compare_and_write(lambda: None, 4)


def test_two_holders_with_one_token_are_told_apart(work, client):
    """The counter was lost before the first one registered: only one of the two commits."""
    a = fenced_lock(work.resource, using=work.alias, register=False).acquire()
    client.delete(work.lease, resolve(work.resource, work.alias).keys.token)
    b = fenced_lock(work.resource, using=work.alias, register=False).acquire()
    assert a.token == b.token == 1

    commit(b, partial(work.write, 1))
    with pytest.raises(LeaseLost):
        commit(a, partial(work.write, 99))

    assert work.value == 1


def test_two_registered_holders_with_one_token_are_told_apart(work, client):
    """Somebody has put an old backup of the fence back: the holder decides, not the number."""
    a = fenced_lock(work.resource, using=work.alias).acquire()
    place = resolve(work.resource, work.alias)
    fences = place.model.objects.using(work.alias).filter(pk=place.pk)
    fences.update(last_fence_holder=uuid4())

    with pytest.raises(StaleToken) as caught:
        commit(a, partial(work.write, 99))

    assert caught.value.fence_token == a.token == 1
    assert work.value == 0


def test_a_retry_after_a_failover_does_not_move_the_fence_back(work, client):
    """Redis forgets, between two attempts of one acquisition, which token it gave the holder."""
    (older,) = in_threads(lambda: fenced_lock(work.resource, using=work.alias).acquire())
    client.delete(work.lease, resolve(work.resource, work.alias).keys.token)
    fences: list[int] = []

    def confirm(store: RedisStore, resource: Resource, holder: Holder, **options: Any) -> bool:
        if not fences:
            fences.append(work.fence)
            client.hset(work.lease, "token", 1)
            raise StoreUnavailable("The primary is gone.")
        return original(store, resource, holder)

    original = RedisStore.confirm
    with mock.patch.object(RedisStore, "confirm", confirm):
        lease = fenced_lock(work.resource, using=work.alias, wait=5).acquire()

    assert fences[0] > older.token
    assert work.fence == lease.token >= fences[0]
    commit(lease, partial(work.write, 1))
    with pytest.raises(StaleToken):
        commit(older, partial(work.write, 99))
    assert work.value == 1


# One definition, many threads


def test_twenty_calls_of_one_function_on_one_resource_run_one_body(name, client):
    """The others are refused, and none of them ends the lease of the one."""
    refused = threading.Semaphore(0)

    @with_fenced_lock(name)
    def work(*, lease: Lease) -> str:
        for _ in range(19):
            assert refused.acquire(timeout=SECONDS)
        assert client.hget(keys_of(name).lease, "holder") == lease.holder.id.hex
        return "done"

    def call() -> str:
        try:
            return str(work())
        except LockHeld:
            refused.release()
            return "refused"

    outcomes = in_threads(*[call] * 20)

    assert sorted(outcomes) == ["done"] + ["refused"] * 19
    assert not client.exists(keys_of(name).lease)


def test_twenty_calls_of_one_function_on_twenty_resources_run_in_parallel(name, client):
    """Each has a lease of its own, and ends that one."""
    together = threading.Barrier(20)
    resources = [f"{name.partition(':')[2]}-{number}" for number in range(20)]

    @with_fenced_lock("{resource}")
    def work(resource: str, *, lease: Lease) -> Any:
        together.wait(SECONDS)
        assert current_lease() is lease
        with lease.atomic() as fence:
            assert fence.name.endswith(resource)
        together.wait(SECONDS)
        return lease.holder.id, lease.token

    leases = in_threads(*[partial(work, resource) for resource in resources])

    assert len(set(leases)) == 20
    assert {token for _, token in leases} == {1}
    assert not any(client.exists(keys_of(resource).lease) for resource in resources)
