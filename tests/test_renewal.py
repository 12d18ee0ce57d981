"""Leases that are renewed, that are lost, and that a child process has in its memory."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from django.db import connections, transaction
from django.test import override_settings

from django_fencing import flow, signals
from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import LeaseLost, LockHeld, StaleToken, StoreUnavailable
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.stores.redis import RedisStore
from django_fencing.timing import now
from tests.helpers import (
    SECONDS,
    acquired,
    cache_at,
    committing,
    count_sessions,
    expire,
    in_background,
    in_threads,
    keys_of,
    taken_over,
    wait_until,
)
from tests.proxy import Fault, Proxy
from tests.shop.models import Job

pytestmark = committing("default")


def renewing() -> list[threading.Thread]:
    """Return the threads that renew."""
    return [thread for thread in threading.enumerate() if thread.name == "fencing-renewal"]


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """See that no test leaves a thread that renews."""
    gc.collect()
    wait_until(lambda: not renewing())
    yield
    gc.collect()
    wait_until(lambda: not renewing())


@contextmanager
def heard(*names: str) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Collect what these signals tell."""
    events: list[tuple[str, dict[str, Any]]] = []

    def hear(signal: Any, **values: Any) -> None:
        events.append((signal.name, values))

    for one in names:
        getattr(signals, one).connect(hear)
    try:
        yield events
    finally:
        for one in names:
            getattr(signals, one).disconnect(hear)


def renewed(name: str, *, ttl: float = 0.6, renew: Any = True, **options: Any) -> Lease:
    """Return a lease that is renewed."""
    return fenced_lock(name, ttl=ttl, renew=renew, register=False, **options).acquire()


