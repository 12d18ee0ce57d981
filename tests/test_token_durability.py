"""Tokens only grow, whatever Redis loses: the database has the last word, and work goes on."""

import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.cache import caches
from django.test import override_settings
from services import Services

from django_fencing.exceptions import LeaseLost, LockHeld, StaleToken, StoreUnavailable
from django_fencing.grants import JUMP
from django_fencing.leases import Lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence
from django_fencing.resources import ResourceLike, resolve
from tests.helpers import (
    SECONDS,
    expire,
    in_background,
    in_threads,
    keys_of,
    monitored,
    wait_until,
)
from tests.shop.models import Job

HIGHEST = 2**53 - 1


# What Redis may do


@dataclass
class Faulty:
    """A Redis of the test's own, and what may become of one resource in it."""

    services: Services
    client: Any
    resource: ResourceLike
    snapshot: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)

    @property
    def counter(self) -> str:
        return keys_of(self.resource).token

    def flush(self) -> None:
        self.client.flushall()

    def clear_the_cache(self) -> None:
        caches["default"].clear()

    def restart(self) -> None:
        self.services.restart_valkey()

    def lose_the_counter(self) -> None:
        self.client.delete(self.counter)

    def lose_the_lease(self) -> None:
        self.client.delete(keys_of(self.resource).lease)

    def lower_the_counter(self) -> None:
        self.client.set(self.counter, 1)

    def take_snapshot(self) -> None:
        with redis.Redis.from_url(self.services.redis_url) as client:
            for key in client.scan_iter():
                self.snapshot[key] = (client.dump(key), max(0, client.pttl(key)))

    def roll_back(self) -> None:
        """Return to the snapshot, as a replica does that lagged behind and became primary."""
        with redis.Redis.from_url(self.services.redis_url) as client:
            client.flushall()
            for key, (value, ttl) in self.snapshot.items():
                client.restore(key, ttl, value)


Fault = Callable[[Faulty], None]

EVERYTHING_LOST = [Faulty.flush, Faulty.clear_the_cache, Faulty.restart]
LEASE_LOST = [*EVERYTHING_LOST, Faulty.lose_the_lease, Faulty.roll_back]
COUNTER_LOST = [Faulty.lose_the_counter, Faulty.lower_the_counter]

faults = pytest.mark.parametrize("fault", [*LEASE_LOST, *COUNTER_LOST])
faults_of_the_lease = pytest.mark.parametrize("fault", LEASE_LOST)
faults_of_the_counter = pytest.mark.parametrize("fault", COUNTER_LOST)


@pytest.fixture(params=["row", "name"])
def resource(request: pytest.FixtureRequest, job: Job, name: str) -> Callable[[], ResourceLike]:
    """Return what gives the resource at each use: only a fresh row hints at the newest token."""
    return {
        "row": lambda: Job.objects.get(),
        "row loaded before": lambda: job,
        "model and pk": lambda: (Job, job.pk),
        "name": lambda: name,
    }[request.param]


@pytest.fixture
def faulty(
    private_services: Services, private_redis: Any, resource: Callable[[], ResourceLike]
) -> Faulty:
    """Return the Redis in which `resource` has been used three times, with a snapshot of before."""
    faulty = Faulty(private_services, private_redis, resource())
    in_one_transaction(resource())
    faulty.take_snapshot()
    in_one_transaction(resource())
    in_steps(resource())
    return faulty


def in_steps(resource: ResourceLike, wait: float = 0) -> int:
    """Count in a fenced transaction of a lock, and return the token."""
    with fenced_lock(resource, wait=wait) as lease:
        count(lease)
        return lease.token


def in_one_transaction(resource: ResourceLike, wait: float = 0) -> int:
    """Count in one fenced transaction, and return the token."""
    with fenced_atomic(resource, wait=wait) as row:
        Job.objects.update(amount=amount() + 1)
        return row.last_fence_token


def count(lease: Lease) -> None:
    """Write what the lease has read before its transaction: a lost update would show."""
    before = amount()
    with lease.atomic():
        Job.objects.update(amount=before + 1)


def amount() -> int:
    return Job.objects.get().amount


def fence(resource: ResourceLike) -> int:
    """Return the newest token that the database knows."""
    place = resolve(resource)
    return place.model.objects.get(pk=place.pk).last_fence_token


