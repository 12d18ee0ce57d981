"""manage.py assign_vendor"""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_fencing.decorators import with_fenced_lock
from django_fencing.leases import current_lease
from hoa.assignments import place_assignment
from hoa.commands import find, one_line_errors
from hoa.models import Complaint, Vendor


class Command(BaseCommand):
    help = "Assign a vendor to a complaint."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("complaint", type=int, help="Its primary key.")
        parser.add_argument("vendor", type=int, help="Its primary key.")

    @one_line_errors()
    @with_fenced_lock(lambda command, *args, **options: find(Complaint, options["complaint"]))
    def handle(self, *args: Any, **options: Any) -> str:
        complaint = current_lease().row
        vendor = find(Vendor, options["vendor"])
        assignment = place_assignment(complaint, vendor)
        # What is returned is written by Django, and not before the commit.
        return f"{vendor} is assigned to {complaint}, token {assignment.token}."
