"""Run a coroutine function under a lock that a thread holds."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asgiref.sync import ThreadSensitiveContext, async_to_sync, iscoroutinefunction, sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.views import View

from django_fencing import flow
from django_fencing.leases import Lease


def is_deferred(function: Any) -> bool:
    """Say whether calling `function` only makes a coroutine."""
    called = getattr(function, "__call__", None)  # noqa: B004 - of a callable object
    return iscoroutinefunction(function) or iscoroutinefunction(called)


def dispatches_async(function: Any, args: tuple[Any, ...]) -> bool:
    """Say whether this is the `dispatch` of a class-based view whose handlers are coroutines."""
    if getattr(function, "__name__", "") != "dispatch":
        return False
    owner = getattr(getattr(function, "func", None), "__self__", args[0] if args else None)
    return isinstance(owner, View) and owner.view_is_async


def as_function(
    function: Callable[..., Any], lease: Lease, cancelled: threading.Event
) -> Callable[..., Any]:
    """
    Return `function` as one that a thread calls, and that returns when its coroutine ends.

    The coroutine runs on the event loop, in a task of its own that holds the lease; what it
    passes to sync_to_async() runs in the calling thread, inside of that one's transaction.
    """

    async def hold(*args: Any, **kwargs: Any) -> Any:
        if cancelled.is_set():  # before this task was there to be cancelled
            raise asyncio.CancelledError
        task = flow.current_flow()
        flow.hold(lease)
        try:
            with lease._entered():
                return await function(*args, **kwargs)
        finally:
            flow.let_go(lease, task)

    return async_to_sync(hold)


async def in_thread(call: Callable[[threading.Event], Any]) -> Any:
    """
    Run `call` in the thread of this context (the request's, in Django), or in one of its own.

    If the awaiting task is cancelled, so is the coroutine that as_function() has made callable,
    and the event that `call` is given is set.
    """
    cancelled = threading.Event()
    begun = threading.Lock()  # for good, by the thread or by the cancellation that forestalls it
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def run() -> Any:
        if not begun.acquire(blocking=False):
            return None
        try:
            return _leaving_no_connection(lambda: call(cancelled))
        finally:
            loop.call_soon_threadsafe(ended.set_result, None)

    async with ThreadSensitiveContext():
        try:
            return await sync_to_async(run)()
        except asyncio.CancelledError:
            cancelled.set()
            if not begun.acquire(blocking=False):
                # Leaving the context joins the thread, which blocks the loop, and the thread may
                # be waiting for the loop; asgiref has awaited it since 3.12.1.
                await _despite_cancelling(ended)
            raise


async def _despite_cancelling(future: asyncio.Future[None]) -> None:
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(future)


def _leaving_no_connection(call: Callable[[], Any]) -> Any:
    """Close the connections that `call` has opened: the thread may end without closing them."""
    before = _open_connections()
    try:
        return call()
    except StopIteration as error:  # a future cannot hold it, and who awaits it waits for ever
        raise RuntimeError("a function under the lock raised StopIteration") from error
    finally:
        for connection in _open_connections():
            if connection not in before:
                connection.close()


def _open_connections() -> list[BaseDatabaseWrapper]:
    known = connections.all(initialized_only=True)
    return [connection for connection in known if connection.connection is not None]
