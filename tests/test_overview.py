"""The page "Fence tokens": leases of the store, fences of the database, and nothing to change."""

import html
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
import redis
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.core.cache import caches
from django.db import connection
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path, reverse
from services import Services

from django_fencing.locks import fenced_lock
from django_fencing.models import Fence
from django_fencing.overview import PER_PAGE
from django_fencing.stores.inspection import RedisInspector
from tests.browser import Tables, logged_in, superuser
from tests.helpers import acquired, cache_at, expire, in_threads, keys_of, monitored
from tests.shop.models import (
    Code,
    Composite,
    Document,
    Job,
    Named,
    Owned,
    Owner,
    Profile,
    UrgentJob,
)

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

urlpatterns = [path("admin/", admin.site.urls)]

PAGE = "/admin/django_fencing/fence/"
UNKNOWN = "The leases are unknown at the moment"
CLOSED_PORT = "redis://127.0.0.1:1?db=0"


@pytest.fixture
def browser() -> Any:
    """Return the browser of somebody who may do everything."""
    return superuser()


def shown(browser: Any, **parameters: Any) -> Tables:
    """Return what the page shows."""
    response = browser.get(PAGE, parameters)
    assert response.status_code == 200
    return Tables(response)


def registered(resource: Any) -> int:
    """Register a lease of `resource`, release it, and return its token."""
    with fenced_lock(resource) as lease:
        return lease.token


def remaining(state: str) -> float:
    """Return the seconds that a lease is said to be held for."""
    (seconds,) = re.findall(r"^held, ([0-9.]+) s left$", state)
    return float(seconds)


def link_to(row: Any) -> str:
    """Return the address of a row's page."""
    name = f"admin:{row._meta.app_label}_{row._meta.model_name}_change"
    return reverse(name, args=[quote(row.pk)])


def rows_of(model: Any, count: int) -> None:
    """Make rows that look as if somebody had registered at them."""
    for number in range(1, count + 1):
        row = model.objects.create()
        model.objects.filter(pk=row.pk).update(last_fence_token=number)


# Leases


def test_the_lease_of_a_row_is_shown(browser: Any) -> None:
    """Host, pid, function, token, what remains and since when; the row is linked."""
    job = Job.objects.create()
    lease = fenced_lock(job, ttl=30).acquire()

    tables = shown(browser, q=lease.resource)

    _, state, token, function, host, pid, since = tables.row_of("leases", lease.resource)
    assert 20 < remaining(state) <= 30
    assert token == str(lease.token)
    assert function == "tests.test_overview.test_the_lease_of_a_row_is_shown"
    assert (host, pid) == (socket.gethostname(), str(os.getpid()))
    assert str(time.gmtime().tm_year) in since
    assert tables.links[lease.resource] == link_to(job)


def test_the_lease_of_a_name_is_shown(browser: Any, name: str) -> None:
    """Its fence has a page too, once it is registered."""
    lease = fenced_lock(name).acquire()

    tables = shown(browser, q=name)

    assert tables.row_of("leases", name)[2] == str(lease.token)
    assert tables.links[name] == link_to(lease.row)


def test_a_lease_that_lapsed_says_so(browser: Any, name: str, client: Any) -> None:
    """It ended without a release, some time ago."""
    acquired(name, ttl=1)
    expire(client, name)
    held = keys_of(name)
    ended = datetime.now(UTC) - timedelta(minutes=10)
    client.zadd(held.held, {held.member: ended.timestamp() * 1000})

    (resource, state) = shown(browser, q=name).row_of("leases", name)

    assert resource == name
    assert state.startswith("lapsed ")
    assert state.endswith(", without a release")
    assert f"{ended:%Y-%m-%d %H:%M:%S}" in state


