"""manage.py publish_notices"""

from typing import Any

from django.core.management.base import BaseCommand
from django.utils import timezone

from hoa.commands import one_line_errors
from hoa.sweeps import Busy, publish_notices


class Command(BaseCommand):
    help = "Publish the notices whose time has come. For cron, on every replica."

    def handle(self, *args: Any, **options: Any) -> None:
        with one_line_errors():
            try:
                published = publish_notices(timezone.now())
            except Busy as busy:
                self.stderr.write(f"Skipped: {busy}")
                return
        self.stdout.write(f"{published} published.")
