"""Write the owners' statements of a month: a long job, in chunks, which can be resumed."""

from collections.abc import Iterator
from datetime import date
from itertools import islice

from django_fencing.leases import Lease
from hoa.models import Charge, Organization, Statement, Unit


def statements_lock(organization: Organization, month: date) -> str:
    """Return the name of the lock. Other months of the organization are written at any time."""
    return f"statements:{organization.pk}:{month:%Y-%m}"


def units_without_statement(organization: Organization, month: date) -> list[Unit]:
    """Return what is still to be done, in the order in which it is done."""
    written = Statement.objects.filter(month=month).values("unit")
    return list(organization.units.exclude(pk__in=written).order_by("pk"))


def write_statements(
    organization: Organization, month: date, lease: Lease, chunk: int
) -> Iterator[int]:
    """
    Write the statements that are missing, and yield after each chunk how many it has written.

    The lease has to be registered before this begins. A chunk is one fenced transaction: when
    another process has taken over it raises StaleToken, what it has written before stands, and the
    other one goes on from there.
    """
    units = iter(units_without_statement(organization, month))
    while batch := list(islice(units, chunk)):
        texts = {unit: statement_of(unit, month) for unit in batch}
        with lease.atomic():
            Statement.objects.bulk_create(
                Statement(unit=unit, month=month, text=text, token=lease.token)
                for unit, text in texts.items()
            )
        yield len(batch)


def statement_of(unit: Unit, month: date) -> str:
    """Return the text for the unit's owner."""
    charges = Charge.objects.filter(unit=unit, run__month=month).order_by("pk")
    lines = [f"{month:%B %Y}: {charge.amount}" for charge in charges] or ["Nothing was charged."]
    return "\n".join([f"Unit {unit}", *lines, f"Balance: {unit.balance}"])
