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
from django_fencing.registrar import Registrar
from django_fencing.resources import ResourceLike
from django_fencing.stores import asking
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


def assert_nothing_left(client: Any, name: str) -> None:
    """Check that Redis keeps the counter of the name alone, and for a minute who is done."""
    keys = keys_of(name)
    assert set(client.scan_iter()) <= {keys.token, keys.done}


@contextmanager
def waiters(client: Any, name: str, count: int) -> Iterator[list[Body]]:
    """Let so many threads stand in line, each after the one before; each pauses as holder."""
    before = len(line_of(client, name))
    with ExitStack() as stack:
        bodies = []
        try:
            for number in range(1, count + 1):
                bodies.append(stack.enter_context(started(hold, name)))
                stand_in_line(client, name, before + number)
            yield bodies
        finally:
            for body in bodies:
                body.go_on()


@contextmanager
def busy_waiter(
    client: Any, name: str, then: Callable[..., Any]
) -> Iterator[tuple[Body, threading.Event]]:
    """
    Let a thread stand in line that is busy with something else when it should block.

    Yield it, and the event at which it goes on: it calls `then` with the store's operation.
    """
    wait = RedisStore.wait
    threads: list[threading.Thread] = []
    free = threading.Event()

    def be_busy(self: RedisStore, *args: Any, **options: Any) -> Any:
        if threading.current_thread() not in threads:
            return wait(self, *args, **options)
        assert free.wait(SECONDS)
        return then(partial(wait, self), *args, **options)

    def work(pause: Pause) -> Lease:
        threads.append(threading.current_thread())
        lock = fenced_lock(name, wait=SECONDS, register=False)
        lease = lock.ask(threading.Event()).acquire()
        pause()
        lease.release()
        return lease

    before = len(line_of(client, name))
    with mock.patch.object(RedisStore, "wait", be_busy), started(work) as body:
        try:
            stand_in_line(client, name, before + 1)
            yield body, free
        finally:
            free.set()


# Real processes


