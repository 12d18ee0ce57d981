"""with_fenced_lock on views: what they answer, their transactions, their streams."""

import asyncio
import functools
import itertools
import logging
import os
import re
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock
from wsgiref.util import FileWrapper

import pytest
from django.contrib.auth.decorators import login_required
from django.core.handlers.wsgi import WSGIHandler
from django.db import IntegrityError, connection, connections, transaction
from django.http import (
    FileResponse,
    Http404,
    HttpRequest,
    HttpResponse,
    JsonResponse,
    StreamingHttpResponse,
)
from django.shortcuts import get_object_or_404
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions
from rest_framework.decorators import action, api_view
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_fencing import http
from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import (
    InsideTransaction,
    LeaseLost,
    LockHeld,
    NoSuchRow,
    StaleToken,
    StoreUnavailable,
)
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from tests import views
from tests.helpers import (
    SECONDS,
    acquired,
    committing,
    counted_calls,
    expire,
    held_elsewhere,
    in_threads,
    keys_of,
    statements,
    taken_over,
)
from tests.proxy import Proxy
from tests.shop.models import Entry, Job
from tests.views import Lock, serving, visit

pytestmark = committing("default", "other")

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
PROBLEM = "application/problem+json"
HTML = "text/html; charset=utf-8"

of_every_shape = pytest.mark.parametrize(
    "shape", [*views.OUTER, *views.INNER], ids=lambda shape: shape.__name__
)


