"""manage.py demo_replica"""

import json
import logging
import sys
import time
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from redis.exceptions import LockError

from django_fencing.exceptions import FencingError
from hoa.commands import month
from hoa.demo.guards import VARIANTS, RefusedByToken
from hoa.demo.replicas import end_with
from hoa.models import Organization


class Command(BaseCommand):
    requires_system_checks = ()  # they would take longer than the work
    help = "Be one replica of `manage.py demo`, which starts it: charge, and tell each step."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("variant", choices=VARIANTS)
        parser.add_argument("organization", type=int)
        parser.add_argument("month", type=month)
        parser.add_argument("--ttl", type=float, required=True)
        parser.add_argument("--parent", type=int, required=True)

    def handle(self, *args: Any, **options: Any) -> None:
        end_with(options["parent"])
        organization = Organization.objects.get(pk=options["organization"])
        self._tell_what_is_logged()
        self.tell("ready")
        if not sys.stdin.readline():
            return
        charge = VARIANTS[options["variant"]].charge
        try:
            result = charge(organization, options["month"], ttl=options["ttl"])
        except (FencingError, LockError, RefusedByToken) as error:
            self.tell("ended", ending=type(error).__name__, text=str(error))
        else:
            self.tell("ended", ending=result.outcome, text="")

    def tell(self, step: str, **details: object) -> None:
        event = {"step": step, "at": time.monotonic(), **details}
        self.stdout.write(json.dumps(event))
        self.stdout.flush()

    def _tell_what_is_logged(self) -> None:
        for name in ("hoa.charges", "django_fencing"):
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO)
            logger.addHandler(_Teller(self))
            logger.propagate = False


class _Teller(logging.Handler):
    def __init__(self, command: Command) -> None:
        super().__init__()
        self.command = command

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "hoa.charges" and isinstance(record.args, dict):
            self.command.tell(record.getMessage().split()[0], **record.args)
        else:
            self.command.tell("logged", text=record.getMessage())