PROGRAM = """
import json, os, signal, sys, traceback
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
    except BaseException:
        traceback.print_exc()
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


# First come, first served


def test_waiters_are_served_in_the_order_in_which_they_came(name: str, private_redis: Any) -> None:
    """Newcomers, with wait and without, never come before one of eight that wait."""
    holder = acquired(name)
    with waiters(private_redis, name, 8) as first_ones, ExitStack() as stack:
        line = [*first_ones]
        order = line_of(private_redis, name)
        release: Callable[[], Any] = holder.release
        for number, body in enumerate(first_ones):
            release()
            while not body.stands:
                with pytest.raises(LockHeld):
                    acquired(name)
            if number == 3:
                line.append(stack.enter_context(started(hold, name)))
                stand_in_line(private_redis, name, 5)
            assert [one.stands for one in line[number:]] == [True] + [False] * (
                len(line) - number - 1
            )
            release = body.finish
        release()
        line[-1].reach_pause()

        leases = [body.finish() for body in line]

    assert [lease.token for lease in leases] == list(range(2, 11))
    assert [lease.holder.id.hex for lease in leases][:8] == order
    assert_nothing_left(private_redis, name)


def test_whoever_releases_and_asks_again_at_once_goes_to_the_end(
    name: str, private_redis: Any
) -> None:
    """Ten times, with one or two others in line."""
    for round_ in range(10):
        holder = acquired(name)
        with waiters(private_redis, name, 1 + round_ % 2) as bodies:
            for body in bodies:
                body.go_on()
            holder.release()
            again = acquired(name, wait=SECONDS)
            assert again.token == holder.token + len(bodies) + 1
            assert all(body.finish().token < again.token for body in bodies)
            again.release()


def test_a_free_lock_is_kept_for_the_first_in_line(name: str, private_redis: Any) -> None:
    """Also while nobody else waits: newcomers are refused, and told for how short a time."""
    holder = acquired(name)
    with busy_waiter(private_redis, name, lambda wait, *args, **options: True) as (first, free):
        (waits,) = line_of(private_redis, name)
        holder.release()

        with pytest.raises(LockHeld) as caught:
            acquired(name)

        assert caught.value.held_by == "somebody whose turn it is"
        assert 0 < caught.value.retry_after <= RESERVATION
        assert private_redis.hgetall(keys_of(name).lease) == {"reserved": waits}
        assert 0 < private_redis.pttl(keys_of(name).wakes + waits) <= 10_000
        free.set()
        first.reach_pause()
        assert first.finish().holder.id.hex == waits


def test_threads_wait_through_one_definition_each_for_itself(name: str, private_redis: Any) -> None:
    """Two stand in line, and the second goes on waiting while the first one holds."""
    lock = fenced_lock(name, wait=SECONDS, register=False)

    def share(pause: Pause) -> Lease:
        with lock as lease:
            pause()
        return lease

    holder = acquired(name)
    with started(share) as first:
        stand_in_line(private_redis, name, 1)
        with started(share) as second:
            stand_in_line(private_redis, name, 2)
            ids = line_of(private_redis, name)
            holder.release()
            first.reach_pause()
            assert not second.stands
            one = first.finish()
            second.reach_pause()
            other = second.finish()

    assert [one.holder.id.hex, other.holder.id.hex] == ids
    assert [one.token, other.token] == [2, 3]


def test_a_short_wait_does_not_shorten_anybody_elses(name: str, private_redis: Any) -> None:
    """Who came first stays first and alive, whatever others who came later do to the line."""
    keys = keys_of(name)
    holder = acquired(name)
    with waiters(private_redis, name, 1) as [patient]:
        (waits,) = line_of(private_redis, name)
        beat = private_redis.zscore(keys.beats, waits)
        refused = in_threads(*[partial(acquired, name, wait=wait) for wait in (0.001, 0.05, 0.2)])

        assert [type(one) for one in refused] == [LockHeld] * 3
        assert line_of(private_redis, name) == [waits]
        assert private_redis.zscore(keys.beats, waits) >= beat
        assert min(private_redis.pttl(key) for key in (keys.queue, keys.beats)) > 5_000
        began = now()
        holder.release()
        patient.reach_pause()
        assert now() - began < SLICE / 2


def test_a_late_waiter_comes_back_to_its_place(name: str, private_redis: Any) -> None:
    """It has missed its turn: the next one had the lock, but nobody else that came later."""
    holder = acquired(name)
    with (
        busy_waiter(private_redis, name, lambda wait, *args, **options: True) as (late, free),
        waiters(private_redis, name, 2) as [second, third],
    ):
        ids = line_of(private_redis, name)
        holder.release()
        second.reach_pause()
        assert line_of(private_redis, name) == ids[2:]

        free.set()
        stand_in_line(private_redis, name, 2)

        assert line_of(private_redis, name) == [ids[0], ids[2]]
        second.finish()
        late.reach_pause()
        assert not third.stands
        late.finish()
        third.reach_pause()


@pytest.mark.django_db(transaction=True)
def test_a_registration_that_fails_keeps_its_place(job: Job, private_redis: Any) -> None:
    """The row is somebody else's for longer than the lease: it waits on, before who came later."""

    def keep_rows(pause: Pause) -> None:
        with transaction.atomic():
            assert list(Job.objects.select_for_update())
            pause()

    def register(pause: Pause) -> Lease:
        with fenced_lock((Job, job.pk), ttl=0.3, wait=SECONDS) as lease:
            pause()
        return lease

    place = (Job, job.pk)
    holder = acquired(place)
    with (
        started(keep_rows) as transaction_,
        started(register) as first,
    ):
        transaction_.reach_pause()
        stand_in_line(private_redis, place, 1)
        with waiters(private_redis, place, 2) as [second, third]:
            ids = line_of(private_redis, place)
            holder.release()
            wait_until(waits_for_row)
            second.reach_pause()  # which does not register
            stand_in_line(private_redis, place, 2)
            assert line_of(private_redis, place) == [ids[0], ids[2]]

            transaction_.finish()
            second.go_on()
            first.reach_pause()
            assert not third.stands
            assert first.finish().holder.id.hex == ids[0]
            third.reach_pause()


# Wake-ups that are lost


def test_a_wake_up_that_is_deleted_costs_at_most_a_slice(name: str, private_redis: Any) -> None:
    """By an eviction, say, in the very moment of the release."""
    holder = acquired(name)
    with waiters(private_redis, name, 1) as [waiter]:
        (waits,) = line_of(private_redis, name)

        def without_wake_up(self: Any, *command: Any, **options: Any) -> Any:
            with self.pipeline() as pipe:
                pipe.execute_command(*command)
                pipe.delete(keys_of(name).wakes + waits)
                answer, deleted = pipe.execute()
            assert deleted == 1
            return answer

        with mock.patch.object(redis.client.Redis, "execute_command", without_wake_up):
            assert holder.release()
        released = now()
        waiter.reach_pause()

        assert SLICE / 2 < now() - released < SLICE + SLACK


