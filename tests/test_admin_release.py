"""The admin's page that ends a lease: who may, what it says, and that a look changes nothing."""

import html
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.messages import get_messages
from django.db import connections
from django.test import Client, override_settings
from django.urls import path, reverse

from django_fencing import operators, states
from django_fencing.admin import FenceAdmin
from django_fencing.exceptions import StaleToken
from django_fencing.locks import fenced_lock
from django_fencing.models import Fence, FenceEvent
from django_fencing.names import Keys
from django_fencing.operators import Forced, Outcome
from django_fencing.resources import resolve
from tests.browser import Tables, fields_of, logged_in, superuser
from tests.helpers import (
    assert_held_by,
    cache_at,
    commit,
    keys_of,
    monitored,
    started,
    taken_over,
)
from tests.shop.models import Code, Document, Job, Named, Numbered, Owner, Profile, UrgentJob

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.urls(__name__),
]

ops = admin.AdminSite(name="ops")
ops.register(Fence, FenceAdmin)

urlpatterns = [path("admin/", admin.site.urls), path("ops/", ops.urls)]

LIST = "/admin/django_fencing/fence/"
PAGE = "/admin/django_fencing/fence/release/"
CLOSED_PORT = "redis://127.0.0.1:1?db=0"
MAY_RELEASE = "django_fencing.force_release"
MAY_VIEW = "django_fencing.view_fence"


@pytest.fixture
def browser() -> Client:
    """Return the browser of somebody who may do everything."""
    return superuser()


def form_of(lease: Any, resource: Any = None, **values: str) -> dict[str, str]:
    """Return what the page's form sends for a lease."""
    member = (resource or keys_of(lease.resource)).member
    return {"key": member, "holder": lease.holder.id.hex, **values}


def told(response: Any) -> list[str]:
    """Return the messages that the next page will show."""
    return [str(message) for message in get_messages(response.wsgi_request)]


def text_of(response: Any) -> str:
    """Return what a page says, without its tags."""
    page = response.content.decode()
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", page).split()))


def link_on_the_list(browser: Any, resource: str, page: str = LIST) -> str:
    """Return the address that the list gives for ending the lease, "" if there is none."""
    response = browser.get(page, {"q": resource})
    assert response.status_code == 200
    Tables(response).row_of("leases", resource)
    links = re.findall(r'href="([^"]*/release/[^"]*)"', response.content.decode())
    assert len(links) <= 1
    return html.unescape(links[0]) if links else ""


def assert_untouched(lease: Any, client: Any) -> None:
    """Check that nothing has happened, and that nobody says otherwise."""
    assert_held_by(lease, client)
    commit(lease)
    assert not FenceEvent.objects.filter(kind="forced").exists()


# Who may


def test_from_the_list_to_the_end(browser: Client, name: str, client: Any) -> None:
    """The link, the page, the form, the message; the holder is fenced."""
    lease = fenced_lock(name, ttl=60).acquire()

    page = browser.get(link_on_the_list(browser, name))
    form = fields_of(page)
    response = browser.post(PAGE, {**form, "reason": "  its pod is gone "})

    assert (response.status_code, response.url) == (302, LIST)
    (message,) = told(response)
    assert message.startswith(f"Lock of {name}: the lease of tests.test_admin_release.")
    assert message.endswith("and its holder is fenced by token 2.")
    assert not client.exists(keys_of(name).lease)
    with pytest.raises(StaleToken):
        commit(lease)
    event = FenceEvent.objects.get(kind="forced")
    user = browser.session["_auth_user_id"]
    assert event.user == LogEntry.objects.get().user.username
    assert event.message.endswith(": its pod is gone")
    entry = LogEntry.objects.get()
    assert str(entry.user_id) == user
    assert entry.object_repr == str(Fence.objects.get())
    assert entry.get_change_message() == message
    assert f"pid {lease.holder.pid}, token {lease.token}" in entry.get_change_message()


