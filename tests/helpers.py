"""What several tests do: run in threads with connections of their own, count, look into Redis."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing as closing_later
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import redis
from django.apps import apps
from django.core.cache import caches
from django.db import connections
from django.db.migrations.state import ProjectState
from django.test import override_settings

from django_fencing.leases import Lease
from django_fencing.locks import FencedLock, fenced_lock
from django_fencing.names import Keys
from django_fencing.operations import ProtectFence
from django_fencing.resources import ResourceLike, resolve
from django_fencing.stores import asking, scripts

SECONDS = 20  # after which a barrier or a thread that hangs fails its test


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run each function in a thread, start them together, and return results or exceptions."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        barrier.wait(SECONDS)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(closing, run, function) for function in functions]
    return [future.exception() or future.result() for future in futures]


def closing(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` in a thread and close the database connections that it opened there."""
    try:
        return function(*args)
    finally:
        connections.close_all()


@contextmanager
def in_background(function: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Run `function` in a thread for the length of the block, which it has to outlast."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(closing, function)


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Collect the names of the commands that are sent to Redis: one round trip each."""
    calls: list[str] = []
    execute_command, ask_until = redis.client.Redis.execute_command, asking._ask_until

    def executed(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(str(args[0]))
        return execute_command(self, *args, **options)

    def asked(deadline: float, pool: Any, *args: Any, **options: Any) -> Any:
        calls.append(str(args[0]))
        return ask_until(deadline, pool, *args, **options)

    with (
        mock.patch.object(redis.client.Redis, "execute_command", executed),
        mock.patch.object(asking, "_ask_until", asked),
    ):
        yield calls


@contextmanager
def row_locked(name: str) -> Iterator[int]:
    """Keep the row of a name's fence locked by another session, and yield its backend's pid."""
    lock = "SELECT pg_backend_pid() FROM django_fencing_fence WHERE name = %s FOR NO KEY UPDATE"
    with closing_later(connections["default"].copy()) as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(lock, [resolve(name).pk])
        (pid,) = cursor.fetchone()
        yield pid


def make_scripts_known(client: Any) -> None:
    """Load every script into the server of `client`."""
    for name in ("acquire", "reissue", "confirm", "extend", "release", "take_over"):
        client.script_load(scripts._script(name)[0])


@contextmanager
def holding(resource: ResourceLike, **options: Any) -> Iterator[Lease]:
    """Hold a lock by acquire() during the block, so that this flow does not enter it again."""
    lease = fenced_lock(resource, **options).acquire()
    try:
        yield lease
    finally:
        lease.release()


@contextmanager
def held_elsewhere(resource: ResourceLike, **options: Any) -> Iterator[Lease]:
    """Let another thread hold the lock of a resource during the block."""
    (lease,) = in_threads(fenced_lock(resource, **options).acquire)
    try:
        yield lease
    finally:
        lease.release()


def keys_of(resource: ResourceLike) -> Keys:
    """Return the keys of a resource in Redis."""
    return resolve(resource).keys


def expire(client: Any, resource: ResourceLike) -> None:
    """Let the lease of `resource` run out now, as Redis sees it."""
    assert client.delete(keys_of(resource).lease) == 1


def taken_over(lock: FencedLock, client: Any) -> Any:
    """Let the present lease run out, and return the next one."""
    expire(client, lock.resource)
    return lock.acquire()


def wait_until(
    condition: Callable[[], Any], *, within: float = SECONDS, pause: float = 0.005
) -> None:
    """Poll `condition` until it holds; fail the test if it does not in time."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)


def acquired(name: str, *, ttl: float = 30, wait: float = 0) -> Lease:
    """Return a lease of a name that asks nothing of the database."""
    return fenced_lock(name, ttl=ttl, wait=wait, register=False).acquire()


def assert_held_by(lease: Lease, client: Any) -> None:
    """Check that Redis has the lease as it was granted, for about 30 s."""
    key = keys_of(lease.resource).lease
    assert client.hget(key, "holder") == lease.holder.id.hex
    assert client.hget(key, "token") == str(lease.token)
    assert 25_000 < client.pttl(key) <= 30_000


@contextmanager
def unprotected(model: str) -> Iterator[None]:
    """Take the guards of a protected model of the example away during the block."""
    operation, state = ProtectFence(model, require_lease=True), ProjectState.from_apps(apps)
    with connections["default"].schema_editor() as editor:
        operation.database_backwards("hoa", editor, state, state)
    try:
        yield
    finally:
        with connections["default"].schema_editor() as editor:
            operation.database_forwards("hoa", editor, state, state)


@contextmanager
def cache_at(url: str, **options: Any) -> Iterator[None]:
    """Let the app use the Redis at `url` through a cache with these OPTIONS of django-redis."""
    # django-redis keeps one pool per URL, whatever the options are.
    location = f"{url}&client_name={uuid.uuid4().hex}"
    cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": options}
    with override_settings(CACHES={"default": cache}):
        try:
            yield
        finally:
            caches["default"].client.get_client().connection_pool.disconnect()


@contextmanager
def monitored(client: Any) -> Iterator[list[list[str]]]:
    """Collect the commands that Redis runs during the block, those inside of scripts too."""
    commands: list[list[str]] = []
    with client.monitor() as monitor:
        yield commands
        client.echo("end")
        while (command := monitor.next_command()["command"].split(" "))[0] != "ECHO":
            if command[0] not in ("CLIENT", "HELLO", "SELECT"):  # of a new connection
                commands.append(command)


class Body:
    """A function that runs in a thread of its own, and stops where it calls its first argument."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._paused, self._resumed = threading.Event(), threading.Event()
        self._future: Future[Any] = Future()
        self.thread = threading.Thread(target=self._run, args=(function, *args), daemon=True)
        self.thread.start()

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self._future.set_result(closing(function, self._pause, *args))
        except BaseException as error:  # noqa: BLE001 - finish() returns it
            self._future.set_exception(error)

    def _pause(self) -> None:
        self._paused.set()
        assert self._resumed.wait(SECONDS)

    @property
    def stands(self) -> bool:
        """Whether it has come to its pause, or to its end."""
        return self._paused.is_set() or self._future.done()

    def reach_pause(self) -> None:
        """Wait for its pause, and raise what it raises before that."""
        wait_until(lambda: self.stands)
        assert self._paused.is_set(), self._future.result()

    def go_on(self) -> None:
        """Let it go on behind its pause."""
        self._resumed.set()

    def finish(self) -> Any:
        """Let it go on, and return its result or its exception."""
        self.go_on()
        return self._future.exception(SECONDS) or self._future.result()


@contextmanager
def started(function: Callable[..., Any], *args: Any) -> Iterator[Body]:
    """Run function(pause, *args) in a thread, and see that it ends with the block."""
    body = Body(function, *args)
    try:
        yield body
    finally:
        body.finish()


def count_sessions() -> int:
    """Return how many sessions the database has; those that were closed are gone a little later."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        return int(cursor.fetchone()[0])


def waits_for_row(alias: str = "default", seconds: float = 0) -> bool:
    """Say whether a session of this database waits for a lock, in one statement for so long."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
            " AND clock_timestamp() - query_start >= make_interval(secs => %s)",
            [seconds],
        )
        return bool(cursor.fetchone()[0])


def committing(*aliases: str) -> pytest.MarkDecorator:
    """Mark tests that commit in these databases. Only the tables that they use are emptied."""
    apps = ["django_fencing", "tests.shop"]
    return pytest.mark.django_db(transaction=True, databases=aliases, available_apps=apps)


def commit(lease: Lease, body: Callable[[], Any] = lambda: None) -> None:
    """Run `body` in a fenced transaction of `lease`."""
    with lease.atomic():
        body()


def sql(statement: str, params: Any = None, alias: str = "default") -> Any:
    """Run a statement, and return its rows if it has any."""
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, params)
        return cursor.fetchall() if cursor.description else cursor.rowcount


@contextmanager
def statements(alias: str = "default") -> Iterator[list[str]]:
    """Collect the SQL of this thread's connection."""
    collected: list[str] = []

    def collect(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        collected.append(sql)
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(collect):
        yield collected
