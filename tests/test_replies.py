"""once= on views: what is compared of a request, and what comes back of a response."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection, connections, transaction
from django.http import (
    FileResponse,
    Http404,
    HttpResponse,
    HttpResponseNotModified,
    HttpResponseRedirect,
    JsonResponse,
    StreamingHttpResponse,
)
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework import exceptions
from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.views import APIView

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import InvalidResource, OnceMismatch
from django_fencing.leases import current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import OnceRecord
from django_fencing.once import once, once_result
from tests.helpers import committing, counted_calls, held_elsewhere, started, statements
from tests.shop.models import Entry

JSON = "application/json"
PROBLEM = "application/problem+json"
FORM = "application/x-www-form-urlencoded"

pytestmark = committing("default", "other")

Body = Callable[..., Any]

request_for = RequestFactory().generic


@pytest.fixture
def key(name: str) -> str:
    """Return the key of work that nobody else does."""
    return f"key:{name}"


@pytest.fixture
def atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch ATOMIC_REQUESTS on."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)


@contextmanager
def site(view: Any, *, middleware: Any = ()) -> Iterator[Client]:
    """Let a site have `view` alone, and yield a client of it."""
    with override_settings(ROOT_URLCONF=(path("", view),), MIDDLEWARE=middleware):
        yield Client(raise_request_exception=True)


def write() -> None:
    """Have an effect."""
    Entry.objects.create()


def effects() -> int:
    return Entry.objects.count()


def bodies(*responses: Any) -> Body:
    """Return the body of a view that has an effect, and another response at each call."""
    left = list(responses)

    def body(request: Any) -> Any:
        write()
        return left.pop(0)

    return body


def numbered(request: Any) -> HttpResponse:
    """Have an effect, and say which one it was."""
    write()
    return JsonResponse({"number": effects()}, status=201)


def assert_same(first: Any, second: Any) -> None:
    """Check that a client cannot tell two responses apart, but for cookies."""
    assert (second.status_code, second.reason_phrase) == (first.status_code, first.reason_phrase)
    assert second.content == first.content
    assert dict(second.items()) == dict(first.items())


def assert_refused(response: Any) -> None:
    """Check the answer to a request that asks for something else."""
    assert (response.status_code, response["Content-Type"]) == (422, PROBLEM)
    problem = json.loads(response.content)
    assert (problem["code"], problem["status"]) == ("once-mismatch", 422)
    assert "Retry-After" not in response


# Responses


def with_header() -> HttpResponse:
    response = HttpResponse(b"\x00\xff\xfe binary", content_type="image/png", status=202)
    response["ETag"] = '"7"'
    response["X-Text"] = "ü ☃"
    return response


RESPONSES: dict[str, Callable[[], HttpResponse]] = {
    "json": lambda: JsonResponse({"b": 1, "a": 2}, status=201),
    "binary": with_header,
    "every byte": lambda: HttpResponse(bytes(range(256)) * 100, content_type="a/b; charset=x"),
    "empty": lambda: HttpResponse(status=204),
    "text": lambda: HttpResponse("ü\0", charset="latin-1"),
    "parts": lambda: HttpResponse(iter(["a", b"b"])),
    "reason": lambda: HttpResponse(status=299, reason="Fine"),
    "400": lambda: HttpResponse("no", status=400),
    "404": lambda: HttpResponse("no", status=404),
    "500": lambda: HttpResponse("no", status=500),
    "redirect": lambda: HttpResponseRedirect("/somewhere?a=1"),
}


@pytest.mark.parametrize("kind", RESPONSES)
def test_a_response_comes_back_as_it_was(name: str, key: str, kind: str) -> None:
    """Status, reason, headers, and each byte of the content. The work is done once."""
    body = bodies(RESPONSES[kind]())
    view = with_fenced_lock(name, once=key)(body)

    first, second, third = (view(request_for("POST", "/", b"x")) for _ in range(3))

    assert_same(first, RESPONSES[kind]())
    assert_same(first, second)
    assert_same(first, third)
    assert effects() == 1


@pytest.mark.parametrize("kind", ["deleted", "304"])
def test_a_header_that_a_response_lacks_is_not_added(name: str, key: str, kind: str) -> None:
    """As the Content-Type, which Django gives to each new response."""
    response = HttpResponseNotModified() if kind == "304" else HttpResponse(status=204)
    if kind == "deleted":
        del response["Content-Type"]
    view = with_fenced_lock(name, once=key)(bodies(response))

    assert_same(*(view(request_for("POST", "/")) for _ in range(2)))


def test_cookies_are_set_by_the_first_response_alone(name: str, key: str) -> None:
    """They are nobody else's, and are not kept."""

    def view(request: Any) -> HttpResponse:
        response = HttpResponse("text")
        response.set_cookie("session", "a secret")
        return response

    view = with_fenced_lock(name, once=key)(view)
    first, second = view(request_for("POST", "/")), view(request_for("POST", "/"))

    assert first.cookies["session"].value == "a secret"
    assert not second.cookies
    assert_same(first, second)
    assert "secret" not in OnceRecord.objects.get().result
    assert "secret" not in str(base64.b64decode(once_result(key)["content"]))


