"""What Redis may answer, or not: an outage looks like an outage, and nothing is left behind."""

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from itertools import chain, count
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from redis import exceptions as errors
from redis.crc import key_slot
from redis.sentinel import MasterNotFoundError
from services import Services

from django_fencing import flow
from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import LeaseLost, LockHeld, StoreUnavailable
from django_fencing.grants import JUMP, Grant, Holder, Refusal
from django_fencing.leases import Lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.resources import ResourceLike, resolve
from django_fencing.stores.redis import RedisStore
from django_fencing.timing import now
from tests.helpers import (
    SECONDS,
    acquired,
    assert_held_by,
    cache_at,
    expire,
    in_background,
    in_threads,
    keys_of,
    monitored,
    wait_until,
)
from tests.proxy import REPEATING, Fault, Proxy
from tests.shop.models import Job


def assert_everything_expires(client: Any) -> None:
    """Check that Redis will be empty one day, whoever dies now."""
    assert [key for key in client.scan_iter() if client.pttl(key) == -1] == []


@contextmanager
def configured(client: Any, values: dict[str, str]) -> Iterator[None]:
    """Set what Redis calls its configuration for the block."""
    before = client.config_get(*values)
    client.config_set(*chain.from_iterable(values.items()))
    try:
        yield
    finally:
        client.config_set(*chain.from_iterable(before.items()))


@contextmanager
def read_only(client: Any) -> Iterator[None]:
    """Make Redis a replica of a primary that does not answer, as after a failover."""
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        yield
    finally:
        client.execute_command("REPLICAOF", "NO", "ONE")


# The script cache


def test_scripts_may_be_flushed_between_any_two_calls(name: str, private_redis: Any) -> None:
    """Each call sends its script again, and no NOSCRIPT is seen."""
    private_redis.script_flush()
    lease = acquired(name)
    reissue = partial(RedisStore().reissue, resolve(name), lease.holder, above=1)

    for action in (lease.ensure_held, lease.extend, reissue, lease.release):
        private_redis.script_flush()
        action()
    private_redis.script_flush()

    assert acquired(name).token == JUMP + 3


def test_threads_work_while_scripts_are_flushed(name: str, private_redis: Any) -> None:
    """None of 30 threads fails, and none gets a token twice."""
    done = threading.Event()

    def flush() -> int:
        flushes = 0
        while not done.wait(0.001):
            private_redis.script_flush()
            flushes += 1
        return flushes

    def work() -> list[int]:
        tokens = []
        for _ in range(4):
            lease = acquired(name, wait=SECONDS)
            lease.extend()
            tokens.append(lease.token)
            assert lease.release()
        return tokens

    with in_background(flush) as flusher:
        results = in_threads(*[work] * 30)
        done.set()

    assert flusher.result() > 10
    assert sorted(token for tokens in results for token in tokens) == list(range(1, 121))


# A primary that became a replica


def test_a_replica_is_an_outage(name: str, private_redis: Any) -> None:
    """READONLY is neither "held" nor a grant, and nothing is written."""
    with read_only(private_redis):
        with pytest.raises(StoreUnavailable, match="READONLY|read only"):
            acquired(name)
        assert private_redis.dbsize() == 0


def test_a_replica_cannot_say_that_the_lock_is_held(name: str, private_redis: Any) -> None:
    """What it knows of the holder may be old: on the primary the lock may be free."""
    acquired(name)

    with read_only(private_redis), pytest.raises(StoreUnavailable):
        fenced_lock(name, register=False).acquire()


def test_a_replica_cannot_say_that_a_lease_is_lost(name: str, private_redis: Any) -> None:
    """It may lag behind or be empty: only a primary's answer ends a lease."""
    lease = acquired(name)
    expire(private_redis, name)

    with read_only(private_redis):
        for action in (lease.extend, lease.release):
            with pytest.raises(StoreUnavailable):
                action()

    assert not lease.lost


def test_a_waiter_outlasts_a_failover(name: str, private_redis: Any) -> None:
    """It asks until its deadline, and is granted when there is a primary again."""
    with read_only(private_redis):
        waiter = partial(acquired, name, wait=SECONDS)
        with in_background(waiter) as waiting:
            wait_until(lambda: "errorstat_READONLY" in private_redis.info("errorstats"))
            assert not waiting.done()
            private_redis.execute_command("REPLICAOF", "NO", "ONE")
            lease = waiting.result()

    assert lease.token == 1
    assert_held_by(lease, private_redis)


def test_a_release_during_a_failover_can_be_repeated(name: str, private_redis: Any) -> None:
    """It raises, the lease stays, and the second call frees it."""
    lease = acquired(name)
    with read_only(private_redis), pytest.raises(StoreUnavailable, match="Cannot release"):
        lease.release()
    assert private_redis.exists(keys_of(name).lease)

    assert lease.release() is True

    assert not private_redis.exists(keys_of(name).lease)


def test_an_extension_during_a_failover_can_be_repeated(name: str, private_redis: Any) -> None:
    """It raises, the lease is as it was, and the second call extends it."""
    lease = acquired(name, ttl=10)
    with read_only(private_redis), pytest.raises(StoreUnavailable, match="Cannot extend"):
        lease.extend(30)
    assert not lease.lost

    lease.extend(30)

    assert_held_by(lease, private_redis)


