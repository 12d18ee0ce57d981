"""ProtectFence: the database itself guards the fence, whatever writes it."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.apps import apps
from django.db import DatabaseError, connection, connections, transaction
from django.db.migrations.state import ProjectState

from django_fencing.exceptions import StaleToken, UnfencedWrite
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence
from django_fencing.operations import ProtectFence
from tests.helpers import committing, statements, taken_over
from tests.shop.models import Code, Document, Job, Numbered, Owned, UrgentJob, VeryUrgentJob

pytestmark = committing("default", "sqlite")


@contextmanager
def protected(model: str, alias: str = "default", *, require_lease: bool = False) -> Iterator[None]:
    """Protect a model of the shop during the block."""
    operation = ProtectFence(model, require_lease=require_lease)
    state = ProjectState.from_apps(apps)
    with connections[alias].schema_editor() as editor:
        operation.database_forwards("shop", editor, state, state)
    try:
        yield
    finally:
        with connections[alias].schema_editor() as editor:
            operation.database_backwards("shop", editor, state, state)


def triggers_of(alias: str = "default") -> set[str]:
    """Return what the guards have made in a database."""
    catalogues = {
        "postgresql": "SELECT tgname FROM pg_trigger WHERE tgname LIKE '%%\\_guard\\_%%' UNION "
        "SELECT proname FROM pg_proc WHERE proname LIKE '%%\\_guard\\_%%'",
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger'",
    }
    with connections[alias].cursor() as cursor:
        cursor.execute(catalogues[connections[alias].vendor])
        return {name for (name,) in cursor.fetchall()}


@pytest.fixture(params=["default", "sqlite"])
def alias(request: Any) -> str:
    """Return a database that can guard a fence."""
    return str(request.param)


def test_a_database_that_guards_no_rows_says_so(
    alias: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When the rows are to be guarded, not when the fence alone is, nor when it is undone."""
    with protected("Job", alias):
        pass
    assert caplog.messages == []
    with protected("Job", alias, require_lease=True):
        told = list(caplog.messages)

    line = "require_lease_ignored model=Job database=sqlite"
    assert told == ([line] if alias == "sqlite" else [])
    assert caplog.messages == told


def test_a_column_that_is_guarded_says_how_to_drop_it() -> None:
    """PostgreSQL's own hint, CASCADE, would leave half of the guard."""
    with protected("Job"), connection.cursor() as cursor:
        with pytest.raises(DatabaseError) as caught:
            cursor.execute("ALTER TABLE shop_job DROP COLUMN last_fence_token")
        with pytest.raises(DatabaseError) as other:
            cursor.execute("DROP TABLE shop_owner")

    assert ["UnprotectFence" in note for note in caught.value.__notes__] == [True]
    assert not hasattr(other.value, "__notes__")


def lower_by_sql(rows: Any) -> None:
    row = rows.get()
    with connections[rows.db].cursor() as cursor:
        table = connections[rows.db].ops.quote_name(row._meta.db_table)
        cursor.execute(f"UPDATE {table} SET last_fence_token = 3 WHERE id = %s", [row.pk])  # noqa: S608


def lower_by_bulk_update(rows: Any) -> None:
    row = rows.get()
    row.last_fence_token = 3
    rows.bulk_update([row], ["last_fence_token"])


def lower_by_upsert(rows: Any) -> None:
    row = Job(pk=rows.get().pk, last_fence_token=3)
    rows.bulk_create(
        [row],
        update_conflicts=True,
        unique_fields=["id"],
        update_fields=["last_fence_token", "last_fence_holder"],
    )


def change_holder(rows: Any) -> None:
    rows.update(last_fence_holder=uuid.uuid4())


LOWERING: list[Callable[[Any], Any]] = [
    lambda rows: rows.update(last_fence_token=3),
    lower_by_sql,
    lower_by_bulk_update,
    lower_by_upsert,
    change_holder,
]
WAYS = ["update", "raw SQL", "bulk_update", "upsert", "the holder alone"]


@pytest.mark.parametrize("lower", LOWERING, ids=WAYS)
def test_no_path_lowers_a_protected_fence(alias: str, lower: Callable[[Any], Any]) -> None:
    """The fence stays, and the error is StaleToken; without the guard the same goes through."""
    job = Job.objects.using(alias).create()
    rows = Job.objects.using(alias).filter(pk=job.pk)
    holder = uuid.uuid4()
    rows.update(last_fence_token=9, last_fence_holder=holder)

    with protected("Job", alias):
        with pytest.raises(StaleToken, match="^The fence of "):
            lower(rows)
        kept = rows.values_list("last_fence_token", "last_fence_holder").get()
    lower(rows)

    assert kept == (9, holder)
    assert rows.values_list("last_fence_token", "last_fence_holder").get() != kept
    job.delete()


def test_a_protected_row_is_locked_written_and_overtaken_as_ever(alias: str, client: Any) -> None:
    """Registering moves the fence up, which the guard lets pass; so does whatever leaves it."""
    job = Job.objects.using(alias).create()
    with protected("Job", alias, require_lease=True):
        for amount in (1, 2):
            with fenced_atomic(job) as row:
                row.amount = amount
                row.save()
        lock = fenced_lock(job)
        first = lock.acquire()
        second = taken_over(lock, client)
        with pytest.raises(StaleToken), first.atomic():
            pass
        with second.atomic() as row:
            row.delete()
        second.release()

    assert not Job.objects.using(alias).filter(pk=job.pk).exists()


def test_nothing_is_left_when_it_is_undone(alias: str) -> None:
    """Neither a trigger nor a function."""
    before = triggers_of(alias)
    with protected("Job", alias, require_lease=True):
        assert triggers_of(alias) > before
    assert triggers_of(alias) == before


