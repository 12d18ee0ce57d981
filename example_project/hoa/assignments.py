"""Assign a vendor to a complaint: one fenced transaction."""

from django.db.models import QuerySet
from django.utils import timezone

from django_fencing.locks import fenced_atomic
from hoa.models import Complaint, Organization, Vendor, VendorAssignment


class AssignmentRefused(Exception):
    """The vendor cannot be assigned; the message says why."""


def assign_vendor(complaint: Complaint, vendor: Vendor) -> VendorAssignment:
    """
    Assign the vendor, if nobody is assigned yet and the vendor has a contract today.

    Raise AssignmentRefused if not, and LockHeld if someone else is assigning at this moment.
    """
    # There may be no assignment yet, so the lock and the fence are those of the complaint.
    with fenced_atomic(complaint) as locked:
        return place_assignment(locked, vendor)


def place_assignment(complaint: Complaint, vendor: Vendor) -> VendorAssignment:
    """Check and write, in the transaction that has locked the complaint's row."""
    if assignment := complaint.assignments.select_related("vendor").first():
        raise AssignmentRefused(
            f"Complaint {complaint.pk} is already assigned to {assignment.vendor}."
        )
    if not contracted_vendors(complaint.organization).filter(pk=vendor.pk).exists():
        raise AssignmentRefused(
            f"{vendor} has no contract with {complaint.organization} today, {timezone.localdate()}."
        )
    assignment = complaint.assignments.create(vendor=vendor, token=complaint.last_fence_token)
    complaint.status = Complaint.Status.ASSIGNED
    complaint.save()
    return assignment


def contracted_vendors(organization: Organization) -> QuerySet[Vendor]:
    """Return the vendors that have a contract with the organization today."""
    today = timezone.localdate()
    contracts = organization.contracts.filter(starts_on__lte=today, ends_on__gte=today)
    return Vendor.objects.filter(contracts__in=contracts).distinct().order_by("name")