# No Redis at all


def enter_lock(name: str) -> None:
    with fenced_lock(name):
        pytest.fail("The body ran.")


def enter_unregistered_lock(name: str) -> None:
    with fenced_lock(name, register=False):
        pytest.fail("The body ran.")


def enter_transaction(name: str) -> None:
    with fenced_atomic(name):
        pytest.fail("The body ran.")


def acquire_and_wait(name: str) -> None:
    fenced_lock(name, wait=0.1).acquire()


def call_decorated(name: str) -> None:
    with_fenced_lock(name, on_held="skip")(lambda: pytest.fail("The body ran."))()


def call_decorated_with_lease(name: str) -> None:
    @with_fenced_lock(name, on_held="skip")
    def work(*, lease: Lease) -> None:
        pytest.fail("The body ran.")

    work()


ENTRANCES = [
    enter_lock,
    enter_unregistered_lock,
    enter_transaction,
    acquire_and_wait,
    call_decorated,
    call_decorated_with_lease,
]


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Yield a port of this machine that refuses connections."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("enter", ENTRANCES)
@pytest.mark.parametrize("ignored_for", ["nobody", "the alias", "all"])
def test_no_redis_is_an_outage_whatever_the_cache_ignores(
    name: str, closed_port: int, enter: Callable[[str], None], ignored_for: str
) -> None:
    """IGNORE_EXCEPTIONS is the cache's: no body runs, and nothing is called held."""
    options = {"IGNORE_EXCEPTIONS": True} if ignored_for == "the alias" else {}
    with (
        override_settings(DJANGO_REDIS_IGNORE_EXCEPTIONS=ignored_for == "all"),
        cache_at(f"redis://127.0.0.1:{closed_port}/0?", **options),
        pytest.raises(StoreUnavailable, match=f"Cannot acquire '{name}': .*refused") as caught,
    ):
        enter(name)

    assert caught.value.resource == name
    assert isinstance(caught.value.__cause__, redis.ConnectionError)
    assert name not in [lease.resource for lease in flow.held()]


@pytest.mark.parametrize("action", [Lease.extend, Lease.ensure_held, Lease.release])
def test_a_holder_without_redis_learns_of_the_outage(
    name: str, proxy: Proxy, private_redis: Any, action: Callable[[Lease], Any]
) -> None:
    """Its lease is not lost: nobody has said so. When Redis is back, it goes on."""
    with cache_at(proxy.url, IGNORE_EXCEPTIONS=True):
        lease = acquired(name)
        proxy.hang_up()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=f"'{name}'"):
                action(lease)
        assert not lease.lost
        assert lease.remaining > 0
        assert_held_by(lease, private_redis)

        proxy.cut.clear()
        action(lease)
        assert lease.release() is True


