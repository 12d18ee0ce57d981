"""What the database refuses, breaks off or lacks: it is told as it is, and nothing is left."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import Any
from unittest import mock

import pytest
from django.db import (
    IntegrityError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from psycopg import errors

from django_fencing.exceptions import InsideTransaction, LeaseLost, LockHeld, StaleToken
from django_fencing.leases import Lease
from django_fencing.locks import fenced_atomic, fenced_lock
from tests.helpers import (
    SECONDS,
    closing,
    commit,
    committing,
    expire,
    holding,
    in_threads,
    keys_of,
    started,
    statements,
    taken_over,
    wait_until,
    waits_for_row,
)
from tests.shop.models import Counter, Entry, Job

pytestmark = committing("default", "repeatable")

Pause = Callable[[], None]


@pytest.fixture(params=["row", "name"])
def resource(request: pytest.FixtureRequest, job: Job, name: str) -> Any:
    """Return a row, or a name."""
    return job if request.param == "row" else name


@pytest.fixture
def other_row(transactional_db: None) -> Counter:
    """Return a row that no fence protects."""
    return Counter.objects.create()


def setting(name: str, alias: str = "default") -> str:
    """Return what a setting of PostgreSQL is in this thread's session."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_setting(%s)", [name])
        return str(cursor.fetchone()[0])


def execute(sql: str, alias: str = "default") -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)


def backend(alias: str = "default") -> int:
    """Return the process id of this thread's session in PostgreSQL."""
    connections[alias].ensure_connection()
    return int(connections[alias].connection.info.backend_pid)


def kill(pid: int) -> None:
    """End a session as an administrator does, and wait until it is gone."""
    in_threads(partial(_kill, pid))


def _kill(pid: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])


def sqlstate(error: BaseException) -> str:
    return str(getattr(error.__cause__, "sqlstate", ""))


def keep_row(pause: Pause, lease: Lease) -> None:
    """Open a fenced transaction, and keep it open."""
    with lease.atomic():
        pause()


# Errors inside the block


@pytest.mark.parametrize("way", ["fenced_lock", "unregistered", "fenced_atomic"])
def test_a_database_error_in_the_body_reaches_the_caller_as_itself(resource, client, way):
    """Nothing is sent into the broken transaction, the lock is freed, the connection is usable."""
    Counter.objects.create(pk=1)

    with statements() as sent, pytest.raises(IntegrityError) as caught:
        take(resource, way, body=lambda: Counter.objects.bulk_create([Counter(pk=1)]))

    assert type(caught.value) is IntegrityError
    assert sent[-1].startswith("INSERT")
    assert not client.exists(keys_of(resource).lease)
    assert Counter.objects.count() == 1
    assert take(resource, way) == 2


def take(resource: Any, way: str, *, body: Callable[[], Any] = lambda: None, **options: Any) -> int:
    """Take the lock, run `body` in a fenced transaction, and return the token."""
    if way == "fenced_atomic":
        with fenced_atomic(resource, **options) as row:
            body()
            return int(row.last_fence_token)
    lock = fenced_lock(resource, register=way == "fenced_lock", **options)
    with lock as lease, lease.atomic() as row:
        body()
        return int(row.last_fence_token)


def test_a_check_that_cannot_be_asked_is_no_stale_token(job, other_row):
    """A lock timeout of the caller's own is his."""
    with fenced_lock(job) as lease, started(lock_row) as a:
        a.reach_pause()
        execute("SET lock_timeout = '50ms'")
        try:
            with pytest.raises(OperationalError) as caught:
                commit(lease)
        finally:
            execute("RESET lock_timeout")
        assert a.finish() is None
        with lease.atomic():
            pass

    assert sqlstate(caught.value) == errors.LockNotAvailable.sqlstate
    assert not lease.lost


def lock_row(pause: Pause) -> None:
    """Keep the rows of all jobs, as somebody else's transaction does."""
    with transaction.atomic():
        assert list(Job.objects.select_for_update())
        pause()


def test_a_lock_timeout_in_the_body_is_no_refusal(job, other_row):
    """It is translated only where the app itself has set it."""

    def lock_other_row(pause: Pause) -> None:
        with transaction.atomic():
            Counter.objects.update(value=1)
            pause()

    def wait_shortly() -> None:
        execute("SET LOCAL lock_timeout = '50ms'")
        Counter.objects.update(value=2)

    with started(lock_other_row) as a:
        a.reach_pause()
        with pytest.raises(OperationalError) as caught:
            take(job, "fenced_atomic", body=wait_shortly)

    assert sqlstate(caught.value) == errors.LockNotAvailable.sqlstate


