"""with_fenced_lock on plain functions."""

import asyncio
import functools
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import date
from enum import Enum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.utils.functional import SimpleLazyObject

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import InsideTransaction, InvalidResource, LockHeld
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import fenced_lock
from django_fencing.models import Fence
from tests.helpers import SECONDS, counted_calls, held_elsewhere, in_threads, keys_of
from tests.shop.models import Job

pytestmark = pytest.mark.django_db(transaction=True)


class Size(StrEnum):
    BIG = "big"


class Kind(int, Enum):
    ONE = 1


def test_the_body_is_one_fenced_transaction(name: str) -> None:
    """Without `lease` in the signature it commits or rolls back whole."""

    @with_fenced_lock(name)
    def work(fail: bool) -> str:
        assert connection.in_atomic_block
        Job.objects.create(note=name)
        if fail:
            raise KeyError(name)
        return "done"

    with pytest.raises(KeyError):
        work(True)
    assert not Job.objects.filter(note=name).exists()

    assert work(False) == "done"
    assert Job.objects.filter(note=name).exists()


def test_a_body_that_takes_the_lease_opens_its_own_transaction(name: str) -> None:
    """The lease is registered before the body begins."""

    @with_fenced_lock(name)
    def work(amount: int, *, lease: Lease) -> int:
        assert not connection.in_atomic_block
        assert lease is current_lease()
        assert Fence.objects.get(name=lease.row.pk).last_fence_token == lease.token
        with lease.atomic():
            return amount

    assert work(7) == 7


def test_atomic_overrides_the_choice(name: str) -> None:
    """Both ways."""

    @with_fenced_lock(name, atomic=True)
    def with_lease(*, lease: Lease) -> bool:
        return connection.in_atomic_block

    @with_fenced_lock(name, atomic=False)
    def without_lease() -> bool:
        assert current_lease().row
        return connection.in_atomic_block

    assert with_lease() is True
    assert without_lease() is False


def test_positional_and_keyword_calls_lock_one_name(name: str) -> None:
    """The name comes from the bound signature, defaults included."""

    @with_fenced_lock(name + ":{tenant}:{month}")
    def work(tenant: str, month: str = "may", *rest: Any, lease: Any = None, **more: Any) -> str:
        return current_lease().resource

    assert work("a") == work(tenant="a") == work("a", month="may") == f"{name}:a:may"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        ("0", "0"),
        (7, "7"),
        ("a:b", "a%3Ab"),
        ("a/b c%", "a%2Fb%20c%25"),
        ("{x}", "%7Bx%7D"),
        (date(2026, 11, 30), "2026-11-30"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Size.BIG, "big"),
        (Kind.ONE, "1"),
        pytest.param(SimpleLazyObject(lambda: "lazy"), "lazy", id="lazy"),
    ],
    ids=repr,
)
def test_values_are_encoded_so_that_joined_parts_never_collide(
    name: str, value: Any, text: str
) -> None:
    """A colon in a value is no separator."""

    @with_fenced_lock(name + ":{value}")
    def work(value: Any) -> str:
        return current_lease().resource

    assert work(value) == f"{name}:{text}"


def test_a_saved_row_gives_its_primary_key(name: str, job: Job) -> None:
    """As it does in a method of the model."""

    @with_fenced_lock(name + ":{job}")
    def work(job: Job) -> str:
        return current_lease().resource

    assert work(job) == f"{name}:{job.pk}"


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        1.5,
        ...,
        True,
        Job(),
        Job(pk=7),
        b"x",
        ["x"],
        "a\0",
        pytest.param(10**5000, id="too many digits"),
    ],
    ids=repr,
)
def test_values_that_name_nothing_are_refused_before_anything_is_sent(
    name: str, value: Any
) -> None:
    """An unsaved row does not lock "None"."""

    @with_fenced_lock(name + ":{value}")
    def work(value: Any) -> None:
        pytest.fail("The body ran.")

    with counted_calls() as calls, pytest.raises(InvalidResource):
        work(value)

    assert calls == []


@pytest.mark.parametrize(
    "template", ["{missing}", "{}", "{0}", "{a.b}", "{a!r}", "{a:>8}", "{rest}", "{more}", "{", "}"]
)
def test_fields_are_checked_when_the_function_is_decorated(template: str) -> None:
    """The error comes at import, and names the field."""

    def work(a: Any, *rest: Any, lease: Any = None) -> None: ...

    def work_with_more(a: Any, *rest: Any, lease: Any = None, **more: Any) -> None: ...

    with pytest.raises(InvalidResource, match="The name "):
        with_fenced_lock("job:" + template)(work)
    with pytest.raises(InvalidResource, match="{lease}, which is no parameter"):
        with_fenced_lock("job:{lease}")(work)
    if template != "{missing}":
        with pytest.raises(InvalidResource, match="The name "):
            with_fenced_lock("job:" + template)(work_with_more)


