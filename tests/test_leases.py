"""A lease by itself: what it says, and what it refuses."""

from typing import Any

import pytest
from django.db import transaction

from django_fencing.exceptions import FencingError, LeaseLost, StaleToken
from django_fencing.leases import Lease
from django_fencing.locks import fenced_lock
from tests.helpers import counted_calls, in_threads, keys_of, taken_over
from tests.shop.models import Job

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_lease_says_what_it_is(job: Job) -> None:
    """Resource, token, holder and row are there from the start."""
    with fenced_lock(job, ttl=20) as lease:
        assert lease.resource == job.fence_name
        assert repr(lease).startswith(f"<Lease '{job.fence_name}' token=1 remaining=19.")
        assert lease.row == job
        assert lease.row is not job
        assert lease.row.last_fence_token == lease.token == 1
        assert str(lease.holder).startswith(f"{__name__}.test_a_lease_says_what_it_is (host ")


def test_an_unregistered_lease_has_no_row_before_its_first_transaction(job: Job) -> None:
    """Nothing was read yet."""
    with fenced_lock(job, register=False) as lease:
        with pytest.raises(FencingError, match="has no row before the first"):
            lease.row  # noqa: B018
        with lease.atomic() as row:
            assert lease.row is row


def test_each_transaction_yields_the_row_as_it_is_then(job: Job) -> None:
    """And the lease keeps the newest."""
    with fenced_lock(job) as lease:
        with lease.atomic() as row:
            row.amount = 20
            row.save()
        Job.objects.update(amount=30)
        with lease.atomic() as row:
            assert row.amount == 30
        assert lease.row is row


def test_a_released_lease_is_over(name: str) -> None:
    """It asks the store nothing, and opens no transaction."""
    lease = fenced_lock(name).acquire()
    assert lease.release() is True

    with counted_calls() as calls:
        for action in (lease.ensure_held, lease.extend, lambda: lease.atomic().__enter__()):
            with pytest.raises(LeaseLost, match="is over: it was released"):
                action()
        assert lease.release() is True

    assert calls == []
    assert not lease.lost


def test_a_lease_that_was_overtaken_is_lost(name: str, client: Any) -> None:
    """Each way to find out says so, and the token is in the error."""
    lock = fenced_lock(name)
    for find_out in ("ensure_held", "extend"):
        lease = lock.acquire()
        (successor,) = in_threads(lambda: taken_over(lock, client))
        assert not lease.lost

        with pytest.raises(LeaseLost) as caught:
            getattr(lease, find_out)()

        assert lease.lost
        assert (caught.value.resource, caught.value.token) == (name, lease.token)
        assert lease.release() is False
        assert successor.release() is True


def test_a_transaction_that_was_rolled_back_is_not_lifted_over_a_newer_holder(
    job: Job, client: Any
) -> None:
    """Not even by a Redis that still calls the lease its own: what it read may be older."""
    lock = fenced_lock(job, register=False)
    lease = lock.acquire()
    with lease.atomic() as row:
        seen = row.amount
        transaction.set_rollback(True)

    remembered = client.hgetall(keys_of(job).lease)
    (successor,) = in_threads(lambda: taken_over(lock, client))
    with successor.atomic() as row:
        row.amount = 20
        row.save()
    client.hset(keys_of(job).lease, mapping=remembered)

    with pytest.raises(StaleToken, match="2 is registered"):
        add_one_to(seen, lease)
    assert lease.lost
    assert Job.objects.get().amount == 20


def add_one_to(amount: int, lease: Lease) -> None:
    with lease.atomic() as row:
        row.amount = amount + 1
        row.save()
