"""Three guards for the same work: two that look right, and the one that is."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any, Protocol, cast

from django.conf import settings
from django.core.cache import cache
from django.db import transaction
from django_redis import get_redis_connection

from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence, FenceEvent, OnceRecord
from django_fencing.resources import resolve
from hoa.charges import (
    Outcome,
    Result,
    amounts_due,
    charge_month,
    lock_name,
    tell,
    write_run,
)
from hoa.models import LastWrittenToken, Organization


class RefusedByToken(Exception):
    """The textbook rule has refused a write."""


def charge_with_plain_lock(organization: Organization, month: date, *, ttl: float) -> Result:
    """NOT what to do: the lock runs out, and the write does not notice."""
    with cast("Any", cache).lock(unsafe_name(organization), timeout=ttl, blocking=False):
        return look_ask_and_write(organization, month, 0, transaction.atomic)


def charge_with_textbook_token(organization: Organization, month: date, *, ttl: float) -> Result:
    """NOT what to do: a token is refused only if a higher one has *written* before."""
    last_written, _ = LastWrittenToken.objects.get_or_create(organization=organization)
    with cast("Any", cache).lock(unsafe_name(organization), timeout=ttl, blocking=False):
        token = get_redis_connection().incr(textbook_counter(organization))

        @contextmanager
        def compare_and_write() -> Iterator[None]:
            with transaction.atomic():
                older = LastWrittenToken.objects.filter(pk=last_written.pk, token__lt=token)
                if not older.update(token=token):
                    raise RefusedByToken(f"Token {token} is not above the last one written.")
                yield

        return look_ask_and_write(organization, month, token, compare_and_write)


def charge_with_fence(organization: Organization, month: date, *, ttl: float) -> Result:
    """Do as generate_monthly_charges() does, with a lease of this length."""
    with fenced_lock(lock_name(organization), ttl=ttl) as lease:
        return charge_month(organization, month, lease)


def look_ask_and_write(
    organization: Organization,
    month: date,
    token: int,
    atomic: Callable[[], AbstractContextManager[Any]],
) -> Result:
    """Do the same reads and writes as charge_month(), and trust the lock."""
    if run := organization.runs.filter(month=month).first():
        return Result(outcome=Outcome.ALREADY_RUN, run=run)
    amounts = amounts_due(organization, month, token)
    with atomic():
        run = write_run(organization, month, amounts, token)
    tell("month_charged", organization, month, token)
    return Result(outcome=Outcome.CHARGED, run=run)


def unsafe_name(organization: Organization) -> str:
    return f"{settings.FENCING['NAMESPACE']}:{lock_name(organization)}"


def textbook_counter(organization: Organization) -> str:
    return f"{unsafe_name(organization)}:token"


def forget(organization: Organization) -> None:
    """Remove what the guards keep about an organization that nobody will ever lock again."""
    resource = resolve(lock_name(organization))
    Fence.objects.filter(pk=resource.pk).delete()
    OnceRecord.objects.filter(resource=resource.name).delete()
    FenceEvent.objects.filter(namespace=settings.FENCING["NAMESPACE"]).delete()
    get_redis_connection().delete(resource.keys.token, textbook_counter(organization))


def remove(organization: Organization) -> None:
    """Delete an organization with its runs, which the database protects."""
    for run in organization.runs.all():
        with fenced_atomic(run) as protected:
            protected.delete()
        get_redis_connection().delete(resolve(run).keys.token)
    organization.delete()


class Charge(Protocol):
    def __call__(self, organization: Organization, month: date, *, ttl: float) -> Result: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A guard, and how the demo's interleaving ends under it."""

    title: str
    charge: Charge
    lock_key: Callable[[Organization], str]  # in Redis
    runs: int
    endings: dict[str, str]  # of replica A, which is paused, and of replica B


VARIANTS = {
    "plain": Variant(
        title="a plain lock, cache.lock() of django-redis",
        charge=charge_with_plain_lock,
        lock_key=lambda organization: cache.make_key(unsafe_name(organization)),
        runs=2,
        endings={"A": "LockNotOwnedError", "B": "charged"},
    ),
    "textbook": Variant(
        title="a token that is compared with the last one written",
        charge=charge_with_textbook_token,
        lock_key=lambda organization: cache.make_key(unsafe_name(organization)),
        runs=2,
        endings={"A": "LockNotOwnedError", "B": "charged"},
    ),
    "fenced": Variant(
        title="django_fencing",
        charge=charge_with_fence,
        lock_key=lambda organization: resolve(lock_name(organization)).keys.lease,
        runs=1,
        endings={"A": "StaleToken", "B": "charged"},
    ),
}
