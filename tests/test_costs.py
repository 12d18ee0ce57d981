"""How many Redis calls and SQL statements each path makes: DESIGN's figures, counted."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, transaction
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from django.test.utils import CaptureQueriesContext

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import InsideTransaction, LockHeld, StaleToken
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.resources import ResourceLike
from tests.helpers import counted_calls, taken_over
from tests.shop.models import Job, UrgentJob

pytestmark = pytest.mark.django_db(transaction=True)


def cost(action: Callable[[], Any]) -> tuple[int, list[str]]:
    """Return the number of Redis calls, and the first words of the SQL statements."""
    with counted_calls() as calls, CaptureQueriesContext(connection) as queries:
        action()
    return len(calls), [query["sql"].split()[0] for query in queries.captured_queries]


@pytest.fixture(params=["row", "name"])
def resource(request: pytest.FixtureRequest, job: Job, name: str) -> ResourceLike:
    """Return a resource of each kind, with the scripts and its fence in place."""
    resource = (Job, job.pk) if request.param == "row" else name
    with fenced_lock(resource, ttl=30) as lease:
        lease.ensure_held()
        lease.extend()
    return resource


def test_fenced_lock_costs_three_calls_and_one_statement(resource: ResourceLike) -> None:
    """Propose, register, confirm, release."""

    def enter_and_leave() -> None:
        with fenced_lock(resource):
            pass

    assert cost(enter_and_leave) == (3, ["WITH"])


def test_an_unregistered_lock_costs_two_calls_and_no_statement(resource: ResourceLike) -> None:
    """Nothing is asked of the database before the first atomic()."""

    def enter_and_leave() -> None:
        with fenced_lock(resource, register=False):
            pass

    assert cost(enter_and_leave) == (2, [])


def test_fenced_atomic_costs_two_calls_and_one_statement(resource: ResourceLike) -> None:
    """One statement over a bare transaction, which replaces the read of the row."""

    def work() -> None:
        with fenced_atomic(resource) as row:
            assert row.pk

    assert cost(work) == (2, ["BEGIN", "WITH", "COMMIT"])


def test_a_decorated_function_costs_what_fenced_atomic_costs(resource: ResourceLike) -> None:
    """The shortest form is the cheapest."""
    work = with_fenced_lock(lambda: resource)(lambda: None)

    assert cost(work) == (2, ["BEGIN", "WITH", "COMMIT"])


def test_a_decorated_view_costs_what_fenced_atomic_costs(resource: ResourceLike) -> None:
    """Nothing is asked for the sake of the answer."""
    view = with_fenced_lock(lambda request: resource)(lambda request: HttpResponse())
    request = RequestFactory().get("/")

    assert cost(lambda: view(request)) == (2, ["BEGIN", "WITH", "COMMIT"])


def test_a_fenced_transaction_costs_one_statement(resource: ResourceLike) -> None:
    """Each further transaction of the lease checks once and asks Redis nothing."""
    with fenced_lock(resource) as lease:

        def work() -> None:
            with lease.atomic(), lease.atomic():
                pass

        assert cost(work) == (
            0,
            ["BEGIN", "SELECT", "SAVEPOINT", "RELEASE", "COMMIT"],
        )


def test_asking_and_extending_cost_one_call(resource: ResourceLike) -> None:
    """No statement is sent for either."""
    with fenced_lock(resource) as lease:
        assert cost(lease.ensure_held) == (1, [])
        assert cost(lease.extend) == (1, [])
        assert cost(lease.release) == (1, [])
        assert cost(lease.release) == (0, [])


def test_a_held_lock_costs_one_call(resource: ResourceLike) -> None:
    """With wait=0 there is one attempt, and nothing to clean up."""

    def attempt() -> None:
        with pytest.raises(LockHeld):
            fenced_lock(resource, wait=0).acquire()

    with fenced_lock(resource):
        assert cost(attempt) == (1, [])


def test_a_refused_transaction_costs_nothing(resource: ResourceLike) -> None:
    """InsideTransaction is raised before anything is sent."""

    def attempt() -> None:
        with suppress(InsideTransaction):
            fenced_lock(resource).acquire()

    with transaction.atomic():
        assert cost(attempt) == (0, [])


def test_a_multi_table_child_costs_one_read_more() -> None:
    """The parent's row is locked alone, so the child's columns are read by themselves."""
    child = UrgentJob.objects.create(deadline=7)

    def work() -> None:
        with fenced_atomic(child) as row:
            assert row.deadline == 7

    assert cost(work) == (2, ["BEGIN", "WITH", "SELECT", "COMMIT"])


def test_a_lost_counter_costs_one_call_and_two_statements(job: Job, private_redis: Any) -> None:
    """The fence is read once and the token is issued anew once; the ledger's line comes on top."""

    def work() -> None:
        with fenced_lock((Job, job.pk)):
            pass

    for _ in range(2):  # the scripts are in place after the first
        work()
        private_redis.flushdb()

    noted = ["BEGIN", "SELECT", "INSERT", "COMMIT"]
    assert cost(work) == (4, ["WITH", "SELECT", *noted, "WITH"])

    private_redis.flushdb()
    with override_settings(FENCING={**settings.FENCING, "LEDGER": False}):
        assert cost(work) == (4, ["WITH", "SELECT", "WITH"])


def test_a_refused_token_costs_a_look_and_a_line_of_the_ledger(job: Job, client: Any) -> None:
    """The transaction is rolled back first."""
    lock = fenced_lock(job)
    first = lock.acquire()
    second = taken_over(lock, client)

    def write() -> None:
        with suppress(StaleToken), first.atomic():
            pass

    noted = ["BEGIN", "SELECT", "INSERT", "COMMIT"]
    assert cost(write) == (0, ["BEGIN", "SELECT", "ROLLBACK", *noted])
    second.release()