def row_holder(row: Any) -> str:
    """Return the holder that has registered, as Redis writes it."""
    return row.last_fence_holder.hex


# Between two leases


@faults
@pytest.mark.parametrize(
    "resource", ["row", "row loaded before", "model and pk", "name"], indirect=True
)
def test_work_goes_on_after_a_fault(
    resource: Callable[[], ResourceLike], faulty: Faulty, fault: Fault
) -> None:
    """No attempt is refused, and the next tokens are above the fence, without gaps from there."""
    for work in (in_steps, in_one_transaction):
        before, known = amount(), fence(resource())

        fault(faulty)
        token = work(resource())

        tokens = [known, token, *(work(resource()) for _ in range(3))]
        assert tokens == sorted(set(tokens))
        assert tokens[2:] == [token + 1, token + 2, token + 3]
        assert fence(resource()) == tokens[-1] == int(faulty.client.get(faulty.counter))
        assert amount() == before + 4


def test_a_fresh_row_needs_no_second_attempt_at_registering(
    job: Job, private_redis: Any, django_assert_num_queries: Any
) -> None:
    """Its token says where to go on, so that a lost counter costs no statement more."""
    with fenced_lock(job):
        pass
    job.refresh_from_db()
    private_redis.flushall()

    with django_assert_num_queries(1):
        lease = fenced_lock(job).acquire()

    assert lease.token == job.last_fence_token + JUMP
    lease.release()


# While a lease is held


@faults_of_the_lease
@pytest.mark.parametrize("first", ["evicted", "new"])
def test_of_two_holders_exactly_one_writes(
    resource: Callable[[], ResourceLike], faulty: Faulty, fault: Fault, first: str
) -> None:
    """Redis has forgotten a registered lease and granted the next: the newer registration wins."""
    evicted = fenced_lock(resource()).acquire()
    before = amount()

    fault(faulty)
    new = fenced_lock(resource()).acquire()
    for lease in (evicted, new) if first == "evicted" else (new, evicted):
        if lease is new:
            count(lease)
        else:
            with pytest.raises(StaleToken) as caught:
                count(lease)

    assert amount() == before + 1
    assert fence(resource()) == new.token > evicted.token
    assert (caught.value.fence_token, caught.value.fence_holder) == (new.token, new.holder.id)
    assert (evicted.lost, new.lost) == (True, False)
    assert evicted.release() is False
    assert new.release() is True


@faults_of_the_lease
def test_an_unregistered_lease_that_redis_forgot_is_refused(
    resource: Callable[[], ResourceLike], faulty: Faulty, fault: Fault
) -> None:
    """It comes to the database after the newer one, and finds neither its lease nor a token."""
    evicted = fenced_lock(resource(), register=False).acquire()
    fault(faulty)
    new = fenced_lock(resource()).acquire()
    before = amount()

    with pytest.raises(LeaseLost, match="could not be registered"):
        count(evicted)
    count(new)

    assert amount() == before + 1
    assert fence(resource()) == new.token


@faults_of_the_lease
def test_a_lease_that_redis_forgot_may_write_until_it_is_overtaken(
    resource: Callable[[], ResourceLike], faulty: Faulty, fault: Fault
) -> None:
    """Nobody has registered since, so nobody has read what it changes; then the next one does."""
    evicted = fenced_lock(resource()).acquire()
    before = amount()

    fault(faulty)
    count(evicted)
    with pytest.raises(LeaseLost):
        evicted.ensure_held()
    token = in_steps(resource())

    assert token > evicted.token
    assert amount() == before + 2


@faults_of_the_counter
def test_a_holder_does_not_notice_a_lost_counter(
    resource: Callable[[], ResourceLike], faulty: Faulty, fault: Fault
) -> None:
    """Its lease and its registration stand, others stay excluded, and the next token is higher."""
    lease = fenced_lock(resource()).acquire()
    before = amount()

    fault(faulty)
    lease.extend(20)
    lease.ensure_held()
    with pytest.raises(LockHeld):
        fenced_lock(resource()).acquire()
    count(lease)
    assert lease.release() is True
    token = in_steps(resource())

    assert token > lease.token
    assert amount() == before + 2