@pytest.mark.parametrize(
    "kind",
    [
        *(redis.ConnectionError, redis.TimeoutError, redis.ResponseError),
        *(errors.BusyLoadingError, errors.AuthenticationError, errors.MaxConnectionsError),
        *(errors.ClusterDownError, errors.RedisClusterException, errors.SlotNotCoveredError),
        *(MasterNotFoundError, ConnectionResetError, TimeoutError),
    ],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
@pytest.mark.parametrize("place", ["client", "factory"])
def test_every_error_of_a_client_is_an_outage(name: str, kind: type[Exception], place: str) -> None:
    """Whoever raises it: the call, or CLIENT_FACTORY, which may have to connect."""
    error = kind("no answer")

    def fail(*args: Any, **options: Any) -> Any:
        raise error

    class Broken:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return fail

    factory = fail if place == "factory" else Broken
    with (
        override_settings(FENCING={"CLIENT_FACTORY": factory}),
        pytest.raises(StoreUnavailable, match=f"Cannot acquire '{name}': no answer") as caught,
    ):
        acquired(name)

    assert caught.value.__cause__ is error


# Memory


@contextmanager
def full(client: Any) -> Iterator[None]:
    """Let Redis refuse whatever could need memory."""
    with configured(client, {"maxmemory": "1mb", "maxmemory-policy": "noeviction"}):
        with pytest.raises(errors.OutOfMemoryError):
            fill(client)
        yield


def fill(client: Any) -> None:
    numbers = count()
    while True:
        client.set(f"ballast:{next(numbers)}", "x" * 1_000)


def test_a_full_memory_refuses_a_lease_and_leaves_nothing(name: str, private_redis: Any) -> None:
    """Neither lease nor counter is written, and the one held can be extended and released."""
    held = acquired(f"{name} held", ttl=10)
    acquired(name).release()
    keys = keys_of(name)

    with full(private_redis):
        for resource in (name, f"{name} new"):
            with pytest.raises(StoreUnavailable, match=f"'{resource}': .*used memory"):
                acquired(resource)
        assert private_redis.get(keys.token) == "1"
        assert not private_redis.exists(keys.lease, keys_of(f"{name} new").token)
        held.ensure_held()
        held.extend(30)
        assert_held_by(held, private_redis)
        assert held.release() is True
        assert not private_redis.exists(keys_of(held.resource).lease)

    assert acquired(name).token == 2


def test_a_full_memory_does_not_hide_that_a_lock_is_held(name: str, private_redis: Any) -> None:
    """Saying so needs no memory."""
    acquired(name)

    with full(private_redis), pytest.raises(LockHeld):
        acquired(name)


@pytest.mark.django_db(transaction=True)
def test_an_evicted_lease_is_lost(name: str, private_redis: Any) -> None:
    """Its holder learns it when it extends, and may still write: nobody has overtaken it."""
    lease = fenced_lock(name).acquire()
    private_redis.delete(keys_of(name).lease)

    with pytest.raises(LeaseLost, match=f"'{name}' with token 1 is over"):
        lease.extend()

    assert lease.lost
    assert not private_redis.exists(keys_of(name).lease)
    with lease.atomic() as row:
        assert row.last_fence_token == 1


@pytest.mark.django_db(transaction=True)
def test_an_evicted_counter_heals(name: str, private_redis: Any) -> None:
    """The next lease is above the fence, and its write is accepted."""
    for _ in range(3):
        with fenced_lock(name):
            pass
    private_redis.delete(keys_of(name).token)

    with fenced_lock(name) as lease, lease.atomic() as row:
        assert row.last_fence_token == lease.token > 3


@pytest.mark.parametrize("again", ["extend", "retry"])
def test_an_evicted_list_of_held_leases_comes_back_with_an_expiry(
    name: str, private_redis: Any, again: str
) -> None:
    """Whoever dies now leaves nothing for ever."""
    holder, resource = flow.new_holder(), resolve(name)
    RedisStore().acquire(resource, holder, ttl=5, floor=0)
    private_redis.delete(resource.keys.held)

    if again == "extend":
        RedisStore().extend(resource, holder, ttl=30)
    else:
        RedisStore().acquire(resource, holder, ttl=30, floor=0)

    assert private_redis.zscore(resource.keys.held, resource.keys.member)
    assert_everything_expires(private_redis)


# Replies that are lost, late or doubled


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.REQUEST_LOST, Fault.HELD_BACK])
def test_a_waiter_whose_grant_was_lost_gets_it_again(
    name: str, proxy: Proxy, private_redis: Any, fault: Fault
) -> None:
    """The server knows its holder, so that it does not wait for itself."""
    proxy.plan.append(fault)
    began = now()

    lease = acquired(name, wait=10)

    assert now() - began < 5  # of which the client's timeout is 1
    assert lease.token == 1
    assert private_redis.get(keys_of(name).token) == "1"
    assert_held_by(lease, private_redis)