@pytest.mark.parametrize("way", ["fenced_lock", "unregistered", "fenced_atomic"])
def test_a_statement_timeout_while_registering_is_no_refusal(job, client, way):
    """Only the lock timeout counts as a refused attempt; the lease is given back all the same."""
    with started(lock_row) as a:
        a.reach_pause()
        execute("SET statement_timeout = '50ms'")
        try:
            with pytest.raises(OperationalError) as caught:
                take(job, way, wait=5)
        finally:
            execute("RESET statement_timeout")

    assert sqlstate(caught.value) == errors.QueryCanceled.sqlstate
    assert not client.exists(keys_of(job).lease)


def test_a_deadlock_in_the_body_is_no_stale_token(job, other_row, client):
    """The transaction is rolled back, the lock is freed, and the work can be done again."""

    def cross(pause: Pause) -> None:
        with transaction.atomic():
            Counter.objects.update(value=1)
            pause()
            Job.objects.update(note="other")

    def cross_over() -> None:
        execute("SET LOCAL deadlock_timeout = '20ms'")
        a.go_on()
        in_threads(partial(wait_until, waits_for_row))
        Counter.objects.update(value=2)

    with started(cross) as a:
        a.reach_pause()
        with pytest.raises(OperationalError) as caught:
            take(job, "fenced_atomic", body=cross_over)
        assert a.finish() is None

    assert sqlstate(caught.value) == errors.DeadlockDetected.sqlstate
    assert not client.exists(keys_of(job).lease)
    with fenced_atomic(job):
        Counter.objects.update(value=3)
    assert (Counter.objects.get().value, Job.objects.get().note) == (3, "other")


# Serialization failures, at REPEATABLE READ


def test_a_newer_holder_registers_although_the_row_has_changed_meanwhile(job, client):
    """Its own registration is tried again, so the older one's commit does not fail it."""

    def save(pause: Pause) -> None:
        with fenced_lock((Job, job.pk), using="repeatable") as lease, lease.atomic() as row:
            row.amount += 1
            row.save()
            pause()

    def register(_: Pause) -> int:
        with fenced_lock((Job, job.pk), using="repeatable") as lease:
            return lease.row.amount

    with started(save) as a:
        a.reach_pause()
        expire_at_repeatable(client, job)
        with started(register) as b:
            wait_until(waits_for_row)
            assert [a.finish(), b.finish()] == [None, job.amount + 1]


def expire_at_repeatable(client: Any, job: Job) -> None:
    expire(client, Job.objects.using("repeatable").get(pk=job.pk))


def test_a_serialization_failure_of_the_check_is_no_stale_token(job, client):
    """The snapshot is older than the newer registration: trying again tells that it is stale."""
    row = Job.objects.using("repeatable").get()
    older = fenced_lock(row).acquire()
    expire(client, row)

    def register_slowly(pause: Pause) -> None:
        newer = fenced_lock((Job, job.pk), using="repeatable", register=False).acquire()
        with transaction.atomic(using="repeatable"):
            Job.objects.using("repeatable").filter(pk=job.pk).update(
                last_fence_token=newer.token, last_fence_holder=newer.holder.id
            )
            pause()

    with started(register_slowly) as a:
        a.reach_pause()
        with started(lambda _: commit(older)) as b:
            wait_until(waits_for_row)
            assert a.finish() is None
            failure = b.finish()

    assert isinstance(failure, OperationalError)
    assert sqlstate(failure) == errors.SerializationFailure.sqlstate
    assert not older.lost
    with pytest.raises(StaleToken):
        commit(older)


def test_a_serialization_failure_in_the_body_frees_the_lock(job, other_row, client):
    """The work as a whole may be done again, and then succeeds."""
    resource = (Job, job.pk)

    def add_one(meanwhile: Callable[[], Any]) -> None:
        with fenced_atomic(resource, using="repeatable"):
            value = Counter.objects.using("repeatable").get().value
            meanwhile()
            Counter.objects.using("repeatable").update(value=value + 1)

    with pytest.raises(OperationalError) as caught:
        add_one(lambda: in_threads(lambda: Counter.objects.update(value=10)))
    add_one(lambda: None)

    assert sqlstate(caught.value) == errors.SerializationFailure.sqlstate
    assert Counter.objects.get().value == 11


@contextmanager
def failing(fault: type[Exception], times: int) -> Iterator[list[str]]:
    """Let this thread's next registrations fail, and collect those that were tried."""
    tried: list[str] = []

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        tried.append(sql)
        if len(tried) <= times:
            raise OperationalError(fault.__name__) from fault()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail):
        yield tried


