"""What operators do: tell which resource is meant, end a lease that is stuck."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any
from urllib.parse import unquote

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import OperationalError, connections, models, router
from django.db.models import QuerySet
from django.utils.connection import ConnectionDoesNotExist

from django_fencing import fences, flow, ledger
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
from django_fencing.resources import Resource, of_fence, resolve, tenant
from django_fencing.states import described, look
from django_fencing.stores.base import Store, get_store
from django_fencing.timing import now

# Seconds of an operator's own lease, in which it registers. The row may be locked for as long.
_TTL = 10.0

# So many rows are looked at whose key begins as that of a lease.
_CANDIDATES = 20


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
    Return what a text stands for on a command line: "app.model:pk" a row, anything else a name.

    Only models with a fence have rows that can be locked. Raise InvalidResource.
    """
    label, colon, rest = text.partition(":")
    app_label, _, model_name = label.lower().partition(".")
    try:
        model = apps.get_model(app_label, model_name)
    except LookupError:
        return resolve(text, using)
    if not (colon and issubclass(model, FencedResource)):
        return resolve(text, using)
    pk, at, alias = rest.rpartition("@")
    if not (at and alias in connections):
        pk, alias = rest, ""
    if alias and using and alias != using:
        raise InvalidResource(f"{text!r} is not in the database {using!r}.", resource=text)
    return resolve((model, unquote(pk)), using or alias or None)


def resource_of_lease(keys: Keys, lease: LeaseRecord) -> Resource | None:
    """Return the resource that a listed lease is of, None if its fence cannot be found."""
    kind, _, slug = keys.member.partition(":")
    if kind != "row":
        candidates = _named(slug, kind.partition("@")[2])
    else:
        candidates = chain(_row_by_name(slug), _row_by_key(lease))
    with suppress(FencingError, LookupError, ValueError, FieldDoesNotExist, ConnectionDoesNotExist):
        return next((found for found in candidates if found.keys.member == keys.member), None)
    return None


def _named(slug: str, alias: str) -> Iterator[Resource]:
    if not alias or alias in connections:
        yield of_fence(Fence(name=slug), alias)


def _row_by_name(slug: str) -> Iterator[Resource]:
    """Yield the row that the name says, unless that is cut off or a name of its own."""
    with suppress(FencingError, LookupError, ValueError):
        yield resource_of(read_slug(slug, tenant()) or "")


def _row_by_key(lease: LeaseRecord) -> Iterator[Resource]:
    """Yield the rows whose key in the fence's model may be the lease's, which is cut off too."""
    model: Any = apps.get_model(lease.model)
    key: Any = fence_model(model)._meta.pk
    rows: QuerySet[Any] = QuerySet(model, using=router.db_for_write(model))
    is_text = isinstance(key, models.CharField | models.TextField)
    lookup = f"{key.name}__startswith" if is_text else key.name
    yield from map(resolve, rows.filter(**{lookup: lease.pk})[:_CANDIDATES])


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
        return _changed(f"{described(present)} as {present.holder}")
    if dry_run:
        said = f"the lease of {described(present)} would be ended, and its holder fenced"
        return Forced(outcome=Outcome.RELEASED, said=said)
    holder = flow.new_holder(f"forced release by {user}" if user else "forced release")
    sent = now()
    fence = fences.read(resource)
    floor = fence.token if fence else 0
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
    evicted = described(present)
    outcome, said = Outcome.NOT_FENCED, f"the lease of {evicted} was ended"
    try:
        lease._register(_TTL / 2)
        outcome = Outcome.RELEASED
        said += f", and its holder is fenced by token {lease.token}"
    except NoSuchRow:
        outcome = Outcome.RELEASED
        said += "; its row is gone"
    except (NotRegistered, OperationalError) as error:
        said += f", but its holder is not fenced yet: {error}. The next holder will fence it"
    finally:
        lease._leave(None)
        is_over = lease._is_registered or outcome is Outcome.RELEASED
        why = reason if is_over else f"{reason} (not fenced)".strip()
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


def _changed(by: str) -> Forced:
    said = f"it is held by {by}, and not as it was shown: nothing was done"
    return Forced(outcome=Outcome.CHANGED, said=said)