def test_one_attempt_whose_grant_was_lost_gives_it_back(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The caller hears of an outage, and the next one need not wait for a ghost."""
    proxy.plan.append(Fault.REPLY_LOST)

    with pytest.raises(StoreUnavailable, match="Cannot acquire"):
        acquired(name)

    assert not private_redis.exists(keys_of(name).lease)
    assert acquired(name).token == 2


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("lost", [[Fault.REPLY_LOST], [Fault.NONE, Fault.REPLY_LOST]])
@pytest.mark.parametrize("wait", [0, 10])
def test_entering_survives_a_lost_reply_or_leaves_nothing(
    name: str, proxy: Proxy, private_redis: Any, lost: list[Fault], wait: float
) -> None:
    """Be it the proposal's or the confirmation's: with time left it is asked again."""
    proxy.plan.extend(lost)

    if wait:
        with fenced_lock(name, wait=wait) as lease, lease.atomic():
            assert lease.token == 1
    else:
        with pytest.raises(StoreUnavailable):
            fenced_lock(name).acquire()

    assert not private_redis.exists(keys_of(name).lease)
    with fenced_lock(name) as lease, lease.atomic():
        assert lease.token > 1


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.DOUBLED])
def test_a_reissued_token_may_be_reissued_again(
    name: str, proxy: Proxy, private_redis: Any, fault: Fault
) -> None:
    """A lost counter is healed by a script of its own, whose reply may be lost as well."""
    for _ in range(2):
        with fenced_lock(name):
            pass
    private_redis.delete(keys_of(name).token)
    in_threads(partial(heal_another, proxy, private_redis, f"{name} warm-up"))
    proxy.plan.extend([Fault.NONE, fault])

    with fenced_lock(name, wait=10) as lease, lease.atomic() as row:
        assert row.last_fence_token == lease.token > 2
        assert private_redis.hget(keys_of(name).lease, "token") == str(lease.token)


def heal_another(proxy: Proxy, client: Any, name: str) -> None:
    """Let the server know the script that reissues."""
    for _ in range(2):
        with fenced_lock(name):
            pass
        client.delete(keys_of(name).token)


@pytest.mark.parametrize("fault", [Fault.DOUBLED, Fault.REPLY_LOST])
def test_every_script_may_run_twice(
    name: str, proxy: Proxy, private_redis: Any, fault: Fault
) -> None:
    """Doubled by the line or repeated by redis-py: the second run finds what the first did."""
    with cache_at(proxy.url, CONNECTION_POOL_KWARGS=REPEATING):
        proxy.plan.append(fault)
        lease = acquired(name, ttl=10)
        assert lease.token == 1
        for action in (lease.ensure_held, partial(lease.extend, 30)):
            proxy.plan.append(fault)
            action()
        assert_held_by(lease, private_redis)

        proxy.plan.append(fault)
        assert lease.release() is True

    assert not lease.lost
    assert not private_redis.exists(keys_of(name).lease)
    assert acquired(name).token == 2


def test_a_second_acquire_of_one_holder_never_shortens_its_lease(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """A late first call, with its shorter ttl, finds the lease extended and leaves it so."""
    proxy.plan.append(Fault.HELD_BACK)
    lease = acquired(name, ttl=10, wait=10)
    lease.extend(30)

    reply = proxy.deliver()

    assert b"granted" in reply
    assert_held_by(lease, private_redis)


def test_an_acquire_that_arrives_after_the_release_is_refused(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The first call was slow, its retry was granted and released: nobody is left to hold it."""
    proxy.plan.append(Fault.HELD_BACK)
    lease = acquired(name, wait=10)
    assert lease.release() is True

    reply = proxy.deliver()

    assert b"done" in reply
    assert not private_redis.exists(keys_of(name).lease)
    assert acquired(name).token == 2
    assert_everything_expires(private_redis)


def test_an_acquire_that_arrives_after_giving_up_is_refused(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The caller has heard of an outage, and nobody is locked out for a ttl."""
    proxy.plan.append(Fault.HELD_BACK)
    with pytest.raises(StoreUnavailable):
        acquired(name)

    reply = proxy.deliver()

    assert b"done" in reply
    assert not private_redis.exists(keys_of(name).lease)
    assert_everything_expires(private_redis)


def test_an_acquire_that_redis_py_repeated_leaves_no_ghost(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The client hides its retry: the first call may still arrive after the release."""
    with cache_at(proxy.url, SOCKET_TIMEOUT=1, CONNECTION_POOL_KWARGS=REPEATING):
        proxy.plan.append(Fault.HELD_BACK)
        lease = acquired(name)
        assert lease.release() is True

    proxy.deliver()

    assert not private_redis.exists(keys_of(name).lease)


def test_an_acquire_that_redis_py_repeated_in_vain_leaves_no_ghost(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The retry was refused, the caller gave up, and then the lock was free for the first call."""
    holder = acquired(name)
    with cache_at(proxy.url, SOCKET_TIMEOUT=1, CONNECTION_POOL_KWARGS=REPEATING):
        proxy.plan.append(Fault.HELD_BACK)
        with pytest.raises(LockHeld):
            acquired(name)
    holder.release()

    proxy.deliver()

    assert not private_redis.exists(keys_of(name).lease)


@pytest.mark.parametrize("action", [partial(Lease.extend, ttl=70), Lease.release])
def test_a_late_call_does_not_touch_the_successors_lease(
    name: str, proxy: Proxy, private_redis: Any, action: Callable[[Lease], Any]
) -> None:
    """It was on its way for as long as the lease ran out and another was granted."""
    lease = acquired(name)
    proxy.plan.append(Fault.HELD_BACK)
    with pytest.raises(StoreUnavailable):
        action(lease)
    expire(private_redis, name)
    successor = acquired(name)

    reply = proxy.deliver()

    assert b"lost" in reply or b"other" in reply
    assert_held_by(successor, private_redis)


def test_the_store_may_be_asked_everything_twice(name: str, private_redis: Any) -> None:
    """The contract of every operation, for the holder and for another one."""
    store, resource = RedisStore(), resolve(name)
    holder, other = (Holder(host="h", pid=1, flow="f", function="g") for _ in range(2))

    answers = [
        [operation() for _ in range(2)]
        for operation in (
            lambda: store.acquire(resource, holder, ttl=30, floor=0),
            lambda: store.confirm(resource, holder),
            lambda: store.confirm(resource, other),
            lambda: store.extend(resource, holder, ttl=30),
            lambda: store.extend(resource, other, ttl=60),
            lambda: store.reissue(resource, other, above=100),
            lambda: store.release(resource, other, again=True),
            lambda: store.release(resource, other),
        )
    ]

    assert answers == [
        [Grant(token=1)] * 2,
        [True] * 2,
        [False] * 2,
        [True] * 2,
        [False] * 2,
        [Refusal()] * 2,
        [False] * 2,
        [False] * 2,
    ]
    assert private_redis.hget(resource.keys.lease, "holder") == holder.id.hex
    assert 25_000 < private_redis.pttl(resource.keys.lease) <= 30_000
    assert private_redis.get(resource.keys.token) == "1"
    first, second = (store.reissue(resource, holder, above=100) for _ in range(2))
    assert 100 < first.token < second.token
    assert [store.release(resource, holder) for _ in range(2)] == [True] * 2
    for one in (holder, other):
        assert [store.acquire(resource, one, ttl=30, floor=0) for _ in range(2)] == [Refusal()] * 2
    assert not private_redis.exists(resource.keys.lease)


# Clients


# redis-py 7 asks each connection that speaks RESP3 for its host, which a Unix socket has not.
RESP3: dict[str, Any] = {"protocol": 3}
if redis.VERSION[0] == 7:
    notifications = import_module("redis.maint_notifications").MaintNotificationsConfig
    RESP3["maint_notifications_config"] = notifications(enabled=False)

CLIENTS = {
    "bytes": {"CONNECTION_POOL_KWARGS": {"decode_responses": False}},
    "text": {"CONNECTION_POOL_KWARGS": {"decode_responses": True}},
    "RESP2": {"CONNECTION_POOL_KWARGS": {"protocol": 2}},
    "RESP3": {"CONNECTION_POOL_KWARGS": RESP3},
    "RESP3 text": {"CONNECTION_POOL_KWARGS": RESP3 | {"decode_responses": True}},
    "herd": {"CLIENT_CLASS": "django_redis.client.HerdClient"},
    "blocking pool": {
        "CONNECTION_POOL_CLASS": "redis.BlockingConnectionPool",
        "CONNECTION_POOL_KWARGS": {"max_connections": 1, "timeout": 5},
    },
    "compressed JSON": {
        "SERIALIZER": "django_redis.serializers.json.JSONSerializer",
        "COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor",
    },
}


def assert_the_whole_protocol(name: str, client: Any) -> None:
    """Check all that a client's replies decide."""
    for token in (1, 2):
        with fenced_lock(name) as lease:
            assert lease.token == token
            (refused,) = in_threads(fenced_lock(name).acquire)
            assert isinstance(refused, LockHeld)
            assert "assert_the_whole_protocol" in str(refused.held_by)
            assert 25 < refused.retry_after <= 30
            lease.ensure_held()
            lease.extend(30)
            assert_held_by(lease, client)
            with lease.atomic() as row:
                assert row.last_fence_token == token
        assert lease.release() is True
    client.delete(keys_of(name).token)
    with fenced_lock(name) as lease:
        assert lease.token > 2
        expire(client, name)
        with pytest.raises(LeaseLost):
            lease.extend()
        (successor,) = in_threads(fenced_lock(name).acquire)
        assert lease.release() is False
    client.delete(keys_of(name).token)
    client.set(keys_of(name).token, "x")
    assert successor.release() is True
    with pytest.raises(StoreUnavailable):
        fenced_lock(name).acquire()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("client_kind", CLIENTS)
def test_any_client_of_the_cache_will_do(
    name: str, private_services: Services, private_redis: Any, client_kind: str
) -> None:
    """Whatever its replies look like."""
    with cache_at(private_services.redis_url, **CLIENTS[client_kind]):
        assert_the_whole_protocol(name, private_redis)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("text", [True, False])
def test_a_client_of_ones_own_will_do(
    name: str, private_services: Services, private_redis: Any, text: bool
) -> None:
    """CLIENT_FACTORY goes before the cache, which may be of any kind."""
    url = private_services.redis_url
    locmem = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    with redis.Redis.from_url(url, decode_responses=text) as own:
        factory = {"CLIENT_FACTORY": lambda: own}
        with override_settings(CACHES=locmem, FENCING=factory):
            assert_the_whole_protocol(name, private_redis)


def test_a_client_factory_may_be_named_by_its_path(name: str, private_redis: Any) -> None:
    """The setting is text in many projects."""
    with (
        override_settings(FENCING={"CLIENT_FACTORY": f"{__name__}.tell"}),
        pytest.raises(Told),
    ):
        acquired(name)


class Told(Exception):
    """What tells that the factory was called."""


def tell() -> None:
    raise Told


@pytest.mark.django_db(transaction=True)
def test_a_cluster_will_do(name: str) -> None:
    """It refuses scripts whose keys lie in several slots, and keys that were not declared."""
    with closing(socket.socket()) as one, closing(socket.socket()) as two:
        for bound in (one, two):
            bound.bind(("127.0.0.1", 0))
        port, bus = (str(bound.getsockname()[1]) for bound in (one, two))
    arguments = ["--cluster-enabled", "yes", "--port", port, "--cluster-port", bus]
    with (
        Services(postgres=False, valkey_args=arguments) as services,
        redis.Redis.from_url(services.redis_url, decode_responses=True) as client,
    ):
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: client.cluster("info")["cluster_state"] == "ok")
        with (
            redis.RedisCluster("127.0.0.1", int(port)) as cluster,
            override_settings(FENCING={"CLIENT_FACTORY": lambda: cluster}),
        ):
            assert_the_whole_protocol(name, client)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("django.core.cache.backends.locmem.LocMemCache", {}),
        ("django.core.cache.backends.dummy.DummyCache", {}),
        ("django.core.cache.backends.filebased.FileBasedCache", {}),
        ("django.core.cache.backends.db.DatabaseCache", {}),
        ("django_redis.cache.RedisCache", {"CLIENT_CLASS": "django_redis.client.ShardClient"}),
    ],
)
@pytest.mark.parametrize("enter", ENTRANCES)
def test_a_cache_without_one_redis_is_refused(
    name: str, backend: str, options: dict[str, str], enter: Callable[[str], None], tmp_path: Any
) -> None:
    """The error names what was found and what would do, and no body runs."""
    cache = {"BACKEND": backend, "LOCATION": str(tmp_path)}
    cache["LOCATION"] = f"unix://{tmp_path}?db=0" if "edis" in backend else cache["LOCATION"]
    cache |= {"OPTIONS": options} if options else {}
    kind = options.get("CLIENT_CLASS", backend).rpartition(".")[2]

    found = rf"'default', a \S*\.{kind}, in which no lock "
    with (
        override_settings(CACHES={"default": cache}),
        pytest.raises(ImproperlyConfigured, match=found) as caught,
    ):
        enter(name)

    for way_out in ("django_redis.cache.RedisCache", "sentinel", "FENCING['CLIENT_FACTORY']"):
        assert way_out in str(caught.value)