def test_the_first_response_is_the_views_own(name: str, key: str) -> None:
    """With its class and what else it has."""
    response = JsonResponse({})
    view = with_fenced_lock(name, once=key)(lambda request: response)

    assert view(request_for("POST", "/")) is response
    assert type(view(request_for("POST", "/"))) is HttpResponse


def test_a_template_response_is_rendered_before_the_commit(name: str, key: str) -> None:
    """What its context reads is read once, under the lock."""
    template = engines["django"].from_string("{{ count }} & {{ token }}")

    def view(request: Any) -> Any:
        write()
        context = {"count": effects, "token": lambda: current_lease().token}
        return TemplateResponse(request, template, context, status=201)

    with site(with_fenced_lock(name, once=key)(view)) as client:
        first, second = client.post("/"), client.post("/")

    assert (first.content, first.status_code) == (b"1 & 1", 201)
    assert_same(first, second)


def file() -> Any:
    return FileResponse(BytesIO(b"file"))


def stream() -> Any:
    return StreamingHttpResponse(iter(["part"]))


@pytest.mark.parametrize("make", [file, stream, str, dict], ids=lambda make: make.__name__)
def test_what_has_no_content_cannot_be_kept(
    name: str, key: str, client: Any, make: Callable[[], Any]
) -> None:
    """A stream, or no response at all: nothing of the work is left, and the lock is free."""
    response = make()
    view = with_fenced_lock(name, once=key)(bodies(response, HttpResponse("second")))

    with pytest.raises(TypeError, match="once="):
        view(request_for("POST", "/"))
    if hasattr(response, "close"):
        response.close()
    assert (effects(), OnceRecord.objects.count()) == (0, 0)
    assert view(request_for("POST", "/")).content == b"second"


def test_a_view_that_raises_has_not_been_done(name: str, key: str) -> None:
    """Also by Http404, which is no response of the view."""

    def missing(request: Any) -> Any:
        write()
        raise Http404

    with site(with_fenced_lock(name, once=key)(lambda request: next(views)(request))) as client:
        views = iter([missing, numbered])
        assert client.post("/").status_code == 404
        assert client.post("/").json() == client.post("/").json() == {"number": 1}


# Requests


def outcomes(name: str, key: str, first: Any, second: Any) -> list[int]:
    """Return the statuses of two requests."""
    view = with_fenced_lock(name, once=key)(numbered)
    return [view(first).status_code, view(second).status_code]


def request_with(
    body: Any = b"", method: str = "POST", url: str = "/", content_type: str = JSON
) -> Any:
    return request_for(method, url, body, content_type=content_type)


