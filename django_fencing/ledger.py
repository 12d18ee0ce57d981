"""The ledger: what was refused, lost or healed, kept in the database once it is over."""

import asyncio
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime

from django.db import connections, transaction
from django.utils import timezone

from django_fencing import flow
from django_fencing.conf import conf
from django_fencing.exceptions import StaleToken
from django_fencing.grants import Holder
from django_fencing.models import FenceEvent
from django_fencing.resources import Resource
from django_fencing.signals import key_values, logger
from django_fencing.stores.base import Store

# Seconds that the store has to tell who has overtaken a lease.
_PATIENCE = 0.5

# For how long PostgreSQL waits for the table, in milliseconds.
_LOCK_TIMEOUT = "1000"

# What waits for the end of a transaction, or for a thread without an event loop. The oldest ones
# of too many are in the log only.
_pending: deque[FenceEvent] = deque(maxlen=1000)


def _forget() -> None:
    _pending.clear()  # they are the parent's


os.register_at_fork(after_in_child=_forget)


def refused(store: Store, resource: Resource, holder: Holder, error: StaleToken) -> None:
    """Note that the database has refused what was fenced by a token."""
    if _is_on():
        token = f"token {error.token} of {_who(holder.host, holder.pid)}"
        message = f"{token} refused: {_newer(store, resource, error)}"
        _note(FenceEvent.Kind.REFUSED, resource, holder, error.token, message)


def lost(resource: Resource, holder: Holder, token: int, reason: str) -> None:
    """Note that a lease has ended other than by its release."""
    if _is_on():
        message = f"token {token} of {_who(holder.host, holder.pid)} lost: {reason}"
        _note(FenceEvent.Kind.LOST, resource, holder, token, message)


def healed(resource: Resource, holder: Holder, proposed: int, reached: int, token: int) -> None:
    """Note that the counter was behind the fence, and is above it again."""
    if _is_on():
        message = f"the counter proposed {proposed}, the fence was at {reached}: {token} is next"
        _note(FenceEvent.Kind.HEALED, resource, holder, token, message)


def forced(
    resource: Resource, holder: Holder, evicted: str, token: int, *, user: str, reason: str
) -> None:
    """Note that an operator has ended a lease; `holder` and `token` are the operator's."""
    if _is_on():
        by = f"{user or 'an operator'} with token {token}"
        message = f"{evicted} evicted by {by}" + (f": {reason}" if reason else "")
        _note(FenceEvent.Kind.FORCED, resource, holder, token, message, user)


def flush() -> None:
    """Write what is pending, unless this thread is in a transaction. Raise nothing."""
    if not _pending:
        return
    try:
        alias = conf.database
        if not _may_write(alias):
            return
    except Exception as error:  # noqa: BLE001 - as below
        _failed("its database", error)
        return
    events = list(_taken())
    was_open = connections[alias].connection is not None
    try:
        _write(events, alias)
    except Exception as error:  # noqa: BLE001 - whatever it is, the caller's work goes on
        for event in events:
            _failed(event.message, error)
    except BaseException:
        _pending.extendleft(reversed(events))
        raise
    finally:
        if not was_open:  # nobody else would close it
            connections[alias].close()


def _is_on() -> bool:
    try:
        return conf.ledger
    except Exception as error:  # noqa: BLE001 - the checks tell it, and the caller's work goes on
        _failed("its setting", error)
        return False


def _note(
    kind: FenceEvent.Kind,
    resource: Resource,
    holder: Holder,
    token: int | None,
    message: str,
    user: str = "",
) -> None:
    _pending.append(
        FenceEvent(
            kind=kind,
            namespace=resource.namespace,
            resource=_writable(resource.name),
            token=token,
            holder=holder.id,
            user=_writable(user),
            message=_writable(message),
            created_at=timezone.now(),
        )
    )
    flush()


def _taken() -> Iterator[FenceEvent]:
    with suppress(IndexError):  # another thread has just taken the last one
        while True:
            yield _pending.popleft()


def _write(events: list[FenceEvent], alias: str) -> None:
    connection = connections[alias]
    bounds = connection.vendor == "postgresql" and not connection.in_atomic_block
    with transaction.atomic(using=alias):
        if bounds:
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [_LOCK_TIMEOUT])
        FenceEvent.objects.using(alias).bulk_create(events)


def _newer(store: Store, resource: Resource, error: StaleToken) -> str:
    """Say who has registered meanwhile, as far as the store still knows."""
    if error.fence_token is None:
        return "its row is gone"
    try:
        with store.inspect(_PATIENCE) as inspector:
            (look,) = inspector.look([resource.keys])
    except Exception:  # noqa: BLE001 - the refusal is told in any case
        return f"{error.fence_token} is registered"
    lease = look.lease
    if lease is None or lease.token != error.fence_token or lease.since is None:
        return f"{error.fence_token} is registered, and its lease has ended"
    age = max(0.0, (datetime.now(UTC) - lease.since).total_seconds())
    return f"{error.fence_token} of {_who(lease.host, lease.pid)} registered {age:.1f} s earlier"


def _who(host: str, pid: int | str) -> str:
    return f"{host} pid {pid}"


def _may_write(alias: str) -> bool:
    """Say whether what is written now is committed at once, and does not block an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return not flow.is_in_transaction(alias)
    return False


def _writable(text: str) -> str:
    """Return the text without what PostgreSQL cannot hold."""
    return text.replace("\0", "\\0").encode(errors="backslashreplace").decode()


def _failed(what: str, error: Exception) -> None:
    logger.warning("%s", key_values("ledger_failed", {"event": what, "reason": error}))
