"""once=: a decorated function as work that is done once."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.core.management.base import BaseCommand

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import InvalidResource, OnceMismatch
from django_fencing.leases import Lease
from django_fencing.locks import fenced_atomic
from django_fencing.once import once_result
from tests.helpers import (
    SECONDS,
    committing,
    counted_calls,
    statements,
)
from tests.shop.models import Entry
from tests.work import BAD_KEYS, fail, never, write, written

pytestmark = committing("default")


# Decorated functions


@pytest.mark.parametrize(
    "template",
    [lambda key: key + ":{job}:{day}", lambda key: lambda day, job=7: f"{key}:{job}:{day}"],
    ids=["text", "callable"],
)
def test_the_key_of_a_call_comes_from_its_arguments(name: str, key: str, template: Any) -> None:
    """By a text with parameters, or by a callable. The result is as JSON makes it."""

    @with_fenced_lock(name + ":{job}", once=template(key))
    def work(day: date, job: int = 7) -> Any:
        write(f"{job} on {day}")
        return (job, day)

    day = date(2026, 11, 30)
    results = [work(day), work(day, 7), work(job="7", day=day), work(day, 8), work(day, 8)]

    assert results == [[7, "2026-11-30"]] * 3 + [[8, "2026-11-30"]] * 2
    assert written() == ["7 on 2026-11-30", "8 on 2026-11-30"]
    assert once_result(f"{key}:8:2026-11-30") == [8, "2026-11-30"]


def test_values_in_a_key_cannot_be_confused(name: str, key: str) -> None:
    """They are encoded as in a name."""

    @with_fenced_lock(name, once=key + ":{a}:{b}")
    def work(a: str, b: str) -> Any:
        return [a, b]

    assert work("x:y", "z") == ["x:y", "z"]
    assert work("x", "y:z") == ["x", "y:z"]


def test_work_needs_one_transaction() -> None:
    """A function that opens its own, or none, is refused at its decoration."""

    def with_lease(*, lease: Lease) -> None: ...

    for function, options in ((with_lease, {}), (never, {"atomic": False})):
        with pytest.raises(TypeError, match="once="):
            with_fenced_lock("name", once="key", **options)(function)
    assert with_fenced_lock("name", once="key", atomic=True)(with_lease)


def test_a_function_that_is_one_transaction_may_take_the_lease(name: str, key: str) -> None:
    """With atomic=True."""

    @with_fenced_lock(name, once=key, atomic=True)
    def work(*, lease: Lease) -> int:
        return lease.token

    assert [work(), work()] == [1, 1]


@pytest.mark.parametrize("template", ["{unknown}", "{n!r}", "{n", ""])
def test_a_template_that_means_nothing_is_refused_at_the_decoration(template: str) -> None:
    """With the words for a key."""
    with pytest.raises(InvalidResource, match="key"):
        with_fenced_lock("name", once=template)(lambda n: None)


def test_what_is_no_key_or_payload_is_refused_at_the_decoration() -> None:
    """Neither a number nor a class is a key, and a payload goes with a key."""
    for options in (
        {"once": 7},
        {"once": str},
        {"payload": never},
        {"once": "key", "payload": {"a": 1}},
    ):
        with pytest.raises(TypeError, match="once"):
            with_fenced_lock("name", **options)(never)


@pytest.mark.parametrize("bad", BAD_KEYS, ids=ascii)
def test_a_bad_key_of_a_call_costs_nothing(name: str, bad: Any) -> None:
    """Nothing is sent to Redis or to the database."""
    work = with_fenced_lock(name, once=lambda: bad)(never)

    with counted_calls() as calls, statements() as sql, pytest.raises(InvalidResource):
        work()
    assert (calls, sql) == ([], [])


def test_the_payload_of_a_call_comes_from_its_arguments(name: str, key: str) -> None:
    """Without one, a key alone says which work it is."""

    @with_fenced_lock(name, once=key, payload=lambda amount, note: {"amount": amount})
    def work(amount: Decimal, note: str) -> Any:
        return write(note)["text"]

    assert work(Decimal(10), "first") == work(amount=Decimal(10), note="second") == "first"
    with pytest.raises(OnceMismatch) as caught:
        work(Decimal(99), "third")
    assert (caught.value.key, caught.value.token) == (key, 1)

    without = with_fenced_lock(name, once=f"{key}:2")(lambda amount: amount)
    assert [without(10), without(99)] == [10, 10]


def test_a_decorated_function_that_fails_has_not_been_done(name: str, key: str) -> None:
    """Nor has one whose result JSON lacks."""
    bodies = iter([fail, lambda: {write()["text"]}, lambda: write("third")])
    work = with_fenced_lock(name, once=key)(lambda: next(bodies)())

    for error in (KeyError, TypeError):
        with pytest.raises(error):
            work()
    assert work()["entries"] == 1


def test_a_function_that_is_entered_again_is_done_in_the_open_transaction(
    name: str, key: str
) -> None:
    """It is rolled back with it."""
    work = with_fenced_lock(name, once=key)(write)

    with suppress(KeyError), fenced_atomic(name):
        assert work("first")["entries"] == work("second")["entries"] == 1
        raise KeyError
    assert work("third") == {"text": "third", "entries": 1}


def test_coroutine_functions_are_done_once(name: str, key: str) -> None:
    """With the same words, and also those that fail."""

    @with_fenced_lock(name, once=key + ":{number}", payload=lambda number, text: text, wait=SECONDS)
    async def work(number: int, text: str) -> Any:
        await Entry.objects.acreate(text=text)
        if text == "failing":
            raise KeyError
        return (number, text)

    async def main() -> Any:
        with suppress(KeyError):
            await work(1, "failing")
        first = [await work(1, "first"), await work(1, "first")]
        with pytest.raises(OnceMismatch):
            await work(1, "second")
        return [*first, *await asyncio.gather(*(work(2, "third") for _ in range(3)))]

    assert asyncio.run(main()) == [[1, "first"]] * 2 + [[2, "third"]] * 3
    assert written() == ["first", "third"]


def run(body: Callable[[], Any], *words: str, **options: Any) -> tuple[int, str, str]:
    """Run a command as from the command line; return its exit code, and what it says."""
    out, err = StringIO(), StringIO()

    class Command(BaseCommand):
        requires_system_checks = ()

        def add_arguments(self, parser: Any) -> None:
            parser.add_argument("period")

        @with_fenced_lock(**options)
        def handle(self, *args: Any, **given: Any) -> Any:
            return body()

    code: Any = 0
    try:
        Command(stdout=out, stderr=err, no_color=True).run_from_argv(["manage.py", "run", *words])
    except SystemExit as stop:
        code = stop.code
    return code, out.getvalue(), err.getvalue()


def test_a_command_that_was_done_says_so_and_ends_with_zero(name: str, key: str) -> None:
    """It does nothing. One that has failed is done by the next run."""
    options: dict[str, Any] = {"resource": name, "once": key + ":{period}"}

    with pytest.raises(KeyError):
        run(fail, "2026-11", **options)
    first = run(lambda: write("first")["text"], "2026-11", **options)
    second = run(never, "2026-11", **options)
    other = run(lambda: write("other")["text"], "2026-12", **options)

    assert first == (0, "first\n", "")
    assert second[0] == 0
    assert second[2] == f"Skipped: '{key}:2026-11' was done before.\n"
    assert other == (0, "other\n", "")
    assert written() == ["first", "other"]


def test_a_command_with_other_values_ends_with_65(name: str, key: str) -> None:
    """In one line."""
    options: dict[str, Any] = {
        "resource": name,
        "once": key,
        "payload": lambda *args, **given: given["period"],
    }
    run(write_nothing, "2026-11", **options)

    code, out, err = run(never, "2026-12", **options)

    assert (code, out, err.count("\n")) == (65, "", 1)
    assert err.startswith(f"CommandError: '{key}' was done under token 1 of '{name}'")


def write_nothing() -> None:
    """Have no effect, and no output."""