def run_program(text: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run a program of these lines, with the name of a resource in them."""
    return subprocess.run(
        [sys.executable, "-c", text.replace("{NAME}", name)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=3 * SECONDS,
    )


# Renewal


def test_a_lease_is_renewed_until_it_is_released(name: str, client: Any) -> None:
    """At each moment it has between nothing and its ttl left, in Redis as in the lease."""
    key, left = keys_of(name).lease, []
    with fenced_lock(name, ttl=0.3, renew=True) as lease:
        end = now() + 1
        while now() < end:
            left.append((client.pttl(key), lease.remaining, lease.lost))
            time.sleep(0.01)
        with lease.atomic():
            Job.objects.create(note=name)

    assert all(0 < milliseconds <= 300 for milliseconds, _, _ in left)
    assert all(0 < remaining <= 0.3 for _, remaining, _ in left)
    assert not any(lost for _, _, lost in left)
    assert not client.exists(key)
    wait_until(lambda: not renewing())


def test_a_lease_that_is_not_renewed_ends(name: str, client: Any) -> None:
    """The twin of the above."""
    lease = acquired(name, ttl=0.3)

    wait_until(lambda: not client.exists(keys_of(name).lease))

    wait_until(lambda: lease.lost)
    assert not renewing()


def test_one_thread_renews_all_leases(name: str, client: Any) -> None:
    """Each in its own time, and the database is not asked in there."""
    leases = [renewed(f"{name}:{number}", ttl=0.3 + number / 50) for number in range(20)]
    began = now()
    while now() < began + 1:
        assert len(renewing()) == 1
        time.sleep(0.02)

    assert all(client.exists(keys_of(lease.resource).lease) for lease in leases)
    assert all(lease.release() for lease in leases)


def test_a_decorated_function_is_renewed(name: str, client: Any) -> None:
    """As a block is; so is a view that streams, until it is closed."""

    @with_fenced_lock(name, ttl=0.3, renew=5)
    def work() -> int:
        wait_until(lambda: current_lease()._age > 0.7)
        return int(client.pttl(keys_of(name).lease))

    assert 0 < work() <= 300


def test_renewal_has_a_limit(name: str, client: Any) -> None:
    """A body that hangs does not keep the lock for ever, and is fenced."""
    with heard("lease_endangered", "lease_lost") as events:
        lease = renewed(name, ttl=0.3, renew=0.9)
        began = now()
        wait_until(lambda: isinstance(in_threads(lambda: acquired(name, ttl=5))[0], Lease))
        taken = now() - began
        wait_until(lambda: len(events) == 2)

    assert 0.6 < taken < 2
    assert lease.lost
    (endangered, said), (lost, _) = events
    assert (endangered, lost) == ("lease_endangered", "lease_lost")
    assert said["reason"] == "it was renewed for as long as it may be"
    assert 0 < said["remaining"] <= 0.3


def test_true_is_the_limit_of_the_settings(name: str) -> None:
    """And no lock may ask for more."""
    with override_settings(FENCING={"MAX_RENEWAL": 50}):
        lease = renewed(name)
        assert 49 < lease._renewal._until - now() <= 50
        lease.release()
        with pytest.raises(ValueError, match="renew must be at least 0.001 and at most 50"):
            renewed(name, renew=51)


@pytest.mark.parametrize(
    ("renew", "error"),
    [("yes", TypeError), (None, TypeError), (0, ValueError), (-1, ValueError)],
    ids=str,
)
def test_a_renewal_that_means_nothing_is_refused(name: str, renew: Any, error: Any) -> None:
    """Before anything is sent; by a decorator when it is made."""
    with pytest.raises(error, match="renew"):
        renewed(name, renew=renew)
    with pytest.raises(error, match="renew"):
        with_fenced_lock(name, renew=renew)
    with pytest.raises(TypeError, match="on_lost"):
        fenced_lock(name, on_lost="x").acquire()  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [Fault.REQUEST_LOST, Fault.REPLY_LOST, Fault.DOUBLED])
def test_one_failed_renewal_is_no_loss(
    name: str, proxy: Proxy, private_redis: Any, fault: Fault, caplog: Any
) -> None:
    """It is unknown whether the lease is held, and the next renewal tells: one warning at most."""
    with heard("lease_endangered", "lease_lost") as events:
        lease = renewed(name)
        proxy.plan.append(fault)
        end = now() + 1.5
        while now() < end:
            assert private_redis.pttl(keys_of(name).lease) > 0
            assert not lease.lost
            time.sleep(0.02)
        assert lease.release()

    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(events) == (fault is not Fault.DOUBLED)
    assert [event for event, _ in events] == ["lease_endangered"] * len(events)


def test_a_renewal_that_gets_no_answer_holds_up_no_other(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """It gives up in a third of the ttl, and is repeated on another connection."""
    first, second = renewed(name, ttl=0.9), renewed(f"{name}:2", ttl=0.9)
    proxy.plan.append(Fault.HELD_BACK)
    end = now() + 2
    while now() < end:
        assert private_redis.pttl(keys_of(name).lease) > 0
        assert private_redis.pttl(keys_of(f"{name}:2").lease) > 0
        time.sleep(0.02)
    assert b"mine" in proxy.deliver()

    assert first.release()
    assert second.release()


def test_without_the_store_a_lease_is_lost_when_it_has_run_out(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """And not before; the thread has ended then."""
    lost: list[Any] = []
    with heard("lease_endangered", "lease_lost") as events:
        lease = renewed(name, ttl=0.9, on_lost=lost.append)
        proxy.hang_up()
        wait_until(lambda: events)
        assert not lease.lost
        wait_until(lambda: lost)
        wait_until(lambda: len(events) == 2)
        wait_until(lambda: not renewing())

    assert lost == [lease]
    assert lease.lost
    assert lease.remaining == 0
    assert [event for event, _ in events] == ["lease_endangered", "lease_lost"]
    assert events[1][1]["reason"] == "it ran out before it could be renewed"


def test_a_lease_of_another_holder_is_not_renewed(name: str, client: Any) -> None:
    """Its end stays where it is, and the lost one knows."""
    lost: list[Any] = []
    lease = renewed(name, ttl=0.6, on_lost=lost.append)
    taken = taken_over(fenced_lock(name, ttl=30, register=False), client)

    wait_until(lambda: lost)

    assert lease.lost
    assert client.hget(keys_of(name).lease, "holder") == taken.holder.id.hex
    assert client.pttl(keys_of(name).lease) > 25_000
    wait_until(lambda: not renewing())


def test_a_lease_that_ran_out_is_not_made_anew(name: str, client: Any) -> None:
    """Renewal only extends. As long as nobody else has registered, the lease still commits."""
    with fenced_lock(name, ttl=0.6, renew=True) as lease:
        expire(client, name)
        wait_until(lambda: lease.lost)
        assert not client.exists(keys_of(name).lease)
        with lease.atomic():
            pass


def test_what_the_holder_extends_is_renewed_from_then_on(name: str, client: Any) -> None:
    """By the new length, and never shortened."""
    lease = renewed(name, ttl=0.3)
    lease.extend(30)
    end = now() + 0.7
    while now() < end:
        assert client.pttl(keys_of(name).lease) > 25_000
        time.sleep(0.01)
    assert lease.release()


def test_many_short_rounds_leave_nothing(name: str, client: Any) -> None:
    """Neither a key nor a thread, though each lease is renewed every millisecond or two."""
    for _ in range(100):
        with fenced_lock(name, ttl=0.005, renew=True, register=False):
            pass

    wait_until(lambda: not renewing())
    assert not client.exists(keys_of(name).lease)


def test_a_lease_that_is_dropped_is_renewed_no_more(name: str, client: Any) -> None:
    """It runs out."""
    lease = renewed(name)
    assert renewing()
    del lease
    gc.collect()

    wait_until(lambda: not renewing())
    wait_until(lambda: not client.exists(keys_of(name).lease))


def test_the_database_is_not_asked_in_the_thread(name: str) -> None:
    """A receiver of a signal may, and its connection is closed."""
    seen: list[Any] = []

    def ask(**values: Any) -> None:
        seen.append((threading.current_thread().name, Job.objects.count()))

    signals.lease_lost.connect(ask)
    try:
        before = count_sessions()
        lease = renewed(name, ttl=0.1, renew=0.1)
        wait_until(lambda: seen)
        wait_until(lambda: not renewing())
    finally:
        signals.lease_lost.disconnect(ask)

    assert lease.lost
    assert seen == [("fencing-announcement", 0)]
    wait_until(lambda: count_sessions() <= before)


def test_a_renewal_does_not_cross_a_release(name: str) -> None:
    """One of them is made, then the other: a release that was made is no loss."""
    extend, release = RedisStore.extend, RedisStore.release
    asked, go_on = threading.Event(), threading.Event()

    def slow(self: Any, *args: Any, **options: Any) -> bool:
        asked.set()
        assert go_on.wait(SECONDS)
        return extend(self, *args, **options)

    def released(self: Any, *args: Any, **options: Any) -> bool:
        assert go_on.is_set()
        return release(self, *args, **options)

    with heard("lease_lost", "lease_released") as events:
        with mock.patch.object(RedisStore, "extend", slow):
            lease = renewed(name, ttl=0.9)
            assert asked.wait(SECONDS)
            with mock.patch.object(RedisStore, "release", released):
                threading.Timer(0.1, go_on.set).start()
                assert lease.release()
        time.sleep(0.4)  # in which it would be renewed

    assert [event for event, _ in events] == ["lease_released"]


def test_a_lease_that_cannot_be_given_back_is_renewed_no_more(name: str, client: Any) -> None:
    """The log says that it will run out, and so it does."""
    unavailable = StoreUnavailable("away", resource=name)
    with (
        mock.patch.object(RedisStore, "release", side_effect=unavailable),
        fenced_lock(name, ttl=0.6, renew=True, register=False) as lease,
    ):
        pass

    wait_until(lambda: not client.exists(keys_of(name).lease))
    assert not lease._is_renewed


def leave_the_program(*args: Any, **values: Any) -> None:
    sys.exit(3)


@pytest.mark.parametrize("where", ["on_lost", "a receiver"])
def test_what_is_raised_in_an_announcement_ends_no_renewal(
    name: str, client: Any, where: str
) -> None:
    """Not even SystemExit."""
    if where == "a receiver":
        signals.lease_lost.connect(leave_the_program)
    try:
        on_lost = leave_the_program if where == "on_lost" else None
        lost = renewed(f"{name}:lost", ttl=0.3, on_lost=on_lost)
        other = renewed(name)
        expire(client, lost.resource)
        wait_until(lambda: lost.lost)
        assert_goes_on(client, name)
        assert other.release()
    finally:
        signals.lease_lost.disconnect(leave_the_program)


def assert_goes_on(client: Any, name: str, seconds: float = 1.5) -> None:
    """Check that the lease is held for so long."""
    end = now() + seconds
    while now() < end:
        assert client.pttl(keys_of(name).lease) > 0
        time.sleep(0.01)


def test_an_error_of_what_the_settings_name_ends_no_renewal(name: str, client: Any) -> None:
    """It is as good as an outage."""
    failures = [RuntimeError("no client today")]

    def factory() -> Any:
        if threading.current_thread().name == "fencing-renewal" and failures:
            raise failures.pop()
        return client

    with override_settings(FENCING={"CLIENT_FACTORY": factory}):
        lease = renewed(name)
        assert_goes_on(client, name)
        assert lease.release()
    assert not failures


def test_a_thread_that_could_not_start_may_start_the_next_time(name: str, client: Any) -> None:
    """The acquisition fails, and leaves nothing."""
    start = threading.Thread.start
    with (
        mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no more threads")),
        pytest.raises(RuntimeError, match="no more"),
    ):
        renewed(name)
    assert threading.Thread.start is start
    assert not client.exists(keys_of(name).lease)

    lease = renewed(name)
    assert_goes_on(client, name)
    assert lease.release()


def test_a_lease_whose_registration_took_long_is_renewed_in_time(job: Job) -> None:
    """A third of the ttl counts from the grant."""
    locked, go_on = threading.Event(), threading.Event()

    def lock_row() -> None:
        with transaction.atomic():
            Job.objects.select_for_update().get(pk=job.pk)
            locked.set()
            go_on.wait(0.7)

    with in_background(lock_row):
        assert locked.wait(SECONDS)
        with fenced_lock(job, ttl=0.9, renew=True) as lease:
            end = now() + 1
            while now() < end:
                assert not lease.lost
                time.sleep(0.01)


def test_what_the_holder_shortens_is_renewed_in_time(name: str, client: Any) -> None:
    """Though it was planned for later."""
    lease = renewed(name, ttl=30)
    lease.extend(0.5)

    assert_goes_on(client, name)
    assert lease.release()


def test_a_callable_that_takes_its_time_holds_up_no_renewal(name: str, client: Any) -> None:
    """It is called in a thread of its own."""
    go_on, called = threading.Event(), threading.Event()

    def wait(lease: Lease) -> None:
        called.set()
        assert go_on.wait(SECONDS)

    lost = renewed(f"{name}:lost", ttl=0.3, on_lost=wait)
    other = renewed(name)
    expire(client, lost.resource)
    assert called.wait(SECONDS)
    assert_goes_on(client, name)
    go_on.set()
    assert other.release()


def test_a_loss_is_told_where_no_thread_can_start(name: str, client: Any) -> None:
    """By the one that renews, then."""
    start, told = threading.Thread.start, []

    def start_no_other(thread: threading.Thread) -> None:
        if thread.name == "fencing-announcement":
            raise RuntimeError("no more threads")
        start(thread)

    lease = renewed(
        name, ttl=0.3, on_lost=lambda lease: told.append(threading.current_thread().name)
    )
    with mock.patch.object(threading.Thread, "start", start_no_other):
        expire(client, name)
        wait_until(lambda: told)

    assert lease.lost
    assert told == ["fencing-renewal"]


HANDLER = """
import os, signal, time
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django; django.setup()
from unittest import mock
from django_fencing.locks import fenced_lock
from django_fencing.stores.redis import RedisStore

lease = fenced_lock("{NAME}", ttl=5, register=False).acquire()
extend = RedisStore.extend

def slow(*args, **options):
    signal.raise_signal(signal.SIGTERM)
    return extend(*args, **options)

signal.signal(signal.SIGTERM, lambda *args: print(lease.release(), flush=True))
with mock.patch.object(RedisStore, "extend", slow):
    try:
        lease.extend()
    except Exception as error:
        print(type(error).__name__)
"""


def test_a_signal_handler_may_release(name: str, client: Any) -> None:
    """Also in the middle of another call of the same lease."""
    ran = run_program(HANDLER, name)

    assert (ran.stdout, ran.stderr) == ("True\nLeaseLost\n", "")
    assert not client.exists(keys_of(name).lease)


@pytest.mark.parametrize("fault", ["no scripts", "a pause", "both"])
def test_a_lease_outlives_faults_of_the_server_that_are_shorter(
    name: str, private_redis: Any, fault: str
) -> None:
    """Its scripts may be gone at each renewal, and it may stand still for longer than one waits."""
    lease = renewed(name, ttl=3)
    for _ in range(3):
        if fault != "a pause":
            private_redis.script_flush()
        if fault != "no scripts":
            private_redis.client_pause(1200)
        time.sleep(1.6)
    assert private_redis.pttl(keys_of(name).lease) > 0
    assert lease.release()


def test_a_server_that_forgets_everything_ends_the_lease(
    name: str, private_redis: Any, private_services: Any
) -> None:
    """As one that is restarted without persistence: it is told, and the next one is granted."""
    lost: list[Any] = []
    with fenced_lock(name, ttl=0.9, renew=True, on_lost=lost.append) as lease:
        private_services.restart_valkey()
        wait_until(lambda: lost)
        with fenced_lock(name) as successor:
            assert successor.token > lease.token
        with pytest.raises(StaleToken), lease.atomic():
            pass


SLEEPER = """
import os, signal, sys, time
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django; django.setup()
from django_fencing.locks import fenced_lock
with fenced_lock("{NAME}", ttl=0.6, renew=True, register=False) as lease:
    print("held", flush=True)
    sys.stdin.readline()
    print(lease.lost, flush=True)
    sys.stdin.readline()
"""


def test_a_process_that_stood_still_finds_its_lease_lost(name: str, client: Any) -> None:
    """The thread does not make it anew, nor takes it from the next one."""
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER.replace("{NAME}", name)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as sleeper:
        assert sleeper.stdin is not None
        assert sleeper.stdout is not None
        try:
            assert sleeper.stdout.readline() == "held\n"
            sleeper.send_signal(signal.SIGSTOP)
            wait_until(lambda: not client.exists(keys_of(name).lease))
            lease = acquired(name, ttl=30)
            sleeper.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            print("", file=sleeper.stdin, flush=True)
            assert sleeper.stdout.readline() == "True\n"
            assert 20_000 < client.pttl(keys_of(name).lease) <= 30_000
            print("", file=sleeper.stdin, flush=True)
            assert sleeper.wait(SECONDS) == 0
        finally:
            sleeper.kill()
    assert lease.release()


EXIT = """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django; django.setup()
from django_fencing.locks import fenced_lock
lease = fenced_lock("{NAME}", ttl=0.9, renew=True, register=False).acquire()
import time; time.sleep(0.7)
"""


def test_a_program_may_end_while_it_renews(name: str, client: Any) -> None:
    """Without a word, and the lease runs out."""
    ran = run_program(EXIT, name)

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    wait_until(lambda: not client.exists(keys_of(name).lease))


# Loss


def test_a_loss_is_told_to_its_callable_once(name: str, client: Any) -> None:
    """By whatever it is found out, in the thread that finds it out."""
    lost: list[Any] = []
    with fenced_lock(name, on_lost=lost.append) as lease:
        expire(client, name)
        assert not lost
        for ask in (lease.ensure_held, lease.extend, lease.ensure_held):
            with pytest.raises(LeaseLost):
                ask()

    assert lost == [lease]


def test_a_refused_token_is_told_to_the_callable(name: str, client: Any) -> None:
    """The database has found it out."""
    lost: list[Any] = []
    older = fenced_lock(name, on_lost=lost.append).acquire()
    taken_over(fenced_lock(name), client).release()

    with pytest.raises(StaleToken), older.atomic():
        pass

    assert lost == [older]


def test_a_callable_that_raises_changes_nothing(name: str, client: Any, caplog: Any) -> None:
    """It is logged."""

    def fail(lease: Lease) -> None:
        raise KeyError(lease.resource)

    with fenced_lock(name, on_lost=fail):
        expire(client, name)

    assert f"on_lost_failed resource={name}" in caplog.text
    fenced_lock(name).acquire().release()


def test_a_release_in_time_is_no_loss(name: str) -> None:
    """Nothing is told."""
    lost: list[Any] = []
    with fenced_lock(name, on_lost=lost.append):
        pass

    assert not lost


# Child processes


@contextmanager
def forked() -> Iterator[bool]:
    """Fork, run the block in both, and check that the child's has raised nothing."""
    connections.close_all()
    pid = os.fork()
    if pid:
        yield False
        deadline = time.monotonic() + SECONDS
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        assert ended[1] == 0
        return
    code = 1
    try:
        yield True
        code = 0
    finally:
        os._exit(code)


def test_a_child_process_does_nothing_with_the_lease_of_its_parent(name: str, client: Any) -> None:
    """It neither renews, releases, extends, writes nor enters it again; the parent holds it."""
    with fenced_lock(name, ttl=0.6, renew=True) as lease:
        with forked() as child:
            if child:
                assert not renewing()
                assert lease.lost
                assert lease.remaining == 0
                assert not lease.release()
                for use in (lease.extend, lease.ensure_held, lease.atomic().__enter__):
                    with pytest.raises(LeaseLost, match=f"process {os.getppid()}"):
                        use()
                with pytest.raises(LockHeld), fenced_lock(name, register=False):
                    pass
                with fenced_lock(f"{name}:child", ttl=0.3, renew=True, register=False) as own:
                    wait_until(lambda: own._age > 0.7)
                    own.ensure_held()
                time.sleep(1)  # longer than the ttl: a thread of the child would have renewed
        lease.ensure_held()
        assert 0 < client.pttl(keys_of(name).lease) <= 600

    assert not client.exists(keys_of(name).lease)


def test_a_child_that_leaves_the_block_of_its_parent_releases_nothing(
    name: str, client: Any
) -> None:
    """As multiprocessing does by an exception; in a fenced transaction too."""
    with fenced_atomic(name):
        pass
    lock = fenced_lock(name)
    with lock as lease:
        with forked() as child:
            if child:
                lock.__exit__(None, None, None)
                lease._leave(None)
        assert client.hget(keys_of(name).lease, "holder") == lease.holder.id.hex
        assert flow.held() == [lease]


# Green threads

GEVENT = """
from gevent import monkey; monkey.patch_all()
import threading, time
import os; os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django; django.setup()
import gevent
from django_fencing.locks import fenced_lock

def work(number):
    with fenced_lock(f"{NAME}:{number % 2}", ttl=0.3, wait=20, renew=True, register=False) as lease:
        time.sleep(0.7)
        lease.ensure_held()
        return lease.token

jobs = [gevent.spawn(work, number) for number in range(6)]
gevent.joinall(jobs, timeout=20, raise_error=True)
assert sorted(job.value for job in jobs) == [1, 1, 2, 2, 3, 3], [job.value for job in jobs]
time.sleep(0.3)
assert not [one for one in threading.enumerate() if one.name == "fencing-renewal"]
print("done")
"""


def test_leases_are_renewed_and_waited_for_under_gevent(name: str) -> None:
    """Where threads are green: none of them blocks the others."""
    ran = run_program(GEVENT, name)

    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


def test_a_lease_is_renewed_through_a_cache_that_closes_its_connections(
    name: str, private_redis: Any, private_services: Any
) -> None:
    """As DJANGO_REDIS_CLOSE_CONNECTION does at the end of each request."""
    from django.core.cache import caches

    url = f"{private_services.redis_url}"
    with cache_at(url, CLOSE_CONNECTION=True):
        lease = renewed(name, ttl=0.3)
        end = now() + 1
        while now() < end:
            caches["default"].close()
            assert private_redis.pttl(keys_of(name).lease) > 0
            time.sleep(0.005)
        assert lease.release()
