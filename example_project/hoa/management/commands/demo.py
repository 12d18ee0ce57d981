"""manage.py demo"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser

from hoa.demo.guards import VARIANTS, forget, remove
from hoa.demo.replicas import Unexpected
from hoa.demo.scenario import play
from hoa.demo.verdict import Observed
from hoa.models import Organization
from hoa.samples import sample_organization

INTRODUCTION = """
Two replicas charge the same organization for the same month.
Replica A is paused while it asks the water meters, for longer than its lock lasts ({ttl:g} s).
The same reads and writes are played under three guards.
"""


class Command(BaseCommand):
    help = (
        "Play one interleaving of two replicas under three guards: a paused replica charges a "
        "month twice, unless it is fenced. Touches only organizations that it makes itself."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--ttl", type=float, default=1, help="Seconds that a lock lasts.")

    def handle(self, *args: Any, **options: Any) -> None:
        with terminable():
            self.show(INTRODUCTION.format(**options))
            call_command("migrate", verbosity=0)
            observed = {}
            for name in VARIANTS:
                observed[name] = self.play(name, options["ttl"])
        self.conclude(observed)

    def play(self, name: str, ttl: float) -> Observed:
        self.show(f"\nGuard {name!r}: {VARIANTS[name].title}\n")
        with organization_of_its_own(name) as organization:
            try:
                observed = play(name, organization, self.show, ttl)
            except (Unexpected, TimeoutError) as error:
                raise CommandError(f"The demo broke off under {name!r}: {error}") from error
        self.show(f"\n{observed.totals}")
        return observed

    def show(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()

    def conclude(self, observed: dict[str, Observed]) -> None:
        """Write the verdict. Raise CommandError if a guard did not end as it has to."""
        self.stdout.write("\nVerdict: how often each guard let the month be charged\n\n")
        surprises = []
        for name, found in observed.items():
            variant = VARIANTS[name]
            self.stdout.write(f"  {found.times:<14} {variant.title}")
            if not found.is_as_expected(variant):
                surprises.append(f"{name!r} ({found.totals}, {found.endings})")
        if surprises:
            raise CommandError(f"Not what was to be shown: {'; '.join(surprises)}.")


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block as an exception does, so that everything is put away."""
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def organization_of_its_own(variant: str) -> Iterator[Organization]:
    """Make an organization that nobody else knows, and remove it with what belongs to it."""
    organization = sample_organization(f"{settings.FENCING['NAMESPACE']}: {variant}")
    try:
        yield organization
    finally:
        forget(organization)
        remove(organization)
