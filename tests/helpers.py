"""What several tests do: run in threads with connections of their own, count, look into Redis."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import redis
from django.db import connections

from django_fencing.locks import FencedLock
from django_fencing.names import Keys
from django_fencing.resources import ResourceLike, resolve

SECONDS = 20  # after which a barrier or a thread that hangs fails its test


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run each function in a thread, start them together, and return results or exceptions."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait(SECONDS)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(closing, run, function) for function in functions]
    return [future.exception() or future.result() for future in futures]


def closing(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` in a thread and close the database connections that it opened there."""
    try:
        return function(*args)
    finally:
        connections.close_all()


@contextmanager
def in_background(function: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Run `function` in a thread for the length of the block, which it has to outlast."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(closing, function)


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Collect the names of the commands that redis-py sends: one round trip each."""
    calls: list[str] = []
    original = redis.client.Redis.execute_command

    def execute_command(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(str(args[0]))
        return original(self, *args, **options)

    with mock.patch.object(redis.client.Redis, "execute_command", execute_command):
        yield calls


def keys_of(resource: ResourceLike) -> Keys:
    """Return the keys of a resource in Redis."""
    return resolve(resource).keys


def expire(client: Any, resource: ResourceLike) -> None:
    """Let the lease of `resource` run out now, as Redis sees it."""
    assert client.delete(keys_of(resource).lease) == 1


def taken_over(lock: FencedLock, client: Any) -> Any:
    """Let the present lease run out, and return the next one."""
    expire(client, lock.resource)
    return lock.acquire()


def wait_until(condition: Callable[[], Any]) -> None:
    """Poll `condition` until it holds; fail the test if it does not in time."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
