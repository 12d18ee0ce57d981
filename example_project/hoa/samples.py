"""Made-up organizations and vendors, and a login."""

from datetime import date, timedelta
from decimal import Decimal

from django.contrib.auth.models import User
from django.utils import timezone

from hoa.models import Complaint, Organization, Vendor, VendorContract

FEES = {"A1": Decimal("40.00"), "A2": Decimal("40.00"), "B1": Decimal("55.50")}

ORGANIZATIONS = {
    "Linden Court": ["The lift is stuck.", "Water comes through the ceiling of A1."],
    "Harbour View": ["The front door does not close."],
}

URGENT = ["Water comes through the ceiling of A1."]

VENDORS = {"Swift Lifts": date(2099, 12, 31), "Ace Plumbing": date(2020, 12, 31)}


def sample_organization(name: str) -> Organization:
    """Return the organization with its units, made unless it is there."""
    organization, _ = Organization.objects.get_or_create(name=name)
    for label, fee in FEES.items():
        organization.units.get_or_create(label=label, defaults={"fee": fee})
    return organization


def sample_vendor(name: str, ends_on: date) -> Vendor:
    """Return the vendor with a contract for each sample organization, made unless it is there."""
    vendor, _ = Vendor.objects.get_or_create(name=name)
    for organization in Organization.objects.filter(name__in=ORGANIZATIONS):
        VendorContract.objects.get_or_create(
            vendor=vendor,
            organization=organization,
            defaults={"starts_on": date(2020, 1, 1), "ends_on": ends_on},
        )
    return vendor


def sample_complaint(organization: Organization, text: str) -> Complaint:
    """Return the complaint, made unless it is there."""
    complaint, _ = Complaint.objects.get_or_create(
        organization=organization,
        text=text,
        defaults={"urgent": text in URGENT, "filed_at": timezone.now() - timedelta(days=2)},
    )
    return complaint


def sample_user(name: str) -> User:
    """Return the user, made with the name for a password unless it is there."""
    return User.objects.filter(username=name).first() or User.objects.create_user(
        name, password=name
    )
