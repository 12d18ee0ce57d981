"""How waiters stand in line: who is next, what a fault costs the others, what is left of them."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis
from django.core.cache import caches
from django.db import transaction
from django.test import override_settings
from redis.backoff import NoBackoff
from redis.retry import Retry
from services import Services

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import LockHeld, StoreUnavailable
from django_fencing.leases import Lease
from django_fencing.locks import fenced_lock
from django_fencing.resources import ResourceLike
from django_fencing.stores.redis import RedisStore
from django_fencing.timing import now
from tests.helpers import (
    SECONDS,
    Body,
    acquired,
    assert_held_by,
    cache_at,
    closing,
    counted_calls,
    in_background,
    in_threads,
    keys_of,
    started,
    wait_until,
    waits_for_row,
)
from tests.proxy import REPEATING, Fault, Proxy
from tests.shop.models import Job

ROOT = Path(__file__).parents[1]

# Seconds after which a waiter asks again that nobody has woken, and for which the free lock is
# kept for one that has been.
SLICE, RESERVATION = 1.0, 0.1

# Seconds that a busy machine may take on top, of which a server that looks ten times a second
# whether a client has blocked for long enough takes 0.1.
SLACK = 0.4

Pause = Callable[[], None]


def line_of(client: Any, resource: ResourceLike) -> list[str]:
    """Return the holders' ids of those who wait, the first one first."""
    return list(client.zrange(keys_of(resource).queue, 0, -1))


def stand_in_line(client: Any, resource: ResourceLike, count: int) -> None:
    """Wait until so many stand in line."""
    wait_until(lambda: len(line_of(client, resource)) == count)


def hold(pause: Pause, name: str, wait: float = SECONDS, **options: Any) -> Lease:
    """Wait for the lock, pause while it is held, and return the lease."""
    with fenced_lock(name, wait=wait, register=False, **options) as lease:
        pause()
    return lease


@contextmanager
def waiters(client: Any, name: str, count: int) -> Iterator[list[Body]]:
    """Let so many threads stand in line, each after the one before; each pauses as holder."""
    with ExitStack() as stack:
        bodies = []
        before = len(line_of(client, name))
        for number in range(1, count + 1):
            bodies.append(stack.enter_context(started(hold, name)))
            stand_in_line(client, name, before + number)
        yield bodies
        for body in bodies:
            body.go_on()


def assert_nothing_left(client: Any, name: str) -> None:
    """Check that Redis keeps the counter of the name alone, and for a minute who is done."""
    keys = keys_of(name)
    assert set(client.scan_iter()) <= {keys.token, keys.done}


@contextmanager
def replaced(operation: str, thread: Callable[[], Any], instead: Callable[..., Any]) -> Any:
    """Let one thread's calls of a store's operation be instead(original, ...)."""
    original = getattr(RedisStore, operation)

    def call(self: RedisStore, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is thread():
            return instead(partial(original, self), *args, **options)
        return original(self, *args, **options)

    with mock.patch.object(RedisStore, operation, call):
        yield


@contextmanager
def a_busy_first_waiter(
    client: Any, name: str, then: Callable[..., Any], **options: Any
) -> Iterator[tuple[Body, threading.Event]]:
    """
    Let the first one in line be busy with something else instead of blocking.

    Yield it and the event at which it goes on, by calling `then` with the store's operation.
    """
    first: list[Body] = []
    free = threading.Event()

    def be_busy(wait: Callable[..., Any], *args: Any, **options: Any) -> Any:
        assert free.wait(SECONDS)
        return then(wait, *args, **options)

    with (
        replaced("wait", lambda: first and first[0].thread, be_busy),
        ExitStack() as stack,
    ):
        waiting = threading.Event()

        def work(pause: Pause) -> Lease:
            assert waiting.wait(SECONDS)
            return hold(pause, name, **options)

        first.append(stack.enter_context(started(work)))
        waiting.set()
        stand_in_line(client, name, 1)
        try:
            yield first[0], free
        finally:
            free.set()


# Real processes


PROGRAM = """
import json, os, signal, sys
import django

django.setup()
from django_fencing.locks import fenced_lock


def tell(**report):
    os.write(1, (json.dumps(report) + "\\n").encode())


def take(name, **options):
    return fenced_lock(name, register=False, **options).acquire()


def wait_and_hold(name, **options):
    tell(token=take(name, **options).token)
    signal.pause()


def wait_and_be_interrupted(name, **options):
    try:
        take(name, **options)
    except KeyboardInterrupt:
        leases = [take(name + " other") for _ in range(2) if not tell(interrupted=True) or 1][:0]
        tokens = []
        for _ in range(3):
            lease = take(name + " other", wait=1)
            lease.ensure_held()
            tokens.append([lease.token, lease.release()])
        tell(tokens=tokens)


signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.default_int_handler)
tell(ready=True)
while line := sys.stdin.readline():
    if os.fork():
        continue
    try:
        tell(pid=os.getpid())
        work, name, options = json.loads(line)
        globals()[work](name, **options)
    finally:
        os._exit(0)
"""


class Nursery:
    """A process that forks others, which wait for a lock."""

    def __init__(self, redis_url: str) -> None:
        environment = {
            "REDIS_URL": redis_url,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)]),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM],
            bufsize=0,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self.tells() == {"ready": True}

    def fork(self, work: str, name: str, **options: Any) -> int:
        """Let a process do something, and return its id."""
        self.process.stdin.write(f"{json.dumps([work, name, options])}\n".encode())
        return int(self.tells()["pid"])

    def tells(self) -> Any:
        """Return the next thing that one of them has to say."""
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        assert ready, "No process says anything."
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """Kill them all."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(SECONDS)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def nursery(private_services: Services) -> Iterator[Nursery]:
    """Yield what forks processes that use the private Valkey, for Django takes a while to start."""
    nursery = Nursery(private_services.redis_url)
    yield nursery
    nursery.close()


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