@pytest.mark.parametrize("lapsed", [False, True], ids=["held", "lapsed"])
def test_each_link_leads_to_its_row(browser: Any, client: Any, lapsed: bool) -> None:
    """Whatever its primary key is made of."""
    part = uuid.uuid4().hex[:8]
    codes = [f"{part} {pk}" for pk in ("plain", "a b", "ä/ö:_ü", "100%", "x@y", "1:2", "<b>")]
    rows = [Code.objects.create(code=code) for code in codes]
    leases = [fenced_lock(row).acquire() for row in rows]
    if lapsed:
        for row in rows:
            expire(client, row)

    tables = shown(browser, q=part)

    links = [tables.links[lease.resource] for lease in leases]
    assert links == [link_to(row) for row in rows]
    assert [browser.get(link).status_code for link in links] == [200] * len(rows)


@pytest.mark.parametrize(
    "make",
    [lambda part: Code.objects.create(code=part + "ä" * 32), lambda part: part + "x" * 80],
    ids=["row", "name"],
)
def test_the_link_of_a_long_key_leads_nowhere_else(
    browser: Any, make: Callable[[str], Any]
) -> None:
    """The lease in Redis holds only the first 64 bytes of it."""
    part = uuid.uuid4().hex[:8]
    lease = fenced_lock(make(part)).acquire()

    tables = shown(browser, q=part)

    (resource,) = tables.names("leases")
    assert tables.links.get(resource) in (None, link_to(lease.row))


def test_a_row_of_another_database_is_not_linked(browser: Any, client: Any) -> None:
    """The admin would show the row with that key in the default database."""
    job = Job.objects.create()
    lease = fenced_lock((Job, job.pk), using="other", register=False).acquire()

    tables = shown(browser, q=lease.resource)

    assert lease.resource.endswith("@other")
    assert lease.resource in tables.names("leases")
    assert lease.resource not in tables.links


def test_a_released_lease_is_not_shown(browser: Any, name: str) -> None:
    """It is over in good order."""
    registered(name)

    assert shown(browser, q=name).rows["leases"] == []


def test_a_lease_that_is_released_meanwhile_has_not_lapsed(browser: Any, name: str) -> None:
    """It was listed, and was given back before it was looked at."""
    lease = acquired(name)
    look = RedisInspector.look

    def releasing(self: Any, keys: Any) -> Any:
        lease.release()
        return look(self, keys)

    with mock.patch.object(RedisInspector, "look", releasing):
        response = browser.get(PAGE, {"q": name})

    assert response.status_code == 200
    assert "without a release" not in response.content.decode()


def test_an_extended_lease_is_shown_as_it_is_now(browser: Any, name: str) -> None:
    """What remains is what Redis says, not what was granted."""
    acquired(name).extend(5000)

    state = shown(browser, q=name).row_of("leases", name)[1]

    assert 4990 < remaining(state) <= 5000


def test_the_latest_end_comes_first(browser: Any, name: str) -> None:
    """Held leases stand above lapsed ones."""
    for ttl in (50, 90, 70):
        acquired(f"{name}:{ttl}", ttl=ttl)

    names = shown(browser, q=name).names("leases")

    assert names == [f"{name}:90", f"{name}:70", f"{name}:50"]


# Fences


def test_the_fence_of_a_name_is_shown_with_its_holder(browser: Any, name: str) -> None:
    """And with the lease that the name has at the moment."""
    with fenced_lock(name) as lease:
        tables = shown(browser, q=name)
    free = shown(browser, q=name)

    resource, token, holder, state = tables.row_of("fences", name)
    assert (resource, token, holder) == (name, str(lease.token), str(lease.holder.id))
    assert 20 < remaining(state) <= 30
    assert free.row_of("fences", name)[3] == "free"
    assert free.links[name] == link_to(lease.row)


