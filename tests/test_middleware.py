"""FencingMiddleware: the same answers for errors that any view raises."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.http import Http404, HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient
from rest_framework.decorators import api_view

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import (
    FencingError,
    InsideTransaction,
    InvalidResource,
    LeaseLost,
    LockHeld,
    StaleToken,
    StoreUnavailable,
)
from django_fencing.locks import fenced_atomic, fenced_lock
from tests.helpers import closing, committing, expire, held_elsewhere, in_threads, taken_over
from tests.proxy import Proxy
from tests.shop.models import Job
from tests.views import serving, visit

ROOT = Path(__file__).parents[1]
FENCING = ["django_fencing.middleware.FencingMiddleware"]
PROBLEM = "application/problem+json"

pytestmark = committing("default")

Visit = Callable[..., Any]


def visit_async(work: Callable[[], Any], accept: str = "*/*", *, middleware: Sequence[str]) -> Any:
    """Run `work` in an asynchronous view, and return the response."""

    async def view(request: Any) -> Any:
        await sync_to_async(closing)(work)
        return HttpResponse()

    async def main() -> Any:
        return await AsyncClient().get("/", headers={"accept": accept})

    with serving(view, middleware=middleware):
        return asyncio.run(main())


def visit_sync(work: Callable[[], Any], accept: str = "*/*", *, middleware: Sequence[str]) -> Any:
    """Run `work` in a plain view, and return the response."""

    def view(request: Any) -> Any:
        work()
        return HttpResponse()

    return visit(view, accept, middleware=middleware)


def visit_api(work: Callable[[], Any], accept: str = "*/*", *, middleware: Sequence[str]) -> Any:
    """Run `work` in a view of Django REST framework, and return the response."""

    @api_view(["GET"])
    def view(request: Any) -> Any:
        work()
        return HttpResponse()

    return visit(view, accept, middleware=middleware)


in_any_view = pytest.mark.parametrize("ask", [visit_sync, visit_async, visit_api])


@in_any_view
def test_a_lock_that_is_held_is_a_409(name: str, ask: Visit) -> None:
    """As a decorated view answers it."""

    def work() -> None:
        with fenced_lock(name, ttl=8):
            pytest.fail("The body ran.")

    with held_elsewhere(name, ttl=8):
        response = ask(work, middleware=FENCING)

    assert (response.status_code, response["Content-Type"]) == (409, PROBLEM)
    assert response.json()["code"] == "lock-held"
    assert 8 <= int(response["Retry-After"]) <= 10
    assert response["Vary"].split(", ")[0] == "Accept"
    assert name not in response.serialize().decode()


@in_any_view
def test_a_stale_token_is_a_409_that_says_so(name: str, client: Any, ask: Visit) -> None:
    """And nobody is told to try again."""
    successors = []

    def work() -> None:
        with fenced_lock(name) as lease:
            successors.extend(in_threads(lambda: taken_over(fenced_lock(name), client)))
            with lease.atomic():
                pytest.fail("The body ran.")

    response = ask(work, middleware=FENCING)

    assert (response.status_code, response.json()["code"]) == (409, "stale-token")
    assert "Retry-After" not in response
    assert successors[0].release() is True


@in_any_view
def test_a_lost_lease_is_a_409_that_says_so(name: str, client: Any, ask: Visit) -> None:
    """Found out by asking."""

    def work() -> None:
        with fenced_lock(name) as lease:
            expire(client, name)
            lease.ensure_held()

    response = ask(work, middleware=FENCING)

    assert (response.status_code, response.json()["code"]) == (409, "stale-token")
    assert "Retry-After" not in response


@in_any_view
def test_an_outage_is_a_503(name: str, proxy: Proxy, ask: Visit) -> None:
    """The body of the lock never ran."""
    proxy.hang_up()

    def work() -> None:
        with fenced_atomic(name):
            pytest.fail("The body ran.")

    response = ask(work, middleware=FENCING)

    assert (response.status_code, response.json()["code"]) == (503, "store-unavailable")
    assert 5 <= int(response["Retry-After"]) <= 6


@pytest.mark.parametrize("ask", [visit_sync, visit_async])
def test_a_browser_gets_the_page(name: str, ask: Visit) -> None:
    """The project's context processors run in an asynchronous view too."""

    def work() -> None:
        fenced_lock(name).acquire()

    with fenced_lock(name):
        response = ask(work, "text/html", middleware=FENCING)

    assert (response.status_code, response["Content-Type"]) == (409, "text/html; charset=utf-8")
    assert "409 lock-held" in response.content.decode()


@in_any_view
def test_without_the_middleware_the_errors_pass(name: str, ask: Visit) -> None:
    """The twin: a 500."""

    def work() -> None:
        fenced_lock(name).acquire()

    with fenced_lock(name), pytest.raises(LockHeld, match=name):
        ask(work, middleware=())


