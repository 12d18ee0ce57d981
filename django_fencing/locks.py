"""What to lock: a definition, whose acquisitions propose, register and confirm."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from django.db import connections

from django_fencing import flow
from django_fencing.acquisitions import Acquisition
from django_fencing.conf import conf
from django_fencing.endings import OnLost
from django_fencing.leases import Lease
from django_fencing.reentry import Reentry, entered
from django_fencing.resources import Resource, ResourceLike, resolve
from django_fencing.stores.base import get_store
from django_fencing.timing import Duration, seconds

_TAKE_IT_FIRST = "take the lock first, then open the transaction with lease.atomic()."

_UNDER_ATOMIC_REQUESTS = (
    " Where ATOMIC_REQUESTS has opened it, decorate what the URL leads to: a view function, above "
    "@api_view too, or the `dispatch` of a class instead of its `get`, `post` or action. Or put "
    "@transaction.non_atomic_requests on that."
)


def fenced_lock(
    resource: ResourceLike,
    *,
    ttl: Duration | None = None,
    wait: Duration | None = None,
    using: str | None = None,
    register: bool = True,
    renew: bool | Duration = False,
    on_lost: OnLost = None,
) -> "FencedLock":
    """
    Return a lock on a name, a saved row of a FencedResource model, or (Model, pk).

    Use it in a with-statement, which yields the Lease and releases it at the end, or call
    acquire(). `ttl` and `wait` are seconds or timedeltas; None means the setting. `using` is
    the database of a name's fence, or of the row in (Model, pk).

    Who waits stands in line: first come, first served. A block, or a decorated function, that asks
    for what its thread or task holds by another one gets the same lease at once.

    Entering registers the lease in the database before the body reads anything. With
    `register=False` that is left to the first lease.atomic(): for work that neither reads nor
    calls anything before it.

    With `renew` a thread extends the lease by its ttl again and again until it is released, for so
    many seconds at most, or with True for as long as FENCING["MAX_RENEWAL"] says. `on_lost` is
    called once with the lease when it is found out to be lost: where that happens, or in a thread
    of its own if the renewal finds it out.

    Entering raises LockHeld if the lock was not to be had within `wait`, StoreUnavailable if
    the store could not be asked until then, InsideTransaction in a transaction on the fence's
    database, InvalidResource, TypeError or ValueError for arguments that mean nothing.
    """
    return FencedLock(
        resource=resource,
        ttl=ttl,
        wait=wait,
        using=using,
        register=register,
        renew=renew,
        on_lost=on_lost,
    )


@contextmanager
def fenced_atomic(
    resource: ResourceLike,
    *,
    ttl: Duration | None = None,
    wait: Duration | None = None,
    using: str | None = None,
) -> Iterator[Any]:
    """
    Lock, open one fenced transaction, and yield its fresh, locked row: the `Fence` of a name.

    For work that is one transaction: everything it reads is read under the row lock. The lock
    is released after the commit. The arguments and errors are those of fenced_lock().
    """
    lock = FencedLock(resource=resource, ttl=ttl, wait=wait, using=using, register=False)
    acquisition = lock.enter()
    with acquisition.undone(), acquisition.opened() as lease:
        yield lease.row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FencedLock:
    """A definition of what to acquire, made by fenced_lock(): it may be shared and reused."""

    resource: ResourceLike
    ttl: Duration | None = None
    wait: Duration | None = None
    using: str | None = None
    register: bool = True
    renew: bool | Duration = False
    on_lost: OnLost = None
    function: str = ""  # who asks; found on the stack if empty
    seen: int | None = None  # StaleToken if anybody has registered after this token
    _entered: list[tuple[object, Lease | Reentry]] = field(
        default_factory=list, init=False, repr=False
    )

    def acquire(self) -> Lease:
        """Return a lease, which the caller releases. Raise as fenced_lock() says."""
        return self.ask().acquire()

    def ask(self, cancelled: threading.Event | None = None) -> Acquisition:
        """Return an acquisition of its own. Raise for what can be refused before it is sent."""
        return self._ask(resolve(self.resource, self.using), cancelled)

    def enter(
        self, by: flow.Flow | None = None, cancelled: threading.Event | None = None
    ) -> Acquisition | Reentry:
        """
        Return an acquisition, or the lease once more if the flow `by` holds it in a block.

        That is looked at before whether a transaction is open: it may be the lease's own.
        """
        resource = resolve(self.resource, self.using)
        again = entered(resource, by or flow.current_flow(), register=self.register)
        return again or self._ask(resource, cancelled)

    def _ask(self, resource: Resource, cancelled: threading.Event | None) -> Acquisition:
        ttl = conf.ttl if self.ttl is None else seconds("ttl", self.ttl, most=conf.max_ttl)
        if not (self.on_lost is None or callable(self.on_lost)):
            raise TypeError(f"on_lost must be a callable, not {self.on_lost!r}.")
        wait = conf.wait
        if self.wait is not None:
            wait = seconds("wait", self.wait, most=conf.max_ttl, zero=True)
        flow.refuse_transaction(resource.alias, "lock", resource.name, _cure)
        return Acquisition(
            store=get_store(),
            resource=resource,
            holder=flow.new_holder(self.function),
            ttl=ttl,
            wait=wait,
            register=self.register,
            seen=self.seen,
            renewal=_renewal(self.renew),
            on_lost=self.on_lost,
            cancelled=cancelled,
        )

    def __enter__(self) -> Lease:
        acquisition = self.enter()
        if isinstance(acquisition, Reentry):
            lease = acquisition.enter()
            self._entered.append((flow.current_flow(), acquisition))
            return lease
        try:
            lease = acquisition.acquire()
            lease._entered_by = flow.current_flow()
            self._entered.append((flow.current_flow(), lease))
            return lease
        except BaseException as error:
            for entry in [entry for entry in self._entered if entry[1] is acquisition.lease]:
                self._entered.remove(entry)  # others may add theirs meanwhile
            acquisition.undo(error)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        left = self._leaving()
        if isinstance(left, Reentry):
            left.leave()
        else:
            left._leave(error)

    def _leaving(self) -> Lease | Reentry:
        """Take what the block that is left has entered: the newest of this flow, or the only."""
        entered = list(self._entered)
        here = [entry for entry in entered if entry[0] is flow.current_flow()]
        if not here and len(entered) > 1:
            raise RuntimeError("A shared lock is left by a flow that has not entered it.")
        entry = (here or entered)[-1]
        self._entered.remove(entry)
        return entry[1]


def _renewal(renew: bool | Duration) -> float:
    """Return for how many seconds a lease is renewed, 0 if it is not."""
    if isinstance(renew, bool):
        return conf.max_renewal if renew else 0.0
    return seconds("renew", renew, most=conf.max_renewal)


def _cure(alias: str) -> str:
    """Say what to do where a transaction is open before the lock."""
    if lease := flow.fenced_by(alias):
        return (
            f"it is fenced by the lease on {lease.resource!r}, and one transaction is fenced by "
            f"one lease. Lock one name that stands for both, or end that transaction first."
        )
    if connections[alias].settings_dict["ATOMIC_REQUESTS"]:
        return _TAKE_IT_FIRST + _UNDER_ATOMIC_REQUESTS
    return _TAKE_IT_FIRST
