"""The example's vendor assignments: never two for one complaint."""

import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import transaction
from django.utils import timezone
from hoa.assignments import AssignmentRefused, assign_vendor, place_assignment
from hoa.models import (
    Complaint,
    Organization,
    Vendor,
    VendorAssignment,
    VendorContract,
)
from hoa.samples import ORGANIZATIONS, VENDORS

from django_fencing.exceptions import LockHeld, UnfencedWrite
from django_fencing.locks import fenced_atomic
from tests.helpers import SECONDS, in_threads, unprotected

pytestmark = pytest.mark.django_db(transaction=True)

RACES = 200

Assign = Callable[[Complaint, Vendor], VendorAssignment]


@pytest.fixture
def organization(transactional_db: None) -> Organization:
    """Return an organization of this test's own."""
    return Organization.objects.create(name=f"test {uuid.uuid4().hex}")


@pytest.fixture
def complaint(organization: Organization) -> Complaint:
    """Return an open complaint."""
    return Complaint.objects.create(organization=organization, text="It drips.")


@pytest.fixture
def vendor(organization: Organization) -> Vendor:
    """Return a vendor with a contract."""
    return contracted_vendor("Ace Plumbing", organization)


def contracted_vendor(
    name: str, organization: Organization, starts_in: int = -30, ends_in: int = 30
) -> Vendor:
    """Return a vendor with a contract from so many days from today to so many."""
    today = timezone.localdate()
    vendor = Vendor.objects.create(name=name)
    VendorContract.objects.create(
        vendor=vendor,
        organization=organization,
        starts_on=today + timedelta(days=starts_in),
        ends_on=today + timedelta(days=ends_in),
    )
    return vendor


def test_an_assignment_carries_the_token_of_its_lease(complaint: Complaint, vendor: Vendor) -> None:
    """It is the token that the complaint's fence has, and the complaint is assigned."""
    assignment = assign_vendor(complaint, vendor)

    complaint.refresh_from_db()
    assert (assignment.complaint, assignment.vendor) == (complaint, vendor)
    assert assignment.token == complaint.last_fence_token > 0
    assert complaint.status == Complaint.Status.ASSIGNED


def test_of_two_concurrent_assignments_exactly_one_succeeds(organization: Organization) -> None:
    """200 races of two threads, each with its own connection; the loser is told why."""
    complaints = race(assign_vendor, organization)

    assert [complaint.assignments.count() for complaint in complaints] == [1] * RACES


def test_without_the_fence_two_concurrent_assignments_do_succeed(
    organization: Organization,
) -> None:
    """The twin: the same checks and writes in a plain transaction, in the same races."""

    def assign(complaint: Complaint, vendor: Vendor) -> VendorAssignment:
        with transaction.atomic():
            return place_assignment(Complaint.objects.get(pk=complaint.pk), vendor)

    with unprotected("Complaint"):
        complaints = race(assign, organization)

    assert 2 in [complaint.assignments.count() for complaint in complaints]


def test_what_goes_around_the_fence_is_refused_by_the_database(
    complaint: Complaint, vendor: Vendor
) -> None:
    """The same checks and writes in a plain transaction: the table requires the row's lease."""
    with pytest.raises(UnfencedWrite, match="A lease is needed"), transaction.atomic():
        place_assignment(complaint, vendor)
    with pytest.raises(UnfencedWrite, match="A lease is needed"):
        Complaint.objects.filter(pk=complaint.pk).update(text="It is dry again.")

    assert not complaint.assignments.exists()


def test_a_complaint_that_is_being_assigned_is_held(complaint: Complaint, vendor: Vendor) -> None:
    """Who comes meanwhile is told so, and nothing is written."""
    with fenced_atomic(complaint):
        [refusal] = in_threads(lambda: assign_vendor(complaint, vendor))

    assert isinstance(refusal, LockHeld)
    assert refusal.resource == complaint.fence_name
    assert not complaint.assignments.exists()


def test_two_complaints_never_block_each_other(complaint: Complaint, vendor: Vendor) -> None:
    """One is assigned while the other's fenced transaction is open, without any waiting."""
    other = Complaint.objects.create(organization=complaint.organization, text="It is dark.")

    with fenced_atomic(complaint) as locked:
        place_assignment(locked, vendor)
        [assignment] = in_threads(lambda: assign_vendor(other, vendor))

    assert assignment == other.assignments.get()
    assert complaint.assignments.exists()


