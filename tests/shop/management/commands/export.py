"""manage.py export: work under a lock, at first outside of a transaction."""

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_fencing.decorators import with_fenced_lock
from django_fencing.leases import Lease
from tests.shop.models import Job


class Command(BaseCommand):
    requires_system_checks = ()  # they would take longer than the work

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("organization")

    @with_fenced_lock("exports:{organization}", on_held="skip")
    def handle(self, *args: Any, lease: Lease, **options: Any) -> None:
        self.stdout.write("at work")
        self.stdout.flush()
        sys.stdin.readline()
        with lease.atomic():
            Job.objects.create(note=options["organization"])
