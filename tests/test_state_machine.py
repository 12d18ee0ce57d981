"""Three clients, one value, and a Redis that forgets: hypothesis looks for a lost update."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
from django.db import OperationalError, connections, transaction
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_fencing.exceptions import LeaseLost, LockHeld, StaleToken
from django_fencing.grants import JUMP
from django_fencing.leases import Lease
from django_fencing.locks import fenced_lock
from tests.helpers import SECONDS, closing, committing, keys_of
from tests.replica import refuse_lower
from tests.shop.models import Job

pytestmark = committing("default", "repeatable", "sqlite")

# Whoever waits for a row in here waits for a transaction that goes on only later: so it is short.
PATIENCE = 0.015


class LostUpdate(AssertionError):
    """A committed write is gone, or a stale one was committed."""


@dataclass(eq=False)
class Client:
    """A thread with connections of its own, which does one step at a time, and what it holds."""

    alias: str
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    lease: Any = None
    granted: int = 0  # the token that the store gave it last
    registered: bool = False
    tried: bool = False  # to register, in a transaction that was rolled back
    value: int | None = None  # what it has read under the lock
    block: ExitStack | None = None  # its open fenced transaction

    def do(self, step: Callable[..., Any], *args: Any) -> Any:
        """Return what the step returns, or what it refuses with."""
        return self.thread.submit(self._do, step, *args).result(SECONDS)

    def _do(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except (LockHeld, LeaseLost, OperationalError) as refusal:
            return refusal

    def be_impatient(self) -> None:
        """Wait for rows as shortly as registering does."""
        milliseconds = round(PATIENCE * 1000)
        sqlite = connections[self.alias].vendor == "sqlite"
        with connections[self.alias].cursor() as cursor:
            cursor.execute(
                f"PRAGMA busy_timeout = {milliseconds}"
                if sqlite
                else f"SET lock_timeout = {milliseconds}"
            )

    def begin(self) -> Any:
        """Open a fenced transaction, and return its row."""
        with ExitStack() as block:
            row = block.enter_context(self.lease.atomic())
            self.block = block.pop_all()
        return row

    def end(self, error: Exception | None = None) -> None:
        """Leave the transaction: commit it, unless there is an error."""
        block, self.block = self.block, None
        assert block is not None
        block.__exit__(error and type(error), error, None)

    def forget(self) -> None:
        """Crash, as far as the lease goes."""
        self.lease, self.value, self.block = None, None, None
        self.registered = self.tried = False


class FencedCounting(RuleBasedStateMachine):
    """Clients add one to a value, each as the lock tells it to, while Redis does what it likes.

    A registered client writes what it has *read before* its transaction, plus one.
    """

    exact = True  # whether each refusal and each success is foretold

    def __init__(self, clients: list[Client], redis: Any) -> None:
        super().__init__()
        self.clients, self.redis, self.alias = clients, redis, clients[0].alias
        self.committed: list[tuple[int, UUID]] = []
        self.fences: list[tuple[int, UUID | None]] = [(0, None)]
        self.snapshot: tuple[dict[str, str], str | None] = ({}, None)

    @initialize()
    def begin_with_a_new_row(self) -> None:
        self.job = Job.objects.using(self.alias).create(amount=0)
        self.keys = keys_of(self.job)

    # What is so

    def rows(self) -> Any:
        return Job.objects.using(self.alias).filter(pk=self.job.pk)

    def amount(self) -> int:
        return int(self.rows().get().amount)

    def fence(self) -> tuple[int, UUID | None]:
        row = self.rows().get()
        return row.last_fence_token, row.last_fence_holder

    def holder(self) -> str | None:
        """Whose lease it is, as Redis sees it."""
        found: str | None = self.redis.hget(self.keys.lease, "holder")
        return found

    def is_mine(self, client: Client) -> bool:
        return self.holder() == client.lease.holder.id.hex

    def row_is_free(self) -> bool:
        return all(client.block is None for client in self.clients)

    def those(self, which: Callable[[Client], bool]) -> list[Client]:
        return [client for client in self.clients if which(client)]

    # What clients do

    def take(self, register: bool) -> Any:
        return fenced_lock((Job, self.job.pk), using=self.alias, register=register).acquire()

    @precondition(lambda self: self.those(lambda client: not client.lease))
    @rule(pick=st.integers(0, 5), register=st.booleans())
    def acquire(self, pick: int, register: bool) -> None:
        client = pick_from(self.those(lambda client: not client.lease), pick)
        free = self.holder() is None
        outcome = client.do(self.take, register)
        granted = not isinstance(outcome, Exception)
        if self.exact:
            expected = free and (not register or self.row_is_free())
            assert granted is expected, outcome
            assert granted or not free or self.holder() is None
        if granted:
            client.lease, client.registered, client.granted = outcome, register, outcome.token
            if register:
                client.value = client.do(self.amount)
                assert not self.exact or self.fence() == (outcome.token, outcome.holder.id)

    @precondition(lambda self: self.those(lambda client: client.registered and not client.block))
    @rule(pick=st.integers(0, 5))
    def read(self, pick: int) -> None:
        """Read again, outside of any transaction, whether the lease still is good or not."""
        client = pick_from(self.those(lambda c: c.registered and not c.block), pick)
        client.value = client.do(self.amount)

    @precondition(lambda self: self.those(lambda client: client.lease and not client.block))
    @rule(pick=st.integers(0, 5))
    def begin(self, pick: int) -> None:
        client = pick_from(self.those(lambda client: client.lease and not client.block), pick)
        free, fence, mine = self.row_is_free(), self.fence(), self.is_mine(client)
        token = client.lease.token

        outcome = client.do(client.begin)

        if self.exact:
            stale = fence != (token, client.lease.holder.id)
            below = fence[0] < client.granted or (mine and not client.tried)
            expected = (
                (OperationalError if not free else StaleToken if stale else Job)
                if client.registered
                else (Job if free and below else LeaseLost | OperationalError)
            )
            assert isinstance(outcome, expected), outcome
        if isinstance(outcome, LeaseLost):
            client.forget()
        elif client.block and not client.registered:
            client.value = client.do(self.amount)
            reissued = client.lease.token - token >= JUMP
            client.granted = client.lease.token if reissued else client.granted
            # Above READ COMMITTED it has registered before the transaction.
            client.registered = self.fence() == (client.lease.token, client.lease.holder.id)

    @precondition(lambda self: not self.row_is_free())
    @rule()
    def commit(self) -> None:
        (client,) = self.those(lambda client: client.block is not None)
        assert client.value is not None
        client.value += 1
        client.do(lambda: self.rows().update(amount=client.value))
        assert client.do(client.end) is None
        client.registered = True
        self.committed.append((client.lease.token, client.lease.holder.id))
        assert not self.exact or self.fence() == self.committed[-1]

    @precondition(lambda self: not self.row_is_free())
    @rule()
    def roll_back(self) -> None:
        (client,) = self.those(lambda client: client.block is not None)
        client.do(lambda: self.rows().update(amount=-1))
        client.do(client.end, KeyError())
        client.tried = not client.registered

    @precondition(lambda self: self.those(lambda client: client.lease and not client.block))
    @rule(pick=st.integers(0, 5))
    def release(self, pick: int) -> None:
        client = pick_from(self.those(lambda client: client.lease and not client.block), pick)
        mine, holder = self.is_mine(client), self.holder()

        assert client.do(client.lease.release) is mine
        assert self.holder() == (None if mine else holder)
        client.forget()

    @precondition(lambda self: self.those(lambda client: client.lease))
    @rule(pick=st.integers(0, 5))
    def extend(self, pick: int) -> None:
        client = pick_from(self.those(lambda client: client.lease), pick)
        mine, holder = self.is_mine(client), self.holder()

        assert isinstance(client.do(client.lease.extend), LeaseLost) is not mine
        assert self.holder() == holder

    # What Redis does

    @precondition(lambda self: self.holder())
    @rule()
    def expire(self) -> None:
        self.redis.delete(self.keys.lease)

    @rule()
    def flush(self) -> None:
        self.redis.delete(self.keys.lease, self.keys.token)

    @rule(value=st.none() | st.integers(0, 3))
    def lower_counter(self, value: int | None) -> None:
        if value is None:
            self.redis.delete(self.keys.token)
        else:
            self.redis.set(self.keys.token, value, px=60_000)

    @rule()
    def replicate(self) -> None:
        self.snapshot = (self.redis.hgetall(self.keys.lease), self.redis.get(self.keys.token))

    @rule()
    def fail_over(self) -> None:
        """Go on from what the replica had: an older lease, an older counter."""
        lease, counter = self.snapshot
        self.flush()
        if lease:
            self.redis.hset(self.keys.lease, mapping=lease)
            self.redis.pexpire(self.keys.lease, 60_000)
        if counter is not None:
            self.redis.set(self.keys.token, counter, px=60_000)

    # What holds

    @invariant()
    def no_update_is_lost(self) -> None:
        """Each commit has added one, tokens grow, and commits are in the order of registrations."""
        row = self.rows().get()
        fence, former = (row.last_fence_token, row.last_fence_holder), self.fences[-1]
        moved = fence != former
        if row.amount != len(self.committed) or (moved and fence[0] <= former[0]):
            raise LostUpdate(f"{len(self.committed)} commits made {row.amount}, {former} {fence}")
        self.fences += [fence] * moved
        if self.exact:
            places = [self.fences.index(commit) for commit in self.committed]
            assert places == sorted(places), (self.committed, self.fences)

    def teardown(self) -> None:
        """The resource works again within one acquisition, whatever Redis has lost."""
        for client in self.those(lambda client: client.block is not None):
            client.do(client.end, KeyError())
        for client in self.clients:
            client.forget()
        self.redis.delete(self.keys.lease)
        client = self.clients[0]
        lease = client.do(self.take, True)
        if self.exact:
            assert isinstance(lease, Lease), lease
            assert self.fence() == (lease.token, lease.holder.id)
            assert lease.token > self.fences[-1][0]


def pick_from(clients: list[Client], pick: int) -> Client:
    return clients[pick % len(clients)]


class Twin(FencedCounting):
    """The same clients with the same store, but another rule in the database."""

    exact = False
    read = roll_back = extend = flush = lower_counter = replicate = fail_over = None  # not needed

    def take(self, register: bool) -> Any:
        lease = fenced_lock((Job, self.job.pk), using=self.alias, register=False).acquire()
        lease.atomic = lambda: self.rule_of_the_database(lease.token)
        return lease


class PlainLock(Twin):
    """No rule at all."""

    @contextmanager
    def rule_of_the_database(self, token: int) -> Iterator[Any]:
        with transaction.atomic(using=self.alias):
            yield self.rows().select_for_update().get()


class TextbookRule(Twin):
    """Refuse a token that is lower than the last one written."""

    @contextmanager
    def rule_of_the_database(self, token: int) -> Iterator[Any]:
        with transaction.atomic(using=self.alias):
            refuse_lower(self.rows(), token)
            yield self.rows().get()


@pytest.fixture
def clients(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[list[Client]]:
    """Yield three clients, which live as long as the search."""
    found = [Client(request.param) for _ in range(3)]
    for client in found:
        client.do(client.be_impatient)
    with mock.patch("django_fencing.leases._PATIENCE", PATIENCE):
        yield found
    for client in found:
        client.thread.submit(closing, int).result(SECONDS)
        client.thread.shutdown()


def search(
    machine: type[FencedCounting], clients: list[Client], redis: Any, **options: Any
) -> None:
    """Run the machine in many orders of its rules."""
    run_state_machine_as_test(
        lambda: machine(clients, redis),
        settings=settings(
            database=None,
            deadline=None,
            phases=[Phase.generate],  # add Phase.shrink for the shortest order: it takes minutes
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


@pytest.mark.parametrize("clients", ["default", "repeatable", "sqlite"], indirect=True)
def test_no_order_of_events_loses_an_update(clients, client):
    """Whatever clients and Redis do, each commit adds one, and each refusal has its reason."""
    search(FencedCounting, clients, client, max_examples=50)


@pytest.mark.parametrize("clients", ["default"], indirect=True)
@pytest.mark.parametrize("rule_of_the_database", [PlainLock, TextbookRule])
def test_the_search_finds_the_lost_update_of_other_rules(clients, client, rule_of_the_database):
    """The twin: the same search, without registering before reading."""
    with pytest.raises(LostUpdate):
        search(rule_of_the_database, clients, client, max_examples=300, derandomize=True)
