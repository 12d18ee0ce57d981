"""A forced release: it ends the lease that was shown, fences its holder, and harms nobody else."""

import random
import threading
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock
from uuid import uuid4

import pytest
from django.conf import settings
from django.db import OperationalError, connections, transaction
from django.test import override_settings

from django_fencing import operators, states
from django_fencing.exceptions import (
    FencingError,
    InsideTransaction,
    LeaseLost,
    LockHeld,
    StaleToken,
    StoreUnavailable,
)
from django_fencing.fences import Registration
from django_fencing.flow import new_holder
from django_fencing.grants import JUMP, Grant, Refusal
from django_fencing.leases import Lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence, FenceEvent, FenceFloor
from django_fencing.operators import Forced, Outcome
from django_fencing.resources import resolve
from django_fencing.stores.base import get_store
from tests.helpers import (
    SECONDS,
    assert_held_by,
    cache_at,
    commit,
    committing,
    expire,
    in_background,
    in_threads,
    keys_of,
    monitored,
    started,
    wait_until,
)
from tests.proxy import REPEATING, Fault, Proxy
from tests.shop.models import Code, Document, Job, Named, Numbered, UrgentJob, VeryUrgentJob

pytestmark = committing("default", "other", "sqlite")

CLOSED_PORT = "redis://127.0.0.1:1?db=0"


def force(given: Any, shown: Any, using: str | None = None, **options: Any) -> Forced:
    """Let the operator end the lease of `shown`: a lease, or what LeaseRecord.holder says."""
    holder = shown.holder.id.hex if isinstance(shown, Lease) else shown
    known = {"user": "boss", "reason": "it hangs", **options}
    return operators.force_release(resolve(given, using), holder, **known)


def taken(given: Any, shown: str, holder: Any, using: str | None = None) -> Any:
    """Send the script alone."""
    return get_store().take_over(resolve(given, using), shown, holder, ttl=10, floor=0)


def shown_of(given: Any) -> str:
    """Return the holder that an operator is shown."""
    present = states.look(keys_of(given))
    assert present is not None
    return present.holder


def assert_all_end(client: Any, given: Any, using: str | None = None) -> None:
    """Check that no key of the resource is without an expiry."""
    keys = resolve(given, using).keys
    names = [keys.lease, keys.token, keys.queue, keys.beats, keys.held, keys.done]
    ends = {name: client.pttl(name) for name in names}
    assert -1 not in ends.values(), ends


def assert_overtaken(lease: Lease) -> None:
    """Check that neither the store nor the database knows the holder any more."""
    for ask in (lease.ensure_held, lease.extend):
        with pytest.raises(LeaseLost):
            ask()
    with pytest.raises(LeaseLost):
        commit(lease)
    assert lease.release() is False


def forced_events(alias: str = "default") -> list[FenceEvent]:
    """Return the ledger's entries of forced releases."""
    return list(FenceEvent.objects.using(alias).filter(kind="forced").order_by("pk"))


# Whose lease is ended


def test_the_shown_holder_is_evicted_and_fenced(name: str, client: Any) -> None:
    """Its late write is stale although nobody else has acquired; the next token is 2 higher."""
    lease = fenced_lock(name).acquire()

    forced = force(name, lease)

    assert forced.outcome is Outcome.RELEASED
    assert f"token {lease.token})" in forced.said
    assert f"fenced by token {lease.token + 1}" in forced.said
    assert not client.exists(keys_of(name).lease)
    assert client.zscore(keys_of(name).held, keys_of(name).member) is None
    with pytest.raises(StaleToken) as caught:
        commit(lease)
    assert caught.value.fence_token == lease.token + 1
    assert_overtaken(lease)
    with fenced_lock(name) as successor:
        assert successor.token >= lease.token + 2
        commit(successor)
    assert_all_end(client, name)


def test_a_holder_that_has_not_registered_yet_is_fenced(name: str) -> None:
    """Its first transaction is refused: C73 with register=False."""
    lease = fenced_lock(name, register=False).acquire()

    assert force(name, lease).outcome is Outcome.RELEASED

    with pytest.raises(LeaseLost):
        commit(lease, partial(pytest.fail, "The evicted holder committed."))
    assert Fence.objects.get().last_fence_token == lease.token + 1


def test_a_body_that_runs_meanwhile_does_not_commit(name: str) -> None:
    """It began before the release was forced; its transaction begins later."""
    job = Job.objects.create(amount=10)

    def body(pause: Any) -> None:
        with fenced_lock(job) as lease:
            pause()
            with lease.atomic() as row:
                row.amount = 99
                row.save()

    with started(body) as running:
        running.reach_pause()
        assert force(job, shown_of(job)).outcome is Outcome.RELEASED
        assert isinstance(running.finish(), StaleToken)

    job.refresh_from_db()
    assert job.amount == 10


def test_another_holder_is_left_alone(name: str, client: Any) -> None:
    """X was shown, X has run out, Y has acquired: token, holder and end of Y are untouched."""
    former = fenced_lock(name).acquire()
    expire(client, name)
    holder = fenced_lock(name, ttl=30).acquire()
    before = client.hgetall(keys_of(name).lease), client.get(keys_of(name).token)
    ends = client.pttl(keys_of(name).lease)

    forced = force(name, former)

    assert forced.outcome is Outcome.CHANGED
    assert "not as it was shown: nothing was done" in forced.said
    assert f"token {holder.token})" in forced.said
    assert (client.hgetall(keys_of(name).lease), client.get(keys_of(name).token)) == before
    assert ends - 2_000 < client.pttl(keys_of(name).lease) <= ends
    holder.ensure_held()
    commit(holder)
    assert forced_events() == []


