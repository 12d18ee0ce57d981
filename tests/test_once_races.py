"""once: at the same time, by who was overtaken, and where nobody knows whether it is committed."""

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.db import (
    InterfaceError,
    OperationalError,
    connection,
    connections,
)
from django.db.models import F

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import LeaseLost, LockHeld, OnceMismatch, StaleToken
from django_fencing.leases import current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.once import once, once_result
from tests.helpers import (
    SECONDS,
    closing,
    committing,
    expire,
    in_threads,
    started,
    taken_over,
    wait_until,
    waits_for_row,
)
from tests.proxy import Fault, proxied
from tests.shop.models import Counter, Entry
from tests.work import NOTHING, do, never, record_of, write, written

pytestmark = committing("default")

Pause = Callable[[], None]


# At the same time


@pytest.mark.parametrize("commits", [True, False])
def test_two_leases_do_it_once(name: str, key: str, commits: bool) -> None:
    """The second waits for the first one's transaction: for its result, or to do the work."""

    def first(pause: Pause) -> Any:
        with fenced_atomic(f"{name}:first"):
            once(key, write, "first")
            pause()
            if not commits:
                raise KeyError

    with started(first) as a:
        a.reach_pause()
        with started(lambda _: do(f"{name}:second", key, write, "second")) as b:
            wait_until(waits_for_row)
            assert not b.stands
            a.finish()
            assert b.finish() == {"text": "first" if commits else "second", "entries": 1}

    assert written() == ["first" if commits else "second"]


def test_another_payload_at_the_same_time_is_refused(name: str, key: str) -> None:
    """As soon as the first one has committed."""

    def first(pause: Pause) -> Any:
        with fenced_atomic(f"{name}:first"):
            once(key, write, "first", payload=1)
            pause()

    with started(first) as a:
        a.reach_pause()
        with started(lambda _: do(f"{name}:second", key, never, payload=2)) as b:
            wait_until(waits_for_row)
            assert a.finish() is None
            assert isinstance(b.finish(), OnceMismatch)


def test_other_keys_wait_for_nobody(name: str, key: str) -> None:
    """Under leases of their own."""

    def first(pause: Pause) -> Any:
        with fenced_atomic(f"{name}:first"):
            once(key, write, "first")
            pause()

    with started(first) as a:
        a.reach_pause()
        assert in_threads(partial(do, f"{name}:second", f"{key}:2", write, "second"))
        assert written() == ["second"]


def race(function: Callable[[int], Any], rounds: int) -> list[list[Any]]:
    """Call `function` in two threads at once, again and again, with the number of the round."""
    barrier = threading.Barrier(2)

    def attempt(number: int, which: int) -> Any:
        barrier.wait(SECONDS)
        try:
            return function(2 * number + which)
        except (LockHeld, OperationalError) as error:
            return error

    found = []
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for number in range(rounds):
            races = [first.submit(attempt, number, 0), second.submit(attempt, number, 1)]
            found.append([race.result(SECONDS) for race in races])
        for pool in (first, second):
            pool.submit(closing, int).result(SECONDS)
    return found


