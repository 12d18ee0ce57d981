"""manage.py fencing: look at leases and fences, end a stuck lease, find out what is wrong."""

import getpass
import json
import os
import re
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError
from django.utils.connection import ConnectionDoesNotExist

from django_fencing import doctor, operators, states
from django_fencing.commands import RETURN_CODES
from django_fencing.conf import conf, namespace
from django_fencing.exceptions import FencingError, StoreUnavailable
from django_fencing.grants import LeaseRecord
from django_fencing.management import showing
from django_fencing.models import FenceEvent
from django_fencing.operators import Outcome
from django_fencing.overview import all_leases
from django_fencing.pruning import Pruning
from django_fencing.states import State

_EPILOG = """
return codes: 0 done, or all is well; 1 nothing was done, or something is wrong; 2 the arguments are
not understood; 64 what is named is not there, or cannot be locked; 69 Redis or the database cannot
be asked; 75 released, but the holder is not fenced yet. RESOURCE is a name, or app.model:pk for a
row.
"""

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}

_LAST_EVENTS = 5

# So many letters of a holder's id will do.
_LEAST = 8

_UNAVAILABLE = RETURN_CODES[StoreUnavailable]


class Command(BaseCommand):
    help = "Look at leases and fences, end a lease that is stuck, find out what is wrong."
    requires_system_checks = ()  # doctor tells them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.epilog = _EPILOG
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

        def action(name: str, text: str, run: Callable[..., None]) -> CommandParser:
            made: CommandParser = actions.add_parser(name, help=text, description=text)
            made.set_defaults(run=run)
            made.add_argument("--json", action="store_true", help="Print JSON.")
            made.add_argument("--namespace", help="The tenant, instead of NAMESPACE.")
            _add_djangos(made)
            return made

        action("locks", "List what is held, or has lapsed within the last hour.", self.locks)
        show = action("show", "Show a resource's lease, counter, fence, last events.", self.show)
        release = action("release", "End a stuck lease, and fence its holder.", self.release)
        for one in (show, release):
            one.add_argument("resource", metavar="RESOURCE")
            one.add_argument("--using", metavar="ALIAS", help="The database of the fence.")
        release.add_argument(
            "--holder", required=True, help="The holder that `show` tells: 8 letters will do."
        )
        release.add_argument("--reason", default="", help="For the ledger.")
        action("doctor", "Try everything on a probe, and say what is wrong.", self.doctor)
        prune = action("prune", "Delete fences of names, once records and events.", self.prune)
        prune.add_argument(
            "--older-than", required=True, type=_age, metavar="AGE", help="As in 90d, 12h."
        )
        prune.add_argument("--database", metavar="ALIAS", help="Instead of FENCING['DATABASE'].")
        for one in (release, prune):
            one.add_argument("--dry-run", action="store_true", help="Say it, and do nothing.")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            with namespace(options["namespace"]):
                options["run"](**options)
        except FencingError as error:
            code = next((code for kind, code in RETURN_CODES.items() if isinstance(error, kind)), 1)
            raise CommandError(" ".join(str(error).split()), returncode=code) from error
        except (ImproperlyConfigured, ConnectionDoesNotExist) as error:
            raise CommandError(" ".join(str(error).split())) from error
        except DatabaseError as error:
            raise CommandError(" ".join(str(error).split()), returncode=_UNAVAILABLE) from error

    def locks(self, **options: Any) -> None:
        leases = all_leases(options["namespace"])
        if options["json"]:
            self._json([showing.lease_json(item) for item in leases])
            return
        for line in showing.leases(leases):
            self.stdout.write(line)

    def show(self, **options: Any) -> None:
        found = states.state(operators.resource_of(options["resource"], options["using"]))
        last = states.events(found.resource)[:_LAST_EVENTS]
        events = [] if found.database_outage else list(last)
        if options["json"]:
            self._show_json(found, events)
        else:
            self._show(found, events)
        if outage := found.store_outage or found.database_outage:
            raise CommandError(outage, returncode=_UNAVAILABLE)

    def _show_json(self, found: State, events: list[FenceEvent]) -> None:
        self._json(
            {
                "resource": found.resource,
                "kind": found.kind,
                "lease": found.lease and showing.record_json(found.lease),
                "counter": found.counter,
                "fence_token": found.fence_token,
                "fence_holder": found.fence_holder,
                "locked_by": [backend._asdict() for backend in found.locked_by],
                "events": [
                    {"at": event.created_at, "kind": event.kind, "message": event.message}
                    for event in events
                ],
            }
        )

    def _show(self, found: State, events: list[FenceEvent]) -> None:
        lease = found.lease
        lines = [
            ("resource", found.resource),
            ("kind", found.kind),
            ("lease", showing.lease(found)),
            ("held by", states.described(lease) if lease else ""),
            ("holder", lease.holder if lease else ""),
            ("since", showing.moment(lease.since) if lease else ""),
            ("counter", "" if found.counter is None else found.counter),
            ("fence token", showing.fence(found)),
            ("fence holder", found.fence_holder.hex if found.fence_holder else ""),
        ]
        lines += [("row locked by", backend) for backend in found.locked_by]
        for name, value in lines:
            if value != "":
                self.stdout.write(f"{name:<13} {showing.printable(value)}")
        for event in events:
            self.stdout.write(
                f"{showing.moment(event.created_at)}  {showing.printable(event.message)}"
            )

    def release(self, **options: Any) -> None:
        resource = operators.resource_of(options["resource"], options["using"])
        forced = operators.force_release(
            resource,
            _holder(options["holder"], states.look(resource.keys)),
            user=_user(),
            reason=options["reason"],
            dry_run=options["dry_run"],
        )
        line = f"{resource.name}: {forced.said}."
        if options["json"]:
            self._json(
                {
                    "resource": resource.name,
                    "dry_run": options["dry_run"],
                    "outcome": forced.outcome,
                    "said": forced.said,
                }
            )
        if forced.outcome is Outcome.NOT_FENCED:
            raise CommandError(line, returncode=75)
        if forced.outcome is not Outcome.RELEASED:
            raise CommandError(line, returncode=1)
        if not options["json"]:
            self.stdout.write(line)

    def doctor(self, **options: Any) -> None:
        findings = []
        for finding in doctor.examine():
            findings.append(finding)
            if not options["json"]:
                mark = {True: "ok", False: "WRONG", None: "note"}[finding.well]
                self.stdout.write(f"{mark:<6}{finding.what}: {finding.said}")
        if options["json"]:
            self._json([finding._asdict() for finding in findings])
        wrong = [finding.what for finding in findings if finding.well is False]
        if wrong:
            raise CommandError(f"Wrong: {', '.join(wrong)}.")

    def prune(self, **options: Any) -> None:
        pruning = Pruning(
            alias=options["database"] or conf.database,
            before=options["older_than"],
            namespace=options["namespace"],
        )
        counts = pruning.count() if options["dry_run"] else pruning.delete()
        if options["json"]:
            self._json(counts)
            return
        verb = "would be looked at" if options["dry_run"] else "deleted"
        said = ", ".join(f"{count} {what}" for what, count in counts.items())
        self.stdout.write(f"{said} {verb}.")

    def _json(self, value: Any) -> None:
        self.stdout.write(json.dumps(value, indent=2, default=showing.plain))


