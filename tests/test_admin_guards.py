"""The admin's deletions under the lock, and what tenants see there."""

from typing import Any
from unittest import mock

import pytest
from django.conf import settings
from django.contrib import admin
from django.test import override_settings
from django.urls import path, reverse

from django_fencing.admin import FencedResourceAdmin
from django_fencing.exceptions import UnfencedWrite
from django_fencing.locks import fenced_lock
from django_fencing.models import OnceRecord
from django_fencing.once import once
from tests.browser import fields_of, superuser
from tests.helpers import (
    committing,
    held_elsewhere,
)
from tests.shop.models import Job, Named

pytestmark = committing("default", "other", "sqlite")


urlpatterns = [path("admin/", admin.site.urls)]

of_the_admin = [
    pytest.mark.django_db(transaction=True, databases=["default", "sqlite"]),
    pytest.mark.urls(__name__),
]


def in_admin(test: Any) -> Any:
    for mark in of_the_admin:
        test = mark(test)
    return test


@in_admin
def test_a_row_that_is_named_by_another_field_is_deleted_under_its_lock() -> None:
    """Django finds it by `_to_field`, as the popup of a foreign key with to_field asks."""
    row = Named.objects.create(reference="777000")
    page = reverse("admin:shop_named_delete", args=["777000"]) + "?_to_field=reference"
    # As a registered model's ForeignKey(Named, to_field="reference") does.
    with (
        mock.patch.object(FencedResourceAdmin, "to_field_allowed", return_value=True),
        held_elsewhere(row),
    ):
        superuser().post(page, {"post": "yes"})
    assert Named.objects.filter(pk=row.pk).exists()


@in_admin
def test_what_others_keep_from_being_deleted_does_not_move_the_fence() -> None:
    """Nothing was deleted, so nobody has worked on the row: forms that are open go on."""
    job = Job.objects.create()
    kept: Any = ([], {}, set(), ["a row that refers to it, and is protected"])
    with mock.patch.object(FencedResourceAdmin, "get_deleted_objects", return_value=kept):
        page = reverse("admin:shop_job_delete", args=[job.pk])
        assert superuser().post(page, {"post": "yes"}).status_code == 200
    job.refresh_from_db()
    assert job.last_fence_token == 0


@in_admin
def test_tenants_that_differ_in_case_do_not_see_each_other_in_sqlite(name: str) -> None:
    """Its LIKE, which startswith is, takes a for A."""
    of_sqlite = {**settings.FENCING, "DATABASE": "sqlite"}
    with (
        override_settings(FENCING={**of_sqlite, "NAMESPACE": "acme"}),
        fenced_lock(name) as lease,
        lease.atomic(),
    ):
        once("mine", lambda: 1)
    with override_settings(FENCING={**of_sqlite, "NAMESPACE": "ACME"}):
        seen = admin.site._registry[OnceRecord].get_queryset(None).count()  # type: ignore[arg-type]
    OnceRecord.objects.using("sqlite").all().delete()
    assert seen == 0


@in_admin
def test_a_protected_row_that_belongs_to_this_one_is_told_in_the_form(job: Job) -> None:
    """As by an inline of a protected model; and where it would be deleted along."""
    browser = superuser()
    page = reverse("admin:shop_job_change", args=[job.pk])
    form = fields_of(browser.get(page))
    refused = UnfencedWrite("A lease is needed for the UPDATE of row 3 of shop_code.")
    with mock.patch.object(FencedResourceAdmin, "save_related", side_effect=refused):
        answer = browser.post(page, {**form, "amount": "11", "note": "x"})
    assert "a row that belongs to this one is written under its own lock" in answer.content.decode()
    with mock.patch.object(FencedResourceAdmin, "delete_model", side_effect=refused):
        page = reverse("admin:shop_job_delete", args=[job.pk])
        answer = browser.post(page, {"post": "yes"}, follow=True)
    assert "Delete that one first." in answer.content.decode()
    job.refresh_from_db()
    assert (job.amount, job.last_fence_token) == (10, 0)
    with fenced_lock(job):
        pass
