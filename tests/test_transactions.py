"""The lock stands outside the transaction, the check inside of it, on the right row and alias."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.db import (
    DatabaseError,
    IntegrityError,
    connection,
    connections,
    models,
    transaction,
)
from django.db.models import QuerySet
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_fencing import flow
from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import InsideTransaction, LeaseLost, StaleToken, UnfencedWrite
from django_fencing.leases import Lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence, FencedResource, fence_model, fence_pk
from tests.helpers import (
    SECONDS,
    Body,
    commit,
    committing,
    counted_calls,
    expire,
    in_threads,
    keys_of,
    started,
    statements,
    taken_over,
    wait_until,
    waits_for_row,
)
from tests.shop.models import (
    Code,
    Counter,
    Document,
    Entry,
    Job,
    JobProxy,
    Named,
    Numbered,
    Owned,
    Owner,
    Profile,
    UrgentJob,
    VeryUrgentJob,
)

pytestmark = committing("default")
on_two_databases = committing("default", "other")

Pause = Callable[[], None]


def fence_of(row: FencedResource, using: str = "default") -> tuple[int, UUID | None]:
    """Return what the database knows: the token and the holder."""
    fences = fence_model(type(row))._base_manager.using(using)
    values = fences.values_list("last_fence_token", "last_fence_holder")
    return values.get(pk=fence_pk(row))


# The lock stands outside the transaction


ENTRIES: dict[str, Callable[[Job], Any]] = {
    "acquire": lambda job: fenced_lock(job, wait=5).acquire(),
    "with": lambda job: fenced_lock(job, register=False).__enter__(),
    "fenced_atomic": lambda job: fenced_atomic(job).__enter__(),
    "decorator": lambda job: with_fenced_lock(job)(lambda: None)(),
    "decorator without": lambda job: with_fenced_lock(job, atomic=False)(lambda: None)(),
    "name": lambda job: fenced_lock("a name").acquire(),
}


@pytest.mark.parametrize("enter", ENTRIES.values(), ids=ENTRIES)
def test_a_lock_inside_a_transaction_is_refused_at_once(job, enter):
    """Nobody waits for Redis while a transaction keeps rows: nothing is even sent."""
    with (
        counted_calls() as calls,
        transaction.atomic(),
        pytest.raises(InsideTransaction, match="lease.atomic()"),
    ):
        enter(job)

    assert calls == []


def test_a_lock_without_autocommit_is_refused(job):
    """A transaction is open as soon as anything is read."""
    transaction.set_autocommit(False)
    try:
        with pytest.raises(InsideTransaction):
            fenced_lock(job).acquire()
    finally:
        transaction.set_autocommit(True)


def test_the_setting_counts_before_there_is_a_connection(job, monkeypatch):
    """Nothing is connected only to find out."""
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)

    with pytest.raises(InsideTransaction):
        fenced_lock(job).acquire()

    assert connection.connection is None


@on_two_databases
def test_a_transaction_on_another_database_is_no_hindrance(job):
    """Only the fence's own alias counts."""
    with transaction.atomic(using="other"), fenced_lock(job) as lease, lease.atomic() as row:
        row.note = "done"
        row.save()

    assert Job.objects.get().note == "done"


def test_another_lease_inside_a_fenced_transaction_is_refused(job, name):
    """Neither can it be taken there, nor can its transaction be opened there."""
    with fenced_lock(name) as other, fenced_lock(job) as lease, lease.atomic():
        with pytest.raises(InsideTransaction):
            fenced_lock(f"{name}:2").acquire()
        with pytest.raises(InsideTransaction):
            commit(other)

        assert flow.fenced_by("default") is lease


def test_a_fenced_transaction_inside_a_transaction_is_refused(job):
    """Its commit would not be the outer one's, whose snapshot may be old."""
    with fenced_lock(job) as lease:
        with transaction.atomic(), pytest.raises(InsideTransaction):
            commit(lease)

        commit(lease)


