"""with_fenced_lock: a whole view, management command, task or function under a lock."""

import functools
import inspect
import math
import threading
from collections.abc import Callable
from contextlib import ExitStack, _GeneratorContextManagerBase
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Literal, ParamSpec, TypeVar, cast

from django.core.management.base import BaseCommand

from django_fencing import calls, coroutines, flow
from django_fencing.calls import Call, Entry
from django_fencing.commands import CommandCall
from django_fencing.endings import OnLost
from django_fencing.exceptions import LockHeld, NoSuchRow
from django_fencing.http import OwnTransactions, ViewCall, request_of
from django_fencing.leases import Lease
from django_fencing.locks import FencedLock
from django_fencing.resources import ResourceLike
from django_fencing.timing import Duration, seconds

P = ParamSpec("P")
R = TypeVar("R")

# What a wrapped generator function returns: its body has not begun.
_RUNS_LATER = (GeneratorType, AsyncGeneratorType, _GeneratorContextManagerBase)

OnHeld = Literal["raise", "skip"] | Callable[[LockHeld], Any]


def with_fenced_lock(
    resource: ResourceLike | Callable[..., ResourceLike],
    *,
    ttl: Duration | None = None,
    wait: Duration | None = None,
    using: str | None = None,
    atomic: bool | None = None,
    on_held: OnHeld = "raise",
    respond: bool = True,
    renew: bool | Duration = False,
    on_lost: OnLost = None,
) -> Callable[[Callable[P, R]], Callable[..., R]]:
    """
    Run the function under the fenced lock of `resource`.

    A text may name parameters, as in "monthly-charges:{organization_id}": each is a text, a
    whole number, a date, a UUID or a saved row, and is percent-encoded, so that joined values
    never collide. A callable is given the call's arguments and returns a name, a row or
    (Model, pk).

    The function runs as one fenced transaction, unless it has a keyword-only parameter
    `lease`: then it is given the lease, and opens its own lease.atomic(). `atomic` overrides
    that choice.

    Where the lock is held, `on_held` says what the call does: "raise" LockHeld, "skip" the
    body, or return what a callable makes of the LockHeld. The other arguments and all other
    errors are those of fenced_lock().

    What is called decides how errors show, unless `respond` is False:

    - A view (its first or second argument is a request) answers 409 or 503, and 204 if skipped.
      The transaction of ATOMIC_REQUESTS is opened inside the lock. A streaming response keeps
      the lease until it is closed.
    - A management command raises CommandError with a return code of its own, says in a line
      that it skips, and stops in order at SIGTERM and Ctrl-C.
    - Any other function raises the error, and returns None if skipped.

    A coroutine function stays one. It holds the lease until it ends, and one thread as well.
    Raise TypeError at decoration for what cannot be run under a lock: generators, classes.
    """
    if on_held not in ("raise", "skip") and not callable(on_held):
        raise TypeError(f'on_held must be "raise", "skip" or a callable, not {on_held!r}.')
    if coroutines.is_deferred(on_held):
        raise TypeError(f"on_held must be a plain function, not {on_held!r}: it is not awaited.")

    if isinstance(resource, type):
        raise TypeError(f"A resource is not a class: pass a row or ({resource.__name__}, pk).")
    for name, length in (("ttl", ttl), ("wait", wait)):
        if length is not None:  # how long it may be is known at the call
            seconds(name, length, most=math.inf, zero=name == "wait")
    if not isinstance(renew, bool):
        seconds("renew", renew, most=math.inf)

    def decorate(*functions: Callable[P, R], **options: Any) -> Callable[..., R]:
        if len(functions) != 1 or options:
            label = calls.label_of(resource) if callable(resource) else "the function"
            raise TypeError(
                f"with_fenced_lock was used without its resource: write "
                f'@with_fenced_lock("name") above {label}.'
            )
        (function,) = functions
        _refuse_undecoratable(function)
        signature = calls.signature_of(function)
        takes_lease = calls.takes_lease(signature)
        own_transactions = OwnTransactions(function)
        work = _Work(
            function=function,
            resource_of=calls.resource_of_call(resource, signature),
            ttl=ttl,
            wait=wait,
            using=using,
            in_transaction=not takes_lease if atomic is None else atomic,
            takes_lease=takes_lease,
            on_held=on_held,
            respond=respond,
            renew=renew,
            on_lost=on_lost,
            label=calls.label_of(function),
            own_transactions=own_transactions,
        )
        deferred = coroutines.is_deferred(function)
        fenced: Any = _coroutine_function(work) if deferred else _function(work)
        functools.update_wrapper(fenced, function)
        if takes_lease:
            fenced.__signature__ = calls.without_lease(signature)
        fenced._non_atomic_requests = own_transactions
        return cast("Callable[..., R]", fenced)

    return decorate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A function with its lock."""

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
            return call.run(lambda: self._body(lease, args, kwargs, cancelled), lease)

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


def _function(work: _Work) -> Callable[..., Any]:
    def fenced(*args: Any, **kwargs: Any) -> Any:
        if coroutines.dispatches_async(work.function, args):
            return coroutines.in_thread(functools.partial(work.run, args, kwargs, None))
        return work.run(args, kwargs)

    return fenced


def _coroutine_function(work: _Work) -> Callable[..., Any]:
    async def fenced(*args: Any, **kwargs: Any) -> Any:
        by = flow.current_flow()
        return await coroutines.in_thread(functools.partial(work.run, args, kwargs, by))

    return fenced


def _refuse_undecoratable(function: Any) -> None:
    """Refuse what is no function, or returns before its body has run."""
    called = getattr(function, "__call__", None)  # noqa: B004 - of a callable object
    if isinstance(function, type):
        fault = "is a class: decorate a method of it"
    elif isinstance(function, staticmethod | classmethod):
        fault = f"hides its function: put @with_fenced_lock below @{type(function).__name__}"
    elif not callable(function):
        fault = 'is no function: was the decorator used without its resource, as in ("name")?'
    elif any(map(_is_generator, (function, called))):
        fault = "is a generator: its body would run after the lock is released"
    else:
        return
    raise TypeError(f"{function!r} {fault}.")


def _is_generator(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
