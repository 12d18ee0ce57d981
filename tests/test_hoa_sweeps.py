"""The example's sweeps: a lock in the transaction that writes, and nothing to fence."""

import threading
import uuid
from datetime import datetime, timedelta
from io import StringIO
from typing import Any
from unittest import mock

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection, transaction
from django.utils import timezone
from hoa import sweeps
from hoa.models import Complaint, Escalation, Notice, Organization
from hoa.samples import sample_organization
from hoa.sweeps import Busy, alone, publish_notices, sweep_sla

from tests.helpers import SECONDS, closing, in_threads, started

pytestmark = pytest.mark.django_db(transaction=True)

NOW = timezone.now()


@pytest.fixture
def organization(transactional_db: None) -> Organization:
    """Return an organization."""
    return sample_organization(f"test {uuid.uuid4().hex}")


def complaint(organization: Organization, days: float, **values: Any) -> Complaint:
    """Return a complaint that was filed so many days ago."""
    return Complaint.objects.create(
        organization=organization, text="It leaks.", filed_at=NOW - timedelta(days=days), **values
    )


def test_open_complaints_past_their_deadline_are_escalated_once(
    organization: Organization,
) -> None:
    """An urgent one after a day, others after two weeks; each with a notice."""
    late = [complaint(organization, 1.1, urgent=True), complaint(organization, 14.1)]
    complaint(organization, 0.9, urgent=True)
    complaint(organization, 13.9)
    complaint(organization, 20, status=Complaint.Status.ASSIGNED)

    first, second = sweep_sla(NOW), sweep_sla(NOW)

    assert [escalation.complaint for escalation in first] == late
    assert [escalation.due_at for escalation in first] == [one.due_at for one in late]
    assert second == []
    assert organization.notices.count() == Escalation.objects.count() == 2
    assert f"Complaint {late[0].pk} is overdue" in organization.notices.earliest("pk").text


def test_notices_are_published_when_their_time_has_come(organization: Organization) -> None:
    """Once, and not before."""
    for hours in (-1, 0, 1):
        organization.notices.create(text="Water off", publish_at=NOW + timedelta(hours=hours))

    counts = [publish_notices(NOW), publish_notices(NOW), publish_notices(NOW + timedelta(hours=2))]

    assert counts == [2, 0, 1]


@pytest.mark.parametrize("command", ["sweep_sla", "publish_notices"])
def test_of_two_at_once_one_works_and_the_other_says_so(
    organization: Organization, command: str
) -> None:
    """The other one ends well, as a command should that cron starts on every replica."""
    complaint(organization, 30)
    organization.notices.create(text="Water off", publish_at=NOW)
    errors, output = StringIO(), StringIO()

    def sweep(pause: Any) -> None:
        with alone(command):
            pause()

    with started(sweep) as first:
        first.reach_pause()
        call_command(command, stderr=errors, stdout=output)
        written = (Escalation.objects.count(), Notice.objects.exclude(published_at=None).count())
    call_command(command, stdout=output)

    assert errors.getvalue() == f"Skipped: Another {command} is at work.\n"
    assert written == (0, 0)
    assert "1 escalated." in output.getvalue() or "1 published." in output.getvalue()


def test_the_two_sweeps_do_not_wait_for_each_other(organization: Organization) -> None:
    """Each has a lock of its own."""
    with alone("publish_notices"):
        (result,) = in_threads(lambda: sweep_sla(NOW))

    assert result == []


def races(organization: Organization, sweep: Any) -> set[int]:
    """Let two sweep at once, again and again, and return how often a complaint was escalated."""
    counts = set()
    for _ in range(30):
        late = complaint(organization, 30)
        in_threads(lambda: sweep(NOW), lambda: sweep(NOW))
        counts.add(late.escalations.count())
    return counts


def test_of_many_races_none_escalates_twice(organization: Organization) -> None:
    """Whoever comes second finds the lock held, or the first one's rows."""
    assert races(organization, sweep_sla) == {1}


def test_without_the_lock_the_same_sweeps_escalate_twice(organization: Organization) -> None:
    """The twin: the same transaction, and nobody is kept out of it."""
    both, overdue = threading.Barrier(2), sweeps.overdue

    def found(now: datetime) -> list[Complaint]:
        late = overdue(now)
        both.wait(SECONDS)
        return late

    def unlocked(sweep: str) -> transaction.Atomic:
        return transaction.atomic()

    with (
        mock.patch.object(sweeps, "alone", unlocked),
        mock.patch.object(sweeps, "overdue", found),
    ):
        assert races(organization, sweep_sla) == {2}


def test_a_dead_session_holds_nothing(organization: Organization) -> None:
    """The lock ends with the transaction that would have written, and nothing of it is left."""
    late = complaint(organization, 30)

    def sweep(pause: Any) -> Any:
        with alone("sweep_sla"):
            Escalation.objects.create(complaint=late, due_at=late.due_at)
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                backend.append(cursor.fetchone()[0])
            pause()

    backend: list[int] = []
    with started(sweep) as dying:
        dying.reach_pause()
        with pytest.raises(Busy):
            sweep_sla(NOW)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", backend)
        escalations = sweep_sla(NOW)
        error = dying.finish()

    assert isinstance(error, OperationalError)
    assert [escalation.complaint for escalation in escalations] == [late]


def test_a_sweep_that_fails_frees_the_lock(organization: Organization) -> None:
    """With its rows."""
    complaint(organization, 30)
    broken = mock.patch.object(Escalation.objects, "bulk_create", side_effect=OperationalError)
    with broken, pytest.raises(OperationalError):
        sweep_sla(NOW)

    assert not organization.notices.exists()
    assert len(closing(sweep_sla, NOW)) == 1