def test_a_release_inside_a_transaction_is_refused_and_works_after_it(job, client):
    """The next holder could otherwise begin before the commit."""
    lease = fenced_lock(job).acquire()

    for block in (transaction.atomic, lease.atomic):
        with block(), pytest.raises(InsideTransaction):
            lease.release()

    assert client.exists(keys_of(job).lease)
    assert lease.release()
    assert not client.exists(keys_of(job).lease)


def test_a_block_that_ends_inside_a_transaction_is_refused(job, client):
    """The lease is kept, for the next holder would begin before the commit."""
    lock = fenced_lock(job)
    lock.__enter__()

    with transaction.atomic(), pytest.raises(InsideTransaction):
        lock.__exit__(None, None, None)

    assert client.exists(keys_of(job).lease)


def test_a_body_that_fails_inside_a_transaction_keeps_its_own_error(job, caplog):
    """The lease runs out by itself, with a warning."""
    lock = fenced_lock(job)
    lock.__enter__()

    with transaction.atomic():
        lock.__exit__(KeyError, KeyError(), None)

    assert "it was not given back and will run out" in caplog.text


@pytest.mark.django_db
def test_the_transaction_of_a_test_case_does_not_count():
    """Django opens one around each test: locks work in there, but not in atomic()."""
    job = Job.objects.create()
    assert connection.in_atomic_block

    for register in (True, False):
        with fenced_lock(job, register=register) as lease:
            for note in ("first", "second"):
                with lease.atomic() as row:
                    row.note = note
                    row.save()
        job.refresh_from_db()
        assert (job.note, job.last_fence_token) == ("second", lease.token)

    with transaction.atomic(), pytest.raises(InsideTransaction):
        fenced_lock(job).acquire()


@pytest.mark.parametrize("in_test_case", [False, pytest.param(True, marks=pytest.mark.django_db)])
@pytest.mark.parametrize("register", [True, False])
def test_a_row_may_be_saved_in_a_later_transaction_of_its_lease(in_test_case, register):
    """What works in production works in a TestCase."""
    assert connection.in_atomic_block is in_test_case
    job = Job.objects.create()

    with fenced_lock(job, register=register) as lease:
        with lease.atomic() as row:
            row.note = "first"
            row.save()
        token = lease.token
        with lease.atomic():
            row.note = "second"
            row.save()

    assert (Job.objects.get().note, lease.token) == ("second", token)


@pytest.mark.parametrize("end", ["commit", "exception", "rollback", "savepoint"])
def test_the_next_holder_finds_what_became_of_the_transaction(job, client, end):
    """The lock is freed after it, whatever its end is, and at once."""
    with suppress(KeyError), fenced_lock(job) as lease, lease.atomic() as row:
        row.note = "written"
        row.save()
        if end == "exception":
            raise KeyError
        if end == "rollback":
            transaction.set_rollback(True)
        if end == "savepoint":
            with suppress(KeyError), transaction.atomic():
                raise KeyError

    assert not client.exists(keys_of(job).lease)
    expected = "written" if end in ("commit", "savepoint") else ""
    assert in_threads(lambda: fenced_lock(job).acquire().row.note) == [expected]


def test_a_waiter_never_sees_the_state_before_the_commit(job):
    """It gets the lock when the transaction has ended, and reads its result."""

    def assign(pause: Pause) -> None:
        with fenced_atomic(job) as row:
            row.note = "assigned"
            row.save()
            pause()

    with started(assign) as a:
        a.reach_pause()
        with started(lambda _: fenced_lock(job, wait=10).acquire().row.note) as b:
            assert not b.stands
            assert [a.finish(), b.finish()] == [None, "assigned"]


# A lease counts as registered once its registration has committed


def fails_by_exception(row: Job) -> None:
    raise KeyError("exception")


def fails_by_rollback(row: Job) -> None:
    transaction.set_rollback(True)


def fails_at_the_commit(row: Job) -> None:
    """The constraint is deferred: PostgreSQL checks it at COMMIT."""
    Entry.objects.create(job_id=0)


def fails_by_a_swallowed_query(row: Job) -> None:
    """PostgreSQL answers the COMMIT of a failed transaction with a ROLLBACK, and no error."""
    with suppress(DatabaseError):
        list(Counter.objects.extra(where=["1 / 0 = 1"]))


