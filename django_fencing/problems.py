"""What a client is told of an error: a page or a problem of RFC 9457."""

import math
import random
from dataclasses import dataclass

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils.cache import patch_vary_headers

from django_fencing.exceptions import (
    FencingError,
    LeaseLost,
    LockHeld,
    OnceMismatch,
    StoreUnavailable,
)

# The errors that have an answer; all others are faults of the code, as in any view.
ANSWERED = (LockHeld, LeaseLost, OnceMismatch, StoreUnavailable)

TEMPLATE = "django_fencing/conflict.html"

# Seconds. Up to a quarter is added, so that those who are refused together do not come back
# together, and at most a minute is said in all: most leases end before they run out.
_LONGEST_RETRY = 48
_RETRY_AFTER_OUTAGE = 5.0

_HTML = "text/html"
_PROBLEM = "application/problem+json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is said of an error: nothing of who holds the lock."""

    status: int
    title: str  # the phrase of the status, as RFC 9457 asks for where there is no type
    code: str
    detail: str
    retry_after: int | None = None  # seconds


def problem_of(error: FencingError) -> Problem:
    """Return what a client is told of one of the ANSWERED errors."""
    if isinstance(error, LockHeld):
        return Problem(
            status=409,
            title="Conflict",
            code="lock-held",
            detail="Somebody else is working on this at the moment. Try again later.",
            retry_after=_retry_after(error.retry_after or 1),
        )
    if isinstance(error, LeaseLost):
        return Problem(
            status=409,
            title="Conflict",
            code="stale-token",
            detail="This took too long, and somebody else has taken over. Look at the present "
            "state before you try again.",
        )
    if isinstance(error, OnceMismatch):
        return Problem(
            status=422,
            title="Unprocessable Content",
            code="once-mismatch",
            detail="This was done before with other values, and is done once only. Look at the "
            "present state.",
        )
    return Problem(
        status=503,
        title="Service Unavailable",
        code="store-unavailable",
        detail="It cannot be told at the moment whether somebody else is working on this. "
        "Try again later.",
        retry_after=_retry_after(_RETRY_AFTER_OUTAGE),
    )


def answer(request: HttpRequest, error: FencingError) -> HttpResponse:
    """
    Return the response to one of the ANSWERED errors.

    It is the template django_fencing/conflict.html where the client prefers HTML and the
    template can be found, else a problem of RFC 9457.
    """
    problem = problem_of(error)
    response = None
    if request.get_preferred_type([_PROBLEM, "application/json", _HTML]) == _HTML:
        response = _page(request, problem)
    response = response or _document(problem)
    if problem.retry_after is not None:
        response["Retry-After"] = str(problem.retry_after)
    patch_vary_headers(response, ["Accept"])
    return response


def _page(request: HttpRequest, problem: Problem) -> HttpResponse | None:
    # Context processors may ask the very store that is away.
    rendered_for = None if problem.status == 503 else request
    try:
        page = render_to_string(TEMPLATE, {"problem": problem}, rendered_for)
    except (TemplateDoesNotExist, ImproperlyConfigured):
        return None
    return HttpResponse(page, status=problem.status)


def _document(problem: Problem) -> HttpResponse:
    said = ("title", "status", "detail", "code")
    values = {"type": "about:blank", **{name: getattr(problem, name) for name in said}}
    return JsonResponse(values, status=problem.status, content_type=_PROBLEM)


def _retry_after(remaining: float) -> int:
    least = min(math.ceil(remaining), _LONGEST_RETRY)
    return least + random.randint(0, max(1, least // 4))  # noqa: S311 - jitter
