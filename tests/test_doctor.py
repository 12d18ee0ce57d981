"""The doctor: nothing to say of a good server, a line for each fault, and nothing left behind."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.test import override_settings
from services import Services

from django_fencing import doctor
from django_fencing.locks import fenced_lock
from django_fencing.models import Fence, FenceEvent, FenceFloor, OnceRecord
from django_fencing.stores.base import Finding
from tests.helpers import cache_at, committing, keys_of
from tests.test_acl import NEEDED, PATTERN, user
from tests.test_operations import protected

pytestmark = committing("default", "other")

STEPS = ["acquire", "extend", "confirm", "wait", "hand over", "release"]


@pytest.fixture(autouse=True)
def good_server(private_redis: Any) -> Iterator[None]:
    """Let the server be as it should, before and after."""
    private_redis.config_set("save", "3600 1")
    try:
        yield
    finally:
        private_redis.config_set("save", "")
        private_redis.config_set("maxmemory-policy", "noeviction")


def findings() -> dict[str, Finding]:
    """Return what the doctor finds, by what it has looked at."""
    found = list(doctor.examine())
    assert len({each.what for each in found}) == len(found), found
    return {each.what: each for each in found}


def wrong() -> dict[str, str]:
    """Return what is wrong, and what is said of it."""
    return {each.what: each.said for each in findings().values() if each.well is False}


@contextmanager
def fencing(**values: Any) -> Iterator[None]:
    with override_settings(FENCING={**settings.FENCING, **values}):
        yield


def test_all_is_well() -> None:
    """Every step is tried, each once."""
    found = findings()

    assert list(found) == [
        *("settings", "server", "eviction", "persistence", "permissions"),
        *STEPS,
        *("register", "tables", "idle_in_transaction_session_timeout", "guards", "counters"),
    ]
    assert {each.well for each in found.values()} == {True}
    assert found["server"].said.startswith("valkey ")
    assert found["acquire"].said == "token 1"
    assert found["hand over"].said == "token 2"
    assert found["wait"].said == "woken by the release"


def test_a_holder_may_freeze_for_ever() -> None:
    """Where nothing bounds it, that is to be noted; it is no fault of this package."""
    what = "idle_in_transaction_session_timeout"
    bounded = findings()[what]
    with connection.cursor() as cursor:
        cursor.execute(f"SET {what} = 0")
        unbounded = findings()[what]
        cursor.execute(f"RESET {what}")

    assert (bounded.well, bounded.said) == (True, "1min")
    assert unbounded.well is None
    assert unbounded.said.startswith("0: ")


def test_it_tells_which_tables_are_guarded() -> None:
    """Each of them, and those whose guards sleep, be it for all or for this session alone."""
    with protected("Job"), protected("Code", require_lease=True):
        before = findings()["guards"]
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE shop_job DISABLE TRIGGER USER")
            one = findings()["guards"]
            cursor.execute("ALTER TABLE shop_job ENABLE TRIGGER USER")
            cursor.execute("SET session_replication_role = replica")
            both = findings()["guards"]
            cursor.execute("RESET session_replication_role")
        again = findings()["guards"]
    none = findings()["guards"]

    assert before == again
    assert before.well is True
    assert before.said.startswith("by ProtectFence: shop_code, shop_job; without it: ")
    assert "django_fencing_fence" in before.said.partition("without it: ")[2].split(", ")
    assert one.well is False
    assert one.said.startswith("by ProtectFence: shop_code; without it: ")
    assert one.said.endswith("; TRIGGERS DISABLED: shop_job")
    assert both.well is False
    assert both.said.endswith("; TRIGGERS DISABLED: shop_code, shop_job")
    assert none.said.startswith("without it: django_fencing_fence, ")


def test_nothing_is_left_behind(name: str, private_redis: Any) -> None:
    """Neither in Redis nor in the database."""
    with fenced_lock(name):
        pass
    private_redis.flushall()
    models = (Fence, FenceFloor, FenceEvent, OnceRecord)
    before = [list(model.objects.values()) for model in models]

    assert wrong() == {}

    assert [list(model.objects.values()) for model in models] == before
    assert list(private_redis.scan_iter()) == []


def test_what_is_left_has_an_end(private_redis: Any) -> None:
    """At most the holders that are done, for a minute, as after any release."""
    private_redis.flushall()
    findings()
    left = list(private_redis.scan_iter())
    assert all(key.endswith(":done") for key in left)
    assert all(0 < private_redis.pttl(key) <= 60_000 for key in left)


def test_it_may_run_many_times_and_at_once(private_redis: Any) -> None:
    """Each has a probe of its own."""
    assert [wrong() for _ in range(3)] == [{}] * 3


def test_it_disturbs_nobody(name: str, private_redis: Any) -> None:
    """A lease that is held meanwhile stays as it is."""
    lease = fenced_lock(name).acquire()
    before = private_redis.hgetall(keys_of(name).lease)
    assert wrong() == {}
    assert private_redis.hgetall(keys_of(name).lease) == before
    lease.ensure_held()


# The server


@pytest.mark.parametrize(
    "policy", ["allkeys-lru", "volatile-ttl", "volatile-lru", "allkeys-random"]
)
def test_a_server_that_evicts(private_redis: Any, policy: str) -> None:
    """Leases may end early."""
    private_redis.config_set("maxmemory-policy", policy)
    assert wrong() == {"eviction": f"maxmemory-policy {policy}: leases may end early"}


def test_a_server_that_persists_nothing(private_redis: Any) -> None:
    """It is noted: the database refuses late writes all the same."""
    private_redis.config_set("save", "")
    found = findings()
    assert found["persistence"].well is None
    assert "a restart ends leases" in found["persistence"].said
    assert wrong() == {}


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1?db=0", "unix:///nowhere.sock?db=0"])
def test_a_server_that_is_away(url: str) -> None:
    """One line, and it ends there."""
    with cache_at(url):
        found = list(doctor.examine())
    assert [each.what for each in found] == ["settings", "store"]
    assert found[-1].well is False


@pytest.mark.parametrize("mode", ["ALL", "WRITE"])
def test_a_silent_server_takes_no_more_than_moments(private_redis: Any, mode: str) -> None:
    """It is bounded in time, whatever the client's own options are."""
    with patient_client(private_redis), paused(private_redis, mode):
        began = time.monotonic()
        found = list(doctor.examine())
        took = time.monotonic() - began
    assert took < 3
    assert [each.what for each in found if each.well is False] == ["store"]