@pytest.fixture
def atomic_requests(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what switches ATOMIC_REQUESTS on for some databases."""

    def switch_on(*aliases: str) -> None:
        for alias in aliases:
            assert connections[alias].settings_dict is connections.settings[alias]
            monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)

    return switch_on


@contextmanager
def journal() -> Iterator[list[str]]:
    """Collect the first words of Redis commands and SQL statements in the order they are sent."""

    class Journal(logging.Handler):
        def emit(self, record: Any) -> None:
            sent.append(record.sql.split()[0])

    logger = logging.getLogger("django.db.backends")
    level, handler = logger.level, Journal()
    with counted_calls() as sent, CaptureQueriesContext(connection):
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        try:
            yield sent
        finally:
            logger.setLevel(level)
            logger.removeHandler(handler)


def is_free(resource: Any) -> bool:
    """Say whether the lock of `resource` is to be had."""
    try:
        return fenced_lock(resource, register=False).acquire().release()
    except LockHeld:
        return False


def never() -> None:
    pytest.fail("The body ran.")


def in_transaction(alias: str = "default") -> bool:
    return bool(connections[alias].in_atomic_block)


def greeting(request: HttpRequest | None) -> dict[str, str]:
    """As a context processor, say something that only it knows."""
    return {"greeting": "hello from the context"}


def templates(text: str) -> list[dict[str, Any]]:
    """Return the setting of a project that has its own page."""
    loader = ("django.template.loaders.locmem.Loader", {"django_fencing/conflict.html": text})
    options = {"loaders": [loader], "context_processors": ["tests.test_http.greeting"]}
    return [{"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": options}]


# Where a lock may sit


@of_every_shape
def test_a_view_of_every_shape_is_one_fenced_transaction(name: str, shape: Any) -> None:
    """The value of the URL names the resource, and afterwards the lock is free."""

    def body() -> Any:
        Job.objects.create(note=name)
        assert in_transaction()
        return current_lease().resource

    view = shape(with_fenced_lock(name + ":{pk}"), body)

    response = visit(view, middleware=["tests.views.identified"], pk=7)

    assert (response.status_code, response.json()) == (200, f"{name}:7")
    assert Job.objects.filter(note=name).exists()
    assert is_free(f"{name}:7")


@of_every_shape
def test_a_view_of_every_shape_answers_409_while_its_lock_is_held(name: str, shape: Any) -> None:
    """Its body does not run, and another row's view is not touched."""
    view = shape(with_fenced_lock(name + ":{pk}"), never)

    with fenced_lock(f"{name}:7"):
        response = visit(view, middleware=["tests.views.identified"], pk=7)
        other = shape(with_fenced_lock(name + ":{pk}"), lambda: "done")
        assert visit(other, middleware=["tests.views.identified"], pk=8).json() == "done"

    assert (response.status_code, response["Content-Type"]) == (409, PROBLEM)
    assert response.json()["code"] == "lock-held"
    assert int(response["Retry-After"]) >= 30


@of_every_shape
def test_a_view_of_every_shape_rolls_back_whole(name: str, shape: Any) -> None:
    """An exception of the body goes on as it is, and the lock is free."""

    def body() -> Any:
        Job.objects.create(note=name)
        raise ZeroDivisionError(name)

    view = shape(with_fenced_lock(name), body)

    with pytest.raises(ZeroDivisionError, match=name):
        visit(view, middleware=["tests.views.identified"], pk=7)

    assert not Job.objects.filter(note=name).exists()
    assert is_free(name)


@pytest.mark.parametrize(
    "shape", [*views.OUTER_API, *views.INNER_API], ids=lambda shape: shape.__name__
)
@pytest.mark.parametrize("locked", [True, False], ids=["fenced", "unfenced"])
def test_an_exception_that_the_api_answers_rolls_back(name: str, shape: Any, locked: bool) -> None:
    """Django REST framework makes a response of it, inside of the lock even; the twin keeps it."""

    def body() -> Any:
        Job.objects.create(note=name)
        raise exceptions.NotFound(name)

    def no_lock(function: Any) -> Any:
        return function

    view = shape(with_fenced_lock(name) if locked else no_lock, body)

    response = visit(view, pk=7)

    assert (response.status_code, response.json()) == (404, {"detail": name})
    assert Job.objects.filter(note=name).exists() is not locked
    assert not in_transaction()
    assert is_free(name)


def test_an_answer_of_the_api_that_is_no_exception_commits(name: str) -> None:
    """Only an exception rolls back: a view may write and say 400."""

    @with_fenced_lock(name)
    @api_view(["GET"])
    def endpoint(request: Any) -> Any:
        Job.objects.create(note=name)
        return Response(status=400)

    assert visit(endpoint).status_code == 400
    assert Job.objects.filter(note=name).exists()


@pytest.mark.django_db(transaction=False)
@pytest.mark.parametrize("atomic", [True, False])
def test_an_exception_that_the_api_answers_spoils_no_test_case(name: str, atomic: bool) -> None:
    """The transaction around a test is not the view's."""

    @with_fenced_lock(name, atomic=atomic)
    @api_view(["GET"])
    def endpoint(request: Any) -> Any:
        raise exceptions.NotFound(name)

    assert visit(endpoint).status_code == 404
    assert not Job.objects.filter(note=name).exists()


@pytest.mark.parametrize("shape", [views.above_api_view, views.api_dispatch, views.api_method])
def test_a_lock_that_the_body_of_an_api_view_finds_held_is_answered(name: str, shape: Any) -> None:
    """Django REST framework lets it pass, and the decorator answers."""
    view = shape(with_fenced_lock(name + ":outer", atomic=False), fenced_lock(name).acquire)

    with fenced_lock(name):
        response = visit(view, pk=7)

    assert (response.status_code, response.json()["code"]) == (409, "lock-held")
    assert is_free(name + ":outer")


@pytest.mark.parametrize("outside", [True, False])
def test_a_router_finds_a_locked_action(name: str, outside: bool) -> None:
    """Above and below @action, each method of it with its own path."""
    locked = with_fenced_lock(name + ":{pk}")

    class Jobs(ViewSet):
        def work(self, request: Any, pk: str) -> Any:
            return Response([request.method, current_lease().resource])

        if outside:
            work = locked(action(detail=True, methods=["get", "post"])(work))
        else:
            work = action(detail=True, methods=["get", "post"])(locked(work))

    router = SimpleRouter()
    router.register("jobs", Jobs, basename="job")
    with override_settings(ROOT_URLCONF=(path("", include(router.urls)),), MIDDLEWARE=()):
        got = Client().get("/jobs/7/work/")
        posted = Client().post("/jobs/a:b/work/")
        with fenced_lock(f"{name}:7"):
            refused = Client().get("/jobs/7/work/")

    assert got.json() == ["GET", f"{name}:7"]
    assert posted.json() == ["POST", f"{name}:a%3Ab"]
    assert (refused.status_code, refused.json()["code"]) == (409, "lock-held")


def test_the_attributes_of_a_view_survive(name: str) -> None:
    """Those that Django and Django REST framework read of it."""

    def view(request: Any) -> Any: ...

    view.csrf_exempt = True  # type: ignore[attr-defined]
    view.login_required = False  # type: ignore[attr-defined]
    fenced = with_fenced_lock(name)(view)

    assert fenced.csrf_exempt is True  # type: ignore[attr-defined]
    assert fenced.login_required is False  # type: ignore[attr-defined]

    around = with_fenced_lock(name)(APIView.as_view())
    assert around.cls is APIView  # type: ignore[attr-defined]
    assert around.csrf_exempt is True  # type: ignore[attr-defined]

    @method_decorator(with_fenced_lock(name), name="dispatch")
    @method_decorator(csrf_exempt, name="dispatch")
    class Page(View): ...

    assert Page.as_view().csrf_exempt is True


@pytest.mark.parametrize(
    ("shape", "status"),
    [
        (views.function, 403),
        (views.below_csrf_exempt, 200),
        (views.above_csrf_exempt, 200),
        (views.dispatch, 403),
        (views.dispatch_in_a_list, 405),
        (views.api_dispatch, 405),
    ],
)
def test_a_post_without_the_token_passes_where_the_view_is_exempt(
    name: str, shape: Any, status: int
) -> None:
    """The decorator neither loses the exemption nor makes one."""
    view = shape(with_fenced_lock(name), lambda: "done")
    csrf = ["django.middleware.csrf.CsrfViewMiddleware"]

    with serving(view, middleware=csrf, pk=7) as ask:
        response = ask(method="post")

    assert response.status_code == status


@pytest.mark.django_db(transaction=True)  # with all apps
def test_a_login_page_takes_no_lock(name: str) -> None:
    """Below login_required the decorator is not asked; above it locks first."""
    for shape, calls in ((views.below_login_required, 0), (views.above_login_required, 2)):
        view = shape(with_fenced_lock(name), never)

        with override_settings(LOGIN_URL="/enter/"), counted_calls() as sent:
            response = visit(view, middleware=["tests.views.anonymous"], pk=7)

        assert (response.status_code, len(sent)) == (302, calls)
        assert response["Location"].startswith("/enter/")


def test_a_row_that_does_not_exist_is_a_404_without_a_lock(name: str, job: Job) -> None:
    """The callable that finds the resource is the view's own code."""

    @with_fenced_lock(lambda request, pk: get_object_or_404(Job, pk=pk))
    def view(request: Any, pk: int) -> Any:
        row = current_lease().row
        row.note = name
        row.save()
        return HttpResponse(status=201)

    with counted_calls() as calls, pytest.raises(Http404):
        view(RequestFactory().get("/"), pk=job.pk + 1)
    assert calls == []

    assert visit(view, pk=job.pk).status_code == 201
    assert Job.objects.get(pk=job.pk).note == name


@pytest.mark.parametrize("shape", [*views.OUTER, *views.INNER], ids=lambda shape: shape.__name__)
def test_a_row_that_is_named_and_does_not_exist_is_a_404(job: Job, client: Any, shape: Any) -> None:
    """It may have been deleted since the page was opened. Nothing is left of the lock."""
    identified = ["tests.views.identified"]
    view = shape(with_fenced_lock(lambda *args, pk, **kwargs: (Job, pk)), lambda: "done")

    assert visit(view, middleware=identified, pk=job.pk).json() == "done"
    assert visit(view, middleware=identified, pk=job.pk + 1).status_code == 404

    job.pk += 1
    assert not client.exists(keys_of(job).lease)


def test_a_row_that_the_body_does_not_find_is_a_fault_of_the_body(job: Job, name: str) -> None:
    """Only the row that is to be locked speaks for the request."""

    @with_fenced_lock(name, atomic=False)
    def view(request: Any) -> Any:
        with fenced_lock((Job, job.pk + 1)):
            never()

    with pytest.raises(NoSuchRow):
        visit(view)


def test_of_two_requests_at_once_one_is_refused(name: str) -> None:
    """The body waits until the other one has its answer."""
    refused = threading.Event()

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        assert refused.wait(SECONDS)
        return HttpResponse()

    with serving(view) as ask:

        def request() -> Any:
            response = ask()
            if response.status_code == 409:
                refused.set()
            return response.status_code

        assert sorted(in_threads(request, request)) == [200, 409]


def test_of_two_requests_at_once_both_run_without_the_lock() -> None:
    """The twin: the bodies meet."""
    both = threading.Barrier(2)

    def view(request: Any) -> Any:
        both.wait(SECONDS)
        return HttpResponse()

    with serving(view) as ask:
        answered = in_threads(lambda: ask().status_code, lambda: ask().status_code)

    assert answered == [200, 200]


# What is answered


@pytest.mark.parametrize(
    ("ttl", "least", "most"),
    [(0.9, 1, 2), (3.5, 4, 5), (8, 8, 10), (20, 20, 25), (47.5, 48, 60), (300, 48, 60)],
)
def test_retry_after_comes_from_the_remaining_time(
    name: str, client: Any, ttl: float, least: int, most: int
) -> None:
    """Rounded up, with up to a quarter of jitter, a minute at most."""
    view = views.function(with_fenced_lock(name), never)
    acquired(name)

    seen = set()
    with serving(view, pk=7) as ask:
        for _ in range(40):
            client.pexpire(keys_of(name).lease, int(ttl * 1000))
            response = ask()
            assert re.fullmatch(r"[0-9]+", response["Retry-After"])
            seen.add(int(response["Retry-After"]))

    assert least <= min(seen) <= max(seen) <= most
    assert len(seen) > 1
    assert len(seen) == most - least + 1 or most - least > 4


def test_a_stale_token_in_the_body_is_a_409_that_says_so(name: str, client: Any) -> None:
    """Nobody is told to try again: what has changed is to be looked at first."""
    successors = []

    @with_fenced_lock(name)
    def view(request: Any, *, lease: Lease) -> Any:
        successors.extend(in_threads(lambda: taken_over(fenced_lock(name), client)))
        with lease.atomic():
            never()

    response = visit(view)

    assert (response.status_code, response.json()["code"]) == (409, "stale-token")
    assert "Retry-After" not in response
    assert successors[0].release() is True


def test_a_lost_lease_in_the_body_is_a_409_that_says_so(name: str, client: Any) -> None:
    """Found out by ensure_held(), in a plain view and in one of Django REST framework."""

    def body() -> None:
        expire(client, name)
        current_lease().ensure_held()
        never()

    for shape in (views.function, views.above_api_view, views.below_api_view):
        response = visit(shape(with_fenced_lock(name, atomic=False), body), pk=7)

        assert (response.status_code, response.json()["code"]) == (409, "stale-token")
        assert "Retry-After" not in response


def test_a_lease_that_ran_out_does_not_replace_what_the_view_has_done(
    name: str, client: Any
) -> None:
    """A committed success stays one, and an exception of the body stays itself."""

    @with_fenced_lock(name)
    def view(request: Any, fail: bool) -> Any:
        Job.objects.create(note=name)
        expire(client, name)
        if fail:
            raise ZeroDivisionError
        return HttpResponse(status=201)

    assert visit(view, fail=False).status_code == 201
    assert Job.objects.filter(note=name).count() == 1
    with pytest.raises(ZeroDivisionError):
        visit(view, fail=True)
    assert Job.objects.filter(note=name).count() == 1


@of_every_shape
def test_an_outage_is_a_503_and_the_body_never_runs(name: str, proxy: Proxy, shape: Any) -> None:
    """Nobody is told that somebody else is at work."""
    proxy.hang_up()

    view = shape(with_fenced_lock(name), never)
    response = visit(view, middleware=["tests.views.identified"], pk=7)

    assert (response.status_code, response.json()["code"]) == (503, "store-unavailable")
    assert 5 <= int(response["Retry-After"]) <= 6
    assert response.json()["title"] == "Service Unavailable"


def test_an_outage_after_the_commit_leaves_the_views_answer(name: str, proxy: Proxy) -> None:
    """The lease will run out by itself."""

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        Job.objects.create(note=name)
        proxy.hang_up()
        return HttpResponse(status=201)

    assert visit(view).status_code == 201
    assert Job.objects.filter(note=name).exists()


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, PROBLEM),
        ("*/*", PROBLEM),
        ("application/json", PROBLEM),
        (PROBLEM, PROBLEM),
        ("application/*", PROBLEM),
        (BROWSER, HTML),
        ("text/html", HTML),
        ("text/*", HTML),
        ("application/json;q=0.5, text/html", HTML),
        ("text/html;q=0.5, application/json", PROBLEM),
        ("text/html;q=0", PROBLEM),
        ("image/png", PROBLEM),
        ("nonsense", PROBLEM),
        ("text/html;q=much", HTML),
        ("", PROBLEM),
    ],
)
def test_the_accept_header_chooses_between_a_page_and_a_problem(
    name: str, accept: str | None, content_type: str
) -> None:
    """Machines get RFC 9457 unless they prefer HTML, and caches know that it depends."""
    view = views.function(with_fenced_lock(name), never)

    with fenced_lock(name):
        response = visit(view, accept, pk=7)

    assert (response.status_code, response["Content-Type"]) == (409, content_type)
    assert response["Vary"] == "Accept"
    assert (b"<!DOCTYPE html>" in response.content) == (content_type == HTML)


