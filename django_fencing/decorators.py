"""with_fenced_lock: a whole view, management command, task or function under a lock."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from django_fencing import calls, coroutines, flow
from django_fencing.endings import OnLost
from django_fencing.http import OwnTransactions
from django_fencing.resources import ResourceLike
from django_fencing.timing import Duration, seconds
from django_fencing.work import OnHeld, Work

P = ParamSpec("P")
R = TypeVar("R")


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
    once: str | Callable[..., str] | None = None,
    payload: Callable[..., Any] | None = None,
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

    With `once`, a key that is written like `resource`, the function is the work of once(): a call
    whose key was done before returns the stored result. Of a view that is the response that it
    returned, whatever its status, without cookies; what is compared is the request: method, path,
    query and body; and GET, HEAD and OPTIONS do no work. Of other functions nothing is compared,
    unless `payload` makes something of the call's arguments.

    What is called decides how errors show, unless `respond` is False:

    - A view (its first or second argument is a request) answers 409 or 503, 422 to another
      payload, and 204 if skipped. The transaction of ATOMIC_REQUESTS is opened inside the lock. A
      streaming response keeps the lease until it is closed.
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
    if payload is not None and (once is None or not callable(payload)):
        raise TypeError(f"payload is a callable that goes with once, not {payload!r}.")

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
        in_transaction = not takes_lease if atomic is None else atomic
        if once is not None and not in_transaction:
            raise TypeError(
                f"once= keeps the result in the transaction that does the work, and "
                f"{calls.label_of(function)} is none as a whole: leave out its parameter `lease`, "
                f"or call once() in its lease.atomic()."
            )
        own_transactions = OwnTransactions(function)
        work = Work(
            function=function,
            resource_of=calls.resource_of_call(resource, signature),
            ttl=ttl,
            wait=wait,
            using=using,
            in_transaction=in_transaction,
            takes_lease=takes_lease,
            on_held=on_held,
            respond=respond,
            renew=renew,
            on_lost=on_lost,
            key_of=None if once is None else calls.key_of_call(once, signature),
            payload_of=payload,
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


def _function(work: Work) -> Callable[..., Any]:
    def fenced(*args: Any, **kwargs: Any) -> Any:
        if coroutines.dispatches_async(work.function, args):
            return coroutines.in_thread(functools.partial(work.run, args, kwargs, None))
        return work.run(args, kwargs)

    return fenced


def _coroutine_function(work: Work) -> Callable[..., Any]:
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
