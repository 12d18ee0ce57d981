"""Models of unusual shapes: locked, protected, found by operators, changed in the admin."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, ClassVar

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.db import connections, models
from django.db.migrations.state import ProjectState
from django.db.models import F
from django.test import modify_settings, override_settings
from django.urls import path
from django.utils import timezone

from django_fencing.admin import FencedResourceAdmin
from django_fencing.exceptions import NoSuchRow, StaleToken, UnfencedWrite
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.operations import ProtectFence
from django_fencing.resources import resolve
from tests.browser import fields_of, superuser
from tests.helpers import sql, taken_over
from tests.odd.models import (
    AddressShape,
    ChildInSchema,
    ChildShape,
    CipherShape,
    DateShape,
    DecimalShape,
    DeferredShape,
    FormattedField,
    FormattedShape,
    GuardShape,
    InSchema,
    KeyShape,
    ProxyShape,
    Regional,
    Shape,
    TextShape,
    UuidShape,
    WildShape,
)
from tests.shop.models import Job
from tests.test_fencing_command import said

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.urls(__name__),
]


SHAPES: list[tuple[type[Shape], dict[str, Any]]] = [
    *((TextShape, {"id": text}) for text in ("100%", "%(pk)s", "a:b\nc", "é'\"{}\\", "x" * 900)),
    (WildShape, {}),
    (ProxyShape, {}),
    (GuardShape, {}),
    (ChildShape, {"extra": "50%", "data": {"a%s": [1]}, "nested": [["%", "{}"]]}),
    (CipherShape, {"secret": "abc"}),
    (FormattedShape, {}),
    (DeferredShape, {}),
    (KeyShape, {"id": "abc"}),
    (DateShape, {"id": "2026-11-30T10:00:00.123456+00:00"}),
    (DecimalShape, {"id": "10.5"}),
    (UuidShape, {}),
    (AddressShape, {"id": "2001:db8::1"}),
]
FENCE = {"amount", "double", "last_fence_token", "last_fence_holder"}

any_shape = pytest.mark.parametrize(("model", "values"), SHAPES)


class AmountAdmin(FencedResourceAdmin):
    fields: ClassVar = ["amount"]


class NoteAdmin(FencedResourceAdmin):
    """Reads no more than it shows."""

    fields: ClassVar = ["note"]

    def get_queryset(self, request: Any) -> Any:
        return super().get_queryset(request).only("note")


odd = admin.AdminSite(name="odd")
odd.register({model for model, _ in SHAPES}, AmountAdmin)
odd.register(Job, NoteAdmin)

urlpatterns = [path("odd/", odd.urls), path("admin/", admin.site.urls)]


@pytest.fixture(autouse=True)
def odd_models() -> Iterator[None]:
    """Install the app of these models."""
    with modify_settings(INSTALLED_APPS={"append": "tests.odd"}):
        yield


@contextmanager
def table_of(model: Any, alias: str = "default") -> Iterator[Any]:
    """Make the tables of the model and of its parent during the block, and yield its rows."""
    concrete = model._meta.concrete_model
    tables = [*concrete._meta.get_parent_list(), concrete]
    with connections[alias].schema_editor() as editor:
        for each in tables:
            editor.create_model(each)
    try:
        yield models.QuerySet(model, using=alias)
    finally:
        with connections[alias].schema_editor() as editor:
            for each in reversed(tables):
                editor.delete_model(each)


def protect(model: Any, alias: str = "default") -> None:
    """Require a lease; the guards go when the table does."""
    concrete = model._meta.concrete_model
    owner = next(iter(concrete._meta.get_parent_list()), concrete)
    operation, state = (
        ProtectFence(owner.__name__, require_lease=True),
        ProjectState.from_apps(apps),
    )
    with connections[alias].schema_editor() as editor:
        operation.database_forwards("odd", editor, state, state)


def others_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return what a test does not change."""
    return {name: value for name, value in row.items() if name not in FENCE}


@pytest.mark.parametrize("alias", ["default", "other"])
@any_shape
def test_it_is_locked_and_protected(
    model: Any, values: dict[str, Any], alias: str, client: Any
) -> None:
    """The locked row is the whole row, its lease lets it be written, and nothing else does."""
    with table_of(model, alias) as rows:
        rows.create(**values)
        before = others_of(rows.values().get())
        protect(model, alias)
        row = rows.get()
        for amount in (1, 2):
            with fenced_lock(row) as lease, lease.atomic() as locked:
                assert type(locked) is type(lease.row) is model
                for name, value in before.items():
                    assert getattr(locked, name) == getattr(lease.row, name) == value
                locked.amount = amount
                locked.save()
        with fenced_atomic((model, row.pk), using=alias):
            rows.filter(pk=row.pk).update(amount=F("amount") + 1)

        assert rows.values_list("amount", flat=True).get() == 3
        assert others_of(rows.values().get()) == before
        with pytest.raises(UnfencedWrite):
            rows.update(amount=7)
        with pytest.raises(StaleToken):
            rows.update(last_fence_token=1)
        rows.update(last_fence_token=F("last_fence_token") + 7)  # a holder is fenced by hand
        lock = fenced_lock(row)
        first, second = lock.acquire(), taken_over(lock, client)
        with pytest.raises(StaleToken), first.atomic():
            pass
        with second.atomic() as locked:
            locked.delete()
        second.release()
        assert not rows.exists()


