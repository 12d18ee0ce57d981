"""A lease: one time-limited grant, and what its holder may do with it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import transaction

from django_fencing import flow, ledger
from django_fencing.conf import conf
from django_fencing.endings import Ending, OnLost
from django_fencing.exceptions import (
    FencingError,
    LeaseLost,
    StaleToken,
    StoreUnavailable,
)
from django_fencing.fences import NotRegistered
from django_fencing.grants import Holder
from django_fencing.models import FencedResource
from django_fencing.registrar import Registrar
from django_fencing.renewal import Renewal
from django_fencing.renewer import renewer
from django_fencing.resources import Resource
from django_fencing.signals import lease_extended, token_refused
from django_fencing.stores.base import Store
from django_fencing.timing import Duration, now, seconds

# How long registering may wait for the row where the caller does not wait for longer anyway.
_PATIENCE = 1.0


def current_lease() -> "Lease":
    """Return the newest lease that this flow holds. Raise LookupError if it holds none."""
    if leases := flow.held():
        return leases[-1]
    raise LookupError("This flow holds no lease.")


class Lease:
    """
    One grant of a resource, made by fenced_lock(). Any thread may use it.

    `holder` says who acquired it; `holder.id` is the uuid that the store and the fence
    compare. `ttl` is the length of the lease in seconds.
    """

    def __init__(
        self,
        store: Store,
        resource: Resource,
        holder: Holder,
        *,
        token: int,
        ttl: float,
        sent: float,
        seen: int | None = None,
        renewal: float = 0,
        on_lost: OnLost = None,
    ) -> None:
        self.holder = holder
        self.ttl = ttl
        self._store = store
        self._resource = resource
        self._since = sent
        self._ends = sent + ttl
        self._entered_by: flow.Flow | None = None  # who may enter it again
        self._ending = Ending(store, resource, holder, on_lost)
        until = sent + renewal if renewal else 0.0
        self._renewal = Renewal(store, resource, holder, self._ending, until)
        self._registrar = Registrar(store, resource, holder, token, seen)

    def __repr__(self) -> str:
        return f"<Lease {self.resource!r} token={self.token} remaining={self.remaining:.3f}>"

    @property
    def resource(self) -> str:
        """The resource's name."""
        return self._resource.name

    @property
    def token(self) -> int:
        """The fencing token; final once the lease is registered."""
        return self._registrar.token

    @property
    def place(self) -> tuple[str, type[FencedResource], Any]:
        """Where the fence is: database alias, model, primary key."""
        return self._resource.place

    @property
    def _age(self) -> float:
        """Seconds since it was asked for."""
        return now() - self._since

    @property
    def remaining(self) -> float:
        """Seconds until the lease ends, by this process's clock; 0 when it has ended."""
        over = self._ending.released is not None or self._ending.is_foreign
        return 0.0 if over else max(0.0, self._ends - now())

    @property
    def lost(self) -> bool:
        """
        Whether the lease is known to have ended other than by its own release.

        It does not forbid atomic(): the fence decides. A child process has lost what its parent
        holds.
        """
        if self._ending.lost or self._ending.is_foreign:
            return True
        return self._ending.released is None and self._ends <= now()

    @property
    def row(self) -> Any:
        """
        The row as the newest registration or fenced transaction of this lease found it.

        Of a named resource it is the `Fence`. Raise FencingError before the first of them.
        """
        if self._registrar.row is None:
            raise FencingError(
                f"{self.resource!r} has no row before the first lease.atomic(): "
                f"it was locked with register=False.",
                resource=self.resource,
            )
        return self._registrar.row

    @contextmanager
    def atomic(self) -> Iterator[Any]:
        """
        Open the fenced transaction: a durable transaction.atomic() that yields the locked row.

        Its first statement locks the row and proves that the fence still is this lease's
        registration. Raise StaleToken if it is not, InsideTransaction if another transaction
        is open on that database, LeaseLost if the lease was released or could not be
        registered. The same lease may nest in it, as a savepoint.
        """
        alias = self._resource.alias
        if flow.fenced_by(alias) is self:
            with _unchanged_by_failure(self._registrar.row), transaction.atomic(using=alias):
                yield self._registrar.row
            return
        flow.refuse_transaction(
            alias,
            "open a fenced transaction of",
            self.resource,
            "end that one first. One transaction is fenced by one lease.",
        )
        with ExitStack() as fenced:
            try:
                row = self._open(fenced)
            except StaleToken as error:
                self._refused(error)
                raise
            except NotRegistered as error:
                self._ending.released = self._store.release(self._resource, self.holder)
                raise self._lose(f"it could not be registered: {error}") from error
            yield row

    def ensure_held(self) -> None:
        """
        Ask the store, in one round trip, whether the lease still holds the resource.

        Raise LeaseLost if not. Before an effect outside the database this narrows the window
        in which an overtaken holder acts; only an idempotency key on the other side closes it.
        """
        self._refuse_ended()
        with self._ending.asking:
            held = self._store.confirm(self._resource, self.holder)
        if not held:
            self._refuse_ended()  # by another thread, meanwhile
            raise self._lose("it ran out, another holder has it, or the store has lost it")

    def extend(self, ttl: Duration | None = None) -> None:
        """
        Let the lease end `ttl` seconds from now (its own ttl if None), sooner or later.

        Raise LeaseLost if it has run out or another holder has it.
        """
        length = self.ttl if ttl is None else seconds("ttl", ttl, most=conf.max_ttl)
        self._refuse_ended()
        with self._ending.asking:
            sent = now()
            try:
                extended = self._store.extend(self._resource, self.holder, ttl=length)
            except StoreUnavailable:
                self._ends = min(self._ends, sent + length)  # it may have been done, and shorten
                raise
            if extended:
                self._last(length, sent)
        if extended and self._renewal.is_on:
            renewer.look()  # it may be due earlier now
        if not extended:
            self._refuse_ended()
            raise self._lose("it ran out, another holder has it, or the store has lost it")
        lease_extended.announce(self._resource, {"token": self.token, "ttl": length}, lease=self)

    def release(self) -> bool:
        """
        Give the lease back, and say whether it was still held until then.

        Safe to repeat: the answer stays the same, and no other holder's lease is touched.
        Raise InsideTransaction in a transaction on the fence's database, so that the release
        always follows the commit. After StoreUnavailable, call it again.
        """
        flow.refuse_transaction(
            self._resource.alias, "release", self.resource, "do so after it has ended."
        )
        return self._ending.give_back(self)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Let this flow, and no other, enter the lease again during the block."""
        before, self._entered_by = self._entered_by, flow.current_flow()
        try:
            yield
        finally:
            self._entered_by = before

    def _is_entered_by(self, who: flow.Flow) -> bool:
        ended = self.lost or self._ending.released is not None or self._ending.kept
        return self._entered_by is who and not ended

    def _leave(self, error: BaseException | None) -> None:
        """Release at the end of a block that has raised `error`."""
        self._entered_by = None
        self._ending.leave(self, error)

    def _keep(self) -> Callable[[], None]:
        """Outlive the block that ends without an error, and return what ends the lease instead."""
        self._ending.kept = True
        self._entered_by = None
        return lambda: self._ending.end_kept(self)

    def _keep_alive(self) -> None:
        """Renew the lease from now on, if it was asked for."""
        if self._renewal.is_on:
            renewer.add(self, max(0.0, self.ttl / 3 - self._age))

    @property
    def _renewed_within(self) -> float:
        """Seconds after which it is due at the latest, whatever was planned."""
        return self.ttl / 3

    @property
    def _is_renewed(self) -> bool:
        """Whether it is renewed, or watched until it ends."""
        return self._renewal.is_on

    def _renew(self) -> float | None:
        """Renew it in that thread; return in how many seconds to do so again, None if never."""
        return self._renewal.renew(self)

    def _end_renewal(self) -> None:
        self._renewal.end()

    def _last(self, ttl: float, since: float) -> None:
        """Note that the store has let the lease end so many seconds after `since`."""
        self.ttl, self._ends = ttl, since + ttl

    @property
    def _is_left_behind(self) -> bool:
        """Whether nobody has given it back, or tried to."""
        return self._ending.is_open

    def _register(self, wait: float = 0, patience: float | None = None) -> None:
        """Register and confirm before a body begins. Raise NotRegistered."""
        self._registrar.register(self._patience(wait))
        if not self._store.confirm(self._resource, self.holder, patience=patience):
            raise NotRegistered("its lease ran out meanwhile")

    @property
    def _is_registered(self) -> bool:
        """Whether it has registered in a transaction that has ended."""
        return self._registrar.is_registered

    def _register_anew(self) -> None:
        """Register a lease whose block has begun, unless that is done. Raise LeaseLost."""
        alias = self._resource.alias
        if self._is_registered or flow.fenced_by(alias) is self:
            return
        flow.refuse_transaction(alias, "register", self.resource, "lock before it is opened.")
        try:
            self._register()
        except NotRegistered as error:
            raise self._lose(f"it could not be registered: {error}") from error

    def _open(self, fenced: ExitStack, wait: float = 0) -> FencedResource:
        """Enter the fenced transaction on `fenced`, return its row. Raise NotRegistered."""
        self._refuse_ended()
        return self._registrar.open(fenced, self, self._patience(wait))

    def _patience(self, wait: float) -> float:
        """Return how many seconds registering may wait for the row, if `wait` are left."""
        return min(self.ttl, max(wait, _PATIENCE))

    def _refuse_ended(self) -> None:
        if self._ending.is_foreign:
            raise self._over(f"it belongs to process {self.holder.pid}, which has forked this one")
        if self._ending.released is not None:
            raise self._over("it was released")

    def _refused(self, error: StaleToken) -> None:
        """Note that the database has refused a fenced transaction."""
        self._ending.refuse(self)
        line = {"token": self.token, "fence_token": error.fence_token}
        if error.token != self.token:  # it was compared with what the caller has seen
            line = {"token": self.token, "seen": error.token, "fence_token": error.fence_token}
        token_refused.announce(self._resource, line, lease=self, error=error)
        ledger.refused(self._store, self._resource, self.holder, error)

    def _lose(self, reason: str) -> LeaseLost:
        """Note the loss, and return the error that says so."""
        self._ending.lose(self, reason, logging.INFO)
        return self._over(reason)

    def _over(self, reason: str) -> LeaseLost:
        return LeaseLost(
            f"The lease of {self.resource!r} with token {self.token} is over: {reason}.",
            resource=self.resource,
            token=self.token,
        )


@contextmanager
def _unchanged_by_failure(row: FencedResource | None) -> Iterator[None]:
    """Put the attributes of `row` back as they were, where what has changed them is rolled back."""
    before = dict(vars(row)) if row is not None else {}
    try:
        yield
    except BaseException:
        if row is not None:
            vars(row).clear()
            vars(row).update(before)
        raise