@faults_of_the_lease
def test_a_transaction_that_redis_forgot_holds_back_the_next(
    resource: Callable[[], ResourceLike], faulty: Faulty, fault: Fault
) -> None:
    """The new lease registers after the open transaction's commit, and reads what it wrote."""
    key = keys_of(resource()).lease
    before = amount()
    forgotten = threading.Event()

    def next_one() -> int:
        assert forgotten.wait(SECONDS)
        return in_one_transaction(resource(), wait=SECONDS)

    with in_background(next_one) as running:
        with fenced_atomic(resource()) as row:
            fault(faulty)
            forgotten.set()
            wait_until(lambda: faulty.client.hget(key, "holder") not in (None, row_holder(row)))
            Job.objects.update(amount=amount() + 1)
            assert not running.done()
        assert running.result() > row.last_fence_token

    assert amount() == before + 2


def test_an_old_snapshot_may_bring_an_old_lease_back(
    resource: Callable[[], ResourceLike], faulty: Faulty
) -> None:
    """Redis swears that it holds, and the database knows better; then work goes on."""
    revived = fenced_lock(resource()).acquire()
    faulty.take_snapshot()
    expire(faulty.client, resource())
    newest = in_steps(resource())
    before = amount()

    faulty.roll_back()
    revived.ensure_held()
    with pytest.raises(StaleToken):
        count(revived)
    with pytest.raises(LockHeld):
        fenced_lock(resource()).acquire()
    expire(faulty.client, resource())

    assert amount() == before
    assert in_steps(resource()) > newest


@pytest.mark.parametrize("register", [True, False])
def test_of_a_revived_and_a_present_holder_exactly_one_writes(
    resource: Callable[[], ResourceLike], faulty: Faulty, register: bool
) -> None:
    """An unregistered one that Redis brings back may still register, and then it is the newest."""
    revived = fenced_lock(resource(), register=register).acquire()
    faulty.take_snapshot()
    expire(faulty.client, resource())
    present = fenced_lock(resource()).acquire()
    before = amount()

    faulty.roll_back()
    winner, loser = (present, revived) if register else (revived, present)
    count(winner)
    with pytest.raises(StaleToken):
        count(loser)

    assert amount() == before + 1
    assert fence(resource()) == winner.token


@pytest.mark.parametrize("fault", EVERYTHING_LOST)
@pytest.mark.parametrize("resource", ["name"], indirect=True)
def test_a_bare_lock_with_a_counter_lets_both_write(
    name: str, faulty: Faulty, fault: Fault
) -> None:
    """The twin without a fence: two holders, one token for both, and a lost update."""
    tokens, seen = [], []

    for _ in range(2):
        assert faulty.client.lock(name, timeout=30).acquire(blocking=False)
        tokens.append(faulty.client.incr(f"{name}:counter"))
        seen.append(amount())
        fault(faulty)
    for before in seen:
        Job.objects.update(amount=before + 1)

    assert tokens == [1, 1]
    assert amount() == seen[0] + 1


@pytest.mark.parametrize("register", [True, False])
@pytest.mark.parametrize("fault", [Faulty.flush, Faulty.roll_back])
def test_whatever_the_order_no_update_is_lost(
    resource: Callable[[], ResourceLike], faulty: Faulty, fault: Fault, register: bool
) -> None:
    """The forgotten holder and new ones race: each that succeeded is counted, no other is."""
    before = amount()
    results = []

    for _ in range(5):
        faulty.client.delete(keys_of(resource()).lease)
        evicted = fenced_lock(resource(), register=register).acquire()
        fault(faulty)
        faulty.client.delete(keys_of(resource()).lease)
        results += in_threads(
            lambda lease=evicted: count(lease),
            lambda: in_steps(resource(), wait=SECONDS),
            lambda: in_one_transaction(resource(), wait=SECONDS),
        )

    failures = [result for result in results if isinstance(result, Exception)]
    assert {type(failure) for failure in failures} <= {StaleToken, LeaseLost}
    assert len(failures) <= 5 * 2
    tokens = [result for result in results if isinstance(result, int)]
    assert len(tokens) == len(set(tokens))
    assert amount() == before + len(results) - len(failures)
    assert in_steps(resource(), wait=SECONDS) > max(tokens)


# What the counter holds


