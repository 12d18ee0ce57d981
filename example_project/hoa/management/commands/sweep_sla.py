"""manage.py sweep_sla"""

from typing import Any

from django.core.management.base import BaseCommand
from django.utils import timezone

from hoa.commands import one_line_errors
from hoa.sweeps import Busy, sweep_sla


class Command(BaseCommand):
    help = "Escalate the open complaints that are past their deadline. For cron, on every replica."

    def handle(self, *args: Any, **options: Any) -> None:
        with one_line_errors():
            try:
                escalations = sweep_sla(timezone.now())
            except Busy as busy:
                self.stderr.write(f"Skipped: {busy}")
                return
        for escalation in escalations:
            self.stdout.write(f"{escalation}")
        self.stdout.write(f"{len(escalations)} escalated.")