def test_staff_without_the_permission(name: str, client: Any) -> None:
    """They see the lease and no link; the page and the form are 403."""
    lease = fenced_lock(name).acquire()
    staff = logged_in(MAY_VIEW)

    assert link_on_the_list(staff, name) == ""
    assert staff.get(PAGE, form_of(lease)).status_code == 403
    assert staff.head(PAGE, form_of(lease)).status_code == 403
    assert staff.post(PAGE, form_of(lease)).status_code == 403
    assert_untouched(lease, client)
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    "permission", ["change_fence", "delete_fence", "add_fence", "change_fenceevent"]
)
def test_no_other_permission_is_enough(name: str, client: Any, permission: str) -> None:
    """To change or delete fences is another matter."""
    lease = fenced_lock(name).acquire()
    staff = logged_in(MAY_VIEW, f"django_fencing.{permission}")
    assert link_on_the_list(staff, name) == ""
    assert staff.post(PAGE, form_of(lease)).status_code == 403
    assert_untouched(lease, client)


def test_the_permission_is_enough(name: str, client: Any) -> None:
    """For the page and the form; the list wants its own."""
    lease = fenced_lock(name).acquire()
    staff = logged_in(MAY_RELEASE)
    assert staff.get(LIST).status_code == 403
    assert staff.get(PAGE, form_of(lease)).status_code == 200
    assert staff.post(PAGE, form_of(lease)).status_code == 302
    assert not client.exists(keys_of(name).lease)


@pytest.mark.parametrize("method", ["get", "head", "post"])
def test_who_is_not_logged_in(name: str, client: Any, method: str) -> None:
    """Is sent to the login."""
    lease = fenced_lock(name).acquire()
    response = getattr(Client(), method)(PAGE, form_of(lease))
    assert response.status_code == 302
    assert response.url.startswith("/admin/login/?next=")
    assert_untouched(lease, client)


def test_who_is_no_staff(name: str, client: Any, django_user_model: Any) -> None:
    """Is sent to the login, whatever else he may."""
    lease = fenced_lock(name).acquire()
    user = django_user_model.objects.create(username="boss", is_superuser=True)
    browser = Client()
    browser.force_login(user)
    assert browser.post(PAGE, form_of(lease)).url.startswith("/admin/login/")
    assert_untouched(lease, client)


def test_a_form_from_elsewhere(name: str, client: Any) -> None:
    """Without the token of the page it is 403; with it, it is done."""
    lease = fenced_lock(name).acquire()
    browser = superuser(enforce_csrf_checks=True)

    assert browser.post(PAGE, form_of(lease)).status_code == 403
    assert_untouched(lease, client)
    form = fields_of(browser.get(PAGE, form_of(lease)))
    assert form["csrfmiddlewaretoken"]
    assert browser.post(PAGE, form).status_code == 302
    assert not client.exists(keys_of(name).lease)


@pytest.mark.parametrize("method", ["put", "patch", "delete", "options", "trace"])
def test_other_methods(browser: Client, name: str, client: Any, method: str) -> None:
    """Are refused."""
    lease = fenced_lock(name).acquire()
    assert getattr(browser, method)(f"{PAGE}?key={keys_of(name).member}").status_code == 405
    assert_untouched(lease, client)


# The page


@pytest.mark.parametrize("method", ["get", "head"])
def test_a_look_changes_nothing(name: str, private_redis: Any, method: str) -> None:
    """Reads only, no entry in any log."""
    browser = superuser()
    lease = fenced_lock(name).acquire()
    with monitored(private_redis) as commands:
        assert getattr(browser, method)(PAGE, form_of(lease, reason="x")).status_code == 200
    assert {command[0] for command in commands} <= {"PTTL", "HMGET", "ZSCORE"}
    assert_untouched(lease, private_redis)
    assert not LogEntry.objects.exists()


def test_the_page_says_what_is_about_to_happen(browser: Client, name: str) -> None:
    """Resource, holder, what is left, and the consequence."""
    lease = fenced_lock(name, ttl=60).acquire()
    response = browser.get(PAGE, form_of(lease))
    text = text_of(response)
    assert f"Resource {name} " in text
    assert f"(host {socket.gethostname()}, pid {lease.holder.pid}, token 1)" in text
    assert re.search(r"State held, (59\.\d|60\.0) s left ? ?Since \d{4}-", text)
    assert "What it has not committed yet is refused by the database" in text
    assert "If another one holds the lock by then, nothing happens." in text
    assert "no-store" in response["Cache-Control"]
    assert fields_of(response)["holder"] == lease.holder.id.hex


