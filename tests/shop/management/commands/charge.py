"""manage.py charge: work under a lock in one fenced transaction, and end as stdin says."""

import select
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import connection

from django_fencing.decorators import with_fenced_lock
from tests.shop.models import Job


class Command(BaseCommand):
    requires_system_checks = ()  # they would take longer than the work

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization", nargs="?")

    @with_fenced_lock("charges:{organization}")
    def handle(self, *args: Any, **options: Any) -> None:
        Job.objects.create(note=options["organization"])
        try:
            order = self.ask("at work")
            if order == "query":
                self.ask_database_for_a_minute()
            elif order:
                raise SystemExit(int(order))
        finally:
            self.ask("cleaning up")

    def ask(self, step: str) -> str:
        """Say where it stands, and return the next line of stdin: an empty one at its end."""
        self.stdout.write(step)
        self.stdout.flush()
        # A signal that comes just before a system call does not end it.
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            pass
        return sys.stdin.readline().strip()

    def ask_database_for_a_minute(self) -> None:
        self.stdout.write("asking")
        self.stdout.flush()
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep(60)")
