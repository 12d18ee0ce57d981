"""The guards of ProtectFence meet tables of every shape, and each other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, connections, models, transaction
from django.db.migrations.operations import CreateModel
from django.db.migrations.state import ProjectState

from django_fencing.exceptions import FencingError, StaleToken, UnfencedWrite
from django_fencing.locks import fenced_atomic
from django_fencing.operations import ProtectFence, UnprotectFence
from tests.helpers import committing, sql
from tests.shop.models import Job, UrgentJob
from tests.test_operations import protected

pytestmark = committing("default", "other", "sqlite")


def fenced_table(name: str, options: dict[str, Any] | None = None, **fields: Any) -> CreateModel:
    """Return the operation that creates a model with a fence."""
    return CreateModel(
        name,
        [
            ("id", models.BigAutoField(primary_key=True)),
            ("last_fence_token", models.BigIntegerField(default=0, db_default=0)),
            ("last_fence_holder", models.UUIDField(null=True)),
            ("amount", models.IntegerField(default=0)),
            *fields.items(),
        ],
        options=options or {},
    )


class History:
    """Migrates a project of one app in one database, operation by operation."""

    def __init__(self, alias: str = "default") -> None:
        self.alias = alias
        self.states = [ProjectState()]
        self.operations: list[Any] = []

    def forwards(self, *operations: Any) -> None:
        for operation in operations:
            before, after = self.states[-1], self.states[-1].clone()
            operation.state_forwards("attack", after)
            with connections[self.alias].schema_editor() as editor:
                operation.database_forwards("attack", editor, before, after)
            self.states.append(after)
            self.operations.append(operation)

    def backwards(self, number: int = 1) -> None:
        for _ in range(number):
            operation, after = self.operations.pop(), self.states.pop()
            with connections[self.alias].schema_editor() as editor:
                operation.database_backwards("attack", editor, after, self.states[-1])

    def model(self, name: str) -> Any:
        return self.states[-1].apps.get_model("attack", name)


@contextmanager
def history(alias: str = "default") -> Iterator[History]:
    """Undo in the end what was migrated."""
    made = History(alias)
    try:
        yield made
    finally:
        made.backwards(len(made.operations))


def test_a_trigger_that_stamps_a_row_does_not_keep_it_from_being_locked(job: Job) -> None:
    """updated_at by a BEFORE trigger is common; to register is no write of the caller's."""
    sql(
        "CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.note := clock_timestamp()::text; RETURN NEW; END $$"
    )
    sql("CREATE TRIGGER stamp BEFORE UPDATE ON shop_job FOR EACH ROW EXECUTE FUNCTION stamp()")
    try:
        with protected("Job", require_lease=True), fenced_atomic(job) as row:
            row.amount = 11
            row.save()
    finally:
        sql("DROP FUNCTION stamp CASCADE")


def test_a_long_name_that_is_not_ascii_has_both_guards() -> None:
    """PostgreSQL cuts names at 63 bytes, not at 63 characters."""
    table = "заявки_организаций_и_поставщиковъ"
    with history() as made:
        made.forwards(fenced_table("Row", {"db_table": table}))
        made.forwards(ProtectFence("Row", require_lease=True))
        row = made.model("Row").objects.create(last_fence_token=9)
        names = sql(
            "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal AND tgrelid = %s::regclass",
            [f'"{table}"'],
        )
        with pytest.raises(StaleToken):
            made.model("Row").objects.filter(pk=row.pk).update(last_fence_token=3)
        assert len(names) == 3  # that of the fence before and after


def test_tables_of_one_name_in_two_schemas_have_guards_of_their_own() -> None:
    """Undoing one of them leaves the other as it is, and works."""
    sql("CREATE SCHEMA one")
    sql("CREATE SCHEMA two")
    try:
        made = History()
        for name in ("one", "two"):
            made.forwards(fenced_table(name, {"db_table": f'{name}"."row'}))
            made.forwards(ProtectFence(name))
        made.backwards(1)
    finally:
        sql("DROP SCHEMA one CASCADE")
        sql("DROP SCHEMA two CASCADE")
        sql("DROP FUNCTION IF EXISTS row_fence_guard()")