def test_parameters_of_a_column_are_those_of_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A key by which the database decrypts, say, that has changed since the last lock."""
    with table_of(FormattedShape) as rows:
        made = rows.create(formatted="abcdef")
        found = []
        for length in (9, 3):
            monkeypatch.setattr(FormattedField, "length", length)
            with fenced_lock(made) as lease, lease.atomic() as row:
                found.append((lease.row.formatted, row.formatted))

    assert found == [("abcdef", "abcdef"), ("abc", "abc")]


@any_shape
def test_operators_find_it(model: Any, values: dict[str, Any]) -> None:
    """By its resource's name, and by its key."""
    with table_of(model) as rows:
        rows.create(**values)
        row = rows.get()
        with fenced_lock(row) as lease:
            for text in (lease.resource, f"{model._meta.label_lower}:{row.pk}"):
                shown = said("show", text)
                assert shown["lease"]["holder"] == lease.holder.id.hex
                assert shown["fence_token"] == lease.token
            listed = [each["lease"] for each in said("locks") if each["lease"]]
            assert lease.holder.id.hex in {each["holder"] for each in listed}


@any_shape
def test_the_admin_changes_and_deletes_it(model: Any, values: dict[str, Any]) -> None:
    """Under its lock, and nothing but what the form has is written."""
    with table_of(model) as rows:
        rows.create(**values)
        before = others_of(rows.values().get())
        protect(model)
        browser = superuser()
        base = f"/odd/odd/{model._meta.model_name}/{quote(rows.get().pk)}/"
        fields = {**fields_of(browser.get(f"{base}change/")), "amount": "5"}

        assert browser.post(f"{base}change/", fields).status_code == 302
        after = rows.values().get()
        assert browser.post(f"{base}delete/", {"post": "yes"}).status_code == 302

        assert after["amount"] == 5
        assert others_of(after) == before
        assert not rows.exists()


def test_a_row_whose_fence_an_admin_defers_is_deleted() -> None:
    """No other row is in the way."""
    job = Job.objects.create()

    superuser().post(f"/odd/shop/job/{job.pk}/delete/", {"post": "yes"})

    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("model", "key", "same"),
    [
        (DecimalShape, "10.5", "10.500"),
        (DateShape, "2026-11-30T10:00:00+00:00", "2026-11-30T11:00:00+01:00"),
        (UuidShape, "5F0F1D2C-0000-4000-8000-00000000000A", "5f0f1d2c00004000800000000000000a"),
        (AddressShape, "2001:DB8:0::1", "2001:db8::1"),
    ],
)
def test_a_key_has_one_name_however_it_is_written(model: Any, key: str, same: str) -> None:
    """The database knows one row, so there is one lock."""
    with table_of(model) as rows:
        made = rows.create(pk=key)
        loaded = rows.get(pk=same)
        names = {resolve(each).name for each in ((model, key), (model, same), made, loaded)}

    assert len(names) == 1


def test_a_naive_key_is_that_of_the_default_time_zone() -> None:
    """As the ORM reads it, whichever zone is the current one."""
    aware = datetime(2026, 11, 30, 9, tzinfo=UTC)
    with override_settings(TIME_ZONE="Europe/Berlin"), timezone.override("Asia/Tokyo"):
        naive = resolve((DateShape, datetime(2026, 11, 30, 10))).name

    assert naive == resolve((DateShape, aware)).name


def test_a_key_that_no_row_can_have_has_a_name() -> None:
    """Its lock ends as that of any row that is not there."""
    with table_of(DecimalShape):
        assert resolve((DecimalShape, "1e30")).name == "odd.decimalshape:1E%2B30"
        with pytest.raises(NoSuchRow):
            fenced_lock((DecimalShape, "1e30")).acquire()


def test_a_row_moves_to_another_partition_and_is_written_again() -> None:
    """Under the same lease: it is the row of which the registration is presented."""
    sql(
        "CREATE TABLE odd_regional (id bigint GENERATED BY DEFAULT AS IDENTITY, amount int,"
        " last_fence_token bigint NOT NULL DEFAULT 0, last_fence_holder uuid, region int,"
        " PRIMARY KEY (id, region)) PARTITION BY LIST (region)"
    )
    try:
        for number in (1, 2):
            sql(
                f"CREATE TABLE odd_regional_{number} PARTITION OF odd_regional"
                f" FOR VALUES IN ({number})"
            )
        protect(Regional)
        with fenced_atomic(Regional.objects.create()) as row:
            row.region = 2
            row.save()
            row.amount = 5
            row.save()

        assert list(Regional.objects.values_list("region", "amount")) == [(2, 5)]
        with pytest.raises(UnfencedWrite):
            Regional.objects.update(amount=7)
    finally:
        sql("DROP TABLE odd_regional CASCADE")


@pytest.mark.parametrize("model", [InSchema, ChildInSchema])
def test_a_table_in_a_schema_of_its_own_is_protected(model: Any) -> None:
    """Where the name of a table carries its schema; so does that of a child."""
    sql("CREATE SCHEMA odd")
    try:
        with connections["default"].schema_editor() as editor:
            editor.create_model(InSchema)
            editor.create_model(ChildInSchema)
        protect(InSchema)
        made = model.objects.create()
        with fenced_lock(made) as lease, lease.atomic() as row:
            row.amount = row.extra = 3
            row.save()
        with pytest.raises(UnfencedWrite):
            model.objects.update(amount=7)
        with pytest.raises(UnfencedWrite):
            model.objects.update(**({"extra": 7} if model is ChildInSchema else {"amount": 7}))

        assert model.objects.get().amount == 3
        with fenced_atomic(made) as row:
            row.delete()
        assert not InSchema.objects.exists()
    finally:
        sql("DROP SCHEMA odd CASCADE")