def fails_by_a_swallowed_write(row: Job) -> None:
    """Django itself rolls back, and raises nothing."""
    Counter.objects.bulk_create([Counter(pk=1)])
    with suppress(IntegrityError):
        Counter.objects.create(pk=1)


FAILURES = [
    fails_by_exception,
    fails_by_rollback,
    fails_at_the_commit,
    fails_by_a_swallowed_query,
    fails_by_a_swallowed_write,
]


@pytest.mark.parametrize("fail", FAILURES)
@pytest.mark.parametrize("kind", ["row", "name"])
def test_a_registration_that_did_not_commit_is_made_again(job, name, kind, fail):
    """Each transaction of the lease registers, until one has committed."""
    resource = job if kind == "row" else name

    with fenced_lock(resource, register=False) as lease:
        for _ in range(2):
            with suppress(KeyError, IntegrityError), lease.atomic() as row:
                Entry.objects.create(text="rolled back")
                fail(row)
            assert not Entry.objects.exists()
            assert (kind == "name" and not Fence.objects.exists()) or not fence_of(job)[0]
        with lease.atomic() as row:
            Entry.objects.create(text="committed")

    assert fence_of(row) == (lease.token, lease.holder.id)
    assert Entry.objects.get().text == "committed"


def test_a_committed_registration_is_only_checked_afterwards(job):
    """Each later transaction costs one SELECT, which locks the row."""
    with fenced_lock(job, register=False) as lease:
        with lease.atomic():
            pass
        with statements() as later, lease.atomic():
            pass

    (check,) = (sql for sql in later if "FROM" in sql)
    assert check.startswith("SELECT")
    assert check.endswith("FOR NO KEY UPDATE")


@pytest.mark.parametrize("which", ["yielded", "queried"])
def test_an_instance_from_a_rolled_back_transaction_does_not_overwrite(job, client, which):
    """Its registration did not commit, so an older holder could write in between."""
    older = in_threads(lambda: fenced_lock(job, register=False).acquire())[0]
    expire(client, job)

    with fenced_lock(job, register=False) as lease:
        kept = rolled_back_row(lease, which)
        in_threads(lambda: write_amount(older, 20))
        with suppress(UnfencedWrite, LeaseLost), lease.atomic():
            written(kept).save()

    assert Job.objects.get().amount == 20


def rolled_back_row(lease: Lease, which: str) -> Any:
    with lease.atomic() as row:
        kept = row if which == "yielded" else Job.objects.get()
        transaction.set_rollback(True)
    return kept


def write_amount(lease: Lease, amount: int) -> None:
    with lease.atomic() as row:
        row.amount = amount
        row.save()


def test_one_lease_may_commit_in_several_transactions(job, client):
    """Until a newer holder registers; the fence stays where it is."""
    with fenced_lock(job) as lease:
        for amount in (1, 2, 3):
            with lease.atomic() as row:
                row.amount = amount
                row.save()
            assert fence_of(job) == (lease.token, lease.holder.id)
        newer = in_threads(lambda: taken_over(fenced_lock(job), client))[0]

        with pytest.raises(StaleToken):
            commit(lease, lambda: Job.objects.update(amount=4))

    assert fence_of(job) == (newer.token, newer.holder.id)
    assert Job.objects.get().amount == 3


def test_a_fenced_transaction_nests_in_itself_as_a_savepoint(job):
    """What fails in the inner one is undone alone, and the row stays locked."""
    with fenced_lock(job, register=False) as lease, lease.atomic() as row:
        row.note = "outer"
        row.save()
        with suppress(KeyError), lease.atomic() as inner:
            assert inner is row
            Job.objects.update(note="inner")
            raise KeyError
        with lease.atomic():
            Entry.objects.create(text="kept")

    assert (Job.objects.get().note, Entry.objects.get().text) == ("outer", "kept")
    assert fence_of(job) == (lease.token, lease.holder.id)


