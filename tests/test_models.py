"""The mixin: save() never writes the fence, and a held row is not written around its lease."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.core import serializers
from django.db import connection, models
from django.test.utils import CaptureQueriesContext

from django_fencing.locks import fenced_lock
from django_fencing.models import Fence, NameField
from tests.shop.models import Document, Job, JobProxy, Numbered, Owned, UrgentJob, VeryUrgentJob

pytestmark = pytest.mark.django_db(transaction=True)

HOLDER = uuid.UUID(int=12)


def fence_of(row: models.Model) -> tuple[int, uuid.UUID | None]:
    """Return what the database says."""
    model: Any = type(row)
    rows = models.QuerySet(model).filter(pk=row.pk)
    return rows.values_list("last_fence_token", "last_fence_holder").get()


def moved(row: Any, token: int = 12) -> None:
    """Move the fence of `row` elsewhere, as another process does."""
    rows = models.QuerySet(type(row)).filter(pk=row.pk)
    rows.update(last_fence_token=token, last_fence_holder=HOLDER)


def forced(row: Any) -> None:
    row.save(force_update=True)


def of_the_fence(row: Any) -> None:
    row.save(update_fields=["last_fence_token", "last_fence_holder"])


def raw(row: Any) -> None:
    row.save_base(raw=True)


def fixture(row: Any) -> None:
    (loaded,) = serializers.deserialize("json", serializers.serialize("json", [row]))
    loaded.save()


@pytest.mark.parametrize(
    "save", [lambda row: row.save(), forced, of_the_fence, raw, fixture], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("model", [Job, JobProxy, UrgentJob, VeryUrgentJob, Document, Owned])
def test_save_never_writes_the_fence(model: Any, save: Callable[[Any], None]) -> None:
    """An instance that was loaded before the fence moved does not move it back."""
    row = model.objects.create()
    moved(row)

    save(row)

    assert fence_of(row) == (12, HOLDER)


def test_update_fields_saves_what_it_names_and_not_the_fence(job: Job) -> None:
    """The column of the fence may be among them."""
    moved(job)
    job.amount, job.last_fence_token = 20, 3

    job.save(update_fields=["amount", "last_fence_token"])

    assert Job.objects.get(pk=job.pk).amount == 20
    assert fence_of(job) == (12, HOLDER)


def test_a_save_costs_what_it_costs_without_a_fence(job: Job) -> None:
    """One statement, and nothing is asked of anybody."""
    with CaptureQueriesContext(connection) as queries:
        job.save()

    (update,) = queries.captured_queries
    assert "fence" not in update["sql"]


@pytest.mark.parametrize("model", [Job, UrgentJob, Document])
def test_a_clone_starts_at_0_and_no_holder(model: Any) -> None:
    """Its first lease has token 1."""
    row = model.objects.create()
    moved(row)
    clone = model.objects.get(pk=row.pk)
    clone.pk = clone.id = uuid.uuid4() if model is Document else None
    clone._state.adding = True

    clone.save()

    assert (clone.last_fence_token, clone.last_fence_holder) == (0, None)
    assert fence_of(clone) == (0, None)
    with fenced_lock(clone) as lease:
        assert lease.token == 1


def test_a_child_that_is_added_to_a_row_leaves_its_fence(job: Job) -> None:
    """The child's own table has none."""
    moved(job)
    parent = Job.objects.get(pk=job.pk)
    child = UrgentJob(job_ptr=parent, deadline=3)
    child.__dict__.update(amount=10, last_fence_token=12, last_fence_holder=HOLDER)

    child.save()

    assert fence_of(child) == (12, HOLDER)
    assert child.last_fence_token == 12


def test_a_fixture_brings_its_fence_to_a_new_row() -> None:
    """A restored dump does not fall behind."""
    (loaded,) = serializers.deserialize(
        "python",
        [{"model": "shop.job", "pk": 77, "fields": {"amount": 1, "last_fence_token": 9}}],
    )

    loaded.save()

    assert fence_of(Job.objects.get(pk=77)) == (9, None)


def test_rows_that_other_code_inserts_start_at_0(job: Job) -> None:
    """The database itself has the default."""
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO shop_job (amount, note) VALUES (1, '') RETURNING id")
        pk = cursor.fetchone()[0]

    assert fence_of(Job.objects.get(pk=pk)) == (0, None)


def test_the_fence_is_no_form_field() -> None:
    """Neither column is editable."""
    assert not any(
        Job._meta.get_field(name).editable for name in ("last_fence_token", "last_fence_holder")
    )


def test_names_are_compared_byte_by_byte() -> None:
    """Case and accents tell names apart in every database."""
    field = Fence._meta.get_field("name")
    assert isinstance(field, NameField)

    assert field.db_parameters(connection)["collation"] == "C"
    assert str(Fence(name="import")) == "import"


def test_a_child_with_a_key_of_its_own_has_its_parents_name() -> None:
    """The name is made of the key of the model that defines the fence."""
    row = Numbered.objects.create(number="n-1")

    assert row.fence_name == f"shop.job:{row.id}" == Job.objects.get(pk=row.id).fence_name