def test_a_field_may_be_one_of_the_keywords_that_the_function_collects(name: str) -> None:
    """As in dispatch(self, request, *args, **kwargs): the URL's values are not in the signature."""

    @with_fenced_lock(name + ":{pk}")
    def work(*args: Any, **kwargs: Any) -> str:
        return current_lease().resource

    assert work(pk=7) == f"{name}:7"
    with counted_calls() as calls, pytest.raises(InvalidResource, match="{pk}, which this call"):
        work(7)
    assert calls == []


def test_a_parameter_that_is_merely_called_lease_is_like_any_other(name: str) -> None:
    """Only a keyword-only one asks for the lease."""

    @with_fenced_lock(name + ":{lease}")
    def sign(lease: str) -> str:
        return current_lease().resource

    assert sign("flat-7") == f"{name}:flat-7"


def test_wrong_arguments_are_the_functions_own_type_error(name: str) -> None:
    """As if it were not decorated."""

    @with_fenced_lock(name + ":{a}")
    def work(a: int) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        work()


def test_a_callable_gives_a_name_a_row_or_an_address(name: str, job: Job) -> None:
    """It is called with the arguments of the call."""
    for given, resource in ((name, name), (job, job.fence_name), ((Job, job.pk), job.fence_name)):

        @with_fenced_lock(lambda one, *, two: two)
        def work(one: int, *, two: Any) -> str:
            return current_lease().resource

        assert work(1, two=given) == resource


def test_a_row_or_an_address_may_stand_for_itself(job: Job) -> None:
    """What it locks is then the same at each call."""
    assert with_fenced_lock((Job, job.pk))(lambda: current_lease().resource)() == job.fence_name
    assert with_fenced_lock(job)(lambda: current_lease().resource)() == job.fence_name


def test_on_held_says_what_a_refused_call_does(name: str) -> None:
    """The body never runs."""

    def body() -> None:
        pytest.fail("The body ran.")

    with held_elsewhere(name):
        with pytest.raises(LockHeld):
            with_fenced_lock(name)(body)()
        assert with_fenced_lock(name, on_held="skip")(body)() is None
        assert with_fenced_lock(name, on_held=lambda held: held.resource)(body)() == name


def test_a_lock_that_the_body_finds_held_is_the_bodys_own_error(name: str) -> None:
    """on_held speaks for the function's own lock alone."""

    @with_fenced_lock(name + ":outer", on_held="skip", atomic=False)
    def work() -> None:
        fenced_lock(name).acquire()

    with fenced_lock(name), pytest.raises(LockHeld, match=name):
        work()


def test_two_locks_are_taken_from_the_outside_in(name: str, client: Any) -> None:
    """The inner one held: the outer one is released. The outer may not be a transaction."""

    @with_fenced_lock(name + ":outer", atomic=False)
    @with_fenced_lock(name + ":inner")
    def work() -> str:
        return current_lease().resource

    assert work() == f"{name}:inner"
    with fenced_lock(f"{name}:inner"):
        (refused,) = in_threads(work)
    assert isinstance(refused, LockHeld)
    assert not client.exists(keys_of(f"{name}:outer").lease)

    @with_fenced_lock(name + ":outer:{number}", atomic=False)
    @with_fenced_lock(name + ":inner:{number}")
    def number_of(number: int, *, lease: Lease) -> str:
        return lease.resource

    assert number_of(7) == number_of(number=7) == f"{name}:inner:7"

    with pytest.raises(InsideTransaction):
        with_fenced_lock(name)(work)()
    assert not client.exists(keys_of(name).lease, keys_of(f"{name}:outer").lease)


def test_the_function_keeps_its_face(name: str) -> None:
    """Name, docstring, signature, and who the lease says is holding."""

    def work(a: int) -> str:
        """Say who holds."""
        return current_lease().holder.function

    fenced = with_fenced_lock(name)(work)

    assert (fenced.__name__, fenced.__doc__) == ("work", "Say who holds.")
    assert inspect.signature(fenced) == inspect.signature(work)
    assert fenced(1).endswith("test_the_function_keeps_its_face.<locals>.work")
    assert with_fenced_lock(name)(functools.partial(work, 1))().endswith(".work")


def test_methods_and_partials_are_functions_too(name: str) -> None:
    """The signature that is bound is the one that is called."""

    class Service:
        @with_fenced_lock(name + ":{number}")
        def method(self, number: int) -> str:
            return current_lease().resource

        @staticmethod
        @with_fenced_lock(name + ":{number}")
        def static(number: int) -> str:
            return current_lease().resource

    def power(base: int, number: int) -> str:
        return current_lease().resource

    partial = with_fenced_lock(name + ":{number}")(functools.partial(power, 3))

    assert Service().method(1) == Service.static(1) == partial(1) == f"{name}:1"