def test_a_server_that_becomes_silent_in_between(private_redis: Any) -> None:
    """Behind the permissions, where its own client asks: it ends all the same."""
    with patient_client(private_redis), ExitStack() as silence:
        for finding in doctor.examine():
            if finding.what == "permissions":
                silence.enter_context(paused(private_redis, "ALL"))
                began = time.monotonic()
        took = time.monotonic() - began
    assert took < 3


@contextmanager
def patient_client(client: Any) -> Iterator[None]:
    """Let the app's client have no timeout, as before redis-py 8."""
    path = client.connection_pool.connection_kwargs["path"]
    options = {"CONNECTION_POOL_KWARGS": {"socket_timeout": None}}
    with cache_at(f"unix://{path}?db=0", **options):
        yield


@contextmanager
def paused(client: Any, mode: str) -> Iterator[None]:
    """Let the server be silent for about 4 s, and wait until it is not."""
    client.execute_command("CLIENT", "PAUSE", "4000", mode)
    try:
        yield
    finally:
        client.set("are you there?", "yes", px=1)


@pytest.mark.parametrize("command", NEEDED)
def test_a_command_that_is_denied(
    private_services: Services, private_redis: Any, command: str
) -> None:
    """The doctor says which, goes on to the end, and leaves nothing for long."""
    rest = [each for each in NEEDED if each != command]
    private_redis.script_flush()
    with user(private_services, private_redis, rest):
        found = findings()

    assert found["permissions"].well is False
    assert command.upper() in found["permissions"].said
    assert {"register", "counters"} <= set(found)
    ends = {key: private_redis.pttl(key) for key in private_redis.scan_iter()}
    assert -1 not in ends.values()
    # Where nothing may be deleted, the counter stays until it is idle for long enough.
    assert all(end <= 60_000 or ":held" in key or ":token:" in key for key, end in ends.items())


def test_a_user_with_other_keys(private_services: Services, private_redis: Any) -> None:
    """The permissions are wrong, and nothing works, in as many lines."""
    with user(private_services, private_redis, NEEDED, "~cache:*"):
        found = wrong()
    assert found["permissions"].startswith("SET is denied on fencing:{")
    assert "acquire" in found
    assert private_redis.dbsize() == 0


def test_a_user_that_reads_only(private_services: Services, private_redis: Any) -> None:
    """As one for monitoring has it."""
    with user(private_services, private_redis, NEEDED, f"%R{PATTERN}"):
        found = wrong()
    assert "permissions" in found
    assert private_redis.dbsize() == 0


def test_another_prefix_is_what_is_examined(private_services: Services, private_redis: Any) -> None:
    """The keys are those of PREFIX."""
    with fencing(PREFIX="elsewhere"):
        with user(private_services, private_redis, NEEDED):
            assert "permissions" in wrong()
        with user(private_services, private_redis, NEEDED, "~elsewhere:*"):
            assert wrong() == {}


def test_a_server_that_does_not_say_what_it_is(
    private_services: Services, private_redis: Any
) -> None:
    """INFO is denied: noted, and the rest is examined."""
    with user(private_services, private_redis, NEEDED):
        found = findings()
    assert found["server"].well is None
    assert "eviction" not in found
    assert wrong() == {}


def test_a_replica(private_redis: Any) -> None:
    """Whose client was given the wrong address: it refuses every write."""
    private_redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        found = wrong()
    finally:
        private_redis.execute_command("REPLICAOF", "NO", "ONE")
    assert "permissions" in found
    assert "acquire" in found


