"""Acquire a resource: propose in the store, register in the database, confirm in the store."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_fencing import flow
from django_fencing.conf import conf
from django_fencing.exceptions import LeaseLost, LockHeld, StoreUnavailable
from django_fencing.fences import NotRegistered
from django_fencing.grants import Holder, Refusal
from django_fencing.leases import Lease
from django_fencing.resources import Resource, ResourceLike, resolve
from django_fencing.stores.base import Store, get_store
from django_fencing.timing import Duration, now, seconds

# The pause between two attempts grows from the first to the second, with jitter.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.25

# redis-py hides its retries. A call that took this long may have been sent twice, and the first
# may still be on its way.
_SLOW = 0.5

# What retry_after says where the store cannot tell.
_UNKNOWN_REMAINING = 1.0

# How a granted lease gets into the database, in which it may wait for as long as is left.
Settle = Callable[[Lease, float], object]


def fenced_lock(
    resource: ResourceLike,
    *,
    ttl: Duration | None = None,
    wait: Duration | None = None,
    using: str | None = None,
    register: bool = True,
) -> "FencedLock":
    """
    Return a lock on a name, a saved row of a FencedResource model, or (Model, pk).

    Use it in a with-statement, which yields the Lease and releases it at the end, or call
    acquire(). `ttl` and `wait` are seconds or timedeltas; None means the setting. `using` is
    the database of a name's fence, or of the row in (Model, pk).

    Entering registers the lease in the database before the body reads anything. With
    `register=False` that is left to the first lease.atomic(): for work that neither reads nor
    calls anything before it.

    Entering raises LockHeld if the lock was not to be had within `wait`, StoreUnavailable if
    the store could not be asked, InsideTransaction in a transaction on the fence's database,
    InvalidResource, TypeError or ValueError for arguments that mean nothing.
    """
    return FencedLock(resource=resource, ttl=ttl, wait=wait, using=using, register=register)


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
    with lock.opened() as lease:
        yield lease.row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FencedLock:
    """A definition of what to acquire, made by fenced_lock(): it may be shared and reused."""

    resource: ResourceLike
    ttl: Duration | None = None
    wait: Duration | None = None
    using: str | None = None
    register: bool = True
    function: str = ""  # who asks; found on the stack if empty
    _entered: list[tuple[object, Lease]] = field(default_factory=list, init=False, repr=False)

    def acquire(self) -> Lease:
        """Return a lease, which the caller releases. Raise as fenced_lock() says."""
        lease = _acquire(self, Lease._register if self.register else _unregistered)
        flow.hold(lease)
        return lease

    def __enter__(self) -> Lease:
        lease = self.acquire()
        self._entered.append((flow.current_flow(), lease))
        return lease

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leaving()._leave(error)

    @contextmanager
    def opened(self) -> Iterator[Lease]:
        """Hold a lease with its fenced transaction open, which has registered it."""
        with ExitStack() as fenced:
            lease = _acquire(self, lambda lease, rest: lease._open(fenced, rest))
            flow.hold(lease)
            try:
                with fenced.pop_all():
                    yield lease
            except BaseException as error:
                lease._leave(error)
                raise
            lease._leave(None)

    def _leaving(self) -> Lease:
        """Take the lease of the block that is left: the newest of this flow, or the only one."""
        here = [entry for entry in self._entered if entry[0] is flow.current_flow()]
        if not here and len(self._entered) > 1:
            raise RuntimeError("A shared lock is left by a flow that has not entered it.")
        entry = (here or self._entered)[-1]
        self._entered.remove(entry)
        return entry[1]


def _acquire(lock: FencedLock, settle: Settle) -> Lease:
    """Ask the store until it grants and `settle` registers, for as long as the lock waits."""
    ttl = conf.ttl if lock.ttl is None else seconds("ttl", lock.ttl, most=conf.max_ttl)
    wait = conf.wait
    if lock.wait is not None:
        wait = seconds("wait", lock.wait, most=conf.max_ttl, zero=True)
    resource = resolve(lock.resource, lock.using)
    flow.refuse_transaction(
        resource.alias,
        "lock",
        resource.name,
        "take the lock first, then open the transaction with lease.atomic(). Under "
        "ATOMIC_REQUESTS, put @transaction.non_atomic_requests on the view.",
    )
    asked = _Asked(get_store(), resource, flow.new_holder(lock.function), ttl)
    if asked.by_its_holder:
        wait = 0  # this flow would wait for itself

    failure: LockHeld | StoreUnavailable
    try:
        for rest in _attempts(wait):
            try:
                return asked.attempt(settle, rest)
            except (LockHeld, StoreUnavailable) as error:
                failure = error
        raise failure
    except BaseException as error:
        if asked.doubtful or not isinstance(error, LockHeld):
            asked.abandon()
        raise


@dataclass(slots=True)
class _Asked:
    """One acquisition: all its attempts ask for the same holder."""

    store: Store
    resource: Resource
    holder: Holder
    ttl: float
    doubtful: bool = False  # whether an attempt's outcome is unknown

    @property
    def by_its_holder(self) -> bool:
        """Whether the flow that asks is the one that holds the resource."""
        held = (lease for lease in flow.held() if not lease.lost)
        return any(lease.place == self.resource.place for lease in held)

    def attempt(self, settle: Settle, rest: float) -> Lease:
        """Propose, then settle. Raise LockHeld or StoreUnavailable, which may be tried again."""
        try:
            return self._attempt(settle, rest)
        except StoreUnavailable:
            self.doubtful = True
            raise

    def abandon(self) -> None:
        """End what the store may have granted, or may yet grant, as far as it answers."""
        with suppress(StoreUnavailable, ImproperlyConfigured):
            self.store.release(self.resource, self.holder)

    def _attempt(self, settle: Settle, rest: float) -> Lease:
        sent = now()
        answer = self.store.acquire(
            self.resource, self.holder, ttl=self.ttl, floor=self.resource.floor
        )
        if isinstance(answer, Refusal):
            self.doubtful = self.doubtful or now() - sent > _SLOW
            raise self._held(answer)
        lease = Lease(
            self.store,
            self.resource,
            self.holder,
            token=answer.token,
            ttl=self.ttl,
            sent=sent,
        )
        try:
            settle(lease, rest)
        except (NotRegistered, LeaseLost) as error:
            # A grant that is lost before the body begins is a refusal.
            self.doubtful = True
            self.store.release(self.resource, self.holder, again=True)
            raise self._refused(f"could not be registered: {error}", Refusal()) from error
        return lease

    def _held(self, refusal: Refusal) -> LockHeld:
        held_by = refusal.held_by or "unknown"
        if self.by_its_holder:
            held_by += ", in this very thread or task: a lock is not re-entrant"
        return self._refused(f"is held by {held_by}", refusal)

    def _refused(self, reason: str, refusal: Refusal) -> LockHeld:
        remaining = _UNKNOWN_REMAINING if refusal.remaining is None else refusal.remaining
        return LockHeld(
            f"{self.resource.name!r} {reason}; try again in {remaining:.3g} s.",
            resource=self.resource.name,
            retry_after=remaining,
            held_by=refusal.held_by,
        )


def _unregistered(lease: Lease, rest: float) -> None:
    """Leave registering to the lease's first atomic()."""


def _attempts(wait: float) -> Iterator[float]:
    """Yield the seconds that are left at each attempt: the last one comes at the deadline."""
    deadline = now() + wait
    pause = _SHORTEST_PAUSE
    while True:
        yield max(0.0, deadline - now())
        if (rest := deadline - now()) <= 0:
            return
        time.sleep(min(rest, random.uniform(pause / 2, pause)))  # noqa: S311 - jitter
        pause = min(2 * pause, _LONGEST_PAUSE)
