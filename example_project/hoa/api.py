"""The same as JSON: GET tells the state, POST changes it, and a refusal is a problem (RFC 9457)."""

import functools
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from django.core.exceptions import BadRequest
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_http_methods

from django_fencing.decorators import with_fenced_lock
from django_fencing.leases import current_lease
from hoa.assignments import AssignmentRefused, place_assignment
from hoa.charges import Outcome, generate_monthly_charges
from hoa.forms import month_in, vendor_in
from hoa.meters import MetersUnavailable
from hoa.models import Complaint, MonthlyChargeRun, Organization, VendorAssignment

REFUSALS: dict[type[Exception], tuple[HTTPStatus, str]] = {
    BadRequest: (HTTPStatus.BAD_REQUEST, "bad-request"),
    Http404: (HTTPStatus.NOT_FOUND, "not-found"),
    AssignmentRefused: (HTTPStatus.CONFLICT, "assignment-refused"),
    MetersUnavailable: (HTTPStatus.BAD_GATEWAY, "meters-unavailable"),
}

View = Callable[[HttpRequest, int], HttpResponse]


def endpoint(view: View) -> View:
    """Answer who is not logged in, and every refusal, by a problem."""

    @functools.wraps(view)
    def answered(request: HttpRequest, pk: int) -> HttpResponse:
        if not request.user.is_authenticated:
            return problem(HTTPStatus.UNAUTHORIZED, "login-required", "Log in first.")
        try:
            return view(request, pk)
        except tuple(REFUSALS) as error:
            return problem(*REFUSALS[type(error)], str(error))

    return require_http_methods(["GET", "HEAD", "POST"])(answered)


def problem(status: HTTPStatus, code: str, detail: str) -> HttpResponse:
    """Return a problem in the form that django_fencing gives its own."""
    said = {"type": "about:blank", "title": status.phrase, "status": status}
    said |= {"detail": detail, "code": code}
    return JsonResponse(said, status=status, content_type="application/problem+json")


def posted(request: HttpRequest) -> dict[str, str]:
    """Return the JSON object of the body, as a form would send it. Raise BadRequest."""
    try:
        values = json.loads(request.body)
    except (ValueError, RecursionError) as error:
        raise BadRequest("The body is no JSON.") from error
    if not isinstance(values, dict):
        raise BadRequest("The body is no JSON object.")
    return {name: str(value) for name, value in values.items()}


@endpoint
def assignment(request: HttpRequest, pk: int) -> HttpResponse:
    """Tell or make the assignment of a complaint."""
    if request.method == "POST":
        return assign(request, pk)
    complaint = get_object_or_404(Complaint, pk=pk)
    present = complaint.assignments.select_related("vendor").first()
    return JsonResponse(assignment_of(complaint, present))


@with_fenced_lock(lambda request, pk: get_object_or_404(Complaint, pk=pk))
def assign(request: HttpRequest, pk: int) -> HttpResponse:
    """Assign in one fenced transaction; the decorator answers the errors of the lock."""
    complaint = current_lease().row
    made = place_assignment(complaint, vendor_in(posted(request)))
    return JsonResponse(assignment_of(complaint, made), status=201)


def assignment_of(complaint: Complaint, present: VendorAssignment | None) -> dict[str, Any]:
    state: dict[str, Any] = {"complaint": complaint.pk, "status": complaint.status}
    if present is None:
        return {**state, "vendor": None}
    return {**state, "vendor": present.vendor.pk, "token": present.token}


@endpoint
def charges(request: HttpRequest, pk: int) -> HttpResponse:
    """Tell the runs of an organization, or charge it for a month."""
    organization = get_object_or_404(Organization, pk=pk)
    if request.method == "POST":
        return charge(request, organization)
    runs = organization.runs.order_by("month", "pk")
    return JsonResponse({"organization": pk, "runs": [run_of(run) for run in runs]})


def charge(request: HttpRequest, organization: Organization) -> HttpResponse:
    """Charge; FencingMiddleware answers the errors of the lock."""
    result = generate_monthly_charges(organization, month_in(posted(request)))
    status = 201 if result.outcome is Outcome.CHARGED else 200
    state = {"organization": organization.pk, "outcome": result.outcome}
    return JsonResponse({**state, **run_of(result.run)}, status=status)


def run_of(run: MonthlyChargeRun) -> dict[str, Any]:
    return {"month": f"{run.month:%Y-%m}", "total": str(run.total), "token": run.token}
