"""Register and check: all that is ever asked of a fence."""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import OperationalError, connections, transaction
from django.db.models import Max, Q, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from django_fencing import postgresql
from django_fencing.conf import conf
from django_fencing.exceptions import NoSuchRow, StaleToken
from django_fencing.models import Fence, FencedResource, FenceFloor
from django_fencing.resources import Resource


class NotRegistered(Exception):
    """The fence could not be moved up to a lease; the message says why."""


class OldSnapshot(Exception):
    """What the open transaction reads may be older than the row lock that it waits for."""


class Registration(NamedTuple):
    """What a fence says."""

    token: int
    holder: UUID | None

    def __str__(self) -> str:
        """Return what the triggers compare."""
        return f"{self.token}:{self.holder}"


def register(
    resource: Resource, mine: Registration, *, granted: int, patience: float
) -> FencedResource | None:
    """
    Move the fence up to `mine` in a short transaction of its own, and return the fresh row.

    Return None unless the fence is below the token that the store has granted, or is an
    earlier registration of this very holder. Raise NotRegistered if another transaction keeps the
    row for `patience` seconds (PostgreSQL; elsewhere the database's own limit counts). Deadlocks
    and serialization failures are tried again; every other database error passes through.
    """
    for last in (False, False, True):
        try:
            with _own_transaction(resource.alias):
                return _move(resource, mine, granted, patience, alone=True)
        except OperationalError as error:
            if last or postgresql.sqlstate(error) not in postgresql.RETRYABLE:
                raise
    raise AssertionError("the last try returns or raises")


def register_inside(
    resource: Resource, mine: Registration, *, granted: int, patience: float
) -> FencedResource | None:
    """
    Do as register(), but as the first statement of the transaction that is open.

    Above READ COMMITTED raise OldSnapshot and change nothing: the snapshot that the transaction
    reads from is taken before it waits for the row lock.
    """
    row = _move(resource, mine, granted, patience, alone=False)
    if row is None and postgresql.reads_from_snapshot(resource.alias):
        raise OldSnapshot
    return row


def check(resource: Resource, mine: Registration) -> FencedResource:
    """
    Lock the fence's row in the open transaction and return it, fresh.

    Raise StaleToken unless the fence still is `mine`: token and holder.
    """
    if connections[resource.alias].vendor == "postgresql":
        row = _check_presenting(resource, mine)
    else:
        row = _check(resource, mine)
    found = None if row is None else Registration(row.last_fence_token, row.last_fence_holder)
    if row is None or found != mine:
        raise _stale(resource, mine, found)
    return _whole(resource, row)


def read(resource: Resource) -> Registration | None:
    """Return what the fence says, None if there is no row. Nothing is locked."""
    found = _rows(resource).values_list("last_fence_token", "last_fence_holder")
    return next((Registration(*values) for values in found), None)


def stale(resource: Resource, mine: Registration) -> StaleToken:
    """Return the error that says what the fence is instead of `mine`."""
    return _stale(resource, mine, read(resource))


def reached(resource: Resource) -> tuple[int, bool]:
    """
    Return the token above which the next one has to be, and whether a counter below it was lost.

    It was not if nobody has registered, nor if a name was idle for so long that it has run out.
    Raise NoSuchRow if there is no row.
    """
    if found := read(resource):
        return found.token, found.holder is not None and not _was_idle(resource)
    if resource.model is Fence:
        return pruned(resource.alias), False
    raise NoSuchRow(
        f"{resource.name!r} has no row in database {resource.alias!r}.", resource=resource.name
    )


def pruned(alias: str) -> int:
    """Return the highest token of the named fences that were pruned, 0 if there was none."""
    found = FenceFloor.objects.using(alias).aggregate(highest=Max("token"))
    return found["highest"] or 0


def registers_alone(alias: str) -> bool:
    """Say whether Django is told to open transactions above READ COMMITTED on `alias`."""
    connections[alias].ensure_connection()
    level = getattr(connections[alias], "isolation_level", None)
    return getattr(level, "name", "") in ("REPEATABLE_READ", "SERIALIZABLE")


def _was_idle(resource: Resource) -> bool:
    """Say whether it is a name at which nobody has registered for IDLE_TTL."""
    if resource.model is not Fence:
        return False
    idle = Now() - timedelta(seconds=conf.idle_ttl)
    rows: QuerySet[Any] = _rows(resource)
    return rows.filter(registered_at__lte=idle).exists()


def _rows(resource: Resource) -> QuerySet[FencedResource]:
    """Return the fence's one row, past managers and ordering: nothing is hidden or joined."""
    return QuerySet(_model(resource), using=resource.alias).filter(pk=resource.pk).order_by()


def _model(resource: Resource) -> type[FencedResource]:
    """Return the model as which the row is read without joins."""
    is_child = resource.row_model._meta.concrete_model is not resource.model
    return resource.model if is_child else resource.row_model