@pytest.mark.django_db(transaction=True)
def test_djangos_own_redis_cache_keeps_leases(
    name: str, private_services: Services, private_redis: Any
) -> None:
    """Its client has no lock() and needs none. The database is the one that the cache names."""
    backend = "django.core.cache.backends.redis.RedisCache"
    cache = {"BACKEND": backend, "LOCATION": private_services.redis_url, "KEY_PREFIX": "x"}
    with override_settings(CACHES={"default": cache}):
        assert_the_whole_protocol(name, private_redis)
        caches["default"]._cache.get_client().connection_pool.disconnect()


def test_a_missing_cache_is_named(name: str) -> None:
    """FENCING["CACHE"] is an alias in CACHES."""
    with (
        override_settings(FENCING={"CACHE": "locks"}),
        pytest.raises(ImproperlyConfigured, match=r"FENCING\['CACHE'\] is 'locks': .*exist"),
    ):
        acquired(name)


# Rights


@contextmanager
def user_without(services: Services, client: Any, *commands: str) -> Iterator[None]:
    """Let the app talk to Redis as a user who may do everything but `commands`."""
    client.acl_setuser(
        "limited",
        enabled=True,
        reset=True,
        nopass=True,
        keys=["*"],
        categories=["+@all"],
        commands=[f"-{command}" for command in commands],
    )
    login = {"username": "limited", "password": "any"}
    try:
        with cache_at(services.redis_url, CONNECTION_POOL_KWARGS=login):
            yield
    finally:
        client.acl_deluser("limited")


