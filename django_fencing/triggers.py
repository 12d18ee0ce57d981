"""The triggers by which the database itself guards a fence."""

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from django.db import NotSupportedError
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import split_identifier
from django.db.models import Model

from django_fencing.models import FENCE_FIELDS, fence_model
from django_fencing.postgresql import OID, REGISTRATION

# How the errors begin.
STALE = "django_fencing: the fence of"
NEEDS_LEASE = "django_fencing: a lease is needed"

# In SQLSTATE's class 23, integrity constraint violation, a subclass from I to Z is nobody else's.
_STALE_STATE, _NEEDS_LEASE_STATE = "23ZF1", "23ZF2"

HINT = (
    "Do it in a fenced transaction of the row: lease.atomic() or fenced_atomic(). "
    "In a migration, between UnprotectFence and ProtectFence."
)

# By vendor. The fence may be moved up, or stay as it is.
_GOES_DOWN = {
    "postgresql": "NEW.{token} < OLD.{token} OR "
    "(NEW.{token} = OLD.{token} AND NEW.{holder} IS DISTINCT FROM OLD.{holder})",
    # SQLite keeps a text in a column of integers, and takes it for more than any number.
    "sqlite": "typeof(NEW.{token}) <> 'integer' OR NEW.{token} < OLD.{token} OR "
    "(NEW.{token} = OLD.{token} AND NEW.{holder} IS NOT OLD.{holder})",
    "mysql": "NEW.{token} < OLD.{token} OR "
    "(NEW.{token} = OLD.{token} AND NOT (NEW.{holder} <=> OLD.{holder}))",
}

# An AFTER trigger sees what is written in the end, whatever other triggers have made of it. Where
# the row moves to another partition only the BEFORE trigger is asked.
_FENCE_GUARD = {
    "postgresql": """
CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    RAISE EXCEPTION '{stale} row % of % stands at %, and cannot go to %',
        {key}, TG_TABLE_NAME, OLD.{token}, NEW.{token} USING ERRCODE = '{state}';
END
$guard$;
CREATE OR REPLACE TRIGGER {before} BEFORE UPDATE ON {table} FOR EACH ROW
WHEN ({goes_down}) EXECUTE FUNCTION {function}();
CREATE OR REPLACE TRIGGER {name} AFTER UPDATE ON {table} FOR EACH ROW
WHEN ({goes_down}) EXECUTE FUNCTION {function}();
""",
    "sqlite": """
CREATE TRIGGER IF NOT EXISTS {name} BEFORE UPDATE ON {table} FOR EACH ROW
WHEN {goes_down}
BEGIN
    SELECT RAISE(ABORT, '{stale} a row of {text} cannot go down');
END
""",
    "mysql": """
CREATE TRIGGER {name} BEFORE UPDATE ON {table} FOR EACH ROW
IF {goes_down} THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = '{stale} a row of {text} cannot go down';
END IF
""",
}

# Both ends of a registration pass, whatever a BEFORE trigger of the project adds to the row. What
# changes nothing but the fence passes too: the fence's own guard looks at that.
_LEASE_GUARD = """
CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $guard$
DECLARE
    presented text := current_setting('{setting}', true);
    registered text;
    written record;
BEGIN
    {look_up}
    IF presented = registered THEN
        RETURN NULL;
    END IF;
    IF TG_OP = 'UPDATE' THEN
        {registering}
        written := NEW;
        {leave_out_the_fence}
        IF written *= OLD THEN
            RETURN NULL;
        END IF;
    END IF;
    RAISE EXCEPTION '{needs_lease} for the % of row % of %', TG_OP, {key}, TG_TABLE_NAME USING
        ERRCODE = '{state}', HINT = '{hint}';
END
$guard$;
CREATE OR REPLACE TRIGGER {name} AFTER UPDATE OR DELETE ON {table} FOR EACH ROW
EXECUTE FUNCTION {function}();
"""

_OWN_FENCE = """registered := {relation}
        || ':' || OLD.{token} || ':' || OLD.{holder} || ':' || OLD.{pk};"""

_REGISTERING = """IF presented = {relation}
            || ':' || NEW.{token} || ':' || NEW.{holder} || ':' || NEW.{pk}
        THEN
            RETURN NULL;
        END IF;"""

_LEAVE_OUT = "written.{token} := OLD.{token}; written.{holder} := OLD.{holder};"

# The parent's table is that of the same schema, whatever the search path finds first. Where its row
# is deleted already, it has to be the row of which a registration is presented.
_FENCE_OF_PARENT = """EXECUTE format(
        'SELECT {fenced} || '':'' || fenced.{token} || '':'' || fenced.{holder}'
        ' || '':'' || fenced.{pk} FROM {ancestors}', TG_TABLE_SCHEMA
    ) INTO registered USING OLD.{link};
    IF registered IS NULL AND TG_OP = 'DELETE' AND presented ~ '^[^:]*:[^:]*:[^:]*:' THEN
        registered := format('{parent}', TG_TABLE_SCHEMA)::regclass::oid
            || substring(presented from '^[^:]*(:[^:]*:[^:]*:)') || OLD.{link};
    END IF;"""


def creating(
    connection: BaseDatabaseWrapper, model: type[Model], by: str, *, require_lease: bool
) -> Iterator[str]:
    """
    Yield the statements that guard the table of `model`, whose fence may be a parent's.

    `by` is what asks for it: each has triggers of its own. Only PostgreSQL can require a lease.
    """
    guard = _Guard(connection, model, by)
    if guard.has_fence:
        if connection.vendor == "mysql":  # which cannot replace a trigger
            yield guard.without("fence_guard")
        yield guard.of_fence()
    if require_lease and connection.vendor == "postgresql":
        yield guard.of_lease()