def test_what_the_page_shows_is_escaped(browser: Client, name: str) -> None:
    """Whatever somebody has named a resource."""
    resource = f"<script>alert(1)</script>\" onclick='{name}"
    lease = fenced_lock(resource).acquire()
    page = browser.get(link_on_the_list(browser, resource)).content.decode()
    assert "<script>alert" not in page
    assert fields_of(browser.get(PAGE, form_of(lease)))["key"] == keys_of(resource).member


def test_the_page_of_what_was_released_meanwhile(browser: Client, name: str) -> None:
    """No form."""
    lease = fenced_lock(name).acquire()
    lease.release()
    page = browser.get(PAGE, form_of(lease))
    assert "Nobody holds it any more: nothing was done." in text_of(page)
    assert "holder" not in fields_of(page)


def test_the_page_of_what_another_one_holds(browser: Client, name: str, client: Any) -> None:
    """No form, and who that is."""
    former = fenced_lock(name).acquire()
    lease = taken_over(fenced_lock(name), client)
    page = browser.get(PAGE, form_of(former))
    assert f"token {lease.token}), and not as it was shown" in text_of(page)
    assert "holder" not in fields_of(page)


# The form


def test_an_old_form_does_nothing(browser: Client, name: str, client: Any) -> None:
    """C72: X was shown, Y holds it: a message, an entry in the admin's log, and Y goes on."""
    former = fenced_lock(name).acquire()
    form = fields_of(browser.get(PAGE, form_of(former)))
    lease = taken_over(fenced_lock(name), client)

    response = browser.post(PAGE, form)

    assert response.status_code == 302
    (message,) = told(response)
    assert message.endswith("and not as it was shown: nothing was done.")
    assert LogEntry.objects.get().get_change_message() == message
    assert name in LogEntry.objects.get().object_repr
    assert_untouched(lease, client)


def test_a_holder_that_changes_behind_the_look(browser: Client, name: str, client: Any) -> None:
    """The script compares once more."""
    former = fenced_lock(name).acquire()
    form = form_of(former)
    resource_of_lease = operators.resource_of_lease
    leases = []

    def change(*args: Any) -> Any:
        leases.append(taken_over(fenced_lock(name), client))
        return resource_of_lease(*args)

    with mock.patch.object(operators, "resource_of_lease", change):
        response = browser.post(PAGE, form)

    assert "nothing was done" in told(response)[0]
    assert "nothing was done" in LogEntry.objects.get().get_change_message()
    assert_untouched(leases[0], client)


def test_a_form_that_is_sent_twice(browser: Client, name: str) -> None:
    """The second one finds nobody; both are in the admin's log."""
    lease = fenced_lock(name).acquire()
    messages = [told(browser.post(PAGE, form_of(lease)))[-1] for _ in range(2)]
    assert "is fenced" in messages[0]
    assert messages[1] == "Nobody holds it any more: nothing was done."
    assert LogEntry.objects.count() == 2
    assert FenceEvent.objects.filter(kind="forced").count() == 1


def test_what_cannot_be_fenced_yet_is_a_warning(browser: Client, name: str) -> None:
    """It is released, and the message says that it may still be written to."""
    lease = fenced_lock(name).acquire()
    forced = Forced(outcome=Outcome.NOT_FENCED, said="ended, but not fenced yet")
    with mock.patch.object(operators, "force_release", return_value=forced):
        response = browser.post(PAGE, form_of(lease))
    assert told(response) == [f"Lock of {name}: ended, but not fenced yet."]
    assert [m.level_tag for m in get_messages(response.wsgi_request)] == ["warning"]
    assert LogEntry.objects.count() == 1


def test_a_holder_that_is_frozen_in_its_transaction(browser: Client) -> None:
    """The page comes back, with a warning."""
    job = Job.objects.create()

    def body(pause: Any) -> None:
        lease = fenced_lock(job).acquire()
        with lease.atomic():
            pause()

    with started(body) as frozen, mock.patch.object(operators, "_TTL", 0.3):
        frozen.reach_pause()
        present = states.look(keys_of(job))
        assert present is not None
        form = {"key": keys_of(job).member, "holder": present.holder}
        response = browser.post(PAGE, form)
    assert "not fenced yet" in told(response)[0]