@pytest.mark.parametrize("fails", [False, True])
def test_threads_of_one_lease_register_one_at_a_time(job, fails):
    """The second one waits for the end of the first, and registers only if that has failed."""
    lease = fenced_lock(job, register=False).acquire()

    def first(pause: Pause) -> None:
        with lease.atomic():
            pause()
            transaction.set_rollback(fails)

    def second(pause: Pause) -> list[str]:
        connection.ensure_connection()
        pause()
        with statements() as sent, lease.atomic() as row:
            row.note = "second"
            row.save()
        return [sql for sql in sent if "last_fence_token" in sql]

    with started(first) as a:
        a.reach_pause()
        with started(second) as b:
            b.reach_pause()
            b.go_on()
            wait_until(lambda: waits_for_thread(b) or waits_for_row())
            assert not waits_for_row()
            assert a.finish() is None
            opening = b.finish()[0]

    assert ("SET" in opening) is fails
    assert fence_of(job) == (lease.token, lease.holder.id)
    assert Job.objects.get().note == "second"


def waits_for_thread(body: Body) -> bool:
    """Say whether the thread enters a context of lease.atomic() that another thread is in."""
    frame = sys._current_frames()[body.thread.ident or 0]
    caller = frame.f_back
    return (
        frame.f_code.co_name == "enter_context"
        and caller is not None
        and caller.f_code.co_filename.endswith("registrar.py")
    )


def test_hooks_on_commit_run_outside_the_fenced_transaction(job):
    """They may open another one or release the lease, but not save around it."""
    seen: list[object] = []

    def hook() -> None:
        seen.append(flow.fenced_by("default"))
        with pytest.raises(UnfencedWrite):
            row.save()
        with lease.atomic() as again:
            again.note = "hook"
            again.save()
        seen.append(lease.release())

    with fenced_lock(job, register=False) as lease, lease.atomic() as row:
        transaction.on_commit(hook)

    assert seen == [None, True]
    assert Job.objects.get().note == "hook"


def test_the_mark_of_a_fenced_transaction_ends_with_it(job):
    """However that is."""
    with fenced_lock(job) as lease:
        with suppress(KeyError), lease.atomic():
            assert flow.fenced_by("default") is lease
            raise KeyError

        assert flow.fenced_by("default") is None


@pytest.mark.parametrize("register", [True, False])
def test_rows_that_refer_to_the_locked_one_are_not_held_up(job, register):
    """A foreign key's check shares the row with FOR NO KEY UPDATE."""

    def refer() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '5s'")
        return int(Entry.objects.create(job=job).pk)

    with fenced_lock(job, register=register) as lease, lease.atomic():
        assert in_threads(refer) == [Entry.objects.get().pk]


@pytest.mark.parametrize("register", [True, False])
def test_the_lease_of_a_deleted_row_is_stale(job, client, register):
    """The error says that there is no fence any more."""
    with fenced_lock(job) as lease:
        with lease.atomic() as row:
            row.delete()
        with pytest.raises(StaleToken) as caught:
            commit(lease)

    assert (caught.value.fence_token, caught.value.fence_holder) == (None, None)
    assert not client.exists(keys_of((Job, job.pk)).lease)


# A locked row is not written around its lease


def save_child(row: Job) -> None:
    child = UrgentJob(job_ptr=row)
    child.__dict__.update(row.__dict__)
    child.note = "written"
    child.save()


def save_proxy(row: Job) -> None:
    proxy = JobProxy()
    proxy.__dict__.update(row.__dict__)
    proxy.save()


WRITES: dict[str, Callable[[Any], Any]] = {
    "save": lambda row: row.save(),
    "one field": lambda row: row.save(update_fields=["note"]),
    "forced": lambda row: row.save(force_update=True),
    "delete": lambda row: row.delete(),
    "raw": lambda row: row.save_base(raw=True),
    "child": save_child,
    "proxy": save_proxy,
}