def test_a_server_whose_memory_is_full(private_redis: Any) -> None:
    """It refuses every write; that is told, and nothing stays."""
    private_redis.config_set("maxmemory", "1")
    try:
        found = wrong()
    finally:
        private_redis.config_set("maxmemory", "0")
    assert "acquire" in found
    assert all(private_redis.pttl(key) != -1 for key in private_redis.scan_iter())


# The database


def test_a_table_that_is_missing() -> None:
    """Migrations were not run."""
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_fencing_fence RENAME TO gone")
        try:
            found = wrong()
        finally:
            cursor.execute("ALTER TABLE gone RENAME TO django_fencing_fence")
    assert set(found) == {"register", "tables", "counters"}
    assert "django_fencing_fence" in found["register"]
    assert "\n" not in found["register"]


@pytest.mark.parametrize("model", [FenceFloor, OnceRecord, FenceEvent])
def test_another_table_that_is_missing(model: Any) -> None:
    """Each is needed for something."""
    table = model._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f'ALTER TABLE "{table}" RENAME TO gone')
        try:
            assert wrong()
        finally:
            cursor.execute(f'ALTER TABLE gone RENAME TO "{table}"')


def test_a_database_that_is_read_only() -> None:
    """A standby, say."""
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
        try:
            found = wrong()
        finally:
            cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE")
    assert list(found) == ["register"]
    assert "read-only" in found["register"]


def test_a_database_that_is_away() -> None:
    """Told in one line; Redis was examined before."""
    known = connections["default"].settings_dict
    connections["default"].close()
    with mock.patch.dict(known, {"NAME": f"missing-{uuid4().hex}"}):
        found = wrong()
        connections["default"].close()
    assert set(found) == {"register", "tables", "guards", "counters"}


def test_counters_that_are_behind(name: str, private_redis: Any) -> None:
    """They are noted, with the first five names: the next acquisition heals them."""
    names = [f"{name} {number}" for number in range(7)]
    for each in names:
        for _ in range(3):
            with fenced_lock(each):
                pass
    for each in names[1:]:
        private_redis.set(keys_of(each).token, "2", ex=60)
    private_redis.delete(keys_of(names[0]).token)  # lost: it is not behind

    found = findings()["counters"]

    assert found.well is None
    assert found.said.startswith("7 compared, 6 behind their fence")
    assert found.said.count(name) == 5
    with fenced_lock(names[1]):
        pass
    assert "5 behind" in findings()["counters"].said


def test_counters_that_cannot_be_read(name: str, private_redis: Any) -> None:
    """They are no obstacle here: an acquisition says so."""
    with fenced_lock(name):
        pass
    private_redis.delete(keys_of(name).token)
    private_redis.lpush(keys_of(name).token, "x")
    assert findings()["counters"].said == "1 compared, 0 behind their fence"


def test_a_database_that_reads_from_snapshots() -> None:
    """It registers alone there, which is well."""
    with fencing(DATABASE="other"):
        assert "'other'" in findings()["register"].said


# The settings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"TTTL": 3}, "unknown keys"),
        ({"TTL": "soon"}, "FENCING['TTL']"),
        ({"DATABASE": "nowhere"}, "FENCING['DATABASE']"),
        ({"NAMESPACE": "no.such.callable"}, "FENCING['NAMESPACE']"),
        ({"LEDGER": 1}, "FENCING['LEDGER']"),
    ],
)
def test_settings_that_are_wrong(values: dict[str, Any], said: str, private_redis: Any) -> None:
    """Told, and nothing else is tried."""
    with fencing(**values):
        (found,) = list(doctor.examine())
    assert (found.what, found.well) == ("settings", False)
    assert said in found.said
    assert private_redis.dbsize() == 0


def test_two_settings_that_are_wrong() -> None:
    """Each has its line."""
    with fencing(TTL=-1, WAIT=-1):
        assert len([each for each in doctor.examine() if each.what == "settings"]) == 2


@pytest.mark.parametrize("values", [{"CACHE": "nowhere"}, {"STORE": "no.such.Store"}])
def test_a_store_that_is_none(values: dict[str, Any]) -> None:
    """As the checks say it."""
    with fencing(**values):
        assert list(wrong()) == ["store"]


def test_a_namespace_that_is_no_text() -> None:
    """What the callable returns is a finding like any other."""
    with fencing(NAMESPACE=lambda: 7):
        assert any("NAMESPACE" in each.said for each in doctor.examine() if not each.well)


def test_the_command_ends_with_one(private_redis: Any) -> None:
    """And names what is wrong."""
    private_redis.config_set("maxmemory-policy", "allkeys-lfu")
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY")
        try:
            with pytest.raises(CommandError, match=r"^Wrong: eviction, register\.$") as caught:
                call_command("fencing", "doctor", stdout=mock.Mock())
        finally:
            cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE")
    assert caught.value.returncode == 1