def test_what_cannot_run_under_a_lock_is_refused_at_decoration() -> None:
    """A generator would run after the lock is gone."""

    async def stream() -> AsyncIterator[int]:
        yield 1

    def generator() -> Iterator[int]:
        yield 1

    for function in [stream, generator, Size, staticmethod(len), classmethod(len), "text"]:
        with pytest.raises(TypeError):
            with_fenced_lock("name")(function)  # type: ignore[arg-type]


@pytest.mark.parametrize("resource", [Job, 7, None, b"name"], ids=repr)
def test_what_is_no_resource_is_refused_at_decoration(resource: Any) -> None:
    """A class is callable, but it is no way to find a row."""
    with pytest.raises(TypeError, match="A resource is "):
        with_fenced_lock(resource)(lambda: None)


def test_what_would_run_after_the_lock_is_refused_though_a_wrapper_hides_it(
    name: str, client: Any
) -> None:
    """A generator has not begun when it is returned, nor has a context manager made of one."""

    def rows() -> Iterator[int]:
        pytest.fail("The body ran.")
        yield 1

    async def later() -> AsyncIterator[int]:
        pytest.fail("The body ran.")
        yield 1

    def wrapped(function: Callable[[], Any]) -> Callable[[], Any]:
        return functools.wraps(function)(lambda: function())

    wrappers = [wrapped(rows), wrapped(later), contextmanager(rows), asynccontextmanager(later)]
    for function in wrappers:
        with pytest.raises(TypeError, match="would run after the lock is released"):
            with_fenced_lock(name)(function)()
        assert not client.exists(keys_of(name).lease)

    assert with_fenced_lock(name)(wrapped(lambda: [*map(str, range(2))]))() == ["0", "1"]


def test_a_decorator_without_its_resource_says_so() -> None:
    """The function has taken the place of the resource, whatever it is called with."""
    without = with_fenced_lock(test_on_held_is_checked_at_decoration)

    for args, options in [((), {}), ((), {"verbosity": 1}), ((1, 2), {}), ((len,), {"pk": 1})]:
        with pytest.raises(TypeError, match="without its resource.*above .*checked_at_decoration"):
            without(*args, **options)


@pytest.mark.parametrize("length", ["30", True, 0, -1, float("nan"), 0.0001], ids=repr)
def test_a_length_that_means_nothing_is_refused_at_decoration(length: Any) -> None:
    """No request has to find it."""
    with pytest.raises((TypeError, ValueError), match="ttl must be "):
        with_fenced_lock("name", ttl=length)
    if length != 0:
        with pytest.raises((TypeError, ValueError), match="wait must be "):
            with_fenced_lock("name", wait=length)


def test_an_empty_name_is_refused_at_decoration() -> None:
    """It would lock what everybody else locks who has forgotten it."""
    with pytest.raises(InvalidResource, match="must not be empty"):
        with_fenced_lock("")(lambda: None)


def test_on_held_is_checked_at_decoration() -> None:
    """A misspelt word is not taken for "raise"."""
    with pytest.raises(TypeError, match="on_held must be"):
        with_fenced_lock("name", on_held="ignore")  # type: ignore[arg-type]

    async def later(held: LockHeld) -> None: ...

    with pytest.raises(TypeError, match="it is not awaited"):
        with_fenced_lock("name", on_held=later)


def test_one_decorated_function_keeps_its_calls_apart(name: str) -> None:
    """Twenty threads: on one resource one body runs, on twenty all do, each with its lease."""
    everybody = threading.Barrier(20)

    @with_fenced_lock(name + ":{number}", atomic=False)
    def work(number: int, answered: threading.Barrier) -> str:
        answered.wait(SECONDS)
        return current_lease().resource

    def attempt() -> str:
        try:
            return work(0, everybody)
        finally:
            if sys.exc_info()[0] is LockHeld:
                everybody.wait(SECONDS)

    apart = in_threads(*[functools.partial(work, number, everybody) for number in range(20)])
    together = in_threads(*[attempt] * 20)

    assert apart == [f"{name}:{number}" for number in range(20)]
    assert [result for result in together if isinstance(result, str)] == [f"{name}:0"]
    assert sum(isinstance(result, LockHeld) for result in together) == 19


def test_a_task_is_its_own_flow(name: str) -> None:
    """A lease that is held in an asyncio task is that task's current lease, and no other's."""

    async def main() -> tuple[bool, bool]:
        lease = fenced_lock(name, register=False).acquire()
        try:
            mine = current_lease() is lease
            others = await asyncio.create_task(look())
        finally:
            lease.release()
        return mine, others

    async def look() -> bool:
        with pytest.raises(LookupError):
            current_lease()
        return True

    assert asyncio.run(main()) == (True, True)