@pytest.mark.parametrize("fault", [errors.SerializationFailure, errors.DeadlockDetected])
def test_a_registration_of_its_own_is_tried_again(resource, fault):
    """Two times: nothing else is in that transaction."""
    with failing(fault, 2) as tried, fenced_lock(resource) as lease:
        assert lease.row.last_fence_token == lease.token

    assert len(tried) == 3


@pytest.mark.parametrize(
    ("fault", "times"),
    [(errors.SerializationFailure, 3), (errors.DeadlockDetected, 3), (errors.DiskFull, 1)],
)
def test_an_error_that_stays_passes_through(resource, client, fault, times):
    """And the lease is given back."""
    with failing(fault, times) as tried, pytest.raises(OperationalError, match=fault.__name__):
        fenced_lock(resource).acquire()

    assert len(tried) == times
    assert not client.exists(keys_of(resource).lease)


@pytest.mark.parametrize("fault", [errors.SerializationFailure, errors.DeadlockDetected])
def test_a_registration_inside_the_transaction_is_not_tried_again(resource, client, fault):
    """PostgreSQL has ended that transaction: it is the caller's to do again."""
    with failing(fault, 1) as tried, pytest.raises(OperationalError):
        take(resource, "fenced_atomic")

    assert len(tried) == 1
    assert not client.exists(keys_of(resource).lease)


# How long registering waits, and what it leaves


@pytest.mark.parametrize("way", ["fenced_lock", "unregistered", "fenced_atomic"])
@pytest.mark.parametrize("register", [True, False])
def test_a_holder_inside_its_transaction_refuses_others_in_time(resource, client, register, way):
    """They give their lease back, and nothing of them is registered."""
    with holding(resource, register=register) as older, started(keep_row, older) as a:
        a.reach_pause()
        expire(client, resource)
        began = monotonic()

        with pytest.raises((LockHeld, LeaseLost)) as caught:
            take(resource, way, ttl=0.2)

        assert 0.2 <= monotonic() - began < 2
        assert isinstance(caught.value, LeaseLost if way == "unregistered" else LockHeld)
        assert "a transaction kept its row locked for 0.2 s" in str(caught.value)
        assert not client.exists(keys_of(resource).lease)
        assert a.finish() is None

    assert take(resource, way) > older.token


@pytest.mark.parametrize("way", ["fenced_lock", "fenced_atomic"])
def test_a_waiter_goes_on_when_the_transaction_that_keeps_the_row_ends(resource, client, way):
    """It spends its whole wait in the database, and with one lease."""
    with (
        mock.patch("django_fencing.leases._PATIENCE", 0.01),
        fenced_lock(resource) as older,
        started(keep_row, older) as a,
    ):
        a.reach_pause()
        expire(client, resource)
        with started(lambda _: take(resource, way, wait=SECONDS)) as b:
            wait_until(partial(waits_for_row, seconds=0.1))
            assert a.finish() is None
            assert b.finish() == older.token + 1


@pytest.mark.parametrize("value", ["0", "7s", "1500ms"])
def test_the_lock_timeout_is_as_before(resource, client, value):
    """Inside the fenced transaction, after it, and after a registration that was refused."""
    execute(f"SET lock_timeout = '{value}'")
    try:
        seen = []
        with fenced_lock(resource) as lease:
            seen.append(setting("lock_timeout"))
            with lease.atomic():
                seen.append(setting("lock_timeout"))
        with fenced_atomic(resource):
            seen.append(setting("lock_timeout"))
        client.delete(keys_of(resource).token)
        with fenced_atomic(resource):
            seen.append(setting("lock_timeout"))
        seen.append(setting("lock_timeout"))
        with holding(resource) as lease, started(keep_row, lease) as a:
            a.reach_pause()
            expire(client, resource)
            for way in ("fenced_lock", "fenced_atomic"):
                with suppress(LockHeld):
                    take(resource, way, ttl=0.01)
                seen.append(setting("lock_timeout"))
    finally:
        execute("RESET lock_timeout")

    assert seen == [value] * 7


@pytest.mark.django_db
def test_the_lock_timeout_is_as_before_in_the_transaction_of_a_test_case(client):
    """Registering is no transaction of its own there, so it must put back what it sets."""
    job = Job.objects.create()
    Job.objects.update(last_fence_token=5)

    with fenced_lock((Job, job.pk)) as lease:
        assert lease.token > 5

        assert setting("lock_timeout") == "0"


