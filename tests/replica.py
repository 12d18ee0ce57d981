"""One of several processes that add one to a value under a lock, and the ways to do so.

Run as a program, it takes orders line by line: `python -m tests.replica`.
"""

import json
import os
import random
import select
import sys
from collections import Counter as Tally
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import django
from django.core.cache import caches
from django.db import connections, transaction
from redis.exceptions import LockNotOwnedError

if __name__ == "__main__":
    django.setup()

from django_fencing.exceptions import FencingError, StaleToken
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence
from django_fencing.resources import ResourceLike, resolve
from tests.shop.models import Counter, Job

At = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A value that a resource protects: whoever holds the resource writes it plus one."""

    resource: ResourceLike
    alias: str = "default"
    pk: int  # of the value
    ttl: float = 60

    @property
    def lease(self) -> str:
        """The key of the resource's lease in Redis."""
        return resolve(self.resource, self.alias).keys.lease

    @property
    def plain_lock(self) -> str:
        """The name of what django-redis locks instead."""
        return f"plain:{self.lease}"

    @property
    def fence(self) -> int:
        """The token that the database knows."""
        place = resolve(self.resource, self.alias)
        rows = place.model.objects.using(self.alias)
        return int(rows.values_list("last_fence_token", flat=True).get(pk=place.pk))

    @property
    def value(self) -> int:
        """What the database says."""
        return Counter.objects.using(self.alias).get(pk=self.pk).value

    def write(self, value: int) -> None:
        """Save it."""
        Counter.objects.using(self.alias).filter(pk=self.pk).update(value=value)


# Five ways to add one under a lock. Each says where it is, and may be stopped there.


def by_fenced_lock(at: At, work: Work) -> None:
    """Read under the lock, and write in a fenced transaction."""
    with fenced_lock(work.resource, using=work.alias, ttl=work.ttl) as lease:
        at("acquired")
        value = work.value
        at("read")
        with lease.atomic():
            at("locked")
            work.write(value + 1)
            at("written")


def by_unregistered_lock(at: At, work: Work) -> None:
    """Leave registering to the transaction, and read and write in there."""
    lock = fenced_lock(work.resource, using=work.alias, ttl=work.ttl, register=False)
    with lock as lease:
        at("acquired")
        with lease.atomic():
            at("locked")
            value = work.value
            at("read")
            work.write(value + 1)
            at("written")


def by_fenced_atomic(at: At, work: Work) -> None:
    """Do the same in one word."""
    with fenced_atomic(work.resource, using=work.alias, ttl=work.ttl):
        at("locked")
        value = work.value
        at("read")
        work.write(value + 1)
        at("written")


def by_plain_lock(at: At, work: Work) -> None:
    """Hold a lock of django-redis, as most do, and write in a transaction."""
    lock = caches["default"].lock(work.plain_lock, timeout=work.ttl)
    assert lock.acquire(blocking=False)
    value = work.value
    at("read")
    with transaction.atomic(using=work.alias):
        work.write(value + 1)
    with suppress(LockNotOwnedError):
        lock.release()


def by_textbook_rule(at: At, work: Work) -> None:
    """Take a growing token with the lock, and write unless a higher one has written."""
    token = caches["default"].client.get_client().incr(f"textbook:{work.lease}")
    place = resolve(work.resource, work.alias)
    fences = place.model.objects.using(work.alias)
    if place.model is Fence:
        fences.bulk_create([Fence(name=place.pk)], ignore_conflicts=True)
    value = work.value
    at("read")
    with transaction.atomic(using=work.alias):
        refuse_lower(fences.filter(pk=place.pk), token)
        work.write(value + 1)


def refuse_lower(fences: Any, token: int) -> None:
    """Move a fence up to `token`, or raise StaleToken: the textbook's rule."""
    if not fences.filter(last_fence_token__lte=token).update(last_fence_token=token):
        raise StaleToken("A higher token has written.", token=token)


FENCED = (by_fenced_lock, by_unregistered_lock, by_fenced_atomic)
WAYS = {way.__name__: way for way in (*FENCED, by_plain_lock, by_textbook_rule)}


# The program


def add_one(way: str, point: str, job: int, **work: Any) -> str:
    """Add one. At `point` report it, and go on at the next line of standard input."""

    def at(here: str) -> None:
        if here == point:
            tell(at=here)
            sys.stdin.readline()

    try:
        WAYS[way](at, Work(resource=(Job, job), **work))
    except FencingError as error:
        return type(error).__name__
    return "committed"


def add_many(seed: int, job: int, **work: Any) -> dict[str, int]:
    """Add one in all fenced ways until a line comes in, and return how often each was the end."""
    chance = random.Random(seed)
    ends: Tally[str] = Tally()
    while not select.select([sys.stdin], [], [], 0)[0]:
        ends[add_one(chance.choice(FENCED).__name__, "", job, **work)] += 1
    sys.stdin.readline()
    return ends


def fork(children: int, rounds: int, resource: str) -> list[list[Any]]:
    """Let children lock a name again and again; return tokens and holders in the order of grants.

    The process has used its connections to Redis before.
    """
    lock = fenced_lock(resource, wait=20)
    with lock:
        pass
    connections.close_all()
    reader, writer = os.pipe()
    pids = [os.fork() or _lock_in_child(lock, rounds, writer) for _ in range(children)]
    os.close(writer)
    with os.fdopen(reader) as lines:
        grants = [json.loads(line) for line in lines]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * children
    return grants


def _lock_in_child(lock: Any, rounds: int, writer: int) -> int:
    status = 1
    try:
        for _ in range(rounds):
            with lock as lease:
                grant = json.dumps([lease.token, lease.holder.id.hex, lease.holder.pid])
                os.write(writer, f"{grant}\n".encode())
        connections.close_all()
        status = 0
    finally:
        os._exit(status)


def tell(**report: Any) -> None:
    sys.stdout.write(f"{json.dumps(report)}\n")
    sys.stdout.flush()


def main() -> None:
    """Do what each line of standard input orders, and report the result in a line."""
    orders = {"add_one": add_one, "add_many": add_many, "fork": fork}
    tell(ready=True)
    while line := sys.stdin.readline():
        order, arguments = json.loads(line)
        tell(end=orders[order](**arguments))


if __name__ == "__main__":
    main()
