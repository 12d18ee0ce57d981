"""manage.py serve_meters"""

import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from hoa.meters import MeterService


class Command(BaseCommand):
    help = "Run the service that answers what the water meters have counted, until Ctrl-C."

    def add_arguments(self, parser: CommandParser) -> None:
        port = urlsplit(settings.METERS_URL).port
        parser.add_argument("--port", type=int, default=port, help=f"{port} if not given.")
        parser.add_argument("--delay", type=float, default=0, help="Seconds before each reply.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            service = MeterService(
                port=options["port"], delay=options["delay"], report=self.stdout.write
            )
        except (OSError, OverflowError) as error:
            raise CommandError(f"Cannot serve on port {options['port']}: {error}") from error
        with suppress(KeyboardInterrupt), service:
            self.stdout.write(f"Serving meters on {service.url} until Ctrl-C.")
            threading.Event().wait()