def failing(error: Exception) -> Any:
    """Return a decorated view whose body raises `error`."""

    def body() -> None:
        raise error

    return views.function(with_fenced_lock(uuid.uuid4().hex), body)


ERRORS = {
    "lock-held": LockHeld("secret", resource="secret", retry_after=2.5, held_by="secret"),
    "stale-token": StaleToken("secret", resource="secret", token=731, fence_token=732),
    "store-unavailable": StoreUnavailable("secret", resource="secret"),
}


@pytest.mark.parametrize("code", ERRORS)
def test_a_problem_has_the_fields_of_its_rfc(code: str) -> None:
    """Those and `code`; without a type, the title is the phrase of the status."""
    response = visit(failing(ERRORS[code]), pk=7)

    problem = response.json()
    assert list(problem) == ["type", "title", "status", "detail", "code"]
    assert problem["type"] == "about:blank"
    assert problem["title"] == response.reason_phrase
    assert problem["status"] == response.status_code
    assert problem["code"] == code
    assert problem["detail"].endswith(".")


@pytest.mark.parametrize("code", ERRORS)
def test_a_page_says_what_to_do(code: str) -> None:
    """It shows the code and the seconds of the header."""
    response = visit(failing(ERRORS[code]), BROWSER, pk=7)

    page = response.content.decode()
    assert f"{response.status_code} {code}" in page
    assert "again" in page
    assert ("Retry-After" in response) == (code != "stale-token")
    if "Retry-After" in response:
        assert f"Wait {response['Retry-After']} second" in page


@pytest.mark.parametrize("accept", [PROBLEM, "text/html"])
@pytest.mark.parametrize("code", ERRORS)
def test_nothing_of_an_error_is_told(code: str, accept: str) -> None:
    """Its message names resource and holder; neither is the client's business."""
    response = visit(failing(ERRORS[code]), accept, pk=7)

    assert b"secret" not in response.serialize()
    assert b"73" not in response.serialize()


