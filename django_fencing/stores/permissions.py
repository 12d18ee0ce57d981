"""What the leases' server says of itself, and what it lets its user do. Nothing stays there."""

import uuid
from collections.abc import Iterator
from typing import Any

import redis

from django_fencing.conf import conf
from django_fencing.exceptions import StoreUnavailable
from django_fencing.names import Keys
from django_fencing.stores import clients
from django_fencing.stores.base import Finding

# What the store sends, and what its scripts call, each in a form that changes nothing: on a text,
# on which all but a few of them fail after the server has looked at the permissions.
_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("EVALSHA", "0" * 40, "0"),
    ("EVAL", "return 1", "0"),
    ("BLPOP", "KEY", "0.01"),
    ("TIME",),
    ("TYPE", "KEY"),
    ("GET", "KEY"),
    ("DEL", "KEY missing"),
    ("PEXPIRE", "KEY", "5000"),
    ("PTTL", "KEY"),
    ("HGET", "KEY", "field"),
    ("HMGET", "KEY", "field"),
    ("HSET", "KEY", "field", "value"),
    ("RPUSH", "KEY", "value"),
    ("ZADD", "KEY", "1", "member"),
    ("ZRANGE", "KEY", "0", "0"),
    ("ZRANGEBYSCORE", "KEY", "-inf", "0"),
    ("ZRANK", "KEY", "member"),
    ("ZREM", "KEY", "member"),
    ("ZREMRANGEBYSCORE", "KEY", "-inf", "0"),
    ("ZSCORE", "KEY", "member"),
    ("DUMP", "KEY"),
)

_SAFE_POLICY = "noeviction"


def examined(client: Any) -> Iterator[Finding]:
    """Yield what there is to be said of the server. Raise StoreUnavailable."""
    try:
        yield from _server(client)
        yield from _permissions(client)
    except clients.FAILURES as error:
        raise StoreUnavailable(f"The server that keeps the leases: {error}") from error


def _server(client: Any) -> Iterator[Finding]:
    try:
        server = clients.server(client)
    except redis.ResponseError as error:  # an ACL may forbid INFO
        yield Finding("server", None, f"it does not say what it is: {error}")
        return
    yield Finding("server", True, f"{server.name} {server.version}")
    if server.eviction:
        said = f"maxmemory-policy {server.eviction}"
        well = server.eviction == _SAFE_POLICY
        yield Finding("eviction", well, said if well else f"{said}: leases may end early")
    if server.persists is not None:
        said = "it persists" if server.persists else "it persists nothing: a restart ends leases"
        yield Finding("persistence", True if server.persists else None, said)


def _permissions(client: Any) -> Iterator[Finding]:
    probe = Keys.of(conf.prefix, f"name:fencing-doctor:{uuid.uuid4().hex}").lease
    try:
        client.execute_command("SET", probe, "probe", "PX", "5000", **clients.RAW)
    except redis.ResponseError as error:
        yield Finding("permissions", False, f"SET is denied on {probe}: {error}")
        return
    pipeline = client.pipeline(transaction=False)
    for name, *arguments in _COMMANDS:
        given = [probe if one == "KEY" else one.replace("KEY", probe) for one in arguments]
        pipeline.execute_command(name, *given, **clients.RAW)
    pipeline.execute_command("DEL", probe, **clients.RAW)
    answers = pipeline.execute(raise_on_error=False)
    denied = [
        command[0]
        for command, answer in zip(_COMMANDS, answers, strict=False)
        if isinstance(answer, Exception) and _is_denial(answer)
    ]
    said = f"denied: {', '.join(denied)}" if denied else f"all commands, on {conf.prefix}:*"
    yield Finding("permissions", not denied, said)


def _is_denial(answer: Exception) -> bool:
    return isinstance(answer, redis.exceptions.NoPermissionError) or "NOPERM" in str(answer)
