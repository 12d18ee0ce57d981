"""What only PostgreSQL has: registering in one statement, SQLSTATEs, snapshots."""

import functools

from django.db import DatabaseError, connections
from django.db.models import F, Func, QuerySet, TextField, Value

from django_fencing.models import Fence, FencedResource, FenceFloor

# https://www.postgresql.org/docs/current/errcodes-appendix.html
LOCK_NOT_AVAILABLE = "55P03"
RETRYABLE = ("40001", "40P01")  # serialization failure, deadlock

# The setting in which a fenced transaction presents to the triggers what is registered, and at
# which row: "table:token:holder:key", the table by its oid.
REGISTRATION = "django_fencing.registration"
_PLACE = """{table}.tableoid || ':' AS "fencing table", ':' || {table}.{pk} AS "fencing key\""""

# https://www.postgresql.org/docs/current/libpq-status.html, PQTRANS_INERROR
_INERROR = 3

# The guard sets a local lock_timeout and the last column sets the former one back, so bounding
# the wait costs no round trip, and what follows in the transaction is not bounded. The names
# have a space because no table has.
_MOVE = """
WITH "fencing guard" AS MATERIALIZED (
    SELECT current_setting('lock_timeout') AS former,
           set_config('lock_timeout', %(patience)s, true) AS patience
    WHERE {condition}
), {moved}
SELECT "fencing moved".*, set_config('lock_timeout', former, true) AS "fencing restored",
       set_config('{registration}', "fencing table" || %(registration)s || "fencing key", true)
           AS "fencing presented"
FROM "fencing moved", "fencing guard"
"""

_ROW = """
"fencing moved" AS ({update} RETURNING {returned})
"""

# A name that has no row yet is inserted. Whether it has one, and above which token it may begin, is
# of one snapshot: prune() deletes the row and raises the floor in one transaction, and a row that
# this statement has waited for, in vain, is not inserted below the floor.
_NAME = """
"fencing updated" AS ({update} RETURNING {returned}),
"fencing inserted" AS ({insert} RETURNING {returned}),
"fencing moved" AS (SELECT * FROM "fencing updated" UNION ALL SELECT * FROM "fencing inserted")
"""

_UPDATE = """
    UPDATE {table} SET {values}
    FROM "fencing guard" AS guard
    WHERE {table}.{pk} = %(pk)s AND guard.patience IS NOT NULL AND {movable}
"""

_INSERT = """
    INSERT INTO {table} ({pk}, {token}, {holder}, {registered_at})
    SELECT %(pk)s, %(token)s, %(holder)s, statement_timestamp() FROM "fencing guard"
    WHERE NOT EXISTS (SELECT FROM {table} WHERE {pk} = %(pk)s)
        AND %(token)s > COALESCE((SELECT max(token) FROM {floor}), 0)
    ON CONFLICT ({pk}) DO UPDATE SET {values} WHERE {movable}
"""

_VALUES = "{token} = %(token)s, {holder} = %(holder)s"
_REGISTERED_NOW = ", {registered_at} = statement_timestamp()"
_MOVABLE = """({table}.{token} < %(granted)s
        OR ({table}.{holder} = %(holder)s AND {table}.{token} <= %(token)s))"""

_ALONE = "true"
_INSIDE = "current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')"


@functools.cache
def moving(model: type[FencedResource], alias: str, *, alone: bool) -> str:
    """
    Return the statement that moves a fence up and returns its row.

    Its parameters are pk, token, holder, granted, registration, and patience in milliseconds.
    Unless `alone` it moves nothing above READ COMMITTED.
    """
    compiler = QuerySet(model, using=alias).query.get_compiler(alias)
    quoted = connections[alias].ops.quote_name
    options = model._meta
    table = quoted(options.db_table)
    columns = {str(field.column): field for field in options.concrete_fields}
    returned = []
    for column, field in columns.items():
        # PostGIS, for one, reads its columns through a function.
        sql, _ = field.select_format(compiler, f"{table}.{quoted(column)}", ())
        returned.append(f"{sql} AS {quoted(column)}")
    names = {
        "table": table,
        "pk": quoted(str(options.pk.column)),
        "token": quoted(str(options.get_field("last_fence_token").column)),
        "holder": quoted(str(options.get_field("last_fence_holder").column)),
        "registered_at": quoted("registered_at"),
        "floor": quoted(FenceFloor._meta.db_table),
    }
    of_names = model is Fence
    values = (_VALUES + (_REGISTERED_NOW if of_names else "")).format(**names)
    parts = {"values": values, "movable": _MOVABLE.format(**names), **names}
    # psycopg sends each parameter once, so its type has to be the same everywhere.
    key = "%(pk)s::varchar" if of_names else "%(pk)s"
    moved = (_NAME if of_names else _ROW).format(
        update=_UPDATE.format(**parts),
        insert=_INSERT.format(**parts),
        returned=", ".join([*returned, _PLACE.format(**names)]),
    )
    return _MOVE.format(
        condition=_ALONE if alone else _INSIDE,
        moved=moved.replace("%(pk)s", key),
        registration=REGISTRATION,
    )


def presenting(rows: QuerySet[FencedResource], registration: str) -> QuerySet[FencedResource]:
    """Return `rows` as read by a statement that presents the registration as well."""
    parts = "tableoid || ':' || %(expressions)s"
    presented = Func(
        Value(registration),
        F("pk"),
        template=f"set_config('{REGISTRATION}', {parts}, true)",
        arg_joiner=" || ':' || ",
        output_field=TextField(),
    )
    return rows.annotate(fencing_presented=presented)


def present_nothing(alias: str) -> None:
    """Take back what the open transaction presents, before it goes on with something else."""
    if connections[alias].vendor == "postgresql":
        with connections[alias].cursor() as cursor:
            cursor.execute(f"SELECT set_config('{REGISTRATION}', '', true)")


def reads_from_snapshot(alias: str) -> bool:
    """Say whether the open transaction is above READ COMMITTED."""
    if connections[alias].vendor != "postgresql":
        return False
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_setting('transaction_isolation')")
        return cursor.fetchone()[0] not in ("read committed", "read uncommitted")


def is_aborted(alias: str) -> bool:
    """Say whether the open transaction has failed, so that PostgreSQL's COMMIT rolls it back."""
    info = getattr(connections[alias].connection, "info", None)
    return getattr(info, "transaction_status", None) == _INERROR


def sqlstate(error: DatabaseError) -> str | None:
    """Return PostgreSQL's error code, which psycopg 3 and psycopg2 name differently."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
