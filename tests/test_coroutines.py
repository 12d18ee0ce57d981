"""with_fenced_lock on coroutine functions and asynchronous views."""

import asyncio
import functools
import gc
import inspect
import itertools
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any
from unittest import mock

import pytest
from asgiref.sync import (
    SyncToAsync,
    ThreadSensitiveContext,
    iscoroutinefunction,
    markcoroutinefunction,
)
from asgiref.sync import sync_to_async as in_thread
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, AsyncRequestFactory, Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import LeaseLost, LockHeld, StaleToken
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import fenced_lock
from django_fencing.signals import lease_acquired
from django_fencing.stores.redis import RedisStore
from tests.helpers import (
    SECONDS,
    acquired,
    assert_held_by,
    committing,
    count_sessions,
    counted_calls,
    keys_of,
    taken_over,
    wait_until,
)
from tests.shop.models import Job

pytestmark = committing("default")

urlpatterns: list[Any] = []  # of one test at a time


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """See that neither a thread nor a connection outlives the test."""
    threads, sessions = set(threading.enumerate()), count_sessions()
    yield
    gc.collect()  # an executor of asgiref ends its thread when it is no more
    kept = SyncToAsync.single_thread_executor._threads  # by asgiref, for the whole process
    wait_until(lambda: set(threading.enumerate()) <= threads | kept)
    wait_until(lambda: count_sessions() <= sessions)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run `main` on an event loop, within a time."""

    async def limited() -> Any:
        async with asyncio.timeout(SECONDS):
            return await main()

    return asyncio.run(limited())


class Stop:
    """Where a coroutine stands still, until it may go on."""

    def __init__(self) -> None:
        self._reached, self._open = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self._reached.set()
        await self._open.wait()

    async def reach(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work`, wait until it stands here, and raise what it raises before that."""
        task = asyncio.create_task(work)
        reached = asyncio.create_task(self._reached.wait())
        await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
        if not reached.done():
            reached.cancel()
            raise AssertionError(await task)
        return task

    def let_go(self) -> None:
        self._open.set()


Body = Callable[[], Awaitable[Any]]


def plain(name: str, body: Body) -> Any:
    @with_fenced_lock(name)
    async def work() -> Any:
        return await body()

    return work


def partial(name: str, body: Body) -> Any:
    async def work(call: Body) -> Any:
        return await call()

    return with_fenced_lock(name)(functools.partial(work, body))


def callable_object(name: str, body: Body) -> Any:
    class Work:
        async def __call__(self) -> Any:
            return await body()

    return with_fenced_lock(name)(Work())


def marked(name: str, body: Body) -> Any:
    def work() -> Awaitable[Any]:
        return body()

    return with_fenced_lock(name)(markcoroutinefunction(work))


def method(name: str, body: Body) -> Any:
    class Service:
        @with_fenced_lock(name)
        async def work(self) -> Any:
            return await body()

    return Service().work


def decorated_method(name: str, body: Body) -> Any:
    class Service:
        @method_decorator(with_fenced_lock(name))
        async def work(self) -> Any:
            return await body()

    return Service().work


FORMS = [plain, partial, callable_object, marked, method, decorated_method]


@pytest.mark.parametrize("form", FORMS)
def test_a_coroutine_function_holds_its_lease_until_it_ends(
    form: Callable[[str, Body], Any], name: str, client: Any
) -> None:
    """It stays a coroutine function, and a second call in parallel is refused."""

    async def main() -> Any:
        stop = Stop()

        async def body() -> str:
            await stop()
            return current_lease().resource

        work = form(name, body)
        assert iscoroutinefunction(work)
        assert sys.version_info >= (3, 14) or asyncio.iscoroutinefunction(work)
        assert form is decorated_method or inspect.iscoroutinefunction(work)
        first = await stop.reach(work())
        assert client.exists(keys_of(name).lease)
        with pytest.raises(LockHeld):
            await work()
        stop.let_go()
        return await first

    assert run(main) == name
    assert not client.exists(keys_of(name).lease)


@pytest.mark.parametrize("sensitive", [False, True], ids=["alone", "in one context"])
def test_the_body_is_one_fenced_transaction(name: str, sensitive: bool) -> None:
    """Whatever runs through sync_to_async or the ORM's own methods commits or rolls back whole."""

    @with_fenced_lock(name)
    async def work(fail: bool) -> bool:
        await Job.objects.acreate(note=name)
        await in_thread(Job.objects.create)(note=name)
        if fail:
            raise KeyError(name)
        return await in_thread(lambda: connection.in_atomic_block)()

    async def main() -> tuple[int, bool, int]:
        with pytest.raises(KeyError):
            await work(True)
        rolled_back = await count(name)
        return rolled_back, await work(False), await count(name)

    async def in_one_context() -> tuple[int, bool, int]:
        async with ThreadSensitiveContext():
            try:
                return await main()
            finally:
                await in_thread(connections.close_all)()

    assert run(in_one_context if sensitive else main) == (0, True, 2)


