"""What happens to leases: one signal each, and one line each on the logger `django_fencing`."""

import json
import logging
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from django.db import connections, transaction
from django.dispatch import Signal

from django_fencing.resources import Resource

logger = logging.getLogger("django_fencing")

_PLAIN = re.compile(r"[!-~]+")
_AMBIGUOUS = frozenset("\"'=\\")


class LeaseSignal(Signal):
    """
    A signal whose sender is the model of the row that is locked, `Fence` for a name.

    Receivers get `resource`, the resource's name, and what the signal's own comment names. One
    that raises is logged by Django and changes nothing for the lock.
    """

    def __init__(self, name: str, level: int) -> None:
        super().__init__()
        self.name = name
        self.level = level

    def announce(
        self,
        resource: Resource,
        line: Mapping[str, object],
        level: int | None = None,
        **values: object,
    ) -> None:
        """Log `line`, at the signal's level if None, and send `values` to the receivers."""
        level = self.level if level is None else level
        if logger.isEnabledFor(level):
            line = {"resource": resource.name, **line}
            logger.log(level, "%s", key_values(self.name, line))
        if not self.has_listeners(resource.row_model):
            return
        values = {"resource": resource.name, **values}
        try:
            # A statement of a receiver that fails must not abort the transaction of the body.
            with _savepoint(resource.alias):
                self.send_robust(resource.row_model, **values)
        except Exception:
            logger.exception("%s", key_values("receiver_failed", {"signal": self.name}))


# lease: its token is final unless it was acquired with register=False
lease_acquired = LeaseSignal("lease_acquired", logging.INFO)

# holder: who asked; held_by: text or None; retry_after: seconds. Once for each acquisition that
# finds the lock held, whether or not it gets it later.
lock_contended = LeaseSignal("lock_contended", logging.INFO)

# lease
lease_extended = LeaseSignal("lease_extended", logging.DEBUG)

# lease, reason, remaining: seconds. A renewal has failed, or the last one was made, so the lease
# will end unless a later one succeeds. Once until then. Sent in a thread of its own, as is a
# lease_lost that the renewal finds out.
lease_endangered = LeaseSignal("lease_endangered", logging.WARNING)

# lease: it was held until then, or until it ran out if lease.lost
lease_released = LeaseSignal("lease_released", logging.INFO)

# lease, reason: it is found out that the lease has ended other than by its own release, or that
# it cannot be given back. Once for each lease, and not after token_refused. Its line is an INFO
# where an error is raised that says the same.
lease_lost = LeaseSignal("lease_lost", logging.WARNING)

# lease, error: the StaleToken by which the database has refused a fenced transaction
token_refused = LeaseSignal("token_refused", logging.INFO)

# lease, key: work that is done once was done before, so it has not run again
once_replayed = LeaseSignal("once_replayed", logging.INFO)


def _savepoint(alias: str) -> AbstractContextManager[None]:
    return transaction.atomic(using=alias) if connections[alias].in_atomic_block else nullcontext()


def key_values(event: str, values: Mapping[str, object]) -> str:
    """Return one line of printable ASCII, whose values are quoted where they could be misread."""
    return " ".join([event, *(f"{key}={_value(value)}" for key, value in values.items())])


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) and _AMBIGUOUS.isdisjoint(text) else json.dumps(text)