def test_who_acquires_behind_the_look_is_left_alone(name: str, client: Any) -> None:
    """The script compares once more: what the operator's process has seen may be old."""
    former = fenced_lock(name).acquire()
    seen = states.look(keys_of(name))
    expire(client, name)
    holder = fenced_lock(name).acquire()

    with mock.patch.object(operators, "look", return_value=seen):
        forced = force(name, former)

    assert forced.outcome is Outcome.CHANGED
    assert "test_who_acquires_behind_the_look" in forced.said
    assert_held_by(holder, client)
    commit(holder)
    assert forced_events() == []


@pytest.mark.parametrize("behind", [False, True], ids=["before the look", "behind the look"])
def test_a_free_resource_stays_as_it_is(name: str, client: Any, behind: bool) -> None:
    """Nobody holds it, and nothing is done: no token, no registration, no entry."""
    former = fenced_lock(name).acquire()
    seen = states.look(keys_of(name)) if behind else None
    former.release()
    counter = client.get(keys_of(name).token)

    with mock.patch.object(operators, "look", return_value=seen):
        forced = force(name, former)

    assert forced.outcome is Outcome.FREE
    assert "nothing was done" in forced.said
    assert client.get(keys_of(name).token) == counter
    assert Fence.objects.get().last_fence_token == former.token
    assert not client.exists(keys_of(name).lease)
    assert forced_events() == []


def test_a_release_that_is_forced_twice_is_done_once(name: str) -> None:
    """The second one finds nobody."""
    lease = fenced_lock(name).acquire()

    outcomes = [force(name, lease).outcome, force(name, lease).outcome]

    assert outcomes == [Outcome.RELEASED, Outcome.FREE]
    assert len(forced_events()) == 1


def test_of_two_operators_one_does_it(name: str, client: Any) -> None:
    """Whoever comes second finds it free, or held by the first."""
    for _ in range(10):
        lease = fenced_lock(name).acquire()
        results = in_threads(*[partial(force, name, lease)] * 2)
        assert sorted(each.outcome is Outcome.RELEASED for each in results) == [False, True]
        assert {each.outcome for each in results} <= {
            Outcome.RELEASED,
            Outcome.CHANGED,
            Outcome.FREE,
        }
        assert not client.exists(keys_of(name).lease)
    assert len(forced_events()) == 10


# The script alone


def test_the_operators_lease_ends_by_itself(name: str, client: Any) -> None:
    """An operator's process that dies behind the script leaves a lease of 10 s, listed as such."""
    lease = fenced_lock(name, ttl=60).acquire()
    operator = new_holder("operator")

    granted = taken(name, lease.holder.id.hex, operator)

    assert granted == Grant(token=lease.token + 1)
    keys = keys_of(name)
    assert 8_000 < client.pttl(keys.lease) <= 10_000
    stored = client.hgetall(keys.lease)
    assert stored["holder"] == operator.id.hex
    assert stored["function"] == "operator"
    assert stored["token"] == str(lease.token + 1)
    assert set(stored) == {
        *("layout", "holder", "token", "host", "pid", "function", "model", "pk", "ttl"),
        "acquired_at",
    }
    at = client.time()
    score = client.zscore(keys.held, keys.member)
    assert 8_000 < score - (at[0] * 1000 + at[1] / 1000) <= 10_000
    assert_all_end(client, name)


def test_nothing_of_the_former_lease_stays(name: str, client: Any) -> None:
    """What another version has written beside is gone: the operator's lease is a new one."""
    holder = uuid4().hex
    client.hset(keys_of(name).lease, mapping={"layout": "9", "holder": holder, "reserved": "x"})
    operator = new_holder("operator")

    taken(name, holder, operator)

    assert client.hget(keys_of(name).lease, "reserved") is None
    assert client.hget(keys_of(name).lease, "layout") == "1"
    assert get_store().confirm(resolve(name), operator)


def test_the_script_may_run_twice_for_one_operator(name: str, client: Any) -> None:
    """The same token again, whatever `shown` says, and no second one is spent."""
    lease = fenced_lock(name).acquire()
    operator = new_holder("operator")

    answers = [taken(name, lease.holder.id.hex, operator) for _ in range(3)]

    assert answers == [Grant(token=lease.token + 1)] * 3
    assert client.get(keys_of(name).token) == str(lease.token + 1)


def test_a_late_copy_of_the_script_takes_nothing_from_a_successor(name: str, client: Any) -> None:
    """The operator's lease is over, so it is too late, whoever holds the resource."""
    lease = fenced_lock(name).acquire()
    operator = new_holder("operator")
    taken(name, lease.holder.id.hex, operator)
    assert get_store().release(resolve(name), operator)
    assert taken(name, lease.holder.id.hex, operator) is None

    successor = fenced_lock(name).acquire()

    assert taken(name, lease.holder.id.hex, operator) is None
    assert_held_by(successor, client)


def test_what_the_evicted_holder_has_sent_before_is_refused(name: str, client: Any) -> None:
    """A late acquire and a late release of it change nothing, also once the lock is free."""
    lease = fenced_lock(name).acquire()
    store, resource, operator = get_store(), resolve(name), new_holder("operator")
    taken(name, lease.holder.id.hex, operator)

    late = store.acquire(resource, lease.holder, ttl=30, floor=0)
    assert isinstance(late, Refusal)
    assert store.release(resource, lease.holder) is False
    assert store.extend(resource, lease.holder, ttl=30) is False
    assert store.confirm(resource, operator)
    assert store.release(resource, operator)
    assert isinstance(store.acquire(resource, lease.holder, ttl=30, floor=0), Refusal)
    assert isinstance(store.reissue(resource, lease.holder, above=5), Refusal)

    assert not client.exists(keys_of(name).lease)
    assert 0 < client.pttl(keys_of(name).done) <= 60_000