OTHERS = {
    "job": lambda: Job.objects.create(),
    "document": lambda: Document.objects.create(),
    "owned": lambda: Owned.objects.create(),
    "code": lambda: Code.objects.create(code="7"),
    "named": lambda: Named.objects.create(reference="7"),
    "profile": lambda: Profile.objects.create(owner=Owner.objects.create()),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
def test_the_fences_of_each_model_are_shown(browser: Any, make: Callable[[], Any]) -> None:
    """Rows that somebody has registered at, and no others."""
    row = make()
    label = row._meta.label_lower
    assert shown(browser, model=label).rows["fences"] == []

    token = registered(row)

    cells = shown(browser, model=label).row_of("fences", row.fence_name)
    assert cells[1] == str(token)
    assert cells[3] == "free"


def test_rows_that_a_manager_hides_are_shown(browser: Any) -> None:
    """Their fences count."""
    row = Owned.objects.create(deleted=True)
    token = registered((Owned, row.pk))

    cells = shown(browser, model="shop.owned").row_of("fences", f"shop.owned:{row.pk}")

    assert cells[1] == str(token)


def test_a_multi_table_child_stands_among_its_parents(browser: Any) -> None:
    """The fence is the parent's, and so is the page."""
    child = UrgentJob.objects.create()
    with fenced_lock(child):
        tables = shown(browser, model="shop.job")

    assert tables.row_of("fences", f"shop.job:{child.pk}")[3].startswith("held")


def test_a_composite_key_does_not_break_the_page(browser: Any) -> None:
    """Such a row cannot be locked, but a fixture may have given it a token."""
    Composite.objects.create(first=1, second=2)
    Composite.objects.update(last_fence_token=7)

    tables = shown(browser, model="shop.composite")
    shown(browser, model="shop.composite", q="1")

    assert [row[1] for row in tables.rows["fences"][1:]] == ["7"]


def test_each_model_with_a_fence_can_be_chosen(browser: Any) -> None:
    """Names come first; proxies and children have the fences of their parents."""
    page = browser.get(PAGE)

    labels = [label for label, _, _ in page.context["choices"]]
    assert labels[0] == "django_fencing.fence"
    assert labels[1:] == sorted(labels[1:])
    assert {"shop.job", "shop.document", "hoa.complaint"} <= {*labels}
    assert not {"shop.urgentjob", "shop.jobproxy", "shop.plain"} & {*labels}


@pytest.mark.parametrize("separator", [True, False])
def test_tokens_are_shown_with_all_their_digits(
    browser: Any, name: str, client: Any, separator: bool
) -> None:
    """Neither rounded nor grouped: up to 2**53."""
    client.set(keys_of(name).token, 2**53 - 3)
    lease = fenced_lock(name).acquire()

    with override_settings(USE_THOUSAND_SEPARATOR=separator, LANGUAGE_CODE="de"):
        tables = shown(browser, q=name)

    assert lease.token == 2**53 - 2
    assert tables.row_of("leases", name)[2] == "9007199254740990"
    assert tables.row_of("fences", name)[1] == "9007199254740990"


@pytest.mark.parametrize("separator", [True, False])
def test_the_page_of_a_fence_shows_all_digits_of_its_token(
    browser: Any, name: str, separator: bool
) -> None:
    """Neither rounded nor grouped, as on the page of all."""
    registered(name)
    Fence.objects.filter(name__endswith=name).update(last_fence_token=9007199254740990)

    with override_settings(USE_THOUSAND_SEPARATOR=separator):
        response = browser.get(link_to(Fence.objects.get(name__endswith=name)))

    assert "9007199254740990" in response.content.decode()


# Search and pages


def test_a_part_of_the_name_is_enough(browser: Any, name: str) -> None:
    """In leases and in fences, as it is written."""
    texts = [
        "Straße 7",
        "a&b",
        "100%",
        "a|b",
        "日本",
        "<b>",
        "it's",
        "import:tenant/1",
        "%C3",
        "\\_",
    ]
    for text in texts:
        fenced_lock(f"{name} {text} end").acquire()

    found = [shown(browser, q=f"{name} {text}") for text in texts]

    expected = [[f"{name} {text} end"] for text in texts]
    assert [tables.names("leases") for tables in found] == expected
    assert [tables.names("fences") for tables in found] == expected


def test_case_is_ignored(browser: Any, name: str) -> None:
    """In leases and in fences."""
    fenced_lock(f"{name}:Import").acquire()

    tables = shown(browser, q=f"{name}:iMPORT")

    assert tables.names("leases") == tables.names("fences") == [f"{name}:Import"]


def test_a_name_is_found_in_either_unicode_form(browser: Any, name: str) -> None:
    """One spelling is one resource."""
    fenced_lock(f"{name}:caf\u00e9").acquire()

    tables = shown(browser, q=f"{name}:cafe\u0301")

    assert tables.names("leases") == tables.names("fences") == [f"{name}:caf\u00e9"]


def test_the_search_looks_at_names_as_they_are_shown(browser: Any, name: str) -> None:
    """Neither the tenant nor the way in which a name is written down is searched."""
    with override_settings(FENCING={"NAMESPACE": "tenant-x"}):
        fenced_lock(f"{name} ä").acquire()

        found = [shown(browser, q=text).names("fences") for text in ("tenant-x", "C3%A4", "%20")]

    assert found == [[], [], []]


@pytest.mark.parametrize("form", ["{pk}", "shop.job:{pk}"])
def test_a_row_is_found_by_its_primary_key(browser: Any, form: str) -> None:
    """With the model before it or without."""
    rows_of(Job, 3)
    job = Job.objects.order_by("pk")[1]

    tables = shown(browser, model="shop.job", q=form.format(pk=job.pk))

    assert tables.names("fences") == [f"shop.job:{job.pk}"]


@pytest.mark.parametrize(
    ("model", "search"),
    [
        ("shop.job", "x"),
        ("shop.job", "9" * 30),
        ("shop.job", "-1"),
        ("shop.document", "x"),
        ("shop.profile", "x"),
        ("shop.code", "%"),
        ("shop.composite", "x"),
        ("django_fencing.fence", "%~_\\"),
        ("shop.code", "\0"),
        ("shop.job", "\0"),
        ("django_fencing.fence", "\0"),
        ("nothing", "x"),
        ("auth.user", "1"),
        ("shop", ""),
        ("\0", ""),
        ("x" * 5000, "y" * 5000),
    ],
)
def test_garbage_finds_nothing(browser: Any, model: str, search: str) -> None:
    """And is no server error."""
    assert shown(browser, model=model, q=search).rows["fences"] == []


def test_a_page_that_is_not_there_is_one_that_is(browser: Any, name: str) -> None:
    """The first or the last."""
    fenced_lock(name).acquire()

    pages = ["0", "-1", "x", "", "1.5", str(10**30), "\0", "last"]
    found = [shown(browser, q=name, leases=page, fences=page) for page in pages]

    assert [tables.names("leases") for tables in found] == [[name]] * len(pages)
    assert [tables.names("fences") for tables in found] == [[name]] * len(pages)


def test_parameters_that_come_twice_or_are_unknown_are_no_error(browser: Any) -> None:
    """As links of Django's own list have them."""
    assert browser.get(f"{PAGE}?q=a&q=b&model=x&model=y&o=1&p=3&all=&e=1").status_code == 200


def test_both_tables_have_pages_of_their_own(browser: Any, name: str) -> None:
    """Each keeps the search and the place of the other."""
    names = [f"{name}:{number:02}" for number in range(PER_PAGE + 1)]
    for number, one in enumerate(names):
        fenced_lock(one, ttl=100 + number).acquire()

    first = shown(browser, q=name)
    second = Tables(browser.get(PAGE + html.unescape(first.links["next"])))

    assert first.names("fences") == names[:-1]
    assert first.names("leases") == names[:0:-1]
    links = [link for text, link in first.links.items() if text == "next"]
    assert all(f"q={name.replace(':', '%3A')}" in link for link in links)
    assert second.names("fences") == names[-1:]
    assert second.names("leases") == names[:0:-1]
    third = shown(browser, q=name, leases=2, fences=2)
    assert third.names("leases") == names[:1]
    assert third.names("fences") == names[-1:]
    assert "previous" in third.links


# Names as they come


TEXTS = [
    "<script>alert(1)</script>",
    "a b",
    "&amp;",
    "\"quoted\" 'too'",
    "line\nfeed",
    "\u202eright to left",
    "日本語",
    "{{ title }}{% now %}",
    "a|b",
    "%41",
]


def test_names_are_shown_as_text(browser: Any, name: str) -> None:
    """No markup of theirs is the page's."""
    names = [f"{name} {text}" for text in TEXTS]
    for one in names:
        fenced_lock(one).acquire()

    response = browser.get(PAGE, {"q": name})

    tables = Tables(response)
    assert sorted(tables.names("leases")) == sorted(names)
    assert sorted(tables.names("fences")) == sorted(names)
    assert "<script>alert" not in response.content.decode()


def test_a_function_or_host_is_shown_as_text(browser: Any, name: str, client: Any) -> None:
    """Whoever wrote it into Redis."""
    acquired(name)
    client.hset(keys_of(name).lease, "host", "<script>alert(1)</script>")

    response = browser.get(PAGE, {"q": name})

    assert Tables(response).row_of("leases", name)[4] == "<script>alert(1)</script>"
    assert "<script>alert" not in response.content.decode()


def test_a_long_name_is_shown_as_far_as_it_is_kept(browser: Any, name: str) -> None:
    """Two that differ at their end stay two."""
    for end in ("a", "b"):
        fenced_lock(name + "x" * 300 + end).acquire()

    tables = shown(browser, q=name)

    for section in ("leases", "fences"):
        names = tables.names(section)
        assert len(names) == 2
        assert all(one.startswith(f"{name}xxx") and one.endswith("x…") for one in names)


# Tenants and other projects


def test_a_tenant_sees_its_own_alone(browser: Any, name: str) -> None:
    """Leases and fences; also the tenant without a name."""
    for tenant in ("a", "b", "", "ab"):
        with override_settings(FENCING={"NAMESPACE": tenant}):
            fenced_lock(f"{name}:of {tenant}").acquire()

    for tenant in ("a", "b", "", "ab"):
        with override_settings(FENCING={"NAMESPACE": tenant}):
            tables = shown(browser, q=name)

        assert tables.names("leases") == [f"{name}:of {tenant}"]
        assert tables.names("fences") == [f"{name}:of {tenant}"]


def test_another_prefix_is_another_project(browser: Any, name: str) -> None:
    """Its leases are in the same Redis, and are not shown."""
    with override_settings(FENCING={**settings.FENCING, "PREFIX": "elsewhere"}):
        acquired(name)

    assert shown(browser, q=name).rows["leases"] == []


# Who may see it


def test_the_page_needs_the_permission(name: str) -> None:
    """Other staff is refused, whoever is not logged in is sent to do so."""
    anonymous = Client().get(PAGE)

    assert logged_in("shop.view_job").get(PAGE).status_code == 403
    assert anonymous.status_code == 302
    assert anonymous.url.startswith(reverse("admin:login"))
    assert logged_in("django_fencing.view_fence").get(PAGE).status_code == 200


def test_rows_are_linked_for_those_who_may_see_them() -> None:
    """And their model can be chosen; a model that is not registered has no pages."""
    job, document = Job.objects.create(), Document.objects.create()
    leases = [fenced_lock(row).acquire() for row in (job, document)]
    names = [lease.resource for lease in leases]

    stranger = logged_in("django_fencing.view_fence")
    known = logged_in("django_fencing.view_fence", "shop.view_job", "shop.view_document")

    assert names[0] not in shown(stranger, q=names[0]).links
    assert names[0] in shown(known, q=names[0]).links
    assert names[1] not in shown(known, q=names[1], model="shop.document").links
    assert shown(stranger, q=names[0]).names("leases") == [names[0]]
    assert shown(stranger, model="shop.job").rows["fences"] == []
    assert shown(known, model="shop.job").names("fences") == [names[0]]
    assert shown(known, model="shop.document").names("fences") == [names[1]]


def test_nothing_can_be_changed(browser: Any, name: str, client: Any) -> None:
    """Not even by somebody who may do everything."""
    lease = fenced_lock(name).acquire()
    page = link_to(lease.row)
    before = client.hgetall(keys_of(name).lease), client.get(keys_of(name).token)
    change = {"name": name, "last_fence_token": "0", "_selected_action": [lease.row.pk]}

    posted = browser.post(PAGE, {**change, "action": "delete_selected", "post": "yes"})
    answers = [
        browser.post(page, change).status_code,
        browser.get(page.replace("change", "delete")).status_code,
        browser.post(page.replace("change", "delete"), {"post": "yes"}).status_code,
        browser.get(f"{PAGE}add/").status_code,
        browser.post(f"{PAGE}add/", change).status_code,
    ]

    assert posted.status_code in (200, 405)
    assert answers == [403] * 5
    assert (client.hgetall(keys_of(name).lease), client.get(keys_of(name).token)) == before
    fence = Fence.objects.get(pk=lease.row.pk)
    assert (fence.last_fence_token, fence.last_fence_holder) == (lease.token, lease.holder.id)
    assert browser.get(page).status_code == 200
    assert browser.get(page.replace("change", "history")).status_code == 200


# What it costs


@contextmanager
def round_trips() -> Iterator[list[str]]:
    """Collect what redis-py sends after it has read an answer: each begins a round trip."""
    turns: list[str] = []
    awaited: set[int] = set()
    connection_class = redis.connection.AbstractConnection
    send, read = connection_class.send_packed_command, connection_class.read_response

    def send_packed_command(self: Any, command: Any, *args: Any, **options: Any) -> Any:
        if id(self) not in awaited:
            awaited.add(id(self))
            turns.append(str(command)[:60])
        return send(self, command, *args, **options)

    def read_response(self: Any, *args: Any, **options: Any) -> Any:
        awaited.discard(id(self))
        return read(self, *args, **options)

    with (
        mock.patch.object(connection_class, "send_packed_command", send_packed_command),
        mock.patch.object(connection_class, "read_response", read_response),
    ):
        yield turns


@pytest.mark.parametrize("database", [0, 1])
def test_the_page_costs_few_round_trips(
    browser: Any, name: str, private_redis: Any, database: int
) -> None:
    """Those of connecting included, and however many leases there are."""
    path = private_redis.connection_pool.connection_kwargs["path"]
    with cache_at(f"unix://{path}?db={database}"):
        for number in range(PER_PAGE + 5):
            fenced_lock(f"{name}:{number}").acquire()

        with round_trips() as turns:
            tables = shown(browser)

    assert len(tables.names("leases")) == len(tables.names("fences")) == PER_PAGE
    assert len(turns) <= 5, turns


def test_the_page_never_searches_the_keys(browser: Any, name: str, private_redis: Any) -> None:
    """Other people's keys cost nothing: the commands are the same, and all read one key."""
    fenced_lock(name).acquire()
    with monitored(private_redis) as alone:
        shown(browser)
    private_redis.eval("for i = 1, 100000 do redis.call('SET', 'foreign:' .. i, i) end", 0)

    with monitored(private_redis) as crowded:
        shown(browser)

    def kinds(commands: list[list[str]]) -> list[str]:
        return [command[0] for command in commands]

    assert kinds(crowded) == kinds(alone)
    assert {*kinds(crowded)} == {"ZRANGE", "PTTL", "HMGET", "ZSCORE"}


def test_the_page_costs_as_many_statements_with_many_rows(browser: Any) -> None:
    """Two over what the admin asks for the user, with 1 row or 30."""

    def cost(**parameters: str) -> int:
        with CaptureQueriesContext(connection) as queries:
            shown(browser, **parameters)
        return len(queries)

    rows_of(Job, 1)
    bare = len([*_statements_of(browser, reverse("admin:index"))])
    alone = cost(model="shop.job")
    rows_of(Job, 30)

    assert cost(model="shop.job") == alone
    assert cost(model="shop.job", fences="2", q="") == alone
    assert alone == bare + 1  # the index asks for the recent actions


def _statements_of(browser: Any, page: str) -> Iterator[str]:
    with CaptureQueriesContext(connection) as queries:
        assert browser.get(page).status_code == 200
    yield from (query["sql"] for query in queries.captured_queries)


def test_no_connection_is_left_behind(browser: Any, name: str, private_redis: Any) -> None:
    """The page has one of its own, for as long as it takes."""
    acquired(name)
    before = len(private_redis.client_list())

    for _ in range(3):
        shown(browser)

    assert len(private_redis.client_list()) == before


# Faults of Redis


def assert_unknown(browser: Any, name: str) -> None:
    """Check that the page comes soon, with a warning and with the fences."""
    began = time.monotonic()
    response = browser.get(PAGE, {"q": name})
    took = time.monotonic() - began

    assert response.status_code == 200
    assert took < 3
    assert UNKNOWN in response.content.decode()
    tables = Tables(response)
    assert tables.rows["leases"] == []
    assert tables.row_of("fences", name)[3] == "unknown"


def test_without_redis_the_fences_are_shown(browser: Any, name: str) -> None:
    """Nobody listens at the port."""
    registered(name)

    with cache_at(CLOSED_PORT):
        assert_unknown(browser, name)


def test_a_server_that_never_answers_does_not_hold_the_page_up(browser: Any, name: str) -> None:
    """It accepts connections and says nothing, whatever time-outs the cache has."""
    registered(name)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        with cache_at(f"redis://127.0.0.1:{port}?db=0", SOCKET_TIMEOUT=60):
            assert_unknown(browser, name)


def test_a_paused_server_does_not_hold_the_page_up(
    browser: Any, name: str, private_redis: Any
) -> None:
    """It goes on afterwards."""
    registered(name)
    private_redis.client_pause(2000)

    assert_unknown(browser, name)

    private_redis.ping()  # answered when the pause is over
    assert shown(browser, q=name).row_of("fences", name)[3] == "free"


def test_a_server_that_was_stopped_does_not_break_the_page(
    browser: Any, name: str, private_services: Services, private_redis: Any
) -> None:
    """The cache's connections are dead, and the page opens its own."""
    registered(name)
    private_services.restart_valkey()

    assert shown(browser, q=name).row_of("fences", name)[3] == "free"


def test_a_user_without_rights_is_an_outage(browser: Any, name: str, private_redis: Any) -> None:
    """The password is not on the page."""
    registered(name)
    private_redis.acl_setuser("shy", enabled=True, passwords=["+hush7"], commands=["+ping"])
    pool = private_redis.connection_pool.connection_kwargs
    login = {"username": "shy", "password": "hush7"}
    factory = lambda: redis.Redis(  # noqa: E731
        connection_pool=redis.ConnectionPool(
            connection_class=redis.UnixDomainSocketConnection,
            path=pool["path"],
            **login,
        )
    )

    with override_settings(FENCING={**settings.FENCING, "CLIENT_FACTORY": factory}):
        assert_unknown(browser, name)
        assert "hush7" not in browser.get(PAGE).content.decode()


def test_a_cache_that_excludes_nobody_does_not_break_the_page(browser: Any, name: str) -> None:
    """The check says so too; the page shows the fences."""
    registered(name)
    cache = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}

    with override_settings(CACHES=cache):
        assert_unknown(browser, name)