@pytest.fixture(params=WRITES)
def write(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Return one way to write a row."""
    return WRITES[request.param]


def written(row: Job) -> Job:
    row.note = "written"
    return row


@pytest.mark.parametrize("register", [True, False])
def test_a_write_outside_the_fenced_transaction_is_refused(job, write, register):
    """Not even a fresh instance passes, nor a transaction of another kind."""
    with fenced_lock(job, register=register) as lease:
        with lease.atomic() as row:
            pass
        for block in (suppress, transaction.atomic):
            with (
                block(),
                pytest.raises(UnfencedWrite, match="outside of lease.atomic()") as caught,
            ):
                write(written(row))

    assert caught.value.resource == lease.resource
    assert Job.objects.get().note == ""


@pytest.mark.parametrize("register", [True, False])
def test_a_write_from_an_instance_that_was_loaded_before_the_lock_is_refused(job, write, register):
    """Its columns may be older than what the former holder has committed."""
    with fenced_lock(job) as former, former.atomic() as row:
        row.amount = 20
        row.save()
    old = written(Job(pk=job.pk, amount=10)) if register else written(job)

    with (
        fenced_lock(job, register=register) as lease,
        lease.atomic(),
        pytest.raises(UnfencedWrite, match="before the lock"),
    ):
        write(old)

    assert (Job.objects.get().amount, Job.objects.get().note) == (20, "")


def test_a_write_of_the_fresh_row_passes(job, write):
    """Through whichever model."""
    with fenced_lock(job) as lease, lease.atomic() as row:
        write(written(row))

    assert [*Job.objects.values_list("note", flat=True)] in (["written"], [])


LOADS: dict[str, Callable[[Job], Job]] = {
    "get": lambda job: Job.objects.get(pk=job.pk),
    "refresh": lambda job: job.refresh_from_db() or job,
    "refresh from": lambda job: (
        job.refresh_from_db(from_queryset=Job.objects.order_by("pk")) or job
    ),
    "proxy": lambda job: JobProxy.objects.get(),
    "all but one column": lambda job: Job.objects.defer("amount").get(),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_row_that_is_loaded_under_the_lock_may_be_saved(job, load):
    """It carries the lease's token, which is the mark of its load."""
    with fenced_lock(job) as lease:
        early = load(job)
        with lease.atomic():
            for row in (early, load(job)):
                row.note += "written"
                row.save()

    assert Job.objects.get().note in ("written", "writtenwritten")


def test_a_row_without_the_mark_of_its_load_is_refused(job):
    """Deferred columns tell nothing about the others."""
    with fenced_lock(job) as lease, lease.atomic():
        row = written(Job.objects.only("note").get())
        with pytest.raises(UnfencedWrite, match="before the lock"):
            row.save()


FENCE = ("last_fence_token", "last_fence_holder")

TOUCHES: dict[str, Callable[[Job], Any]] = {
    "read": lambda old: [getattr(old, name) for name in FENCE],
    "refreshed": lambda old: old.refresh_from_db(fields=FENCE),
    "refreshed with another": lambda old: old.refresh_from_db(fields=[*FENCE, "note"]),
    "refreshed from": lambda old: old.refresh_from_db(from_queryset=Job.objects.only(*FENCE)),
    "refreshed twice": lambda old: [old.refresh_from_db(fields=[name]) for name in FENCE],
}
# Django 6.1 can load deferred columns of all rows of a query at once.
JOBS = [Job.objects] + [
    Job.objects.fetch_mode(getattr(models, mode))
    for mode in ("FETCH_PEERS",)
    if hasattr(models, mode)
]


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
@pytest.mark.parametrize("deferred", [(), FENCE], ids=["loaded", "deferred"])
@pytest.mark.parametrize("jobs", JOBS, ids=["one by one", "with its peers"][: len(JOBS)])
def test_the_mark_of_the_load_does_not_come_later_than_the_columns(job, jobs, deferred, touch):
    """A fence that is read by itself does not make the other columns fresh."""
    Job.objects.create()
    old, _ = jobs.defer(*deferred).order_by("pk")
    Job.objects.update(amount=20)

    with fenced_lock(job) as lease:
        touch(old)
        with lease.atomic(), pytest.raises(UnfencedWrite):
            written(old).save()

    assert Job.objects.get(pk=job.pk).amount == 20


@pytest.mark.parametrize("missing", [FENCE, *((name,) for name in FENCE)], ids=str)
def test_a_full_refresh_marks_a_row_as_fresh_if_it_has_the_fence(job, missing):
    """Deferred columns stay deferred, and then there is no mark."""
    old = Job.objects.defer(*missing).get()
    whole = Job.objects.get()

    with fenced_lock(job) as lease, lease.atomic():
        old.refresh_from_db()
        with pytest.raises(UnfencedWrite):
            old.save()
        whole.refresh_from_db()
        written(whole).save()

    assert Job.objects.get().note == "written"


def test_other_flows_are_not_concerned(job):
    """Only the flow that holds the lock is told that it writes around it."""
    with fenced_lock(job):
        assert in_threads(written(job).save) == [None]

    assert Job.objects.get().note == "written"


def test_other_rows_are_not_concerned(job):
    """Nor is one with the same primary key elsewhere."""
    other = Job.objects.create()

    with fenced_lock(job):
        written(other).save()
        Counter.objects.create(pk=job.pk)

    assert Job.objects.get(pk=other.pk).note == "written"


@on_two_databases
def test_the_same_key_in_another_database_is_not_concerned(job):
    """It is another row."""
    with fenced_lock(job):
        Job.objects.using("other").create(pk=job.pk, note="written")


def test_a_row_is_free_again_after_the_release(job):
    """And from the start, of course."""
    with fenced_lock(job) as lease:
        lease.release()
        written(job).save()

    job.delete()
    assert not Job.objects.exists()


def test_a_flow_whose_lease_ran_out_may_write_under_its_next_one(job, client):
    """What counts is the transaction that it is in."""
    former = fenced_lock(job).acquire()
    lease = taken_over(fenced_lock(job), client)

    with lease.atomic() as row:
        written(row).save()

    assert Job.objects.get().note == "written"
    with pytest.raises(StaleToken):
        commit(former)


def test_a_flow_whose_lease_ran_out_waits_for_the_next_holder(job):
    """It would not be waiting for itself."""
    former = fenced_lock(job, ttl=0.05).acquire()
    wait_until(lambda: former.lost)

    def hold(pause: Pause) -> None:
        with fenced_lock(job, wait=SECONDS):
            pause()

    with started(hold) as other:
        other.reach_pause()
        threading.Timer(0.1, other.go_on).start()
        assert fenced_lock(job, wait=SECONDS).acquire().token == 3
        assert other.finish() is None


# One row has one fence, however it is reached


def urgent() -> UrgentJob:
    return UrgentJob.objects.create(amount=10)


ROWS: dict[str, Callable[[], Any]] = {
    "parent": lambda: Job.objects.get(pk=urgent().pk),
    "child": urgent,
    "grandchild": VeryUrgentJob.objects.create,
    "proxy": JobProxy.objects.create,
    "child with its own key": lambda: Numbered.objects.create(number=uuid4().hex[:10]),
    "uuid": Document.objects.create,
    "hidden by its managers": lambda: Owned.objects.create(deleted=True),
    "joined by its managers": lambda: Owned.objects.create(),
    "text": lambda: Code.objects.create(code=f"a'%s \N{EURO SIGN} {uuid4().hex}"[:40]),
    "name of its own": lambda: Named.objects.create(reference=uuid4().hex),
    "relation": lambda: Profile.objects.create(owner=Owner.objects.create()),
}


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest, transactional_db: None) -> FencedResource:
    """Return a saved row of every kind."""
    found: FencedResource = ROWS[request.param]()
    return found