UNREADABLE = {
    "a list": lambda client, key: client.rpush(key, "1", "2"),
    "a hash": lambda client, key: client.hset(key, "token", "3"),
    "a float": lambda client, key: client.set(key, "12.5"),
    "an exponent": lambda client, key: client.set(key, "1e3"),
    "a negative number": lambda client, key: client.set(key, "-4"),
    "a space": lambda client, key: client.set(key, " 4"),
    "a line end": lambda client, key: client.set(key, "4\n"),
    "nothing": lambda client, key: client.set(key, ""),
    "a long number": lambda client, key: client.set(key, "1" * 17),
    "a pickle": lambda client, key: client.set(key, pickle.dumps({"value": 41})),
    "what the cache wrote": lambda client, key: client.set(key, pickle.dumps(41)),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_counter_that_is_no_number_is_refused_and_left_alone(
    name: str, private_redis: Any, private_services: Services, kind: str
) -> None:
    """The error names the key; no lease is left, and the value is the same byte for byte."""
    keys = keys_of(name)
    UNREADABLE[kind](private_redis, keys.token)

    with redis.Redis.from_url(private_services.redis_url) as client:
        value = client.dump(keys.token)
        with monitored(client) as commands:
            for wait in (0, 0.05):
                with (
                    pytest.raises(StoreUnavailable, match=r"key 'fencing:.* no token") as caught,
                    fenced_lock(name, wait=wait, register=False),
                ):
                    pytest.fail("The body ran.")
        assert client.dump(keys.token) == value

    assert keys.token in str(caught.value)
    assert caught.value.resource == name
    assert not private_redis.exists(keys.lease, keys.held)
    assert not [one for one in commands if one[0] in ("DEL", "UNLINK") and keys.lease in one]

    private_redis.delete(keys.token)
    assert fenced_lock(name, register=False).acquire().token == 1


@pytest.mark.django_db(transaction=True)
def test_an_unreadable_counter_stops_registering_too(name: str, private_redis: Any) -> None:
    """The fence is higher, and the store cannot tell a higher token: the body does not run."""
    with fenced_lock(name):
        pass
    lease = fenced_lock(name, register=False).acquire()
    Fence.objects.update(last_fence_token=7)
    private_redis.set(keys_of(name).token, "12.5")

    with pytest.raises(StoreUnavailable, match="holds no token counter"), lease.atomic():
        pytest.fail("The body ran.")

    assert private_redis.get(keys_of(name).token) == "12.5"
    assert Fence.objects.get().last_fence_token == 7


@pytest.mark.django_db(transaction=True)
def test_tokens_are_exact_up_to_the_highest_and_then_refused(name: str, private_redis: Any) -> None:
    """2**53 - 1 is the last number that Lua and JSON tell from the next."""
    keys = keys_of(name)
    private_redis.set(keys.token, HIGHEST - 3)

    for token in (HIGHEST - 2, HIGHEST - 1, HIGHEST):
        with fenced_lock(name) as lease:
            assert lease.token == token
            assert private_redis.get(keys.token) == private_redis.hget(keys.lease, "token")
            assert private_redis.get(keys.token) == str(token)
            assert Fence.objects.get().last_fence_token == token
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match=r"highest token, 2\*\*53 - 1"):
            fenced_lock(name).acquire()

    assert private_redis.get(keys.token) == str(HIGHEST)
    assert not private_redis.exists(keys.lease)


@pytest.mark.parametrize("stored", [2**53 - 1, 2**53, 2**53 + 1, 9_999_999_999_999_999, 2**63 - 1])
def test_a_counter_past_the_highest_token_gives_none(
    name: str, private_redis: Any, stored: int
) -> None:
    """A rounded number is never handed out, and the counter stays as it is."""
    keys = keys_of(name)
    private_redis.set(keys.token, stored)

    for _ in range(3):
        with pytest.raises(StoreUnavailable, match=re.escape(f"the key {keys.token!r}")):
            fenced_lock(name, register=False).acquire()

    assert private_redis.get(keys.token) == str(stored)
    assert not private_redis.exists(keys.lease, keys.held)


@pytest.mark.parametrize("known", [2**52 - 1, 2**52, HIGHEST - JUMP - 1])
def test_a_high_fence_is_continued_exactly(job: Job, private_redis: Any, known: int) -> None:
    """The counter is lost, and the fence is near the limit: the next token is exact."""
    Job.objects.update(last_fence_token=known)

    with fenced_lock(Job.objects.get()) as lease:
        assert lease.token in (known + JUMP, known + JUMP + 1)
        assert fence(job) == lease.token == int(private_redis.get(keys_of(job).token))