@pytest.mark.parametrize("kind", ["set", "rpush"])
def test_keys_of_another_type_do_not_break_the_page(
    browser: Any, name: str, private_redis: Any, kind: str
) -> None:
    """A lease that is none counts as held by unknown; what cannot be listed is left out."""
    keys = keys_of(name)
    fenced_lock(name).acquire()
    private_redis.delete(keys.lease)
    getattr(private_redis, kind)(keys.lease, "x")

    tables = shown(browser, q=name)

    assert tables.row_of("leases", name)[1] == "held, without an end"
    assert tables.row_of("fences", name)[3] == "held, without an end"

    private_redis.delete(keys.held)
    getattr(private_redis, kind)(keys.held, "x")

    assert shown(browser, q=name).rows["leases"] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"acquired_at": "9" * 30},
        {"acquired_at": "²"},
        {"acquired_at": "-5", "token": "-5"},
        {"token": "²"},
        {"token": "x" * 1000},
        {"token": "9" * 5000},
        {"model": "x", "pk": "\0"},
        {"model": "shop.job", "pk": "x/y"},
        {"model": "shop.job", "pk": ""},
        {"model": "..", "pk": "1"},
        {"host": b"\xff\xfe"},
        {"layout": "2", "function": ""},
    ],
)
def test_an_unreadable_lease_does_not_break_the_page(
    browser: Any, name: str, private_redis: Any, fields: dict[str, Any]
) -> None:
    """Somebody else has written into it."""
    acquired(name)
    private_redis.hset(keys_of(name).lease, mapping=fields)

    assert name in shown(browser, q=name).names("leases")