@pytest.mark.parametrize("held", [False, True])
def test_a_server_that_has_become_a_replica_is_an_outage(
    name: str, private_redis: Any, held: bool
) -> None:
    """Its old state is no answer, also where nothing would have to be written."""
    shown = fenced_lock(name).acquire().holder.id.hex if held else uuid4().hex
    private_redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(StoreUnavailable, match="read only|READONLY"):
            taken(name, shown, new_holder("operator"))
    finally:
        private_redis.execute_command("REPLICAOF", "NO", "ONE")


@pytest.mark.parametrize("released", [False, True], ids=["operator holds it", "free again"])
def test_a_late_acquire_of_the_evicted_holder_is_refused(
    name: str, client: Any, released: bool
) -> None:
    """It is done, although it has never released."""
    lease = fenced_lock(name).acquire()
    store, resource, operator = get_store(), resolve(name), new_holder("operator")
    taken(name, lease.holder.id.hex, operator)
    if released:
        assert store.release(resource, operator)

    assert isinstance(store.acquire(resource, lease.holder, ttl=30, floor=0), Refusal)

    assert client.exists(keys_of(name).lease) == (not released)
    score = client.zscore(keys_of(name).done, lease.holder.id.hex)
    assert score % 1 == 0  # it has not freed the lock itself
    assert store.release(resource, lease.holder) is False


@pytest.mark.parametrize("fault", [Fault.DOUBLED, Fault.REPLY_LOST])
def test_the_script_may_run_twice_on_a_bad_line(
    name: str, proxy: Proxy, private_redis: Any, fault: Fault
) -> None:
    """Doubled by the line or repeated by redis-py: the second run finds what the first did."""
    warm_up()
    with cache_at(proxy.url, CONNECTION_POOL_KWARGS=REPEATING):
        lease = fenced_lock(name).acquire()
        proxy.plan.append(fault)

        assert force(name, lease).outcome is Outcome.RELEASED

    assert proxy.plan == []
    assert Fence.objects.get(pk=resolve(name).pk).last_fence_token == lease.token + 1
    assert private_redis.get(keys_of(name).token) == str(lease.token + 1)
    assert_overtaken(lease)


def warm_up() -> None:
    """Let the server know the script."""
    assert force("warm-up", fenced_lock("warm-up").acquire()).outcome is Outcome.RELEASED


def test_a_late_copy_on_a_bad_line_harms_no_successor(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The client gave up; its script arrives when another holds the resource."""
    warm_up()
    lease = fenced_lock(name).acquire()
    proxy.plan += [Fault.HELD_BACK, Fault.REQUEST_LOST]
    with pytest.raises(StoreUnavailable):
        force(name, lease)
    lease.release()
    successor = fenced_lock(name).acquire()

    assert b"done" in proxy.deliver()

    assert_held_by(successor, private_redis)
    commit(successor)


def test_a_reply_that_is_lost_leaves_the_holder_fenced_after_another_try(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The operator hears of an outage, tries again, and the evicted holder commits no more."""
    warm_up()
    lease = fenced_lock(name).acquire()
    proxy.plan.append(Fault.REPLY_LOST)
    with suppress(StoreUnavailable):
        force(name, lease)
    if states.look(keys_of(name)):
        with suppress(StoreUnavailable):
            force(name, lease)
    private_redis.delete(keys_of(name).lease)  # the operator's own, which runs out
    force(name, lease)

    if private_redis.hget(keys_of(name).lease, "holder") != lease.holder.id.hex:
        with pytest.raises(LeaseLost):
            commit(lease)


def test_a_script_that_arrives_after_the_operator_gave_up_evicts_nobody(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """Who was told of an outage has done nothing, then or later: as an acquire that gives up."""
    warm_up()
    FenceEvent.objects.all().delete()
    lease = fenced_lock(name).acquire()
    proxy.plan += [Fault.HELD_BACK, Fault.REQUEST_LOST]
    with pytest.raises(StoreUnavailable):
        force(name, lease)

    proxy.deliver()

    assert private_redis.hget(keys_of(name).lease, "holder") == lease.holder.id.hex


# Counters


def test_a_lost_counter_is_stepped_over(name: str, client: Any) -> None:
    """Tokens that were issued and are not registered stay below."""
    lease = fenced_lock(name).acquire()
    client.delete(keys_of(name).token)

    assert force(name, lease).outcome is Outcome.RELEASED

    assert Fence.objects.get().last_fence_token >= lease.token + JUMP
    with fenced_lock(name) as successor:
        assert successor.token > lease.token + JUMP


@pytest.mark.parametrize("registers", [True, False])
def test_a_lost_counter_and_no_fence(name: str, client: Any, registers: bool) -> None:
    """The lease's own token is what is stepped over."""
    lease = fenced_lock(name, register=registers).acquire()
    client.delete(keys_of(name).token)
    client.hset(keys_of(name).lease, "token", "77")

    granted = taken(name, lease.holder.id.hex, new_holder("operator"))

    assert granted.token == 77 + JUMP


@pytest.mark.parametrize("counter", ["0", "1", "6"])
def test_a_counter_that_is_behind_is_caught_up(name: str, client: Any, counter: str) -> None:
    """Behind the lease's own token, and behind the fence."""
    for _ in range(5):
        with fenced_lock(name):
            pass
    lease = fenced_lock(name).acquire()
    assert lease.token == 6
    client.set(keys_of(name).token, counter, keepttl=True)

    assert force(name, lease).outcome is Outcome.RELEASED

    assert Fence.objects.get().last_fence_token == 7
    assert client.get(keys_of(name).token) == "7"
    assert_overtaken(lease)


def test_a_fence_far_above_lease_and_counter_is_overtaken(name: str, client: Any) -> None:
    """The floor comes from the database: one step, and no reissue."""
    lease = fenced_lock(name).acquire()
    Fence.objects.update(last_fence_token=500)

    assert force(name, lease).outcome is Outcome.RELEASED

    assert Fence.objects.get().last_fence_token == 501
    assert not FenceEvent.objects.filter(kind="healed").exists()


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("list", "x", "holds no token counter"),
        ("text", "many", "holds no token counter"),
        ("text", "1" * 17, "holds no token counter"),
        ("text", str(2**53 - 1), "has reached the highest token"),
    ],
)
def test_a_counter_that_gives_no_token_changes_nothing(
    name: str, client: Any, kind: str, value: str, said: str
) -> None:
    """The holder keeps its lease, and no entry says otherwise."""
    lease = fenced_lock(name).acquire()
    keys = keys_of(name)
    client.delete(keys.token)
    client.lpush(keys.token, value) if kind == "list" else client.set(keys.token, value)
    client.expire(keys.token, 60)
    before, done = client.hgetall(keys.lease), client.zscore(keys.done, lease.holder.id.hex)

    with pytest.raises(StoreUnavailable, match=said):
        force(name, lease)

    assert client.hgetall(keys.lease) == before
    assert client.zscore(keys.done, lease.holder.id.hex) == done is None
    assert_held_by(lease, client)
    commit(lease)
    assert forced_events() == []


