"""Acquiring: who gets the lock, who waits, who is refused."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.db import transaction
from django.test import override_settings

from django_fencing import flow
from django_fencing.exceptions import InsideTransaction, LockHeld, StoreUnavailable
from django_fencing.leases import current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence
from django_fencing.stores.redis import RedisStore
from django_fencing.timing import now
from tests.helpers import (
    counted_calls,
    held_elsewhere,
    in_background,
    in_threads,
    keys_of,
    wait_until,
)
from tests.shop.models import Job

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_lease_holds_the_resource_until_the_end_of_the_block(name: str, client: Any) -> None:
    """Its key is there with an expiry, and then it is gone."""
    with fenced_lock(name, ttl=timedelta(seconds=20)) as lease:
        assert client.hget(keys_of(name).lease, "holder") == lease.holder.id.hex
        assert 19_000 < client.pttl(keys_of(name).lease) <= 20_000
        assert lease.ttl == 20
        assert 19 < lease.remaining <= 20

    assert not client.exists(keys_of(name).lease)
    assert (lease.remaining, lease.lost) == (0, False)


def test_a_new_resource_starts_at_token_1_and_each_lease_has_the_next(name: str) -> None:
    """The fence in the database follows."""
    for token in (1, 2, 3):
        with fenced_lock(name) as lease:
            assert lease.token == token
            fence = Fence.objects.get(name=lease.row.pk)
            assert (fence.last_fence_token, fence.last_fence_holder) == (token, lease.holder.id)


def test_a_held_lock_says_who_holds_it_and_for_how_long(name: str) -> None:
    """The error names the holder's code, host and process; retry_after is its remaining ttl."""
    holder = f"{__name__}.test_a_held_lock"
    with fenced_lock(name, ttl=20), pytest.raises(LockHeld, match=holder) as caught:
        fenced_lock(name).acquire()

    error = caught.value
    assert error.resource == name
    assert error.retry_after is not None
    assert 19 < error.retry_after <= 20
    assert f"pid {os.getpid()}" in str(error.held_by)


def test_one_attempt_is_made_without_waiting(name: str) -> None:
    """wait=0 never sleeps."""
    with fenced_lock(name), mock.patch.object(time, "sleep") as sleep, pytest.raises(LockHeld):
        fenced_lock(name, wait=0).acquire()

    sleep.assert_not_called()


def test_a_waiter_gets_the_lock_when_it_is_released(name: str) -> None:
    """It need not wait until its deadline, and its lease counts from the grant."""
    lease = fenced_lock(name).acquire()

    with in_background(lambda: fenced_lock(name, ttl=10, wait=20).acquire()) as waiter:
        wait_until(waiter.running)
        released = now()
        lease.release()
        successor = waiter.result()

    assert now() - released < 1
    assert successor.remaining > 9
    assert successor.release()


def test_a_waiter_uses_its_whole_budget_and_then_gives_up(name: str) -> None:
    """The last attempt is at the deadline."""
    moments: list[float] = []
    acquire = RedisStore.acquire

    def noted(self: RedisStore, *args: Any, **options: Any) -> Any:
        moments.append(now())
        return acquire(self, *args, **options)

    with fenced_lock(name), mock.patch.object(RedisStore, "acquire", noted):
        (refused,) = in_threads(fenced_lock(name, wait=0.5).acquire)

    assert isinstance(refused, LockHeld)
    first, last = moments
    assert 0.5 <= last - first < 0.7


def test_a_body_never_runs_without_the_lock(name: str) -> None:
    """A refused with-statement and a refused fenced_atomic raise instead."""
    with held_elsewhere(name):
        with pytest.raises(LockHeld), fenced_lock(name, wait=0.05):
            pytest.fail("The body ran.")
        with pytest.raises(LockHeld), fenced_atomic(name, wait=0.05):
            pytest.fail("The body ran.")


def test_a_flow_never_waits_for_itself(name: str, job: Job) -> None:
    """Asking again for what it holds is refused at once, whatever the wait."""
    with fenced_lock(name), fenced_lock(job):
        began = now()
        with pytest.raises(LockHeld):
            fenced_lock(name, wait=20).acquire()
        with pytest.raises(LockHeld):
            fenced_lock((Job, job.pk), wait=20).acquire()
        assert now() - began < 1