@pytest.mark.parametrize("known", [HIGHEST - JUMP, HIGHEST, 2**62])
def test_a_fence_at_the_limit_is_refused_clearly(job: Job, private_redis: Any, known: int) -> None:
    """There is no token above it: nobody gets one, and nothing is left."""
    Job.objects.update(last_fence_token=known)

    for resource in (Job.objects.get(), (Job, job.pk)):
        with pytest.raises(StoreUnavailable, match="highest token"):
            fenced_lock(resource).acquire()

    assert fence(job) == known
    assert not private_redis.exists(keys_of(job).lease)


# How long the counter lives


@pytest.mark.django_db(transaction=True)
def test_the_counter_outlives_release_and_expiry(name: str, client: Any) -> None:
    """The next token follows, whether the last lease was released, ran out or was overtaken."""
    for end in (Lease.release, lambda lease: expire(client, name), Lease.release):
        lease = fenced_lock(name).acquire()
        assert client.get(keys_of(name).token) == str(lease.token)
        end(lease)
    late = fenced_lock(name, ttl=0.05, register=False).acquire()
    wait_until(lambda: not client.exists(keys_of(name).lease))

    lease = fenced_lock(name).acquire()

    assert late.release() is False
    assert lease.token == 5
    assert client.get(keys_of(name).token) == "5"
    assert client.pttl(keys_of(name).token) > 604_700_000


SHORT = {"IDLE_TTL": 2, "MAX_TTL": 1, "TTL": 1}


@override_settings(FENCING=SHORT)
@pytest.mark.parametrize("work", [in_steps, in_one_transaction])
def test_an_idle_resource_leaves_nothing_and_goes_on(
    job: Job, name: str, private_redis: Any, work: Callable[[ResourceLike], int]
) -> None:
    """After IDLE_TTL there is no key in Redis, and the next token is above the fence."""
    resources: list[ResourceLike] = [job, (Job, job.pk), name]
    tokens = [work(resource) for resource in resources]
    unreleased = fenced_lock(f"{name} unreleased", register=False).acquire()
    assert private_redis.dbsize() >= 4

    wait_until(lambda: private_redis.dbsize() == 0)

    again = [work(resource) for resource in resources]
    assert tokens[1] < again[0] < again[1]
    assert tokens[2] < again[2]
    assert [fence(resource) for resource in resources[1:]] == again[1:]
    assert in_steps(unreleased.resource) == 1


def test_use_keeps_the_counter(name: str, private_redis: Any) -> None:
    """IDLE_TTL counts from the last use, not from the first."""
    counter = keys_of(name).token
    fenced_lock(name, register=False).acquire().release()
    private_redis.pexpire(counter, 5_000)

    lease = fenced_lock(name, register=False).acquire()

    assert lease.token == 2
    assert private_redis.pttl(counter) > 604_700_000


@override_settings(FENCING=SHORT)
def test_many_used_resources_leave_nothing(name: str, private_redis: Any) -> None:
    """Released or not: after IDLE_TTL the database is empty."""
    leases = [fenced_lock(f"{name}:{i}", register=False).acquire() for i in range(300)]
    for lease in leases[::2]:
        lease.extend(0.3)
        lease.release()

    wait_until(lambda: private_redis.dbsize() == 0)


# The cache's own settings


def reversed_key(key: str, key_prefix: str, version: int) -> str:
    """Make a key unlike Django does."""
    return f"{version}/{key_prefix}/{key[::-1]}"


@pytest.mark.parametrize(
    "change",
    [
        {"VERSION": 2},
        {"KEY_PREFIX": "release-2"},
        {"KEY_FUNCTION": f"{__name__}.reversed_key"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_old_and_new_release_exclude_each_other(
    name: str, private_services: Services, private_redis: Any, change: dict[str, Any]
) -> None:
    """A deploy that changes the cache's keys changes neither the lease's nor the counter's."""
    old = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": private_services.redis_url}
    with override_settings(CACHES={"default": old, "new": old | change}):
        assert caches["new"].make_key("key") != caches["default"].make_key("key")
        held = fenced_lock(name, register=False).acquire()
        with override_settings(FENCING=settings.FENCING | {"CACHE": "new"}):
            with pytest.raises(LockHeld):
                fenced_lock(name, register=False).acquire()
            held.release()
            assert fenced_lock(name, register=False).acquire().token == held.token + 1