UNLEASED: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("update", lambda row, rows: rows.update(amount=5)),
    ("save", lambda row, rows: row.save()),
    ("delete", lambda row, rows: row.delete()),
    ("delete of rows", lambda row, rows: rows.delete()),
    ("bulk_update", lambda row, rows: rows.bulk_update([row], ["amount"])),
    (
        "with the fence moved up",
        lambda row, rows: rows.update(amount=5, last_fence_token=99),
    ),
]


@pytest.mark.parametrize(
    "write", [write for _, write in UNLEASED], ids=[name for name, _ in UNLEASED]
)
def test_a_row_that_requires_a_lease_is_not_written_without(
    job: Job, write: Callable[[Any, Any], Any]
) -> None:
    """Nothing changes, and the error says that a lease is needed."""
    rows = Job.objects.filter(pk=job.pk)
    job.amount = 5

    with protected("Job", require_lease=True):
        with pytest.raises(UnfencedWrite, match=r"^A lease is needed for the (UPDATE|DELETE)"):
            write(job, rows)
        kept = rows.get()
    write(job, rows)

    assert (kept.amount, kept.last_fence_token) == (10, 0)
    assert not rows.filter(amount=10).exists()


def test_the_lease_of_another_row_is_not_the_one_that_is_needed(job: Job) -> None:
    """A fenced transaction presents its own registration, for the time until its end."""
    other = Job.objects.create()
    with protected("Job", require_lease=True):
        with pytest.raises(UnfencedWrite), fenced_atomic(other):
            Job.objects.filter(pk=job.pk).update(amount=5)
        with fenced_atomic(job):
            Job.objects.filter(pk=job.pk).update(amount=6)
        with pytest.raises(UnfencedWrite):
            Job.objects.filter(pk=job.pk).update(amount=7)
        with fenced_lock(job) as lease:
            with lease.atomic(), transaction.atomic():
                Job.objects.filter(pk=job.pk).update(amount=8)
            with pytest.raises(UnfencedWrite):
                Job.objects.filter(pk=job.pk).update(amount=9)

    job.refresh_from_db()
    assert job.amount == 8


def test_what_only_moves_the_fence_up_needs_no_lease(job: Job) -> None:
    """An operator may fence a holder by hand, and a new row needs nobody's leave."""
    with protected("Job", require_lease=True):
        Job.objects.filter(pk=job.pk).update(last_fence_token=7, last_fence_holder=uuid.uuid4())
        Job.objects.filter(pk=job.pk).update(amount=10)  # as it is
        Job.objects.create()

    job.refresh_from_db()
    assert job.last_fence_token == 7


def test_presenting_costs_no_statement_more(job: Job) -> None:
    """The statements that register and check present the registration as well."""
    with fenced_lock(job) as lease, statements() as collected, lease.atomic():
        pass
    assert len([sql for sql in collected if "set_config" in sql]) == 1
    assert len(collected) <= 3


@pytest.mark.parametrize("model", [UrgentJob, VeryUrgentJob, Numbered])
def test_tables_of_children_are_guarded_by_the_fence_of_their_parent(model: Any) -> None:
    """Through however many tables, and keys of their own."""
    values = {"number": "n7"} if model is Numbered else {"deadline": 1}
    row = model.objects.create(**values)
    column = "number" if model is Numbered else "deadline"
    new = "n8" if model is Numbered else 2
    with protected("Job", require_lease=True):
        with pytest.raises(UnfencedWrite):
            model.objects.filter(pk=row.pk).update(**{column: new})
        with pytest.raises(UnfencedWrite):
            row.delete()
        with fenced_atomic(row) as locked:
            locked.delete()

    assert not model.objects.exists()
    assert not Job.objects.exists()


def test_a_child_can_be_protected_by_itself() -> None:
    """Its table requires the lease; the parent's does not, and has its fence to be guarded."""
    row = UrgentJob.objects.create(deadline=1)
    with protected("UrgentJob", require_lease=True):
        with pytest.raises(UnfencedWrite):
            UrgentJob.objects.filter(pk=row.pk).update(deadline=2)
        Job.objects.filter(pk=row.pk).update(amount=3)
    with (
        pytest.raises(ValueError, match="is that of shop.Job: protect that one"),
        protected("UrgentJob"),
    ):
        pass


@pytest.mark.parametrize("name", ["Owned", "Document", "Code"])
def test_tables_and_keys_of_every_kind(name: str) -> None:
    """Names that need quotes, a uuid and a text as primary key."""
    model: Any = {"Owned": Owned, "Document": Document, "Code": Code}[name]
    row = model(code="c") if model is Code else model()
    row.save()
    with protected(name, require_lease=True):
        with pytest.raises(UnfencedWrite):
            model._base_manager.filter(pk=row.pk).delete()
        with fenced_atomic(row) as locked:
            locked.delete()


def test_a_model_without_a_fence_is_refused() -> None:
    """The operation says so, and takes a name only."""
    with pytest.raises(ValueError, match="shop.Entry has no fence"), protected("Entry"):
        pass
    with pytest.raises(TypeError, match="the name of a model"):
        ProtectFence(Job)  # type: ignore[arg-type]


def test_the_fence_of_a_name_can_be_protected_too(name: str) -> None:
    """By its label, from the migration of any app."""
    with protected("django_fencing.Fence"):
        with fenced_atomic(name) as fence:
            pass
        with pytest.raises(StaleToken):
            Fence.objects.filter(pk=fence.pk).update(last_fence_token=0)
        with fenced_atomic(name) as fence:
            pass
    assert fence.last_fence_token == 2