def test_the_reason_is_not_needed(browser: Client, name: str) -> None:
    """And a long one is kept."""
    browser.post(PAGE, form_of(fenced_lock(name).acquire()))
    browser.post(PAGE, form_of(fenced_lock(name).acquire(), reason="é" * 3000))
    first, second = FenceEvent.objects.filter(kind="forced").order_by("pk")
    assert first.message.endswith("with token 2")
    assert second.message.endswith("é" * 500)


@pytest.mark.parametrize("reason", ["a\0b", "\ud83d", "<b>'\"%s{}", "two\nlines"])
def test_a_reason_with_anything_in_it(browser: Client, name: str, reason: str) -> None:
    """It is released, or refused as a whole: never an error page behind it."""
    lease = fenced_lock(name).acquire()
    reason = reason.encode(errors="replace").decode()
    response = browser.post(PAGE, form_of(lease, reason=reason))
    assert response.status_code in (302, 400)
    if "is fenced" in "".join(told(response)):
        assert FenceEvent.objects.filter(kind="forced").count() == 1


# What it is about


def test_a_foreign_tenants_lease(browser: Client, name: str, client: Any) -> None:
    """404, for the page and for the form."""
    with override_settings(FENCING={**settings.FENCING, "NAMESPACE": "somebody else"}):
        lease = fenced_lock(name).acquire()
        form = form_of(lease)
    assert browser.get(PAGE, form).status_code == 404
    assert browser.post(PAGE, form).status_code == 404
    with override_settings(FENCING={**settings.FENCING, "NAMESPACE": "somebody else"}):
        assert_held_by(lease, client)
        assert browser.post(PAGE, form).status_code == 302
    assert not client.exists(Keys.of("fencing", form["key"]).lease)


def own(slug: str) -> str:
    """Return the slug with this tenant's namespace."""
    namespace = settings.FENCING["NAMESPACE"]
    return f"{namespace}|{slug}" if namespace else slug


@pytest.mark.parametrize(
    "key", ["", "name", "name:", ":", "row", "lease:x", "NAME:x", "nameless:x", "name:" + "x" * 400]
)
@pytest.mark.parametrize("method", ["get", "post"])
def test_a_key_that_is_none(browser: Client, key: str, method: str) -> None:
    """404."""
    assert getattr(browser, method)(PAGE, {"key": key, "holder": "x"}).status_code == 404
    assert getattr(browser, method)(PAGE).status_code == 404
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("slug", ["a\0b", "ü", "%zz", "x y", "{1}", "a\nb", "%~", "shop.job"])
@pytest.mark.parametrize("kind", ["name", "row", "name@nowhere"])
@pytest.mark.parametrize("method", ["get", "post"])
def test_a_key_that_nobody_made(browser: Client, slug: str, kind: str, method: str) -> None:
    """Nobody holds it; it is not an error of the server."""
    response = getattr(browser, method)(PAGE, {"key": f"{kind}:{own(slug)}", "holder": "x"})
    assert response.status_code in (200, 302, 400, 404)


@pytest.mark.parametrize("holder", ["", "x", "\0", "sha1:", "' OR 1=1", "0" * 4000])
def test_a_holder_that_nobody_was(browser: Client, name: str, client: Any, holder: str) -> None:
    """Nothing is done."""
    lease = fenced_lock(name).acquire()
    form = {**form_of(lease), "holder": holder}
    assert browser.get(PAGE, form).status_code == 200
    assert "nothing was done" in told(browser.post(PAGE, form))[0]
    assert_untouched(lease, client)


def make_job() -> Any:
    return Job.objects.create()


def make_urgent() -> Any:
    return UrgentJob.objects.create()


def make_document() -> Any:
    return Document.objects.create()


def make_code() -> Any:
    return Code.objects.create(code=f"a:b@c %|é {uuid4().hex[:8]}")


def make_named() -> Any:
    return Named.objects.create(reference=uuid4().hex)


def make_profile() -> Any:
    return Profile.objects.create(owner=Owner.objects.create())


def make_numbered() -> Any:
    return Numbered.objects.create(number=f"n-{uuid4().hex[:7]}")


def make_long_code() -> Any:
    return Code.objects.create(code="é" * 32 + uuid4().hex[:8])


