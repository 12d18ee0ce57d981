"""What the guards of the database refuse, as the app's own errors."""

from typing import Any

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_fencing.exceptions import FencingError, StaleToken, UnfencedWrite
from django_fencing.triggers import HINT, NEEDS_LEASE, STALE


def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    """Run a statement as an execute_wrapper, and raise what a guard's error means."""
    try:
        return execute(sql, params, many, context)
    except DatabaseError as error:
        if refusal := _refusal(str(error)):
            raise refusal from error
        raise


def explain_on(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    """Let explain() run the statements of a new connection, outside of all other wrappers."""
    # execute_wrapper() takes away the last one at its end.
    if explain not in connection.execute_wrappers:
        connection.execute_wrappers.insert(0, explain)


def _refusal(said: str) -> FencingError | None:
    if STALE in said:
        return StaleToken(_line(said, STALE))
    if NEEDS_LEASE in said:
        return UnfencedWrite(f"{_line(said, NEEDS_LEASE)} {HINT}")
    return None


def _line(said: str, start: str) -> str:
    """Return the sentence of the guard, without what the driver has put around it."""
    line = start + said.partition(start)[2].splitlines()[0].rstrip("')")
    line = line.removeprefix("django_fencing: ")
    return f"{line[0].upper()}{line[1:]}."
