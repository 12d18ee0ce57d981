"""once: work whose result is kept by the transaction that did it, so that it is not done again."""

import hashlib
import inspect
import json
from collections.abc import Callable
from datetime import datetime, time, timedelta
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connections, transaction
from django.db.models.constants import OnConflict
from django.db.models.sql import InsertQuery
from django.db.transaction import TransactionManagementError
from django.utils import timezone

from django_fencing import flow
from django_fencing.conf import conf
from django_fencing.exceptions import OnceMismatch
from django_fencing.leases import Lease
from django_fencing.models import OnceRecord
from django_fencing.names import checked, slug
from django_fencing.signals import once_replayed

# The record that kept the key from being claimed may be deleted before it is read.
_TRIES = 3

# How exactly it is known when a record was used last.
_USED_TO = timedelta(days=1)


def once(key: str, func: Callable[..., Any], *args: Any, payload: Any = None) -> Any:
    """
    Return the result of func(*args), which runs unless that work is done already.

    Call it in a fenced transaction: what `func` writes, the key and the result are committed
    together, or none of them is. Then every later call returns the stored result, and one at the
    same time under another lease waits for it. After a crash, a rollback, or an error of `func`,
    also one that the caller catches, the key is free.

    The key names the logical operation, such as "charges:7:2026-11", and never the token: another
    run has another token. It is the tenant's own where FENCING["NAMESPACE"] names one. `payload`
    is anything that JSON can express; work that was done with another one raises OnceMismatch.
    The result is what JSON makes of it, the first time too: a tuple is a list, a date a text.

    Raise TransactionManagementError outside of a fenced transaction, InvalidResource for a key
    that is no text, TypeError for a payload or a result that JSON cannot express.
    """
    key = checked(key, "The key of once()")
    lease = flow.fencing()
    if lease is None:
        raise TransactionManagementError(
            f"once({key!r}) works in a fenced transaction only: call it in lease.atomic() or "
            f"fenced_atomic(), or give with_fenced_lock() the key."
        )
    return once_under(lease, key, lambda: func(*args), payload)


def once_under(lease: Lease, key: str, work: Callable[[], Any], payload: Any) -> Any:
    """Do as once() in the fenced transaction of this lease."""
    key = checked(key, "The key of once()")
    fingerprint = _fingerprint(payload)
    for _ in range(_TRIES):
        with lease.atomic():  # a savepoint, which puts the row back as it was
            record = _claimed(key, fingerprint, lease)
            if record is not None:
                return _run(record, key, work)
            if found := _rows(key, lease.place[0]).first():
                return _replayed(key, fingerprint, lease, found)
    raise TransactionManagementError(f"The record of {key!r} comes and goes: try again.")


def once_result(key: str, default: Any = None, *, using: str | None = None) -> Any:
    """
    Return the stored result of work that is done once, or `default`; nothing runs.

    It looks in the database `using`, else in that of the fenced transaction that is open, else in
    FENCING["DATABASE"].
    """
    key = checked(key, "The key of once()")
    lease = flow.fencing()
    alias = using or (conf.database if lease is None else lease.place[0])
    found = _rows(key, alias).exclude(result="").values_list("result", flat=True)
    return next((json.loads(result) for result in found), default)


def _claimed(key: str, fingerprint: str, lease: Lease) -> OnceRecord | None:
    """
    Insert the record of the key, unless there is one.

    A transaction that has inserted one, and has not ended, is waited for.
    """
    record = OnceRecord(
        key=slug(key, conf.namespace),
        resource=lease.resource,
        token=lease.token,
        fingerprint=fingerprint,
    )
    record._state.db = lease.place[0]
    # bulk_create(ignore_conflicts=True) does not say whether it has inserted anything.
    insert = InsertQuery(OnceRecord, on_conflict=OnConflict.IGNORE)
    insert.insert_values(OnceRecord._meta.concrete_fields, [record])
    [(statement, params)] = insert.get_compiler(using=record._state.db).as_sql()
    with connections[record._state.db].cursor() as cursor:
        cursor.execute(statement, params)
        return record if cursor.rowcount == 1 else None


def _run(record: OnceRecord, key: str, work: Callable[[], Any]) -> Any:
    found = work()
    if inspect.iscoroutine(found):
        found.close()
    result = _json(found, f"The result of {key!r}")
    alias = record._state.db
    if not transaction.get_rollback(using=alias):  # else nothing has been done
        OnceRecord.objects.using(alias).filter(pk=record.pk).update(result=result)
    return json.loads(result)


def _replayed(key: str, fingerprint: str, lease: Lease, found: OnceRecord) -> Any:
    if not found.result:  # others cannot see it yet
        raise TransactionManagementError(f"once({key!r}) is called by its own work.")
    if found.fingerprint != fingerprint:
        raise OnceMismatch(
            f"{key!r} was done under token {found.token} of {found.resource!r} with another "
            f"payload: nothing has run. Another operation needs another key; what came of that one "
            f"is in once_result().",
            resource=lease.resource,
            key=key,
            token=found.token,
        )
    if timezone.now() - found.used_at > _USED_TO:
        _rows(key, lease.place[0]).update(used_at=timezone.now())
    line = {"key": key, "token": lease.token, "done_under": found.token}
    once_replayed.announce(lease._resource, line, lease=lease, key=key)
    return json.loads(found.result)


def _rows(key: str, alias: str) -> Any:
    return OnceRecord.objects.using(alias).filter(pk=slug(key, conf.namespace))


def _fingerprint(payload: Any) -> str:
    """Return a digest that does not depend on the order of an object's members."""
    canonical = _json(payload, "The payload", sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _json(value: Any, what: str, **options: Any) -> str:
    try:
        return json.dumps(value, cls=_Encoder, allow_nan=False, **options)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{what} cannot be written as JSON: {error}") from error


class _Encoder(DjangoJSONEncoder):
    """Writes what Django's does, and all digits of a moment."""

    def default(self, o: Any) -> Any:
        return o.isoformat() if isinstance(o, datetime | time) else super().default(o)