@pytest.mark.parametrize("register", [True, False])
def test_every_kind_of_row_is_registered_checked_and_overtaken(row, client, register):
    """The row that is yielded is of the model that was locked, and fresh."""
    with fenced_lock(row, register=register) as older:
        with older.atomic() as mine:
            assert type(mine) is type(row)
            assert mine == row
            assert mine.last_fence_token == older.token == 1
            mine.save()
        assert fence_of(row) == (1, older.holder.id)
        newer = in_threads(lambda: taken_over(fenced_lock(row), client))[0]
        with pytest.raises(StaleToken):
            commit(older)

    assert fence_of(row) == (newer.token, newer.holder.id) == (2, newer.holder.id)
    assert newer.row == row


def test_every_kind_of_row_keeps_its_other_columns(row):
    """Registering writes the fence and nothing else."""
    table = [column.attname for column in row._meta.concrete_fields]
    before = snapshot_of(row, table)

    with fenced_atomic(row):
        pass

    after = snapshot_of(row, table)
    assert {name for name in table if before[name] != after[name]} == {
        "last_fence_token",
        "last_fence_holder",
    }


def snapshot_of(row: FencedResource, table: list[str]) -> dict[str, Any]:
    return QuerySet(type(row)).values(*table).get(pk=row.pk)