async def count(note: str) -> int:
    """Return how many jobs there are, and leave no connection."""

    def look() -> int:
        try:
            return Job.objects.filter(note=note).count()
        finally:
            connections.close_all()

    return await in_thread(look, thread_sensitive=False)()


def test_a_body_that_takes_the_lease_opens_its_own_transaction(name: str, client: Any) -> None:
    """In sync_to_async(): one that was overtaken meanwhile is refused, and writes nothing."""

    @with_fenced_lock(name)
    async def work(overtaken: bool, *, lease: Lease) -> int:
        def write() -> int:
            with lease.atomic():
                Job.objects.create(note=name)
            return lease.token

        assert not await in_thread(lambda: connection.in_atomic_block)()
        if overtaken:
            await in_thread(lambda: taken_over(fenced_lock(name), client).release())()
        return await in_thread(write)()

    async def main() -> tuple[int, int]:
        with pytest.raises(StaleToken):
            await work(True)
        refused = await count(name)
        await work(False)
        return refused, await count(name)

    assert run(main) == (0, 1)


def test_the_lease_is_current_in_the_coroutine_and_in_its_threads_but_not_in_child_tasks(
    name: str,
) -> None:
    """A child task does not hold what its parent holds, not even while the parent waits for it."""

    @with_fenced_lock(name)
    async def work(*, lease: Lease) -> list[Any]:
        in_child = await asyncio.gather(look(), again(), return_exceptions=True)
        return [current_lease() is lease, await in_thread(current_lease)() is lease, *in_child]

    async def look() -> Any:
        return current_lease()

    async def again() -> Any:
        return fenced_lock(name, register=False).acquire()

    here, in_thread_of_it, looked, acquired_again = run(lambda: work())

    assert here
    assert in_thread_of_it
    assert isinstance(looked, LookupError)
    assert isinstance(acquired_again, LockHeld)
    with pytest.raises(LookupError):
        current_lease()


def test_a_task_that_outlives_the_body_may_acquire_as_any_other(name: str) -> None:
    """It has inherited nothing, and the lease that it was given is over."""
    late: list[asyncio.Task[Any]] = []

    async def main() -> int:
        ended = asyncio.Event()

        @with_fenced_lock(name)
        async def work(*, lease: Lease) -> Lease:
            late.append(asyncio.create_task(acquire_later()))
            return lease

        async def acquire_later() -> int:
            await ended.wait()
            lease = acquired(name)
            lease.release()
            return lease.token

        lease = await work()
        ended.set()
        assert await late[0] == lease.token + 1
        with pytest.raises(LeaseLost, match="it was released"):
            await in_thread(lease.ensure_held, thread_sensitive=False)()
        return lease.token

    assert run(main) == 1


def test_decorated_coroutines_nest_and_gather(name: str) -> None:
    """The inner ones run one after the other in the outer one's thread, each under its lock."""

    @with_fenced_lock(name)
    async def outer(*, lease: Lease) -> list[str]:
        names = await asyncio.gather(*[inner(number) for number in range(5)])
        return [current_lease().resource, *names]

    @with_fenced_lock(name + ":{number}")
    async def inner(number: int) -> str:
        await Job.objects.acreate(note=name)
        return current_lease().resource

    assert run(lambda: outer()) == [name, *[f"{name}:{number}" for number in range(5)]]
    assert Job.objects.filter(note=name).count() == 5


def test_calls_that_share_a_thread_leave_no_connection_open(name: str) -> None:
    """As in one request, whose thread ends without closing any: not the second call's either."""

    @with_fenced_lock(name + ":{number}")
    async def work(number: int) -> str:
        return current_lease().resource

    async def main() -> list[str]:
        async with ThreadSensitiveContext():
            done = [await work(1), await work(2)]
            assert await in_thread(lambda: connection.connection)() is None
        return done

    assert run(main) == [f"{name}:1", f"{name}:2"]


