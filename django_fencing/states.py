"""What the store and the database say of a resource at this moment. Nothing is changed."""

from dataclasses import dataclass
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections
from django.db.models import QuerySet

from django_fencing import fences, postgresql
from django_fencing.conf import conf
from django_fencing.exceptions import StoreUnavailable
from django_fencing.grants import LeaseRecord
from django_fencing.models import Fence, FenceEvent
from django_fencing.names import Keys
from django_fencing.postgresql import Backend
from django_fencing.resources import Resource, ResourceLike, resolve, tenant
from django_fencing.stores.base import get_store

# Seconds that each look waits for the store.
_PATIENCE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """
    A resource at this moment, as the store and the database say.

    Where one of the two cannot be asked, its outage says why, and what it knows is None.
    """

    resource: str
    kind: str  # "name" or "row"
    lease: LeaseRecord | None  # None: it is free
    counter: int | None  # the token that was proposed last; None: there is no counter
    fence_token: int | None  # 0: nobody has registered; None: the row is not there
    fence_holder: UUID | None
    locked_by: list[Backend]  # whose open transactions keep its row locked, where that can be told
    store_outage: str
    database_outage: str


def look(keys: Keys) -> LeaseRecord | None:
    """Return the present lease of what has these keys. Raise StoreUnavailable."""
    with get_store().inspect(_PATIENCE) as inspector:
        return inspector.look([keys])[0].lease


def state(resource: ResourceLike | Resource, using: str | None = None) -> State:
    """
    Look at a resource, from any process.

    Raise InvalidResource for what cannot be locked.
    """
    found = resource if isinstance(resource, Resource) else resolve(resource, using)
    store_outage = database_outage = ""
    lease = counter = token = holder = None
    locked_by: list[Backend] = []
    try:
        with get_store().inspect(_PATIENCE) as inspector:
            lease = inspector.look([found.keys])[0].lease
            (counter,) = inspector.counters([found.keys])
    except (StoreUnavailable, ImproperlyConfigured) as error:
        store_outage = " ".join(str(error).split())
    try:
        if fence := fences.read(found):
            token, holder = fence
        elif found.model is Fence:
            token = 0
        locked_by = _locking(found)
    except DatabaseError as error:
        database_outage = " ".join(str(error).split())
    return State(
        resource=found.name,
        kind="name" if found.model is Fence else "row",
        lease=lease,
        counter=counter,
        fence_token=token,
        fence_holder=holder,
        locked_by=locked_by,
        store_outage=store_outage,
        database_outage=database_outage,
    )


def _locking(resource: Resource) -> list[Backend]:
    if connections[resource.alias].vendor != "postgresql":
        return []
    return postgresql.backends_locking(resource.model, resource.alias, resource.pk)


def events(resource: str) -> QuerySet[FenceEvent]:
    """Return the ledger's lines about this tenant's resource of that name, the newest first."""
    ledger: QuerySet[FenceEvent] = QuerySet(FenceEvent, using=conf.database)
    return ledger.filter(namespace=tenant(), resource=resource).order_by("-pk")


def described(lease: LeaseRecord) -> str:
    """Return who holds it, for people."""
    if not lease.host:
        return f"unknown ({lease.holder})"
    return f"{lease.function} (host {lease.host}, pid {lease.pid}, token {lease.token})"
