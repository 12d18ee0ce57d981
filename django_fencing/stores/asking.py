"""Ask a server within a time, through connections of our own where that time is short."""

import functools
import inspect
import math
import os
import threading
import time
import weakref
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_fencing.stores.clients import FAILURES, RAW, client
from django_fencing.timing import now

Ask = Callable[..., Any]

# Lets a connection not tell the server which library it is of: redis-py 7 has renamed the option.
_NAMING = inspect.signature(redis.connection.AbstractConnection.__init__).parameters
_UNNAMED = dict.fromkeys(
    ["driver_info"] if "driver_info" in _NAMING else ["lib_name", "lib_version"]
)

# redis-py 5.3 has deprecated the arguments of get_connection().
_NEEDS_COMMAND = (
    inspect.signature(redis.ConnectionPool.get_connection).parameters["command_name"].default
    is inspect.Parameter.empty
)

# Seconds. How long our own connections take at most to connect, and for each step of a handshake:
# what is waited for afterwards has a time of its own.
_CONNECTING = 0.5
_READING = 0.4

# Seconds for which a client's pool may have no connection left before that is an error.
_BUSY = 1.0

# Seconds after which a command that blocks looks whether it is cancelled.
_TICK = 0.05


class _Pool(redis.ConnectionPool):
    """Connections to the server of another pool, as many at most, that never repeat a command."""

    def __init__(self, like: Any, **options: Any) -> None:
        known = {key: value for key, value in like.connection_kwargs.items() if _addresses(key)}
        known |= {"retry": Retry(NoBackoff(), 0), "protocol": 2, **_UNNAMED, **options}
        if "path" in known:
            known.pop("socket_connect_timeout")
        super().__init__(like.connection_class, like.max_connections, **known)
        self.longest: float = like.connection_kwargs.get("socket_timeout") or math.inf
        # Half of them stay for those who have something to say.
        self.blockers = threading.BoundedSemaphore(self.max_connections // 2 or 1)
        self.may_block = self.max_connections > 1


# By the pool of the settings. A child process makes its own.
_pools: "weakref.WeakKeyDictionary[Any, _Pool]" = weakref.WeakKeyDictionary()
_making = threading.RLock()


def _forget() -> None:
    global _making
    _making = threading.RLock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget)


def asking(patience: float | None = None) -> Ask:
    """
    Return what sends a command to the server of the leases and returns the reply, in bytes.

    With `patience` it raises TimeoutError of redis-py so many seconds from now, and repeats
    nothing. Without it, or where the client is of a cluster or a Sentinel, it waits and repeats as
    the client's own options say.
    """
    given = client()
    pool = None if patience is None else _pool_of(given)
    if pool is None or patience is None:
        return functools.partial(_ask, given)
    deadline = now() + min(patience, pool.longest)
    return lambda *command: _ask_until(deadline, pool, *command)


@contextmanager
def blocking(patience: float, cancelled: threading.Event | None) -> Iterator[Ask | None]:
    """
    Yield what sends a command that blocks the connection, None if there is none to be blocked.

    It gives up after `patience` seconds, and raises CancelledError as soon as `cancelled` is set.
    """
    pool = _pool_of(client())
    if pool is None or not pool.may_block or not pool.blockers.acquire(blocking=False):
        yield None
        return
    deadline = now() + patience
    try:
        yield lambda *command: _ask_until(deadline, pool, *command, cancelled=cancelled)
    finally:
        pool.blockers.release()


@contextmanager
def impatient(seconds: float) -> Iterator[Any]:
    """
    Yield a client of the leases' server that gives up after so many seconds.

    It has a connection of its own for as long as the block lasts. A client of a cluster or of a
    Sentinel is yielded as it is: it waits as its own options say.
    """
    given = client()
    if not _is_plain(given):
        yield given
        return
    own = _Pool(given.connection_pool, socket_timeout=seconds, socket_connect_timeout=seconds)
    try:
        yield redis.Redis(connection_pool=own)
    finally:
        own.disconnect()


def _ask(given: Any, *command: Any) -> Any:
    """
    Send through the settings' own client, as soon as its pool has a connection left.

    Let no reply be taken for another command's: where an interrupt comes between a command and its
    reply, redis-py gives the connection back to its pool as it is.
    """
    deadline = now() + _BUSY
    while True:
        try:
            return given.execute_command(*command, **RAW)
        except redis.ConnectionError as error:
            if not _is_busy(error, deadline):
                raise
        except FAILURES:
            raise
        except BaseException:
            _disconnect_idle(given)
            raise


def _ask_until(
    deadline: float, pool: _Pool, *command: Any, cancelled: threading.Event | None = None
) -> Any:
    connection = _free_connection(pool, deadline)
    is_answered = False
    try:
        connection.send_command(*command)
        while not connection.can_read(timeout=_rest(deadline, cancelled)):
            pass
        reply = connection.read_response(disable_decoding=True)
        is_answered = True
    except redis.ResponseError:
        is_answered = True
        raise
    finally:
        if not is_answered:  # its reply is still to come, and is nobody else's
            connection.disconnect()
        pool.release(connection)
    return reply


def _rest(deadline: float, cancelled: threading.Event | None) -> float:
    """Return how long to wait for a reply before looking again."""
    if cancelled is not None and cancelled.is_set():
        raise CancelledError
    rest = deadline - now()
    if rest <= 0:
        raise redis.TimeoutError("The server has not answered in time")
    return rest if cancelled is None else min(rest, _TICK)


def _free_connection(pool: _Pool, deadline: float) -> Any:
    while True:
        try:
            return pool.get_connection(*(["_"] if _NEEDS_COMMAND else []))
        except redis.ConnectionError as error:
            if not _is_busy(error, deadline):
                raise


def _is_busy(error: redis.ConnectionError, deadline: float) -> bool:
    """Say whether it is worth while to try again, after a moment: others have all connections."""
    if "Too many connections" not in str(error) or now() >= deadline:
        return False
    time.sleep(0.005)
    return True


def _disconnect_idle(given: Any) -> None:
    pool = getattr(given, "connection_pool", None)
    if pool is None:
        given.disconnect_connection_pools()  # of a cluster
    elif "inuse_connections" in inspect.signature(pool.disconnect).parameters:
        pool.disconnect(inuse_connections=False)
    else:  # a BlockingConnectionPool of redis-py 5.2
        pool.disconnect()


def _is_plain(given: Any) -> bool:
    """Say whether the client's pool is one whose connections can be made alike."""
    pool: Any = getattr(given, "connection_pool", None)
    return type(pool) in (redis.ConnectionPool, redis.BlockingConnectionPool)


def _pool_of(given: Any) -> _Pool | None:
    """Return our own pool to the server of this client."""
    if not _is_plain(given):
        return None
    like = given.connection_pool
    with _making:
        if like not in _pools:
            pool = _Pool(like, socket_timeout=_READING, socket_connect_timeout=_CONNECTING)
            _pools[like] = pool
            weakref.finalize(like, pool.disconnect).atexit = False
        return _pools[like]


def _addresses(option: str) -> bool:
    """Say whether this option of a connection tells where and as whom it connects."""
    return option.startswith("ssl_") or option in (
        "host",
        "port",
        "path",
        "db",
        "username",
        "password",
        "credential_provider",
        "redis_connect_func",
    )
