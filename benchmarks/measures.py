"""What is measured. Each returns figures of one contestant; the clock is that of the machine."""

import multiprocessing
import os
import statistics
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import django
from django.db import transaction

if os.environ.get("DJANGO_SETTINGS_MODULE"):  # a process of its own begins here
    django.setup()

from benchmarks.contestants import CONTESTANTS, client
from benchmarks.models import Account
from django_fencing.locks import fenced_atomic, fenced_lock

SPAWN = multiprocessing.get_context("spawn")


def round_trips() -> dict[str, float]:
    """Return acquire + release of a free lock, as a multiple of two bare round trips."""
    ping = client().ping

    def bare() -> None:
        ping()
        ping()

    def pair(kind: str) -> Callable[[], Any]:
        acquire = CONTESTANTS[kind](uuid.uuid4().hex).acquire
        return lambda: acquire(0)()  # type: ignore[misc]

    return _ratios(bare, {kind: pair(kind) for kind in CONTESTANTS}, rounds=30, times=200)


def read_modify_write() -> dict[str, float]:
    """Return one more in a row under a lock, as a multiple of that under redis-py's lock."""
    key = Account.objects.create().pk

    def plain() -> None:
        with client().lock(f"account:{key}", timeout=30), transaction.atomic():
            raise_by_one(Account.objects.get(pk=key))

    def raise_by_one(account: Account) -> None:
        account.amount += 1
        account.save()

    def atomic() -> None:
        with fenced_atomic((Account, key)) as account:
            raise_by_one(account)

    def lock() -> None:
        with fenced_lock((Account, key)) as lease, lease.atomic() as account:
            raise_by_one(account)

    contestants = {"fenced_atomic": atomic, "fenced_lock + lease.atomic()": lock}
    return _ratios(plain, contestants, rounds=12, times=60)


def _ratios(
    base: Callable[[], Any], others: dict[str, Callable[[], Any]], *, rounds: int, times: int
) -> dict[str, float]:
    """Return the medians over many short rounds, so that a busy machine slows all of them down."""
    for function in (base, *others.values()):
        function()
    found: dict[str, list[float]] = {name: [] for name in others}
    for _ in range(rounds):
        unit = _seconds(base, times)
        for name, function in others.items():
            found[name].append(_seconds(function, times) / unit)
    return {name: statistics.median(ratios) for name, ratios in found.items()}


def _seconds(function: Callable[[], Any], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        function()
    return time.perf_counter() - began


def hand_off(kind: str, times: int) -> tuple[float, float]:
    """Return median and 99th percentile, in ms, from a release to the grant in a process."""
    name = uuid.uuid4().hex
    acquire = CONTESTANTS[kind](name).acquire
    here, there = SPAWN.Pipe()
    waiter = SPAWN.Process(target=_wait_again_and_again, args=(kind, name, there))
    waiter.start()
    delays = []
    for number in range(times + 5):
        release = acquire(30)
        assert release is not None
        here.send(True)
        time.sleep(0.01 + number % 7 / 1000)
        released = time.monotonic()
        release()
        delays.append(1000 * (here.recv() - released))
        here.recv()
    here.send(False)
    waiter.join(30)
    delays = sorted(delays[5:])
    return statistics.median(delays), delays[int(len(delays) * 0.99) - 1]


def _wait_again_and_again(kind: str, name: str, pipe: Any) -> None:
    acquire = CONTESTANTS[kind](name).acquire
    while pipe.recv():
        release = acquire(30)
        granted = time.monotonic()
        assert release is not None
        release()
        pipe.send(granted)
        pipe.send(None)


def served(kind: str, processes: int, seconds: float) -> list[int]:
    """Return how often each of these processes has had one lock, that all of them want."""
    name = uuid.uuid4().hex
    ready, counts = SPAWN.Barrier(processes), SPAWN.Queue()
    workers = [
        SPAWN.Process(target=_take_again_and_again, args=(kind, name, ready, seconds, counts))
        for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    found = [counts.get(timeout=60 + seconds) for _ in workers]
    for worker in workers:
        worker.join(30)
    return sorted(found, reverse=True)


def _take_again_and_again(kind: str, name: str, ready: Any, seconds: float, counts: Any) -> None:
    acquire = CONTESTANTS[kind](name).acquire
    if release := CONTESTANTS[kind](uuid.uuid4().hex).acquire(0):
        release()  # everything is connected and loaded
    ready.wait(60)
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        if release := acquire(seconds):
            time.sleep(0.001)
            release()
            count += 1
    counts.put(count)


def commands_of_waiters(kind: str, waiters: int, seconds: float) -> float:
    """Return what a waiter sends per second, scripts counting as one."""
    lock = CONTESTANTS[kind](uuid.uuid4().hex)
    release = lock.acquire(0)
    assert release is not None
    threads = [threading.Thread(target=lock.acquire, args=(seconds + 1,)) for _ in range(waiters)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    sent = 0
    with client().monitor() as monitor:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if monitor.connection.can_read(timeout=0.05):
                sent += monitor.next_command()["client_type"] != "lua"
    release()
    for thread in threads:
        thread.join()
    return sent / waiters / seconds
