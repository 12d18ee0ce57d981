"""manage.py export_statements"""

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_fencing.decorators import with_fenced_lock
from django_fencing.leases import Lease
from hoa.commands import find, month, one_line_errors
from hoa.models import Organization
from hoa.statements import statements_lock, units_without_statement, write_statements


def statements_of(command: BaseCommand, *args: Any, **options: Any) -> str:
    """Return the lock's name. An organization that does not exist leaves no fence behind."""
    return statements_lock(find(Organization, options["organization"]), options["month"])


class Command(BaseCommand):
    help = (
        "Write the statements of an organization's owners for a month, as far as they are missing. "
        "The lease is extended after each chunk."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", type=int, help="Its primary key.")
        parser.add_argument("month", type=month, help="As in 2026-11.")
        parser.add_argument("--chunk", type=int, default=10, help="Units at a time.")
        parser.add_argument("--pause", type=float, default=0, help="Seconds after each chunk.")
        parser.add_argument(
            "--renew",
            action="store_true",
            help="Let a thread renew the lease, for chunks that may take longer than it lasts.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        (self.renewed if options["renew"] else self.extended)(**options)

    @one_line_errors()
    @with_fenced_lock(statements_of, renew=True)
    def renewed(self, *, lease: Lease, **options: Any) -> None:
        self.export(lease, **options)

    @one_line_errors()
    @with_fenced_lock(statements_of)
    def extended(self, *, lease: Lease, **options: Any) -> None:
        self.export(lease, **options)

    def export(self, lease: Lease, **options: Any) -> None:
        """Write chunk after chunk. Whoever was overtaken stops at the next one."""
        organization, of_month = find(Organization, options["organization"]), options["month"]
        missing = len(units_without_statement(organization, of_month))
        if not missing:
            self.stdout.write("There is nothing left to write.")
        done = 0
        for count in write_statements(organization, of_month, lease, max(1, options["chunk"])):
            done += count
            self.stdout.write(f"{done} of {missing} statements, token {lease.token}")
            self.stdout.flush()
            time.sleep(options["pause"])
            if not options["renew"]:
                lease.extend()
