"""Leases in Redis or Valkey."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from django_fencing.conf import conf
from django_fencing.exceptions import StoreUnavailable
from django_fencing.grants import JUMP, TOKEN_LIMIT, Grant, Holder, Refusal
from django_fencing.resources import Resource
from django_fencing.stores import clients, scripts
from django_fencing.stores.asking import asking, blocking, impatient
from django_fencing.stores.base import LATENESS, Finding, Store
from django_fencing.stores.inspection import RedisInspector
from django_fencing.stores.permissions import examined

# Of the hash that is a lease. A lease with another layout counts as held by unknown.
_LAYOUT = "1"

# Bytes kept of each text that describes the holder: Redis keeps a hash compact as long as no
# value is longer (hash-max-listpack-value), and the lease stays below 512 bytes.
_LONGEST_TEXT = 64


class RedisStore(Store):
    """
    Keeps leases in the Redis of the cache FENCING["CACHE"], of django-redis or Django's own.

    It talks to the client below the cache: KEY_PREFIX, VERSION, the serializer and
    IGNORE_EXCEPTIONS play no part. Raise ImproperlyConfigured if the cache has no such client.
    """

    def acquire(
        self,
        resource: Resource,
        holder: Holder,
        *,
        ttl: float,
        floor: int,
        waits: float = 0,
        came: int = 0,
        patience: float | None = None,
    ) -> Grant | Refusal:
        keys = resource.keys
        status, *rest = scripts.run(
            "acquire",
            resource,
            [keys.lease, keys.done, keys.held, keys.token, keys.queue, keys.beats, keys.wakes],
            [
                *_asked_for(resource, holder, ttl, floor),
                _milliseconds(waits) if waits else 0,
                came,
                *_described_for(resource, holder),
            ],
            patience,
        )
        if status == "held":
            remaining, since, place, *described = rest
            return Refusal(
                remaining=_remaining(remaining),
                held_by=_described(*described),
                came=int(since),
                place=None if place == "-1" else int(place),
            )
        if status == "done":
            return Refusal()
        return self._granted(status, rest, resource)

    def wait(
        self,
        resource: Resource,
        holder: Holder,
        seconds: float,
        cancelled: threading.Event | None = None,
    ) -> bool | None:
        key = resource.keys.wakes + holder.id.hex
        try:
            with blocking(seconds + LATENESS, cancelled) as ask:
                if ask is None:
                    return None
                woken = ask("BLPOP", key, f"{max(seconds, 0.001):.3f}")  # 0 is for ever
                return woken is not None
        except redis.TimeoutError:
            return False
        except clients.FAILURES:
            return None

    def reissue(self, resource: Resource, holder: Holder, *, above: int) -> Grant | Refusal:
        keys = resource.keys
        status, *rest = scripts.run(
            "reissue",
            resource,
            [keys.lease, keys.done, keys.token],
            [holder.id.hex, above, JUMP, TOKEN_LIMIT, _milliseconds(conf.idle_ttl)],
        )
        return Refusal() if status == "lost" else self._granted(status, rest, resource)

    def confirm(self, resource: Resource, holder: Holder, *, patience: float | None = None) -> bool:
        keys = resource.keys
        (status,) = scripts.run(
            "confirm", resource, [keys.lease, keys.done], [holder.id.hex], patience
        )
        return status == "mine"

    def extend(
        self, resource: Resource, holder: Holder, *, ttl: float, patience: float | None = None
    ) -> bool:
        keys = resource.keys
        (status,) = scripts.run(
            "extend",
            resource,
            [keys.lease, keys.done, keys.held],
            [holder.id.hex, _milliseconds(ttl), keys.member, _milliseconds(conf.idle_ttl)],
            patience,
        )
        return status == "mine"

    def release(
        self,
        resource: Resource,
        holder: Holder,
        *,
        again: bool = False,
        patience: float | None = None,
    ) -> bool:
        keys = resource.keys
        (status,) = scripts.run(
            "release",
            resource,
            [keys.lease, keys.done, keys.held, keys.queue, keys.beats, keys.wakes],
            [holder.id.hex, keys.member, _milliseconds(conf.idle_ttl), int(again)],
            patience,
        )
        return status == "freed"

    def take_over(
        self, resource: Resource, shown: str, holder: Holder, *, ttl: float, floor: int
    ) -> Grant | Refusal | None:
        keys = resource.keys
        status, *rest = scripts.run(
            "take_over",
            resource,
            [keys.lease, keys.done, keys.held, keys.token],
            [
                *_asked_for(resource, holder, ttl, floor),
                shown,
                *_described_for(resource, holder),
            ],
        )
        if status in ("gone", "done"):
            return None
        if status == "held":
            remaining, *described = rest
            return Refusal(remaining=_remaining(remaining), held_by=_described(*described))
        return self._granted(status, rest, resource)

    @contextmanager
    def inspect(self, seconds: float) -> Iterator[RedisInspector]:
        with impatient(seconds) as client:
            yield RedisInspector(client)

    def examined(self, seconds: float) -> Iterator[Finding]:
        with impatient(seconds) as client:
            yield from examined(client)

    def forget(self, resource: Resource, *holders: Holder) -> None:
        try:
            asking()("DEL", resource.keys.token)
            asking()("ZREM", resource.keys.done, *(holder.id.hex for holder in holders), "-")
        except clients.FAILURES as error:
            raise StoreUnavailable(
                f"Cannot forget {resource.name!r}: {error}", resource=resource.name
            ) from error

    def describe(self) -> dict[str, object]:
        found = {"client_factory": True} if conf.client_factory else {"alias": conf.cache}
        try:
            server, *_ = clients.servers(clients.client())
        except clients.FAILURES as error:  # an ACL may forbid INFO
            return {**found, "server": "unknown", "reason": error}
        return {**found, "server": server.name, "version": server.version}

    def _granted(self, status: str, rest: list[str], resource: Resource) -> Grant:
        if status == "granted":
            return Grant(token=int(rest[0]))
        key = resource.keys.token
        reasons = {
            "unreadable": f"the key {key!r} holds no token counter. Delete it: it heals by itself.",
            "exhausted": f"the key {key!r} has reached the highest token, 2**53 - 1.",
        }
        raise StoreUnavailable(
            f"Cannot acquire {resource.name!r}: {reasons[status]}", resource=resource.name
        )


def _asked_for(resource: Resource, holder: Holder, ttl: float, floor: int) -> list[Any]:
    """Return what a script is told that may grant a lease."""
    return [
        holder.id.hex,
        _milliseconds(ttl),
        floor,
        JUMP,
        TOKEN_LIMIT,
        _milliseconds(conf.idle_ttl),
        resource.keys.member,
    ]


def _described_for(resource: Resource, holder: Holder) -> list[Any]:
    """Return what a lease says to people, behind its layout."""
    return [
        _LAYOUT,
        _short(holder.host),
        holder.pid,
        _short(holder.function),
        _short(resource.row_model._meta.label_lower),
        _short(str(resource.pk)),
    ]


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _remaining(milliseconds: str) -> float | None:
    return None if milliseconds == "-1" else int(milliseconds) / 1000


def _described(host: str = "", pid: str = "", function: str = "") -> str | None:
    return f"{function} (host {host}, pid {pid})" if host else function or None


def _short(text: str) -> str:
    if len(text) * 4 <= _LONGEST_TEXT:  # whatever letters these are
        return text
    return text.encode()[:_LONGEST_TEXT].decode(errors="ignore")
