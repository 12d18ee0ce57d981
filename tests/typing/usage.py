"""The public calls as a typed project writes them: checked by mypy, never run."""

from contextlib import AbstractContextManager
from datetime import timedelta
from decimal import Decimal
from typing import Any, assert_type
from uuid import UUID

from django.core.management.base import BaseCommand
from django.http import HttpRequest, HttpResponse

from django_fencing.admin import FencedResourceAdmin
from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import LockHeld, StaleToken
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import FencedLock, fenced_atomic, fenced_lock
from django_fencing.signals import lease_lost
from tests.shop.models import Job


def locks(job: Job) -> None:
    assert_type(fenced_lock(job, ttl=30, wait=2.5), FencedLock)
    assert_type(fenced_lock((Job, 7), ttl=timedelta(minutes=1), using="other"), FencedLock)
    assert_type(fenced_lock("name", ttl=Decimal(3), register=False).acquire(), Lease)
    with fenced_lock("name") as lease, lease.atomic() as row:
        assert_type(lease, Lease)
        assert_type(row, Any)
    opened: AbstractContextManager[Any] = fenced_atomic(job)
    with opened as row:
        row.save()
    fenced_lock(7)  # type: ignore[arg-type]
    fenced_lock("name", ttl="30")  # type: ignore[arg-type]
    fenced_lock("name", 30)  # type: ignore[call-arg]


def leases(lease: Lease) -> None:
    assert_type(lease.token, int)
    assert_type(lease.holder.id, UUID)
    assert_type(lease.resource, str)
    assert_type(lease.remaining, float)
    assert_type(lease.lost, bool)
    assert_type(lease.release(), bool)
    lease.extend(timedelta(seconds=5))
    assert_type(current_lease(), Lease)


@with_fenced_lock("charges:{organization_id}", ttl=timedelta(minutes=5), on_held="skip")
def charge(organization_id: int, *, lease: Lease) -> int:
    return organization_id


@with_fenced_lock(lambda job: job, on_held=lambda held: held.retry_after)
def close(job: Job) -> str:
    return job.note


@with_fenced_lock(lambda request, pk: (Job, pk), respond=False)
def view(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse(current_lease().row.note)


@with_fenced_lock("export:{number}")
async def export(number: int) -> str:
    return str(number)


class Command(BaseCommand):
    @with_fenced_lock("publish")
    def handle(self, **options: Any) -> None: ...


class JobAdmin(FencedResourceAdmin):
    list_display = ("amount", "last_fence_token")


def note_loss(lease: Lease, reason: str, **kwargs: Any) -> None: ...


async def decorated(job: Job, request: HttpRequest) -> None:
    lease_lost.connect(note_loss, sender=Job)
    assert_type(charge(organization_id=7), int)
    assert_type(close(job), str)
    assert_type(view(request, pk=7), HttpResponse)
    assert_type(await export(7), str)
    with_fenced_lock("name", on_held="ignore")  # type: ignore[arg-type]


def errors(held: LockHeld, stale: StaleToken) -> None:
    assert_type(held.retry_after, float | None)
    assert_type(stale.fence_holder, UUID | None)