def test_a_complaint_has_one_assignment_and_the_loser_is_told_whose(
    complaint: Complaint, vendor: Vendor
) -> None:
    """The refusal names the vendor that has it."""
    late = contracted_vendor("Late Plumbing", complaint.organization)
    assign_vendor(complaint, vendor)

    with pytest.raises(AssignmentRefused, match=f"{complaint.pk} is already assigned to Ace"):
        assign_vendor(complaint, late)

    assert complaint.assignments.get().vendor == vendor


@pytest.mark.parametrize(
    ("starts_in", "ends_in", "assigned"),
    [(-1, 1, True), (0, 30, True), (-30, 0, True), (1, 30, False), (-30, -1, False)],
)
def test_a_vendor_needs_a_contract_today(
    complaint: Complaint, starts_in: int, ends_in: int, assigned: bool
) -> None:
    """The first and the last day of the window are days of the contract."""
    vendor = contracted_vendor("Swift Lifts", complaint.organization, starts_in, ends_in)

    [result] = in_threads(lambda: assign_vendor(complaint, vendor))

    assert isinstance(result, VendorAssignment if assigned else AssignmentRefused)
    assert complaint.assignments.exists() is assigned


def test_a_contract_with_another_organization_does_not_count(complaint: Complaint) -> None:
    """The refusal names both sides and the day."""
    other = Organization.objects.create(name=f"{complaint.organization} again")
    vendor = contracted_vendor("Swift Lifts", other)
    reason = f"Swift Lifts has no contract with {complaint.organization} today"

    with pytest.raises(AssignmentRefused, match=reason):
        assign_vendor(complaint, vendor)


def test_the_command_says_in_one_line_what_it_came_to(complaint: Complaint, vendor: Vendor) -> None:
    """Assigned is a success; held and refused have return codes of their own."""
    command = ("assign_vendor", complaint.pk, vendor.pk)
    with fenced_atomic(complaint):
        [held] = in_threads(lambda: output_of(*command))
    done = output_of(*command)
    [refused] = in_threads(lambda: output_of(*command))

    token = complaint.assignments.get().token
    assert done == f"Ace Plumbing is assigned to complaint {complaint.pk}, token {token}.\n"
    assert isinstance(held, CommandError)
    assert held.returncode == 75
    assert str(held).startswith(f"'{complaint.fence_name}' is held by ")
    assert isinstance(refused, CommandError)
    assert refused.returncode == 1
    assert str(refused) == f"Complaint {complaint.pk} is already assigned to Ace Plumbing."


def test_seeding_twice_makes_nothing_new(transactional_db: None) -> None:
    """And says the same both times: what can be charged and assigned, with its keys."""
    first = output_of("seed")
    again = output_of("seed")

    assert first == again
    assert sorted(Organization.objects.values_list("name", flat=True)) == sorted(ORGANIZATIONS)
    assert Vendor.objects.count() == len(VENDORS)
    assert VendorContract.objects.count() == len(VENDORS) * len(ORGANIZATIONS)


@pytest.mark.parametrize("debug", [True, False])
def test_seeding_makes_a_login_only_with_debug(
    transactional_db: None, settings: Any, debug: bool
) -> None:
    """Everyone knows its password. A user who is there already keeps theirs."""
    settings.DEBUG = debug

    written = output_of("seed")
    User.objects.filter(username="manager").update(**{"password": "changed"})
    output_of("seed")

    assert ("user manager, password manager" in written) is debug
    passwords = User.objects.values_list("username", "password")
    assert list(passwords) == [("manager", "changed")] * debug


def race(assign: Assign, organization: Organization) -> list[Complaint]:
    """Let two threads assign a vendor each to many complaints, starting together every time."""
    complaints = Complaint.objects.bulk_create(
        Complaint(organization=organization, text=f"Number {number}.") for number in range(RACES)
    )
    barrier = threading.Barrier(2)

    def assign_all(vendor: Vendor) -> list[bool]:
        won = []
        for complaint in complaints:
            barrier.wait(SECONDS)
            try:
                won.append(assign(complaint, vendor) is not None)
            except (LockHeld, AssignmentRefused):
                won.append(False)
        return won

    vendors = [contracted_vendor(name, organization) for name in ("First", "Second")]
    first, second = in_threads(*(lambda vendor=vendor: assign_all(vendor) for vendor in vendors))
    assert all(one or other for one, other in zip(first, second, strict=True))
    return complaints


def output_of(*command: Any) -> str:
    written = StringIO()
    call_command(*command, stdout=written)
    return written.getvalue()