@pytest.mark.parametrize("accept", [PROBLEM, "text/html"])
def test_nothing_of_the_holder_is_told(name: str, client: Any, accept: str) -> None:
    """Neither its id, nor its host, process or function."""
    view = views.function(with_fenced_lock(name), never)

    lease = acquired(name)
    known = {"host": "secret-host", "pid": "987654321", "function": "secret.function"}
    key = keys_of(name).lease
    assert set(known) <= set(client.hgetall(key))
    client.hset(key, mapping=known)
    answered = visit(view, accept, pk=7).serialize().decode()

    for text in (str(lease.holder.id), lease.holder.id.hex, name, *known.values()):
        assert text not in answered
    assert os.uname().nodename not in answered


@pytest.mark.parametrize("code", ERRORS)
def test_a_project_may_have_its_own_page(code: str) -> None:
    """With its context processors, except in an outage: they may need the store themselves."""
    text = "{{ problem.status }} {{ problem.code }} {{ greeting }}"

    with override_settings(TEMPLATES=templates(text)):
        response = visit(failing(ERRORS[code]), BROWSER, pk=7)

    hello = "" if response.status_code == 503 else "hello from the context"
    assert response.content.decode() == f"{response.status_code} {code} {hello}"
    assert response["Content-Type"] == HTML


def test_a_page_may_extend_ours() -> None:
    """Its blocks are `title` and `content`."""
    ours = Path(__file__).parents[1] / "django_fencing/templates/django_fencing/conflict.html"
    page = '{% extends "ours.html" %}{% block title %}Hm{% endblock %}{% block content %}<hr>'
    texts = {"ours.html": ours.read_text(), "django_fencing/conflict.html": page + "{% endblock %}"}
    setting = templates("")
    setting[0]["OPTIONS"]["loaders"] = [("django.template.loaders.locmem.Loader", texts)]

    with override_settings(TEMPLATES=setting):
        content = visit(failing(ERRORS["lock-held"]), BROWSER, pk=7).content.decode()

    assert "<title>Hm</title>" in content
    assert "<hr>" in content
    assert "Somebody" not in content