def test_a_callable_that_finds_nothing_hangs_nobody(name: str) -> None:
    """A future cannot hold StopIteration, and whoever awaits it would wait for ever."""

    @with_fenced_lock(lambda: next(iter([])))
    async def unnamed() -> None:
        pytest.fail("The body ran.")

    @with_fenced_lock(name, on_held=lambda held: next(iter([])))
    async def refused() -> None:
        pytest.fail("The body ran.")

    with fenced_lock(name):
        for work in (unnamed, refused):
            with pytest.raises(RuntimeError, match="StopIteration"):
                run(work)


def test_many_coroutines_keep_their_calls_apart(name: str) -> None:
    """On ten resources all of them run at the same time, each with its own lease."""

    async def main() -> list[str]:
        everybody = asyncio.Barrier(10)

        @with_fenced_lock(name + ":{number}")
        async def work(number: int) -> str:
            await everybody.wait()
            return current_lease().resource

        return await asyncio.gather(*[work(number) for number in range(10)])

    assert run(main) == [f"{name}:{number}" for number in range(10)]


def test_on_held_says_what_a_refused_call_does(name: str) -> None:
    """As it does for functions."""

    async def body() -> None:
        pytest.fail("The body ran.")

    async def main() -> Any:
        skipped = await with_fenced_lock(name, on_held="skip")(body)()
        return skipped, await with_fenced_lock(name, on_held=lambda held: held.resource)(body)()

    with fenced_lock(name):
        assert run(main) == (None, name)


def test_what_on_held_returns_is_not_awaited(name: str) -> None:
    """A coroutine function for it is refused at decoration."""

    async def later(held: LockHeld) -> None: ...

    async def work() -> None: ...

    class Later:
        async def __call__(self, held: LockHeld) -> None: ...

    for on_held in (later, functools.partial(later), Later()):
        with pytest.raises(TypeError, match="it is not awaited"):
            with_fenced_lock(name, on_held=on_held)(work)


@pytest.mark.filterwarnings("error")
def test_a_plain_function_that_returns_an_awaitable_is_refused(name: str, client: Any) -> None:
    """It would run after the lock is released: nothing of it runs, and nothing is left."""
    ran = []

    async def work() -> None:
        ran.append(1)

    def make_coroutine() -> Awaitable[None]:
        Job.objects.create(note=name)
        return work()

    with pytest.raises(TypeError, match="make_coroutine is no coroutine function"):
        with_fenced_lock(name)(make_coroutine)()

    assert not ran
    assert not Job.objects.exists()
    assert not client.exists(keys_of(name).lease)


# Views.


@pytest.fixture
def pages(settings: Any) -> Iterator[None]:
    """Let the URLs be those of this file."""
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = []
    yield
    urlpatterns.clear()


@pytest.fixture
def get(pages: None) -> Callable[[str], Awaitable[Any]]:
    """Return what asks for a page, as an asynchronous server does."""
    return AsyncClient().get


def function_view(name: str, body: Body) -> Any:
    @with_fenced_lock(name)
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(await body())

    return view


def view_with_decorated_get(name: str, body: Body) -> Any:
    class Page(View):
        @method_decorator(with_fenced_lock(name))
        async def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse(await body())

    return Page.as_view()


def view_with_decorated_dispatch(name: str, body: Body) -> Any:
    @method_decorator(with_fenced_lock(name), name="dispatch")
    class Page(View):
        async def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse(await body())

    return Page.as_view()


def decorated_as_view(name: str, body: Body) -> Any:
    class Page(View):
        async def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse(await body())

    return with_fenced_lock(name)(Page.as_view())


VIEWS = [function_view, view_with_decorated_dispatch, decorated_as_view]


@pytest.mark.parametrize(
    ("form", "atomic_requests"),
    # Django itself refuses a view whose `get` alone is decorated under ATOMIC_REQUESTS.
    [(view_with_decorated_get, False), *itertools.product(VIEWS, [False, True])],
)
def test_a_second_request_in_parallel_is_told_409(
    form: Callable[[str, Body], Any], atomic_requests: bool, name: str, get: Any, client: Any
) -> None:
    """Through a server, with and without ATOMIC_REQUESTS: the lock is held until the view ends."""

    async def main() -> tuple[Any, Any]:
        stop = Stop()

        async def body() -> str:
            await Job.objects.acreate(note=name)
            await stop()
            return "done"

        urlpatterns.append(path(name, form(name, body)))
        first = await stop.reach(get(f"/{name}"))
        assert client.exists(keys_of(name).lease)
        second = await get(f"/{name}", headers={"Accept": "application/json"})
        stop.let_go()
        return await first, second

    requests = {"ATOMIC_REQUESTS": atomic_requests}
    with mock.patch.dict(connections.settings["default"], requests):
        first, second = run(main)

    assert (first.status_code, first.content) == (200, b"done")
    assert (second.status_code, second.json()["code"]) == (409, "lock-held")
    assert Job.objects.filter(note=name).count() == 1
    assert not client.exists(keys_of(name).lease)