NEEDED = ("evalsha", "hset", "pexpire", "set", "time", "zadd")


@pytest.mark.parametrize(
    "command",
    [
        *NEEDED,
        *("del", "exists", "get", "hget", "hmget", "pttl", "type"),
        *("zrangebyscore", "zrem", "zremrangebyscore", "zscore"),
    ],
)
@pytest.mark.parametrize("resource_is", ["new", "known"])
def test_without_a_right_there_is_no_half_of_a_lease(
    name: str,
    private_services: Services,
    private_redis: Any,
    command: str,
    resource_is: str,
) -> None:
    """Where a script needs it, it is an outage; and all that is left behind has an expiry."""
    if resource_is == "known":
        acquired(name).release()

    with user_without(private_services, private_redis, command):
        (outcome,) = in_threads(partial(acquired, name))

    assert isinstance(outcome, Lease | StoreUnavailable)
    granted = isinstance(outcome, Lease)
    assert not granted or command not in NEEDED
    assert private_redis.exists(keys_of(name).lease) == granted
    assert_everything_expires(private_redis)


READING = ("hexists", "hget", "hgetall", "hmget", "hvals")


def test_a_user_who_may_not_read_leases_is_not_told_that_they_are_held(
    name: str, private_services: Services, private_redis: Any
) -> None:
    """An error is no holder."""
    acquired(name)

    with (
        user_without(private_services, private_redis, *READING),
        pytest.raises(StoreUnavailable, match=f"Cannot acquire '{name}'"),
    ):
        acquired(name)


@pytest.mark.parametrize("action", [Lease.extend, Lease.ensure_held, Lease.release])
def test_a_user_who_may_not_read_leases_is_not_told_that_they_are_lost(
    name: str, private_services: Services, private_redis: Any, action: Callable[[Lease], Any]
) -> None:
    """An error is no other holder."""
    lease = acquired(name)
    with (
        user_without(private_services, private_redis, *READING),
        pytest.raises(StoreUnavailable, match=f"'{name}'"),
    ):
        action(lease)

    assert not lease.lost
    assert lease.release() is True


def test_a_user_who_may_not_delete_keeps_a_lease_that_runs_out(
    name: str, private_services: Services, private_redis: Any
) -> None:
    """The release is an outage, and the key has its expiry."""
    with user_without(private_services, private_redis, "del"):
        lease = acquired(name)
        with pytest.raises(StoreUnavailable, match=f"Cannot release '{name}'"):
            lease.release()

    assert_held_by(lease, private_redis)
    assert lease.release() is True


# What is not ours in Redis


LEASES = {
    "a text": lambda client, key: client.set(key, "somebody"),
    "an empty text": lambda client, key: client.set(key, ""),
    "a list": lambda client, key: client.rpush(key, "somebody"),
    "another layout": lambda client, key: client.hset(
        key, mapping={"layout": "2", "holder": "somebody", "host": "h"}
    ),
    "no layout": lambda client, key: client.hset(key, "holder", "somebody"),
    "no holder": lambda client, key: client.hset(key, "layout", "1"),
}


