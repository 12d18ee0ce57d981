"""A lease: one time-limited grant, and what its holder may do with it."""

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import transaction

from django_fencing import flow
from django_fencing.conf import conf
from django_fencing.exceptions import (
    FencingError,
    InsideTransaction,
    LeaseLost,
    StaleToken,
    StoreUnavailable,
)
from django_fencing.fences import NotRegistered
from django_fencing.grants import Holder
from django_fencing.models import FencedResource
from django_fencing.names import encoded
from django_fencing.registrar import Registrar
from django_fencing.resources import Resource
from django_fencing.stores.base import Store
from django_fencing.timing import Duration, now, seconds

logger = logging.getLogger("django_fencing")

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
    ) -> None:
        self.holder = holder
        self.ttl = ttl
        self._store = store
        self._resource = resource
        self._flow = flow.current_flow()
        self._ends = sent + ttl
        self._lost = False
        self._released: bool | None = None
        self._releasing = threading.Lock()
        self._registrar = Registrar(store, resource, holder, token)

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
    def remaining(self) -> float:
        """Seconds until the lease ends, by this process's clock; 0 when it has ended."""
        return 0.0 if self._released is not None else max(0.0, self._ends - now())

    @property
    def lost(self) -> bool:
        """
        Whether the lease is known to have ended other than by its own release.

        It does not forbid atomic(): the fence decides.
        """
        return self._lost or (self._released is None and self._ends <= now())

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
            with transaction.atomic(using=alias):
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
            except StaleToken:
                self._lost = True
                raise
            except NotRegistered as error:
                self._released = self._give_back()
                raise self._lose(f"it could not be registered: {error}") from error
            yield row

    def ensure_held(self) -> None:
        """
        Ask the store, in one round trip, whether the lease still holds the resource.

        Raise LeaseLost if not. Before an effect outside the database this narrows the window
        in which an overtaken holder acts; only an idempotency key on the other side closes it.
        """
        self._refuse_released()
        if not self._store.confirm(self._resource, self.holder):
            raise self._lose("it ran out, or another holder has it")

    def extend(self, ttl: Duration | None = None) -> None:
        """
        Let the lease end `ttl` seconds from now (its own ttl if None), sooner or later.

        Raise LeaseLost if it has run out or another holder has it.
        """
        length = self.ttl if ttl is None else seconds("ttl", ttl, most=conf.max_ttl)
        self._refuse_released()
        ends = now() + length
        try:
            extended = self._store.extend(self._resource, self.holder, ttl=length)
        except StoreUnavailable:
            self._ends = min(self._ends, ends)  # it may have been done, and have shortened
            raise
        if not extended:
            raise self._lose("it ran out, or another holder has it")
        self.ttl, self._ends = length, ends

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
        with self._releasing:
            if self._released is None:
                self._released = self._give_back()
        flow.let_go(self, self._flow)
        return self._released

    def _leave(self, error: BaseException | None) -> None:
        """
        Release at the end of a block, with a second attempt if the store does not answer.

        What the block has raised (`error`) or committed stands: a lease that ran out
        meanwhile, or that cannot be given back, is a warning.
        """
        try:
            try:
                freed = self.release()
            except StoreUnavailable:
                freed = self.release()
            told = isinstance(error, LeaseLost) and error.resource == self.resource
            if not freed and not told:
                self._warn("it ended before its block; what the block committed stands")
        except StoreUnavailable as failure:
            self._warn(f"it was not given back and will run out: {failure}")
        except InsideTransaction as failure:
            if error is None:
                raise
            self._warn(f"it was not given back and will run out: {failure}")
        finally:
            flow.let_go(self, self._flow)

    def _register(self, wait: float = 0) -> None:
        """Register and confirm before a body begins. Raise NotRegistered."""
        self._registrar.register(self._patience(wait))
        if not self._store.confirm(self._resource, self.holder):
            raise NotRegistered("its lease ran out meanwhile")

    def _open(self, fenced: ExitStack, wait: float = 0) -> FencedResource:
        """Enter the fenced transaction on `fenced`, return its row. Raise NotRegistered."""
        self._refuse_released()
        return self._registrar.open(fenced, self, self._patience(wait))

    def _patience(self, wait: float) -> float:
        """Return how many seconds registering may wait for the row, if `wait` are left."""
        return min(self.ttl, max(wait, _PATIENCE))

    def _give_back(self) -> bool:
        freed = self._store.release(self._resource, self.holder)
        self._lost = self._lost or not freed
        return freed

    def _refuse_released(self) -> None:
        if self._released is not None:
            raise self._over("it was released")

    def _lose(self, reason: str) -> LeaseLost:
        self._lost = True
        return self._over(reason)

    def _over(self, reason: str) -> LeaseLost:
        return LeaseLost(
            f"The lease of {self.resource!r} with token {self.token} is over: {reason}.",
            resource=self.resource,
            token=self.token,
        )

    def _warn(self, reason: str) -> None:
        logger.warning(
            "lease_lost resource=%s token=%d reason=%r", encoded(self.resource), self.token, reason
        )