def test_two_leases_race_a_hundred_times(name: str, key: str) -> None:
    """One of them has the effect, and both get its result."""

    def one(number: int) -> Any:
        return do(f"{name}:{number % 2}", f"{key}:{number // 2}", write, str(number))["text"]

    for number, results in enumerate(race(one, 100)):
        assert results in ([str(2 * number)] * 2, [str(2 * number + 1)] * 2)
    assert [int(text) // 2 for text in written()] == list(range(100))


@committing("default", "repeatable")
def test_two_leases_race_where_reads_are_repeatable(name: str, key: str) -> None:
    """One has the effect. The other gets its result, or an error by which it may try again."""

    def one(number: int) -> Any:
        resource = f"{name}:{number % 2}"
        return do(resource, f"{key}:{number // 2}", write, str(number), using="repeatable")

    def write(text: str) -> Any:  # through the same connection
        Entry.objects.using("repeatable").create(text=text)
        return text

    results = race(one, 50)

    assert [int(text) // 2 for text in written()] == list(range(50))
    for text, pair in zip(written(), results, strict=True):
        others = [result for result in pair if result != text]
        assert len(others) < 2
        for error in others:
            assert getattr(error.__cause__, "sqlstate", error) == "40001"


@committing("default", "repeatable")
def test_a_claim_that_cannot_be_read_is_an_error_to_try_again(name: str, key: str) -> None:
    """Where the snapshot is older than the other one's commit."""

    def first(pause: Pause) -> Any:
        with fenced_atomic(f"{name}:first"):
            once(key, write, "first")
            pause()

    second = partial(do, f"{name}:second", key, never, using="repeatable")
    with started(first) as a:
        a.reach_pause()
        with started(lambda _: second()) as b:
            wait_until(waits_for_row)
            assert a.finish() is None
            error = b.finish()

    assert isinstance(error, OperationalError)
    assert getattr(error.__cause__, "sqlstate", "") == "40001"
    assert in_threads(second) == [{"text": "first", "entries": 1}]


def raised(text: str, counter: Counter) -> Any:
    """Raise the counter, and return the text."""
    Counter.objects.filter(pk=counter.pk).update(value=F("value") + 1)
    return text


def value(counter: Counter) -> int:
    counter.refresh_from_db()
    return counter.value


def test_ten_threads_do_it_once(name: str, key: str) -> None:
    """All that wait for the lock get one result, although each has a lease of its own."""
    counter = Counter.objects.create()
    tokens = []

    @with_fenced_lock(name, once=key, wait=SECONDS)
    def work(number: int) -> Any:
        tokens.append(current_lease().token)
        return raised(f"by {number}", counter)

    results = in_threads(*(partial(work, number) for number in range(10)))

    assert (value(counter), len(set(results)), len(tokens)) == (1, 1, 1)
    with fenced_lock(name) as lease:
        assert lease.token == 11


def test_without_a_key_a_later_holder_does_it_again(name: str) -> None:
    """The twin: the fence accepts it, because its token is higher."""
    counter = Counter.objects.create()
    work = with_fenced_lock(name, wait=SECONDS)(lambda: raised("", counter))

    work()
    work()
    in_threads(*[work] * 10)

    assert value(counter) == 12


def test_a_late_second_run_does_nothing(name: str, key: str) -> None:
    """Of one period, while the next period is other work; a run that failed is made up for."""
    counter = Counter.objects.create()
    failing = True

    @with_fenced_lock(name, once=key + ":{period}")
    def nightly(period: str) -> Any:
        raised("", counter)
        if failing:
            raise KeyError
        return period

    with pytest.raises(KeyError):
        nightly("2026-11")
    failing = False
    assert [nightly("2026-11"), nightly("2026-11"), nightly("2026-12")] == [
        "2026-11",
        "2026-11",
        "2026-12",
    ]
    assert value(counter) == 2


# Holders that were overtaken


@pytest.mark.parametrize("register", [True, False])
def test_a_stale_holder_leaves_no_record(name: str, key: str, client: Any, register: bool) -> None:
    """Nor any work: its key is free for who has overtaken it."""
    lock = fenced_lock(name, register=register)
    stale = lock.acquire()
    newer = taken_over(lock, client)
    with newer.atomic():
        pass

    def late() -> None:
        with stale.atomic():
            once(key, never)

    with pytest.raises(StaleToken if register else LeaseLost):
        late()
    assert once_result(key, NOTHING) is NOTHING
    with newer.atomic():
        assert once(key, write, "newer")["entries"] == 1
    assert record_of(key).token == newer.token
    newer.release()


def test_a_holder_that_paused_in_its_transaction_is_waited_for(
    name: str, key: str, client: Any
) -> None:
    """Its lease runs out, and who comes next gets its result: it cannot be overtaken there."""

    def slow(pause: Pause) -> Any:
        with fenced_atomic(name):
            once(key, write, "slow")
            pause()

    with started(slow) as a:
        a.reach_pause()
        expire(client, name)
        with started(lambda _: do(name, key, never)) as b:
            wait_until(waits_for_row)
            assert a.finish() is None
            assert b.finish()["text"] == "slow"


def test_a_record_that_is_kept_elsewhere_does_it_twice_or_never(name: str, key: str) -> None:
    """The twin: a key in the cache says after the commit, or before it, what is not so."""

    def work(crash: str) -> None:
        if cache.get(key):
            return
        with fenced_atomic(name):
            write(crash)
            if crash == "before the commit":
                cache.set(key, 1, 60)
                raise KeyError
        if crash == "after the commit":
            raise KeyError
        cache.set(key, 1, 60)

    with suppress(KeyError):
        work("after the commit")
    work("again")
    assert written() == ["after the commit", "again"]
    cache.delete(key)
    with suppress(KeyError):
        work("before the commit")
    work("never")
    assert written() == ["after the commit", "again"]
    cache.delete(key)


# A COMMIT whose outcome nobody knows

KILLED, UNSENT, UNANSWERED = "killed", Fault.REQUEST_LOST, Fault.REPLY_LOST
BreakCommit = Callable[[Any], None]


@pytest.fixture
def breaking_commit(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BreakCommit]:
    """Put a bad line before PostgreSQL, and return what lets the next COMMIT fail, in a world."""
    settings = connection.settings_dict
    if not settings["HOST"].startswith("/"):
        pytest.skip("PostgreSQL has no Unix socket here.")
    socket = f".s.PGSQL.{settings['PORT'] or 5432}"
    plan: list[Fault] = []

    def fault_of(request: bytes) -> Fault:
        return plan.pop() if plan and b"COMMIT" in request else Fault.NONE

    def break_next(world: Any) -> None:
        if world is KILLED:
            pid = connection.connection.info.backend_pid
            with connections["repeatable"].cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        else:
            plan.append(world)

    with (
        tempfile.TemporaryDirectory(prefix="pg-") as folder,
        proxied(f"{settings['HOST']}/{socket}", Path(folder, socket)) as proxy,
    ):
        proxy.fault_of = fault_of  # type: ignore[method-assign]
        connection.close()
        monkeypatch.setitem(settings, "HOST", folder)
        yield break_next
        assert not plan
        connection.close()
        monkeypatch.undo()


def committed(counter: Counter) -> int:
    """Return the value that is there, as another connection sees it."""
    return Counter.objects.using("repeatable").get(pk=counter.pk).value


def in_a_function(name: str, key: str, work: Callable[[], Any]) -> Any:
    return with_fenced_lock(name, once=key)(work)()


def in_a_transaction(name: str, key: str, work: Callable[[], Any]) -> Any:
    with fenced_atomic(name):
        return once(key, work)


def in_a_lock(name: str, key: str, work: Callable[[], Any]) -> Any:
    with fenced_lock(name) as lease, lease.atomic():
        return once(key, work)


def without_once(name: str, key: str, work: Callable[[], Any]) -> Any:
    with fenced_atomic(name):
        return work()


@committing("default", "repeatable")
@pytest.mark.parametrize("way", [in_a_function, in_a_transaction, in_a_lock, without_once])
@pytest.mark.parametrize("world", [KILLED, UNSENT, UNANSWERED])
def test_a_commit_of_unknown_outcome_is_tried_again(
    name: str, key: str, breaking_commit: BreakCommit, way: Any, world: Any
) -> None:
    """It has one effect and one result in each world; without once(), two where it was done."""
    counter = Counter.objects.create()
    texts = iter(["first", "second"])
    worlds = [world]

    def work() -> Any:
        result = raised(next(texts), counter)
        if worlds:
            breaking_commit(worlds.pop())
        return result

    with pytest.raises((OperationalError, InterfaceError)):
        way(name, key, work)
    done = world is UNANSWERED
    assert committed(counter) == done

    result = way(name, key, work)

    twice = done and way is without_once
    assert result == ("first" if done and not twice else "second")
    assert value(counter) == committed(counter) == (2 if twice else 1)