def test_the_highest_token_can_be_taken(name: str, client: Any) -> None:
    """2**53 - 1 is exact, and the last one."""
    lease = fenced_lock(name).acquire()
    client.set(keys_of(name).token, str(2**53 - 2), keepttl=True)

    assert force(name, lease).outcome is Outcome.RELEASED

    assert Fence.objects.get().last_fence_token == 2**53 - 1


# What cannot be read


def text(client: Any, key: str) -> None:
    client.set(key, "what another program wrote", ex=60)


def text_for_ever(client: Any, key: str) -> None:
    client.set(key, b"\xff\x00 no text at all")


def a_list(client: Any, key: str) -> None:
    client.rpush(key, "a", "b")


def foreign_hash(client: Any, key: str) -> None:
    client.hset(key, mapping={"owner": "them", "token": "12"})


def other_layout(client: Any, key: str) -> None:
    client.hset(key, mapping={"layout": "7", "holder": uuid4().hex, "token": "12", "host": "h"})
    client.expire(key, 60)


def without_a_token(client: Any, key: str) -> None:
    client.hset(key, mapping={"layout": "1", "holder": uuid4().hex})


def without_expiry(client: Any, key: str) -> None:
    client.hset(key, mapping={"layout": "1", "holder": uuid4().hex, "token": "12", "host": "h"})


def blank_holder(client: Any, key: str) -> None:
    client.hset(key, mapping={"layout": "1", "holder": "", "token": "12"})


def binary_holder(client: Any, key: str) -> None:
    client.hset(key, mapping={"layout": "1", "holder": b"\xff\xfe", "token": "12"})


READABLE = [other_layout, without_a_token, without_expiry]
UNREADABLE = [text, text_for_ever, a_list, foreign_hash]
UNSHOWN = [blank_holder, binary_holder]


@pytest.mark.parametrize("write", [*READABLE, *UNREADABLE, *UNSHOWN])
def test_whatever_holds_the_key_can_be_ended(name: str, client: Any, write: Any) -> None:
    """By its holder, or by the digest of what is there; the next one gets the lock."""
    write(client, keys_of(name).lease)
    shown = shown_of(name)
    if write not in UNSHOWN:
        assert shown.startswith("sha1:") == (write in UNREADABLE)

    forced = force(name, shown)

    assert forced.outcome is Outcome.RELEASED
    assert not client.exists(keys_of(name).lease)
    with fenced_lock(name) as lease:
        commit(lease)
    assert_all_end(client, name)
    (event,) = forced_events()
    assert event.message.endswith(": it hangs")


@pytest.mark.parametrize("write", UNREADABLE)
def test_a_digest_that_has_changed_is_another_holder(name: str, client: Any, write: Any) -> None:
    """What is there now stays as it is."""
    key = keys_of(name).lease
    write(client, key)
    shown = shown_of(name)
    client.delete(key)
    client.set(key, "something else", px=50_000)

    forced = force(name, shown)
    behind = taken(name, shown, new_holder("operator"))

    assert forced.outcome is Outcome.CHANGED
    assert isinstance(behind, Refusal)
    assert client.get(key) == "something else"
    assert 45_000 < client.pttl(key) <= 50_000
    assert not Fence.objects.exists()
    assert forced_events() == []


def test_a_lock_kept_for_a_waiter_can_be_ended(name: str, client: Any) -> None:
    """A reservation has no holder; it is no obstacle for longer than it lasts."""
    key = keys_of(name).lease
    client.hset(key, "reserved", uuid4().hex)
    client.expire(key, 60)

    assert force(name, shown_of(name)).outcome is Outcome.RELEASED
    assert not client.exists(key)


