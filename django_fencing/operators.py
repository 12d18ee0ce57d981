"""What operators do: look at a resource, end a lease that is stuck, prune what is unused."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from urllib.parse import unquote
from uuid import UUID

from django.apps import apps
from django.db import connections, models, transaction
from django.db.models import QuerySet

from django_fencing import flow, ledger
from django_fencing.exceptions import FencingError, StoreUnavailable
from django_fencing.fences import NotRegistered
from django_fencing.grants import Grant, Holder, LeaseRecord, Refusal
from django_fencing.leases import Lease
from django_fencing.models import Fence, FencedResource, FenceEvent, FenceFloor, OnceRecord
from django_fencing.names import Keys
from django_fencing.resources import Resource, ResourceLike, of_fence, resolve
from django_fencing.stores.base import Store, get_store
from django_fencing.timing import now

# Seconds that each look waits for the store.
_PATIENCE = 2.0

# Seconds of an operator's own lease, in which it registers. The row may be locked for as long.
_TTL = 10.0

# So many are deleted in one transaction.
_BATCH = 100
_TTL_OF_BATCH = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A resource at this moment, as the store and the database say. Nothing was changed."""

    resource: str
    lease: LeaseRecord | None  # None: it is free
    counter: int | None  # the token that was proposed last; None: there is no counter
    fence_token: int  # 0: nobody has registered
    fence_holder: UUID | None


class Outcome(StrEnum):
    """What a forced release has come to."""

    RELEASED = "released"
    NOT_FENCED = "not fenced"  # released, but a transaction keeps the fence's row locked
    CHANGED = "changed"  # another holds it than was shown: nothing was done
    FREE = "free"  # nobody holds it: nothing was done


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """The outcome of a forced release, and why."""

    outcome: Outcome
    said: str


def resource_of(text: str, using: str | None = None) -> ResourceLike:
    """Return what a text stands for on a command line: a name, or "app.model:pk" for a row."""
    label, colon, rest = text.partition(":")
    pk, _, alias = rest.partition("@")
    with suppress(LookupError, ValueError):
        model = apps.get_model(label)
        if colon and issubclass(model, FencedResource) and alias in ("", using or alias):
            return (model, unquote(pk))
    return text


def resource_of_lease(keys: Keys, lease: LeaseRecord) -> Resource | None:
    """Return the resource that a listed lease is of, None if its fence cannot be found."""
    kind, _, slug = keys.member.partition(":")
    with suppress(FencingError, LookupError, ValueError):
        if kind == "row":
            found = resolve((apps.get_model(lease.model), lease.pk))
        else:
            found = of_fence(Fence(name=slug), kind.partition("@")[2])
        if found.keys.member == keys.member:
            return found
    return None


def look(keys: Keys) -> LeaseRecord | None:
    """Return the present lease of what has these keys. Raise StoreUnavailable."""
    with get_store().inspect(_PATIENCE) as inspector:
        return inspector.look([keys])[0].lease


def state(resource: ResourceLike, using: str | None = None) -> State:
    """
    Look at a resource, from any process.

    Raise StoreUnavailable, and InvalidResource for what cannot be locked.
    """
    found = resolve(resource, using)
    with get_store().inspect(_PATIENCE) as inspector:
        lease = inspector.look([found.keys])[0].lease
        (counter,) = inspector.counters([found.keys])
    fences: QuerySet[FencedResource] = QuerySet(found.model, using=found.alias)
    fence = fences.filter(pk=found.pk).values_list("last_fence_token", "last_fence_holder").first()
    token, holder = fence or (0, None)
    return State(
        resource=found.name,
        lease=lease,
        counter=counter,
        fence_token=token,
        fence_holder=holder,
    )


def force_release(
    resource: Resource, shown: str, *, user: str = "", reason: str = "", dry_run: bool = False
) -> Forced:
    """
    End the lease that was `shown` as LeaseRecord.holder, and fence its holder.

    The operator's own lease takes its place, registers and is released. So a late write of the
    former holder is refused, and another one that holds the resource meanwhile is left alone.
    Raise InsideTransaction in a transaction on the fence's database, StoreUnavailable.
    """
    flow.refuse_transaction(resource.alias, "release", resource.name, "do so outside of it.")
    store = get_store()
    present = look(resource.keys)
    if present is None:
        return Forced(outcome=Outcome.FREE, said="nobody holds it: nothing was done")
    if present.holder != shown:
        return _changed(described(present))
    if dry_run:
        said = f"the lease of {described(present)} would be ended, and its holder fenced"
        return Forced(outcome=Outcome.RELEASED, said=said)
    holder = flow.new_holder(f"forced release by {user}" if user else "forced release")
    sent = now()
    floor = _floor(resource)
    answer = store.take_over(resource, shown, holder, ttl=_TTL, floor=floor)
    if answer is None:
        return Forced(outcome=Outcome.FREE, said="nobody holds it any more: nothing was done")
    if isinstance(answer, Refusal):
        return _changed(answer.held_by or "unknown")
    lease = Lease(store, resource, holder, token=answer.token, ttl=_TTL, sent=sent)
    return _fenced(lease, resource, present, user, reason)


