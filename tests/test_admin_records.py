"""The admin's pages of the ledger and of what was done once."""

from typing import Any

import pytest
from django.conf import settings
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.test import Client, override_settings
from django.urls import reverse
from django.utils.html import escape

from django_fencing.exceptions import StaleToken
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence, FenceEvent, OnceRecord
from django_fencing.once import once
from django_fencing.resources import resolve
from tests.helpers import cache_at, taken_over

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


def page_of_fence(name: str) -> str:
    return reverse("admin:django_fencing_fence_change", args=[quote(resolve(name).pk)])


def test_the_page_of_a_fence_tells_what_is_going_on(
    name: str, client: Any, browser: Client
) -> None:
    """Who holds the lock, what the store proposes, what has happened: nothing is to be changed."""
    refuse_a_token(name, client)
    free = browser.get(page_of_fence(name)).content.decode()

    with fenced_lock(name) as lease:
        held = browser.get(page_of_fence(name)).content.decode()

    event = FenceEvent.objects.get()
    assert "free" in free
    assert escape(event.message) in free
    assert f'<div class="readonly">{lease.token}</div>' in held
    assert f"token {lease.token}), since" not in free
    assert f"token {lease.token}) since" in held
    assert str(lease.holder.id) in held
    assert 'name="_save"' not in held


def test_the_page_of_a_fence_survives_an_outage(name: str, browser: Client) -> None:
    """What the database knows is shown, and that the store cannot be asked."""
    with fenced_atomic(name):
        pass
    with cache_at("unix:///nowhere"):
        page = browser.get(page_of_fence(name))

    assert page.status_code == 200
    assert "unknown: Cannot" in page.content.decode()


def test_another_tenants_fence_has_no_page(name: str, browser: Client) -> None:
    """As little as it is on the list."""
    with override_settings(FENCING={**settings.FENCING, "NAMESPACE": "somebody else"}):
        with fenced_atomic(name):
            pass
        mine = browser.get(reverse("admin:django_fencing_fence_change", args=[quote(only_fence())]))
    foreign = browser.get(reverse("admin:django_fencing_fence_change", args=[quote(only_fence())]))

    assert mine.status_code == 200
    assert f">{escape(name)}<" in mine.content.decode()
    assert foreign.status_code == 302


@pytest.mark.django_db(databases=["default", "other"], transaction=True)
def test_the_fences_of_another_database_have_pages(name: str, browser: Client) -> None:
    """FENCING["DATABASE"] says where they are, no router is needed."""
    with override_settings(FENCING={**settings.FENCING, "DATABASE": "other"}):
        with fenced_atomic(name):
            pass
        page = browser.get(page_of_fence(name))

    assert page.status_code == 200


def test_the_ledger_is_for_those_who_may_see_it(name: str, client: Any) -> None:
    """On the page of a fence too."""
    refuse_a_token(name, client)
    user = User.objects.create_user("staff", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_fence"))
    staff = Client()
    staff.force_login(user)

    before = staff.get(page_of_fence(name)).content.decode()
    user.user_permissions.add(Permission.objects.get(codename="view_fenceevent"))
    after = staff.get(page_of_fence(name)).content.decode()

    assert ("refused" in before, "refused" in after) == (False, True)


def only_fence() -> str:
    return str(Fence.objects.get().pk)