# Transaction pooling


FORBIDDEN = re.compile(
    r"advisory|\bLISTEN\b|\bNOTIFY\b|\bDECLARE\b|\bPREPARE\b|\bTEMP|^\s*(RE)?SET\b|session", re.I
)


@pytest.mark.parametrize("alias", ["default", "repeatable"])
@pytest.mark.parametrize("kind", ["row", "name"])
def test_no_session_state_is_used(job, name, client, alias, kind):
    """A pool may give each transaction another session."""
    resource = (Job, job.pk) if kind == "row" else name
    with statements(alias) as sent:
        for register in (True, False):
            with fenced_lock(resource, using=alias, register=register) as lease:
                for _ in range(2):
                    with lease.atomic(), lease.atomic():
                        pass
                lease.extend()
        with fenced_atomic(resource, using=alias), suppress(LockHeld):
            in_threads(lambda: fenced_lock(resource, using=alias).acquire())

    own = [sql for sql in sent if "SAVEPOINT" not in sql]
    assert len(own) >= 5
    assert [sql for sql in own if FORBIDDEN.search(sql)] == []
    for call in re.findall(r"set_config\(([^()]*)\)", "".join(own)):
        assert call.endswith(", true")


@pytest.mark.parametrize("alias", ["default", "repeatable"])
def test_every_transaction_may_have_a_session_of_its_own(job, alias):
    """Nothing has to be remembered by the server."""
    connections[alias].close()
    with fenced_lock((Job, job.pk), using=alias) as lease:
        for note in ("first", "second"):
            connections[alias].close()
            with lease.atomic() as row:
                row.note = note
                row.save(using=alias)
        connections[alias].close()

    assert (row.note, row.last_fence_token) == ("second", lease.token)


def test_parameters_that_the_server_binds(job, name):
    """psycopg can leave them to PostgreSQL, which must then infer their types."""
    alias = "bound"
    bound = connection.copy(alias)
    bound.settings_dict["OPTIONS"] = {"server_side_binding": True}
    connections[alias] = bound
    try:
        for resource in ((Job, job.pk), name):
            for register in (True, False):
                lock = fenced_lock(resource, using=alias, register=register)
                with lock as lease, lease.atomic() as row:
                    assert row.last_fence_token == lease.token
    finally:
        bound.close()
        del connections[alias]


# Row before lock, lock before row


def test_row_before_lock_meets_lock_before_row(job):
    """The one that has the row first is refused at once, so neither waits for the other."""

    def row_then_lock(pause: Pause) -> None:
        with transaction.atomic():
            Job.objects.select_for_update().get()
            pause()
            fenced_lock(job, wait=SECONDS).acquire()

    def lock_then_row(_: Pause) -> None:
        with fenced_atomic(job, wait=SECONDS) as row:
            row.note = "done"
            row.save()

    with started(row_then_lock) as a:
        a.reach_pause()
        with started(lock_then_row) as b:
            wait_until(waits_for_row)
            assert isinstance(a.finish(), InsideTransaction)
            assert b.finish() is None

    assert Job.objects.get().note == "done"


# Connections that break


@pytest.fixture
def breaking(transactional_db: None) -> Iterator[None]:
    """Let a test break its connection, and take it away before the database is emptied."""
    yield
    connection.close()


@pytest.mark.usefixtures("breaking")
@pytest.mark.parametrize("register", [True, False])
def test_a_connection_that_died_during_a_long_call_frees_the_lock(resource, client, register):
    """The fenced transaction fails as such, and the next one has a new connection."""
    with fenced_lock(resource, register=register) as lease:
        kill(backend())
        with pytest.raises(OperationalError):
            commit(lease, lambda: Entry.objects.create(text="first"))
        with lease.atomic():
            Entry.objects.create(text="second")

    assert Entry.objects.get().text == "second"
    assert not client.exists(keys_of(resource).lease)


@pytest.mark.usefixtures("breaking")
def test_a_connection_that_died_does_not_keep_the_lock(resource, client):
    """Even if the error leaves the block, or nobody looks at the connection any more."""

    def die_before_the_transaction() -> None:
        with fenced_lock(resource) as lease:
            kill(backend())
            commit(lease)

    with pytest.raises(OperationalError):
        die_before_the_transaction()
    assert not client.exists(keys_of(resource).lease)
    with fenced_lock(resource) as lease:
        kill(backend())
    assert not client.exists(keys_of(resource).lease)

    assert in_threads(lambda: fenced_lock(resource).acquire().token) == [lease.token + 1]


