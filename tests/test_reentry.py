"""A lock that is taken again by the flow that holds it."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection, transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.test import RequestFactory

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import InsideTransaction, LeaseLost, LockHeld
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import Fence
from django_fencing.timing import now
from tests.helpers import (
    assert_held_by,
    committing,
    counted_calls,
    expire,
    in_threads,
    keys_of,
    statements,
)
from tests.shop.models import Job

pytestmark = committing("default")


def by_function(resource: Any, **options: Any) -> Any:
    """Return a block that a decorated function makes."""
    return with_fenced_lock(resource, **options)(current_lease)()


FORMS: list[Callable[..., AbstractContextManager[Any]]] = [fenced_lock, fenced_atomic]


@pytest.mark.parametrize("inner", FORMS)
@pytest.mark.parametrize("outer", FORMS)
def test_the_same_lease_is_entered_again_at_once(
    name: str, client: Any, outer: Any, inner: Any
) -> None:
    """It asks nobody and waits for nothing; its end releases nothing, and shortens nothing."""
    with outer(name, ttl=30):
        lease = current_lease()
        began = now()
        with counted_calls() as calls, inner(name, ttl=1, wait=20):
            assert current_lease() is lease
        assert now() - began < 1
        assert calls == []
        assert_held_by(lease, client)
        assert isinstance(in_threads(fenced_lock(name).acquire)[0], LockHeld)

    assert not client.exists(keys_of(name).lease)
    assert lease.holder.id == Fence.objects.get(name=lease.row.pk).last_fence_holder


def test_decorated_functions_call_each_other(name: str, client: Any) -> None:
    """Each with the lease if it asks for it, and each by its own definition of the resource."""

    @with_fenced_lock(name + ":{number}")
    def first(number: int) -> list[int]:
        Job.objects.create(note=name)
        return [current_lease().token, *second(str(number))]

    @with_fenced_lock(lambda number: f"{name}:{number}", wait=20)
    def second(number: str, *, lease: Lease) -> list[int]:
        with lease.atomic():
            Job.objects.create(note=name)
        return [lease.token, third()]

    @with_fenced_lock(f"{name}:7", atomic=True)
    def third(*, lease: Lease) -> int:
        assert connection.in_atomic_block
        return lease.token

    assert first(7) == [1, 1, 1]
    assert Job.objects.filter(note=name).count() == 2
    assert first(7) == [2, 2, 2]
    assert not client.exists(keys_of(f"{name}:7").lease)


def test_a_row_is_the_same_resource_however_it_is_written(job: Job) -> None:
    """As an instance, an older one, or an address."""
    with fenced_lock(job) as lease, fenced_lock((Job, job.pk)) as again, fenced_lock(job) as once:
        assert lease is again is once
        with fenced_atomic((Job, str(job.pk))) as row:
            row.note = "inner"
            row.save()

    job.refresh_from_db()
    assert job.note == "inner"


def test_another_resource_is_another_lock(name: str, job: Job) -> None:
    """Also one in between. The current one is that of the innermost block."""
    with fenced_lock(name) as outer, fenced_lock(job) as other:
        for enter in (fenced_lock, fenced_atomic):
            with enter(name):
                assert current_lease() is outer
            assert by_function(name) is outer
            assert current_lease() is other
    assert outer is not other


def test_an_inner_transaction_is_a_savepoint_of_the_outer_one(name: str) -> None:
    """Its failure takes back its own part."""
    with fenced_atomic(name):
        Job.objects.create(note=f"{name}:outer")
        with suppress(KeyError), fenced_atomic(name):
            Job.objects.create(note=f"{name}:inner")
            raise KeyError

    notes = Job.objects.filter(note__startswith=name).values_list("note", flat=True)
    assert list(notes) == [f"{name}:outer"]


def test_a_row_is_as_it_was_where_an_inner_transaction_has_failed(job: Job) -> None:
    """What that has changed is not saved by the outer one."""
    with fenced_atomic(job) as row:
        row.note = "outer"
        with suppress(KeyError), fenced_atomic(job) as inner:
            assert inner is row
            inner.amount = 99
            inner.save()
            raise KeyError
        assert (row.amount, row.note) == (10, "outer")
        row.save()

    job.refresh_from_db()
    assert (job.amount, job.note) == (10, "outer")


def test_what_runs_after_the_commit_may_enter_again(job: Job) -> None:
    """The lease is held until then."""
    tokens = []

    def hook() -> None:
        with fenced_atomic(job) as row:
            row.note = "hook"
            row.save()
            tokens.append(row.last_fence_token)

    with fenced_atomic(job):
        transaction.on_commit(hook)

    job.refresh_from_db()
    assert (job.note, tokens) == ("hook", [1])


def test_a_failure_of_the_inner_block_ends_nothing(name: str, client: Any) -> None:
    """The outer block may go on, and its own failure releases."""
    with suppress(ZeroDivisionError), fenced_lock(name) as lease:
        with suppress(KeyError), fenced_lock(name):
            raise KeyError
        assert_held_by(lease, client)
        with lease.atomic():
            pass
        raise ZeroDivisionError

    assert not client.exists(keys_of(name).lease)


def test_an_unregistered_lease_is_registered_for_an_inner_lock(name: str) -> None:
    """Which may read before it opens a transaction."""
    with fenced_lock(name, register=False) as lease:
        with fenced_lock(name, register=False), statements() as sql:
            pass
        assert sql == []
        with counted_calls() as calls, fenced_lock(name):
            assert Fence.objects.get(name=lease.row.pk).last_fence_holder == lease.holder.id
        assert calls == ["EVALSHA"]  # which confirms
        with counted_calls() as calls, fenced_lock(name), statements() as sql:
            pass
        assert (calls, sql) == ([], [])


def test_an_unregistered_lease_is_not_registered_in_a_transaction(name: str) -> None:
    """Of others: it would not be committed. In that of a registered one nothing is in the way."""
    with fenced_lock(name, register=False), transaction.atomic(), pytest.raises(InsideTransaction):
        fenced_lock(name).__enter__()
    with fenced_lock(name) as lease, transaction.atomic(), fenced_lock(name) as inner:
        assert inner is lease
        with pytest.raises(InsideTransaction), inner.atomic():
            pass


def test_an_unregistered_lease_that_was_overtaken_is_lost_for_an_inner_lock(
    name: str, client: Any
) -> None:
    """Nothing is refused and tried again: the body has begun."""
    with fenced_lock(name, register=False):
        expire(client, name)
        with pytest.raises(LeaseLost, match="could not be registered"):
            fenced_lock(name).__enter__()


def test_a_lease_of_acquire_is_not_entered_again(name: str) -> None:
    """Neither by a block, nor by acquire() within one: somebody else may release it."""
    lease = fenced_lock(name).acquire()
    began = now()
    for attempt in (lambda: fenced_lock(name, wait=20).__enter__(), lambda: by_function(name)):
        with pytest.raises(LockHeld, match="this very thread"):
            attempt()
    lease.release()

    with fenced_lock(name), pytest.raises(LockHeld, match="this very thread"):
        fenced_lock(name, wait=20).acquire()
    assert now() - began < 5


def test_a_lost_lease_is_not_entered_again(name: str, client: Any) -> None:
    """The store is asked, and grants the next one."""
    with fenced_lock(name, ttl=30) as lost:
        expire(client, name)
        with pytest.raises(LeaseLost):
            lost.ensure_held()
        with fenced_lock(name) as lease:
            assert (lost.token, lease.token) == (1, 2)


def test_a_released_lease_is_not_entered_again(name: str) -> None:
    """Its block goes on without it."""
    with fenced_lock(name) as released:
        released.release()
        with fenced_lock(name) as lease:
            assert lease is not released


def test_a_lease_is_not_entered_after_its_block(name: str) -> None:
    """Whoever has kept it."""
    with fenced_lock(name) as first:
        pass
    with fenced_lock(name) as second:
        assert second.token == first.token + 1


def test_a_lease_that_a_stream_keeps_is_not_entered_again(name: str) -> None:
    """The same thread may serve the next request."""

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        return StreamingHttpResponse(iter(["part"]))

    response = view(RequestFactory().get("/"))
    with pytest.raises(LockHeld):
        by_function(name)
    response.close()
    assert by_function(name).token == 2


def test_views_and_commands_ask_the_store(name: str) -> None:
    """Work comes in by them, whichever thread calls them."""

    class Command(BaseCommand):
        @with_fenced_lock(name)
        def handle(self, **options: Any) -> None:
            pytest.fail("The body ran.")

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        pytest.fail("The body ran.")

    @with_fenced_lock(name, respond=False)
    def silent(request: Any) -> Any:
        pytest.fail("The body ran.")

    with fenced_lock(name):
        assert view(RequestFactory().get("/")).status_code == 409
        with pytest.raises(LockHeld):
            silent(RequestFactory().get("/"))
        with pytest.raises(CommandError) as caught:
            call_command(Command())
        assert caught.value.returncode == 75


def test_a_function_that_a_locked_view_calls_enters_its_lock_again(name: str) -> None:
    """The service is locked wherever it is called from."""

    @with_fenced_lock(name, wait=20)
    def service() -> int:
        return current_lease().token

    @with_fenced_lock(name)
    def view(request: Any) -> Any:
        return HttpResponse(str(service()))

    assert view(RequestFactory().get("/")).content == b"1"
    assert service() == 2


def test_coroutines_of_one_task_enter_a_lock_again(name: str, client: Any) -> None:
    """As functions do. Child tasks and threads are others: their locks are refused at once."""

    @with_fenced_lock(name, atomic=False)
    async def outer() -> list[Any]:
        lease = current_lease()
        tokens = [await inner(), await inner()]
        children = await asyncio.gather(inner(), inner(), return_exceptions=True)
        hop = await asyncio.gather(
            sync_to_async(by_function)(name), asyncio.to_thread(outside), return_exceptions=True
        )
        assert await inner() == lease.token
        return [tokens, *map(type, [*children, *hop])]

    @with_fenced_lock(name, wait=20)
    async def inner() -> int:
        await Job.objects.acreate(note=name)
        return current_lease().token

    def outside() -> None:
        fenced_lock(name, register=False).acquire()

    began = now()
    assert asyncio.run(outer()) == [[1, 1], LockHeld, LockHeld, LockHeld, LockHeld]
    assert now() - began < 10
    assert Job.objects.filter(note=name).count() == 3
    assert not client.exists(keys_of(name).lease)
