"""once: work is done once, and every later call gets its result."""

from typing import Any

import pytest
from django.db.transaction import TransactionManagementError
from django.http import HttpResponse, JsonResponse
from django.test import RequestFactory

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import OnceMismatch
from django_fencing.locks import fenced_atomic
from django_fencing.once import once, once_result
from tests.helpers import committing

pytestmark = committing("default")


def test_smoke(name: str) -> None:
    calls: list[int] = []

    def work(n: int) -> Any:
        calls.append(n)
        return {"n": n, "t": (1, 2)}

    assert once_result(name) is None
    with fenced_atomic(name):
        assert once(name, work, 3, payload={"a": 1, "b": 2}) == {"n": 3, "t": [1, 2]}
    with fenced_atomic(name):
        assert once(name, work, 4, payload={"b": 2, "a": 1}) == {"n": 3, "t": [1, 2]}
    assert calls == [3]
    with pytest.raises(OnceMismatch), fenced_atomic(name):
        once(name, work, 4, payload={"b": 3, "a": 1})
    with pytest.raises(TransactionManagementError):
        once(name, work, 4)
    assert once_result(name) == {"n": 3, "t": [1, 2]}


def test_view(name: str) -> None:
    calls = []

    @with_fenced_lock(name, once=name + ":{pk}")
    def view(request: Any, pk: int) -> HttpResponse:
        calls.append(1)
        return JsonResponse({"n": len(calls)}, status=201)

    post = RequestFactory().post
    first = view(post("/x", '{"a": 1, "b": 2}', content_type="application/json"), 1)
    second = view(post("/x", '{"b": 2, "a": 1}', content_type="application/json"), 1)
    third = view(post("/x", '{"b": 9, "a": 1}', content_type="application/json"), 1)
    assert (first.status_code, second.status_code, third.status_code) == (201, 201, 422)
    assert first.content == second.content
    assert dict(first.items()) == dict(second.items())
