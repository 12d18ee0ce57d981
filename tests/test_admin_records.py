"""The admin's pages of the ledger and of what was done once."""

from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.test import Client, override_settings
from django.urls import reverse

from django_fencing.exceptions import StaleToken
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import FenceEvent, OnceRecord
from django_fencing.once import once
from tests.helpers import taken_over

pytestmark = pytest.mark.django_db(transaction=True)


def refuse_a_token(name: str, client: Any) -> None:
    """Let a lease be overtaken, and its late write refused."""
    lock = fenced_lock(name)
    first = lock.acquire()
    second = taken_over(lock, client)
    with pytest.raises(StaleToken), first.atomic():
        pass
    second.release()


@pytest.fixture
def browser(transactional_db: None) -> Client:
    """Return a browser that is logged in as a superuser."""
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    return client


def test_the_admin_shows_this_tenants_ledger(name: str, client: Any, browser: Client) -> None:
    """Newest first; to be searched and filtered, and not to be changed."""
    refuse_a_token(name, client)
    with override_settings(FENCING={**settings.FENCING, "NAMESPACE": "somebody else"}):
        refuse_a_token(name, client)
    page = reverse("admin:django_fencing_fenceevent_changelist")

    shown = browser.get(page, {"q": name, "kind__exact": "refused"}).content.decode()
    event = FenceEvent.objects.order_by("pk").first()
    detail = browser.get(reverse("admin:django_fencing_fenceevent_change", args=[event.pk]))
    foreign = FenceEvent.objects.order_by("-pk").first()

    assert FenceEvent.objects.count() == 2
    assert shown.count('class="field-message"') == 1
    assert event.message in detail.content.decode()
    assert 'name="_save"' not in detail.content.decode()
    assert (
        browser.get(
            reverse("admin:django_fencing_fenceevent_change", args=[foreign.pk])
        ).status_code
        == 302
    )
    assert browser.get(reverse("admin:django_fencing_fenceevent_add")).status_code == 403


def test_the_admin_shows_what_was_done_once(name: str, browser: Client) -> None:
    """With its key as it was given; to delete it lets the work be done again."""
    with fenced_atomic(name):
        once(f"{name} ä", lambda: "said")
    page = browser.get(reverse("admin:django_fencing_oncerecord_changelist"))
    record = OnceRecord.objects.get()
    detail = browser.get(reverse("admin:django_fencing_oncerecord_change", args=[quote(record.pk)]))

    assert f"{name} ä" in page.content.decode()
    assert "&quot;said&quot;" in detail.content.decode()


def test_staff_need_the_permission(name: str) -> None:
    """Of each table its own."""
    user = User.objects.create_user("staff", is_staff=True)
    client = Client()
    client.force_login(user)
    page = reverse("admin:django_fencing_fenceevent_changelist")
    before = client.get(page).status_code
    user.user_permissions.add(Permission.objects.get(codename="view_fenceevent"))

    assert (before, client.get(page).status_code) == (403, 200)