def _add_djangos(action: CommandParser) -> None:
    """Take the options of every command after the action too, where argparse expects its own."""
    silent: dict[str, Any] = {"default": SUPPRESS, "help": SUPPRESS}
    action.add_argument("-v", "--verbosity", type=int, choices=range(4), **silent)
    for option in ("--settings", "--pythonpath"):
        action.add_argument(option, **silent)
    for option in ("--traceback", "--no-color", "--force-color"):
        action.add_argument(option, action="store_true", **silent)


def _holder(text: str, lease: LeaseRecord | None) -> str:
    """Return the holder as the store writes it, for its first letters or with hyphens too."""
    with suppress(ValueError):
        return UUID(text).hex
    if lease is None or not lease.holder.startswith(text):
        return text
    if len(text) < _LEAST:
        raise CommandError(f"{text!r} is too short for a holder: give {_LEAST} letters at least.")
    return lease.holder


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user has no name, as in many containers
        return f"uid {os.getuid()}"


def _age(text: str) -> datetime:
    """Return the time that is so long ago."""
    found = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    try:
        if found:
            return datetime.now(UTC) - timedelta(seconds=int(found[1]) * _UNITS[found[2]])
    except OverflowError:
        pass
    raise ArgumentTypeError(f"{text!r} is no age such as 90d or 12h")
