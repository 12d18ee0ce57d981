"""What operators do through clients of a cluster and of a Sentinel."""

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis
import services
from django.conf import settings
from django.core.cache import caches
from django.core.checks import run_checks
from django.test import override_settings
from redis.crc import key_slot
from redis.sentinel import Sentinel
from services import Services

from django_fencing import doctor, operators, states
from django_fencing.exceptions import StaleToken, StoreUnavailable
from django_fencing.locks import fenced_lock
from django_fencing.models import Fence, FenceEvent
from django_fencing.operators import Outcome
from django_fencing.overview import all_leases, overview
from django_fencing.resources import resolve
from tests.browser import fields_of, superuser
from tests.helpers import commit, keys_of, make_scripts_known, wait_until
from tests.shop.models import Code, Document, Job
from tests.test_acl import use_everything
from tests.test_admin_release import LIST, PAGE, link_on_the_list, told
from tests.test_fencing_command import failed, run, said

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.urls("tests.test_admin_release"),
]

NODES = 3
SLOTS = 16_384
SAVES = ("--save", "3600 1")


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        bound = [stack.enter_context(closing(socket.socket())) for _ in range(number)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in bound]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Any]]:
    """Yield a client of each node of a cluster."""
    ports = free_ports(2 * NODES)
    with ExitStack() as stack:
        clients: list[Any] = []
        for port, bus in zip(ports[:NODES], ports[NODES:], strict=True):
            cluster = ("--cluster-enabled", "yes", "--port", str(port), "--cluster-port", str(bus))
            stack.enter_context(Services(postgres=False, valkey_args=[*cluster, *SAVES]))
            clients.append(stack.enter_context(redis.Redis(port=port, decode_responses=True)))
        for number, client in enumerate(clients):
            first, last = number * SLOTS // NODES, (number + 1) * SLOTS // NODES - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            if number:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0], ports[NODES])
        wait_until(lambda: all(is_whole(client) for client in clients))
        yield clients


def is_whole(client: Any) -> bool:
    info = client.cluster("info")
    return bool(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(NODES))


def owner_of(name: str) -> int:
    """Return the number of the node that has the lease."""
    slot = key_slot(keys_of(name).lease.encode())
    return next(n for n in range(NODES) if slot < (n + 1) * SLOTS // NODES)


@contextmanager
def clustered(nodes: list[Any], **options: Any) -> Iterator[Any]:
    """Let the app use a client of the cluster, and yield another one."""
    port = nodes[0].connection_pool.connection_kwargs["port"]
    with (
        redis.RedisCluster("127.0.0.1", port, **options) as given,
        redis.RedisCluster("127.0.0.1", port, decode_responses=True) as other,
        override_settings(FENCING={**settings.FENCING, "CLIENT_FACTORY": lambda: given}),
    ):
        for node in nodes:
            node.flushall()
            make_scripts_known(node)
        yield other


@contextmanager
def sentinel_of(port: int, folder: Path) -> Iterator[Any]:
    """Watch a server by a Sentinel, and yield a client of that."""
    (own,) = free_ports(1)
    configuration = folder / "sentinel.conf"
    configuration.write_text(
        f"port {own}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor locks 127.0.0.1 {port} 1\n"
    )
    process = subprocess.Popen(
        [services._find("valkey"), str(configuration), "--sentinel"], stdout=subprocess.DEVNULL
    )
    try:
        with redis.Redis(port=own, decode_responses=True) as client:
            wait_until(lambda: knows_the_master(client))
            yield client
    finally:
        process.terminate()
        process.wait(20)


def knows_the_master(sentinel: Any) -> bool:
    try:
        return bool(sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "locks"))
    except redis.ConnectionError:
        return False


@contextmanager
def master_of(sentinel: Any, **options: Any) -> Iterator[Any]:
    """Yield a client of the server that the Sentinel says is the master."""
    port = sentinel.connection_pool.connection_kwargs["port"]
    finder = Sentinel([("127.0.0.1", port)], socket_timeout=5)
    master = finder.master_for("locks", **options)
    try:
        yield master
    finally:
        master.connection_pool.disconnect()
        for each in finder.sentinels:
            each.connection_pool.disconnect()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: Any) -> Iterator[Any]:
    """Yield a client of a Sentinel that watches a server."""
    (port,) = free_ports(1)
    with (
        Services(postgres=False, valkey_args=["--port", str(port), *SAVES]),
        sentinel_of(port, tmp_path_factory.mktemp("sentinel")) as sentinel,
    ):
        yield sentinel


