"""Charge an organization for a month: read the meters, then write everything at once."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import StrEnum
from typing import Any

from django.db.models import F

from django_fencing.decorators import with_fenced_lock
from django_fencing.leases import Lease
from django_fencing.once import once, once_result
from hoa.meters import read_meters
from hoa.models import Charge, MonthlyChargeRun, Organization, Unit

logger = logging.getLogger(__name__)

# There may be no run yet, so there is no row to lock.
LOCK = "monthly-charges:{organization}"

# What is done once. It names the operation, and neither the token nor the day.
WORK = "monthly-charges:{organization}:{month}"

WATER_PRICE = Decimal("2.50")  # per cubic metre


class Outcome(StrEnum):
    CHARGED = "charged"
    ALREADY_RUN = "already run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a call came to, and the run that the month has."""

    outcome: Outcome
    run: MonthlyChargeRun


@with_fenced_lock(LOCK)
def generate_monthly_charges(organization: Organization, month: date, *, lease: Lease) -> Result:
    """
    Charge each unit for the month of that day, unless it is done already.

    Any number of replicas may call this at any time. Raise LockHeld if another one is charging,
    StaleToken if another one took over while this one stood still, MetersUnavailable, and what
    fenced_lock() raises; then nothing has been written.
    """
    return charge_month(organization, month, lease)


def lock_name(organization: Organization) -> str:
    """Return the name that LOCK gives for the organization."""
    return LOCK.format(organization=organization.pk)


def work_key(organization: Organization, month: date) -> str:
    """Return the key under which the month is charged once, whoever does it."""
    return WORK.format(organization=organization.pk, month=f"{month:%Y-%m}")


def charge_month(organization: Organization, month: date, lease: Lease) -> Result:
    """Charge under a lease that has registered, as with_fenced_lock() sees to."""
    month = month.replace(day=1)
    key = work_key(organization, month)
    # Who comes late need not ask the meters. What counts is once(), in the transaction.
    done = once_result(key)
    if done is None:
        amounts = amounts_due(organization, month, lease.token)
        with lease.atomic():
            done = once(key, charged_under, lease, organization, month, amounts)
    run = MonthlyChargeRun.objects.get(pk=done["run"])
    if done["holder"] != str(lease.holder.id):
        return Result(outcome=Outcome.ALREADY_RUN, run=run)
    tell("month_charged", organization, month, lease.token)
    return Result(outcome=Outcome.CHARGED, run=run)


def charged_under(
    lease: Lease, organization: Organization, month: date, amounts: Mapping[Unit, Decimal]
) -> dict[str, Any]:
    """Charge, and return what every later call gets as well."""
    run = write_run(organization, month, amounts, lease.token)
    return {"run": run.pk, "holder": str(lease.holder.id)}


def amounts_due(organization: Organization, month: date, token: int) -> dict[Unit, Decimal]:
    """Ask the meters, and return what each unit has to pay."""
    tell("month_not_run", organization, month, token)
    units = list(organization.units.order_by("pk"))
    readings = read_meters([unit.label for unit in units], month)
    return {unit: amount_due(unit, readings) for unit in units}


def amount_due(unit: Unit, readings: Mapping[str, Decimal]) -> Decimal:
    """Return what the unit has to pay for what its meter has counted."""
    return round(unit.fee + WATER_PRICE * readings[unit.label], 2)


def write_run(
    organization: Organization, month: date, amounts: Mapping[Unit, Decimal], token: int
) -> MonthlyChargeRun:
    """Write the run, its charges and the new balances."""
    total = sum(amounts.values(), Decimal(0))
    run = MonthlyChargeRun.objects.create(
        organization=organization, month=month, total=total, token=token
    )
    Charge.objects.bulk_create(
        Charge(run=run, unit=unit, amount=amount) for unit, amount in amounts.items()
    )
    for unit, amount in amounts.items():
        Unit.objects.filter(pk=unit.pk).update(balance=F("balance") + amount)
    return run


def tell(event: str, organization: Organization, month: date, token: int) -> None:
    details = {"organization": organization.pk, "month": f"{month:%Y-%m}", "token": token}
    logger.info(f"{event} organization=%(organization)d month=%(month)s token=%(token)d", details)