def dropping(
    connection: BaseDatabaseWrapper,
    model: type[Model],
    by: str,
    *,
    require_lease: bool,
    strict: bool = False,
) -> Iterator[str]:
    """Yield what undoes creating(); `strict` statements fail where there is nothing to undo."""
    guard = _Guard(connection, model, by)
    if require_lease and connection.vendor == "postgresql":
        yield guard.without("lease_guard", strict=strict)
    if guard.has_fence:
        yield guard.without("fence_guard", strict=strict)


class _Guard:
    """Writes the SQL for one table."""

    def __init__(self, connection: BaseDatabaseWrapper, model: type[Model], by: str) -> None:
        if connection.vendor not in _FENCE_GUARD:
            raise NotSupportedError(f"ProtectFence knows no triggers of {connection.vendor}.")
        self._connection = connection
        self._model = model
        self._by = by
        self._owner = fence_model(model)
        fields: list[Any] = [self._owner._meta.get_field(name) for name in FENCE_FIELDS]
        fields.append(self._owner._meta.pk)
        columns = (self._quoted(field.column) for field in fields)
        self._fence = dict(zip(("token", "holder", "pk"), columns, strict=True))

    @property
    def has_fence(self) -> bool:
        return self._owner is self._model

    @property
    def _key(self) -> str:
        """What the errors call the row."""
        key: Any = self._model._meta.pk
        return f"OLD.{self._quoted(key.column)}" if key.column else "'?'"

    def of_fence(self) -> str:
        vendor = self._connection.vendor
        return _FENCE_GUARD[vendor].format(
            **self._names("fence_guard"),
            **self._fence,
            goes_down=_GOES_DOWN[vendor].format(**self._fence),
            key=self._key,
            stale=STALE,
            state=_STALE_STATE,
            text=self._model._meta.db_table.replace("'", "''"),
        )

    def of_lease(self) -> str:
        own, place = self.has_fence, {"relation": OID.format(oid="TG_RELID")}
        return _LEASE_GUARD.format(
            **self._names("lease_guard"),
            look_up=_OWN_FENCE.format(**self._fence, **place) if own else self._of_parent(),
            registering=_REGISTERING.format(**self._fence, **place) if own else "",
            leave_out_the_fence=_LEAVE_OUT.format(**self._fence) if own else "",
            key=self._key,
            setting=REGISTRATION,
            needs_lease=NEEDS_LEASE,
            state=_NEEDS_LEASE_STATE,
            hint=HINT,
        )

    def without(self, kind: str, *, strict: bool = False) -> str:
        names, exists = self._names(kind), "" if strict else "IF EXISTS "
        if self._connection.vendor != "postgresql":
            return f"DROP TRIGGER {exists}{names['name']}"
        made = ("before", "name") if kind == "fence_guard" else ("name",)
        drops = [f"DROP TRIGGER {exists}{names[one]} ON {names['table']};" for one in made]
        return " ".join([*drops, f"DROP FUNCTION {exists}{names['function']}();"])

    def _names(self, kind: str) -> dict[str, str]:
        table = self._model._meta.db_table
        schema, name = split_identifier(table)
        digest = hashlib.sha256(f"{table} {self._by}".encode()).hexdigest()[:8]
        end = f"_{kind}_{digest}"  # which guards.py looks for
        # PostgreSQL counts bytes.
        longest = self._connection.ops.max_name_length() or 200
        start = name.encode()[: longest - len(end) - len("_b")].decode(errors="ignore")
        function = self._quoted(start + end)
        return {
            "name": self._quoted(start + end),
            "before": self._quoted(f"{start}{end}_b"),
            "function": f"{self._quoted(schema)}.{function}" if schema else function,
            "table": self._quoted(table),
        }

    def _of_parent(self) -> str:
        """Look up the fence through the rows from the parent of this one to the one that has it."""
        chain = [self._model, *self._model._meta.get_base_chain(self._owner)]
        tables, conditions, alias = [], [], ""
        for number, (child, parent) in enumerate(pairwise(chain)):
            link: Any = child._meta.get_ancestor_link(parent)
            source = f"{alias}.{self._quoted(link.column)}" if alias else "$1"
            alias = "fenced" if parent is self._owner else f"ancestor{number}"
            tables.append(f"{self._placed(parent)} AS {alias}")
            conditions.append(f"{alias}.{self._quoted(link.target_field.column)} = {source}")
        first: Any = self._model._meta.get_ancestor_link(chain[1])
        ancestors = f"{', '.join(tables)} WHERE {' AND '.join(conditions)}"
        return _FENCE_OF_PARENT.format(
            **self._fence,
            ancestors=ancestors.replace("'", "''"),
            fenced=OID.format(oid="fenced.tableoid"),
            link=self._quoted(first.column),
            parent=self._placed(self._owner).replace("'", "''"),
        )

    def _placed(self, model: type[Model]) -> str:
        """Return the table for format(): in the guarded one's schema if it names none itself."""
        schema, _ = split_identifier(model._meta.db_table)
        table = self._quoted(model._meta.db_table).replace("%", "%%")
        return table if schema else f"%1$I.{table}"

    def _quoted(self, name: str) -> str:
        return self._connection.ops.quote_name(name)
