"""What the commands share: their arguments, and how they end where no lock is concerned."""

from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError

from hoa.assignments import AssignmentRefused
from hoa.meters import MetersUnavailable


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Raise CommandError for the errors of the work that with_fenced_lock() lets through."""
    try:
        yield
    except (AssignmentRefused, MetersUnavailable, DatabaseError) as error:
        raise CommandError(" ".join(str(error).split())) from error


def find(model: Any, pk: int) -> Any:
    """Return the row. Raise CommandError if there is none."""
    if row := model.objects.filter(pk=pk).first():
        return row
    raise CommandError(f"There is no {model._meta.verbose_name} {pk}.")


def month(text: str) -> date:
    """Return the first day of the month, as an argument gives it."""
    try:
        return datetime.strptime(text, "%Y-%m").date()
    except ValueError as error:
        raise ArgumentTypeError(f"a month looks like 2026-11, not like {text!r}") from error