@pytest.mark.parametrize("alias", ["default", "sqlite"])
@pytest.mark.parametrize("register", [True, False])
@committing("default", "sqlite")
def test_the_ordering_of_a_model_does_not_matter(monkeypatch, alias, register):
    """It may join a nullable relation, which FOR UPDATE does not accept."""
    monkeypatch.setattr(Owned._meta, "ordering", ["owner__name"])
    owned = Owned.objects.using(alias).create()

    with fenced_lock(owned, register=register) as lease:
        for amount in (1, 2):
            with lease.atomic() as row:
                row.amount = amount
                row.save()

    owned.refresh_from_db()
    assert (owned.amount, owned.last_fence_token) == (2, lease.token)


@pytest.mark.parametrize("register", [True, False])
def test_a_base_manager_that_hides_the_row_does_not_matter(monkeypatch, client, register):
    """Nor that it joins: a stale lease of a hidden row is stale, and a fresh one passes."""
    hidden = Owned.objects.create(deleted=True)
    monkeypatch.setitem(vars(Owned._meta), "base_manager", Owned.objects)

    with fenced_lock((Owned, hidden.pk), register=register) as older:
        commit(older)
        (newer,) = in_threads(lambda: taken_over(fenced_lock((Owned, hidden.pk)), client))
        with pytest.raises(StaleToken):
            commit(older)

    commit(newer)
    assert newer.row.deleted


@pytest.mark.parametrize("through", [Job, UrgentJob, VeryUrgentJob, JobProxy])
def test_parents_children_and_proxies_exclude_and_overtake_each_other(client, through):
    """They are one resource with one fence."""
    youngest = VeryUrgentJob.objects.create()
    older = fenced_lock(through.objects.get()).acquire()

    for model in (Job, UrgentJob, VeryUrgentJob, JobProxy):
        lock = fenced_lock(model.objects.get())
        assert keys_of(lock.resource) == keys_of(youngest)

    newer = in_threads(lambda: taken_over(fenced_lock(youngest), client))[0]
    with pytest.raises(StaleToken):
        commit(older)
    assert (newer.token, fence_of(youngest)[0]) == (2, 2)


def test_two_holders_race_on_the_parents_row(client):
    """One through the child, one through the parent: the row lock is the parent's."""
    child = urgent()

    def add(pause: Pause, resource: Job) -> None:
        with fenced_atomic(resource) as row:
            amount = row.amount
            pause()
            Job.objects.filter(pk=row.pk).update(amount=amount + 1)

    with started(add, child) as a:
        a.reach_pause()
        expire(client, child)
        with started(add, Job.objects.get()) as b:
            wait_until(waits_for_row)
            assert [a.finish(), b.finish()] == [None, None]

    assert Job.objects.get().amount == child.amount + 2


@pytest.mark.parametrize("rolled_back", [False, True])
def test_the_first_row_of_a_name_may_be_waited_for(name, client, rolled_back):
    """Two holders of a new name race to insert its fence: no IntegrityError, and the newer wins."""

    def insert(pause: Pause) -> int:
        with fenced_atomic(name) as fence:
            pause()
            transaction.set_rollback(rolled_back)
            return fence.last_fence_token

    with started(insert) as a:
        a.reach_pause()
        expire(client, name)
        with started(insert) as b:
            wait_until(waits_for_row)
            assert [a.finish(), b.finish()] == [1, 2]

    assert Fence.objects.filter(last_fence_token=2).exists() is not rolled_back


# The right database


class ReadsFromReplica:
    """Sends reads to a replica, as routers do."""

    def db_for_read(self, model: type, **hints: Any) -> str:
        return "other"

    def db_for_write(self, model: type, **hints: Any) -> str:
        return "default"