SAME = [
    (request_with('{"a": 1, "b": [1, {"c": 2, "d": 3}]}'), '{"b":[1,{"d":3,"c":2}],"a":1}'),
    (request_with('{"text": "\\u00fc"}'), '{"text": "ü"}'),
    (request_with("no json"), "no json"),
    (request_with(b"\xff\x00"), b"\xff\x00"),
    (request_with(""), ""),
    (request_with("NaN"), "NaN"),
    (request_with("9" * 5000), "9" * 5000),
    (request_with("[" * 100_000), "[" * 100_000),
]


@pytest.mark.parametrize("number", range(len(SAME)))
def test_a_request_with_the_same_body_is_a_replay(name: str, key: str, number: int) -> None:
    """In JSON the order of members and the spelling do not matter; other bodies are bytes."""
    first, body = SAME[number]

    assert outcomes(name, key, first, request_with(body)) == [201, 201]
    assert effects() == 1


def test_a_number_beyond_all_floats_is_a_body_like_any_other(name: str, key: str) -> None:
    """A client can send it."""
    first, second = (request_with('{"amount": 1e400}') for _ in range(2))

    assert outcomes(name, key, first, second) == [201, 201]


def test_no_depth_of_a_body_is_an_error(name: str, key: str) -> None:
    """A client can send it."""
    view = with_fenced_lock(name, once=lambda request: f"{key}:{len(request.body)}")(numbered)

    for depth in range(800, 1000):
        assert view(request_with("[" * depth + "]" * depth)).status_code == 201


