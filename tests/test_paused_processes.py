"""Real processes that are stopped for longer than their lease, and go on as if nothing had been."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.core.cache import caches
from django.db import connection

from django_fencing.exceptions import LeaseLost, LockHeld, StaleToken
from django_fencing.locks import fenced_atomic, fenced_lock
from tests.helpers import SECONDS, commit, committing, started, wait_until, waits_for_row
from tests.replica import Work, by_fenced_lock
from tests.shop.models import Counter, Job

ROOT = Path(__file__).parents[1]

pytestmark = committing("default")


class Replica:
    """A process of its own, which takes orders and can be stopped."""

    def __init__(self) -> None:
        self.busy = False
        database = urlsplit(os.environ["DATABASE_URL"])
        paths = [str(ROOT), str(ROOT / "example_project")]
        environment = {
            "DATABASE_URL": database._replace(path=f"/{connection.settings_dict['NAME']}").geturl(),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error", "-m", "tests.replica"],
            bufsize=0,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        # A line that is sent before it reads could be swallowed together with the next one.
        assert self.tells() == {"ready": True}

    def order(self, name: str, **arguments: Any) -> None:
        """Begin to do something."""
        self.busy = True
        self.write(json.dumps([name, arguments]))

    def add_one(self, work: Work, way: str = "by_fenced_lock") -> None:
        """Begin to add one."""
        self.order("add_one", way=way, point="", **arguments(work))

    def add_one_up_to(self, point: str, work: Work, way: str = "by_fenced_lock") -> None:
        """Begin to add one, and wait until it stands at a point."""
        # On a busy machine a short lease may run out before it is registered.
        attempts = (self._attempt(point, work, way) for _ in range(20))
        assert next(told for told in attempts if told != {"end": "LockHeld"}) == {"at": point}

    def _attempt(self, point: str, work: Work, way: str) -> Any:
        self.order("add_one", way=way, point=point, **arguments(work))
        return self.tells()

    def go_on(self) -> None:
        """Let it go on from its point, as soon as it runs."""
        self.write("")

    def write(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n".encode())

    def end(self) -> Any:
        """Wait for its result."""
        report = self.tells()
        self.busy = False
        return report["end"]

    def tells(self) -> Any:
        ready, _, _ = select.select([self.process.stdout], [], [], 2 * SECONDS)
        assert ready, "The replica says nothing."
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        """Stop it as a debugger or a frozen container does, and wait until it stands."""
        self.process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Let it end; kill it in the middle of its work."""
        if self.busy:
            self.process.kill()
        self.process.stdin.close()
        try:
            self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self.process.stdout.close()
            self.process.wait()


def arguments(work: Work) -> dict[str, Any]:
    given = asdict(work)
    _, given["job"] = given.pop("resource")
    return given


@pytest.fixture(scope="module")
def pool(django_db_setup: None) -> Iterator[list[Replica]]:
    """Yield what keeps replicas from test to test, for they take a while to start."""
    found: list[Replica] = []
    yield found
    for replica in found:
        replica.close()


@pytest.fixture
def two_replicas(pool: list[Replica], transactional_db: None) -> Iterator[list[Replica]]:
    """Yield two replicas. One that a failed test leaves behind, or has killed, is replaced."""
    while len(pool) < 2:
        pool.append(Replica())
    yield list(pool)
    for replica in list(pool):
        if replica.busy:
            pool.remove(replica)
            replica.close()


@pytest.fixture
def work(transactional_db: None) -> Work:
    """Return a value of 0 that a row protects."""
    return Work(resource=(Job, Job.objects.create().pk), pk=Counter.objects.create().pk)


def run_out(client: Any, key: str) -> None:
    """Wait until a lease has run out by itself."""
    wait_until(lambda: not client.exists(key))


def test_a_stopped_process_wakes_up_stale_and_writes_nothing(two_replicas, work, client):
    """Twenty times, at two points: the data and the fence are the newer holder's."""
    a, b = two_replicas

    for round_ in range(1, 21):
        point = ("acquired", "read")[round_ % 2]
        a.add_one_up_to(point, replace(work, ttl=0.1))
        a.stop()
        run_out(client, work.lease)
        b.add_one(work)
        assert b.end() == "committed"
        fence = work.fence

        a.go_on()
        a.resume()

        assert a.end() == "StaleToken"
        assert (work.value, work.fence) == (round_, fence)


def test_a_process_that_stopped_before_it_registered_does_not_even_begin(
    two_replicas, work, client
):
    """The store says that its lease is gone."""
    a, b = two_replicas
    a.add_one_up_to("acquired", replace(work, ttl=0.1), "by_unregistered_lock")
    a.stop()
    run_out(client, work.lease)
    b.add_one(work)
    assert b.end() == "committed"

    a.go_on()
    a.resume()

    assert a.end() == "LeaseLost"
    assert work.value == 1


