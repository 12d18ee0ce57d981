"""What operators do: look at a resource, end a lease that is stuck."""

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import unquote
from uuid import UUID

from django.apps import apps
from django.db import OperationalError, connections, router
from django.db.models import QuerySet
from django.utils.connection import ConnectionDoesNotExist

from django_fencing import flow, ledger
from django_fencing.exceptions import (
    FencingError,
    InvalidResource,
    NoSuchRow,
    StoreUnavailable,
)
from django_fencing.fences import NotRegistered
from django_fencing.grants import Grant, Holder, LeaseRecord, Refusal
from django_fencing.leases import Lease
from django_fencing.models import Fence, FencedResource, fence_model
from django_fencing.names import Keys, read_slug
from django_fencing.resources import Resource, ResourceLike, of_fence, resolve, tenant
from django_fencing.stores.base import Store, get_store
from django_fencing.timing import now

# Seconds that each look waits for the store.
_PATIENCE = 2.0

# Seconds of an operator's own lease, in which it registers. The row may be locked for as long.
_TTL = 10.0


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


def resource_of(text: str, using: str | None = None) -> Resource:
    """
    Return what a text stands for on a command line: a name, or "app.model:pk" for a row.

    Raise InvalidResource for a model without a fence, NoSuchRow.
    """
    label, colon, rest = text.partition(":")
    app_label, dot, model_name = label.lower().partition(".")
    if not (colon and dot and app_label in apps.app_configs):
        return resolve(text, using)
    try:
        model = apps.get_model(app_label, model_name)
    except LookupError as error:
        raise InvalidResource(f"There is no model {label!r}.", resource=text) from error
    pk, at, alias = rest.rpartition("@")
    if not (at and alias in connections):
        pk, alias = rest, ""
    found = resolve((model, unquote(pk)), using or alias or None)
    if not QuerySet(found.model, using=found.alias).filter(pk=found.pk).exists():
        raise NoSuchRow(f"There is no {label} {pk!r} in {found.alias!r}.", resource=text)
    return found


def resource_of_lease(keys: Keys, lease: LeaseRecord) -> Resource | None:
    """Return the resource that a listed lease is of, None if its fence cannot be found."""
    kind, _, slug = keys.member.partition(":")
    with suppress(FencingError, LookupError, ValueError, ConnectionDoesNotExist):
        if kind == "row":
            found = _row_of_lease(slug, lease)
        else:
            found = of_fence(Fence(name=slug), kind.partition("@")[2])
            connections[found.alias]
        if found.keys.member == keys.member:
            return found
    return None


def _row_of_lease(slug: str, lease: LeaseRecord) -> Resource:
    """Return the row's resource, by its name or, where that is its own or cut off, by its key."""
    name = read_slug(slug, tenant()) or ""
    with suppress(FencingError, LookupError, ValueError):
        found = resource_of(name)
        if found.name == name and found.model is not Fence:
            return found
    model: Any = apps.get_model(lease.model)
    rows: QuerySet[Any] = QuerySet(model, using=router.db_for_write(model))
    return resolve(rows.get(**{str(fence_model(model)._meta.pk.name): lease.pk}))


def look(keys: Keys) -> LeaseRecord | None:
    """Return the present lease of what has these keys. Raise StoreUnavailable."""
    with get_store().inspect(_PATIENCE) as inspector:
        return inspector.look([keys])[0].lease


def state(resource: ResourceLike | Resource, using: str | None = None) -> State:
    """
    Look at a resource, from any process.

    Raise StoreUnavailable, and InvalidResource for what cannot be locked.
    """
    found = resource if isinstance(resource, Resource) else resolve(resource, using)
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
    try:
        answer = _taken_over(store, resource, shown, holder, floor)
    except StoreUnavailable:
        with suppress(StoreUnavailable):
            store.release(resource, holder)  # whatever comes late is refused
        raise
    if answer is None:
        return Forced(outcome=Outcome.FREE, said="nobody holds it any more: nothing was done")
    if isinstance(answer, Refusal):
        return _changed(answer.held_by or "unknown")
    lease = Lease(store, resource, holder, token=answer.token, ttl=_TTL, sent=sent)
    outcome, said = Outcome.RELEASED, f"the lease of {described(present)} was ended"
    try:
        lease._register(_TTL / 2)
        said += f", and its holder is fenced by token {lease.token}"
    except NoSuchRow:
        said += "; its row is gone"
    except (NotRegistered, OperationalError) as error:
        outcome = Outcome.NOT_FENCED
        said += f", but its holder is not fenced yet: {error}. The next holder will fence it"
    finally:
        lease._leave(None)
        why = reason if outcome is Outcome.RELEASED else f"{reason} (not fenced yet)".strip()
        evicted = described(present)
        ledger.forced(resource, holder, evicted, lease.token, user=user, reason=why)
    return Forced(outcome=outcome, said=" ".join(said.split()))


def _taken_over(
    store: Store, resource: Resource, shown: str, holder: Holder, floor: int
) -> Grant | Refusal | None:
    """Take over, with a second attempt if the store does not answer: the reply may be lost."""
    try:
        return store.take_over(resource, shown, holder, ttl=_TTL, floor=floor)
    except StoreUnavailable:
        return store.take_over(resource, shown, holder, ttl=_TTL, floor=floor)


def described(lease: LeaseRecord) -> str:
    """Return who holds it, for people."""
    if not lease.host:
        return f"unknown ({lease.holder})"
    return f"{lease.function} (host {lease.host}, pid {lease.pid}, token {lease.token})"


def _changed(by: str) -> Forced:
    said = f"it is held by {by}, and not as it was shown: nothing was done"
    return Forced(outcome=Outcome.CHANGED, said=said)


def _floor(resource: Resource) -> int:
    fences: QuerySet[FencedResource] = QuerySet(resource.model, using=resource.alias)
    found = fences.filter(pk=resource.pk).values_list("last_fence_token", flat=True)
    return int(next(iter(found), 0))
