"""Organizations with their units and charges, complaints with their vendors."""

from datetime import datetime, timedelta
from typing import ClassVar

from django.db import models
from django.utils import timezone

from django_fencing.models import FencedResource

WRITTEN_BY = "Fencing token of the lease that wrote this; 0 if there was none."


class Organization(models.Model):
    name = models.CharField(max_length=200, unique=True)

    def __str__(self) -> str:
        return self.name


class Unit(models.Model):
    organization = models.ForeignKey(Organization, on_delete=models.CASCADE, related_name="units")
    label = models.CharField(max_length=20, help_text="What is written on its water meter.")
    fee = models.DecimalField(max_digits=8, decimal_places=2, help_text="Per month.")
    balance = models.DecimalField(
        max_digits=12, decimal_places=2, default=0, help_text="What its owner has to pay."
    )

    def __str__(self) -> str:
        return f"{self.label}, {self.organization}"


class MonthlyChargeRun(FencedResource):
    """
    One month of one organization, charged. It is written under its own lease only, from then on.

    It has no unique constraint, although it should have one in production: it would hide the
    double charge that the demo shows. The README tells why it would not be enough.
    """

    organization = models.ForeignKey(Organization, on_delete=models.PROTECT, related_name="runs")
    month = models.DateField(help_text="Its first day.")
    total = models.DecimalField(max_digits=12, decimal_places=2)
    token = models.BigIntegerField(default=0, help_text=WRITTEN_BY)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.organization}, {self.month:%Y-%m}"


class Charge(models.Model):
    run = models.ForeignKey(MonthlyChargeRun, on_delete=models.CASCADE, related_name="charges")
    unit = models.ForeignKey(Unit, on_delete=models.CASCADE, related_name="charges")
    amount = models.DecimalField(max_digits=8, decimal_places=2)

    def __str__(self) -> str:
        return f"{self.amount} for {self.unit}"


class Statement(models.Model):
    """What the owner of a unit is told of one month."""

    unit = models.ForeignKey(Unit, on_delete=models.CASCADE, related_name="statements")
    month = models.DateField(help_text="Its first day.")
    text = models.TextField()
    token = models.BigIntegerField(default=0, help_text=WRITTEN_BY)

    def __str__(self) -> str:
        return f"{self.unit}, {self.month:%Y-%m}"


class Vendor(models.Model):
    name = models.CharField(max_length=200, unique=True)

    def __str__(self) -> str:
        return self.name


class VendorContract(models.Model):
    """A vendor works for an organization within this window, first and last day included."""

    vendor = models.ForeignKey(Vendor, on_delete=models.CASCADE, related_name="contracts")
    organization = models.ForeignKey(
        Organization, on_delete=models.CASCADE, related_name="contracts"
    )
    starts_on = models.DateField()
    ends_on = models.DateField()

    def __str__(self) -> str:
        return f"{self.vendor} for {self.organization}, {self.starts_on} to {self.ends_on}"


class Complaint(FencedResource):
    """A complaint; its row carries its fence, and is written under its lease only."""

    class Status(models.TextChoices):
        OPEN = "open"
        ASSIGNED = "assigned"

    organization = models.ForeignKey(
        Organization, on_delete=models.PROTECT, related_name="complaints"
    )
    # How long it may stay open, by whether it is urgent.
    SLA: ClassVar = {True: timedelta(days=1), False: timedelta(days=14)}

    text = models.TextField()
    status = models.CharField(max_length=20, choices=Status, default=Status.OPEN)
    urgent = models.BooleanField(default=False)
    filed_at = models.DateTimeField(default=timezone.now, editable=False)

    def __str__(self) -> str:
        return f"complaint {self.pk}"

    @property
    def due_at(self) -> datetime:
        """The deadline by which a vendor is to be assigned."""
        return self.filed_at + self.SLA[self.urgent]


class VendorAssignment(models.Model):
    """
    A vendor's order to deal with a complaint.

    As above, a unique constraint on the complaint is left out to show what the fence does alone.
    """

    complaint = models.ForeignKey(Complaint, on_delete=models.CASCADE, related_name="assignments")
    vendor = models.ForeignKey(Vendor, on_delete=models.CASCADE, related_name="assignments")
    token = models.BigIntegerField(default=0, help_text=WRITTEN_BY)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.vendor} for {self.complaint}"


class Escalation(models.Model):
    """A complaint that has stayed open for too long; the complaint's own row is protected."""

    complaint = models.ForeignKey(Complaint, on_delete=models.CASCADE, related_name="escalations")
    due_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.complaint} of {self.complaint.organization} was due {self.due_at:%Y-%m-%d}"


class Notice(models.Model):
    """What an organization tells its owners, from a certain time on."""

    organization = models.ForeignKey(Organization, on_delete=models.CASCADE, related_name="notices")
    text = models.TextField()
    publish_at = models.DateTimeField()
    published_at = models.DateTimeField(null=True, editable=False)

    def __str__(self) -> str:
        return f"{self.text} ({self.organization})"


class LastWrittenToken(models.Model):
    """What NOT to do, for the demo alone: the token of the last write instead of a fence."""

    organization = models.OneToOneField(
        Organization, on_delete=models.CASCADE, related_name="last_written"
    )
    token = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.token} for {self.organization}"