@contextmanager
def behind_a_sentinel(sentinel: Any, **options: Any) -> Iterator[Any]:
    """Let the app use a client of a Sentinel's master, and yield another one."""
    with (
        master_of(sentinel, **options) as given,
        master_of(sentinel, decode_responses=True) as other,
        override_settings(FENCING={**settings.FENCING, "CLIENT_FACTORY": lambda: given}),
    ):
        other.flushall()
        yield other


@contextmanager
def behind_django_redis(sentinel: Any) -> Iterator[Any]:
    """Let the app use django-redis's own client of a Sentinel, and yield another one."""
    port = sentinel.connection_pool.connection_kwargs["port"]
    cache = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": "redis://locks/0",
        "OPTIONS": {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
            "SENTINELS": [("127.0.0.1", port)],
        },
    }
    with (
        master_of(sentinel, decode_responses=True) as other,
        mock.patch("django_redis.pool.ConnectionFactory._pools", {}),
        override_settings(
            CACHES={"default": cache},
            DJANGO_REDIS_CONNECTION_FACTORY="django_redis.pool.SentinelConnectionFactory",
        ),
    ):
        other.flushall()
        yield other
        used: Any = caches["default"]
        used.client.get_client().connection_pool.disconnect()


@pytest.fixture(params=["cluster", "cluster, RESP3", "Sentinel", "django-redis's Sentinel"])
def other(request: Any) -> Iterator[Any]:
    """Let the app use a client of that kind, and yield another one of the same servers."""
    kind = request.param
    text = {"protocol": 3, "decode_responses": True} if kind.endswith("RESP3") else {}
    if kind.startswith("cluster"):
        used = clustered(request.getfixturevalue("nodes"), **text)
    elif kind == "Sentinel":
        used = behind_a_sentinel(request.getfixturevalue("watched"))
    else:
        used = behind_django_redis(request.getfixturevalue("watched"))
    with used as client:
        yield client


@pytest.fixture
def cluster(nodes: list[Any]) -> Iterator[Any]:
    """Let the app use a cluster, and yield another client of it."""
    with clustered(nodes) as client:
        yield client


def test_everything_works(name: str, other: Any) -> None:
    """As with a plain client, except that waiters poll."""
    with mock.patch.object(other, "script_flush", nullcontext):
        use_everything(name, other)


def test_the_doctor_finds_nothing(other: Any) -> None:
    """And leaves nothing; waiters that poll are to be noted."""
    found = {each.what: each for each in doctor.examine()}

    assert [each for each in found.values() if each.well is False] == []
    assert [each.what for each in found.values() if each.well is None] == ["wait"]
    assert [key for key in other.scan_iter() if other.pttl(key) == -1] == []
    checked = {each.id for each in run_checks(include_deployment_checks=True)}
    assert checked.isdisjoint({f"django_fencing.W00{number}" for number in (5, 6, 7, 9)})


def test_the_command_reaches_every_server(name: str, other: Any) -> None:
    """Names whose leases are on all of them, rows too."""
    Code.objects.create(code="50%:x")
    rows = [Job.objects.create(), Document.objects.create(), (Code, "50%:x")]
    leases = [fenced_lock(each, ttl=60).acquire() for each in (name, *rows)]
    others = [fenced_lock(f"{name}{number}", ttl=60).acquire() for number in range(70)]

    table = said("locks")
    assert {each["lease"]["holder"] for each in table} == {
        lease.holder.id.hex for lease in leases + others
    }
    for lease in leases:
        shown = said("show", lease.resource)
        assert shown["lease"]["token"] == shown["counter"] == lease.token
        run("release", lease.resource, "--holder", lease.holder.id.hex[:8], "--reason", "stuck")
        with pytest.raises(StaleToken):
            commit(lease)
    assert FenceEvent.objects.filter(kind="forced").count() == 4
    assert said("prune", "--older-than", "0s")["fences"] == 1
    for lease in others:
        commit(lease)
        lease.release()
    assert said("prune", "--older-than", "0s")["fences"] == 70
    assert Fence.objects.count() == 0


def test_the_admin_ends_a_lease(name: str, other: Any) -> None:
    """After it has shown it."""
    browser = superuser()
    lease = fenced_lock(name, ttl=60).acquire()
    page = browser.get(link_on_the_list(browser, name))
    response: Any = browser.post(PAGE, {**fields_of(page), "reason": "gone"})

    assert (response.status_code, response.url) == (302, LIST)
    assert "its holder is fenced by token 2" in told(response)[0]
    with pytest.raises(StaleToken):
        commit(lease)