def test_the_fence_does_not_go_down_where_the_row_moves_to_another_partition() -> None:
    """PostgreSQL deletes and inserts it then, and fires no trigger of UPDATE."""
    sql(
        "CREATE TABLE attack_parted (id bigint, amount int, last_fence_token bigint NOT NULL,"
        " last_fence_holder uuid, region int, PRIMARY KEY (id, region)) PARTITION BY LIST (region)"
    )
    for region in (1, 2):
        sql(
            f"CREATE TABLE attack_parted_{region} PARTITION OF attack_parted"
            f" FOR VALUES IN ({region})"
        )
    try:
        state = ProjectState()
        fenced_table("Parted", region=models.IntegerField()).state_forwards("attack", state)
        with connection.schema_editor() as editor:
            ProtectFence("Parted").database_forwards("attack", editor, state, state)
        sql("INSERT INTO attack_parted VALUES (1, 0, 9, NULL, 1)")
        with pytest.raises(StaleToken):
            sql("UPDATE attack_parted SET last_fence_token = 3, region = 2")
    finally:
        sql("DROP TABLE attack_parted")
        sql("DROP FUNCTION IF EXISTS attack_parted_fence_guard()")


def test_the_guard_of_a_child_looks_into_the_table_of_its_parent() -> None:
    """Not into a temporary one of the same name, as an import makes it."""
    row = UrgentJob.objects.create(deadline=1)
    with protected("Job", require_lease=True), transaction.atomic():
        sql("CREATE TEMP TABLE shop_job (LIKE shop_job) ON COMMIT DROP")
        with pytest.raises(UnfencedWrite), transaction.atomic():
            sql("UPDATE shop_urgentjob SET deadline = 2 WHERE job_ptr_id = %s", [row.pk])


def test_the_guard_of_a_child_does_not_depend_on_the_search_path() -> None:
    row = UrgentJob.objects.create(deadline=1)
    sql("CREATE SCHEMA tenant")
    sql("CREATE TABLE tenant.shop_job (LIKE public.shop_job)")
    try:
        with protected("Job", require_lease=True), transaction.atomic():
            sql("SET LOCAL search_path = tenant, public")
            with pytest.raises(UnfencedWrite), transaction.atomic():
                sql("UPDATE public.shop_urgentjob SET deadline = 2 WHERE job_ptr_id = %s", [row.pk])
    finally:
        sql("DROP SCHEMA tenant CASCADE")


def test_a_registration_is_that_of_one_row(job: Job) -> None:
    """A clone by bulk_create() has the fence of its original."""
    with protected("Job", require_lease=True), fenced_atomic(job) as row:
        (clone,) = Job.objects.bulk_create(
            [
                Job(
                    last_fence_token=row.last_fence_token,
                    last_fence_holder=row.last_fence_holder,
                )
            ]
        )
        with pytest.raises(UnfencedWrite), transaction.atomic():
            Job.objects.filter(pk=clone.pk).update(amount=1)


def test_a_child_protected_alone_is_written_under_its_lease_though_its_parent_is_gone() -> None:
    """The foreign key is deferred, and the guard lets pass what has no parent."""
    row = UrgentJob.objects.create(deadline=1)
    with protected("UrgentJob", require_lease=True), transaction.atomic():
        sql("DELETE FROM shop_job WHERE id = %s", [row.pk])
        with pytest.raises(UnfencedWrite), transaction.atomic():
            sql("DELETE FROM shop_urgentjob WHERE job_ptr_id = %s", [row.pk])
        transaction.set_rollback(True)


# The operation


def test_to_undo_a_later_operation_leaves_the_guard_of_an_earlier_one() -> None:
    """First the fence alone, later the lease too: one step back is the fence alone."""
    with history() as made:
        made.forwards(fenced_table("Row"), ProtectFence("Row"))
        made.forwards(ProtectFence("Row", require_lease=True))
        row = made.model("Row").objects.create(last_fence_token=9)
        made.backwards()
        with pytest.raises(StaleToken):
            made.model("Row").objects.filter(pk=row.pk).update(last_fence_token=3)


