"""The least that a user of Redis must be allowed: one key pattern, and these commands."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.core.cache import caches
from django.test import override_settings
from services import Services

from django_fencing import doctor, operators, states
from django_fencing.exceptions import LockHeld, StoreUnavailable
from django_fencing.locks import fenced_lock
from django_fencing.models import Fence
from django_fencing.operators import Outcome
from django_fencing.overview import all_leases, overview
from django_fencing.resources import resolve
from tests.helpers import SECONDS, commit, committing, in_background, keys_of, wait_until

pytestmark = committing("default")

PATTERN = "~fencing:*"

# What the docs have to tell. AUTH and HELLO are open to everybody, and so is CLIENT SETINFO
# dispensable: redis-py goes on without it. INFO and CONFIG GET only tell the doctor more.
SENT_BY_THE_STORE = ("evalsha", "eval", "blpop")
CALLED_BY_ITS_SCRIPTS = (
    *("time", "type", "get", "set", "del", "pexpire", "pttl", "hget", "hmget", "hset", "rpush"),
    *("zadd", "zrange", "zrangebyscore", "zrank", "zrem", "zremrangebyscore", "zscore", "dump"),
)
NEEDED = [*SENT_BY_THE_STORE, *CALLED_BY_ITS_SCRIPTS]

# Without these a waiter asks again and again, so that only the doctor notices.
DISPENSABLE = {"blpop", "zrank"}


@contextmanager
def served_at(url: str) -> Iterator[None]:
    """Let the app use the Redis at `url`, as CACHES says in production: no name, no options."""
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}
    with override_settings(CACHES={"default": cache}):
        try:
            yield
        finally:
            caches["default"].client.get_client().connection_pool.disconnect()


@contextmanager
def user(
    private_services: Services, client: Any, commands: list[str], *rules: str
) -> Iterator[None]:
    """Let the app be a user of the server with these commands, on our keys only."""
    name = f"app-{uuid4().hex}"
    allowed = [f"+{command}" for command in commands]
    client.execute_command(
        "ACL", "SETUSER", name, "on", ">secret", "resetchannels", *(rules or [PATTERN]), *allowed
    )
    path = private_services.directory / "valkey.sock"
    try:
        with served_at(f"unix://{name}:secret@{path}?db=0"):
            yield
    finally:
        client.execute_command("ACL", "DELUSER", name)


def use_everything(name: str, client: Any) -> None:
    """Do what the package does, all of it, and check that each step comes to its end."""
    client.script_flush()
    counter = keys_of(name).token
    # Acquire, confirm, extend, write, release.
    with fenced_lock(name, ttl=20) as lease:
        lease.ensure_held()
        lease.extend(30)
        commit(lease)
    # A lost counter heals.
    client.delete(counter)
    with fenced_lock(name) as lease:
        commit(lease)
        assert lease.token > 1_000_000
    # An entry that lapsed long ago is trimmed, a dead waiter is passed over.
    keys = keys_of(name)
    client.zadd(keys.held, {"name:lapsed": 1})
    client.zadd(keys.queue, {"dead": 1})
    # Renewal, and a waiter that is woken.
    with fenced_lock(name, ttl=0.6, renew=True) as lease:
        with in_background(fenced_lock(name, wait=SECONDS).acquire) as waiting:
            wait_until(lambda: client.zscore(keys.queue, "dead") is None or waiting.done())
            wait_until(lambda: client.zcard(keys.queue) >= 1 or waiting.done())
            wait_until(lambda: lease.remaining > 0.55 or lease.lost or waiting.done())
            lease.release()
        waiting.result(SECONDS).release()
    # A waiter that gives up.
    with fenced_lock(name), in_background(partial(give_up, name)) as given_up:
        given_up.result(SECONDS)
    # An operator ends a lease, and what is none.
    lease = fenced_lock(name).acquire()
    assert end(name, lease.holder.id.hex) is Outcome.RELEASED
    client.set(keys.lease, "none of ours", ex=60)
    shown = states.look(keys)
    assert shown is not None
    assert shown.holder.startswith("sha1:")
    assert end(name, shown.holder) is Outcome.RELEASED
    # The admin's page, the command's table, one resource.
    with fenced_lock(name):
        page = overview(Fence, search=name)
        assert page.outage == ""
        assert [item.resource for item in page.leases] == [name]
        assert name in [item.resource for item in all_leases(None)]
        assert states.state(name).counter is not None


def give_up(name: str) -> None:
    # Without ZRANK only the attempt at the deadline says so, if the one before has not used it up.
    with pytest.raises(Exception, match="is held by|'zrank'"):
        fenced_lock(name, wait=0.2).acquire()


def end(name: str, holder: str) -> Outcome:
    return operators.force_release(resolve(name), holder, user="boss").outcome


def diagnosis() -> dict[str, Any]:
    """Return what the doctor says of the server's permissions, and what is wrong."""
    findings = list(doctor.examine())
    return {
        "permissions": next(each for each in findings if each.what == "permissions").said,
        "wrong": [each.what for each in findings if each.well is False],
    }