@in_any_view
@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("mine"),
        InsideTransaction("mine", resource="a"),
        InvalidResource("mine"),
        FencingError("mine", resource="a"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_exceptions_pass(ask: Visit, error: Exception) -> None:
    """Those of the package too that are faults of the code."""

    def work() -> None:
        raise error

    with pytest.raises(type(error), match="mine"):
        ask(work, middleware=FENCING)


@pytest.mark.parametrize("ask", [visit_sync, visit_async])
def test_a_404_stays_a_404(ask: Visit) -> None:
    """What Django answers itself is not touched."""

    def work() -> None:
        raise Http404

    assert ask(work, middleware=FENCING).status_code == 404


@pytest.mark.parametrize(
    "middleware",
    [
        [*FENCING, "django.middleware.common.CommonMiddleware"],
        ["django.middleware.common.CommonMiddleware", *FENCING],
        [*FENCING, "tests.test_middleware.asynchronous"],
        ["tests.test_middleware.asynchronous", *FENCING],
    ],
)
@pytest.mark.parametrize("ask", [visit_sync, visit_async])
def test_it_may_stand_anywhere(name: str, ask: Visit, middleware: list[str]) -> None:
    """Beside middleware of either kind."""

    def work() -> None:
        fenced_lock(name).acquire()

    with fenced_lock(name):
        assert ask(work, middleware=middleware).status_code == 409


def asynchronous(get_response: Callable[..., Any]) -> Callable[..., Any]:
    """A middleware that only asynchronous handlers can call as it is."""

    async def middleware(request: Any) -> Any:
        return await get_response(request)

    return middleware


asynchronous.async_capable = True  # type: ignore[attr-defined]
asynchronous.sync_capable = False  # type: ignore[attr-defined]


def test_a_decorated_view_that_does_not_respond_is_answered_here(name: str) -> None:
    """What one of them lets pass is the other's."""

    @with_fenced_lock(name, respond=False)
    def view(request: Any) -> Any:
        pytest.fail("The body ran.")

    with fenced_lock(name):
        assert visit(view, middleware=FENCING).status_code == 409


def test_an_error_under_atomic_requests_rolls_the_request_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer comes after the end of the transaction, and is no success of it."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)

    def work() -> None:
        Job.objects.create(note=name)
        raise LockHeld("mine", resource="a", retry_after=1)

    assert visit_sync(work, middleware=FENCING).status_code == 409
    assert not Job.objects.filter(note=name).exists()


def test_an_error_while_the_response_is_rendered_is_answered(name: str) -> None:
    """A template may call something that locks."""

    def work() -> None:
        fenced_lock(name).acquire()

    def view(request: Any) -> Any:
        template = engines["django"].from_string("{{ work }}")
        return TemplateResponse(request, template, {"work": work})

    with fenced_lock(name):
        assert visit(view, middleware=FENCING).status_code == 409


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LockHeld("a", resource="a", retry_after=None), 409),
        (LockHeld("a", resource="a", retry_after=0), 409),
        (LeaseLost("a", resource="a"), 409),
        (StaleToken("a", resource="a"), 409),
        (StoreUnavailable("a", resource="a"), 503),
    ],
)
def test_errors_of_ones_own_making_are_answered_too(error: Exception, status: int) -> None:
    """A test of the project's, or another store, may leave out what it does not know."""

    def work() -> None:
        raise error

    response = visit_sync(work, middleware=FENCING)

    assert response.status_code == status
    assert isinstance(error, LeaseLost) or int(response["Retry-After"]) >= 1


BARE_PROJECT = """
import sys
import django
from django.conf import settings
from django.http import HttpResponse
from django.urls import path

def view(request):
    from django_fencing.exceptions import StoreUnavailable
    raise StoreUnavailable("a", resource="a")

settings.configure(
    ALLOWED_HOSTS=["*"],
    CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://"}},
    INSTALLED_APPS=["django_fencing"],
    MIDDLEWARE=["django_fencing.middleware.FencingMiddleware"],
    ROOT_URLCONF=(path("", view),),
)
django.setup()

from django.test import Client
from django.core.management import call_command

call_command("check")
for accept in ("*/*", "text/html"):
    response = Client().get("/", headers={"accept": accept})
    print(response.status_code, response["Content-Type"], response.json()["code"])
print([name for name in sys.modules if name.startswith("django.contrib.")])
"""


def test_a_project_without_any_other_app_needs_nothing_else() -> None:
    """No sessions, users, static files or templates, and no other middleware."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", BARE_PROJECT]

    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert run.returncode == 0, run.stderr
    answer = f"503 {PROBLEM} store-unavailable"
    lines = run.stdout.splitlines()
    assert lines[-3:-1] == [answer, answer]
    assert "sessions" not in lines[-1]
    assert "staticfiles" not in lines[-1]
    assert "django.contrib.auth.models" not in lines[-1]


@pytest.mark.parametrize("respond", [True, False])
def test_a_row_that_does_not_exist_is_a_404(respond: bool) -> None:
    """Whether it is a view's own lock that names it, or one in its body."""

    @with_fenced_lock((Job, 0), respond=respond)
    def view(request: Any) -> Any:
        pytest.fail("The body ran.")

    def bare(request: Any) -> Any:
        fenced_lock((Job, 0)).acquire()

    assert visit(view, middleware=FENCING).status_code == 404
    assert visit(bare, middleware=FENCING).status_code == 404
