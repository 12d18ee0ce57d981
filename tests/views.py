"""Views of every shape that a lock may sit on, and a site that has one view."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, JsonResponse
from django.test import Client, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import action, api_view
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

Lock = Callable[..., Any]  # with_fenced_lock(...)
Body = Callable[[], Any]


def identified(get_response: Callable[..., Any]) -> Callable[..., Any]:
    """As a middleware, let each request come from a user who is logged in."""

    def middleware(request: HttpRequest) -> Any:
        request.user = User(username="ada")
        return get_response(request)

    return middleware


def anonymous(get_response: Callable[..., Any]) -> Callable[..., Any]:
    """As a middleware, let each request come from somebody unknown."""

    def middleware(request: HttpRequest) -> Any:
        request.user = AnonymousUser()
        return get_response(request)

    return middleware


@contextmanager
def serving(
    view: Any, *, middleware: Sequence[str] = (), **kwargs: Any
) -> Iterator[Callable[..., Any]]:
    """Let a site have `view` alone, whose URL gives `kwargs`, and yield what asks for it."""

    def ask(accept: str | None = None, method: str = "get", **headers: str) -> Any:
        if accept is not None:
            headers["accept"] = accept
        client = Client(enforce_csrf_checks=True)
        return getattr(client, method)("/", headers=headers)

    with override_settings(ROOT_URLCONF=(path("", view, kwargs),), MIDDLEWARE=middleware):
        yield ask


def visit(
    view: Any, accept: str | None = None, *, middleware: Sequence[str] = (), **kwargs: Any
) -> Any:
    """Return the response to one request, which has passed Django's handler."""
    with serving(view, middleware=middleware, **kwargs) as ask:
        return ask(accept)


def _function(body: Body) -> Any:
    def view(request: Any, pk: Any) -> Any:
        return JsonResponse(body(), safe=False)

    return view


def _class(body: Body) -> Any:
    class Page(View):
        def get(self, request: Any, pk: Any) -> Any:
            return JsonResponse(body(), safe=False)

    return Page


def _api_class(body: Body) -> Any:
    class Endpoint(APIView):
        def get(self, request: Any, pk: Any) -> Any:
            return Response(body())

    return Endpoint


def function(lock: Lock, body: Body) -> Any:
    return lock(_function(body))


def partial(lock: Lock, body: Body) -> Any:
    def view(greeting: str, request: Any, pk: Any, *, style: str) -> Any:
        assert (greeting, style) == ("hello", "short")
        return JsonResponse(body(), safe=False)

    return lock(functools.partial(view, "hello", style="short"))


def below_csrf_exempt(lock: Lock, body: Body) -> Any:
    return csrf_exempt(lock(_function(body)))


def above_csrf_exempt(lock: Lock, body: Body) -> Any:
    return lock(csrf_exempt(_function(body)))


def below_login_required(lock: Lock, body: Body) -> Any:
    return login_required(lock(_function(body)))


def above_login_required(lock: Lock, body: Body) -> Any:
    return lock(login_required(_function(body)))


def dispatch(lock: Lock, body: Body) -> Any:
    return method_decorator(lock, name="dispatch")(_class(body)).as_view()


def dispatch_in_a_list(lock: Lock, body: Body) -> Any:
    return method_decorator([never_cache, lock, csrf_exempt], name="dispatch")(
        _class(body)
    ).as_view()


def own_dispatch(lock: Lock, body: Body) -> Any:
    class Page(_class(body)):  # type: ignore[misc]
        @lock
        def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(request, *args, **kwargs)

    return Page.as_view()


def around_as_view(lock: Lock, body: Body) -> Any:
    return lock(_class(body).as_view())


def around_as_view_of_a_decorated_dispatch(lock: Lock, body: Body) -> Any:
    return lock(method_decorator(never_cache, name="dispatch")(_class(body)).as_view())


def above_api_view(lock: Lock, body: Body) -> Any:
    @lock
    @api_view(["GET"])
    def endpoint(request: Any, pk: Any) -> Any:
        return Response(body())

    return endpoint


def api_dispatch(lock: Lock, body: Body) -> Any:
    return method_decorator(lock, name="dispatch")(_api_class(body)).as_view()


def around_api_as_view(lock: Lock, body: Body) -> Any:
    return lock(_api_class(body).as_view())


def viewset_dispatch(lock: Lock, body: Body) -> Any:
    @method_decorator(lock, name="dispatch")
    class Jobs(ViewSet):
        def retrieve(self, request: Any, pk: Any) -> Any:
            return Response(body())

    return Jobs.as_view({"get": "retrieve"})


def method(lock: Lock, body: Body) -> Any:
    class Page(View):
        @method_decorator(lock)
        def get(self, request: Any, pk: Any) -> Any:
            return JsonResponse(body(), safe=False)

    return Page.as_view()


def named_method(lock: Lock, body: Body) -> Any:
    return method_decorator(lock, name="get")(_class(body)).as_view()


def bare_method(lock: Lock, body: Body) -> Any:
    class Page(View):
        @lock
        def get(self, request: Any, pk: Any) -> Any:
            return JsonResponse(body(), safe=False)

    return Page.as_view()


def inside_partial(lock: Lock, body: Body) -> Any:
    return functools.partial(lock(_function(body)))


def below_api_view(lock: Lock, body: Body) -> Any:
    @api_view(["GET"])
    @lock
    def endpoint(request: Any, pk: Any) -> Any:
        return Response(body())

    return endpoint


def api_method(lock: Lock, body: Body) -> Any:
    class Endpoint(APIView):
        @method_decorator(lock)
        def get(self, request: Any, pk: Any) -> Any:
            return Response(body())

    return Endpoint.as_view()


def below_action(lock: Lock, body: Body) -> Any:
    class Jobs(ViewSet):
        @action(detail=True)
        @lock
        def work(self, request: Any, pk: Any) -> Any:
            return Response(body())

    return Jobs.as_view({"get": "work"})


def above_action(lock: Lock, body: Body) -> Any:
    class Jobs(ViewSet):
        @lock
        @action(detail=True)
        def work(self, request: Any, pk: Any) -> Any:
            return Response(body())

    return Jobs.as_view({"get": "work"})


# Where the lock is on what the URL leads to, and where Django REST framework is inside of it.
OUTER_API = [above_api_view, api_dispatch, around_api_as_view, viewset_dispatch]
OUTER = [
    function,
    partial,
    below_csrf_exempt,
    above_csrf_exempt,
    below_login_required,
    above_login_required,
    dispatch,
    dispatch_in_a_list,
    own_dispatch,
    around_as_view,
    around_as_view_of_a_decorated_dispatch,
    *OUTER_API,
]
# Where it sits deeper, so that Django may have begun a transaction already.
INNER_API = [below_api_view, api_method, below_action, above_action]
INNER = [method, named_method, bare_method, inside_partial, *INNER_API]