def test_a_synchronous_server_runs_it_too(name: str, pages: None, client: Any) -> None:
    """In its own thread, whose connection stays open."""

    async def body() -> bool:
        await Job.objects.acreate(note=name)
        return await in_thread(lambda: connection.in_atomic_block)()

    urlpatterns.append(path("page", function_view(name, body)))
    before = connection.connection

    server = Client()

    done = server.get("/page")
    with fenced_lock(name):
        refused = server.get("/page", headers={"Accept": "application/json"})

    assert (done.status_code, done.content) == (200, b"True")
    assert (refused.status_code, refused.json()["code"]) == (409, "lock-held")
    assert connection.connection is before
    assert Job.objects.filter(note=name).count() == 1
    assert not client.exists(keys_of(name).lease)


def test_a_view_without_a_server_answers_as_well(name: str) -> None:
    """Called with a request of its own, twice at the same time."""

    async def main() -> list[int]:
        stop = Stop()

        async def body() -> str:
            await stop()
            return "done"

        view = function_view(name, body)
        request = AsyncRequestFactory().get("/")
        first = await stop.reach(view(request))
        second = asyncio.create_task(view(request))
        await asyncio.wait([second])
        stop.let_go()
        return [(await task).status_code for task in (first, second)]

    assert run(main) == [200, 409]


def test_a_view_that_was_overtaken_answers_409(name: str, get: Any, client: Any) -> None:
    """It says that its token is stale."""

    @with_fenced_lock(name)
    async def view(request: HttpRequest, *, lease: Lease) -> HttpResponse:
        def write() -> None:
            taken_over(fenced_lock(name), client).release()
            with lease.atomic():
                Job.objects.create(note=name)

        await in_thread(write)()
        return JsonResponse({})

    urlpatterns.append(path("page", view))
    answer = run(lambda: get("/page", headers={"Accept": "application/json"}))

    assert (answer.status_code, answer.json()["code"]) == (409, "stale-token")
    assert not Job.objects.exists()


def test_the_error_of_a_view_rolls_its_request_back(name: str, get: Any, client: Any) -> None:
    """And reaches Django as it is."""

    async def body() -> str:
        await Job.objects.acreate(note=name)
        raise KeyError(name)

    urlpatterns.append(path("page", function_view(name, body)))
    with pytest.raises(KeyError, match=name):
        run(lambda: get("/page"))

    assert not Job.objects.exists()
    assert not client.exists(keys_of(name).lease)


# Cancellation.


@pytest.mark.parametrize("takes_lease", [False, True])
def test_a_body_that_is_cancelled_is_rolled_back_and_its_lease_given_back(
    name: str, client: Any, takes_lease: bool
) -> None:
    """Before the caller goes on, which sees nothing but the cancellation."""

    async def main() -> None:
        stop = Stop()

        @with_fenced_lock(name)
        async def in_transaction() -> None:
            await Job.objects.acreate(note=name)
            await stop()

        @with_fenced_lock(name)
        async def with_lease(*, lease: Lease) -> None:
            await stop()

        task = await stop.reach((with_lease if takes_lease else in_transaction)())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not client.exists(keys_of(name).lease)

    run(main)

    assert not Job.objects.exists()


def test_a_hundred_tasks_cancelled_at_any_moment_leave_no_lease(name: str, client: Any) -> None:
    """Each is cancelled or done, nothing else, and what those that are done wrote is there."""

    @with_fenced_lock(name + ":{number}")
    async def work(number: int) -> str:
        await Job.objects.acreate(note=f"{name}:{number}")
        await asyncio.sleep(0.005)
        return "done"

    async def attempt(number: int) -> str:
        task = asyncio.create_task(work(number))
        # To connect to the database takes longer than all else.
        await asyncio.sleep(random.choice([random.uniform(0, 0.005), random.uniform(0, 0.05)]))
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return "cancelled"

    async def main() -> list[str]:
        ends: list[str] = []
        for wave in range(0, 100, 10):  # PostgreSQL does not serve a hundred at a time
            numbers = range(wave, wave + 10)
            ends += await asyncio.gather(*[attempt(number) for number in numbers])
        return ends

    ends = run(main)

    assert len(ends) == 100
    assert set(ends) <= {"cancelled", "done"}
    assert "cancelled" in ends
    assert not client.exists(*[keys_of(f"{name}:{number}").lease for number in range(100)])
    done = {f"{name}:{number}" for number, end in enumerate(ends) if end == "done"}
    assert done <= set(Job.objects.values_list("note", flat=True))