def test_a_name_is_no_digest(name: str, client: Any) -> None:
    """A holder that reads like a digest is compared as it stands."""
    text(client, keys_of(name).lease)

    assert force(name, "sha1:" + "0" * 40).outcome is Outcome.CHANGED
    assert force(name, "").outcome is Outcome.CHANGED
    assert client.get(keys_of(name).lease) == "what another program wrote"


# Every kind of resource


def job_row() -> Any:
    return Job.objects.create(amount=1)


def urgent() -> Any:
    return UrgentJob.objects.create(amount=1)


def very_urgent() -> Any:
    return VeryUrgentJob.objects.create(amount=1)


def numbered() -> Any:
    return Numbered.objects.create(number="n-1")


def document() -> Any:
    return Document.objects.create()


def code() -> Any:
    return Code.objects.create(code="a:b@c %|é")


def own_name() -> Any:
    return Named.objects.create(reference="7/8")


@pytest.mark.parametrize("make", [job_row, urgent, very_urgent, numbered, document, code, own_name])
def test_the_holder_of_a_row_is_fenced(make: Any, client: Any) -> None:
    """Whatever its model, and wherever its fence is."""
    row = make()
    lease = fenced_lock(row).acquire()

    assert force(row, lease).outcome is Outcome.RELEASED

    assert_overtaken(lease)
    with fenced_lock(row) as successor, successor.atomic() as fresh:
        assert fresh.last_fence_token == successor.token >= lease.token + 2
    assert_all_end(client, row)


def test_the_parent_ends_what_the_child_holds(client: Any) -> None:
    """They share one fence, and one lease."""
    child = urgent()
    lease = fenced_lock(child).acquire()

    assert force((Job, child.pk), lease).outcome is Outcome.RELEASED
    assert_overtaken(lease)


@pytest.mark.parametrize("alias", ["other", "sqlite"])
def test_names_and_rows_of_another_database(name: str, client: Any, alias: str) -> None:
    """Each is fenced where its fence is; the name's namesake is left alone."""
    namesake = fenced_lock(name).acquire()
    lease = fenced_lock(name, using=alias).acquire()
    job = Job.objects.using(alias).create(amount=1)
    of_row = fenced_lock((Job, job.pk), using=alias).acquire()

    assert force(name, lease, alias).outcome is Outcome.RELEASED
    assert force((Job, job.pk), of_row, alias).outcome is Outcome.RELEASED

    assert_overtaken(lease)
    assert_overtaken(of_row)
    commit(namesake)
    assert_held_by(namesake, client)
    assert_all_end(client, name, alias)
    assert Fence.objects.using(alias).get().last_fence_token == lease.token + 1


def test_tenants_are_apart(name: str, client: Any) -> None:
    """A forced release in one namespace does not reach another one's lease."""

    def within(tenant: str) -> Any:
        return override_settings(FENCING={**settings.FENCING, "NAMESPACE": tenant})

    with within("one"):
        first = fenced_lock(name).acquire()
    with within("two"):
        second = fenced_lock(name).acquire()
        assert force(name, first).outcome is Outcome.CHANGED
    with within("one"):
        assert force(name, first).outcome is Outcome.RELEASED
        assert [event.namespace for event in forced_events()] == ["one"]

    commit(second)
    second.ensure_held()


def test_a_name_without_a_fence_gets_one(name: str) -> None:
    """Nobody has registered yet: the operator is the first."""
    lease = fenced_lock(name, register=False).acquire()
    assert not Fence.objects.exists()

    force(name, lease)

    fence = Fence.objects.get()
    assert (fence.last_fence_token, fence.registered_at is None) == (2, False)


def test_a_row_that_was_deleted_meanwhile(client: Any) -> None:
    """There is nothing to be fenced; the lock is free, and the ledger says what was done."""
    job = job_row()
    lease = fenced_lock(job).acquire()
    resource = resolve(job)
    Job.objects.all().delete()

    with suppress(FencingError):
        operators.force_release(resource, lease.holder.id.hex, user="boss")

    assert not client.exists(resource.keys.lease)
    assert len(forced_events()) == 1


# A holder that keeps the row


def test_a_holder_frozen_inside_its_transaction(name: str, client: Any) -> None:
    """It may commit; the lock is not left behind, and the next holder fences it."""
    job = Job.objects.create(amount=10)

    def body(pause: Any) -> Lease:
        lease = fenced_lock(job).acquire()
        with lease.atomic() as row:
            row.amount += 1
            row.save()
            pause()
        return lease

    with started(body) as frozen, mock.patch.object(operators, "_TTL", 0.4):
        frozen.reach_pause()
        shown = shown_of(job)

        forced = force(job, shown)

        assert forced.outcome is Outcome.NOT_FENCED
        assert "not fenced yet" in forced.said
        assert not client.exists(keys_of(job).lease)
        lease = frozen.finish()
    job.refresh_from_db()
    assert job.amount == 11
    assert not client.exists(keys_of(job).lease)
    commit(lease)  # nobody has registered since
    with fenced_lock(job) as successor:
        assert successor.token >= lease.token + 2
        with pytest.raises(StaleToken):
            commit(lease)
        commit(successor)
    (event,) = forced_events()
    assert (event.user, event.message.endswith(": it hangs (not fenced)")) == ("boss", True)
    assert_all_end(client, job)