ROWS = [make_job, make_urgent, make_document, make_code, make_named, make_profile]
LOST_ROWS = [make_numbered, make_long_code]


@pytest.mark.parametrize("make", ROWS)
def test_rows_of_every_kind(browser: Client, make: Any) -> None:
    """From the list to the end; the log's entry is of the row."""
    row = make()
    lease = fenced_lock(row).acquire()

    page = browser.get(link_on_the_list(browser, lease.resource))
    response = browser.post(PAGE, fields_of(page))

    assert "is fenced by token" in told(response)[0]
    with pytest.raises(StaleToken):
        commit(lease)
    assert LogEntry.objects.get().object_id == str(row.pk)


@pytest.mark.parametrize("make", LOST_ROWS)
def test_rows_whose_key_is_not_what_the_lease_says(browser: Client, make: Any) -> None:
    """They are found all the same: manage.py fencing finds them."""
    row = make()
    lease = fenced_lock(row).acquire()
    response = browser.post(PAGE, form_of(lease, keys_of(row)))
    assert "is fenced by token" in told(response)[0]


def test_a_row_of_another_database(browser: Client, client: Any) -> None:
    """It is fenced there."""
    job = Job.objects.using("other").create(pk=uuid.uuid4().int % 10**9)  # that nobody has locked
    lease = fenced_lock((Job, job.pk), using="other").acquire()
    response = browser.post(PAGE, form_of(lease, resolve((Job, job.pk), "other").keys))
    assert "is fenced by token" in told(response)[0]


def test_a_name_of_another_database(browser: Client, name: str) -> None:
    """It is fenced there."""
    lease = fenced_lock(name, using="other").acquire()
    response = browser.post(PAGE, form_of(lease, resolve(name, "other").keys))
    assert "is fenced by token 2" in told(response)[0]
    with pytest.raises(StaleToken):
        commit(lease)


def test_a_lease_that_cannot_be_read(browser: Client, name: str, client: Any) -> None:
    """By its digest; one that has another content meanwhile stays."""
    keys = keys_of(name)
    for text in ("first", "second"):
        client.set(keys.lease, text, ex=60)
        present = states.look(keys)
        assert present is not None
        form = {"key": keys.member, "holder": present.holder}
    old = form | {"holder": "sha1:" + "0" * 40}
    assert "nothing was done" in told(browser.post(PAGE, old))[0]
    assert client.get(keys.lease) == "second"
    assert "unknown (sha1:" in text_of(browser.get(PAGE, form))
    assert "is fenced by token" in told(browser.post(PAGE, form))[-1]


def foreign_lease(client: Any, keys: Keys, model: str, pk: str) -> dict[str, str]:
    """Write a lease of a resource that cannot be found, and return the form that ends it."""
    fields = {"layout": "1", "holder": uuid4().hex, "token": "3", "host": "h", "pid": "1"}
    client.hset(keys.lease, mapping={**fields, "function": "f", "model": model, "pk": pk})
    client.pexpire(keys.lease, 60_000)
    return {"key": keys.member, "holder": fields["holder"]}


@pytest.mark.parametrize(("model", "pk"), [("gone.model", "1"), ("", ""), ("shop.entry", "1")])
def test_a_lease_whose_model_is_gone(browser: Client, client: Any, model: str, pk: str) -> None:
    """Its holder cannot be fenced, so nothing is done; it ends by itself."""
    keys = Keys.of("fencing", f"row:{own('gone.model:1')}")
    form = foreign_lease(client, keys, model, pk)

    page = browser.get(PAGE, form)
    response = browser.post(PAGE, form)

    assert "Its fence cannot be found" in text_of(page)
    assert "holder" not in fields_of(page)
    assert "Its fence cannot be found" in told(response)[0]
    assert client.hget(keys.lease, "holder") == form["holder"]
    assert LogEntry.objects.count() == 1
    client.delete(keys.lease)


def test_a_lease_that_names_another_row(browser: Client, client: Any) -> None:
    """Nobody is fenced instead: the key has to be that of the row."""
    job = Job.objects.create()
    keys = Keys.of("fencing", f"row:{own('shop.job:777777')}")
    form = foreign_lease(client, keys, "shop.job", str(job.pk))
    assert "its row is gone" in told(browser.post(PAGE, form))[0]
    job.refresh_from_db()
    assert job.last_fence_token == 0
    client.delete(keys.lease)