@pytest.mark.parametrize("argument", ["ttl", "wait"])
@pytest.mark.parametrize(
    "value", [True, "5", -1, 0.0004, float("nan"), float("inf"), 86_401, b"", object], ids=repr
)
def test_odd_durations_raise_before_anything_is_sent(name: str, argument: str, value: Any) -> None:
    """The error names the argument."""
    with (
        counted_calls() as calls,
        pytest.raises((TypeError, ValueError), match=f"^{argument} must be"),
    ):
        fenced_lock(name, **{argument: value}).acquire()

    assert calls == []


def test_the_settings_give_ttl_and_wait(name: str) -> None:
    """None means the setting, never for ever."""
    with override_settings(FENCING={"TTL": 5, "WAIT": 0.2}), fenced_lock(name, ttl=None) as lease:
        assert lease.ttl == 5
        began = now()
        (refused,) = in_threads(fenced_lock(name).acquire)
        assert isinstance(refused, LockHeld)
        assert now() - began >= 0.2


def test_an_outage_ends_at_the_deadline_as_an_outage(name: str) -> None:
    """A waiter asks until then, and never calls it held."""
    closed = {
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": "redis://127.0.0.1:1/0",
            "OPTIONS": {"IGNORE_EXCEPTIONS": True},
        }
    }
    with override_settings(CACHES=closed):
        began = now()
        with pytest.raises(StoreUnavailable, match=f"Cannot acquire '{name}'") as caught:
            fenced_lock(name, wait=0.3).acquire()

    assert caught.value.resource == name
    assert 0.3 <= now() - began < 2


@pytest.mark.parametrize(
    "step", ["django_fencing.fences.register", "django_fencing.stores.redis.RedisStore.confirm"]
)
def test_an_interrupt_while_acquiring_leaves_no_lease(name: str, client: Any, step: str) -> None:
    """Whatever ends the acquire after the grant gives it back."""
    with mock.patch(step, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        fenced_lock(name).acquire()

    assert not client.exists(keys_of(name).lease)


def test_a_shared_lock_keeps_the_leases_of_its_flows_apart(name: str) -> None:
    """Each flow leaves its own block."""
    lock = fenced_lock(name, wait=20)
    tokens = []

    def work() -> None:
        for _ in range(10):
            with lock as lease:
                assert current_lease() is lease
                tokens.append(lease.token)

    assert in_threads(work, work, work) == [None] * 3
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 30


def test_a_block_may_be_left_by_another_thread(name: str) -> None:
    """As frameworks do that enter and leave a context in different threads."""
    lock = fenced_lock(name)
    lease = lock.__enter__()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock.__exit__, None, None, None).result()

    assert lease.release() is True
    assert flow.held() == []


def test_a_shared_lock_refuses_to_guess_whose_block_is_left(name: str) -> None:
    """With two entered there is no telling."""
    lock = fenced_lock(name)
    for other in "ab":
        lease = fenced_lock(name + other).acquire()
        lock._entered.append((object(), lease))
        lease.release()

    with pytest.raises(RuntimeError, match="has not entered it"):
        lock.__exit__(None, None, None)


def test_a_lease_that_is_dropped_is_forgotten(name: str) -> None:
    """Nothing refers to it, so that the flow holds nothing; its key runs out."""
    lease = fenced_lock(name).acquire()
    assert flow.held() == [lease]

    del lease
    gc.collect()

    assert flow.held() == []
    with pytest.raises(LookupError, match="holds no lease"):
        current_lease()


def test_leaving_a_block_without_autocommit_is_refused(name: str, client: Any) -> None:
    """The release must follow a commit, so the lease is left to run out."""
    with pytest.raises(InsideTransaction), fenced_lock(name, ttl=20):
        transaction.set_autocommit(False)
    assert client.exists(keys_of(name).lease)
    transaction.rollback()
    transaction.set_autocommit(True)


def test_a_definition_may_be_reused(name: str) -> None:
    """It keeps no state of its own."""
    lock = fenced_lock(name)

    tokens = []
    for _ in range(2):
        lease = lock.acquire()
        tokens.append(lease.token)
        lease.release()

    assert tokens == [1, 2]
