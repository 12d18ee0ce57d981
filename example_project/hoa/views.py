"""The pages. Each form posts to the page that it is on, and a refusal is a message there."""

import functools
from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import BadRequest
from django.db import transaction
from django.db.models import Prefetch
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from django_fencing.decorators import with_fenced_lock
from django_fencing.leases import current_lease
from hoa.assignments import AssignmentRefused, contracted_vendors, place_assignment
from hoa.charges import Outcome, generate_monthly_charges
from hoa.forms import month_in, vendor_in
from hoa.meters import MetersUnavailable
from hoa.models import Complaint, MonthlyChargeRun, Organization

REFUSALS = (BadRequest, AssignmentRefused, MetersUnavailable)

View = Callable[[HttpRequest, int], HttpResponse]


def page(view: View) -> View:
    """Ask for a login, and show a refusal as a message on the page."""

    @functools.wraps(view)
    def shown(request: HttpRequest, pk: int) -> HttpResponse:
        try:
            return view(request, pk)
        except REFUSALS as error:
            messages.error(request, str(error))
            return redirect(request.path)

    return require_http_methods(["GET", "HEAD", "POST"])(login_required(shown))


@require_safe
@login_required
def start(request: HttpRequest) -> HttpResponse:
    """Show the organizations with their complaints and last runs."""
    newest_runs = MonthlyChargeRun.objects.order_by("-month", "-pk")[:3]
    organizations = Organization.objects.order_by("name").prefetch_related(
        Prefetch("complaints", Complaint.objects.order_by("pk")),
        Prefetch("runs", newest_runs, to_attr="newest_runs"),
    )
    return render(request, "hoa/start.html", {"organizations": organizations})


@page
def organization(request: HttpRequest, pk: int) -> HttpResponse:
    """Show an organization with its units and runs, or charge it for a month."""
    if request.method == "POST":
        return charge(request, pk)
    organization = get_object_or_404(Organization, pk=pk)
    shown = {
        "organization": organization,
        "units": organization.units.order_by("label"),
        "runs": organization.runs.order_by("-month", "-pk"),
        "notices": organization.notices.exclude(published_at=None).order_by("-published_at"),
    }
    return render(request, "hoa/organization.html", shown)


def charge(request: HttpRequest, pk: int) -> HttpResponse:
    """Charge; FencingMiddleware answers the errors of the lock."""
    organization = get_object_or_404(Organization, pk=pk)
    result = generate_monthly_charges(organization, month_in(request.POST))
    run = result.run
    if result.outcome is Outcome.ALREADY_RUN:
        messages.info(request, f"{run.month:%Y-%m} was charged already: {run.total} in all.")
    else:
        messages.success(request, f"{run.month:%Y-%m} is charged: {run.total} in all.")
    return redirect(request.path)


@page
def complaint(request: HttpRequest, pk: int) -> HttpResponse:
    """Show a complaint with its assignment, or assign a vendor."""
    if request.method == "POST":
        return assign(request, pk)
    complaint = get_object_or_404(Complaint.objects.select_related("organization"), pk=pk)
    shown: dict[str, Any] = {
        "complaint": complaint,
        "assignment": complaint.assignments.select_related("vendor").first(),
        "vendors": contracted_vendors(complaint.organization),
    }
    return render(request, "hoa/complaint.html", shown)


@with_fenced_lock(lambda request, pk: get_object_or_404(Complaint, pk=pk))
def assign(request: HttpRequest, pk: int) -> HttpResponse:
    """Assign in one fenced transaction; the decorator answers the errors of the lock."""
    complaint = current_lease().row
    assignment = place_assignment(complaint, vendor_in(request.POST))
    done = f"{assignment.vendor} is assigned."
    # The response goes out after the commit in any case, but a message outlives a rollback.
    transaction.on_commit(functools.partial(messages.success, request, done))
    return redirect(request.path)