def described(lease: LeaseRecord) -> str:
    """Return who holds it, for people."""
    if not lease.host:
        return f"unknown ({lease.holder})"
    return f"{lease.function} (host {lease.host}, pid {lease.pid}, token {lease.token})"


def prunable(alias: str, before: datetime) -> dict[str, int]:
    """Count what prune() would look at."""
    return {
        "fences": _old_fences(alias, before).count(),
        "once records": _unused(OnceRecord, alias, before).count(),
        "events": _unused(FenceEvent, alias, before).count(),
    }


def prune(alias: str, before: datetime) -> dict[str, int]:
    """
    Delete what was not used since `before`, of all tenants, and return how many of each.

    A named fence that anybody holds stays. The highest deleted token is kept: a new fence begins
    above it, so that no token comes round again.
    """
    return {
        "fences": sum(_prune_fences(alias, before)),
        "once records": sum(_prune_rows(OnceRecord, alias, before)),
        "events": sum(_prune_rows(FenceEvent, alias, before)),
    }


def _fenced(
    lease: Lease, resource: Resource, evicted: LeaseRecord, user: str, reason: str
) -> Forced:
    """Register the operator's lease, note it, and give it back."""
    outcome, said = Outcome.RELEASED, f"the lease of {described(evicted)} was ended"
    try:
        lease._register(_TTL)
        said += f", and its holder is fenced by token {lease.token}"
    except NotRegistered as error:
        outcome = Outcome.NOT_FENCED
        said += f", but its holder is not fenced yet: {error}. The next holder will fence it"
    finally:
        lease._leave(None)
    whole = reason if outcome is Outcome.RELEASED else f"{reason} (not fenced)".strip()
    ledger.forced(resource, lease.holder, described(evicted), lease.token, user=user, reason=whole)
    return Forced(outcome=outcome, said=said)


def _changed(by: str) -> Forced:
    said = f"it is held by {by}, and not as it was shown: nothing was done"
    return Forced(outcome=Outcome.CHANGED, said=said)


def _floor(resource: Resource) -> int:
    fences: QuerySet[FencedResource] = QuerySet(resource.model, using=resource.alias)
    found = fences.filter(pk=resource.pk).values_list("last_fence_token", flat=True)
    return int(next(iter(found), 0))


def _prune_fences(alias: str, before: datetime) -> Iterator[int]:
    """Yield how many fences each batch has deleted, each under its own lock."""
    store, last = get_store(), ""
    while True:
        fences = list(_old_fences(alias, before).filter(name__gt=last).order_by("name")[:_BATCH])
        if not fences:
            return
        last = fences[-1].name
        holder = flow.new_holder("fencing prune")
        leased: list[tuple[Resource, int]] = []
        try:
            for fence in fences:
                resource = of_fence(fence, alias)
                if grant := _leased(store, resource, holder, fence.last_fence_token):
                    leased.append((resource, grant.token))
            yield _delete(alias, before, leased)
        finally:
            with suppress(StoreUnavailable):  # they run out
                for resource, _ in leased:
                    store.release(resource, holder)


def _leased(store: Store, resource: Resource, holder: Holder, floor: int) -> Grant | None:
    answer = store.acquire(resource, holder, ttl=_TTL_OF_BATCH, floor=floor)
    return answer if isinstance(answer, Grant) else None


def _delete(alias: str, before: datetime, leased: list[tuple[Resource, int]]) -> int:
    """Delete those fences of the leased ones that are old still."""
    if not leased:
        return 0
    with transaction.atomic(using=alias):
        rows = _old_fences(alias, before).filter(pk__in=[resource.pk for resource, _ in leased])
        if connections[alias].features.has_select_for_update_skip_locked:
            rows = rows.select_for_update(skip_locked=True)
        names = list(rows.values_list("pk", flat=True))
        highest = max([token for resource, token in leased if resource.pk in names], default=0)
        floors = FenceFloor.objects.using(alias)
        floors.get_or_create(pk=1, defaults={"token": highest})
        floors.filter(token__lt=highest).update(token=highest)
        deleted, _ = _old_fences(alias, before).filter(pk__in=names).delete()
    return deleted


def _prune_rows(model: type[models.Model], alias: str, before: datetime) -> Iterator[int]:
    while keys := list(_unused(model, alias, before).values_list("pk", flat=True)[:_BATCH]):
        deleted, _ = _unused(model, alias, before).filter(pk__in=keys).delete()
        yield deleted


def _old_fences(alias: str, before: datetime) -> QuerySet[Any]:
    return Fence.objects.using(alias).filter(registered_at__lt=before)


def _unused(model: type[models.Model], alias: str, before: datetime) -> QuerySet[Any]:
    since = "used_at__lt" if model is OnceRecord else "created_at__lt"
    return QuerySet(model, using=alias).filter(**{since: before})
