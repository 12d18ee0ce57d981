"""manage.py generate_monthly_charges"""

from argparse import ArgumentTypeError
from datetime import date, datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from hoa.charges import Outcome, generate_monthly_charges
from hoa.commands import find, one_line_errors
from hoa.models import Organization


def month(text: str) -> date:
    try:
        return datetime.strptime(text, "%Y-%m").date()
    except ValueError as error:
        raise ArgumentTypeError(f"a month looks like 2026-11, not like {text!r}") from error


class Command(BaseCommand):
    help = "Charge the units of an organization for a month, unless that is done already."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", type=int, help="Its primary key.")
        parser.add_argument("month", type=month, help="As in 2026-11.")
        parser.add_argument("--ttl", type=float, help="Seconds that the lease lasts.")

    def handle(self, *args: Any, **options: Any) -> None:
        with one_line_errors():
            organization = find(Organization, options["organization"])
            result = generate_monthly_charges(organization, options["month"], ttl=options["ttl"])
        if result.run is None:
            self.stdout.write(f"Another replica is charging {organization}: nothing to do.")
        elif result.outcome is Outcome.ALREADY_RUN:
            self.stdout.write(f"{result.run} was charged already: {result.run.total} in all.")
        else:
            self.stdout.write(
                f"{result.run} is charged: {result.run.total} in all, token {result.run.token}."
            )
