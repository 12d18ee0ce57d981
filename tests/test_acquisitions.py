"""What an acquisition may refuse, and what it undoes."""

from typing import Any

import pytest
from django.db import connections, transaction

from django_fencing.exceptions import StaleToken
from django_fencing.leases import Lease
from django_fencing.locks import FencedLock, fenced_atomic, fenced_lock
from django_fencing.signals import lease_acquired
from tests.helpers import commit, committing, expire, in_threads, keys_of
from tests.shop.models import Job

pytestmark = committing("default", "other", "repeatable", "sqlite")

ALIASES = ["default", "repeatable", "sqlite"]


def tokens_of(job: Job, alias: str, seen: int) -> tuple[int, int]:
    """Register in a fenced transaction, as a form does that was made at the token `seen`."""
    lock = FencedLock(resource=(Job, job.pk), using=alias, register=False, seen=seen)
    with lock.ask().opened() as lease:
        return lease.token, lease.row.last_fence_token


@pytest.mark.parametrize("alias", ALIASES)
def test_whoever_has_seen_the_present_fence_registers(client: Any, alias: str) -> None:
    """Whatever the counter in Redis says: it may be lost, or ahead."""
    job = Job.objects.using(alias).create()
    key = keys_of(job).token

    first, _ = tokens_of(job, alias, 0)
    client.delete(key)
    second, registered = tokens_of(job, alias, first)
    client.set(key, second + 500)
    third, _ = tokens_of(job, alias, second)

    assert first < second == registered
    assert third == second + 501


@pytest.mark.parametrize("alias", ALIASES)
def test_whoever_has_seen_an_older_fence_is_refused(client: Any, alias: str) -> None:
    """And leaves neither a lease nor a newer fence."""
    job = Job.objects.using(alias).create()
    token, _ = tokens_of(job, alias, 0)

    with pytest.raises(StaleToken, match=f"{token} is registered"):
        tokens_of(job, alias, 0)

    job.refresh_from_db()
    assert job.last_fence_token == token
    assert not client.exists(keys_of(job).lease)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_older_holder_that_registers_after_the_grant_is_noticed(client: Any, alias: str) -> None:
    """The comparison and the move of the fence are one statement."""
    job = Job.objects.using(alias).create()
    older = fenced_lock((Job, job.pk), using=alias, register=False).acquire()
    expire(client, job)

    def overtake(lease: Lease, **kwargs: Any) -> None:
        assert in_threads(lambda: commit(older)) == [None]

    lease_acquired.connect(overtake)
    try:
        with pytest.raises(StaleToken):
            tokens_of(job, alias, 0)
    finally:
        lease_acquired.disconnect(overtake)

    assert not client.exists(keys_of(job).lease)


def test_a_body_that_fails_leaves_the_transaction_of_another_database_alone(name: str) -> None:
    """Only what the lock's own database has open is undone."""
    with transaction.atomic(using="other"):
        with pytest.raises(KeyError), fenced_atomic(name):
            raise KeyError(name)
        with pytest.raises(KeyError), fenced_lock(name) as lease, lease.atomic():
            raise KeyError(name)
        assert connections["other"].in_atomic_block
        Job.objects.using("other").create(note=name)

    assert Job.objects.using("other").filter(note=name).exists()


def test_a_lock_that_fails_leaves_the_fenced_transaction_of_another_one_alone(name: str) -> None:
    """Each lease has its own database."""
    with fenced_lock(name, using="other") as outer, outer.atomic():
        Job.objects.using("other").create(note=name)
        with pytest.raises(KeyError), fenced_atomic(f"{name}:inner"):
            raise KeyError(name)

    assert Job.objects.using("other").filter(note=name).exists()
