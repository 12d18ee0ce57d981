"""Pruning: what is unused goes, nobody's lease is harmed, and no token ever comes round again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from io import StringIO
from typing import Any
from unittest import mock

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings

from django_fencing import fences, pruning
from django_fencing.exceptions import (
    FencingError,
    InsideTransaction,
    LeaseLost,
    StaleToken,
    StoreUnavailable,
)
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence, FenceEvent, FenceFloor, OnceRecord
from django_fencing.names import slug
from django_fencing.pruning import Pruning
from django_fencing.resources import resolve
from tests.helpers import (
    cache_at,
    commit,
    committing,
    expire,
    in_background,
    in_threads,
    keys_of,
    started,
    wait_until,
    waits_for_row,
)

pytestmark = committing("default", "other", "sqlite")

CLOSED_PORT = "redis://127.0.0.1:1?db=0"


def ago(**length: float) -> datetime:
    return datetime.now(UTC) - timedelta(**length)


def used(name: str, alias: str | None = None, *, days: float = 9, times: int = 1) -> int:
    """Use a name so many times, so many days ago, and return its last token."""
    for _ in range(times):
        with fenced_lock(name, using=alias) as lease:
            pass
    age(name, alias, days=days)
    return lease.token


def age(name: str, alias: str | None = None, *, days: float = 9) -> None:
    """Let the last registration of a name be so many days ago."""
    resource = resolve(name, alias)
    fence = Fence.objects.using(resource.alias).filter(pk=resource.pk)
    assert fence.update(registered_at=ago(days=days)) == 1


def pruned(alias: str = "default", *, days: float = 1) -> int:
    """Prune, and return how many fences that has deleted."""
    return Pruning(alias=alias, before=ago(days=days)).delete()["fences"]


def exists(name: str, alias: str = "default") -> bool:
    return Fence.objects.using(alias).filter(pk=resolve(name, alias).pk).exists()


def floor(alias: str = "default") -> int:
    """Return the one row that keeps the highest pruned token, 0 without one."""
    rows = list(FenceFloor.objects.using(alias).values_list("token", flat=True))
    assert len(rows) <= 1
    return sum(rows)


# What goes


@pytest.mark.parametrize(("seconds", "goes"), [(-5, False), (0, False), (0.000001, True)])
def test_the_boundary_of_the_age(name: str, seconds: float, goes: bool) -> None:
    """What was used exactly then stays, what was used before that goes."""
    used(name)
    before = ago(days=3)
    Fence.objects.update(registered_at=before - timedelta(seconds=seconds))

    assert Pruning(alias="default", before=before).count()["fences"] == goes
    assert Pruning(alias="default", before=before).delete()["fences"] == goes
    assert exists(name) is not goes


@pytest.mark.parametrize(
    ("given", "goes"), [("50s", True), ("1m", True), ("2m", False), ("1h", False), ("1w", False)]
)
def test_the_units_of_the_command(name: str, given: str, goes: bool) -> None:
    """Seconds, minutes, hours, days, weeks."""
    used(name, days=90 / 86_400)
    call_command("fencing", "prune", "--older-than", given, stdout=StringIO())
    assert exists(name) is not goes


def test_a_dry_run_deletes_nothing(name: str, private_redis: Any) -> None:
    """It counts what is old, of each kind, and sends nothing."""
    for number in range(3):
        used(f"{name} {number}")
    used(f"{name} recent", days=0.5)
    with fenced_lock(name):  # held: it would be looked at
        age(name)
        for number, days in enumerate([0, 2, 2]):
            record(f"{name} {number}", days)
            event(name, days)
        keys = set(private_redis.scan_iter())
        before = [list(model.objects.values()) for model in (Fence, OnceRecord, FenceEvent)]

        found = Pruning(alias="default", before=ago(days=1)).count()

        assert found == {"fences": 4, "once records": 2, "events": 2}
        after = [list(model.objects.values()) for model in (Fence, OnceRecord, FenceEvent)]
        assert after == before
        assert set(private_redis.scan_iter()) == keys
        assert not FenceFloor.objects.exists()
        assert Pruning(alias="default", before=ago(days=1)).delete() == {**found, "fences": 3}


def record(key: str, days: float, alias: str = "default") -> None:
    OnceRecord.objects.using(alias).create(
        key=slug(key), resource="x", token=1, fingerprint="", result="1", used_at=ago(days=days)
    )


def event(name: str, days: float, alias: str = "default") -> None:
    FenceEvent.objects.using(alias).create(
        kind="lost", resource=name, message="x", created_at=ago(days=days)
    )


def test_records_and_events_go_by_their_age(name: str) -> None:
    """More than are deleted at once; the recent ones stay."""
    for number in range(250):
        record(f"{name} {number}", 2)
        event(f"{name} {number}", 2)
    record(name, 0.9)
    event(name, 0.9)

    found = Pruning(alias="default", before=ago(days=1)).delete()

    assert found == {"fences": 0, "once records": 250, "events": 250}
    assert OnceRecord.objects.get().key == slug(name)
    assert FenceEvent.objects.get().resource == name


def test_records_and_events_of_that_very_moment_stay(name: str) -> None:
    """As fences do."""
    before = ago(days=1)
    record(name, 1)
    event(name, 1)
    OnceRecord.objects.update(used_at=before)
    FenceEvent.objects.update(created_at=before)
    assert not any(Pruning(alias="default", before=before).count().values())
    assert not any(Pruning(alias="default", before=before).delete().values())
    assert (OnceRecord.objects.count(), FenceEvent.objects.count()) == (1, 1)


def test_other_databases_are_pruned_by_name(name: str) -> None:
    """--database names one, and the others are left as they are."""
    used(name)
    used(name, "other", times=3)
    record(name, 5, "other")
    event(name, 5, "other")
    arguments = ["--older-than", "1d", "--database", "other"]
    out = StringIO()

    call_command("fencing", "prune", *arguments, stdout=out)

    assert out.getvalue() == "1 fences, 1 once records, 1 events deleted.\n"
    assert (exists(name), exists(name, "other")) == (True, False)
    assert (floor(), floor("other")) == (0, 4)


def test_what_is_held_in_another_database_stays(name: str) -> None:
    """Its lease has keys of its own, and those are asked for."""
    used(name)
    with fenced_lock(name, using="other"):
        age(name, "other")
        assert pruned("other") == 0
        assert pruned("default") == 1
    assert pruned("other") == 1


def test_all_tenants_are_pruned(name: str) -> None:
    """Each under its own lock: one of a tenant that holds its lease stays."""

    def within(tenant: str) -> Any:
        return override_settings(FENCING={**settings.FENCING, "NAMESPACE": tenant})

    for each in ("one", "two"):
        with within(each):
            used(name)
    with within("three"):
        lease = fenced_lock(name).acquire()
        age(name)

    assert pruned() == 2

    with within("three"):
        assert exists(name)
        commit(lease)
        lease.release()


def test_a_thousand_names(name: str, private_redis: Any) -> None:
    """In batches; nothing of them stays, and no lease."""
    Fence.objects.bulk_create(
        Fence(name=f"{slug(name)}:{number:04}", last_fence_token=number, registered_at=ago(days=9))
        for number in range(1000)
    )
    used(f"{name} recent", days=0)

    assert pruned() == 1000

    assert Fence.objects.count() == 1
    assert floor() == 999 + 10**6  # Redis had no counters
    assert not list(private_redis.scan_iter("*:lease:*"))
    assert [key for key in private_redis.scan_iter() if private_redis.pttl(key) == -1] == []


# What stays


def test_what_is_held_stays(name: str, client: Any) -> None:
    """A lease that began long ago, and is renewed."""
    lease = fenced_lock(name, ttl=30).acquire()
    age(name)

    assert pruned() == 0

    assert client.hget(keys_of(name).lease, "holder") == lease.holder.id.hex
    commit(lease)
    lease.release()
    assert pruned() == 1


def test_what_is_held_by_unknown_stays(name: str, client: Any) -> None:
    """An unreadable lease counts as held."""
    used(name)
    client.set(keys_of(name).lease, "?", ex=60)
    assert pruned() == 0
    assert client.get(keys_of(name).lease) == "?"


@contextmanager
def between_look_and_lock(action: Callable[[], Any]) -> Iterator[None]:
    """Run `action` behind the list of old fences, before the first of them is locked."""
    leased, acts = pruning._leased, [action]

    def after_action(*args: Any) -> Any:
        if acts:
            in_threads(acts.pop())
        return leased(*args)

    with mock.patch.object(pruning, "_leased", after_action):
        yield


@contextmanager
def between_lock_and_delete(action: Callable[[], Any]) -> Iterator[None]:
    """Run `action` behind the locks of a batch, before it is deleted."""
    delete, acts = Pruning._delete_leased, [action]

    def after_action(*args: Any) -> Any:
        if acts:
            in_threads(acts.pop())
        return delete(*args)

    with mock.patch.object(Pruning, "_delete_leased", after_action):
        yield


def use(name: str) -> None:
    with fenced_atomic(name):
        pass


@pytest.mark.parametrize("gap", [between_look_and_lock, between_lock_and_delete])
def test_what_is_used_meanwhile_stays(name: str, client: Any, gap: Any) -> None:
    """It is old at the look, and not any more when its turn comes."""
    used(name)
    used(f"{name} too")

    def use_again() -> None:
        client.delete(keys_of(name).lease)  # as if that of the prune had run out
        use(name)

    with gap(use_again):
        assert pruned() == 1

    assert exists(name)
    assert not exists(f"{name} too")
    with fenced_lock(name) as lease:
        commit(lease)


def test_what_is_acquired_meanwhile_stays(name: str) -> None:
    """And its holder, which has not registered yet, does so afterwards."""
    used(name)
    leases = []
    lock = fenced_lock(name, register=False)
    with between_look_and_lock(lambda: leases.append(lock.acquire())):
        assert pruned() == 0
    commit(leases[0])
    assert exists(name)


def test_what_is_deleted_meanwhile_is_no_obstacle(name: str) -> None:
    """By another prune, say."""
    used(name)
    used(f"{name} too")
    pk = resolve(name).pk
    with between_lock_and_delete(lambda: Fence.objects.filter(pk=pk).delete()):
        assert pruned() == 1
    assert not Fence.objects.exists()


def test_a_row_that_is_locked_is_skipped(name: str) -> None:
    """Nobody waits for a transaction that does not end."""
    used(name, times=5)
    used(f"{name} too")
    with transaction.atomic():
        Fence.objects.select_for_update().get(pk=resolve(name).pk)
        assert in_threads(pruned) == [1]
        assert exists(name)
    assert floor() == 2
    assert pruned() == 1
    assert floor() == 7  # the first prune has spent a token, too


# Tokens


@pytest.mark.parametrize("alias", ["default", "other", "sqlite"])
@pytest.mark.parametrize("flushed", [True, False], ids=["flushed", "kept"])
@pytest.mark.parametrize("way", ["registers", "later", "fenced_atomic"])
@pytest.mark.parametrize("same", [True, False], ids=["same name", "new name"])
def test_the_next_token_is_above_the_pruned_ones(
    name: str, private_redis: Any, alias: str, flushed: bool, way: str, same: bool
) -> None:
    """Of that name and of a new one, with and without the counters in Redis."""
    highest = used(name, alias, times=7)
    assert pruned(alias) == 1
    if flushed:
        private_redis.flushall()
    given = name if same else f"{name} new"

    for number in range(2):
        if way == "fenced_atomic":
            with fenced_atomic(given, using=alias) as row:
                token = row.last_fence_token
        else:
            with fenced_lock(given, using=alias, register=way == "registers") as lease:
                commit(lease)
                token = lease.token
        assert token > highest + number
        highest = max(highest, token - 1)
    stored = Fence.objects.using(alias).get(pk=resolve(given, alias).pk)
    assert stored.last_fence_token == token
    assert stored.registered_at is not None


@pytest.mark.parametrize("alias", ["default", "sqlite"])
@pytest.mark.parametrize("registered", [True, False])
def test_an_old_lease_writes_no_more(name: str, client: Any, alias: str, registered: bool) -> None:
    """Its fence is gone, and it does not bring it back, after a flush neither."""
    old = fenced_lock(name, using=alias, register=registered).acquire()
    expire_in(client, name, alias)
    used(name, alias)
    assert pruned(alias) == 1

    with pytest.raises(LeaseLost):
        commit(old)

    pruned(alias, days=-1)  # SQLite has noted the floor in a row
    assert not exists(name, alias)


def expire_in(client: Any, name: str, alias: str) -> None:
    client.delete(resolve(name, alias).keys.lease)


def test_tokens_that_were_never_registered_stay_below(name: str, private_redis: Any) -> None:
    """The floor is that of the counter, which has proposed them."""
    used(name)
    old = fenced_lock(name, register=False).acquire()
    expire(private_redis, name)
    assert pruned() == 1
    assert floor() > old.token
    private_redis.flushall()
    with fenced_lock(name) as lease:
        assert lease.token > old.token
    with pytest.raises(LeaseLost):
        commit(old)


@pytest.mark.parametrize("alias", ["default", "sqlite"])
@pytest.mark.parametrize("register", [True, False])
def test_a_fence_that_stays_goes_on_where_it_was(name: str, alias: str, register: bool) -> None:
    """The floor is for new ones only: an old one below it counts on by one."""
    stays = used(f"{name} stays", alias, days=0, times=3)
    used(name, alias, times=9)
    assert pruned(alias) == 1
    assert floor(alias) > stays + 1

    with fenced_lock(f"{name} stays", using=alias, register=register) as lease:
        commit(lease)
        assert lease.token == stays + 1


def test_the_floor_never_falls(name: str, private_redis: Any) -> None:
    """A later prune of lower tokens leaves it."""
    used(name, times=20)
    pruned()
    highest = floor()
    assert highest >= 20
    Fence.objects.create(name=slug(f"{name} low"), last_fence_token=1, registered_at=ago(days=9))
    private_redis.set(keys_of(f"{name} low").token, "1")
    with override_settings(FENCING={**settings.FENCING, "NAMESPACE": ""}):
        private_redis.set(keys_of(f"{name} low").token, "1")

    assert pruned() == 1

    assert floor() == highest


@pytest.mark.parametrize("alias", ["default", "other"])  # SQLite: see the next test
def test_two_prunes_at_once(name: str, alias: str) -> None:
    """Each fence is deleted by one of them, there is one floor, and it only rises."""
    for turn in range(6):
        tokens = [used(f"{name} {turn} {number}", alias, times=number) for number in (1, 4, 2, 3)]
        before = floor(alias)

        counts = in_threads(*[partial(pruned, alias)] * 2)

        assert all(isinstance(count, int) for count in counts), counts
        pruned(alias)  # what one of them has skipped
        assert not Fence.objects.using(alias).exists()
        assert floor(alias) >= max(*tokens, before)


@pytest.mark.parametrize("alias", ["default", "sqlite"])
def test_the_first_floor_is_made_by_two_at_once(name: str, alias: str) -> None:
    """They meet at a row that is not there yet, and neither fails nor lowers it."""
    for _ in range(10):
        FenceFloor.objects.using(alias).all().delete()
        batches = []
        for number, token in enumerate((40, 90)):
            used(f"{name} {number}", alias)
            batches.append([(resolve(f"{name} {number}", alias), token)])

        counts = in_threads(
            *[
                partial(Pruning(alias=alias, before=ago(days=1))._delete_leased, batch)
                for batch in batches
            ]
        )

        assert counts == [1, 1]
        assert floor(alias) == 90


@contextmanager
def stopped_before_the_commit(alias: str = "default") -> Iterator[Any]:
    """Let a prune of everything run in a thread up to its commit."""

    def body(pause: Any) -> int:
        def hook(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            result = execute(sql, params, many, context)
            if sql.startswith("DELETE") and "django_fencing_fence" in sql and not paused:
                paused.append(True)
                pause()
            return result

        paused: list[bool] = []
        with connections[alias].execute_wrapper(hook):
            return pruned(alias)

    with started(body) as prune:
        prune.reach_pause()
        yield prune


def test_an_old_lease_does_not_slip_in_while_the_fence_is_deleted(name: str, client: Any) -> None:
    """It waits for the row that goes, and is below the floor that comes with that: P1."""
    old = fenced_lock(name, register=False).acquire()
    expire(client, name)
    assert used(name) == 2

    with stopped_before_the_commit() as prune, in_background(partial(commit, old)) as late:
        wait_until(lambda: waits_for_row() or late.done())
        assert prune.finish() == 1

    assert isinstance(late.exception(), LeaseLost)
    assert not exists(name)


def test_a_flush_during_a_prune_brings_no_token_again(name: str, private_redis: Any) -> None:
    """Who acquires meanwhile, from token 1 on, ends above the floor: P3."""
    highest = used(name, times=5)

    def acquire() -> int:
        with fenced_lock(name, ttl=30, wait=5) as lease:
            commit(lease)
            return lease.token

    with stopped_before_the_commit() as prune:
        private_redis.flushall()
        with in_background(acquire) as late:
            wait_until(lambda: waits_for_row() or late.done())
            assert prune.finish() == 1

    assert late.result() > highest
    assert floor() > highest


def test_a_new_name_during_a_prune(name: str) -> None:
    """It does not wait for anybody."""
    used(name)
    with stopped_before_the_commit() as prune:
        use(f"{name} new")
        assert prune.finish() == 1
    assert exists(f"{name} new")


# Faults


def test_a_prune_that_is_interrupted_gives_back_what_it_holds(name: str, client: Any) -> None:
    """Nothing is deleted, and nobody waits."""
    used(name)
    with (
        mock.patch.object(Pruning, "_delete_leased", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        pruned()
    assert exists(name)
    assert not client.exists(keys_of(name).lease)
    use(name)


def test_a_prune_that_is_killed_holds_nothing_for_longer_than_a_minute(
    name: str, client: Any
) -> None:
    """Its leases run out by themselves."""
    used(name)
    ends: list[int] = []
    with between_lock_and_delete(lambda: ends.append(client.pttl(keys_of(name).lease))):
        pruned()
    assert 50_000 < ends[0] <= 60_000


def test_a_prune_whose_store_goes_away_deletes_nothing_that_it_does_not_hold(
    name: str, private_redis: Any
) -> None:
    """StoreUnavailable at the first lock; what was not locked stays."""
    used(name)
    with cache_at(CLOSED_PORT), pytest.raises(StoreUnavailable):
        pruned()
    assert exists(name)
    assert floor() == 0


def test_a_database_error_deletes_nothing_and_gives_back(name: str, client: Any) -> None:
    """Floor and fences are one transaction."""
    used(name)

    def fail(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("DELETE"):
            raise RuntimeError("the disk is full")
        return execute(sql, *rest)

    with connections["default"].execute_wrapper(fail), pytest.raises(RuntimeError):
        pruned()
    assert exists(name)
    assert floor() == 0
    assert not client.exists(keys_of(name).lease)


def test_waiters_of_what_is_pruned_get_their_lock(name: str, client: Any) -> None:
    """They wait for the prune as for any holder, and their fence begins above the floor."""
    used(name, times=3)
    results: list[Any] = []

    def wait_for_it() -> None:
        threads.append(threading.Thread(target=acquire))
        threads[0].start()
        wait_until(lambda: client.zcard(keys_of(name).queue) == 1)

    def acquire() -> None:
        try:
            with fenced_lock(name, wait=10) as lease:
                commit(lease)
                results.append(lease.token)
        except FencingError as error:
            results.append(error)
        finally:
            connections.close_all()

    threads: list[threading.Thread] = []
    with between_lock_and_delete(wait_for_it):
        assert pruned() == 1
    threads[0].join(20)
    assert results == [5]
    assert exists(name)


def test_a_holder_whose_lease_has_run_out_is_refused_after_a_prune(name: str, client: Any) -> None:
    """Nobody overtook it; its fence is gone, and it is told so."""
    lease = fenced_lock(name).acquire()
    expire(client, name)
    age(name)
    assert pruned() == 1
    with pytest.raises(StaleToken, match="its row is gone"):
        commit(lease)


def test_what_was_pruned_is_told(name: str) -> None:
    """fences.pruned() is the floor."""
    assert fences.pruned("default") == 0
    used(name, times=2)
    pruned()
    assert fences.pruned("default") == floor() == 3


def test_one_fence_that_cannot_be_locked_is_no_obstacle(name: str, client: Any) -> None:
    """Its counter is broken: it stays, and the others go."""
    for each in ("a", "b", "c"):
        used(f"{name} {each}")
    key = keys_of(f"{name} b").token
    client.delete(key)
    client.lpush(key, "no counter")
    client.expire(key, 60)

    with suppress(StoreUnavailable):
        pruned()

    assert [exists(f"{name} {each}") for each in ("a", "b", "c")] == [False, True, False]


def test_a_new_name_behind_a_prune_is_nothing_that_heals(name: str) -> None:
    """It begins above the floor; the ledger is for what went wrong."""
    used(name, times=3)
    pruned()
    for number in range(3):
        use(f"{name} {number}")

    assert not FenceEvent.objects.filter(kind="healed").exists()


def test_it_is_refused_in_a_transaction(name: str) -> None:
    """Its locks would be given back before what it deletes is committed."""
    used(name)
    with transaction.atomic(), pytest.raises(InsideTransaction):
        pruned()
    assert exists(name)