def _whole(resource: Resource, row: FencedResource) -> FencedResource:
    """Return `row` as an instance of the model that was asked for."""
    if isinstance(row, resource.row_model):
        return row
    key = resource.model._meta.pk.name
    children: QuerySet[FencedResource] = QuerySet(resource.row_model, using=resource.alias)
    return children.get(**{key: resource.pk})


def _move(
    resource: Resource, mine: Registration, granted: int, patience: float, *, alone: bool
) -> FencedResource | None:
    if connections[resource.alias].vendor == "postgresql":
        row = _move_returning(resource, mine, granted, patience, alone=alone)
    else:
        row = next(iter(_rows(resource)), None) if _update(resource, mine, granted) else None
    return None if row is None else _whole(resource, row)


def _update(resource: Resource, mine: Registration, granted: int) -> bool:
    """Register in plain SQL. The first statement is a write: it locks and then compares."""
    fences: QuerySet[FencedResource] = QuerySet(resource.model, using=resource.alias)
    earlier = Q(last_fence_holder=mine.holder, last_fence_token__lte=mine.token)
    movable = fences.filter(Q(last_fence_token__lt=granted) | earlier, pk=resource.pk)
    values: dict[str, Any] = {"last_fence_token": mine.token, "last_fence_holder": mine.holder}
    if resource.model is Fence:
        values["registered_at"] = Now()
    if movable.update(**values):
        return True
    if resource.model is not Fence:
        return False
    new = Fence(
        name=resource.pk, last_fence_token=pruned(resource.alias), registered_at=timezone.now()
    )
    fences.bulk_create([new], ignore_conflicts=True)
    # It may have waited for a prune() that has deleted the row, and raised the floor.
    floor = pruned(resource.alias)
    fences.filter(pk=resource.pk, last_fence_token__lt=floor).update(last_fence_token=floor)
    return bool(movable.update(**values))


def _move_returning(
    resource: Resource, mine: Registration, granted: int, patience: float, *, alone: bool
) -> FencedResource | None:
    """Register on PostgreSQL: one statement, which bounds its own wait for the row."""
    statement = postgresql.moving(resource.model, resource.alias, alone=alone)
    params = {
        "patience": str(round(patience * 1000)),
        "token": mine.token,
        "holder": mine.holder,
        "granted": granted,
    }
    try:
        return _returned(resource, mine, statement, params)
    except OperationalError as error:
        if postgresql.sqlstate(error) == postgresql.LOCK_NOT_AVAILABLE:
            raise NotRegistered(
                f"a transaction kept its row locked for {patience:.3g} s "
                f"(`manage.py fencing show` tells which)"
            ) from error
        raise


def _check_presenting(resource: Resource, mine: Registration) -> FencedResource | None:
    """Lock the row on PostgreSQL, and present the registration to the triggers."""
    return _returned(resource, mine, postgresql.checking(_model(resource), resource.alias), {})


def _check(resource: Resource, mine: Registration) -> FencedResource | None:
    """Lock the row, and return it."""
    fences = _rows(resource)
    features = connections[resource.alias].features
    if features.has_select_for_update:
        fences = fences.select_for_update(no_key=features.has_select_for_no_key_update)
    else:  # SQLite: only a write locks anything
        same = {"last_fence_token": mine.token, "last_fence_holder": mine.holder}
        fences.filter(**same).update(**same)
    return next(iter(fences), None)


def _returned(
    resource: Resource, mine: Registration, statement: str, params: dict[str, Any]
) -> FencedResource | None:
    """Return the row that a statement for PostgreSQL returns, None if it returns none."""
    key = resource.model._meta.pk.get_db_prep_value(resource.pk, connections[resource.alias])
    params = {**params, "pk": key, "registration": str(mine)}
    rows: QuerySet[FencedResource] = QuerySet(_model(resource), using=resource.alias)
    row = next(iter(rows.raw(statement, params)), None)
    if row is not None:
        for column in postgresql.EXTRA_COLUMNS:
            row.__dict__.pop(column, None)
    return row


def _own_transaction(alias: str) -> AbstractContextManager[None]:
    """Return what makes a registration one transaction: PostgreSQL's one statement is one."""
    connection = connections[alias]
    if connection.vendor == "postgresql" and not connection.in_atomic_block:
        return nullcontext()
    return transaction.atomic(using=alias)


def _stale(resource: Resource, mine: Registration, found: Registration | None) -> StaleToken:
    says = "its row is gone" if found is None else f"{found.token} is registered"
    return StaleToken(
        f"Token {mine.token} of {resource.name!r} is stale: {says}.",
        resource=resource.name,
        token=mine.token,
        fence_token=found and found.token,
        fence_holder=found and found.holder,
    )
