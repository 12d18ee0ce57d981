"""What the guards of the database refuse, as the app's own errors."""

import re
from typing import Any

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_fencing.exceptions import FencingError, StaleToken, UnfencedWrite
from django_fencing.postgresql import DEPENDENT_OBJECTS, sqlstate
from django_fencing.triggers import HINT, NEEDS_LEASE, STALE

_UNPROTECT = (
    "django_fencing: put UnprotectFence, with the arguments of the ProtectFence, before this "
    "operation. CASCADE would leave half of the guard."
)


def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    """Run a statement as an execute_wrapper, and raise what a guard's error means."""
    try:
        return execute(sql, params, many, context)
    except DatabaseError as error:
        if refusal := _refusal(error):
            raise refusal from error
        if _drops_what_is_guarded(error):
            error.add_note(_UNPROTECT)
        raise


def explain_on(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    """Let explain() run the statements of a new connection, outside of all other wrappers."""
    # execute_wrapper() takes away the last one at its end.
    if explain not in connection.execute_wrappers:
        connection.execute_wrappers.insert(0, explain)


def _refusal(error: DatabaseError) -> FencingError | None:
    said = _said(error)
    if said.startswith(STALE):
        return StaleToken(_sentence(said))
    if said.startswith(NEEDS_LEASE):
        return UnfencedWrite(f"{_sentence(said)} {HINT}")
    return None


def _drops_what_is_guarded(error: DatabaseError) -> bool:
    depends = sqlstate(error) == DEPENDENT_OBJECTS
    return depends and bool(re.search("_(fence|lease)_guard_", str(error)))


def _said(error: DatabaseError) -> str:
    """Return the message alone; MySQL's drivers put a number before it."""
    return next((part for part in error.args if isinstance(part, str)), "")


def _sentence(said: str) -> str:
    line = said.splitlines()[0].removeprefix("django_fencing: ")
    return f"{line[0].upper()}{line[1:]}."
