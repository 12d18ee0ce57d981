"""What the leases' server says of itself, and what it lets its user do. Nothing stays there."""

import uuid
from collections.abc import Iterator
from dataclasses import replace
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
        servers = clients.servers(client)
    except redis.ResponseError as error:  # an ACL may forbid INFO
        yield Finding("server", None, f"it does not say what it is: {error}")
        return
    versions = dict.fromkeys(f"{server.name} {server.version}" for server in servers)
    yield Finding("server", True, ", ".join(versions))
    policies = dict.fromkeys(server.eviction for server in servers if server.eviction)
    if policies:
        well = list(policies) == [_SAFE_POLICY]
        said = f"maxmemory-policy {', '.join(policies)}"
        yield Finding("eviction", well, said if well else f"{said}: leases may end early")
    known = [server.persists for server in servers if server.persists is not None]
    if known:
        said = "it persists" if all(known) else "it persists nothing: a restart ends leases"
        yield Finding("persistence", True if all(known) else None, said)


def _permissions(client: Any) -> Iterator[Finding]:
    denied: dict[str, None] = {}
    for probe in _probes(client):
        try:
            client.execute_command("SET", probe, "probe", "PX", "5000", **clients.RAW)
        except redis.ResponseError as error:
            yield Finding("permissions", False, f"SET is denied on {probe}: {error}")
            return
        denied |= dict.fromkeys(_denied(client, probe))
    said = f"denied: {', '.join(denied)}" if denied else f"all commands, on {conf.prefix}:*"
    yield Finding("permissions", not denied, said)


def _probes(client: Any) -> list[str]:
    """Return a key of the leases' own pattern, of a cluster one on each primary."""
    member = f"name:fencing-doctor:{uuid.uuid4().hex}"
    if not hasattr(client, "get_node_from_key"):
        return [Keys.of(conf.prefix, member).lease]
    keys = [replace(tag, member=member).lease for tag in Keys.every_tag(conf.prefix)]
    return list({client.get_node_from_key(key).name: key for key in keys}.values())


def _denied(client: Any, probe: str) -> list[str]:
    """Return the commands that are denied on the server that has this key, and delete it."""
    pipeline = client.pipeline(transaction=False)
    for name, *arguments in _COMMANDS:
        given = [probe if one == "KEY" else one.replace("KEY", probe) for one in arguments]
        pipeline.execute_command(name, *given, **clients.RAW)
    pipeline.execute_command("DEL", probe, **clients.RAW)
    answers = pipeline.execute(raise_on_error=False)
    return [
        command[0]
        for command, answer in zip(_COMMANDS, answers, strict=False)
        if isinstance(answer, Exception) and _is_denial(answer)
    ]


def _is_denial(answer: Exception) -> bool:
    return isinstance(answer, redis.exceptions.NoPermissionError) or "NOPERM" in str(answer)