def test_the_operators_own_lease_is_not_said_to_be_lost(client: Any) -> None:
    """Who registers for as long as its lease lasts has not lost anything: one entry is enough."""
    job = Job.objects.create(amount=10)

    def body(pause: Any) -> None:
        with fenced_atomic(job):
            pause()

    with started(body) as frozen, mock.patch.object(operators, "_TTL", 2.0):
        frozen.reach_pause()
        force(job, shown_of(job))
    kinds = list(FenceEvent.objects.order_by("pk").values_list("kind", "message"))
    lost = [message for kind, message in kinds if kind == "lost" and "token 2" in message]

    assert lost == []


def test_a_frozen_holder_that_goes_on_in_time_is_fenced(client: Any) -> None:
    """The operator waits for the row, and registers as soon as it can."""
    job = Job.objects.create(amount=10)

    def body(pause: Any) -> Lease:
        lease = fenced_lock(job).acquire()
        with lease.atomic():
            pause()
        return lease

    with started(body) as frozen:
        frozen.reach_pause()
        with in_background(partial(force, job, shown_of(job))) as forced:
            wait_until(waits)
            lease = frozen.finish()
        assert forced.result().outcome is Outcome.RELEASED
    with pytest.raises(StaleToken):
        commit(lease)


def waits() -> bool:
    with connections["default"].cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return bool(cursor.fetchone()[0])


@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_a_name_whose_fence_was_pruned(name: str, private_redis: Any, alias: str) -> None:
    """The operator's token is above what was pruned, like any other."""
    FenceFloor.objects.using(alias).create(pk=1, token=500)
    lease = fenced_lock(name, using=alias, register=False).acquire()
    assert lease.token == 1

    assert force(name, lease, alias).outcome is Outcome.RELEASED

    fence = Fence.objects.using(alias).get()
    assert fence.last_fence_token > 500
    with pytest.raises(LeaseLost):
        commit(lease)


def test_a_frozen_holder_on_sqlite(name: str, client: Any) -> None:
    """A database that is locked is told as a row that is: not fenced yet."""

    def body(pause: Any) -> Lease:
        lease = fenced_lock(name, using="sqlite").acquire()
        with lease.atomic():
            pause()
        return lease

    resource = resolve(name, "sqlite")
    with started(body) as frozen:
        frozen.reach_pause()
        present = states.look(resource.keys)
        assert present is not None
        with connections["sqlite"].cursor() as cursor:
            cursor.execute("PRAGMA busy_timeout = 100")
            try:
                forced = force(name, present.holder, "sqlite")
            except OperationalError:
                forced = None
            cursor.execute("PRAGMA busy_timeout = 20000")
    assert not client.exists(resource.keys.lease)
    assert len(forced_events()) == 1
    assert forced is not None
    assert forced.outcome is Outcome.NOT_FENCED


def test_who_acquires_behind_the_operator_is_not_harmed(client: Any) -> None:
    """The operator's lease runs out while it waits for the row: its successor goes on."""
    job = Job.objects.create(amount=10)

    def body(pause: Any) -> None:
        with fenced_atomic(job):
            pause()

    with started(body) as frozen, mock.patch.object(operators, "_TTL", SECONDS):
        frozen.reach_pause()
        with in_background(partial(force, job, shown_of(job))) as forced:
            wait_until(waits)
            expire(client, job)
            successor = fenced_lock(job, register=False).acquire()
            frozen.go_on()
        outcome = forced.result().outcome
        assert isinstance(frozen.finish(), Exception | None)
    assert outcome is Outcome.NOT_FENCED
    assert client.hget(keys_of(job).lease, "holder") == successor.holder.id.hex
    commit(successor)


# Transactions


def test_it_is_refused_in_a_transaction(name: str, client: Any) -> None:
    """Before anything is asked, on the fence's database only."""
    lease = fenced_lock(name).acquire()

    with transaction.atomic(), pytest.raises(InsideTransaction):
        force(name, lease)
    with transaction.atomic(using="other"):
        assert_held_by(lease, client)
        assert force(name, lease).outcome is Outcome.RELEASED


def test_it_is_refused_in_ones_own_fenced_transaction(name: str, client: Any) -> None:
    """A holder cannot end itself from the inside."""
    with fenced_lock(name) as lease:
        with lease.atomic(), pytest.raises(InsideTransaction):
            force(name, lease)
        assert_held_by(lease, client)


# Waiters


def test_waiters_are_woken_in_their_order(name: str, client: Any) -> None:
    """The first one gets the lock behind the operator, the second one behind the first."""
    lease = fenced_lock(name, ttl=300).acquire()
    queue = keys_of(name).queue
    lock = fenced_lock(name, wait=SECONDS)
    with in_background(lock.acquire) as first:
        wait_until(lambda: client.zcard(queue) == 1)
        with in_background(lock.acquire) as second:
            wait_until(lambda: client.zcard(queue) == 2)

            assert force(name, lease).outcome is Outcome.RELEASED

            following = first.result(SECONDS)
            assert not second.done()
            commit(following)
            following.release()
            last = second.result(SECONDS)
    assert lease.token + 1 < following.token < last.token
    commit(last)
    assert_all_end(client, name)
    last.release()


def test_newcomers_do_not_overtake_the_waiters(name: str, client: Any) -> None:
    """They stand in line during the operator's lease, and the lock is kept for the first one."""
    lease = fenced_lock(name, ttl=300).acquire()
    with in_background(fenced_lock(name, wait=SECONDS).acquire) as first:
        wait_until(lambda: client.zcard(keys_of(name).queue) == 1)
        operator = new_holder("operator")
        taken(name, lease.holder.id.hex, operator)
        with pytest.raises(LockHeld):
            fenced_lock(name).acquire()
        assert client.zcard(keys_of(name).queue) == 1
        get_store().release(resolve(name), operator)
        waiter = first.result(SECONDS)
    assert waiter.token == lease.token + 2
    waiter.release()


