"""Acquire a resource: propose in the store, register in the database, confirm in the store."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_fencing import flow
from django_fencing.endings import OnLost
from django_fencing.exceptions import LeaseLost, LockHeld, StaleToken, StoreUnavailable
from django_fencing.fences import NotRegistered
from django_fencing.grants import Grant, Holder, Refusal
from django_fencing.leases import Lease
from django_fencing.resources import Resource
from django_fencing.signals import lease_acquired, lock_contended
from django_fencing.stores.base import Store, introduce
from django_fencing.timing import now
from django_fencing.waiting import Waiting

# redis-py hides its retries. A call that took this long may have been sent twice, and the first
# may still be on its way.
_SLOW = 0.5

# What retry_after says where the store cannot tell.
_UNKNOWN_REMAINING = 1.0

# How a granted lease gets into the database, in which it may wait for as long as is left.
Settle = Callable[[Lease, Waiting], object]


@dataclass(slots=True, kw_only=True, eq=False)
class Acquisition:
    """One acquisition, whose attempts all ask for the same holder."""

    store: Store
    resource: Resource
    holder: Holder
    ttl: float
    wait: float
    register: bool
    seen: int | None
    renewal: float  # for how long the lease is renewed; 0: it is not
    on_lost: OnLost
    cancelled: threading.Event | None  # set when nobody waits for the lease any more
    lease: Lease | None = None  # once it is granted
    _doubtful: bool = False  # whether an attempt's outcome is unknown
    _contended: bool = False  # whether the lock was found held

    def acquire(self) -> Lease:
        """Return the lease, registered if the lock says so."""
        return self._acquire(self._register if self.register else self._announce)

    @contextmanager
    def leased(self) -> Iterator[Lease]:
        """Hold the lease."""
        with self.undone():
            lease = self.acquire()
            with lease._entered():
                yield lease
        lease._leave(None)

    @contextmanager
    def opened(self) -> Iterator[Lease]:
        """Hold the lease with its fenced transaction open, which has registered it."""
        with self.undone(), ExitStack() as fenced:

            def settle(lease: Lease, waiting: Waiting) -> None:
                self._announce(lease, waiting)  # outside of the transaction
                fenced.enter_context(lease._entered())  # until its hooks have run
                try:
                    lease._open(fenced, waiting.rest_for_the_row)
                except StaleToken as error:
                    lease._refused(error)
                    raise
                except (NotRegistered, LeaseLost) as error:
                    lease._lose(f"it could not be registered: {error}")
                    raise

            lease = self._acquire(settle)
            yield lease
        lease._leave(None)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo what a block that fails has left."""
        try:
            yield
        except BaseException as error:
            self.undo(error)
            raise

    def undo(self, error: BaseException) -> None:
        """
        End what a block that has failed by `error` has left: its transaction, then its lease.

        The transaction of a with-block has ended by then, unless an interrupt (a signal's, a task
        queue's) came between two instructions, when it was open and nobody had noted it.
        """
        if not isinstance(error, GeneratorExit):  # the garbage collector's, in any thread
            flow.roll_back(self.resource.alias, error)
        if self.lease is not None and self.lease._is_left_behind:
            self.lease._leave(error)

    def abandon(self, patience: float | None) -> None:
        """End what the store may have granted, or may yet grant, as far as it answers."""
        with suppress(StoreUnavailable, ImproperlyConfigured):
            self.store.release(self.resource, self.holder, patience=patience)

    def _acquire(self, settle: Settle) -> Lease:
        """Ask the store until it grants and `settle` registers, for as long as the lock waits."""
        failure: LockHeld | StoreUnavailable
        # A flow that holds the resource would wait for itself.
        waiting = Waiting(0 if self._by_its_holder else self.wait, self.cancelled)
        try:
            for _ in waiting.attempts(self.store, self.resource, self.holder):
                try:
                    lease = self._attempt(settle, waiting)
                except LockHeld as error:
                    failure = error
                except StoreUnavailable as error:
                    failure, self._doubtful = error, True
                else:
                    flow.hold(lease)
                    lease._keep_alive()
                    return lease
            raise failure
        except BaseException as error:
            if self._doubtful or waiting.in_line or not isinstance(error, LockHeld):
                self.abandon(waiting.patience)
            raise

    def _attempt(self, settle: Settle, waiting: Waiting) -> Lease:
        """Propose, then settle. Raise LockHeld or StoreUnavailable, which may be tried again."""
        sent = now()
        answer = self.store.acquire(
            self.resource,
            self.holder,
            ttl=self.ttl,
            floor=self.resource.floor,
            waits=waiting.slice,
            came=waiting.came,
            patience=waiting.patience,
        )
        if isinstance(answer, Refusal):
            waiting.note(answer)
            self._doubtful = self._doubtful or now() - sent > _SLOW
            raise self._held(answer)
        introduce(self.store)
        lease = self.lease = self._lease(answer, sent)
        try:
            settle(lease, waiting)
        except StaleToken:  # of what the caller has seen, not of this lease
            raise
        except (NotRegistered, LeaseLost) as error:
            # A grant that is lost before the body begins is a refusal.
            self._doubtful, self.lease = True, None
            self.store.release(self.resource, self.holder, again=True, patience=waiting.patience)
            raise self._contend(f"could not be registered: {error}", Refusal()) from error
        return lease

    def _lease(self, grant: Grant, sent: float) -> Lease:
        return Lease(
            self.store,
            self.resource,
            self.holder,
            token=grant.token,
            ttl=self.ttl,
            sent=sent,
            seen=self.seen,
            renewal=self.renewal,
            on_lost=self.on_lost,
        )

    def _register(self, lease: Lease, waiting: Waiting) -> None:
        lease._register(waiting.rest_for_the_row, waiting.patience)
        self._announce(lease, waiting)

    def _announce(self, lease: Lease, waiting: Waiting) -> None:
        """Tell that the lease is acquired. Registering may be left to its first atomic()."""
        line = {"token": lease.token, "ttl": self.ttl, "holder": self.holder.id, "by": self.holder}
        lease_acquired.announce(self.resource, line, lease=lease)

    @property
    def _by_its_holder(self) -> bool:
        """Whether the flow that asks is the one that holds the resource."""
        held = (lease for lease in flow.held() if not lease.lost)
        return any(lease.place == self.resource.place for lease in held)

    def _held(self, refusal: Refusal) -> LockHeld:
        held_by = refusal.held_by or "unknown"
        if self._by_its_holder:
            held_by += (
                ", in this very thread or task: what acquire() has returned, and what a view or a "
                "command asks for, is not entered again"
            )
        return self._contend(f"is held by {held_by}", refusal)

    def _contend(self, reason: str, refusal: Refusal) -> LockHeld:
        """Return the error, and tell once that the lock is not to be had at the moment."""
        error = self._refused(reason, refusal)
        if not self._contended:
            self._contended = True
            known: dict[str, Any] = {"held_by": error.held_by, "retry_after": error.retry_after}
            lock_contended.announce(
                self.resource, {**known, "by": self.holder}, holder=self.holder, **known
            )
        return error

    def _refused(self, reason: str, refusal: Refusal) -> LockHeld:
        remaining = _UNKNOWN_REMAINING if refusal.remaining is None else refusal.remaining
        return LockHeld(
            f"{self.resource.name!r} {reason}; try again in {remaining:.3g} s.",
            resource=self.resource.name,
            retry_after=remaining,
            held_by=refusal.held_by,
        )
