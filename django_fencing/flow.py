"""Who is running: the flow, the leases it holds, the transaction it is in."""

import asyncio
import functools
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, ref

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_fencing.exceptions import InsideTransaction
from django_fencing.grants import Holder

if TYPE_CHECKING:
    from django_fencing.leases import Lease

Flow: TypeAlias = threading.Thread | asyncio.Task[object]

# Weak on both sides: neither a thread that ended nor a lease that was dropped stays in here.
_held: WeakKeyDictionary[Flow, list["ref[Lease]"]] = WeakKeyDictionary()
_fenced: WeakKeyDictionary[BaseDatabaseWrapper, tuple[int, "Lease"]] = WeakKeyDictionary()

# Numbers the fenced transactions of this process.
_numbers = itertools.count()


def current_flow() -> Flow:
    """Return the running asyncio task, else the thread: the object itself, never its id."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return threading.current_thread() if task is None else task


def new_holder(function: str = "") -> Holder:
    """Return a fresh identity for one acquisition by `function`, else by the calling code."""
    flow = current_flow()
    # gevent has threads of a class of its own.
    name = flow.get_name() if isinstance(flow, asyncio.Task) else flow.name
    function = function or _calling_code()
    return Holder(host=_host(), pid=os.getpid(), flow=name, function=function)


def hold(lease: "Lease") -> None:
    """Note that this flow holds `lease`, until it lets go or the lease is no more."""
    leases = _held.setdefault(current_flow(), [])
    leases.append(ref(lease, leases.remove))


def let_go(lease: "Lease", flow: Flow) -> None:
    """Forget that `flow` holds `lease`, or that it has entered it once more."""
    leases = _held.get(flow, [])
    for number in reversed(range(len(leases))):
        if leases[number]() is lease:
            del leases[number]
            return


def held() -> "list[Lease]":
    """Return the leases that this flow holds, the newest last."""
    # A copy: the garbage collector may take a dropped lease out at any moment.
    references = list(_held.get(current_flow(), ()))
    return [lease for reference in references if (lease := reference()) is not None]


def fenced_by(alias: str) -> "Lease | None":
    """Return the lease in whose fenced transaction this thread's connection `alias` is."""
    return _fenced.get(connections[alias], (0, None))[1]


def fencing() -> "Lease | None":
    """Return the lease in whose fenced transaction this thread is, the newest of several."""
    opened = (_fenced.get(each) for each in connections.all(initialized_only=True))
    return max(filter(None, opened), key=lambda entry: entry[0], default=(0, None))[1]


@contextmanager
def fenced(alias: str, lease: "Lease") -> Iterator[None]:
    """Mark this thread's connection `alias` as inside the fenced transaction of `lease`."""
    connection = connections[alias]
    _fenced[connection] = next(_numbers), lease
    try:
        yield
    finally:
        if fenced_by(alias) is lease:
            del _fenced[connection]


def roll_back(alias: str, error: BaseException) -> None:
    """Leave every transaction.atomic() that is open on `alias`, as `error` would have done."""
    connection = connections[alias]
    while in_transaction(alias):
        connection.atomic_blocks[-1].__exit__(type(error), error, error.__traceback__)
    _fenced.pop(connection, None)


def in_transaction(alias: str) -> bool:
    """
    Say whether a transaction.atomic() is open on this thread's connection `alias`.

    The blocks that Django's TestCase opens around a test do not count.
    """
    blocks: list[Any] = connections[alias].atomic_blocks
    return not all(block._from_testcase for block in blocks)


def is_in_transaction(alias: str) -> bool:
    """Say whether in_transaction(), or whether the autocommit is off on `alias`."""
    connection = connections[alias]
    return in_transaction(alias) or not (connection.atomic_blocks or _autocommits(connection))


def refuse_transaction(
    alias: str, action: str, resource: str, cure: str | Callable[[str], str]
) -> None:
    """
    Raise InsideTransaction if is_in_transaction().

    `cure` says what to do, or returns it for the alias.
    """
    if not is_in_transaction(alias):
        return
    cure = cure if isinstance(cure, str) else cure(alias)
    raise InsideTransaction(
        f"Cannot {action} {resource!r} while a transaction is open on database {alias!r}: {cure}",
        resource=resource,
    )


def _autocommits(connection: BaseDatabaseWrapper) -> bool:
    """Answer without connecting: leaving a lock must work while the database is away."""
    if connection.connection is None:
        return bool(connection.settings_dict["AUTOCOMMIT"])
    return connection.autocommit


@functools.cache
def _host() -> str:
    return socket.gethostname()


def _calling_code() -> str:
    """Name the innermost function on the stack that is neither the app's nor contextlib's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "?")
        if module != "contextlib" and module.partition(".")[0] != "django_fencing":
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "?"