def test_an_evicted_holder_is_renewed_no_more(name: str, client: Any) -> None:
    """The renewal finds out, tells it once, and stops."""
    told: list[Lease] = []
    lease = fenced_lock(name, ttl=0.6, renew=True, on_lost=told.append).acquire()

    force(name, lease)

    wait_until(lambda: lease.lost and told)
    assert told == [lease]
    assert not lease._is_renewed
    assert lease.remaining == 0 or lease.lost
    assert not client.exists(keys_of(name).lease)
    wait_until(lambda: FenceEvent.objects.filter(kind="lost", token=lease.token).exists())


# The store is away


def test_nothing_is_done_while_the_store_is_away(name: str, client: Any) -> None:
    """StoreUnavailable, and the holder keeps its lease."""
    lease = fenced_lock(name).acquire()
    with cache_at(CLOSED_PORT), pytest.raises(StoreUnavailable):
        force(name, lease)

    assert_held_by(lease, client)
    commit(lease)
    assert forced_events() == []


def test_nothing_is_done_if_the_script_does_not_arrive(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The line is cut behind the look, and again at the second attempt."""
    warm_up()
    FenceEvent.objects.all().delete()
    lease = fenced_lock(name).acquire()
    proxy.plan += [Fault.REQUEST_LOST] * 2

    with pytest.raises(StoreUnavailable, match="Cannot take over"):
        force(name, lease)

    assert_held_by(lease, private_redis)
    commit(lease)
    assert forced_events() == []


def test_the_store_goes_away_before_the_confirmation(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The holder is evicted and fenced: the ledger says so, whatever the operator is told."""
    warm_up()
    FenceEvent.objects.all().delete()
    lease = fenced_lock(name).acquire()
    proxy.plan.extend([Fault.NONE, Fault.REQUEST_LOST])

    with suppress(StoreUnavailable):
        force(name, lease)

    assert not private_redis.exists(keys_of(name).lease)
    with pytest.raises(StaleToken):
        commit(lease)
    assert len(forced_events()) == 1


def test_the_store_goes_away_for_good_behind_the_script(
    name: str, proxy: Proxy, private_redis: Any
) -> None:
    """The operator's lease is left, for 10 s at most; the holder is fenced."""
    warm_up()
    lease = fenced_lock(name).acquire()
    register = Lease._register

    def cut(self: Lease, *args: Any) -> None:
        proxy.hang_up()
        register(self, *args)

    with mock.patch.object(Lease, "_register", cut), pytest.raises(StoreUnavailable):
        force(name, lease)

    assert 0 < private_redis.pttl(keys_of(name).lease) <= 10_000
    assert_all_end(private_redis, name)
    with pytest.raises(StaleToken):
        commit(lease)


def test_the_release_does_not_arrive(name: str, proxy: Proxy, private_redis: Any) -> None:
    """It is released as far as one can say, and the operator's lease runs out."""
    warm_up()
    FenceEvent.objects.all().delete()
    lease = fenced_lock(name).acquire()
    proxy.plan.extend([Fault.NONE, Fault.NONE, Fault.REQUEST_LOST, Fault.REQUEST_LOST])

    assert force(name, lease).outcome is Outcome.RELEASED

    assert 0 < private_redis.pttl(keys_of(name).lease) <= 10_000
    assert_all_end(private_redis, name)
    assert len(forced_events()) == 1


# The ledger, and saying what would be done


def test_the_ledger_has_who_did_it_and_why(name: str, client: Any) -> None:
    """User, reason, who was evicted, by which token, in which tenant."""
    lease = fenced_lock(name).acquire()

    force(name, lease, user="ada", reason="its pod is gone")

    (event,) = forced_events()
    assert (event.user, event.resource, event.token) == ("ada", name, lease.token + 1)
    assert event.namespace == settings.FENCING["NAMESPACE"]
    assert event.holder == Fence.objects.get().last_fence_holder
    assert (
        f"pid {lease.holder.pid}, token {lease.token}) evicted by ada with token" in event.message
    )
    assert event.message.endswith(f"token {lease.token + 1}: its pod is gone")


def test_neither_user_nor_reason_is_needed(name: str) -> None:
    """The entry ends with the token then."""
    lease = fenced_lock(name).acquire()
    force(name, lease, user="", reason="")
    (event,) = forced_events()
    assert (event.user, event.message.endswith(f"by an operator with token {lease.token + 1}")) == (
        "",
        True,
    )


def test_a_dry_run_changes_nothing(name: str, private_redis: Any) -> None:
    """It reads, and says who would be evicted."""
    lease = fenced_lock(name, ttl=60).acquire()

    def everything() -> dict[str, Any]:
        return {key: private_redis.type(key) for key in private_redis.scan_iter()} | {
            "lease": private_redis.hgetall(keys_of(name).lease),
            "counter": private_redis.get(keys_of(name).token),
        }

    before, fence = everything(), Fence.objects.values().get()
    with monitored(private_redis) as commands:
        forced = force(name, lease, dry_run=True)

    assert forced.outcome is Outcome.RELEASED
    assert "would be ended" in forced.said
    assert f"token {lease.token})" in forced.said
    assert {command[0] for command in commands} == {"PTTL", "HMGET", "ZSCORE"}
    assert everything() == before
    assert Fence.objects.values().get() == fence
    assert force(name, "another", dry_run=True).outcome is Outcome.CHANGED
    lease.release()
    assert force(name, lease, dry_run=True).outcome is Outcome.FREE
    assert forced_events() == []


# Interleavings


class Play:
    """Two workers and an operator in random order, and what has to come of it."""

    def __init__(self, name: str, client: Any, seed: int) -> None:
        self.name, self.client, self.chance = name, client, random.Random(seed)
        self.holder: Lease | None = None  # as the store has to know it
        self.fence: Registration | None = None
        self.leases: dict[str, Lease] = {}
        self.evicted: set[str] = set()
        self.shown = ""
        self.highest = 0
        self.log: list[str] = []

    def step(self) -> None:
        actor = self.chance.choice(["A", "B", "operator", "time"])
        if actor == "time":
            actions = [self.lapse, self.lose_counter]
            weights = [5, 1]
        elif actor == "operator":
            actions, weights = [self.look, self.force], [1, 1]
        else:
            actions = [partial(act, actor) for act in (self.acquire, self.write, self.ask)]
            actions += [partial(self.release, actor)]
            weights = [4, 4, 2, 1]
        (action,) = self.chance.choices(actions, weights)
        name = getattr(action, "func", action).__name__
        self.log.append(f"{actor} {name}")
        action()
        self.check()

    def check(self) -> None:
        stored = self.client.hget(keys_of(self.name).lease, "holder")
        assert stored == (self.holder and self.holder.holder.id.hex), self.log

    def lapse(self) -> None:
        self.client.delete(keys_of(self.name).lease)
        self.holder = None

    def lose_counter(self) -> None:
        self.client.delete(keys_of(self.name).token)

    def look(self) -> None:
        present = states.look(keys_of(self.name))
        self.shown = present.holder if present else self.shown

    def force(self) -> None:
        forced = force(self.name, self.shown or uuid4().hex)
        if self.holder is None:
            assert forced.outcome is Outcome.FREE, self.log
        elif self.holder.holder.id.hex != self.shown:
            assert forced.outcome is Outcome.CHANGED, self.log
        else:
            assert forced.outcome is Outcome.RELEASED, self.log
            self.evicted.add(self.shown)
            self.holder = None
            fence = Fence.objects.get(pk=resolve(self.name).pk)
            self.registered(Registration(fence.last_fence_token, fence.last_fence_holder))

    def registered(self, mine: Registration) -> None:
        assert mine.token > self.highest, self.log
        self.fence, self.highest = mine, mine.token

    def acquire(self, actor: str) -> None:
        lock = fenced_lock(self.name, register=self.chance.random() < 0.7)
        if self.holder is not None:
            with pytest.raises(LockHeld):
                lock.acquire()
            return
        lease = self.leases[actor] = self.holder = lock.acquire()
        if lock.register:
            self.registered(Registration(lease.token, lease.holder.id))

    def write(self, actor: str) -> None:
        lease = self.leases.get(actor)
        if lease is None:
            return
        was_registered = lease._is_registered
        try:
            commit(lease)
        except FencingError:
            # Who holds the resource as nobody else does is never refused.
            assert lease is not self.holder, self.log
            return
        assert lease.holder.id.hex not in self.evicted, self.log
        mine = Registration(lease.token, lease.holder.id)
        if not was_registered:
            self.registered(mine)
        assert mine == self.fence, self.log

    def ask(self, actor: str) -> None:
        lease = self.leases.get(actor)
        if lease is None:
            return
        ask = self.chance.choice([lease.extend, lease.ensure_held])
        if lease is self.holder:
            ask()
        else:
            with pytest.raises(LeaseLost):
                ask()

    def release(self, actor: str) -> None:
        lease = self.leases.pop(actor, None)
        if lease is None:
            return
        assert lease.release() is (lease is self.holder), self.log
        if lease is self.holder:
            self.holder = None


@pytest.mark.parametrize("block", range(15))
def test_random_interleavings(name: str, client: Any, block: int) -> None:
    """No innocent holder is harmed, no evicted one commits, tokens grow; 10 plays of 30 steps."""
    for number in range(10):
        play = Play(f"{name}:{number}", client, block * 10 + number)
        for _ in range(30):
            play.step()
        assert_all_end(client, play.name)


def test_what_begins_after_a_forced_release_is_never_committed(client: Any) -> None:
    """A writes again and again, B waits, an operator ends A: 25 rounds, at the same time."""
    for _ in range(25):
        job = Job.objects.create(amount=0)
        lease = fenced_lock(job, ttl=60).acquire()
        ended = threading.Event()

        def add(job: Job = job, lease: Lease = lease, ended: Any = ended) -> int:
            done = 0
            while True:
                too_late = ended.is_set()
                try:
                    with lease.atomic() as row:
                        row.amount += 1
                        row.save()
                except LeaseLost:
                    return done
                assert not too_late
                done += 1

        def end(job: Job = job, lease: Lease = lease, ended: Any = ended) -> Any:
            forced = force(job, lease)
            ended.set()
            return forced.outcome

        def follow(job: Job = job) -> Any:
            with fenced_lock(job, wait=SECONDS) as follower, follower.atomic() as row:
                row.amount += 1000
                row.save()
                return follower.token

        done, outcome, token = in_threads(add, end, follow)
        assert outcome is Outcome.RELEASED
        assert token == lease.token + 2
        job.refresh_from_db()
        assert job.amount == done + 1000