def test_tasks_that_are_cancelled_while_they_wait_leave_the_holder_alone(
    name: str, client: Any
) -> None:
    """They end soon, each with nothing but the cancellation."""

    @with_fenced_lock(name, wait=5)
    async def work() -> None:
        pytest.fail("The body ran.")

    async def main() -> tuple[list[Any], float]:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(work()) for _ in range(10)]
        await asyncio.sleep(random.uniform(0.05, 0.1))  # at any moment of waiting
        began = loop.time()
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        return ends, loop.time() - began

    lease = acquired(name)
    ends, seconds = run(main)

    assert [type(end) for end in ends] == [asyncio.CancelledError] * 10
    assert seconds < 1
    assert_held_by(lease, client)
    assert lease.release()


def test_a_task_that_is_cancelled_as_it_gets_the_lock_gives_it_back(name: str, client: Any) -> None:
    """The store has granted, and the body has not begun."""
    ran = []

    @with_fenced_lock(name)
    async def work() -> None:
        ran.append(1)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        granted, go_on = asyncio.Event(), threading.Event()

        def receive(**values: Any) -> None:
            loop.call_soon_threadsafe(granted.set)
            assert go_on.wait(SECONDS)

        lease_acquired.connect(receive)
        try:
            task = asyncio.create_task(work())
            await granted.wait()
            assert client.exists(keys_of(name).lease)
            task.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            lease_acquired.disconnect(receive)

    run(main)

    assert not ran
    wait_until(lambda: not client.exists(keys_of(name).lease))


def test_a_task_that_is_cancelled_while_it_releases_has_released(name: str, client: Any) -> None:
    """What it has committed stands, and the caller sees the cancellation."""
    release = RedisStore.release

    @with_fenced_lock(name)
    async def work() -> None:
        await Job.objects.acreate(note=name)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()

        def cancel() -> None:
            task.cancel()
            loop.call_soon(cancelled.set)  # when the task has had its turn

        def release_late(*args: Any, **options: Any) -> bool:
            loop.call_soon_threadsafe(cancel)
            assert cancelled.wait(SECONDS)
            return release(*args, **options)

        with mock.patch.object(RedisStore, "release", release_late):
            task = asyncio.create_task(work())
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main)

    wait_until(lambda: not client.exists(keys_of(name).lease))
    assert Job.objects.filter(note=name).count() == 1


def test_a_task_that_is_cancelled_while_it_asks_does_not_block_the_loop(
    name: str, client: Any
) -> None:
    """Neither once nor twice; before asgiref 3.12.1 the thread is not awaited by it."""
    ticks = 0

    @with_fenced_lock(name)
    async def work() -> None:
        pytest.fail("the lock was not to be had any more")

    async def main() -> None:
        nonlocal ticks
        loop = asyncio.get_running_loop()
        asked, go_on = asyncio.Event(), threading.Event()
        acquire = RedisStore.acquire

        def slow(*args: Any, **kwargs: Any) -> Any:
            loop.call_soon_threadsafe(asked.set)
            assert go_on.wait(SECONDS)
            return acquire(*args, **kwargs)

        with mock.patch.object(RedisStore, "acquire", slow):
            task = asyncio.create_task(work())
            await asked.wait()
            for _ in range(2):
                task.cancel()
                for _ in range(10):
                    await asyncio.sleep(0)
                    ticks += 1
            assert not task.done()  # it waits for its thread, and the loop goes on
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main)

    assert ticks == 20
    assert not client.exists(keys_of(name).lease)


def test_a_task_that_is_cancelled_before_its_turn_asks_for_nothing(name: str) -> None:
    """The thread of its request is busy with another one."""

    @with_fenced_lock(name + ":{number}")
    async def work(number: int, busy: asyncio.Event, free: asyncio.Event) -> int:
        busy.set()
        await free.wait()
        return number

    async def main() -> list[str]:
        async with ThreadSensitiveContext():
            busy, free = asyncio.Event(), asyncio.Event()
            first = asyncio.create_task(work(1, busy, free))
            await busy.wait()
            second = asyncio.create_task(work(2, busy, free))
            await asyncio.sleep(0)
            with counted_calls() as calls:
                second.cancel()
                await asyncio.sleep(0)
                free.set()
                with pytest.raises(asyncio.CancelledError):
                    await second
                assert await first == 1
        return calls

    assert run(main) == ["EVALSHA"]