def test_the_needed_commands_suffice(
    name: str, private_services: Services, private_redis: Any
) -> None:
    """Everything works for a user with these commands and one key pattern."""
    with user(private_services, private_redis, NEEDED):
        use_everything(name, private_redis)
        private_redis.script_flush()
        found = diagnosis()

    assert found == {"permissions": "all commands, on fencing:*", "wrong": []}


@pytest.mark.parametrize("command", NEEDED)
def test_each_of_them_is_needed(
    name: str, private_services: Services, private_redis: Any, command: str
) -> None:
    """Without it something fails, as an outage, and the doctor says which one it is."""
    rest = [each for each in NEEDED if each != command]
    with user(private_services, private_redis, rest):
        if command in DISPENSABLE:
            use_everything(name, private_redis)
        else:
            with pytest.raises((StoreUnavailable, LockHeld, AssertionError)):
                use_everything(name, private_redis)
        private_redis.flushall()
        found = diagnosis()

    assert command.upper() in found["permissions"]
    assert "permissions" in found["wrong"]
    assert_nothing_stays(private_redis)


@pytest.mark.parametrize("command", NEEDED)
def test_what_is_denied_leaves_nothing_without_an_end(
    name: str, private_services: Services, private_redis: Any, command: str
) -> None:
    """Whichever command is denied: acquiring, waiting and releasing leave no such key."""
    rest = [each for each in NEEDED if each != command]
    with user(private_services, private_redis, rest):
        for _ in range(2):
            with (
                suppress(StoreUnavailable, LockHeld),
                fenced_lock(name, ttl=5, wait=0.05) as lease,
            ):
                lease.extend(6)

    assert_nothing_stays(private_redis)


def assert_nothing_stays(client: Any) -> None:
    assert [key for key in client.scan_iter() if client.pttl(key) == -1] == []


def test_other_keys_are_out_of_reach(
    name: str, private_services: Services, private_redis: Any
) -> None:
    """A pattern that is not that of PREFIX makes an outage, which says what is denied."""
    with (
        user(private_services, private_redis, NEEDED, "~cache:*"),
        pytest.raises(StoreUnavailable, match="permission|NOPERM"),
    ):
        fenced_lock(name).acquire()

    assert private_redis.dbsize() == 0


def test_a_user_with_another_password_is_an_outage(name: str, private_services: Services) -> None:
    """And no traceback of redis-py."""
    path = private_services.directory / "valkey.sock"
    with (
        served_at(f"unix://nobody-{os.getpid()}:wrong@{path}?db=0"),
        pytest.raises(StoreUnavailable),
    ):
        fenced_lock(name).acquire()


def test_the_readme_names_them() -> None:
    """In one line, to be copied."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (line,) = [line for line in readme.splitlines() if line.startswith("ACL SETUSER")]
    assert line.split()[5:] == [PATTERN, *(f"+{command}" for command in NEEDED)]