def test_a_lease_whose_database_is_gone(browser: Client, client: Any, name: str) -> None:
    """As with a model that is gone."""
    keys = Keys.of("fencing", f"name@gone:{own(name)}")
    form = foreign_lease(client, keys, "django_fencing.fence", name)
    assert browser.get(PAGE, form).status_code == 200
    assert browser.post(PAGE, form).status_code == 302
    client.delete(keys.lease)


def test_a_lease_whose_row_is_gone(browser: Client, client: Any) -> None:
    """It is ended, or it is not; both logs say so, and it is not an error of the server."""
    job = Job.objects.create()
    lease = fenced_lock(job).acquire()
    form = form_of(lease, keys_of(job))
    Job.objects.all().delete()

    response = browser.post(PAGE, form)

    assert response.status_code == 302
    assert LogEntry.objects.count() == 1


# The store is away


def test_an_outage(browser: Client, name: str, client: Any) -> None:
    """The list has no link, the page no form, and the form comes back with a message."""
    lease = fenced_lock(name).acquire()
    form = form_of(lease)
    with cache_at(CLOSED_PORT):
        assert b"/release/" not in browser.get(LIST, {"q": name}).content
        page = browser.get(PAGE, form)
        response = browser.post(PAGE, form)

    assert page.status_code == 200
    assert "The store cannot be asked" in text_of(page)
    assert "holder" not in fields_of(page)
    assert response.status_code == 302
    (message,) = told(response)
    assert message.startswith("The store cannot be asked")
    assert LogEntry.objects.get().get_change_message() == message
    assert_untouched(lease, client)


def test_an_outage_behind_the_look(browser: Client, name: str, client: Any) -> None:
    """The same."""
    lease = fenced_lock(name).acquire()
    client.set(keys_of(name).token, "no counter", ex=60)
    response = browser.post(PAGE, form_of(lease))
    assert "holds no token counter" in told(response)[0]
    assert_held_by(lease, client)
    assert LogEntry.objects.count() == 1


def test_a_store_that_is_none(browser: Client, name: str) -> None:
    """As the list does: it says what is wrong with the settings."""
    form = form_of(fenced_lock(name).acquire())
    with override_settings(FENCING={**settings.FENCING, "CACHE": "nowhere"}):
        assert browser.get(LIST).status_code == 200
        assert browser.get(PAGE, form).status_code == 200


# The project around it


@contextmanager
def atomic_requests(alias: str) -> Iterator[None]:
    known = connections[alias].settings_dict
    with mock.patch.dict(known, {"ATOMIC_REQUESTS": True}):
        yield


@pytest.mark.parametrize("alias", ["default", "other"])
def test_under_atomic_requests(browser: Client, name: str, alias: str) -> None:
    """No transaction is open around it."""
    lease = fenced_lock(name).acquire()
    with atomic_requests(alias):
        response = browser.post(PAGE, form_of(lease))
    assert "is fenced by token" in told(response)[0]
    assert LogEntry.objects.count() == 1
    with pytest.raises(StaleToken):
        commit(lease)


def test_in_another_admin(browser: Client, name: str) -> None:
    """Every link leads to the pages of that site."""
    lease = fenced_lock(name).acquire()
    link = link_on_the_list(browser, name, "/ops/django_fencing/fence/")
    assert link.startswith("/ops/")
    page = browser.get(link)
    links = re.findall(r'href="(/[^"]*django_fencing[^"]*)"', page.content.decode())
    assert {link.split("/")[1] for link in links} == {"ops"}
    del lease


def test_in_another_admin_the_form_leads_back_to_it(browser: Client, name: str) -> None:
    """And not to the pages of the default one, which he may not be allowed to see."""
    lease = fenced_lock(name).acquire()
    response = browser.post("/ops/django_fencing/fence/release/", form_of(lease))
    again = browser.post("/ops/django_fencing/fence/release/", form_of(lease))
    assert (response.url, again.url) == ("/ops/django_fencing/fence/",) * 2


def test_the_address_of_the_page() -> None:
    """It is not taken for that of a fence whose name is "release"."""
    assert reverse("admin:django_fencing_fence_release") == PAGE
