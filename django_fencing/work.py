"""A decorated function, and one call of it: under its lock, as what it is called as."""

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack, _GeneratorContextManagerBase
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Literal

from django.core.management.base import BaseCommand

from django_fencing import coroutines, flow
from django_fencing.calls import Call, Entry
from django_fencing.commands import CommandCall
from django_fencing.endings import OnLost
from django_fencing.exceptions import LockHeld, NoSuchRow
from django_fencing.http import OwnTransactions, ViewCall, request_of
from django_fencing.leases import Lease
from django_fencing.locks import FencedLock
from django_fencing.names import checked
from django_fencing.once import once_under
from django_fencing.resources import ResourceLike
from django_fencing.timing import Duration

# What a wrapped generator function returns: its body has not begun.
_RUNS_LATER = (GeneratorType, AsyncGeneratorType, _GeneratorContextManagerBase)

OnHeld = Literal["raise", "skip"] | Callable[[LockHeld], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A function with its lock, and with the key under which it is done once."""

    function: Callable[..., Any]
    resource_of: Callable[..., ResourceLike]
    ttl: Duration | None
    wait: Duration | None
    using: str | None
    in_transaction: bool
    takes_lease: bool
    on_held: OnHeld
    respond: bool
    renew: bool | Duration
    on_lost: OnLost
    key_of: Callable[..., str] | None
    payload_of: Callable[..., Any] | None
    label: str
    own_transactions: OwnTransactions

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        by: flow.Flow | None = None,
        cancelled: threading.Event | None = None,
    ) -> Any:
        """Run one call `by` a flow; of a function that returns an awaitable if `cancelled`."""
        call = self._call(args)
        return call.answered(functools.partial(self._locked, call, args, kwargs, by, cancelled))

    def _call(self, args: tuple[Any, ...]) -> Call:
        """Return the kind of the call, which its first arguments tell."""
        if args and isinstance(args[0], BaseCommand):
            return CommandCall(args[0]) if self.respond else Entry()
        if request := next(filter(None, map(request_of, args[:2])), None):
            return ViewCall(request, self.own_transactions, responds=self.respond)
        return Call()

    def _locked(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        by: flow.Flow | None,
        cancelled: threading.Event | None,
    ) -> Any:
        done_once = self._once(call, args, kwargs)
        lock = FencedLock(
            resource=self.resource_of(*args, **kwargs),
            ttl=self.ttl,
            wait=self.wait,
            using=self.using,
            register=not self.in_transaction,
            renew=self.renew,
            on_lost=self.on_lost,
            function=self.label,
        )
        try:
            acquisition = lock.enter(by, cancelled) if call.reenters else lock.ask(cancelled)
        except NoSuchRow as error:
            raise call.missing(error) from error
        holding = acquisition.opened() if self.in_transaction else acquisition.leased()
        with acquisition.undone(), ExitStack() as held:
            try:
                lease = held.enter_context(holding)
            except LockHeld as error:
                return self._refused(call, error)
            except NoSuchRow as error:
                raise call.missing(error) from error
            return call.run(
                lambda: done_once(lease, lambda: self._body(lease, args, kwargs, cancelled)), lease
            )

    def _once(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[Lease, Callable[[], Any]], Any]:
        """Return what runs the body of this call, at most once if the work has a key."""
        if self.key_of is None or not call.is_work:
            return lambda lease, body: body()
        key = checked(self.key_of(*args, **kwargs), f"The key of {self.label}")
        payload = self.payload_of(*args, **kwargs) if self.payload_of else call.payload()

        def done_once(lease: Lease, body: Callable[[], Any]) -> Any:
            fresh: list[Any] = []

            def work() -> Any:
                fresh.append(body())
                return call.kept(fresh[0])

            kept = once_under(lease, key, work, payload)
            return call.fresh(fresh[0], kept) if fresh else call.replayed(kept, key)

        return done_once

    def _refused(self, call: Call, error: LockHeld) -> Any:
        if self.on_held == "raise":
            raise error
        return call.skipped(error) if self.on_held == "skip" else self.on_held(error)

    def _body(
        self,
        lease: Lease,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cancelled: threading.Event | None,
    ) -> Any:
        if self.takes_lease:
            kwargs = {**kwargs, "lease": lease}
        if cancelled is not None:
            return coroutines.as_function(self.function, lease, cancelled)(*args, **kwargs)
        result = self.function(*args, **kwargs)
        if inspect.isawaitable(result) or isinstance(result, _RUNS_LATER):
            if isinstance(result, CoroutineType | GeneratorType):
                result.close()
            kind = "coroutine" if inspect.isawaitable(result) else "generator"
            raise TypeError(
                f"{self.label} is no {kind} function, but has returned {result!r}, which would "
                f"run after the lock is released."
            )
        return result