def test_to_undo_the_guard_of_a_parent_leaves_that_of_a_child_with_its_own() -> None:
    child = CreateModel(
        "Child",
        [
            (
                "row_ptr",
                models.OneToOneField(
                    "attack.Row", models.CASCADE, primary_key=True, parent_link=True
                ),
            ),
            ("extra", models.IntegerField(default=0)),
        ],
        bases=("attack.row",),
    )
    with history() as made:
        made.forwards(fenced_table("Row"), child)
        made.forwards(ProtectFence("Child", require_lease=True))
        made.forwards(ProtectFence("Row", require_lease=True))
        row = made.model("Child").objects.create()
        made.backwards()
        with pytest.raises(UnfencedWrite):
            made.model("Child").objects.filter(pk=row.pk).update(extra=3)


def test_an_unmanaged_model_is_protected_or_refused() -> None:
    """A guard that is asked for and not made has to be told."""
    sql(
        "CREATE TABLE attack_row (id bigint PRIMARY KEY, amount int, last_fence_token bigint,"
        " last_fence_holder uuid)"
    )
    try:
        made = History()
        made.forwards(fenced_table("Row", {"managed": False}))
        try:
            made.forwards(ProtectFence("Row", require_lease=True))
        except ValueError:
            return
        sql("INSERT INTO attack_row VALUES (1, 0, 9, NULL)")
        with pytest.raises(FencingError):
            sql("UPDATE attack_row SET last_fence_token = 3")
    finally:
        sql("DROP TABLE attack_row")


# Refusals


def test_an_error_that_only_quotes_a_guard_is_left_alone() -> None:
    """The database shows the value that is there twice: what was written in a text, a log say."""
    sql("CREATE TABLE attack_log (line text UNIQUE)")
    line = "django_fencing: a lease is needed for the UPDATE of a row of shop_job"
    try:
        sql("INSERT INTO attack_log VALUES (%s)", [line])
        with pytest.raises(IntegrityError):
            sql("INSERT INTO attack_log VALUES (%s)", [line])
    finally:
        sql("DROP TABLE attack_log")


def test_the_errors_name_the_row(job: Job) -> None:
    """By its key, as psql shows it too."""
    Job.objects.filter(pk=job.pk).update(last_fence_token=9)
    with protected("Job", require_lease=True):
        with pytest.raises(UnfencedWrite, match=f"the UPDATE of row {job.pk} of shop_job"):
            Job.objects.filter(pk=job.pk).update(amount=1)
        with pytest.raises(StaleToken, match=f"row {job.pk} of shop_job stands at 9, and cannot"):
            Job.objects.filter(pk=job.pk).update(last_fence_token=3)


@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_what_is_not_protected_like_that_cannot_be_unprotected(alias: str) -> None:
    """A wrong argument is an error, and leaves the guard as it is."""
    with history(alias) as made:
        made.forwards(fenced_table("Row"), ProtectFence("Row", require_lease=True))
        with pytest.raises(DatabaseError):
            made.forwards(UnprotectFence("Row"))
        made.states = made.states[: len(made.operations) + 1]
        row = made.model("Row").objects.using(alias).create(last_fence_token=9)
        with pytest.raises(StaleToken):
            made.model("Row").objects.using(alias).filter(pk=row.pk).update(last_fence_token=3)
        made.forwards(UnprotectFence("Row", require_lease=True))
        made.model("Row").objects.using(alias).filter(pk=row.pk).update(last_fence_token=3)


def test_a_model_of_another_app_that_is_not_there_says_what_to_do() -> None:
    """The migration lacks a dependency."""
    with pytest.raises(LookupError, match="let the migration depend on the one that makes it"):
        ProtectFence("django_fencing.Fence").database_forwards(
            "shop", connection.schema_editor(), ProjectState(), ProjectState()
        )
