"""manage.py assign_vendor"""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from hoa.assignments import assign_vendor
from hoa.commands import find, one_line_errors
from hoa.models import Complaint, Vendor


class Command(BaseCommand):
    help = "Assign a vendor to a complaint."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("complaint", type=int, help="Its primary key.")
        parser.add_argument("vendor", type=int, help="Its primary key.")

    def handle(self, *args: Any, **options: Any) -> None:
        with one_line_errors():
            complaint = find(Complaint, options["complaint"])
            vendor = find(Vendor, options["vendor"])
            assignment = assign_vendor(complaint, vendor)
        self.stdout.write(f"{vendor} is assigned to {complaint}, token {assignment.token}.")