DIFFERENT = {
    "a value": (request_with('{"a": 1}'), request_with('{"a": 2}')),
    "a type": (request_with('{"a": 1}'), request_with('{"a": "1"}')),
    "an order": (request_with("[1, 2]"), request_with("[2, 1]")),
    "a member": (request_with('{"a": 1}'), request_with('{"a": 1, "b": null}')),
    "no body": (request_with("null"), request_with("")),
    "bytes": (request_with("text"), request_with("texts")),
    "bytes of json": (request_with("{}"), request_with("{")),
    "PUT": (request_with("{}"), request_with("{}", "PUT")),
    "DELETE": (request_with(), request_with(method="DELETE")),
    "path": (request_with("{}", url="/a"), request_with("{}", url="/b")),
    "query": (request_with("{}", url="/?a=1"), request_with("{}", url="/?a=2")),
    "no query": (request_with("{}", url="/?a=1"), request_with("{}")),
    "query twice": (request_with("{}", url="/?a=1"), request_with("{}", url="/?a=1&a=1")),
    "form": (
        request_with("a=1", content_type=FORM),
        request_with("a=2", content_type=FORM),
    ),
    "form twice": (
        request_with("a=1", content_type=FORM),
        request_with("a=1&a=1", content_type=FORM),
    ),
    "order in a form": (
        request_with("a=1&a=2", content_type=FORM),
        request_with("a=2&a=1", content_type=FORM),
    ),
    "form as json": (
        request_with("a=1", content_type=FORM),
        request_with('{"a": ["1"]}'),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_request_for_something_else_is_answered_by_422(name: str, key: str, what: str) -> None:
    """As a problem; the view does not run, and the first outcome stands."""
    view = with_fenced_lock(name, once=key)(numbered)
    first, other = DIFFERENT[what]

    kept = view(first)
    assert_refused(view(other))

    assert effects() == 1
    assert_same(kept, view(first))


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
@pytest.mark.parametrize("content_type", [FORM, MULTIPART_CONTENT])
def test_a_form_that_is_not_posted_is_compared_too(
    name: str, key: str, method: str, content_type: str
) -> None:
    """As Django REST framework takes it."""

    def request(amount: str) -> Any:
        body: Any = f"amount={amount}"
        if content_type is MULTIPART_CONTENT:
            body = encode_multipart(BOUNDARY, {"amount": amount})
        return request_with(body, method, content_type=content_type)

    assert outcomes(name, key, request("10"), request("99")) == [201, 422]


def test_the_order_of_a_query_does_not_matter(name: str, key: str) -> None:
    """As little as that of a form."""
    first, second = request_with("{}", url="/?a=1&b=2"), request_with("{}", url="/?b=2&a=1")
    assert outcomes(name, key, first, second) == [201, 201]


def test_headers_do_not_matter(name: str, key: str) -> None:
    """Two tries of one client may differ in them."""
    first = request_for("POST", "/", "{}", headers={"x-try": "1"})
    second = request_for("POST", "/", "{}", headers={"x-try": "2"})
    assert outcomes(name, key, first, second) == [201, 201]


@pytest.mark.parametrize("multipart", [False, True])
def test_a_form_with_another_csrf_token_is_a_replay(name: str, key: str, multipart: bool) -> None:
    """Django puts another one into each page."""

    def request(**values: str) -> Any:
        if multipart:
            return RequestFactory().post("/", values)
        body = "&".join(f"{name}={value}" for name, value in values.items())
        return request_with(body, content_type=FORM)

    view = with_fenced_lock(name, once=key)(numbered)
    first = view(request(a="1", csrfmiddlewaretoken="x"))
    assert_same(first, view(request(csrfmiddlewaretoken="y", a="1")))
    assert_same(first, view(request(a="1")))
    assert_refused(view(request(a="2", csrfmiddlewaretoken="x")))


@pytest.mark.parametrize("method", ["get", "head", "options"])
def test_a_safe_method_does_no_work(name: str, key: str, method: str) -> None:
    """It runs the view under the lock each time, and neither takes the key nor gets a result."""
    view = with_fenced_lock(name, once=key)(numbered)
    look = getattr(RequestFactory(), method)

    contents = [view(look("/")).content, view(look("/")).content]
    done = view(RequestFactory().post("/"))

    assert contents[0] != contents[1]
    assert view(look("/")).content not in (*contents, done.content)
    assert_same(done, view(RequestFactory().post("/")))


@pytest.mark.parametrize("size", [10, 3_000_000], ids=["in memory", "on disk"])
def test_uploaded_files_are_compared_by_their_content(name: str, key: str, size: int) -> None:
    """And the view reads them from their beginning, as it reads the fields."""
    seen = []

    @with_fenced_lock(name, once=key)
    def view(request: Any) -> Any:
        seen.append([request.FILES["file"].read(), request.POST["a"]])
        return HttpResponse("done")

    def request(content: bytes, file: str = "name.txt", field: str = "file") -> Any:
        return RequestFactory().post("/", {"a": "1", field: SimpleUploadedFile(file, content)})

    def answer(*args: Any, **options: Any) -> Any:
        with closing(request(*args, **options)) as asked:
            return view(asked)

    content = b"x" * size
    first, second = answer(content), answer(content)

    assert seen == [[content, "1"]]
    assert_same(first, second)
    assert_refused(answer(content[:-1] + b"y"))
    assert_refused(answer(content, file="other.txt"))
    assert_refused(answer(content, field="other"))
    assert_refused(view(RequestFactory().post("/", {"a": "1"})))


def test_the_view_reads_the_body_as_ever(name: str, key: str) -> None:
    """It is compared before."""
    view = with_fenced_lock(name, once=key)(lambda request: HttpResponse(request.body))
    assert view(request_with("text")).content == view(request_with("text")).content == b"text"


def test_a_body_that_was_read_cannot_be_compared(name: str, key: str) -> None:
    """The error says what to do, and nothing was sent; with payload= it need not be."""
    request = request_with("text")
    request.read(1)
    view = with_fenced_lock(name, once=key)(numbered)

    with counted_calls() as calls, pytest.raises(TypeError, match="payload="):
        view(request)
    assert calls == []
    view = with_fenced_lock(name, once=key, payload=lambda request: 1)(numbered)
    assert view(request).status_code == 201


def test_a_payload_of_ones_own_is_compared_instead(name: str, key: str) -> None:
    """Say without a part of the body that changes from try to try."""
    view = with_fenced_lock(
        name, once=key, payload=lambda request: json.loads(request.body)["amount"]
    )(numbered)

    first = view(request_with('{"amount": 10, "sent": 1}'))
    assert_same(first, view(request_with('{"amount": 10, "sent": 2}', url="/other")))
    assert_refused(view(request_with('{"amount": 99, "sent": 1}')))


def test_the_key_may_come_from_a_header_or_the_url(name: str, key: str) -> None:
    """Each is other work. A header that is missing is an error before anything is sent."""
    view = with_fenced_lock(
        name, once=lambda request: request.headers.get("Idempotency-Key", "") and key
    )(numbered)
    with counted_calls() as calls, statements() as sql, pytest.raises(InvalidResource):
        view(request_with("{}"))
    assert (calls, sql) == ([], [])

    view = with_fenced_lock(name, once=key + ":{pk}")(lambda request, pk: numbered(request))
    numbers = [json.loads(view(request_with("{}"), pk).content)["number"] for pk in (1, 2, 1, 2)]
    assert numbers == [1, 2, 1, 2]


# Answers of the lock


def test_a_duplicate_while_the_first_one_runs_is_answered_by_409(name: str, key: str) -> None:
    """After its end it is a replay."""

    def run(pause: Callable[[], None]) -> Any:
        @with_fenced_lock(name, once=key)
        def view(request: Any) -> Any:
            response = numbered(request)
            pause()
            return response

        return view(request_with("{}"))

    view = with_fenced_lock(name, once=key)(numbered)
    with started(run) as running:
        running.reach_pause()
        for _ in range(9):
            refused = view(request_with("{}"))
            assert (refused.status_code, json.loads(refused.content)["code"]) == (409, "lock-held")
        first = running.finish()

    assert_same(first, view(request_with("{}")))
    assert effects() == 1


def test_a_duplicate_that_finds_the_lock_held_is_skipped(name: str, key: str) -> None:
    """Where the view says so: its 204 is not kept."""
    view = with_fenced_lock(name, once=key, on_held="skip")(numbered)
    with held_elsewhere(name):
        assert view(request_with("{}")).status_code == 204
    assert view(request_with("{}")).status_code == 201


def test_a_view_that_does_not_respond_raises(name: str, key: str) -> None:
    """And the middleware answers as the view would do."""
    view = with_fenced_lock(name, once=key, respond=False)(numbered)
    assert_same(view(request_with("1")), view(request_with("1")))
    with pytest.raises(OnceMismatch) as caught:
        view(request_with("2"))
    assert (caught.value.key, caught.value.token) == (key, 1)

    with site(view, middleware=["django_fencing.middleware.FencingMiddleware"]) as client:
        assert_refused(client.post("/", "2", content_type=JSON))


def test_the_middleware_answers_a_mismatch_of_any_view(name: str, key: str) -> None:
    """As of one that calls once() itself."""

    def view(request: Any) -> Any:
        with fenced_atomic(name):
            return HttpResponse(once(key, write, payload=request.POST["amount"]))

    with site(view, middleware=["django_fencing.middleware.FencingMiddleware"]) as client:
        assert client.post("/", {"amount": 1}).status_code == 200
        assert_refused(client.post("/", {"amount": 2}))
    assert effects() == 1


def test_a_browser_is_answered_by_a_page(name: str, key: str) -> None:
    """Which does not ask to try again."""
    view = with_fenced_lock(name, once=key)(numbered)
    view(request_with("1"))

    page = view(request_for("POST", "/", "2", content_type=JSON, headers={"accept": "text/html"}))

    assert (page.status_code, page["Content-Type"]) == (422, "text/html; charset=utf-8")
    assert "Retry-After" not in page
    assert "try again" not in page.content.decode().lower()


def test_a_replay_costs_what_the_first_request_costs(name: str, key: str) -> None:
    """Two calls of Redis, and two statements and a savepoint."""
    view = with_fenced_lock(name, once=key)(lambda request: HttpResponse())
    with fenced_lock(name):
        pass

    for third in ("UPDATE", "SELECT"):
        with counted_calls() as calls, statements() as sql:
            view(request_with("{}"))
        assert len(calls) == 2
        assert [words.split()[0] for words in sql] == [
            "WITH",
            "SAVEPOINT",
            "INSERT",
            third,
            "RELEASE",
        ]


# Views of every kind


def async_view(lock: Any) -> Any:
    async def view(request: Any) -> Any:
        await Entry.objects.acreate()
        return JsonResponse({"number": await Entry.objects.acount()}, status=201)

    return lock(view)


def async_class(lock: Any) -> Any:
    @method_decorator(lock, name="dispatch")
    class Page(View):
        async def post(self, request: Any) -> Any:
            await Entry.objects.acreate()
            return JsonResponse({"number": await Entry.objects.acount()}, status=201)

    return Page.as_view()


def class_based(lock: Any) -> Any:
    @method_decorator(lock, name="dispatch")
    class Page(View):
        def post(self, request: Any) -> Any:
            return numbered(request)

    return Page.as_view()


def method_of_a_class(lock: Any) -> Any:
    class Page(View):
        @lock
        def post(self, request: Any) -> Any:
            return numbered(request)

    return Page.as_view()


def above_api_view(lock: Any) -> Any:
    return lock(api_view(["POST"])(api_body))


def below_api_view(lock: Any) -> Any:
    return api_view(["POST"])(lock(api_body))


def api_method(lock: Any) -> Any:
    class Endpoint(APIView):
        @lock
        def post(self, request: Any) -> Any:
            return api_body(request)

    return Endpoint.as_view()


def api_body(request: Any) -> Any:
    write()
    if "fails" in request.data:
        raise exceptions.ValidationError("It fails.")
    data = {"number": effects(), "data": request.data}
    return Response(data, status=201, headers={"X-Number": str(effects())})


API = [above_api_view, below_api_view, api_method]
ASYNC = [async_view, async_class]
SHAPES = [*ASYNC, class_based, method_of_a_class, *API]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("content_type", [JSON, MULTIPART_CONTENT, FORM])
def test_views_of_every_kind_are_done_once(
    name: str, key: str, shape: Any, content_type: str
) -> None:
    """Whichever way their work comes in."""

    def data(amount: int) -> Any:
        return f"amount={amount}" if content_type == FORM else {"amount": amount}

    with site(shape(with_fenced_lock(name, once=key))) as client:
        first, second, other = (
            client.post("/", data(amount), content_type=content_type) for amount in (1, 1, 2)
        )
        if shape in ASYNC:
            assert_same(first, asyncio.run(ask_async(data(1), content_type)))

    assert first.status_code == 201
    assert_same(first, second)
    assert_refused(other)
    assert first.json()["number"] == effects() == 1


async def ask_async(data: Any, content_type: str) -> Any:
    return await AsyncClient().post("/", data, content_type=content_type)


@pytest.mark.parametrize("shape", API)
@pytest.mark.parametrize("content_type", [JSON, MULTIPART_CONTENT])
def test_an_error_that_rest_framework_answers_is_not_kept(
    name: str, key: str, shape: Any, content_type: str
) -> None:
    """Its work is rolled back, and the key is free."""
    with site(shape(with_fenced_lock(name, once=key))) as client:
        for _ in range(2):
            failed = client.post("/", {"fails": "1"}, content_type=content_type)
            assert (failed.status_code, failed.json()) == (400, ["It fails."])
            assert (effects(), OnceRecord.objects.count()) == (0, 0)
        assert client.post("/", {"a": "1"}, content_type=content_type).json()["number"] == 1


@pytest.mark.usefixtures("atomic_requests")
def test_an_error_that_rest_framework_answers_under_atomic_requests(name: str, key: str) -> None:
    """It is answered as it is without once=, and the key is free."""
    with site(above_api_view(with_fenced_lock(name, once=key))) as client:
        failed = client.post("/", {"fails": 1}, content_type=JSON)
        assert (failed.status_code, failed.json()) == (400, ["It fails."])
        assert (effects(), OnceRecord.objects.count()) == (0, 0)
        assert client.post("/", {"a": 1}, content_type=JSON).json()["number"] == 1


def test_a_view_that_rolls_back_has_not_been_done(name: str, key: str) -> None:
    """Its response is given, as without once=, and is not kept."""

    def view(request: Any) -> Any:
        response = numbered(request)
        transaction.set_rollback(True)
        return response

    assert with_fenced_lock(name)(view)(request_with("{}")).status_code == 201
    assert effects() == 0
    assert with_fenced_lock(name, once=key)(view)(request_with("{}")).status_code == 201
    assert (effects(), once_result(key)) == (0, None)


DATA: dict[str, Any] = {
    "moment": datetime(2026, 11, 30, 12, 0, 0, 1, tzinfo=UTC),
    "duration": timedelta(seconds=1.5),
    "decimal": Decimal("1.50"),
    "bytes": b"text",
    "numbers as names": {1: "a", 2: "b"},
    "text": "ü ☃ </script>",
    "nothing": None,
    "float": 1e22,
}


@pytest.mark.parametrize("shape", API)
@pytest.mark.parametrize("kind", DATA)
def test_data_of_rest_framework_comes_back_as_it_was(
    name: str, key: str, shape: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte by byte, whatever its encoder makes of it."""
    monkeypatch.setitem(globals(), "api_body", lambda request: Response({"value": DATA[kind]}))
    with site(shape(with_fenced_lock(name, once=key))) as client:
        assert_same(client.post("/"), client.post("/"))


@pytest.mark.parametrize("shape", API)
def test_a_content_type_of_rest_framework_comes_back_as_it_was(
    name: str, key: str, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the view has said it."""
    monkeypatch.setitem(
        globals(), "api_body", lambda request: Response({}, content_type="application/vnd.own+json")
    )
    with site(shape(with_fenced_lock(name, once=key))) as client:
        first, second = client.post("/"), client.post("/")

    assert first["Content-Type"] == "application/vnd.own+json"
    assert_same(first, second)


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("shape", [async_class, class_based, above_api_view])
def test_under_atomic_requests_the_work_is_done_once(name: str, key: str, shape: Any) -> None:
    """The fenced transaction is the request's."""
    with site(shape(with_fenced_lock(name, once=key))) as client:
        first, second = client.post("/", {"a": 1}), client.post("/", {"a": 1})
    assert_same(first, second)
    assert effects() == 1


def test_views_in_another_database_keep_it_there(name: str, key: str) -> None:
    """In that of the lock."""
    view = with_fenced_lock(name, once=key, using="other")(bodies(HttpResponse("first")))

    assert_same(view(request_with("{}")), view(request_with("{}")))
    assert not OnceRecord.objects.exists()
    assert OnceRecord.objects.using("other").count() == 1
    assert not connection.in_atomic_block


def test_a_view_inside_of_a_view_is_done_once_too(name: str, key: str) -> None:
    """Each with its key, and another payload of the inner one takes back the outer one's work."""
    inner = with_fenced_lock(f"{name}:inner", once=f"{key}:inner", using="other")(numbered)

    def outer(request: Any) -> Any:
        write()
        return inner(request)

    outer = with_fenced_lock(name, once=lambda request: f"{key}:{request.GET['try']}")(outer)
    with suppress(LookupError):
        assert outer(request_with("{}", url="/?try=1")).status_code == 201
    assert_refused(outer(request_with("{}", url="/?try=2")))
    assert once_result(f"{key}:2") is None