@pytest.mark.parametrize("score", ["inf", "-inf", "1e300", "0", "-1"])
def test_an_unreadable_end_does_not_break_the_page(
    browser: Any, name: str, private_redis: Any, score: str
) -> None:
    """Somebody else has written it."""
    keys = keys_of(name)
    private_redis.zadd(keys.held, {keys.member: float(score), "x": 1, "": 2, "row:|": 3})

    shown(browser)


# Clients


class OwnPool(redis.ConnectionPool):
    """A pool that the page does not know."""


@pytest.mark.parametrize(
    ("pool", "protocol", "decode"),
    [
        (redis.ConnectionPool, 3, True),
        (redis.BlockingConnectionPool, 2, False),
        (OwnPool, 2, True),
        (OwnPool, 3, True),
        (OwnPool, 3, False),
    ],
)
def test_the_page_works_with_any_client(
    browser: Any, name: str, private_redis: Any, pool: Any, protocol: int, decode: bool
) -> None:
    """Of a factory; RESP2 and RESP3, with and without decoded replies."""
    path = private_redis.connection_pool.connection_kwargs["path"]
    own = pool(
        connection_class=redis.UnixDomainSocketConnection,
        path=path,
        protocol=protocol,
        decode_responses=decode,
    )

    fencing = {**settings.FENCING, "CLIENT_FACTORY": lambda: redis.Redis(connection_pool=own)}
    with override_settings(FENCING=fencing):
        lease = fenced_lock(f"{name} ä").acquire()
        tables = shown(browser)
        own.disconnect()

    assert tables.row_of("leases", f"{name} ä")[2] == str(lease.token)
    assert tables.row_of("fences", f"{name} ä")[3].startswith("held")


def test_the_page_works_with_djangos_own_cache(browser: Any, name: str, private_redis: Any) -> None:
    """It is a Redis cache too."""
    path = private_redis.connection_pool.connection_kwargs["path"]
    backend = "django.core.cache.backends.redis.RedisCache"
    cache = {"default": {"BACKEND": backend, "LOCATION": f"unix://{path}"}}

    with override_settings(CACHES=cache):
        acquired(name)
        tables = shown(browser)
        caches["default"]._cache.get_client(write=True).connection_pool.disconnect()

    assert tables.names("leases") == [name]


def test_the_page_looks_from_any_thread(browser: Any, name: str) -> None:
    """What holds the lease is not what looks at it."""
    in_threads(lambda: acquired(name))

    assert shown(browser, q=name).names("leases") == [name]
