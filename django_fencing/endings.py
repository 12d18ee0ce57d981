"""How a lease ends: given back, or lost."""

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from django_fencing import flow, ledger
from django_fencing.exceptions import InsideTransaction, StoreUnavailable
from django_fencing.grants import Holder
from django_fencing.resources import Resource
from django_fencing.signals import key_values, lease_lost, lease_released, logger
from django_fencing.stores.base import Store

if TYPE_CHECKING:
    from django_fencing.leases import Lease


OnLost: TypeAlias = "Callable[[Lease], object] | None"


class Ending:
    """
    The end of one lease, which is announced once.

    `released` says whether it was still held when it was given back, None before that. `lost`
    is whether it is known to have ended otherwise. `kept` is set while something that outlives
    the lease's block goes on to hold it.
    """

    def __init__(self, store: Store, resource: Resource, holder: Holder, on_lost: OnLost) -> None:
        self.released: bool | None = None
        self.lost = False
        self.kept = False
        self.told = False  # whether it was announced that the lease is lost, or will be
        self._store = store
        self._resource = resource
        self._holder = holder
        self._on_lost = on_lost
        self._flow = flow.current_flow()
        # One answer of the store at a time. A signal handler may ask inside of another call.
        self.asking = threading.RLock()

    @property
    def is_foreign(self) -> bool:
        """Whether the lease belongs to the process that has forked this one."""
        return self._holder.pid != os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether nobody has given the lease back, or tried to."""
        return self.released is None and not self.told and not self.is_foreign

    def give_back(self, lease: "Lease") -> bool:
        """Release, also inside a transaction. Raise StoreUnavailable; then call it again."""
        if self.is_foreign:
            return False
        with self.asking:
            first = self.released is None
            if first:
                self.released = self._store.release(self._resource, self._holder)
        flow.let_go(lease, self._flow)
        lease._end_renewal()
        if first and self.released:
            lease_released.announce(
                self._resource, {"token": lease.token, "held": lease._age}, lease=lease
            )
        elif first:
            self.lose(lease, "it ended before its release; what was committed stands")
        ledger.flush()
        return bool(self.released)

    def leave(self, lease: "Lease", error: BaseException | None) -> None:
        """
        Release at the end of a block, with a second attempt if the store does not answer.

        What the block has raised (`error`) or committed stands: a lease that ran out
        meanwhile, or that cannot be given back, is a warning.
        """
        try:
            if self.kept and error is None:
                return
            try:
                lease.release()
            except StoreUnavailable:
                lease.release()
        except StoreUnavailable as failure:
            self.tell_not_given_back(lease, failure, error)
        except InsideTransaction as failure:
            if error is None:
                raise
            self.tell_not_given_back(lease, failure)
        finally:
            lease._end_renewal()
            flow.let_go(lease, self._flow)
            ledger.flush()

    def end_kept(self, lease: "Lease") -> None:
        """
        Release what has outlived its block.

        A transaction that whoever has closed or dropped it leaves open is no obstacle: its row
        lock keeps successors waiting until it is rolled back.
        """
        self.kept = False
        try:
            self.give_back(lease)
        except StoreUnavailable as failure:
            self.tell_not_given_back(lease, failure)

    def lose(self, lease: "Lease", reason: str, level: int | None = None) -> None:
        """Note that the lease has ended other than by its release."""
        self._note_loss(lease)
        self._tell(lease, reason, level)

    def refuse(self, lease: "Lease") -> None:
        """Note that the database has refused the lease, which is announced as that."""
        self.told = True
        self._note_loss(lease)

    def tell_not_given_back(
        self, lease: "Lease", failure: Exception, error: BaseException | None = None
    ) -> None:
        """Announce that the lease will run out; `error` may have said so already."""
        lease._end_renewal()
        level = logging.INFO if isinstance(error, StoreUnavailable) else None
        self._tell(lease, f"it was not given back and will run out: {failure}", level)

    def _note_loss(self, lease: "Lease") -> None:
        first, self.lost = not self.lost, True
        lease._end_renewal()
        if first and self._on_lost is not None:
            try:
                self._on_lost(lease)
            except Exception:  # noqa: BLE001 - it changes nothing, as a signal's receiver
                logger.exception("%s", key_values("on_lost_failed", {"resource": lease.resource}))

    def _tell(self, lease: "Lease", reason: str, level: int | None) -> None:
        if not self.told:
            self.told = True
            line = {"token": lease.token, "reason": reason}
            lease_lost.announce(self._resource, line, level, lease=lease, reason=reason)
            ledger.lost(self._resource, self._holder, lease.token, reason)
