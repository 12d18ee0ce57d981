"""Giving a lease back, and extending it: never another holder's, and safe to repeat."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from django_fencing import flow
from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import LeaseLost, LockHeld, StaleToken, StoreUnavailable
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from tests.helpers import (
    acquired,
    assert_held_by,
    cache_at,
    counted_calls,
    expire,
    in_threads,
    keys_of,
    monitored,
    taken_over,
    wait_until,
)
from tests.proxy import REPEATING, Fault, Proxy
from tests.shop.models import Job

# Shared by all tests of this module, as a definition at module level may be.
SHARED = fenced_lock("shared by the threads", register=False, ttl=30)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the app's warnings, and check that it logged nothing worse."""
    records = [record for record in caplog.records if record.name == "django_fencing"]
    assert {record.levelname for record in records} <= {"WARNING"}
    return [record.getMessage() for record in records]


# A lease that is over


def test_a_late_release_leaves_the_successors_lease(name: str, client: Any) -> None:
    """The first holder overruns its ttl, the second has the lock, and a third is refused."""
    late = acquired(name, ttl=0.05)
    wait_until(lambda: not client.exists(keys_of(name).lease))
    successor = acquired(name)

    assert late.release() is False

    assert late.lost
    assert_held_by(successor, client)
    with pytest.raises(LockHeld):
        acquired(name)


@pytest.mark.parametrize("action", [Lease.extend, Lease.ensure_held])
def test_an_overtaken_lease_cannot_be_extended(
    name: str, client: Any, action: Callable[[Lease], None]
) -> None:
    """It is LeaseLost, and the successor's lease has neither changed hands nor its end."""
    late = acquired(name, ttl=80)
    successor = taken_over(fenced_lock(name, ttl=30, register=False), client)

    with pytest.raises(LeaseLost, match="another holder has it") as caught:
        action(late)

    assert (caught.value.resource, caught.value.token) == (name, late.token)
    assert late.lost
    assert not successor.lost
    assert_held_by(successor, client)


def test_an_extension_does_not_bring_a_lapsed_lease_back(name: str, client: Any) -> None:
    """Somebody may have held the resource in between, so it stays free."""
    lease = acquired(name)
    expire(client, name)

    with pytest.raises(LeaseLost):
        lease.extend(60)

    assert not client.exists(keys_of(name).lease)
    assert lease.lost
    assert lease.release() is False


def test_a_released_lease_asks_nothing_more(name: str, client: Any) -> None:
    """A second release gives the first one's answer; what else it may do is refused."""
    lease = acquired(name)
    assert lease.release() is True
    successor = acquired(name)

    with counted_calls() as calls:
        assert lease.release() is True
        for action in (lease.extend, lease.ensure_held):
            with pytest.raises(LeaseLost, match="it was released"):
                action()

    assert calls == []
    assert_held_by(successor, client)


def test_a_waiter_that_gave_up_sends_nothing_that_deletes(name: str, client: Any) -> None:
    """Without a lease there is nothing to release, whatever its clean-up does."""
    holder = acquired(name)

    def wait_in_vain() -> None:
        with fenced_lock(name, wait=0.1, register=False):
            pytest.fail("The body ran.")

    with counted_calls() as calls, monitored(client) as commands:
        (refused,) = in_threads(wait_in_vain)

    assert isinstance(refused, LockHeld)
    assert set(calls) <= {"EVALSHA", "EVAL", "BLPOP", "MONITOR", "ECHO"}
    mine = [command for command in commands if keys_of(name).lease in command]
    assert mine
    assert not {"DEL", "UNLINK", "EXPIRE", "PEXPIRE"} & {command[0] for command in mine}
    assert_held_by(holder, client)


# A release whose answer is lost


@pytest.mark.parametrize("fault", [Fault.REQUEST_LOST, Fault.REPLY_LOST])
def test_a_release_that_got_no_answer_can_be_repeated(
    name: str, proxy: Proxy, private_redis: Any, fault: Fault
) -> None:
    """Whether the server had freed the lock or not: the second call does, and the third rests."""
    lease = acquired(name)
    proxy.plan.append(fault)
    with pytest.raises(StoreUnavailable, match=f"Cannot release '{name}'"):
        lease.release()

    assert lease.release() is True

    assert not private_redis.exists(keys_of(name).lease)
    assert lease.release() is True
    assert not lease.lost