@pytest.mark.parametrize("expires", [True, False])
@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize("kind", LEASES)
def test_an_unreadable_lease_is_held_by_unknown(
    name: str,
    private_services: Services,
    private_redis: Any,
    kind: str,
    text: bool,
    expires: bool,
) -> None:
    """It is somebody's, perhaps of another version: it is refused and left alone."""
    key = keys_of(name).lease
    LEASES[kind](private_redis, key)
    if expires:
        private_redis.pexpire(key, 20_000)
    with (
        redis.Redis.from_url(private_services.redis_url) as client,
        cache_at(private_services.redis_url, CONNECTION_POOL_KWARGS={"decode_responses": text}),
    ):
        value = client.dump(key)

        with pytest.raises(LockHeld) as caught:
            acquired(name)

        assert client.dump(key) == value
        assert 15_000 < client.pttl(key) <= 20_000 if expires else client.pttl(key) == -1
        assert caught.value.held_by is None
        assert "is held by unknown" in str(caught.value)
        assert 15 < caught.value.retry_after <= 20 if expires else caught.value.retry_after == 1
        client.delete(key)
        assert acquired(name).token == 1


@pytest.mark.parametrize("text", [True, False])
def test_a_lease_that_is_no_text_gives_an_error_of_ours(
    name: str, private_services: Services, private_redis: Any, text: bool
) -> None:
    """A client that decodes what it reads cannot read it at all."""
    holder = {"layout": "1", "holder": "somebody", "host": b"\xff"}
    private_redis.hset(keys_of(name).lease, mapping=holder)

    with (
        cache_at(private_services.redis_url, CONNECTION_POOL_KWARGS={"decode_responses": text}),
        pytest.raises((LockHeld, StoreUnavailable), match=f"'{name}'"),
    ):
        acquired(name)


@pytest.mark.parametrize("kind", LEASES)
def test_a_lease_that_became_something_else_is_lost(
    name: str, private_redis: Any, kind: str
) -> None:
    """Its holder neither extends nor deletes what it does not know."""
    key = keys_of(name).lease
    lease = acquired(name)
    private_redis.delete(key)
    LEASES[kind](private_redis, key)
    value = private_redis.type(key)

    for action in (lease.extend, lease.ensure_held):
        with pytest.raises(LeaseLost):
            action()
    assert lease.release() is False

    assert private_redis.type(key) == value
    assert private_redis.pttl(key) == -1


@pytest.mark.parametrize("key", ["held", "done"])
def test_a_list_that_is_something_else_gives_no_lease(
    name: str, private_redis: Any, key: str
) -> None:
    """It is an outage that names the resource, and no lease is left without its entry."""
    keys = keys_of(name)
    private_redis.set(getattr(keys, key), "something")

    with pytest.raises(StoreUnavailable, match=f"Cannot acquire '{name}'"):
        acquired(name)

    assert not private_redis.exists(keys.lease)
    assert private_redis.get(getattr(keys, key)) == "something"
    private_redis.delete(getattr(keys, key))
    assert acquired(name).release() is True


# What is ours in Redis


ENDLESS = """
local endless = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  if redis.call('PTTL', key) == -1 then endless[#endless + 1] = key end
end
return endless
"""


def test_no_key_is_ever_without_an_expiry(name: str, private_redis: Any) -> None:
    """Whatever is asked by however many: a process may die between any two calls."""
    looks = Counter[str]()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            looks.update(private_redis.eval(ENDLESS, 0) or ["none"])

    def work(number: int) -> None:
        for i in range(15):
            resource = f"{name}:{number % 2 or i}"
            lease = acquired(resource, ttl=5, wait=SECONDS)
            lease.extend(1)
            if i % 3 or number % 2:
                lease.release()

    with in_background(look):
        results = in_threads(*[partial(work, number) for number in range(4)])
        done.set()

    assert results == [None] * 4
    assert looks.keys() == {"none"}
    assert looks["none"] > 10


def test_the_keys_of_a_resource_share_a_slot_and_are_all_declared(
    job: Job, name: str, private_redis: Any
) -> None:
    """Redis Cluster demands both of every script."""
    for resource in (job, name):
        use_every_script(resource)
        with monitored(private_redis) as commands:
            use_every_script(resource)

        scripts = [command for command in commands if command[0] == "EVALSHA"]
        assert len({script[1] for script in scripts}) == 5
        declared = [script[3 : 3 + int(script[2])] for script in scripts]
        assert len({key_slot(key.encode()) for keys in declared for key in keys}) == 1
        inside = [command for command in commands if command[0] not in ("EVALSHA", "TIME")]
        assert {command[1] for command in inside} <= {key for keys in declared for key in keys}
        assert len(inside) > 10