def test_a_process_that_stopped_under_a_plain_lock_overwrites_the_newer_value(two_replicas, work):
    """The twin: the same pause, without the fence, loses an update."""
    a, b = two_replicas
    a.add_one_up_to("read", replace(work, ttl=0.1), "by_plain_lock")
    a.stop()
    wait_until(lambda: work.plain_lock not in caches["default"])
    b.add_one(work, way="by_plain_lock")
    assert b.end() == "committed"

    a.go_on()
    a.resume()

    assert a.end() == "committed"
    assert work.value == 1


def test_processes_that_are_stopped_at_any_moment_lose_no_update(two_replicas, work):
    """Both count all the time, and twenty-five times one stands still for longer than its ttl."""
    chance = random.Random(work.pk)
    for seed, replica in enumerate(two_replicas):
        replica.order("add_many", seed=seed, **arguments(replace(work, ttl=0.03)))

    for _ in range(25):
        replica = chance.choice(two_replicas)
        time.sleep(chance.uniform(0, 0.03))  # the moment at which it is stopped
        replica.stop()
        time.sleep(chance.uniform(0.03, 0.08))  # for how long it stands
        replica.resume()
    wait_until(lambda: work.value > 25)  # a busy machine may get less done meanwhile
    for replica in two_replicas:
        replica.go_on()
    ends = sum((Tally(replica.end()) for replica in two_replicas), Tally())

    assert ends.keys() <= {"committed", "LockHeld", "StaleToken", "LeaseLost"}
    assert work.value == ends["committed"] > 25


@pytest.mark.parametrize("stopped", ["by_fenced_lock", "by_fenced_atomic"])
@pytest.mark.parametrize("way", ["fenced_lock", "fenced_atomic"])
def test_a_process_that_stopped_in_its_transaction_holds_nobody_up(
    two_replicas, work, client, stopped, way
):
    """Others are refused within two seconds and give their lease back; with `wait` they wait on.

    They go on as soon as the stopped one does, which commits first.
    """
    a, _ = two_replicas
    a.add_one_up_to("written", replace(work, ttl=0.1), stopped)
    a.stop()
    run_out(client, work.lease)

    began = time.monotonic()
    with pytest.raises(LockHeld, match="a transaction kept its row locked for 1 s"):
        read_under_lock(work, way, wait=0)
    assert time.monotonic() - began < 2
    assert not client.exists(work.lease)

    with started(lambda _: read_under_lock(work, way, wait=3)) as b:
        wait_until(waits_for_row)
        assert client.exists(work.lease)
        a.go_on()
        a.resume()
        assert a.end() == "committed"
        assert b.finish() == 1


def read_under_lock(work: Work, way: str, wait: float) -> int:
    """Return the value as a new holder finds it."""
    if way == "fenced_atomic":
        with fenced_atomic(work.resource, wait=wait):
            return work.value
    with fenced_lock(work.resource, wait=wait):
        return work.value


def test_a_stopped_process_that_nobody_overtook_may_still_commit(two_replicas, work, client):
    """The fence decides, not the clock."""
    a, _ = two_replicas
    for point in ("acquired", "read", "written"):
        a.add_one_up_to(point, replace(work, ttl=0.1))
        a.stop()
        run_out(client, work.lease)

        a.go_on()
        a.resume()

        assert a.end() == "committed"
    assert work.value == 3


def test_an_extension_after_a_pause_never_brings_a_lease_back(work, client):
    """It says that the lease is lost, and yet the work commits if nobody came in between."""
    for overtaken in (False, True):
        lease = fenced_lock(work.resource, ttl=0.05).acquire()
        run_out(client, work.lease)
        with pytest.raises(LeaseLost, match="it ran out"):
            lease.extend(60)
        assert not client.exists(work.lease)
        assert lease.lost
        if overtaken:
            by_fenced_lock(lambda here: None, work)
            with pytest.raises(StaleToken):
                commit(lease, partial(work.write, 99))
        else:
            with lease.atomic():
                work.write(work.value + 1)

    assert work.value == 2


def test_a_process_that_is_killed_leaves_nothing(work, client):
    """Its transaction is rolled back, and its lease runs out."""
    with closing(Replica()) as a:
        a.add_one_up_to("written", replace(work, ttl=0.5))

        a.process.kill()

        with fenced_lock(work.resource, wait=SECONDS) as lease:
            assert (work.value, lease.token) == (0, 2)


def test_forked_processes_share_neither_connections_nor_identities(two_replicas, name):
    """Eight children of one that has used Redis: each grant has a higher token and a new holder."""
    a, _ = two_replicas
    a.order("fork", children=8, rounds=100, resource=name)
    grants = a.end()

    tokens, holders, pids = zip(*grants, strict=True)
    assert len(grants) == len(set(holders)) == 800
    assert all(token < later for token, later in pairwise(tokens))
    assert len(set(pids)) == 8