@pytest.mark.parametrize("number", range(NODES))
def test_the_doctor_sees_each_node(cluster: Any, nodes: list[Any], number: int) -> None:
    """One that evicts, persists nothing and has another user."""
    node = nodes[number]
    node.config_set("maxmemory-policy", "allkeys-lru")
    node.config_set("save", "")
    node.execute_command("ACL", "SETUSER", "default", "-zadd")
    try:
        found = {each.what: each for each in doctor.examine()}
        checked = {each.id for each in run_checks(include_deployment_checks=True)}
    finally:
        node.config_set("maxmemory-policy", "noeviction")
        node.config_set("save", "3600 1")
        node.execute_command("ACL", "SETUSER", "default", "+zadd")

    assert found["eviction"].well is False
    assert "allkeys-lru" in found["eviction"].said
    assert found["persistence"].well is None
    assert (found["permissions"].well, found["permissions"].said) == (False, "denied: ZADD")
    assert {"django_fencing.W005", "django_fencing.W006"} <= checked


def test_slots_that_nobody_has_are_an_outage(name: str, cluster: Any, nodes: list[Any]) -> None:
    """For every action, and never a traceback of redis-py."""
    lease = fenced_lock(name).acquire()
    slot = key_slot(keys_of(name).lease.encode())
    for node in nodes:
        node.execute_command("CLUSTER", "DELSLOTS", slot)
    try:
        with pytest.raises(StoreUnavailable):
            all_leases(None)
        assert overview(Fence).outage
        assert states.state(name).store_outage
        with pytest.raises(StoreUnavailable):
            operators.force_release(resolve(name), lease.holder.id.hex)
        failed(69, "locks")
        failed(69, "release", name, "--holder", lease.holder.id.hex)
        failed(69, "prune", "--older-than", "0s")
        assert [each.what for each in doctor.examine() if each.well is False]
    finally:
        nodes[owner_of(name)].execute_command("CLUSTER", "ADDSLOTS", slot)
        wait_until(lambda: all(is_whole(node) for node in nodes))
        # Its map of the slots may be of a moment ago: any command to the slot makes another one.
        settings.FENCING["CLIENT_FACTORY"]().nodes_manager.initialize()
    ended = operators.force_release(resolve(name), lease.holder.id.hex)
    assert ended.outcome is Outcome.RELEASED


def test_a_failover_by_a_sentinel(name: str, tmp_path: Path) -> None:
    """What was held is held by the replica that is the master now, and can be ended."""
    one, two = free_ports(2)
    with (
        Services(postgres=False, valkey_args=["--port", str(one), *SAVES]),
        Services(postgres=False, valkey_args=["--port", str(two), *SAVES]),
        redis.Redis(port=one, decode_responses=True) as first,
        redis.Redis(port=two, decode_responses=True) as second,
    ):
        second.execute_command("REPLICAOF", "127.0.0.1", one)
        wait_until(lambda: second.info("replication").get("master_link_status") == "up")
        with sentinel_of(one, tmp_path) as sentinel, behind_a_sentinel(sentinel):
            wait_patiently(lambda: sentinel.execute_command("SENTINEL", "REPLICAS", "locks"))
            lease = fenced_lock(name, ttl=60).acquire()
            first.wait(1, 5000)
            wait_patiently(lambda: has_failed_over(sentinel, second))

            wait_patiently(lambda: states.state(name).store_outage == "")
            assert said("show", name)["lease"]["holder"] == lease.holder.id.hex
            ended = operators.force_release(resolve(name), lease.holder.id.hex)
            assert ended.outcome is Outcome.RELEASED
            with pytest.raises(StaleToken):
                commit(lease)
            with fenced_lock(name) as again:
                commit(again)


def wait_patiently(condition: Callable[[], Any]) -> None:
    """A Sentinel asks its servers every 10 seconds who they are."""
    wait_until(condition, within=60, pause=0.25)


def has_failed_over(sentinel: Any, replica: Any) -> bool:
    with suppress(redis.ResponseError):  # one is in progress, or the replica is not known yet
        sentinel.execute_command("SENTINEL", "FAILOVER", "locks")
    return bool(replica.info("replication")["role"] == "master")