def use_every_script(resource: ResourceLike) -> None:
    """Acquire, reissue, confirm, extend and release."""
    store, place, holder = RedisStore(), resolve(resource), flow.new_holder()
    store.acquire(place, holder, ttl=10, floor=0)
    store.acquire(place, flow.new_holder(), ttl=10, floor=0)
    store.reissue(place, holder, above=1)
    store.confirm(place, holder)
    store.extend(place, holder, ttl=10)
    store.release(place, holder)
    store.acquire(place, holder, ttl=10, floor=0)


def test_names_spread_over_all_slots() -> None:
    """No node of a cluster gets much more than its share."""
    tags = Counter(keys_of(f"invoice:{number}").base for number in range(1000))

    assert tags.keys() == {f"fencing:{{{tag}}}" for tag in range(64)}
    assert max(tags.values()) <= 50
    assert len({key_slot(tag.encode()) for tag in tags}) == 64


@pytest.mark.parametrize("letter", ["x", "é", "語", "🔒"])
def test_a_lease_is_small(name: str, private_redis: Any, letter: str) -> None:
    """Long names, functions and hosts are cut: 512 bytes hold it, in Redis's compact form."""
    long = letter * 300
    holder = Holder(host=long, pid=4_194_304, flow=long, function=long)
    resource = resolve(name + long)
    private_redis.set(resource.keys.token, 2**53 - 3)

    RedisStore().acquire(resource, holder, ttl=86_400, floor=0)

    lease = private_redis.hgetall(resource.keys.lease)
    assert sum(len((field + value).encode()) for field, value in lease.items()) <= 512
    assert lease.keys() == {
        *("layout", "holder", "token", "host", "pid", "function", "acquired_at", "ttl"),
        *("model", "pk"),
    }
    assert 20 < len(lease["host"].encode()) <= 80
    private_redis.copy(resource.keys.lease, "short")
    assert private_redis.object("encoding", "short") == "listpack"
    assert private_redis.memory_usage("short") <= 512


def test_a_tag_lists_its_held_leases(name: str, private_redis: Any) -> None:
    """By the moment at which they lapse; an extension moves it, a release removes the entry."""
    keys = keys_of(name)
    lease = acquired(name, ttl=10)
    granted = private_redis.zscore(keys.held, keys.member)
    lease.extend(60)
    extended = private_redis.zscore(keys.held, keys.member)
    seconds, microseconds = private_redis.time()
    clock = seconds * 1000 + microseconds / 1000

    assert 5_000 < granted - clock <= 10_000
    assert 55_000 < extended - clock <= 60_000
    assert 604_000_000 < private_redis.pttl(keys.held) <= 604_800_000
    lease.release()
    assert not private_redis.exists(keys.held)


def test_a_late_release_leaves_the_successors_entry(name: str, private_redis: Any) -> None:
    """The entry is the resource's: only its holder may remove it."""
    keys = keys_of(name)
    late = acquired(name)
    expire(private_redis, name)
    acquired(name)
    score = private_redis.zscore(keys.held, keys.member)

    late.release()
    with pytest.raises(LeaseLost):
        late.extend(80)

    assert private_redis.zscore(keys.held, keys.member) == score


def test_entries_that_lapsed_an_hour_ago_are_trimmed(name: str, private_redis: Any) -> None:
    """A few at each acquire; those that lapsed of late stay, for the admin to see."""
    keys = keys_of(name)
    clock = private_redis.time()[0] * 1000
    old = {f"name:old:{i}": clock - 3_700_000 - i for i in range(10)}
    recent = {f"name:recent:{i}": clock - 3_500_000 for i in range(3)}
    private_redis.zadd(keys.held, old | recent)
    private_redis.pexpire(keys.held, 10_000)

    left = []
    for _ in range(4):
        acquired(name)
        expire(private_redis, name)
        left.append(private_redis.zcount(keys.held, "-inf", clock - 3_600_000))

    assert left[0] < 10
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    assert set(private_redis.zrange(keys.held, 0, -1)) == {*recent, keys.member}
    assert private_redis.pttl(keys.held) > 604_000_000


def test_nothing_but_the_counter_stays(name: str, private_redis: Any) -> None:
    """After a thousand rounds there is one key, and for a minute the list of who is done."""
    keys = keys_of(name)
    for _ in range(1000):
        assert acquired(name).release()

    assert set(private_redis.scan_iter()) == {keys.token, keys.done}
    assert private_redis.get(keys.token) == "1000"
    assert 604_000_000 < private_redis.pttl(keys.token) <= 604_800_000
    assert 50_000 < private_redis.pttl(keys.done) <= 60_000


@pytest.mark.parametrize("action", [Lease.extend, Lease.ensure_held, Lease.release])
def test_who_was_done_a_minute_ago_is_forgotten(
    name: str, private_redis: Any, action: Callable[[Lease], Any]
) -> None:
    """The list of a tag that is always in use does not grow for ever."""
    keys = keys_of(name)
    lease = acquired(name)
    clock = private_redis.time()[0] * 1000
    old = {f"old {number}": clock - 61_000 - number / 2 for number in range(100)}
    private_redis.zadd(keys.done, {**old, "recent": clock - 50_000})

    action(lease)

    left = set(private_redis.zrange(keys.done, 0, -1))
    assert left - {lease.holder.id.hex} == {"recent"}