@pytest.mark.usefixtures("breaking")
def test_a_connection_that_dies_while_registering_leaves_no_lease(job, client):
    """Nobody knows if it was registered: the next holder has a higher token in any case."""

    def register(_: Pause) -> None:
        pids.append(backend())
        fenced_lock(job, wait=SECONDS).acquire()

    pids: list[int] = []
    with started(lock_row) as a:
        a.reach_pause()
        with started(register) as b:
            wait_until(waits_for_row)
            _kill(pids[0])
            assert isinstance(b.finish(), OperationalError)
            assert not client.exists(keys_of(job).lease)

    assert fenced_lock(job).acquire().token == 2


@pytest.mark.usefixtures("breaking")
@pytest.mark.parametrize("moment", ["in the body", "at the commit"])
@pytest.mark.parametrize("register", [True, False])
def test_a_connection_that_dies_in_the_transaction_leaves_no_half_write(resource, moment, register):
    """The lease may do the work again, and registers again if that was lost too."""

    def die(lease: Lease) -> None:
        with lease.atomic():
            Entry.objects.create(text="lost")
            kill(backend())
            if moment == "in the body":
                Entry.objects.create(text="lost")

    with fenced_lock(resource, register=register) as lease:
        with pytest.raises(OperationalError):
            die(lease)
        assert not Entry.objects.exists()

        with lease.atomic() as row:
            Entry.objects.create(text="kept")

    assert Entry.objects.get().text == "kept"
    row.refresh_from_db()
    assert (row.last_fence_token, row.last_fence_holder) == (lease.token, lease.holder.id)


@contextmanager
def lost_reply() -> Iterator[None]:
    """Let COMMIT succeed, and the connection break before it is known."""
    original = connection._commit

    def commit() -> None:
        original()
        connection.connection.close()
        raise OperationalError("The connection was lost.")

    with mock.patch.object(connection, "_commit", commit):
        yield


@pytest.mark.usefixtures("breaking")
def test_a_commit_whose_reply_was_lost_has_registered(resource):
    """The next transaction of the lease knows it by its holder, and goes on from there."""
    with fenced_lock(resource, register=False) as lease:
        with pytest.raises(OperationalError), lost_reply(), lease.atomic():
            Entry.objects.create(text="first")
        with lease.atomic() as row:
            Entry.objects.create(text="second")

    assert Entry.objects.count() == 2
    assert (row.last_fence_token, row.last_fence_holder) == (lease.token, lease.holder.id)


@pytest.mark.usefixtures("breaking")
def test_a_lease_whose_commit_is_unknown_does_not_come_after_a_newer_one(resource, client):
    """It has to register again, and the store says that it has ended."""
    with fenced_lock(resource, register=False) as lease:
        with pytest.raises(OperationalError), lost_reply(), lease.atomic():
            Entry.objects.create(text="first")
        in_threads(lambda: taken_over(fenced_lock(resource), client))

        with pytest.raises(LeaseLost):
            commit(lease, lambda: Entry.objects.create(text="second"))

    assert Entry.objects.get().text == "first"


# SQLite, which has no row locks


@committing("default", "sqlite")
@pytest.mark.parametrize("equal", [False, True])
def test_two_holders_race_on_sqlite_a_hundred_times(client, equal):
    """Both begin together: the older one commits before the newer one, or not at all.

    Two with an equal token, whose leases are gone: exactly one of them commits.
    """
    job = Job.objects.using("sqlite").create(amount=0)
    keys = keys_of(job)
    barrier = threading.Barrier(2)

    def race(lease: Lease) -> str:
        barrier.wait(SECONDS)
        try:
            with lease.atomic() as row:
                row.amount += 1
                row.note += f"{lease.token},"
                row.save()
        except LeaseLost:
            return "lost"
        return "committed"

    def leases() -> Iterator[Lease]:
        job.refresh_from_db()
        for _ in range(2):
            yield fenced_lock(job, register=False).acquire()
            client.delete(keys.lease, *([keys.token] if equal else []))

    committed = 0
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for _ in range(100):
            older, newer = leases()
            assert (newer.token == older.token) is equal
            races = (first.submit(race, older), second.submit(race, newer))
            outcomes = [race.result(SECONDS) for race in races]
            assert outcomes.count("committed") == 1 if equal else outcomes[1] == "committed"
            committed += outcomes.count("committed")
        for pool in (first, second):
            pool.submit(closing, int).result(SECONDS)

    job.refresh_from_db()
    assert job.amount == committed
    tokens = [int(token) for token in job.note.split(",")[:-1]]
    assert tokens == sorted(set(tokens))
