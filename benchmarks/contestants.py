"""The locks that are compared. Each is acquired within a time, and released."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import redis
import redis_lock
from django.core.cache import caches

from django_fencing.exceptions import LockHeld
from django_fencing.locks import fenced_lock

TTL = 30


class Contestant(NamedTuple):
    """A lock of one name: what acquires it within so many seconds, and returns what releases it."""

    acquire: Callable[[float], Callable[[], Any] | None]


def django_fencing(name: str) -> Contestant:
    """Return ours, without the registration, which asks the database."""
    now = fenced_lock(name, ttl=TTL, wait=0, register=False)

    def acquire(wait: float) -> Callable[[], Any] | None:
        lock = fenced_lock(name, ttl=TTL, wait=wait, register=False) if wait else now
        with suppress(LockHeld):
            return lock.acquire().release
        return None

    return Contestant(acquire)


def redis_py(name: str) -> Contestant:
    """Return redis-py's, which is also that of django-redis."""

    def acquire(wait: float) -> Callable[[], Any] | None:
        lock = client().lock(f"redis-py:{name}", timeout=TTL)
        got = lock.acquire(blocking=bool(wait), blocking_timeout=wait or None)
        return lock.release if got else None

    return Contestant(acquire)


def python_redis_lock(name: str) -> Contestant:
    """Return that of the package python-redis-lock."""

    def acquire(wait: float) -> Callable[[], Any] | None:
        lock = redis_lock.Lock(client(), f"python-redis-lock:{name}", expire=TTL)
        with suppress(redis.TimeoutError):  # it blocks for longer than the client's socket does
            if lock.acquire(blocking=bool(wait), timeout=wait or None):
                return lock.release
        return None

    return Contestant(acquire)


CONTESTANTS = {
    "django_fencing": django_fencing,
    "redis-py": redis_py,
    "python-redis-lock": python_redis_lock,
}


def client() -> Any:
    """Return the client that all of them use."""
    cache: Any = caches["default"]
    return cache.client.get_client()
