"""How one lease is renewed, until it is released, lost, or has been renewed for long enough."""

from typing import TYPE_CHECKING, Any

from django_fencing.endings import Ending
from django_fencing.grants import Holder
from django_fencing.renewer import aside, renewer
from django_fencing.resources import Resource
from django_fencing.signals import lease_endangered
from django_fencing.stores.base import Store
from django_fencing.timing import now

if TYPE_CHECKING:
    from django_fencing.leases import Lease

# A renewal is due after a third of the ttl; one that has failed is repeated after a tenth. It waits
# for its answer for a second at most, because the other leases wait meanwhile.
_HASTE = 10
_MOST_PATIENCE = 1.0


class Renewal:
    """
    The renewal of one lease `until` a time; 0 if it is not renewed.

    An error leaves open whether the lease is held, until it has run out. Nothing is asked of the
    database.
    """

    def __init__(
        self, store: Store, resource: Resource, holder: Holder, ending: Ending, until: float
    ) -> None:
        self._store = store
        self._resource = resource
        self._holder = holder
        self._ending = ending
        self._until = until
        self._endangered = False  # whether that was announced since the last renewal

    @property
    def is_on(self) -> bool:
        """Whether the lease is renewed, or watched until it ends."""
        return bool(self._until)

    def end(self) -> None:
        """Renew it no more."""
        if self._until:
            self._until = 0.0
            renewer.look()

    def renew(self, lease: "Lease") -> float | None:
        """Extend the lease, and return in how many seconds to do so again, None if never."""
        if not self._ending.asking.acquire(blocking=False):
            return lease.ttl / _HASTE  # it is being released or extended
        try:
            if not self._until:
                return None
            lost, doubt = self._ask(lease)
        finally:
            self._ending.asking.release()
        if lost:
            self.end()
            aside(lambda: self._ending.lose(lease, lost))
            return None
        if not doubt:
            return lease.ttl / 3
        self._endanger(lease, doubt)
        rest = max(lease.remaining, 0.001)
        return rest if now() >= self._until else min(rest, lease.ttl / _HASTE)

    def _ask(self, lease: "Lease") -> tuple[str, str]:
        """Return why the lease is lost, or why that is in doubt."""
        if now() >= self._until:
            limit = "it was renewed for as long as it may be"
            return ("", limit) if lease.remaining else (f"it ran out: {limit}", "")
        if lease.remaining == 0:
            return "it ran out before it could be renewed", ""
        sent, ttl = now(), lease.ttl
        patience = min(ttl / 3, _MOST_PATIENCE)
        try:
            held = self._store.extend(self._resource, self._holder, ttl=ttl, patience=patience)
        except Exception as error:  # noqa: BLE001 - of the store, or of what the settings name
            return "", str(error) or repr(error)
        if not held:
            return "it ran out, another holder has it, or the store has lost it", ""
        lease._last(ttl, sent)
        self._endangered = False
        return "", ""

    def _endanger(self, lease: "Lease", reason: str) -> None:
        if not self._endangered:
            self._endangered = True
            remaining = lease.remaining
            line = {"token": lease.token, "remaining": remaining, "reason": reason}
            known: dict[str, Any] = {"lease": lease, "remaining": remaining, "reason": reason}
            aside(lambda: lease_endangered.announce(self._resource, line, **known))
