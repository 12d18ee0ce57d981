"""A full dry round on a probe, which leaves nothing behind, and what is wrong with it."""

import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, router, transaction
from django.db.backends.utils import split_identifier
from django.db.models import QuerySet

from django_fencing import fences, flow, guards
from django_fencing.conf import conf, faults
from django_fencing.exceptions import FencingError, StoreUnavailable
from django_fencing.fences import Registration
from django_fencing.grants import Grant, Holder, Refusal
from django_fencing.models import Fence, FenceEvent, FenceFloor, OnceRecord
from django_fencing.overview import fenced_models
from django_fencing.resources import Resource, of_fence, resolve
from django_fencing.stores.base import Finding, Store, get_store

# Seconds.
_PATIENCE = 1.0
_TTL = 10.0
_WAIT = 0.5

# Of the names that were locked last, so many counters are compared with their fences.
_COMPARED = 1_000
_NAMED = 5


def examine() -> Iterator[Finding]:
    """Yield findings, and go on as far as the former ones let it."""
    wrong = [Finding("settings", False, fault) for fault, _ in faults()]
    yield from wrong
    if wrong:
        return
    yield Finding("settings", True, f"leases in the cache {conf.cache!r}")
    try:
        store = get_store()
        yield from store.examined(_PATIENCE)
    except (StoreUnavailable, ImproperlyConfigured) as error:
        yield Finding("store", False, str(error))
        return
    try:
        resource = resolve(f"fencing-doctor:{uuid.uuid4().hex}")
    except (FencingError, ImproperlyConfigured) as error:
        yield Finding("namespace", False, str(error))
        return
    yield from _round(store, resource)
    yield from _database(resource)
    yield from _tables()
    yield from _patience_of_postgresql(resource.alias)
    yield from _guards()
    yield from _counters(store)


def _round(store: Store, resource: Resource) -> Iterator[Finding]:
    """Acquire, extend, confirm, wait, release: as two holders would."""
    first, second = flow.new_holder("fencing doctor"), flow.new_holder("fencing doctor")
    step = "acquire"
    try:
        granted = store.acquire(resource, first, ttl=_TTL, floor=0, patience=_PATIENCE)
        yield Finding(step, isinstance(granted, Grant), _said(granted))
        step = "extend"
        yield _answered(step, store.extend(resource, first, ttl=_TTL, patience=_PATIENCE))
        step = "confirm"
        yield _answered(step, store.confirm(resource, first, patience=_PATIENCE))
        step = "wait"
        refused = store.acquire(
            resource, second, ttl=_TTL, floor=0, waits=_WAIT, patience=_PATIENCE
        )
        stands = isinstance(refused, Refusal) and refused.place == 0
        store.release(resource, first, patience=_PATIENCE)
        woken = store.wait(resource, second, _WAIT) if stands else False
        if woken is None:
            yield Finding(step, None, "waiters ask from time to time: none can block")
        else:
            yield Finding(step, stands and woken, "woken by the release" if woken else "not woken")
        again = store.acquire(resource, second, ttl=_TTL, floor=0, patience=_PATIENCE)
        yield Finding("hand over", isinstance(again, Grant), _said(again))
        step = "release"
        yield _answered(step, store.release(resource, second, patience=_PATIENCE))
    except FencingError as error:
        yield Finding(step, False, str(error))
    finally:
        _forget(store, resource, first, second)


def _database(resource: Resource) -> Iterator[Finding]:
    """Register in a transaction that is rolled back."""
    mine = Registration(1, uuid.uuid4())
    try:
        with transaction.atomic(using=resource.alias):
            row = fences.register_inside(resource, mine, granted=2**52, patience=_PATIENCE)
            transaction.set_rollback(True, using=resource.alias)
        yield Finding("register", row is not None, f"in the database {resource.alias!r}")
    except fences.OldSnapshot:
        yield Finding("register", True, f"{resource.alias!r} reads from snapshots")
    except (DatabaseError, FencingError, fences.NotRegistered) as error:
        yield Finding("register", False, " ".join(str(error).split()))


def _tables() -> Iterator[Finding]:
    for model in (Fence, FenceFloor, FenceEvent, OnceRecord):
        rows: QuerySet[Any] = QuerySet(model, using=conf.database)
        try:
            rows.exists()
        except DatabaseError as error:
            yield Finding("tables", False, f"{model._meta.db_table}: {error}".splitlines()[0])
            return
    yield Finding("tables", True, f"in the database {conf.database!r}")


def _patience_of_postgresql(alias: str) -> Iterator[Finding]:
    """Tell for how long a holder that is frozen in a transaction may keep its row locked."""
    if connections[alias].vendor != "postgresql":
        return
    what = "idle_in_transaction_session_timeout"
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT current_setting(%s)", [what])
            (value,) = cursor.fetchone()
    except DatabaseError:
        return  # told before
    never = "0: a holder that freezes in a transaction keeps its successors out for ever"
    yield Finding(what, True if value != "0" else None, never if value == "0" else value)


def _guards() -> Iterator[Finding]:
    """Tell which tables ProtectFence guards, and whether the database asks the guards."""
    tables: dict[str, list[str]] = {}
    for model in fenced_models():
        alias = conf.database if model is Fence else router.db_for_write(model)
        tables.setdefault(alias, []).append(split_identifier(model._meta.db_table)[1])
    guarded, unguarded, asleep = [], [], []
    for alias, names in tables.items():
        try:
            found = guards.installed(connections[alias])
        except DatabaseError as error:
            yield Finding("guards", False, " ".join(str(error).split()))
            return
        guarded += [name for name in names if found.get(name)]
        unguarded += [name for name in names if name not in found]
        asleep += [name for name in names if found.get(name) is False]
    said = {"by ProtectFence": guarded, "without it": unguarded, "TRIGGERS DISABLED": asleep}
    parts = (f"{what}: {', '.join(sorted(names))}" for what, names in said.items() if names)
    yield Finding("guards", not asleep, "; ".join(parts))


def _counters(store: Store) -> Iterator[Finding]:
    """Compare the fences of names with the counters that propose their tokens."""
    named: QuerySet[Fence] = QuerySet(Fence, using=conf.database)
    try:
        rows = list(named.order_by("-registered_at")[:_COMPARED])
        with store.inspect(_PATIENCE) as inspector:
            counters = inspector.counters([of_fence(row).keys for row in rows])
    except (DatabaseError, StoreUnavailable) as error:
        yield Finding("counters", False, " ".join(str(error).split()))
        return
    behind = [
        str(row)
        for row, counter in zip(rows, counters, strict=True)
        if counter is not None and counter < row.last_fence_token
    ]
    said = f"{len(rows)} compared, {len(behind)} behind their fence"
    if behind:
        said += f", which the next acquisition heals: {', '.join(behind[:_NAMED])}"
    yield Finding("counters", None if behind else True, said)


def _answered(step: str, held: bool) -> Finding:
    return Finding(step, held, "as it should" if held else "the lease is gone")


def _said(answer: Grant | Refusal) -> str:
    if isinstance(answer, Grant):
        return f"token {answer.token}"
    return f"refused, held by {answer.held_by or 'unknown'}"


def _forget(store: Store, resource: Resource, *holders: Holder) -> None:
    with suppress(FencingError):  # it runs out
        for holder in holders:
            store.release(resource, holder, patience=_PATIENCE)
        store.forget(resource, *holders)