def test_a_repeated_release_leaves_the_successors_lease(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The server had freed the lock, and somebody was quicker than the repetition."""
    lease = acquired(name)
    proxy.plan.append(Fault.REPLY_LOST)
    with pytest.raises(StoreUnavailable):
        lease.release()
    successor = acquired(name)

    lease.release()

    assert_held_by(successor, private_redis)


def test_a_repeated_release_of_a_lease_that_has_ended_says_so(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The key is gone, but it may have run out before."""
    lease = acquired(name, ttl=0.05)
    proxy.plan.append(Fault.REQUEST_LOST)
    with pytest.raises(StoreUnavailable):
        lease.release()
    wait_until(lambda: lease.remaining == 0 and not private_redis.exists(keys_of(name).lease))

    assert lease.release() is False

    assert lease.lost


@pytest.mark.parametrize("fault", [Fault.REQUEST_LOST, Fault.REPLY_LOST])
def test_leaving_a_block_repeats_a_release_that_got_no_answer(
    name: str,
    proxy: Proxy,
    private_redis: Any,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
) -> None:
    """The lock is free at once, and nobody need hear of it."""
    with fenced_lock(name, register=False) as lease:
        proxy.plan.append(fault)

    assert not private_redis.exists(keys_of(name).lease)
    assert not lease.lost
    assert warnings_in(caplog) == []


def test_a_release_that_redis_py_repeats_is_a_release(
    name: str, proxy: Proxy, private_redis: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A client with retries runs the script twice and hides it: the lease was held until then."""
    with cache_at(proxy.url, CONNECTION_POOL_KWARGS=REPEATING):
        with fenced_lock(name, register=False) as lease:
            proxy.plan.append(Fault.REPLY_LOST)

        assert lease.release() is True

    assert not private_redis.exists(keys_of(name).lease)
    assert not lease.lost
    assert warnings_in(caplog) == []


def test_threads_that_release_at_once_send_one_release(name: str) -> None:
    """Each of them gets the same answer."""
    lease = acquired(name)

    with counted_calls() as calls:
        answers = in_threads(*[lease.release] * 5)

    assert answers == [True] * 5
    assert len(calls) <= 2  # EVALSHA, and EVAL where the server does not know the script


# The end of a block


class Failure(BaseException):
    """What a body raises: not even an Exception."""


def lapse(name: str, client: Any, proxy: Proxy) -> None:
    """The lease runs out during the block."""
    expire(client, name)


def take_over(name: str, client: Any, proxy: Proxy) -> None:
    """The lease runs out and another holder registers during the block."""
    expire(client, name)
    in_threads(fenced_lock(name).acquire)


def hang_up(name: str, client: Any, proxy: Proxy) -> None:
    """Redis cannot be reached at the end of the block."""
    proxy.hang_up()


def lock(name: str, body: Callable[[], None]) -> None:
    """Run `body` under the lock, outside of any transaction."""
    with fenced_lock(name):
        body()


def atomic(name: str, body: Callable[[], None]) -> None:
    """Run `body` as one fenced transaction."""
    with fenced_atomic(name):
        body()


def decorated(name: str, body: Callable[[], None]) -> None:
    """Run `body` as a decorated function."""
    with_fenced_lock(name)(body)()


def decorated_with_lease(name: str, body: Callable[[], None]) -> None:
    """Run `body` in a decorated function that opens its own transactions."""

    @with_fenced_lock(name)
    def function(*, lease: Lease) -> None:
        body()

    function()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("run", [lock, atomic, decorated, decorated_with_lease])
@pytest.mark.parametrize("fault", [lapse, hang_up])
def test_the_bodys_own_exception_survives(
    name: str,
    proxy: Proxy,
    private_redis: Any,
    caplog: pytest.LogCaptureFixture,
    run: Callable[..., None],
    fault: Callable[..., None],
) -> None:
    """The very object is raised, and what became of the lease is one warning."""
    failure = Failure("of the body")

    def body() -> None:
        fault(name, private_redis, proxy)
        raise failure

    with pytest.raises(Failure) as caught:
        run(name, body)

    assert caught.value is failure
    assert failure.__cause__ is None
    (warning,) = warnings_in(caplog)
    assert f"resource={name} token=1 " in warning
    assert name not in [lease.resource for lease in flow.held()]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("fault", [lapse, take_over, hang_up])
def test_a_committed_success_stays_a_success(
    name: str,
    job: Job,
    proxy: Proxy,
    private_redis: Any,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[..., None],
) -> None:
    """The lease ends after the commit and before the block: one warning, and no exception."""
    with fenced_lock(name) as lease:
        with lease.atomic():
            Job.objects.update(amount=11)
        fault(name, private_redis, proxy)

    assert Job.objects.get().amount == 11
    assert lease.lost or fault is hang_up
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"lease_lost resource={name} token=1 reason=")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("fault", [lapse, hang_up])
def test_a_decorated_function_still_returns(
    name: str,
    job: Job,
    proxy: Proxy,
    private_redis: Any,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[..., None],
) -> None:
    """Its transaction commits under the fence, whatever became of the lease."""

    @with_fenced_lock(name)
    def work() -> Lease:
        Job.objects.update(amount=11)
        fault(name, private_redis, proxy)
        return current_lease()

    lease = work()

    assert Job.objects.get().amount == 11
    assert lease.lost or fault is hang_up
    assert len(warnings_in(caplog)) == 1


@pytest.mark.django_db(transaction=True)
def test_a_stale_token_is_raised_from_the_block(
    name: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A write that was refused is no success: the error says all, and no warning repeats it."""
    leases = []

    def work() -> None:
        with fenced_lock(name) as lease:
            expire(client, name)
            leases.extend([lease, *in_threads(fenced_lock(name, ttl=30).acquire)])
            with lease.atomic():
                pytest.fail("The body ran.")

    with pytest.raises(StaleToken):
        work()

    lease, successor = leases
    assert lease.lost
    assert warnings_in(caplog) == []
    assert_held_by(successor, client)


# Threads


def test_threads_that_share_a_definition_release_their_own_leases(client: Any) -> None:
    """One overruns, the other takes the lock through the same object, the first leaves."""
    overrun, left = threading.Event(), threading.Event()
    leases: dict[str, Lease] = {}

    def overrunning() -> None:
        with SHARED as leases["first"]:
            expire(client, SHARED.resource)
            overrun.set()
            assert second_entered.wait(20)
        left.set()

    second_entered = threading.Event()

    def succeeding() -> None:
        assert overrun.wait(20)
        with SHARED as leases["second"]:
            second_entered.set()
            assert left.wait(20)
            assert_held_by(leases["second"], client)

    results = in_threads(overrunning, succeeding)

    assert results == [None, None]
    assert leases["first"].holder.id != leases["second"].holder.id
    assert leases["first"].lost
    assert not leases["second"].lost
    assert not client.exists(keys_of(SHARED.resource).lease)


def test_a_lease_works_in_any_thread(name: str, client: Any) -> None:
    """It knows its holder: a worker extends and releases what the main thread acquired."""
    lease = acquired(name, ttl=5)

    with ThreadPoolExecutor(1) as worker:
        worker.submit(lease.extend, 30).result()
        worker.submit(lease.ensure_held).result()
        assert_held_by(lease, client)
        assert worker.submit(lease.release).result() is True

    assert not client.exists(keys_of(name).lease)
    assert lease not in flow.held()


# Extending


@pytest.mark.parametrize("length", [20, 20.0, Decimal(20), timedelta(seconds=20)], ids=repr)
def test_an_extension_sets_the_end_and_never_adds(name: str, client: Any, length: Any) -> None:
    """The lease ends that long from now, sooner or later than before, however often it is said."""
    lease = acquired(name, ttl=80)

    for _ in range(3):
        lease.extend(length)

    assert 15_000 < client.pttl(keys_of(name).lease) <= 20_000
    assert 15 < lease.remaining <= 20
    assert lease.ttl == 20


def test_an_extension_that_says_nothing_repeats_the_last_length(name: str, client: Any) -> None:
    """It is the ttl at first, and then what the last extension said."""
    lease = acquired(name, ttl=30)
    client.pexpire(keys_of(name).lease, 5_000)
    lease.extend()
    assert_held_by(lease, client)
    lease.extend(60)
    lease.extend()

    assert 55_000 < client.pttl(keys_of(name).lease) <= 60_000


@pytest.mark.parametrize(
    "value",
    [
        *(0, 0.0, -1, 0.0004, 86_401, 10**400, float("nan"), float("inf"), Decimal("NaN")),
        *(timedelta(0), timedelta(days=2), True, False, "5", b"5", [5], object),
    ],
    ids=lambda value: repr(value)[-24:],
)
def test_odd_extensions_send_nothing(name: str, client: Any, value: Any) -> None:
    """The error names the argument, and the lease stays as it was."""
    lease = acquired(name)

    with counted_calls() as calls, pytest.raises((TypeError, ValueError), match="^ttl must be"):
        lease.extend(value)

    assert calls == []
    assert_held_by(lease, client)
    assert lease.remaining > 25


@pytest.mark.parametrize("fault", [Fault.REQUEST_LOST, Fault.REPLY_LOST])
@pytest.mark.parametrize("length", [5, 30])
def test_an_extension_that_got_no_answer_promises_nothing(
    name: str, proxy: Proxy, private_redis: Any, fault: Fault, length: float
) -> None:
    """Whether the server had run it or not: the lease never believes in more than Redis gives."""
    lease = acquired(name, ttl=15)
    proxy.plan.append(fault)

    with pytest.raises(StoreUnavailable, match=f"Cannot extend '{name}'"):
        lease.extend(length)

    kept = private_redis.pttl(keys_of(name).lease)
    assert lease.remaining * 1000 <= kept + 1
    lease.extend(30)
    assert_held_by(lease, private_redis)
