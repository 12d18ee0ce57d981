"""How the commands end: each error is one line and a return code of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError

from django_fencing.exceptions import FencingError, LeaseLost, LockHeld, StoreUnavailable
from hoa.assignments import AssignmentRefused
from hoa.meters import MetersUnavailable

# From sysexits.h: try again later; a protocol was broken; a service is unavailable.
RETURN_CODES = {LockHeld: 75, LeaseLost: 76, StoreUnavailable: 69}

_ERRORS = (FencingError, AssignmentRefused, MetersUnavailable, DatabaseError, ValueError)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise CommandError, with its return code, for whatever the work may raise."""
    try:
        yield
    except _ERRORS as error:
        codes = (code for kind, code in RETURN_CODES.items() if isinstance(error, kind))
        line = " ".join(str(error).split())
        raise CommandError(line, returncode=next(codes, 1)) from error


def find(model: Any, pk: int) -> Any:
    """Return the row. Raise CommandError if there is none."""
    if row := model.objects.filter(pk=pk).first():
        return row
    raise CommandError(f"There is no {model._meta.verbose_name} {pk}.")