@pytest.mark.parametrize(
    "setting",
    [
        [],
        [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": False}],
    ],
    ids=["no engine", "no page"],
)
@pytest.mark.parametrize("code", ERRORS)
def test_without_the_page_a_browser_gets_the_problem(setting: Any, code: str) -> None:
    """A project without templates needs none."""
    with override_settings(TEMPLATES=setting):
        response = visit(failing(ERRORS[code]), BROWSER, pk=7)

    assert response["Content-Type"] == PROBLEM
    assert response["Vary"] == "Accept"
    assert response.json()["code"] == code


def test_a_fault_in_a_projects_page_is_not_hidden() -> None:
    """Only a page that is not there gives way to the problem."""
    view = failing(ERRORS["lock-held"])
    setting = templates("{{ problem.code|divisibleby:'x' }}")

    with override_settings(TEMPLATES=setting), pytest.raises(ValueError, match="invalid literal"):
        visit(view, BROWSER, pk=7)


@of_every_shape
def test_on_held_skips_or_answers_itself(name: str, shape: Any) -> None:
    """204, or what the callable makes of the LockHeld."""

    def busy(held: LockHeld) -> Any:
        return HttpResponse(held.resource, status=423)

    with fenced_lock(f"{name}:7"):
        middleware = ["tests.views.identified"]
        skip = shape(with_fenced_lock(name + ":{pk}", on_held="skip"), never)
        skipped = visit(skip, middleware=middleware, pk=7)
        special = shape(with_fenced_lock(name + ":{pk}", on_held=busy), never)
        answered = visit(special, middleware=middleware, pk=7)

    assert (skipped.status_code, skipped.content) == (204, b"")
    assert (answered.status_code, answered.content.decode()) == (423, f"{name}:7")


def test_on_held_does_not_speak_for_an_outage(name: str, proxy: Proxy) -> None:
    """A job that may be skipped while another does it is not skipped when nobody does."""
    proxy.hang_up()

    for on_held in ("skip", lambda held: HttpResponse(status=423)):
        view = views.function(with_fenced_lock(name, on_held=on_held), never)
        assert visit(view, pk=7).status_code == 503


def test_a_view_that_does_not_respond_raises(name: str, client: Any) -> None:
    """For a project that has answers of its own."""
    view = views.function(with_fenced_lock(name, respond=False), never)
    with fenced_lock(name), pytest.raises(LockHeld, match=name):
        visit(view, pk=7)

    def body() -> None:
        expire(client, name)
        current_lease().ensure_held()

    view = views.function(with_fenced_lock(name, respond=False, atomic=False), body)
    with pytest.raises(LeaseLost, match=name):
        visit(view, pk=7)


def test_errors_that_have_no_answer_pass(name: str) -> None:
    """A fault of the code is a 500, as in any view."""
    with pytest.raises(InsideTransaction), transaction.atomic():
        visit(views.function(with_fenced_lock(name), never), pk=7)


def test_a_function_that_takes_no_request_first_or_second_is_no_view(name: str) -> None:
    """It raises, as functions do."""

    @with_fenced_lock(name)
    def notify(recipient: str, text: str, request: HttpRequest) -> None:
        never()

    with held_elsewhere(name), pytest.raises(LockHeld):
        notify("a", "b", RequestFactory().get("/"))


# ATOMIC_REQUESTS


def warm_up(resource: str) -> None:
    """Bring the scripts and the fence of `resource` into place."""
    with fenced_lock(resource, ttl=30):
        pass


@pytest.mark.parametrize("shape", views.OUTER, ids=lambda shape: shape.__name__)
def test_the_transaction_of_the_request_is_the_fenced_one(
    name: str, atomic_requests: Callable[..., None], shape: Any
) -> None:
    """Exactly one, without a savepoint, begun and ended while the lock is held."""
    atomic_requests("default")
    warm_up(name)

    view = shape(with_fenced_lock(name), lambda: Job.objects.create(note=name).pk)
    with serving(view, middleware=["tests.views.identified"], pk=7) as ask, journal() as sent:
        response = ask()

    assert response.status_code == 200
    assert sent == ["EVALSHA", "BEGIN", "WITH", "INSERT", "COMMIT", "EVALSHA"]


def test_a_lock_inside_of_the_requests_transaction_is_free_before_its_commit(
    name: str, atomic_requests: Callable[..., None], client: Any
) -> None:
    """The twin: what the decorator avoids. A plain lock of Redis does not help it."""
    atomic_requests("default")
    client.ping()

    def view(request: Any) -> Any:
        with client.lock(name, timeout=30):
            Job.objects.create(note=name)
        return HttpResponse()

    with serving(view) as ask, journal() as sent:
        ask()

    assert sent[-1] == "COMMIT"
    assert sent.index("EVALSHA") < sent.index("COMMIT")


@pytest.mark.parametrize("shape", views.OUTER, ids=lambda shape: shape.__name__)
def test_the_transaction_of_the_request_rolls_back_whole(
    name: str, atomic_requests: Callable[..., None], shape: Any
) -> None:
    """An exception goes on as it is, no transaction stays open, and the lock is free."""
    atomic_requests("default")

    def body() -> None:
        Job.objects.create(note=name)
        raise ZeroDivisionError

    view = shape(with_fenced_lock(name), body)
    with pytest.raises(ZeroDivisionError):
        visit(view, middleware=["tests.views.identified"], pk=7)

    assert not Job.objects.filter(note=name).exists()
    assert not in_transaction()
    assert is_free(name)


@pytest.mark.parametrize("shape", views.OUTER_API, ids=lambda shape: shape.__name__)
def test_an_exception_that_the_api_answers_rolls_back_the_request(
    name: str, atomic_requests: Callable[..., None], shape: Any
) -> None:
    """On each of the databases whose transaction it had."""
    atomic_requests("default", "other")

    def body() -> None:
        Job.objects.create(note=name)
        Job.objects.using("other").create(note=name)
        raise exceptions.PermissionDenied

    response = visit(shape(with_fenced_lock(name), body), pk=7)

    assert response.status_code == 403
    assert not Job.objects.filter(note=name).exists()
    assert not Job.objects.using("other").filter(note=name).exists()


def test_no_transaction_is_open_for_a_view_that_opens_its_own(
    name: str, atomic_requests: Callable[..., None]
) -> None:
    """One that takes the lease, or says atomic=False; the plain twin has one."""
    atomic_requests("default")

    @with_fenced_lock(name)
    def with_lease(request: Any, *, lease: Lease) -> Any:
        before = in_transaction()
        with lease.atomic():
            return JsonResponse([before, in_transaction()], safe=False)

    @with_fenced_lock(name, atomic=False)
    def without(request: Any) -> Any:
        return JsonResponse([in_transaction()], safe=False)

    def undecorated(request: Any) -> Any:
        return JsonResponse([in_transaction()], safe=False)

    assert visit(with_lease).json() == [False, True]
    assert visit(without).json() == [False]
    assert visit(undecorated).json() == [True]


@pytest.mark.parametrize("fenced", ["transaction", "lease"])
@pytest.mark.parametrize("fails", [True, False])
def test_the_request_has_a_transaction_on_another_database_too(
    name: str, client: Any, atomic_requests: Callable[..., None], fenced: str, fails: bool
) -> None:
    """Opened inside of the lock, committed or rolled back with the view's own end."""
    atomic_requests("default", "other")

    @with_fenced_lock(name, atomic=fenced == "transaction")
    def view(request: Any) -> Any:
        assert in_transaction("default") is (fenced == "transaction")
        assert in_transaction("other")
        assert client.exists(keys_of(name).lease)
        Job.objects.using("other").create(note=name)
        if fails:
            raise ZeroDivisionError
        return HttpResponse()

    with suppress(ZeroDivisionError), statements("other") as sql:
        visit(view)

    assert Job.objects.using("other").filter(note=name).exists() is not fails
    assert not in_transaction("other")
    assert not [statement for statement in sql if "SAVEPOINT" in statement]


def test_the_fence_of_a_database_without_atomic_requests_leaves_the_others_theirs(
    name: str, atomic_requests: Callable[..., None]
) -> None:
    """Its own transaction is the fenced one all the same."""
    atomic_requests("default")

    @with_fenced_lock(name, using="other")
    def view(request: Any) -> Any:
        assert in_transaction("default")
        assert in_transaction("other")
        Job.objects.create(note=name)
        Job.objects.using("other").create(note=name)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        visit(view)

    assert not Job.objects.filter(note=name).exists()
    assert not Job.objects.using("other").filter(note=name).exists()


def _above(lock: Lock, opt_out: Lock, body: Any) -> Any:
    return opt_out(lock(body))


def _below(lock: Lock, opt_out: Lock, body: Any) -> Any:
    return lock(opt_out(body))


def _above_login(lock: Lock, opt_out: Lock, body: Any) -> Any:
    return opt_out(csrf_exempt(lock(body)))


def _on_dispatch(*decorators: Lock, body: Any) -> Any:
    class Page(View):
        def get(self, request: Any) -> Any:
            return body(request)

    for decorator in decorators:
        Page = method_decorator(decorator, name="dispatch")(Page)
    return Page.as_view()


def _above_on_dispatch(lock: Lock, opt_out: Lock, body: Any) -> Any:
    return _on_dispatch(lock, opt_out, body=body)


def _below_on_dispatch(lock: Lock, opt_out: Lock, body: Any) -> Any:
    return _on_dispatch(opt_out, lock, body=body)


def _above_in_a_list(lock: Lock, opt_out: Lock, body: Any) -> Any:
    return _on_dispatch([opt_out, lock], body=body)  # type: ignore[arg-type]


def _below_in_a_list(lock: Lock, opt_out: Lock, body: Any) -> Any:
    return _on_dispatch([lock, opt_out], body=body)  # type: ignore[arg-type]


def _above_as_view(lock: Lock, opt_out: Lock, body: Any) -> Any:
    return opt_out(_on_dispatch(lock, body=body))


def _around_as_view(lock: Lock, opt_out: Lock, body: Any) -> Any:
    return lock(_on_dispatch(opt_out, body=body))


@pytest.mark.parametrize(
    "place",
    [
        _above,
        _below,
        _above_login,
        _above_on_dispatch,
        _below_in_a_list,
        _above_as_view,
        _around_as_view,
    ],
)
def test_non_atomic_requests_is_respected(
    name: str, atomic_requests: Callable[..., None], place: Any
) -> None:
    """Above and below, for one database and not for the other."""
    atomic_requests("default", "other")

    def body(request: Any) -> Any:
        opened = [in_transaction("default"), in_transaction("other")]
        return JsonResponse(opened, safe=False)

    def opt_out(view: Any) -> Any:
        return transaction.non_atomic_requests(using="other")(view)

    view = place(with_fenced_lock(name), opt_out, body)

    assert visit(view).json() == [True, False]


@pytest.mark.parametrize("place", [_below_on_dispatch, _above_in_a_list])
def test_where_django_has_not_seen_the_lock_the_cure_is_named(
    name: str, atomic_requests: Callable[..., None], place: Any
) -> None:
    """method_decorator() can hide what one of two decorators says: then all aliases are named."""
    atomic_requests("default", "other")

    def body(request: Any) -> Any:
        opened = [in_transaction("default"), in_transaction("other")]
        return JsonResponse(opened, safe=False)

    def one(view: Any) -> Any:
        return transaction.non_atomic_requests(using="other")(view)

    def both(view: Any) -> Any:
        return transaction.non_atomic_requests(one(view))

    with pytest.raises(InsideTransaction, match="@transaction.non_atomic_requests"):
        visit(place(with_fenced_lock(name), one, body))
    assert visit(place(with_fenced_lock(name), both, body)).json() == [True, False]


def test_a_deeper_lock_respects_what_its_view_says(
    name: str, atomic_requests: Callable[..., None]
) -> None:
    """The decorator of `get` opens no transaction that what the URL leads to does not want."""
    atomic_requests("default", "other")

    def body() -> Any:
        return [in_transaction("default"), in_transaction("other")]

    view = transaction.non_atomic_requests(views.method(with_fenced_lock(name), body))
    assert visit(view, pk=7).json() == [True, True]

    view = transaction.non_atomic_requests(using="other")(view)
    assert visit(view, pk=7).json() == [True, False]


@pytest.mark.parametrize("shape", views.INNER, ids=lambda shape: shape.__name__)
def test_a_lock_inside_of_the_requests_transaction_is_refused_with_the_cure(
    name: str, atomic_requests: Callable[..., None], shape: Any
) -> None:
    """Before anything is sent: the release would come before the commit."""
    atomic_requests("default")
    view = shape(with_fenced_lock(name), never)

    with counted_calls() as calls, pytest.raises(InsideTransaction) as caught:
        visit(view, pk=7)

    assert calls == []
    assert "`dispatch`" in str(caught.value)
    assert "@transaction.non_atomic_requests" in str(caught.value)


@pytest.mark.parametrize("shape", views.INNER, ids=lambda shape: shape.__name__)
def test_the_cure_cures(name: str, atomic_requests: Callable[..., None], shape: Any) -> None:
    """With non_atomic_requests on what the URL leads to, a deeper lock opens the transaction."""
    atomic_requests("default")
    warm_up(name)

    inner = shape(with_fenced_lock(name), lambda: Job.objects.create(note=name).pk)
    view = transaction.non_atomic_requests(inner)
    with serving(view, pk=7) as ask, journal() as sent:
        response = ask()

    assert response.status_code == 200
    assert sent == ["EVALSHA", "BEGIN", "WITH", "INSERT", "COMMIT", "EVALSHA"]


def test_an_action_is_locked_where_its_class_leaves_the_transaction_to_it(
    name: str, atomic_requests: Callable[..., None]
) -> None:
    """As the documentation says. Other actions of the class have no transaction then."""
    atomic_requests("default")

    @method_decorator(transaction.non_atomic_requests, name="dispatch")
    class Jobs(ViewSet):
        @action(detail=True)
        @with_fenced_lock(name + ":{pk}")
        def work(self, request: Any, pk: str) -> Any:
            return Response([current_lease().resource, in_transaction()])

        @action(detail=True)
        def look(self, request: Any, pk: str) -> Any:
            return Response(in_transaction())

    assert visit(Jobs.as_view({"get": "work"}), pk=7).json() == [f"{name}:7", True]
    assert visit(Jobs.as_view({"get": "look"}), pk=7).json() is False


@pytest.mark.parametrize(
    ("shape", "function"), [(views.dispatch, "Page.dispatch"), (views.method, "Page.get")]
)
def test_a_lease_names_the_class_whose_method_holds_it(
    name: str, shape: Any, function: str
) -> None:
    """And not the class of Django that `dispatch` comes from."""
    view = shape(with_fenced_lock(name), lambda: current_lease().holder.function)

    label = visit(view, pk=7).json()
    assert label.startswith("tests.views.")
    assert label.endswith(f".{function}")


def test_the_transaction_of_a_request_on_another_database_rolls_back_with_the_lock(
    name: str, atomic_requests: Callable[..., None], client: Any
) -> None:
    """Django has opened it before the lock, and sees a response where the error was."""
    atomic_requests("other")

    def body() -> Any:
        Job.objects.using("other").create(note=name)
        current_lease().ensure_held()
        expire(client, name)
        current_lease().ensure_held()

    for shape in views.INNER:
        response = visit(shape(with_fenced_lock(name), body), pk=7)

        assert (response.status_code, response.json()["code"]) == (409, "stale-token")
        assert not Job.objects.using("other").filter(note=name).exists()
        assert not in_transaction("other")


def twice_locked(name: str, body: Callable[[], Any]) -> Any:
    """Return a view under two locks, each with a fenced transaction in a database of its own."""

    @with_fenced_lock(name, using="other")
    @login_required
    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        Job.objects.create(note=name)
        Job.objects.using("other").create(note=name)
        return JsonResponse(body(), safe=False)

    return view


def written(name: str) -> list[bool]:
    return [Job.objects.using(alias).filter(note=name).exists() for alias in ("default", "other")]


@pytest.mark.parametrize("aliases", [(), ("default",), ("default", "other")], ids=str)
def test_locks_of_two_databases_are_one_request(
    name: str, atomic_requests: Callable[..., None], aliases: tuple[str, ...]
) -> None:
    """Each opens its own transaction, whatever ATOMIC_REQUESTS says."""
    atomic_requests(*aliases)

    view = twice_locked(name, lambda: [in_transaction("default"), in_transaction("other")])

    identified = ["tests.views.identified"]
    assert visit(view, middleware=identified).json() == [True, True]
    assert written(name) == [True, True]


def test_an_error_of_one_lock_rolls_back_the_transaction_of_another(name: str, client: Any) -> None:
    """The inner one raises through the outer one, which answers."""

    def body() -> None:
        expire(client, name)
        current_lease().ensure_held()

    response = visit(twice_locked(name, body), middleware=["tests.views.identified"])

    assert (response.status_code, response.json()["code"]) == (409, "stale-token")
    assert written(name) == [False, False]
    assert is_free(name)


def test_a_view_that_calls_another_locked_one_is_rolled_back_with_it(name: str) -> None:
    """The answer is that of the request: 409. The next request begins anew."""

    @with_fenced_lock(name)
    def inner(request: Any) -> Any:
        return JsonResponse("done", safe=False)

    @with_fenced_lock(f"{name}:outer", using="other")
    def outer(request: Any) -> Any:
        Job.objects.using("other").create(note=name)
        return inner(request)

    request = RequestFactory().get("/")
    with fenced_lock(name):
        assert outer(request).status_code == 409
        assert inner(request).status_code == 409
    assert written(name) == [False, False]

    assert outer(request).status_code == 200
    assert written(name) == [False, True]


def test_a_lock_in_the_transaction_of_another_one_says_whose_it_is(name: str) -> None:
    """The settings have nothing to do with it."""
    with (
        fenced_atomic(name),
        pytest.raises(InsideTransaction, match=f"fenced by the lease on '{name}'") as caught,
    ):
        fenced_lock(f"{name}:inner").acquire()

    assert "ATOMIC_REQUESTS" not in str(caught.value)


@pytest.mark.django_db(transaction=False, databases=["default", "other"])
@pytest.mark.parametrize("locked", [True, False], ids=["fenced", "unfenced"])
def test_a_test_case_sees_the_other_databases_rolled_back_too(
    name: str, atomic_requests: Callable[..., None], locked: bool
) -> None:
    """The transaction around a test does not stand for the request's own."""
    atomic_requests("default", "other")

    def view(request: Any) -> Any:
        Job.objects.create(note=name)
        Job.objects.using("other").create(note=name)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        visit(with_fenced_lock(name)(view) if locked else view)

    assert not Job.objects.filter(note=name).exists()
    assert not Job.objects.using("other").filter(note=name).exists()


# Streams


def sent_by_wsgi(view: Any, middleware: Sequence[str] = ()) -> Any:
    """Return what a WSGI server iterates over and closes: Django's client would close twice."""
    environ = RequestFactory().get("/", headers={"accept-encoding": "gzip"}).environ
    with serving(view, middleware=middleware):
        return WSGIHandler()(environ | {"wsgi.file_wrapper": FileWrapper}, lambda *_: None)


Content = Callable[[Iterator[bytes]], Any]


def test_a_stream_keeps_the_lease_until_it_ends(name: str) -> None:
    """Who asks in between is refused, who asks afterwards is not."""

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        return StreamingHttpResponse(iter([b"1", b"2", b"3"]))

    first = visit(view)
    chunks = iter(first)
    assert next(chunks) == b"1"
    assert visit(view).status_code == 409
    assert next(chunks) == b"2"
    assert visit(view).status_code == 409
    assert list(chunks) == [b"3"]

    again = visit(view)
    assert (again.status_code, again.getvalue()) == (200, b"123")
    assert is_free(name)


def test_a_block_in_a_view_does_not_keep_the_lease_of_a_stream(name: str) -> None:
    """The twin: the lock is free before the first chunk."""

    def view(request: Any) -> Any:
        with fenced_lock(name):
            return StreamingHttpResponse(iter([b"1"]))

    first = visit(view)
    assert visit(view).getvalue() == b"1"
    assert first.getvalue() == b"1"


def test_a_stream_that_is_kept_does_not_respond_to_respond(name: str) -> None:
    """respond=False is about errors."""

    @with_fenced_lock(name, respond=False)
    def view(request: Any) -> Any:
        return StreamingHttpResponse(iter([b"1"]))

    response = visit(view)
    assert not is_free(name)
    response.close()
    assert is_free(name)


def test_a_file_keeps_the_lease_until_it_is_closed(name: str, tmp_path: Path) -> None:
    """The file too is closed then."""
    file = tmp_path / "report"
    file.write_bytes(b"x" * 10_000)
    opened = []

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        opened.append(file.open("rb"))
        return FileResponse(opened[-1])

    first = visit(view)
    assert visit(view).status_code == 409
    assert len(first.getvalue()) == 10_000
    assert opened[0].closed
    assert is_free(name)


@pytest.mark.parametrize("aborted", [True, False])
def test_a_file_that_the_server_sends_itself_keeps_the_lease(
    name: str, tmp_path: Path, aborted: bool
) -> None:
    """A WSGI server's file wrapper closes the file, and with it the response."""
    file = tmp_path / "report"
    file.write_bytes(b"report")

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        return FileResponse(file.open("rb"))

    sent = sent_by_wsgi(view)
    assert isinstance(sent, FileWrapper)
    assert not is_free(name)
    if not aborted:
        assert b"".join(sent) == b"report"
        assert not is_free(name)
    sent.close()

    assert is_free(name)


def in_a_class(generator: Iterator[bytes]) -> Any:
    """Return an iterable that has no close(), as an exporter may be one."""

    class Rows:
        def __iter__(self) -> Iterator[bytes]:
            yield from generator

    return Rows()


CONTENTS: dict[str, Content] = {
    "generator": lambda generator: generator,
    "generator expression": lambda generator: (line.upper() for line in generator),
    "map": lambda generator: map(bytes.upper, generator),
    "chain": lambda generator: itertools.chain([b"head"], generator),
    "class": in_a_class,
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("writing", [True, False], ids=["writing", "resting"])
@pytest.mark.parametrize(
    "middleware", [[], ["django.middleware.gzip.GZipMiddleware"]], ids=["plain", "gzip"]
)
def test_a_client_that_goes_away_frees_the_lock(
    name: str, content: str, middleware: list[str], writing: bool
) -> None:
    """A generator that is suspended in its fenced transaction is rolled back."""
    reached = []

    @with_fenced_lock(name)
    def view(request: Any, *, lease: Lease) -> Any:
        def rows() -> Iterator[bytes]:
            with lease.atomic() if writing else nullcontext():
                Job.objects.create(note=name)
                reached.append(True)
                yield os.urandom(300_000)  # does not fit into what the compressor holds back
                never()

        return StreamingHttpResponse(CONTENTS[content](rows()))

    response = sent_by_wsgi(view, middleware)
    assert ("Content-Encoding" in response) == bool(middleware)
    chunks = iter(response)
    while not reached:
        next(chunks)
    assert in_transaction() is writing
    response.close()  # by the server, which still has the iterator
    del chunks, response

    assert not in_transaction()
    assert Job.objects.filter(note=name).exists() is not writing
    assert is_free(name)


def test_a_client_that_goes_away_before_the_first_chunk_frees_the_lock(name: str) -> None:
    """The generator has not even begun."""

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        return StreamingHttpResponse(never() for _ in "x")  # type: ignore[misc]

    visit(view).close()

    assert is_free(name)


def test_a_stream_that_fails_frees_the_lock(name: str) -> None:
    """The server closes the response of a generator that raises."""

    @with_fenced_lock(name)
    def view(request: Any, *, lease: Lease) -> Any:
        def rows() -> Iterator[bytes]:
            with lease.atomic():
                Job.objects.create(note=name)
                yield b"1"
                raise ZeroDivisionError

        return StreamingHttpResponse(rows())

    with pytest.raises(ZeroDivisionError):
        visit(view).getvalue()

    assert not Job.objects.filter(note=name).exists()
    assert is_free(name)


def test_a_stream_commits_what_it_has_written(name: str) -> None:
    """Under the lease that it keeps, in a transaction for each chunk say."""

    @with_fenced_lock(name)
    def view(request: Any, *, lease: Lease) -> Any:
        def rows() -> Iterator[bytes]:
            for number in (1, 2):
                with lease.atomic():
                    Job.objects.create(note=name, amount=number)
                yield b"%d" % number

        return StreamingHttpResponse(rows())

    assert visit(view).getvalue() == b"12"
    assert Job.objects.filter(note=name).count() == 2


def test_a_fenced_write_after_the_end_of_the_stream_is_refused(name: str) -> None:
    """A map() cannot be closed, and what it reads goes on: without a lease."""
    generators = []

    @with_fenced_lock(name)
    def view(request: Any, *, lease: Lease) -> Any:
        def rows() -> Iterator[bytes]:
            yield b"1"
            with lease.atomic():
                never()

        generators.append(rows())
        return StreamingHttpResponse(map(bytes.upper, generators[0]))

    response = visit(view)
    assert next(iter(response)) == b"1"
    response.close()

    assert is_free(name)
    with pytest.raises(LeaseLost, match="it was released"):
        next(generators[0])


def test_an_overtaken_stream_writes_nothing_more(name: str, client: Any) -> None:
    """Its next fenced transaction is refused, and its end frees nobody else's lease."""
    successors = []

    @with_fenced_lock(name)
    def view(request: Any, *, lease: Lease) -> Any:
        def rows() -> Iterator[bytes]:
            yield b"1"
            with lease.atomic():
                never()

        return StreamingHttpResponse(rows())

    chunks = iter(visit(view))
    next(chunks)
    successors.extend(in_threads(lambda: taken_over(fenced_lock(name), client)))

    with pytest.raises(StaleToken):
        next(chunks)
    assert not is_free(name)
    assert successors[0].release() is True


def test_the_lease_of_a_stream_is_held_by_no_flow(name: str, job: Job) -> None:
    """The same thread may serve another request that saves the row without a lock."""

    @with_fenced_lock((Job, job.pk))
    def stream(request: Any) -> Any:
        return StreamingHttpResponse(iter([b"1"]))

    @with_fenced_lock((Job, job.pk), respond=False)
    def ask(request: Any) -> Any:
        never()

    def save(request: Any) -> Any:
        row = Job.objects.get(pk=job.pk)
        row.note = name
        row.save()
        return HttpResponse()

    streaming = visit(stream)

    with pytest.raises(LookupError):
        current_lease()
    with pytest.raises(LockHeld) as caught:
        visit(ask)
    assert "this very thread" not in str(caught.value)
    assert visit(save).status_code == 200
    assert Job.objects.get(pk=job.pk).note == name
    streaming.close()


def test_a_body_that_fails_after_it_has_made_the_stream_frees_the_lock(name: str) -> None:
    """In its last lines, or at its commit."""

    @with_fenced_lock(name)
    def view(request: Any, how: str) -> Any:
        response = StreamingHttpResponse(iter([b"1"]))
        if how == "raises":
            raise ZeroDivisionError
        Entry.objects.create(job_id=-1)
        return response

    with pytest.raises(ZeroDivisionError):
        visit(view, how="raises")
    assert is_free(name)

    with pytest.raises(IntegrityError):
        visit(view, how="cannot be committed")
    assert is_free(name)


def test_closing_a_stream_again_frees_nobody_elses_lock(name: str) -> None:
    """A server may close twice."""

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        return StreamingHttpResponse(iter([b"1"]))

    response = visit(view)
    end = response._resource_closers[0]
    response.close()
    with fenced_lock(name):
        response.close()
        end()
        assert not is_free(name)


def test_streams_of_two_locks_keep_both(name: str) -> None:
    """One decorator inside of the other."""

    @with_fenced_lock(name, atomic=False)
    @with_fenced_lock(name + ":inner", atomic=False)
    def view(request: Any) -> Any:
        return StreamingHttpResponse(iter([b"1"]))

    response = visit(view)
    assert not is_free(name)
    assert not is_free(name + ":inner")

    response.close()
    assert is_free(name)
    assert is_free(name + ":inner")


def test_a_stream_of_an_asynchronous_view_keeps_the_lease(name: str) -> None:
    """It is an asynchronous generator, which the event loop reads."""

    @with_fenced_lock(name)
    async def view(request: Any, *, lease: Lease) -> Any:
        async def rows() -> AsyncIterator[bytes]:
            yield b"1"
            yield b"2"

        return StreamingHttpResponse(rows())

    async def main() -> list[Any]:
        first = await AsyncClient().get("/")
        chunks = aiter(first)
        seen = [await anext(chunks), (await AsyncClient().get("/")).status_code]
        seen.extend([chunk async for chunk in chunks])
        first.close()
        again = await AsyncClient().get("/")
        again.close()
        return [*seen, again.status_code]

    with serving(view):
        assert asyncio.run(main()) == [b"1", 409, b"2", 200]
    assert is_free(name)


def test_another_request_may_end_the_last_dropped_stream_meanwhile() -> None:
    """The threads of a server share what was dropped: between the look and the taking it goes."""

    class TakenMeanwhile(deque[Any]):
        def __len__(self) -> int:
            return super().__len__() or 1

    ended: list[int] = []
    dropped = TakenMeanwhile([functools.partial(ended.append, number) for number in range(3)])

    with mock.patch.object(http, "_dropped", dropped):
        http.end_dropped_streams()

    assert ended == [0, 1, 2]


def test_a_stream_that_a_middleware_replaces_frees_the_lock(name: str, tmp_path: Path) -> None:
    """Django does not close what it does not send: whoever drops it ends the lease."""
    file = tmp_path / "report"
    file.write_bytes(b"report")

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        response = StreamingHttpResponse(iter([b"1"]))
        response["ETag"] = '"7"'
        return response

    conditional = ["django.middleware.http.ConditionalGetMiddleware"]
    with serving(view, middleware=conditional) as ask:
        response = ask(**{"if-none-match": '"7"'})

    assert response.status_code == 304
    response.close()
    assert is_free(name)
