"""The triggers by which the database itself guards a fence."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import split_identifier, truncate_name
from django.db.models import Model

from django_fencing.models import FENCE_FIELDS, fence_model
from django_fencing.postgresql import REGISTRATION

# How the errors begin.
STALE = "django_fencing: the fence of"
NEEDS_LEASE = "django_fencing: a lease is needed"

HINT = "Do it in a fenced transaction of the row: lease.atomic() or fenced_atomic()."

# By vendor. The fence may be moved up, or stay as it is.
_GOES_DOWN = {
    "postgresql": "NEW.{token} < OLD.{token} OR "
    "(NEW.{token} = OLD.{token} AND NEW.{holder} IS DISTINCT FROM OLD.{holder})",
    "sqlite": "NEW.{token} < OLD.{token} OR "
    "(NEW.{token} = OLD.{token} AND NEW.{holder} IS NOT OLD.{holder})",
    "mysql": "NEW.{token} < OLD.{token} OR "
    "(NEW.{token} = OLD.{token} AND NOT (NEW.{holder} <=> OLD.{holder}))",
}

# An AFTER trigger sees what is written in the end, whatever other triggers have made of it. In
# SQLSTATE's class 23, integrity constraint violation, a subclass from I to Z is nobody else's.
_FENCE_GUARD = {
    "postgresql": """
CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    RAISE EXCEPTION '{stale} a row of % stands at %, and cannot go to %',
        TG_TABLE_NAME, OLD.{token}, NEW.{token} USING ERRCODE = '23ZF1';
END
$guard$;
CREATE OR REPLACE TRIGGER {name} AFTER UPDATE ON {table} FOR EACH ROW
WHEN ({goes_down}) EXECUTE FUNCTION {name}();
""",
    "sqlite": """
CREATE TRIGGER IF NOT EXISTS {name} BEFORE UPDATE ON {table} FOR EACH ROW
WHEN {goes_down}
BEGIN
    SELECT RAISE(ABORT, '{stale} a row cannot go down');
END
""",
    "mysql": """
CREATE TRIGGER {name} BEFORE UPDATE ON {table} FOR EACH ROW
IF {goes_down} THEN
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = '{stale} a row cannot go down';
END IF
""",
}

# What changes nothing but the fence passes: the fence's own guard looks at that.
_LEASE_GUARD = """
CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $guard$
DECLARE
    registered text;
    written record;
BEGIN
    {look_up}
    IF registered = current_setting('{setting}', true) THEN
        RETURN NULL;
    END IF;
    IF TG_OP = 'UPDATE' THEN
        written := NEW;
        {leave_out_the_fence}
        IF written *= OLD THEN
            RETURN NULL;
        END IF;
    END IF;
    RAISE EXCEPTION '{needs_lease} for the % of a row of %', TG_OP, TG_TABLE_NAME USING
        ERRCODE = '23ZF2',
        HINT = '{hint}';
END
$guard$;
CREATE OR REPLACE TRIGGER {name} AFTER UPDATE OR DELETE ON {table} FOR EACH ROW
EXECUTE FUNCTION {name}();
"""

_OWN_FENCE = "registered := OLD.{token} || ':' || OLD.{holder};"
_LEAVE_OUT = "written.{token} := OLD.{token}; written.{holder} := OLD.{holder};"

# A parent's row that is gone was deleted in this transaction, and its own guard has let it go.
_FENCE_OF_PARENT = """SELECT fenced.{token} || ':' || fenced.{holder} INTO registered
    FROM {ancestors};
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;"""


def creating(
    connection: BaseDatabaseWrapper, model: type[Model], *, require_lease: bool
) -> Iterator[str]:
    """
    Yield the statements that guard the table of `model`, whose fence may be a parent's.

    Only PostgreSQL can require a lease.
    """
    guard = _Guard(connection, model)
    if guard.has_fence:
        if connection.vendor == "mysql":  # which cannot replace a trigger
            yield guard.without("fence_guard")
        yield guard.of_fence()
    if require_lease and connection.vendor == "postgresql":
        yield guard.of_lease()


def dropping(
    connection: BaseDatabaseWrapper, model: type[Model], *, require_lease: bool
) -> Iterator[str]:
    """Yield the statements that undo those of creating()."""
    guard = _Guard(connection, model)
    if require_lease and connection.vendor == "postgresql":
        yield guard.without("lease_guard")
    if guard.has_fence:
        yield guard.without("fence_guard")


class _Guard:
    """Writes the SQL for one table."""

    def __init__(self, connection: BaseDatabaseWrapper, model: type[Model]) -> None:
        self._connection = connection
        self._model = model
        self._owner = fence_model(model)
        fields: list[Any] = [self._owner._meta.get_field(name) for name in FENCE_FIELDS]
        self._fence = dict(
            zip(("token", "holder"), (self._quoted(field.column) for field in fields), strict=True)
        )

    @property
    def has_fence(self) -> bool:
        return self._owner is self._model

    def of_fence(self) -> str:
        vendor = self._connection.vendor
        return _FENCE_GUARD[vendor].format(
            **self._names("fence_guard"),
            **self._fence,
            goes_down=_GOES_DOWN[vendor].format(**self._fence),
            stale=STALE,
        )

    def of_lease(self) -> str:
        look_up = _OWN_FENCE.format(**self._fence)
        if not self.has_fence:
            look_up = _FENCE_OF_PARENT.format(**self._fence, ancestors=self._ancestors())
        return _LEASE_GUARD.format(
            **self._names("lease_guard"),
            look_up=look_up,
            leave_out_the_fence=_LEAVE_OUT.format(**self._fence) if self.has_fence else "",
            setting=REGISTRATION,
            needs_lease=NEEDS_LEASE,
            hint=HINT,
        )

    def without(self, kind: str) -> str:
        names = self._names(kind)
        if self._connection.vendor != "postgresql":
            return "DROP TRIGGER IF EXISTS {name}".format(**names)
        return (
            "DROP TRIGGER IF EXISTS {name} ON {table}; DROP FUNCTION IF EXISTS {name}();"
        ).format(**names)

    def _names(self, kind: str) -> dict[str, str]:
        table = self._model._meta.db_table
        longest = self._connection.ops.max_name_length()
        name = truncate_name(f"{split_identifier(table)[1]}_{kind}", longest)
        return {"name": self._quoted(name), "table": self._quoted(table)}

    def _ancestors(self) -> str:
        """Join the rows from the parent of this row to the one with the fence."""
        chain = [self._model, *self._model._meta.get_base_chain(self._owner)]
        tables, conditions, alias = [], [], "OLD"
        for number, (child, parent) in enumerate(pairwise(chain)):
            link: Any = child._meta.get_ancestor_link(parent)
            source = f"{alias}.{self._quoted(link.column)}"
            alias = "fenced" if parent is self._owner else f"ancestor{number}"
            tables.append(f"{self._quoted(parent._meta.db_table)} AS {alias}")
            conditions.append(f"{alias}.{self._quoted(link.target_field.column)} = {source}")
        return f"{', '.join(tables)} WHERE {' AND '.join(conditions)}"

    def _quoted(self, name: str) -> str:
        return self._connection.ops.quote_name(name)
