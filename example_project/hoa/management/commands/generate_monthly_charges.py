"""manage.py generate_monthly_charges"""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_fencing.decorators import with_fenced_lock
from django_fencing.leases import Lease
from hoa.charges import Outcome, charge_month, lock_name
from hoa.commands import find, month, one_line_errors
from hoa.models import Organization


def charges_of(options: dict[str, Any]) -> str:
    """Return the lock's name. An organization that does not exist leaves no fence behind."""
    return lock_name(find(Organization, options["organization"]))


class Command(BaseCommand):
    help = "Charge the units of an organization for a month, unless that is done already."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", type=int, help="Its primary key.")
        parser.add_argument("month", type=month, help="As in 2026-11.")

    # For cron on every replica: where another one is charging, there is nothing to do.
    @one_line_errors()
    @with_fenced_lock(lambda command, *args, **options: charges_of(options), on_held="skip")
    def handle(self, *args: Any, lease: Lease, **options: Any) -> None:
        organization = find(Organization, options["organization"])
        result = charge_month(organization, options["month"], lease)
        run = result.run
        if result.outcome is Outcome.ALREADY_RUN:
            self.stdout.write(f"{run} was charged already: {run.total} in all.")
        else:
            self.stdout.write(f"{run} is charged: {run.total} in all, token {run.token}.")
