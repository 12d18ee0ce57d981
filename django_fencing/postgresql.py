"""What only PostgreSQL has: registering in one statement, SQLSTATEs, snapshots."""

import functools
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django.db import DatabaseError, connections
from django.db.models import QuerySet

from django_fencing.models import Fence, FencedResource, FenceFloor

# https://www.postgresql.org/docs/current/errcodes-appendix.html
LOCK_NOT_AVAILABLE = "55P03"
DEPENDENT_OBJECTS = "2BP01"
RETRYABLE = ("40001", "40P01")  # serialization failure, deadlock

# The setting in which a fenced transaction presents to the triggers what is registered, and at
# which row: "table:token:holder:key", the table by its oid.
REGISTRATION = "django_fencing.registration"
_PRESENTED = f"""set_config('{REGISTRATION}',
        {{oid}} || ':' || %(registration)s || ':' || {{table}}.{{pk}}, true)
        AS "fencing presented\""""

# A row may move from one partition to another, and stays a row of the same table.
OID = "COALESCE(pg_partition_root({oid})::oid, {oid})"

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
){moving}
"""

# A name that has no row yet is inserted. Whether it has one, and above which token it may begin, is
# of one snapshot: prune() deletes the row and raises the floor in one transaction, and a row that
# this statement has waited for, in vain, is not inserted below the floor.
_NAME = """, "fencing updated" AS ({update}), "fencing inserted" AS ({insert})
SELECT * FROM "fencing updated" UNION ALL SELECT * FROM "fencing inserted"
"""

_UPDATE = """
    UPDATE {table} SET {values}
    FROM "fencing guard"
    WHERE {table}.{pk} = %(pk)s AND "fencing guard".patience IS NOT NULL AND {movable}
    RETURNING {returned}
"""

_INSERT = """
    INSERT INTO {table} ({pk}, {token}, {holder}, {registered_at})
    SELECT %(pk)s, %(token)s, %(holder)s, statement_timestamp() FROM "fencing guard"
    WHERE NOT EXISTS (SELECT FROM {table} WHERE {pk} = %(pk)s)
        AND %(token)s > COALESCE((SELECT max(token) FROM {floor}), 0)
    ON CONFLICT ({pk}) DO UPDATE SET {values} WHERE {movable}
    RETURNING {returned}
"""

_RESTORED = """set_config('lock_timeout', (SELECT former FROM "fencing guard"), true)
        AS "fencing restored\""""

# A row's xmax is the transaction that has locked or written it last:
# https://www.postgresql.org/docs/current/ddl-system-columns.html
_BACKENDS = """
SELECT backend.pid, backend.state, backend.xact_start AT TIME ZONE 'UTC', host(backend.client_addr),
       nullif(backend.application_name, '')
FROM {table} JOIN pg_locks ON transactionid = {table}.xmax
JOIN pg_stat_activity AS backend ON backend.pid = pg_locks.pid
WHERE {table}.{pk} = %s AND locktype = 'transactionid' AND granted
    AND backend.pid <> pg_backend_pid()
"""

# What the statements return besides the row's own columns.
EXTRA_COLUMNS = ("fencing restored", "fencing presented")

_VALUES = "{token} = %(token)s, {holder} = %(holder)s"
_REGISTERED_NOW = ", {registered_at} = statement_timestamp()"
_MOVABLE = """({table}.{token} < %(granted)s
        OR ({table}.{holder} = %(holder)s AND {table}.{token} <= %(token)s))"""

_CHECK = "SELECT {returned} FROM {table} WHERE {table}.{pk} = %(pk)s FOR NO KEY UPDATE"

_ALONE = "true"
_INSIDE = "current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')"


def moving(model: type[FencedResource], alias: str, *, alone: bool) -> str:
    """
    Return the statement that moves a fence up and returns its row.

    Its parameters are pk, token, holder, granted, registration, and patience in milliseconds.
    Unless `alone` it moves nothing above READ COMMITTED.
    """
    return _moving(model, alias, _columns(model, alias), _ALONE if alone else _INSIDE)


def checking(model: type[FencedResource], alias: str) -> str:
    """
    Return the statement that locks a fence's row, presents the registration and returns the row.

    Its parameters are pk and registration.
    """
    return _checking(model, alias, _columns(model, alias))


