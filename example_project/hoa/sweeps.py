"""
Scheduled sweeps, under the other kind of lock.

Each is one transaction that asks nobody else. A transaction-level advisory lock of PostgreSQL is
the right one for that: it lives in the very transaction that writes, so whoever holds it can
commit, and whoever is gone holds it no more. There is nothing to run out, and nothing to fence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pglock
from django.db.models import Q

from hoa.models import Complaint, Escalation, Notice


class Busy(Exception):
    """Another session is sweeping at this moment; the message says what."""


def sweep_sla(now: datetime) -> list[Escalation]:
    """
    Escalate each open complaint that is past its deadline, and draft a notice about it.

    Once per complaint. Raise Busy.
    """
    with alone("sweep_sla"):
        escalations = [
            Escalation(complaint=complaint, due_at=complaint.due_at) for complaint in overdue(now)
        ]
        Notice.objects.bulk_create(
            Notice(
                organization=escalation.complaint.organization,
                text=f"Complaint {escalation.complaint.pk} is overdue: {escalation.complaint.text}",
                publish_at=now,
            )
            for escalation in escalations
        )
        return Escalation.objects.bulk_create(escalations)


def publish_notices(now: datetime) -> int:
    """Publish the notices whose time has come, and return how many these were. Raise Busy."""
    with alone("publish_notices"):
        return Notice.objects.filter(published_at=None, publish_at__lte=now).update(
            published_at=now
        )


@contextmanager
def alone(sweep: str) -> Iterator[None]:
    """Open a transaction that nobody else is in under this name. Raise Busy, without waiting."""
    with pglock.advisory(f"hoa.{sweep}", xact=True, timeout=0) as is_alone:
        if not is_alone:
            raise Busy(f"Another {sweep} is at work.")
        yield


def overdue(now: datetime) -> list[Complaint]:
    """Return the open complaints that are past their deadline and not escalated."""
    late = Q()
    for urgent, length in Complaint.SLA.items():
        late |= Q(urgent=urgent, filed_at__lte=now - length)
    waiting = Complaint.objects.filter(late, status=Complaint.Status.OPEN, escalations=None)
    return list(waiting.select_related("organization").order_by("pk"))