def test_a_wake_up_that_the_line_swallows_costs_at_most_a_slice(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The server never hears that the waiter blocks, and the waiter never hears of the release."""
    blocked = threading.Event()

    def swallow(request: bytes) -> Fault:
        if b"BLPOP" not in request:
            return Fault.NONE
        blocked.set()
        return Fault.HELD_BACK

    holder = acquired(name)
    with (
        mock.patch.object(proxy, "fault_of", swallow),
        waiters(private_redis, name, 1) as [waiter],
    ):
        assert blocked.wait(SECONDS)
        assert holder.release()
        released = now()
        waiter.reach_pause()

        assert SLICE / 2 < now() - released < SLICE + SLACK
        waiter.finish()
    assert_nothing_left(private_redis, name)


def test_a_connection_that_ends_while_it_blocks_costs_less_than_a_slice(
    name: str, private_redis: Any
) -> None:
    """The waiter asks again by another one, and gets its turn."""
    holder = acquired(name)
    with waiters(private_redis, name, 1) as [waiter]:
        blocked = partial(blocked_clients, private_redis)
        wait_until(lambda: len(blocked()) == 1)
        (lost,) = blocked()
        private_redis.client_kill_filter(_id=lost)
        wait_until(lambda: blocked() not in ([], [lost]))
        released = now()
        holder.release()
        waiter.reach_pause()

        assert now() - released < SLICE / 2


def blocked_clients(client: Any) -> list[str]:
    """Return the ids of the connections that block."""
    return [one["id"] for one in client.client_list() if "b" in one["flags"]]


def test_a_lock_that_runs_out_is_had_at_once(
    name: str, private_redis: Any, nursery: Nursery
) -> None:
    """Nobody wakes the first in line of a holder that was killed: it knows when the lease ends."""
    holder = nursery.fork("wait_and_hold", name, ttl=1.5, wait=0)
    assert nursery.tells() == {"token": 1}
    granted = now()
    with waiters(private_redis, name, 1) as [waiter]:
        os.kill(holder, signal.SIGKILL)
        waiter.reach_pause()

        assert now() - granted < 1.5 + 0.3


# Waiters that are no more


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("count", "seconds"), [(1, RESERVATION + SLICE + SLACK), (8, 3.5)])
def test_dead_waiters_hold_the_next_one_up_for_a_moment(
    name: str,
    private_redis: Any,
    nursery: Nursery,
    end: signal.Signals,
    count: int,
    seconds: float,
) -> None:
    """Each process blocks at the head of the line when it is killed, or stopped."""
    holder = acquired(name)
    pids = []
    for number in range(1, count + 1):
        pids.append(nursery.fork("wait_and_hold", name, wait=SECONDS))
        stand_in_line(private_redis, name, number)
    try:
        with waiters(private_redis, name, 1) as [waiter]:
            wait_until(lambda: len(blocked_clients(private_redis)) == count + 1)
            for pid in pids:
                os.kill(pid, end)
            wait_until(lambda: all(map(is_gone, pids)))
            holder.release()
            released = now()
            waiter.reach_pause()

            assert RESERVATION / 2 < now() - released < seconds
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    """Say whether a process has ended, or stands still."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or before it is read
        return True


def fail(wait: Callable[..., Any], *args: Any, **options: Any) -> None:
    raise KeyError


def interrupt(wait: Callable[..., Any], *args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def cancel(wait: Callable[..., Any], *args: Any, **options: Any) -> None:
    options["cancelled"].set()
    wait(*args, **options)


@pytest.mark.parametrize(
    ("give_up", "error"),
    [(fail, KeyError), (interrupt, KeyboardInterrupt), (cancel, CancelledError)],
)
def test_a_waiter_that_gives_up_in_its_turn_hands_on(
    name: str, private_redis: Any, give_up: Callable[..., Any], error: type[BaseException]
) -> None:
    """The next one has the lock at once, not when it asks again."""
    holder = acquired(name)
    with (
        busy_waiter(private_redis, name, give_up) as (first, free),
        waiters(private_redis, name, 1) as [second],
    ):
        holder.release()
        released = now()
        assert private_redis.hexists(keys_of(name).lease, "reserved")
        free.set()
        second.reach_pause()

        assert now() - released < SLICE / 2
        assert isinstance(first.finish(), error)
        second.finish()
    assert_nothing_left(private_redis, name)


def test_a_waiter_whose_last_attempt_fails_in_its_turn_hands_on(
    name: str, private_redis: Any
) -> None:
    """The lock is free and kept for it at its deadline, and its call is lost."""
    acquire = RedisStore.acquire
    holder = acquired(name)
    lost = threading.Event()
    released = 0.0

    def lose_the_last(self: RedisStore, *args: Any, **options: Any) -> Any:
        nonlocal released
        if options["waits"] or lost.is_set():
            return acquire(self, *args, **options)
        lost.set()
        holder.release()
        released = now()
        assert private_redis.hexists(keys_of(name).lease, "reserved")
        raise StoreUnavailable("lost", resource=name)

    with (
        mock.patch.object(RedisStore, "acquire", lose_the_last),
        started(hold, name, 0.5) as first,
    ):
        stand_in_line(private_redis, name, 1)
        with waiters(private_redis, name, 1) as [second]:
            second.reach_pause()
            assert now() - released < SLICE / 3
            assert isinstance(first.finish(), StoreUnavailable)


# What is left


# The keys without an expiry, and the number of all.
LASTING = """
local lasting = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  if redis.call('PTTL', key) == -1 then table.insert(lasting, key) end
end
return {lasting, redis.call('DBSIZE')}
"""


def test_nothing_is_left_when_nobody_waits_any_more(name: str, private_redis: Any) -> None:
    """Whoever was granted the lock, refused or broken off; and all keys expire at every moment."""
    looks: list[Any] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            looks.append(private_redis.eval(LASTING, 0))

    def break_off() -> None:
        cancelled = threading.Event()
        threading.Timer(0.2, cancelled.set).start()
        fenced_lock(name, wait=SECONDS, register=False).ask(cancelled).acquire()

    holder = acquired(name)
    with in_background(look):
        try:
            with (
                busy_waiter(private_redis, name, fail) as (failing, free),
                waiters(private_redis, name, 2) as bodies,
            ):
                refused = in_threads(*[partial(acquired, name, wait=0.3)] * 2, break_off)
                free.set()
                assert isinstance(failing.finish(), KeyError)
                holder.release()
                assert [body.finish().lost for body in bodies] == [False, False]
        finally:
            over.set()

    assert [type(one) for one in refused] == [LockHeld, LockHeld, CancelledError]
    assert [lasting for lasting, _ in looks if lasting] == []
    assert len(looks) > 10
    assert max(size for _, size in looks) >= 5
    assert_nothing_left(private_redis, name)


@pytest.mark.parametrize("fault", [Fault.HELD_BACK, Fault.DOUBLED, Fault.REPLY_LOST])
@pytest.mark.parametrize("attempt", ["first", "last"])
def test_a_late_call_of_a_waiter_that_has_given_up_takes_no_place(
    name: str, proxy: Proxy, private_redis: Any, fault: Fault, attempt: str
) -> None:
    """Neither in the line, nor when the lock is free."""
    holder = acquired(name)
    proxy.plan.extend([Fault.NONE] * (attempt == "last") + [fault])
    (refused,) = in_threads(partial(acquired, name, wait=0.3))

    assert isinstance(refused, LockHeld | StoreUnavailable)
    if fault is Fault.HELD_BACK:
        assert b"held" in proxy.deliver()
    assert line_of(private_redis, name) == []
    assert_held_by(holder, private_redis)

    holder.release()
    assert_nothing_left(private_redis, name)
    assert acquired(name).token == 2


def test_a_call_that_is_late_when_the_lock_is_free_takes_no_reservation(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """Whoever has given up is not among those who come next."""
    holder = acquired(name)
    proxy.plan.extend([Fault.NONE, Fault.HELD_BACK])
    (refused,) = in_threads(partial(acquired, name, wait=0.3))
    assert isinstance(refused, LockHeld | StoreUnavailable)
    holder.release()

    assert b"done" in proxy.deliver()

    assert_nothing_left(private_redis, name)


@pytest.mark.parametrize("fault", [Fault.DOUBLED, Fault.REQUEST_LOST, Fault.HELD_BACK])
def test_a_waiter_whose_call_met_a_fault_stays_in_line(
    name: str, proxy: Proxy, private_redis: Any, fault: Fault
) -> None:
    """It is there once, and gets the lock in its turn."""
    holder = acquired(name)
    proxy.plan.append(fault)
    with waiters(private_redis, name, 2) as [first, second]:
        ids = line_of(private_redis, name)
        assert len(set(ids)) == 2
        holder.release()
        first.reach_pause()
        assert not second.stands
        assert first.finish().holder.id.hex == ids[0]
        assert second.finish().holder.id.hex == ids[1]
    assert_nothing_left(private_redis, name)


def test_ctrl_c_ends_the_waiting(name: str, private_redis: Any, nursery: Nursery) -> None:
    """It leaves no key and no place, and the process's connections answer what they are asked."""
    holder = acquired(name)
    pid = nursery.fork("wait_and_be_interrupted", name, wait=SECONDS)
    stand_in_line(private_redis, name, 1)
    wait_until(lambda: blocked_clients(private_redis))
    os.kill(pid, signal.SIGINT)

    assert nursery.tells() == {"tokens": [[1, True], [2, True], [3, True]]}

    assert line_of(private_redis, name) == []
    holder.release()
    other = keys_of(f"{name} other")
    private_redis.delete(other.token, other.done)
    assert_nothing_left(private_redis, name)


@pytest.mark.django_db(transaction=True)
def test_a_task_that_is_cancelled_while_it_blocks_ends_at_once(
    name: str, private_redis: Any
) -> None:
    """It has left the line before its caller goes on."""

    @with_fenced_lock(name, wait=10)
    async def work() -> None:
        pytest.fail("The body ran.")

    async def cancel_it() -> float:
        task = asyncio.ensure_future(work())
        await asyncio.to_thread(stand_in_line, private_redis, name, 1)
        await asyncio.to_thread(wait_until, lambda: blocked_clients(private_redis))
        began = now()
        task.cancel()
        with pytest.raises(CancelledError):
            await task
        assert line_of(private_redis, name) == []
        return now() - began

    holder = acquired(name)
    assert asyncio.run(cancel_it()) < 0.5
    holder.release()
    assert_nothing_left(private_redis, name)


# Time


@pytest.mark.parametrize("pool", [{}, {"max_connections": 1}], ids=["blocks", "polls"])
def test_the_whole_budget_is_used_and_no_more(
    name: str, private_services: Services, private_redis: Any, pool: dict[str, Any]
) -> None:
    """It ends as held soon after its deadline."""
    with cache_at(private_services.redis_url, CONNECTION_POOL_KWARGS=pool):
        acquired(name)
        began = now()
        (refused,) = in_threads(partial(acquired, name, wait=0.5))

        assert isinstance(refused, LockHeld)
        assert 0.5 <= now() - began < 0.7
        assert line_of(private_redis, name) == []


@pytest.mark.parametrize("pool", [{}, {"max_connections": 1}], ids=["blocks", "polls"])
def test_a_lock_that_is_released_shortly_before_the_deadline_is_had(
    name: str, private_services: Services, private_redis: Any, pool: dict[str, Any]
) -> None:
    """A waiter asks once more when its time is up."""
    with cache_at(private_services.redis_url, CONNECTION_POOL_KWARGS=pool):
        holder = acquired(name)
        with started(hold, name, 0.5) as waiter:
            stand_in_line(private_redis, name, 1)
            time.sleep(0.4)  # of the 0.5
            assert not waiter.stands
            holder.release()
            waiter.reach_pause()
        assert_nothing_left(private_redis, name)


def test_a_lock_that_runs_out_at_the_deadline_is_had(name: str, private_redis: Any) -> None:
    """The last attempt comes when nothing is left of the wait, not before."""
    acquired(name, ttl=0.5)
    began = now()
    (lease,) = in_threads(partial(acquired, name, wait=0.51))

    assert isinstance(lease, Lease)
    assert now() - began < 0.7


def test_waiters_ask_at_most_twice_in_a_second(name: str, private_redis: Any) -> None:
    """Five of them for three seconds: they block most of the time."""
    acquired(name)
    with ExitStack() as stack:
        for number in range(1, 6):
            stack.enter_context(started(hold, name, 4))
            stand_in_line(private_redis, name, number)
        wait_until(lambda: len(blocked_clients(private_redis)) == 5)
        with counted_calls() as calls:
            time.sleep(3)  # the time in which the calls are counted
            sent = len(calls)
        private_redis.delete(keys_of(name).lease)

    assert 5 * 3 < sent <= 5 * 3 * 2


# Servers that do not answer

# Some seconds are longer than a waiter gives the server: it has a time of its own.
POOLS: dict[str, dict[str, Any]] = {
    "default": {},
    "with retry": REPEATING | {"socket_timeout": 5},
    "with many retries": {"retry": Retry(NoBackoff(), 100), "socket_timeout": 0.3},
    "without timeouts": {"socket_timeout": None, "socket_connect_timeout": None},
}


class Pools:
    """Clients of one server, each for a thread of its own."""

    def __init__(self, url: str, kinds: dict[str, dict[str, Any]]) -> None:
        self.mine = threading.local()
        self.clients = {
            kind: redis.Redis(connection_pool=redis.ConnectionPool.from_url(url, **options))
            for kind, options in kinds.items()
        }
        for kind, options in kinds.items():
            self.clients[kind].connection_pool.connection_kwargs.update(options)

    def client(self) -> Any:
        """Return this thread's client, which is the CLIENT_FACTORY."""
        return self.clients[self.mine.kind]

    def run(self, kind: str, work: Callable[[], Any]) -> tuple[Any, float]:
        """Return the result or the error, and how many seconds it took."""
        self.mine.kind = kind
        began = now()
        try:
            return work(), now() - began
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error, now() - began


@contextmanager
def pools_at(url: str, kinds: dict[str, dict[str, Any]]) -> Iterator[Pools]:
    """Let the app use the Redis at `url` by a client of each of these kinds."""
    pools = Pools(url, kinds)
    with override_settings(FENCING={"CLIENT_FACTORY": pools.client}):
        try:
            yield pools
        finally:
            for client in pools.clients.values():
                client.close()


@contextmanager
def silent_address() -> Iterator[str]:
    """Yield the URL of a port that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


@contextmanager
def closed_address() -> Iterator[str]:
    """Yield the URL of a port that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{bound.getsockname()[1]}/0"


@pytest.mark.parametrize("address", [silent_address, closed_address])
def test_a_server_that_never_answers_is_an_outage_at_the_deadline(
    name: str, address: Callable[[], Any]
) -> None:
    """Whatever the client's own timeouts and retries are."""
    with address() as url, pools_at(url, POOLS) as pools:
        ends = in_threads(
            *(partial(pools.run, kind, partial(acquired, name, wait=2)) for kind in POOLS)
        )

    for end, seconds in ends:
        assert isinstance(end, StoreUnavailable)
        assert 2 <= seconds < 3


def stop_server(services: Services, client: Any, seconds: float) -> None:
    """Let the server stand still for so long, as in a container that is frozen."""
    os.kill(services.pids["valkey"], signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(services.pids["valkey"], signal.SIGCONT)


def pause_server(services: Services, client: Any, seconds: float) -> None:
    """Let the server answer nobody for so long, as an administrator does."""
    client.client_pause(round(seconds * 1000))
    assert client.ping()


@pytest.mark.parametrize("outage", [stop_server, pause_server])
def test_a_server_that_falls_silent_is_an_outage_at_the_deadline(
    name: str, private_services: Services, private_redis: Any, outage: Callable[..., Any]
) -> None:
    """The waiters stand in line and block by then."""
    with pools_at(private_services.redis_url, POOLS) as pools, ExitStack() as stack:
        pools.run("default", partial(acquired, name))

        def wait(pause: Pause, kind: str) -> tuple[Any, float]:
            return pools.run(kind, partial(acquired, name, wait=2))

        bodies = [stack.enter_context(started(wait, kind)) for kind in POOLS]
        wait_until(lambda: len(blocked_clients(private_redis)) == len(POOLS))
        outage(private_services, private_redis, 3)
        assert all(body.stands for body in bodies)
        ends = [body.finish() for body in bodies]

    for end, seconds in ends:
        assert isinstance(end, StoreUnavailable)
        assert 2 <= seconds < 3


@pytest.mark.parametrize("outage", [stop_server, pause_server])
def test_a_server_that_answers_again_in_time_is_used(
    name: str, private_services: Services, private_redis: Any, outage: Callable[..., Any]
) -> None:
    """The waiter has its old place, and gets the lock when it is released."""
    holder = acquired(name)
    with waiters(private_redis, name, 2) as [first, second]:
        ids = line_of(private_redis, name)
        wait_until(lambda: len(blocked_clients(private_redis)) == 2)
        outage(private_services, private_redis, SLICE * 1.5)
        stand_in_line(private_redis, name, 2)
        assert line_of(private_redis, name) == ids
        holder.release()
        first.reach_pause()
        assert not second.stands


def test_a_server_that_was_restarted_in_time_is_used(
    name: str, private_services: Services, private_redis: Any
) -> None:
    """It has forgotten the lease and the line, so the lock is free."""
    acquired(name)
    with waiters(private_redis, name, 1) as [waiter]:
        private_services.restart_valkey()
        restarted = now()
        waiter.reach_pause()
        assert now() - restarted < 1


# Connections


@pytest.mark.parametrize(
    "options",
    [
        {"CONNECTION_POOL_KWARGS": {"max_connections": 2}},
        {
            "CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool",
            "CONNECTION_POOL_KWARGS": {"max_connections": 2, "timeout": 5},
        },
    ],
    ids=["pool", "blocking pool"],
)
def test_many_waiters_share_few_connections(
    name: str, private_services: Services, private_redis: Any, options: dict[str, Any]
) -> None:
    """Twenty get the lock in the end, with two of the cache's connections and two of our own."""
    most = 0
    over = threading.Event()

    def look() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, len({one["id"] for one in watcher.client_list()} - before))

    def work() -> int:
        lease = acquired(name, wait=SECONDS)
        assert lease.release()
        return lease.token

    with (
        redis.Redis.from_url(private_services.redis_url, decode_responses=True) as watcher,
        cache_at(private_services.redis_url, **options),
    ):
        before = {one["id"] for one in [*watcher.client_list(), *private_redis.client_list()]}
        with in_background(look):
            try:
                holder = acquired(name)
                with ThreadPoolExecutor(20) as pool:
                    served = [pool.submit(closing, work) for _ in range(20)]
                    stand_in_line(private_redis, name, 20)
                    holder.release()
                    tokens = [one.result() for one in served]
            finally:
                over.set()

    assert sorted(tokens) == list(range(2, 22))
    assert 2 <= most <= 4
    assert_nothing_left(private_redis, name)


def test_no_timeout_of_the_client_ends_a_long_wait(
    name: str, private_services: Services, private_redis: Any
) -> None:
    """Six of seven seconds, with timeouts from 0.3 to 5, retries, and none of them."""
    with pools_at(private_services.redis_url, POOLS) as pools, ExitStack() as stack:
        holders = [pools.run(kind, partial(acquired, f"{name}{kind}"))[0] for kind in POOLS]

        def wait(pause: Pause, kind: str) -> tuple[Any, float]:
            return pools.run(kind, partial(acquired, f"{name}{kind}", wait=7))

        bodies = [stack.enter_context(started(wait, kind)) for kind in POOLS]
        wait_until(lambda: len(blocked_clients(private_redis)) == len(POOLS))
        time.sleep(6)  # longer than the client's timeouts
        for holder in holders:
            holder.release()
        ends = [body.finish() for body in bodies]

    for end, seconds in ends:
        assert isinstance(end, Lease)
        assert 6 <= seconds < 6.3


def test_a_cache_that_is_closed_meanwhile_interrupts_nobody(
    name: str, private_services: Services, private_redis: Any
) -> None:
    """As django-redis does after each request that ends in another thread."""
    with (
        override_settings(DJANGO_REDIS_CLOSE_CONNECTION=True),
        cache_at(private_services.redis_url),
    ):
        holder = acquired(name)
        with waiters(private_redis, name, 2) as bodies:
            for _ in range(10):
                caches["default"].get("x")
                caches["default"].close()
            ids = line_of(private_redis, name)
            assert not any(body.stands for body in bodies)
            released = now()
            holder.release()
            leases = []
            for body in bodies:
                body.reach_pause()
                caches["default"].close()
                leases.append(body.finish())

    assert now() - released < SLICE / 2
    assert [lease.holder.id.hex for lease in leases] == ids


# Replies that are lost, and turns that are missed


@contextmanager
def lost_first_reply(client: Any, name: str, proxy: Proxy, wait: float = 20) -> Iterator[Any]:
    """The first attempt's reply is lost; the second attempt is held until gate.set()."""
    acquire, gate = RedisStore.acquire, threading.Event()
    asks: list[Any] = []
    threads: list[threading.Thread] = []

    def gated(self: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread() not in threads:
            return acquire(self, *args, **options)
        if asks:
            assert gate.wait(20)
        asks.append(options["came"])
        try:
            return acquire(self, *args, **options)
        finally:
            asks.append("ended")

    def work(pause: Any) -> Any:
        threads.append(threading.current_thread())
        return hold(pause, name, wait)

    proxy.plan.append(Fault.REPLY_LOST)
    with mock.patch.object(RedisStore, "acquire", gated), started(work) as body:
        stand_in_line(client, name, 1)
        yield body, gate, asks


def test_place_is_kept_after_a_lost_reply(name: str, proxy: Proxy, private_redis: Any) -> None:
    """A place in line outlives the reply that would have told of it."""
    acquired(name)
    with (
        lost_first_reply(private_redis, name, proxy, 1) as (_first, gate, asks),
        started(hold, name, 1),
    ):
        stand_in_line(private_redis, name, 2)
        ids = line_of(private_redis, name)
        gate.set()
        wait_until(lambda: asks.count("ended") == 2)
        assert line_of(private_redis, name) == ids


def test_place_is_kept_when_the_first_call_arrives_late(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """Whichever of two attempts of one waiter arrives first, the earlier time counts."""
    acquired(name)
    proxy.plan.append(Fault.HELD_BACK)
    with started(hold, name, 3):
        stand_in_line(private_redis, name, 1)
        with started(hold, name, 1):
            stand_in_line(private_redis, name, 2)
            ids = line_of(private_redis, name)
            proxy.deliver()
            assert line_of(private_redis, name) == ids


def test_holder_is_not_in_line_and_is_never_next_after_itself(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """A lease that was granted after a lost reply leaves no place in the line behind."""
    acquired(name, ttl=0.5)
    with lost_first_reply(private_redis, name, proxy) as (first, gate, _asks):
        wait_until(lambda: not private_redis.exists(keys_of(name).lease))
        gate.set()
        first.reach_pause()
        in_line = line_of(private_redis, name)
        first.finish()
    assert in_line == []
    assert_nothing_left(private_redis, name)


def test_no_wake_list_is_left_after_a_lost_reply(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """Nor a list on which its holder would be woken."""
    holder = acquired(name)
    with lost_first_reply(private_redis, name, proxy) as (first, gate, _asks):
        holder.release()
        gate.set()
        first.finish()
    assert_nothing_left(private_redis, name)


def test_no_wake_list_is_left_by_a_refused_last_attempt(name: str, private_redis: Any) -> None:
    """Nor does a last attempt that is refused, of one that had missed its turn."""
    holder = acquired(name)
    acquire, gate, last = RedisStore.acquire, threading.Event(), threading.Event()

    def late(self: Any, *args: Any, **options: Any) -> Any:
        if (
            not options["waits"]
            and not last.is_set()
            and threading.current_thread() is not threading.main_thread()
        ):
            last.set()
            assert gate.wait(20)
        return acquire(self, *args, **options)

    with mock.patch.object(RedisStore, "acquire", late), started(hold, name, 0.3) as first:
        assert last.wait(20)
        holder.release()
        wait_until(lambda: not private_redis.exists(keys_of(name).lease))
        other = acquired(name)
        gate.set()
        first.finish()
        other.release()
    assert_nothing_left(private_redis, name)


@pytest.mark.parametrize("wait", [0.5, 2])
@pytest.mark.parametrize("options", [{"db": 1}, {"username": "u", "password": "p"}])
def test_handshakes_end_in_time(name: str, wait: float, options: Any) -> None:
    """Nor do the steps by which a connection begins add up to more than the wait."""
    with silent_address() as url, pools_at(url, {"x": options}) as pools:
        [(end, seconds)] = in_threads(partial(pools.run, "x", partial(acquired, name, wait=wait)))
    assert isinstance(end, StoreUnavailable)
    assert seconds < wait + 0.9, seconds


def test_a_late_one_that_gives_up_hands_a_free_lock_on(name: str, private_redis: Any) -> None:
    """Whoever gives up while the lock is free wakes the next one, though it was not kept for it."""
    holder = acquired(name)
    with (
        busy_waiter(private_redis, name, fail) as (first, free),
        waiters(private_redis, name, 1) as [second],
    ):
        holder.release()
        released = now()
        wait_until(lambda: not private_redis.exists(keys_of(name).lease))
        free.set()
        first.finish()
        second.reach_pause()
        assert now() - released < SLICE / 2


@pytest.mark.parametrize("connections", [1, 2])
def test_polling_waiters_keep_their_order(
    name: str, private_services: Services, private_redis: Any, connections: int
) -> None:
    """Those who cannot block ask often enough when their turn is near."""
    with cache_at(
        private_services.redis_url, CONNECTION_POOL_KWARGS={"max_connections": connections}
    ):
        holder = acquired(name)
        with waiters(private_redis, name, 8) as bodies:
            for body in bodies:
                body.go_on()
            holder.release()
            tokens = [body.finish().token for body in bodies]
    assert tokens == sorted(tokens)


def test_waiters_that_come_late_do_not_keep_the_lock_from_each_other(name: str) -> None:
    """Each misses the moment for which the lock is kept for it, as over a slow line."""
    acquire, block, holder = RedisStore.acquire, RedisStore.wait, acquired(name)

    def far_acquire(self: Any, *args: Any, **options: Any) -> Any:
        time.sleep(0.06)
        try:
            return acquire(self, *args, **options)
        finally:
            time.sleep(0.06)

    def far_wait(self: Any, *args: Any, **options: Any) -> Any:
        time.sleep(0.06)
        try:
            return block(self, *args, **options)
        finally:
            time.sleep(0.06)

    def wait() -> bool:
        return acquired(name, wait=8).release()

    with (
        mock.patch.object(RedisStore, "acquire", far_acquire),
        mock.patch.object(RedisStore, "wait", far_wait),
        ExitStack() as running,
    ):
        waiting = [running.enter_context(in_background(wait)) for _ in range(3)]
        wait_until(lambda: all(one.running() for one in waiting))
        time.sleep(0.5)
        began = now()
        holder.release()
        assert [one.result(SECONDS) for one in waiting] == [True] * 3

    assert now() - began < 3


@pytest.mark.django_db(transaction=True)
def test_a_server_that_falls_silent_after_the_grant_ends_the_wait(
    name: str, private_redis: Any
) -> None:
    """Confirming is bounded as well, where the pool has no timeout of its own."""
    register = Registrar.register

    def silent(self: Any, patience: float) -> None:
        private_redis.client_pause(4000)
        register(self, patience)

    with mock.patch.object(Registrar, "register", silent):
        began = now()
        with pytest.raises(StoreUnavailable):
            fenced_lock(name, wait=1).acquire()

    assert now() - began < 2


def test_a_task_that_is_cancelled_while_it_registers_ends_soon(name: str, job: Job) -> None:
    """The database waits for the row for a second at most."""
    locked, go_on = threading.Event(), threading.Event()

    def lock_row() -> None:
        with transaction.atomic():
            Job.objects.select_for_update().get(pk=job.pk)
            locked.set()
            assert go_on.wait(SECONDS)

    @with_fenced_lock((Job, job.pk), wait=10, ttl=12)
    async def work() -> None:
        pytest.fail("The body ran.")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await work()

    with in_background(lock_row):
        assert locked.wait(SECONDS)
        began = now()
        asyncio.run(main())
        took = now() - began
        go_on.set()

    assert took < 3


def test_without_the_right_to_expire_nothing_stays(name: str, private_redis: Any) -> None:
    """An ACL may forbid it: nothing is written then."""
    holder = acquired(name)
    private_redis.acl_setuser(
        "default", enabled=True, nopass=True, commands=["+@all", "-pexpire"], keys=["*"]
    )
    try:
        (refused,) = in_threads(lambda: acquired(name, wait=0.2))
        assert isinstance(refused, StoreUnavailable | LockHeld)
        with suppress(StoreUnavailable):
            holder.release()
        keys = private_redis.keys(f"*{keys_of(name).member}*")
        assert all(private_redis.pttl(key) > 0 for key in keys)
    finally:
        private_redis.acl_setuser(
            "default", enabled=True, nopass=True, commands=["+@all"], keys=["*"]
        )


def test_an_interrupt_while_a_connection_is_given_up_gives_it_to_nobody(
    private_redis: Any,
) -> None:
    """Its reply is still to come, and would be taken for another command's."""
    disconnect = redis.connection.UnixDomainSocketConnection.disconnect
    private_redis.client_pause(300)

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    ask = asking.asking(0.1)
    with (
        mock.patch.object(redis.connection.UnixDomainSocketConnection, "disconnect", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        ask("ECHO", "theirs")
    assert redis.connection.UnixDomainSocketConnection.disconnect is disconnect

    assert asking.asking(5)("ECHO", "mine") == b"mine"