@functools.lru_cache(maxsize=1024)
def _moving(model: type[FencedResource], alias: str, columns: str, condition: str) -> str:
    names = _names(model, alias)
    of_names = model is Fence
    values = (_VALUES + (_REGISTERED_NOW if of_names else "")).format(**names)
    parts = {
        "values": values,
        "movable": _MOVABLE.format(**names),
        "returned": f"{columns}, {_PRESENTED.format(**names)}, {_RESTORED}",
        "floor": connections[alias].ops.quote_name(FenceFloor._meta.db_table),
        **names,
    }
    moving = _UPDATE.format(**parts)
    if of_names:
        moving = _NAME.format(update=moving, insert=_INSERT.format(**parts))
        # psycopg sends each parameter once, so its type has to be the same everywhere.
        moving = moving.replace("%(pk)s", "%(pk)s::varchar")
    return _MOVE.format(condition=condition, moving=moving)


@functools.lru_cache(maxsize=1024)
def _checking(model: type[FencedResource], alias: str, columns: str) -> str:
    names = _names(model, alias)
    return _CHECK.format(returned=f"{columns}, {_PRESENTED.format(**names)}", **names)


def _columns(model: type[FencedResource], alias: str) -> str:
    """Return the SQL of the model's columns, each by the name under which a raw query reads it."""
    return _lasting_columns(model, alias) or _compiled_columns(model, alias)[0]


@functools.cache
def _lasting_columns(model: type[FencedResource], alias: str) -> str:
    """Return the columns, "" if they have parameters: a key, say, that the settings may change."""
    columns, has_parameters = _compiled_columns(model, alias)
    return "" if has_parameters else columns


def _compiled_columns(model: type[FencedResource], alias: str) -> tuple[str, bool]:
    """Return the columns, and whether they have parameters."""
    compiler = QuerySet(model, using=alias).query.get_compiler(alias)
    compiler.setup_query()
    operations: Any = connections[alias].ops
    columns, has_parameters = [], False
    for field in model._meta.concrete_fields:
        # As the ORM does: PostGIS reads its columns through a function, others decrypt theirs.
        column = field.get_col(model._meta.db_table)
        sql, params = column.select_format(compiler, *compiler.compile(column))
        if params:
            sql = operations.compose_sql(sql, params).replace("%", "%%")
            has_parameters = True
        columns.append(f"{sql} AS {operations.quote_name(field.column)}")
    return ", ".join(columns), has_parameters


def _names(model: type[FencedResource], alias: str) -> dict[str, str]:
    options, quoted = model._meta, connections[alias].ops.quote_name
    table = quoted(options.db_table)
    return {
        "table": table,
        "oid": OID.format(oid=f"{table}.tableoid"),
        "pk": quoted(str(options.pk.column)),
        "token": quoted(str(options.get_field("last_fence_token").column)),
        "holder": quoted(str(options.get_field("last_fence_holder").column)),
        "registered_at": quoted("registered_at"),
    }


class Backend(NamedTuple):
    """A session of PostgreSQL. What the user may not see is None."""

    pid: int
    state: str | None  # "idle in transaction", say
    since: datetime | None  # when its transaction began
    client: str | None
    application: str | None

    def __str__(self) -> str:
        """Return who it is, and how to end it."""
        of = " ".join(filter(None, (self.client, self.application)))
        since = f"{self.since:%Y-%m-%d %H:%M:%S}Z" if self.since else "unknown"
        return (
            f"PostgreSQL backend {self.pid}{of and f' of {of}'}, {self.state or 'state unknown'}, "
            f"in a transaction since {since}; SELECT pg_terminate_backend({self.pid}) ends it"
        )


def backends_locking(model: type[FencedResource], alias: str, pk: Any) -> list[Backend]:
    """Return who has locked or written a row in a transaction that is still open."""
    key = model._meta.pk.get_db_prep_value(pk, connections[alias])
    with connections[alias].cursor() as cursor:
        cursor.execute(_BACKENDS.format(**_names(model, alias)), [key])
        return [
            Backend(pid, state, since and since.replace(tzinfo=UTC), *rest)
            for pid, state, since, *rest in cursor.fetchall()
        ]


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
