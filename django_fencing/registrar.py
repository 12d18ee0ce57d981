"""Brings one lease into the database: registers it, and opens its fenced transactions."""

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from django.db import connections, transaction

from django_fencing import fences, flow, ledger, postgresql
from django_fencing.fences import NotRegistered, Registration
from django_fencing.grants import Holder, Refusal
from django_fencing.models import FencedResource
from django_fencing.resources import Resource
from django_fencing.signals import key_values, logger
from django_fencing.stores.base import Store

if TYPE_CHECKING:
    from django_fencing.leases import Lease

# A lost counter needs one more token; somebody who registers in between, another one.
_TRIES = 3


class Registrar:
    """
    The database's side of one lease: its token, whether it is registered, the row it found.

    The token is final once it is registered: until then a fence that is not below it makes
    the store issue a higher one. With `seen` it registers only if nobody has done so after
    that token, and raises StaleToken otherwise.
    """

    def __init__(
        self,
        store: Store,
        resource: Resource,
        holder: Holder,
        token: int,
        seen: int | None = None,
    ) -> None:
        self.token = self._granted = token
        self._seen = seen
        self.row: FencedResource | None = None
        self._store = store
        self._resource = resource
        self._holder = holder
        self._registered = False
        self._attempted = False  # a transaction has registered, and may have been rolled back
        self._aborted = False
        self._registering = threading.Lock()

    def register(self, patience: float) -> None:
        """
        Register in a short transaction of its own, waiting at most `patience` s for the row.

        Raise NotRegistered if the row stayed locked or another holder took over.
        """
        for _ in range(_TRIES):
            row = fences.register(
                self._resource, self._mine, granted=self._highest, patience=patience
            )
            if row is not None:
                self.row, self._registered = row, True
                return
            self._take_higher_token()
        raise NotRegistered("others registered first, again and again")

    def open(self, fenced: ExitStack, lease: "Lease", patience: float) -> FencedResource:
        """
        Enter the fenced transaction of `lease` on `fenced`, and return the locked row.

        An unregistered lease registers by the first statement of the transaction, or before
        it where the transaction would read from a snapshot. Raise as register(), or StaleToken.
        """
        if not self._registered:
            fenced.enter_context(self._registering)  # one first registration at a time
        if not self._registered and self._attempted:
            self.token += 1  # rows of a transaction that did not commit bear the former one
        if not self._registered and fences.registers_alone(self._resource.alias):
            self.register(patience)
        for _ in range(_TRIES):
            try:
                row = self._begin(fenced, lease, patience)
            except fences.OldSnapshot:
                self.register(patience)
                continue
            if row is not None:
                self.row = row
                return row
            if self._attempted:
                # A higher token would bring what the earlier attempt has read over what the
                # holder that registered since then has written.
                raise fences.stale(self._resource, self._mine)
            self._take_higher_token()
        raise NotRegistered("others registered first, again and again")

    @property
    def is_registered(self) -> bool:
        """Whether a transaction that has registered the token is committed."""
        return self._registered

    @property
    def _mine(self) -> Registration:
        return Registration(self.token, self._holder.id)

    @property
    def _highest(self) -> int:
        """The token that the fence has to be below."""
        return self._granted if self._seen is None else min(self._granted, self._seen + 1)

    def _begin(self, fenced: ExitStack, lease: "Lease", patience: float) -> FencedResource | None:
        """Open the transaction; leave it again if the row is not to be had."""
        alias = self._resource.alias
        with ExitStack() as attempt:
            attempt.enter_context(transaction.atomic(using=alias, durable=True))
            row = self._locked_row(patience)
            if row is not None:
                # Both before the commit: on_commit hooks run outside the fenced transaction.
                attempt.push(self._note_end)
                attempt.enter_context(flow.fenced(alias, lease))
                fenced.enter_context(attempt.pop_all())
        return row

    def _locked_row(self, patience: float) -> FencedResource | None:
        if self._registered:
            return fences.check(self._resource, self._mine)
        row = fences.register_inside(
            self._resource, self._mine, granted=self._highest, patience=patience
        )
        if row is not None:
            self._attempted, self._aborted = True, False
            transaction.on_commit(self._mark_registered, using=self._resource.alias)
        return row

    def _note_end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell a commit from what looks like one, and in a TestCase, which never commits."""
        connection = connections[self._resource.alias]
        # A query that failed and was swallowed makes COMMIT a rollback, without an error.
        self._aborted = postgresql.is_aborted(self._resource.alias)
        if len(connection.atomic_blocks) > 1 and not (kind or connection.needs_rollback):
            self._mark_registered()
            postgresql.present_nothing(self._resource.alias)

    def _mark_registered(self) -> None:
        self._registered = not self._aborted

    def _take_higher_token(self) -> None:
        """The fence is not below: the counter was lost, or another holder took over."""
        above, was_lost = fences.reached(self._resource)
        if self._seen is not None and above > self._seen:
            raise fences.stale(self._resource, Registration(self._seen, None))
        answer = self._store.reissue(self._resource, self._holder, above=above)
        if isinstance(answer, Refusal):
            raise NotRegistered("its lease ran out, or another holder took over")
        proposed, self.token, self._granted = self._granted, answer.token, answer.token
        if was_lost:
            line = {"resource": self._resource.name, "fence_token": above, "token": answer.token}
            logger.warning("%s", key_values("counter_healed", line))
            ledger.healed(self._resource, self._holder, proposed, above, answer.token)