class LivesElsewhere:
    """Keeps jobs in the other database."""

    def db_for_read(self, model: type, **hints: Any) -> str | None:
        return "other" if issubclass(model, Job) else None

    db_for_write = db_for_read


@on_two_databases
@override_settings(DATABASE_ROUTERS=[f"{__name__}.ReadsFromReplica"])
@pytest.mark.parametrize("model", [Job, UrgentJob])
def test_a_replica_that_lags_is_never_asked(model, client):
    """Registering, checking and reading the row go where writes go."""
    primary = model.objects.create(amount=20)
    model.objects.using("other").create(pk=primary.pk, amount=10)
    for alias, token in (("default", 9), ("other", 3)):
        Job.objects.using(alias).update(last_fence_token=token, last_fence_holder=uuid4())
    lagging = model.objects.get()
    assert (lagging.amount, lagging._state.db) == (10, "other")

    with CaptureQueriesContext(connections["other"]) as asked:
        for resource in (lagging, (model, lagging.pk)):
            with fenced_lock(resource) as lease, lease.atomic() as row:
                assert (row.amount, row._state.db) == (20, "default")
                assert row.last_fence_token == lease.token > 9
                row.save()
        older = fenced_lock(lagging, register=False).acquire()
        newer = in_threads(lambda: taken_over(fenced_lock(lagging), client))[0]
        with pytest.raises(LeaseLost):
            commit(older)

    assert list(asked) == []
    assert fence_of(primary, "default") == (newer.token, newer.holder.id)
    assert fence_of(primary, "other")[0] == 3


@on_two_databases
@override_settings(DATABASE_ROUTERS=[f"{__name__}.LivesElsewhere"])
def test_a_row_in_another_database_is_locked_and_checked_there():
    """What fails is rolled back there, together with the fence."""
    job = Job.objects.create(amount=10)
    assert job._state.db == "other"

    with (
        CaptureQueriesContext(connections["default"]) as asked,
        suppress(KeyError),
        fenced_atomic((Job, job.pk)) as row,
    ):
        row.amount = 20
        row.save()
        raise KeyError
    assert fence_of(job, "other") == (0, None)

    with fenced_atomic(job) as row:
        row.amount += 1
        row.save()

    assert list(asked) == []
    assert Job.objects.get().amount == 11
    assert fence_of(job, "other")[0] > 0


@on_two_databases
def test_a_transaction_on_the_wrong_database_does_not_pass_for_the_fenced_one():
    """Neither for the lock nor for the write."""
    job = Job.objects.using("other").create()

    with transaction.atomic(using="other"), pytest.raises(InsideTransaction):
        fenced_lock(job).acquire()
    with (
        transaction.atomic(using="default"),
        fenced_lock(job),
        pytest.raises(UnfencedWrite, match="outside"),
    ):
        job.save()


@on_two_databases
def test_a_lease_keeps_the_database_that_it_was_acquired_for():
    """A router that changes its mind does not move it."""
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.LivesElsewhere"]):
        job = Job.objects.create()
        lease = fenced_lock((Job, job.pk)).acquire()

    with lease.atomic() as row:
        row.note = "written"
        row.save(using="other")

    assert row._state.db == "other"
    assert Job.objects.using("other").get().note == "written"
    assert lease.release()


@on_two_databases
def test_names_are_fenced_in_the_database_that_is_asked_for(name):
    """Each has its own fence, and work there is under that fence."""
    with (
        fenced_lock(name, using="other") as elsewhere,
        fenced_lock(name) as here,
        elsewhere.atomic() as there,
        here.atomic(),
    ):
        assert there._state.db == "other"
        Counter.objects.using("other").create()

    for alias in ("default", "other"):
        assert Fence.objects.using(alias).get(name__endswith=name).last_fence_token == 1


def test_two_connections_of_one_lease_are_two_transactions(job):
    """A thread that is not in the fenced transaction is not fenced by it."""
    with fenced_lock(job) as lease, lease.atomic():
        assert in_threads(lambda: flow.fenced_by("default")) == [None]
