"""once: work is done once, and every later call gets its result."""

import asyncio
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.core.cache import cache
from django.core.management.base import BaseCommand
from django.db import (
    IntegrityError,
    InterfaceError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.db.models import F
from django.db.transaction import TransactionManagementError
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_fencing.conf import conf
from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import InvalidResource, LeaseLost, LockHeld, OnceMismatch, StaleToken
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import OnceRecord
from django_fencing.names import slug
from django_fencing.once import once, once_result
from django_fencing.signals import once_replayed
from tests.helpers import (
    SECONDS,
    closing,
    committing,
    counted_calls,
    expire,
    in_threads,
    keys_of,
    started,
    statements,
    taken_over,
    wait_until,
    waits_for_row,
)
from tests.proxy import Fault, proxied
from tests.shop.models import Counter, Entry, Job, JobProxy

ROOT = Path(__file__).parents[1]

pytestmark = committing("default")

everywhere = committing("default", "repeatable", "other", "sqlite")

Pause = Callable[[], None]

NOTHING = object()


@pytest.fixture
def key() -> str:
    """Return the key of work that nobody else does."""
    return f"key:{uuid.uuid4().hex}"


def write(text: str = "done", alias: str = "default") -> Any:
    """Have an effect, and return a result that says which one it was."""
    Entry.objects.using(alias).create(text=text)
    return {"text": text, "entries": Entry.objects.using(alias).count()}


def written(alias: str = "default") -> list[str]:
    """Return the effects, in order."""
    return list(Entry.objects.using(alias).order_by("pk").values_list("text", flat=True))


def never(*args: Any) -> Any:
    pytest.fail("The work was done.")


def fail(text: str = "failed") -> Any:
    write(text)
    raise KeyError(text)


def do(resource: str, key: str, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do work once, in a fenced transaction of its own."""
    using = options.pop("using", None)
    with fenced_atomic(resource, using=using, wait=SECONDS):
        return once(key, func, *args, **options)


def record_of(key: str, alias: str = "default") -> OnceRecord:
    return OnceRecord.objects.using(alias).get(pk=slug(key, conf.namespace))


# What is kept, and what comes back


def test_work_is_done_once_and_later_calls_get_its_result(name: str, key: str) -> None:
    """Whatever a later call would do, and whichever resource it has locked."""
    assert do(name, key, write, "first") == {"text": "first", "entries": 1}
    assert do(name, key, never) == {"text": "first", "entries": 1}
    assert do(f"{name}:other", key, never) == {"text": "first", "entries": 1}
    with fenced_atomic(name):
        assert once(key, never) == once(key, never) == {"text": "first", "entries": 1}
    assert written() == ["first"]


def test_another_key_is_other_work(name: str, key: str) -> None:
    """Also in one transaction."""
    with fenced_atomic(name):
        results = [once(f"{key}:{number}", write, str(number)) for number in (1, 2, 1)]

    assert [result["text"] for result in results] == ["1", "2", "1"]
    assert written() == ["1", "2"]


RESULTS = [
    ((1, [2]), [1, [2]]),
    ({1: date(2026, 11, 30)}, {"1": "2026-11-30"}),
    (Decimal("10.50"), "10.50"),
    (uuid.UUID(int=7), str(uuid.UUID(int=7))),
    (timedelta(seconds=1), "P0DT00H00M01S"),
    ("text\0 \ud800 ü ☃", "text\0 \ud800 ü ☃"),
    ("", ""),
    (False, False),
    (0.1, 0.1),
    (2**100, 2**100),
    ({"b": 1, "a": 2}, {"b": 1, "a": 2}),
]


@pytest.mark.parametrize(("result", "expected"), RESULTS)
def test_the_result_is_as_json_makes_it_at_the_first_call_too(
    name: str, key: str, result: Any, expected: Any
) -> None:
    """So that a caller cannot depend on what a later one does not get."""
    found = [do(name, key, lambda: result), do(name, key, never), once_result(key)]

    assert found == [expected] * 3
    assert [type(each) for each in found] == [type(expected)] * 3
    assert json.dumps(found[0]) == json.dumps(found[1])  # the order of members too


def test_what_is_changed_in_a_result_is_changed_nowhere_else(name: str, key: str) -> None:
    """The first call has a copy, as all others have."""
    own = [1]
    with fenced_atomic(name):
        once(key, lambda: own).append(2)
        once(key, never).append(3)

    assert own == do(name, key, never) == [1]


def test_the_record_says_what_was_done_under_which_token(name: str, key: str) -> None:
    """And nothing of the payload but a digest."""
    do(name, "another " + key, write)
    began = timezone.now()
    with fenced_atomic(name):
        once(key, write, "first", payload={"amount": 10})
        token = current_lease().token

    record = record_of(key)
    assert (record.resource, record.token, token) == (name, token, 2)
    assert json.loads(record.result) == {"text": "first", "entries": 2}
    assert (len(record.fingerprint), str(record)) == (64, record.key)
    assert began <= record.created_at <= timezone.now()
    do(name, key, never, payload={"amount": 10})
    assert vars(record_of(key)) | {"_state": None} == vars(record) | {"_state": None}


def test_a_result_of_none_is_kept(name: str, key: str) -> None:
    """It is a result like any other, and once_result() tells it from nothing."""
    assert once_result(key, NOTHING) is NOTHING
    assert do(name, key, lambda: None) is None
    assert do(name, key, never) is None
    assert once_result(key, NOTHING) is None


def test_once_result_asks_in_the_open_transaction(name: str, key: str) -> None:
    """It sees what is done there and not committed; others do not; the work sees no result."""
    seen = []
    with fenced_atomic(name):
        once(key, lambda: seen.append(once_result(key, NOTHING)))
        assert once_result(key, NOTHING) is None
        assert in_threads(partial(once_result, key, "nothing")) == ["nothing"]

    assert seen == [NOTHING]
    assert in_threads(partial(once_result, key, "nothing")) == [None]
    assert once_result(key + "?") is None


def test_arguments_are_passed(name: str, key: str) -> None:
    """And `payload` is none of them."""
    assert do(name, key, lambda *args: args, 1, "two", None, payload=3) == [1, "two", None]


@pytest.mark.parametrize(
    "way", ["nothing", "atomic", "fenced_lock", "on_commit", "after", "thread"]
)
def test_it_works_in_a_fenced_transaction_only(name: str, key: str, way: str) -> None:
    """Anywhere else nothing proves that the lease still holds when the record is committed."""
    raised: list[BaseException] = []

    def attempt() -> None:
        try:
            once(key, never)
        except TransactionManagementError as error:
            raised.append(error)

    if way == "nothing":
        attempt()
    elif way == "atomic":
        with transaction.atomic():
            attempt()
    elif way == "fenced_lock":
        with fenced_lock(name), transaction.atomic():
            attempt()
    else:
        with fenced_atomic(name):
            if way == "on_commit":
                transaction.on_commit(attempt)
            elif way == "thread":
                in_threads(attempt)
        if way == "after":
            attempt()

    assert [key in str(error) for error in raised] == [True]
    assert not OnceRecord.objects.exists()


def test_it_works_in_a_savepoint_of_a_fenced_transaction(name: str, key: str) -> None:
    """Which takes the record back together with the work."""
    with fenced_lock(name) as lease, lease.atomic():
        with suppress(KeyError), transaction.atomic():
            once(key, write, "taken back")
            raise KeyError
        with transaction.atomic(), lease.atomic():
            assert once(key, write, "kept")["text"] == "kept"

    assert written() == ["kept"]


# Payloads


EQUAL = [
    ({"a": 1, "b": {"c": [1, 2], "d": None}}, {"b": {"d": None, "c": [1, 2]}, "a": 1}),
    ((1, 2), [1, 2]),
    (None, None),
    (date(2026, 11, 30), date(2026, 11, 30)),
    (datetime(2026, 11, 30, tzinfo=UTC), datetime(2026, 11, 30, tzinfo=UTC)),
    (time(7, 30), time(7, 30)),
    (Decimal("10.50"), Decimal("10.50")),
    (uuid.UUID(int=7), uuid.UUID(int=7)),
    ("ü\0", "ü\0"),
]


@pytest.mark.parametrize(("payload", "same"), EQUAL)
def test_the_same_payload_is_the_same_work(name: str, key: str, payload: Any, same: Any) -> None:
    """The order of members does not matter, nor what else reads the same in JSON."""
    do(name, key, write, payload=payload)

    do(name, key, never, payload=same)


OTHER = [
    ({"amount": 10}, {"amount": 99}),
    ({"amount": 10}, {"amount": "10"}),
    ({"amount": 10}, {}),
    ({"a": {"b": 1}}, {"a": {"b": 1, "c": None}}),
    ([1, 2], [2, 1]),
    (None, False),
    (None, {}),
    (0, False),
    (1, 1.0),
    ("", None),
    (date(2026, 11, 30), date(2026, 12, 1)),
    (Decimal("10.50"), Decimal("10.5")),
    (uuid.UUID(int=7), uuid.UUID(int=8)),
    (["ab"], ["a", "b"]),
]


@pytest.mark.parametrize(("payload", "other"), OTHER)
def test_another_payload_is_refused(name: str, key: str, payload: Any, other: Any) -> None:
    """Nothing runs, the stored outcome stands, and the transaction is usable."""
    first = do(name, key, write, "first", payload=payload)

    with fenced_atomic(f"{name}:other"):
        with pytest.raises(OnceMismatch) as caught:
            once(key, never, payload=other)
        write("after")

    error = caught.value
    assert (error.key, error.token, error.resource) == (key, 1, f"{name}:other")
    assert key in str(error)
    assert written() == ["first", "after"]
    assert do(name, key, never, payload=payload) == once_result(key) == first


def test_another_moment_is_another_payload(name: str, key: str) -> None:
    """However little later it is."""
    moment = datetime(2026, 11, 30, 12, 0, 0, 1, tzinfo=UTC)
    do(name, key, write, payload=moment)

    with pytest.raises(OnceMismatch):
        do(name, key, never, payload=moment + timedelta(microseconds=1))


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
UNWRITABLE = [
    math.nan,
    math.inf,
    object(),
    {1, 2},
    b"bytes",
    {(1, 2): 3},
    CIRCLE,
    [{"a": [NOTHING]}],
]


@pytest.mark.parametrize("value", [*UNWRITABLE, {1: 1, "a": 2}], ids=lambda value: str(value)[:20])
def test_a_payload_that_json_lacks_is_refused_before_anything_is_sent(
    name: str, key: str, value: Any
) -> None:
    """And the key stays free."""
    with fenced_atomic(name):
        with statements() as sql, pytest.raises(TypeError, match="The payload"):
            once(key, never, payload=value)
        assert sql == []
        assert once(key, write, payload=1)

    assert written() == ["done"]


@pytest.mark.parametrize("value", UNWRITABLE, ids=lambda value: str(value)[:20])
def test_a_result_that_json_lacks_takes_the_work_back(name: str, key: str, value: Any) -> None:
    """Also where the caller catches the error; and the key is free."""

    def unwritable() -> Any:
        write("unwritable")
        return value

    with fenced_atomic(name):
        with pytest.raises(TypeError, match=f"The result of {key!r} cannot"):
            once(key, unwritable)
        assert once(key, write, "second")["entries"] == 1

    assert written() == ["second"]


# Keys


BAD_KEYS = ["", " \t", 7, None, b"key", "a\0b", "a\ud800"]


@pytest.mark.parametrize("bad", BAD_KEYS, ids=ascii)
def test_a_key_that_is_no_text_is_refused_before_anything_is_sent(name: str, bad: Any) -> None:
    """By what reads as well as by what does the work."""
    with fenced_atomic(name), statements() as sql:
        with pytest.raises(InvalidResource, match="The key of once"):
            once(bad, never)
        with pytest.raises(InvalidResource, match="The key of once"):
            once_result(bad)
        assert sql == []


def test_a_bad_key_is_told_before_the_missing_transaction() -> None:
    """It is the same fault everywhere."""
    with pytest.raises(InvalidResource):
        once("", never)


def test_keys_may_be_long_and_differ_at_their_end(name: str, key: str) -> None:
    """No length cuts off what tells two works apart, also in letters that take many bytes."""
    keys = [key + filler * 300 + end for filler in ("x", "ü", "💶") for end in ("1", "2")]
    for each in keys:
        do(name, each, lambda each=each: each[-1] + each[len(key)])
    assert [do(name, each, never) for each in keys] == ["1x", "2x", "1ü", "2ü", "1💶", "2💶"]
    assert OnceRecord.objects.count() == 6


def test_keys_that_differ_in_any_letter_are_different(name: str, key: str) -> None:
    """In case, in spaces, and in what the encoding uses."""
    keys = [key + end for end in ("a", "A", " a", "a ", "%61", "%2561", "|a", "ä", "~a", "?a")]
    for number, each in enumerate(keys):
        do(name, each, lambda number=number: number)
    assert [once_result(each) for each in keys] == list(range(10))


def test_one_text_is_one_key_however_it_is_composed(name: str, key: str) -> None:
    """As for names."""
    assert do(name, f"{key}\u00fc", write)
    assert do(name, f"{key}u\u0308", never) == once_result(f"{key}u\u0308")


def test_a_key_is_the_tenants_own(name: str, key: str) -> None:
    """Another namespace does its own work, and neither sees the other's result."""
    results = []
    for tenant in ("a", "b", "a", "b"):
        with override_settings(FENCING={"NAMESPACE": f"{conf.namespace}{tenant}"}):
            results.append(do(name, key, write, f"by {tenant}")["text"])
            assert once_result(key)["text"] == results[-1]

    assert results == ["by a", "by b", "by a", "by b"]
    assert written() == ["by a", "by b"]
    assert once_result(key) is None


# Failures leave the key free


def test_work_that_raises_has_not_been_done(name: str, key: str) -> None:
    """The caller may catch the error, and do the work in the same transaction."""
    with fenced_atomic(name):
        write("before")
        with pytest.raises(KeyError):
            once(key, fail)
        assert once_result(key, NOTHING) is NOTHING
        assert once(key, write, "second")["text"] == "second"

    assert written() == ["before", "second"]


def test_work_that_fails_in_the_database_has_not_been_done(name: str, key: str) -> None:
    """The error is the original one, and the transaction goes on."""
    Counter.objects.create(pk=1)
    with fenced_atomic(name):
        with pytest.raises(IntegrityError):
            once(key, lambda: Counter.objects.bulk_create([Counter(pk=1)]))
        assert once(key, write, "second")["text"] == "second"

    assert written() == ["second"]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_transaction_that_is_rolled_back_has_done_nothing(
    name: str, key: str, error: Any
) -> None:
    """Neither the work nor the record is there, and the next call does it."""

    def break_off() -> None:
        with fenced_atomic(name):
            once(key, write, "first")
            raise error

    with pytest.raises(error):
        break_off()
    assert once_result(key, NOTHING) is NOTHING
    assert do(name, key, write, "second")["entries"] == 1


def test_a_row_is_as_it_was_where_the_work_has_failed(job: Job, key: str) -> None:
    """As where an inner transaction of the lease has failed: what follows does not save it."""

    def work(row: Job) -> None:
        row.amount = 99
        row.save()
        raise KeyError

    with fenced_atomic(job) as row:
        with suppress(KeyError):
            once(key, work, row)
        row.note = "after"
        row.save()

    job.refresh_from_db()
    assert (job.amount, job.note) == (10, "after")


def test_work_that_calls_itself_is_refused(name: str, key: str) -> None:
    """It has no result yet. Nothing is done, and the key is free."""

    def recursive() -> Any:
        write("recursive")
        return once(key, never)

    with fenced_atomic(name):
        with pytest.raises(TransactionManagementError, match="by its own work"):
            once(key, recursive)
        assert once(key, write, "second")["entries"] == 1


def test_work_that_calls_itself_with_another_payload_is_refused(name: str, key: str) -> None:
    """In the same words: nothing of that key "was done"."""
    with (
        fenced_atomic(name),
        pytest.raises(TransactionManagementError, match="by its own work"),
    ):
        once(key, lambda: once(key, never, payload=2), payload=1)


def test_work_may_consist_of_other_works(name: str, key: str) -> None:
    """Each is kept, or all are taken back with the outer one."""

    def outer(end: Callable[[], Any]) -> Any:
        return [once(f"{key}:{part}", write, part)["text"] for part in "ab"] + [end()]

    with fenced_atomic(name):
        with suppress(ZeroDivisionError):
            once(key, outer, lambda: 1 / 0)
        assert written() == []
        assert once(key, outer, lambda: "end") == ["a", "b", "end"]
        with suppress(KeyError):
            once(f"{key}:c", fail)

    assert written() == ["a", "b"]
    assert do(name, key, never) == ["a", "b", "end"]
    assert do(name, f"{key}:b", never)["text"] == "b"


def test_a_record_that_is_deleted_meanwhile_is_claimed_anew(name: str, key: str) -> None:
    """As by the admin, after it was in the way; and one that always is ends in an error."""

    def deleting(times: int) -> Callable[..., Any]:
        def execute(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            nonlocal times
            if sql.startswith("SELECT") and times:
                times -= 1
                in_threads(lambda: OnceRecord.objects.all().delete())
                found = execute(sql, params, many, context)
                if times:
                    in_threads(partial(do, f"{name}:other", key, write, "other"))
                return found
            return execute(sql, params, many, context)

        return execute

    do(name, key, write, "first")
    with fenced_atomic(name), connection.execute_wrapper(deleting(1)):
        assert once(key, write, "second")["text"] == "second"
    with (
        fenced_atomic(name),
        connection.execute_wrapper(deleting(99)),
        pytest.raises(TransactionManagementError, match="comes and goes"),
    ):
        once(key, never)


PROGRAM = """
    import sys, django
    django.setup()
    from django_fencing.locks import fenced_atomic
    from django_fencing.once import once
    from tests.test_once import write

    def at(point):
        if point == sys.argv[3]:
            print(point, flush=True)
            sys.stdin.readline()

    with fenced_atomic(sys.argv[1]):
        once(sys.argv[2], write, "killed")
        at("before the commit")
    at("after the commit")
"""


@pytest.mark.parametrize("point", ["before the commit", "after the commit"])
def test_a_process_that_is_killed_has_done_all_or_nothing(
    name: str, key: str, client: Any, point: str
) -> None:
    """Work and record are there together, or both are not: the next call knows what to do."""
    database = urlsplit(os.environ["DATABASE_URL"])
    database = database._replace(path=f"/{connection.settings_dict['NAME']}")
    environment = {
        "DATABASE_URL": database.geturl(),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "example_project")]),
    }
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), name, key, point],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == f"{point}\n"
        process.kill()
    client.delete(keys_of(name).lease)  # of the first case: it would run out

    done = point == "after the commit"
    with fenced_atomic(name, wait=SECONDS):  # after the server has seen that the process is gone
        assert written() == (["killed"] if done else [])
        assert (once_result(key) is not None) == done
        once(key, never if done else write)
    assert len(written()) == 1


# At the same time


@pytest.mark.parametrize("commits", [True, False])
def test_two_leases_do_it_once(name: str, key: str, commits: bool) -> None:
    """The second waits for the first one's transaction: for its result, or to do the work."""

    def first(pause: Pause) -> Any:
        with fenced_atomic(f"{name}:first"):
            once(key, write, "first")
            pause()
            if not commits:
                raise KeyError

    with started(first) as a:
        a.reach_pause()
        with started(lambda _: do(f"{name}:second", key, write, "second")) as b:
            wait_until(waits_for_row)
            assert not b.stands
            a.finish()
            assert b.finish() == {"text": "first" if commits else "second", "entries": 1}

    assert written() == ["first" if commits else "second"]


def test_another_payload_at_the_same_time_is_refused(name: str, key: str) -> None:
    """As soon as the first one has committed."""

    def first(pause: Pause) -> Any:
        with fenced_atomic(f"{name}:first"):
            once(key, write, "first", payload=1)
            pause()

    with started(first) as a:
        a.reach_pause()
        with started(lambda _: do(f"{name}:second", key, never, payload=2)) as b:
            wait_until(waits_for_row)
            assert a.finish() is None
            assert isinstance(b.finish(), OnceMismatch)


def test_other_keys_wait_for_nobody(name: str, key: str) -> None:
    """Under leases of their own."""

    def first(pause: Pause) -> Any:
        with fenced_atomic(f"{name}:first"):
            once(key, write, "first")
            pause()

    with started(first) as a:
        a.reach_pause()
        assert in_threads(partial(do, f"{name}:second", f"{key}:2", write, "second"))
        assert written() == ["second"]


def race(function: Callable[[int], Any], rounds: int) -> list[list[Any]]:
    """Call `function` in two threads at once, again and again, with the number of the round."""
    barrier = threading.Barrier(2)

    def attempt(number: int, which: int) -> Any:
        barrier.wait(SECONDS)
        try:
            return function(2 * number + which)
        except (LockHeld, OperationalError) as error:
            return error

    found = []
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for number in range(rounds):
            races = [first.submit(attempt, number, 0), second.submit(attempt, number, 1)]
            found.append([race.result(SECONDS) for race in races])
        for pool in (first, second):
            pool.submit(closing, int).result(SECONDS)
    return found


def test_two_leases_race_a_hundred_times(name: str, key: str) -> None:
    """One of them has the effect, and both get its result."""

    def one(number: int) -> Any:
        return do(f"{name}:{number % 2}", f"{key}:{number // 2}", write, str(number))["text"]

    for number, results in enumerate(race(one, 100)):
        assert results in ([str(2 * number)] * 2, [str(2 * number + 1)] * 2)
    assert [int(text) // 2 for text in written()] == list(range(100))


@committing("default", "repeatable")
def test_two_leases_race_where_reads_are_repeatable(name: str, key: str) -> None:
    """One has the effect. The other gets its result, or an error by which it may try again."""

    def one(number: int) -> Any:
        resource = f"{name}:{number % 2}"
        return do(resource, f"{key}:{number // 2}", write, str(number), using="repeatable")

    def write(text: str) -> Any:  # through the same connection
        Entry.objects.using("repeatable").create(text=text)
        return text

    results = race(one, 50)

    assert [int(text) // 2 for text in written()] == list(range(50))
    for text, pair in zip(written(), results, strict=True):
        others = [result for result in pair if result != text]
        assert len(others) < 2
        for error in others:
            assert getattr(error.__cause__, "sqlstate", error) == "40001"


@committing("default", "repeatable")
def test_a_claim_that_cannot_be_read_is_an_error_to_try_again(name: str, key: str) -> None:
    """Where the snapshot is older than the other one's commit."""

    def first(pause: Pause) -> Any:
        with fenced_atomic(f"{name}:first"):
            once(key, write, "first")
            pause()

    second = partial(do, f"{name}:second", key, never, using="repeatable")
    with started(first) as a:
        a.reach_pause()
        with started(lambda _: second()) as b:
            wait_until(waits_for_row)
            assert a.finish() is None
            error = b.finish()

    assert isinstance(error, OperationalError)
    assert getattr(error.__cause__, "sqlstate", "") == "40001"
    assert in_threads(second) == [{"text": "first", "entries": 1}]


def raised(text: str, counter: Counter) -> Any:
    """Raise the counter, and return the text."""
    Counter.objects.filter(pk=counter.pk).update(value=F("value") + 1)
    return text


def value(counter: Counter) -> int:
    counter.refresh_from_db()
    return counter.value


def test_ten_threads_do_it_once(name: str, key: str) -> None:
    """All that wait for the lock get one result, although each has a lease of its own."""
    counter = Counter.objects.create()
    tokens = []

    @with_fenced_lock(name, once=key, wait=SECONDS)
    def work(number: int) -> Any:
        tokens.append(current_lease().token)
        return raised(f"by {number}", counter)

    results = in_threads(*(partial(work, number) for number in range(10)))

    assert (value(counter), len(set(results)), len(tokens)) == (1, 1, 1)
    with fenced_lock(name) as lease:
        assert lease.token == 11


def test_without_a_key_a_later_holder_does_it_again(name: str) -> None:
    """The twin: the fence accepts it, because its token is higher."""
    counter = Counter.objects.create()
    work = with_fenced_lock(name, wait=SECONDS)(lambda: raised("", counter))

    work()
    work()
    in_threads(*[work] * 10)

    assert value(counter) == 12


def test_a_late_second_run_does_nothing(name: str, key: str) -> None:
    """Of one period, while the next period is other work; a run that failed is made up for."""
    counter = Counter.objects.create()
    failing = True

    @with_fenced_lock(name, once=key + ":{period}")
    def nightly(period: str) -> Any:
        raised("", counter)
        if failing:
            raise KeyError
        return period

    with pytest.raises(KeyError):
        nightly("2026-11")
    failing = False
    assert [nightly("2026-11"), nightly("2026-11"), nightly("2026-12")] == [
        "2026-11",
        "2026-11",
        "2026-12",
    ]
    assert value(counter) == 2


# Holders that were overtaken


@pytest.mark.parametrize("register", [True, False])
def test_a_stale_holder_leaves_no_record(name: str, key: str, client: Any, register: bool) -> None:
    """Nor any work: its key is free for who has overtaken it."""
    lock = fenced_lock(name, register=register)
    stale = lock.acquire()
    newer = taken_over(lock, client)
    with newer.atomic():
        pass

    def late() -> None:
        with stale.atomic():
            once(key, never)

    with pytest.raises(StaleToken if register else LeaseLost):
        late()
    assert once_result(key, NOTHING) is NOTHING
    with newer.atomic():
        assert once(key, write, "newer")["entries"] == 1
    assert record_of(key).token == newer.token
    newer.release()


def test_a_holder_that_paused_in_its_transaction_is_waited_for(
    name: str, key: str, client: Any
) -> None:
    """Its lease runs out, and who comes next gets its result: it cannot be overtaken there."""

    def slow(pause: Pause) -> Any:
        with fenced_atomic(name):
            once(key, write, "slow")
            pause()

    with started(slow) as a:
        a.reach_pause()
        expire(client, name)
        with started(lambda _: do(name, key, never)) as b:
            wait_until(waits_for_row)
            assert a.finish() is None
            assert b.finish()["text"] == "slow"


def test_a_record_that_is_kept_elsewhere_does_it_twice_or_never(name: str, key: str) -> None:
    """The twin: a key in the cache says after the commit, or before it, what is not so."""

    def work(crash: str) -> None:
        if cache.get(key):
            return
        with fenced_atomic(name):
            write(crash)
            if crash == "before the commit":
                cache.set(key, 1, 60)
                raise KeyError
        if crash == "after the commit":
            raise KeyError
        cache.set(key, 1, 60)

    with suppress(KeyError):
        work("after the commit")
    work("again")
    assert written() == ["after the commit", "again"]
    cache.delete(key)
    with suppress(KeyError):
        work("before the commit")
    work("never")
    assert written() == ["after the commit", "again"]
    cache.delete(key)


# A COMMIT whose outcome nobody knows

KILLED, UNSENT, UNANSWERED = "killed", Fault.REQUEST_LOST, Fault.REPLY_LOST
BreakCommit = Callable[[Any], None]


@pytest.fixture
def breaking_commit(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BreakCommit]:
    """Put a bad line before PostgreSQL, and return what lets the next COMMIT fail, in a world."""
    settings = connection.settings_dict
    if not settings["HOST"].startswith("/"):
        pytest.skip("PostgreSQL has no Unix socket here.")
    socket = f".s.PGSQL.{settings['PORT'] or 5432}"
    plan: list[Fault] = []

    def fault_of(request: bytes) -> Fault:
        return plan.pop() if plan and b"COMMIT" in request else Fault.NONE

    def break_next(world: Any) -> None:
        if world is KILLED:
            pid = connection.connection.info.backend_pid
            with connections["repeatable"].cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        else:
            plan.append(world)

    with (
        tempfile.TemporaryDirectory(prefix="pg-") as folder,
        proxied(f"{settings['HOST']}/{socket}", Path(folder, socket)) as proxy,
    ):
        proxy.fault_of = fault_of  # type: ignore[method-assign]
        connection.close()
        monkeypatch.setitem(settings, "HOST", folder)
        yield break_next
        assert not plan
        connection.close()
        monkeypatch.undo()


def committed(counter: Counter) -> int:
    """Return the value that is there, as another connection sees it."""
    return Counter.objects.using("repeatable").get(pk=counter.pk).value


def in_a_function(name: str, key: str, work: Callable[[], Any]) -> Any:
    return with_fenced_lock(name, once=key)(work)()


def in_a_transaction(name: str, key: str, work: Callable[[], Any]) -> Any:
    with fenced_atomic(name):
        return once(key, work)


def in_a_lock(name: str, key: str, work: Callable[[], Any]) -> Any:
    with fenced_lock(name) as lease, lease.atomic():
        return once(key, work)


def without_once(name: str, key: str, work: Callable[[], Any]) -> Any:
    with fenced_atomic(name):
        return work()


@committing("default", "repeatable")
@pytest.mark.parametrize("way", [in_a_function, in_a_transaction, in_a_lock, without_once])
@pytest.mark.parametrize("world", [KILLED, UNSENT, UNANSWERED])
def test_a_commit_of_unknown_outcome_is_tried_again(
    name: str, key: str, breaking_commit: BreakCommit, way: Any, world: Any
) -> None:
    """It has one effect and one result in each world; without once(), two where it was done."""
    counter = Counter.objects.create()
    texts = iter(["first", "second"])
    worlds = [world]

    def work() -> Any:
        result = raised(next(texts), counter)
        if worlds:
            breaking_commit(worlds.pop())
        return result

    with pytest.raises((OperationalError, InterfaceError)):
        way(name, key, work)
    done = world is UNANSWERED
    assert committed(counter) == done

    result = way(name, key, work)

    twice = done and way is without_once
    assert result == ("first" if done and not twice else "second")
    assert value(counter) == committed(counter) == (2 if twice else 1)


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


# What it costs, and what is told


def words(action: Callable[[], Any]) -> tuple[int, list[str]]:
    """Return the number of Redis calls, and the first words of the SQL statements."""
    with counted_calls() as calls, CaptureQueriesContext(connection) as queries:
        action()
    return len(calls), [query["sql"].split()[0] for query in queries.captured_queries]


def test_what_it_costs(name: str, key: str) -> None:
    """Two statements and a savepoint, for work as for its replay, and nothing in Redis."""
    work = with_fenced_lock(name, once=key)(lambda: None)
    with fenced_lock(name):  # its fence is in place
        pass

    assert words(work) == (
        2,
        ["BEGIN", "WITH", "SAVEPOINT", "INSERT", "UPDATE", "RELEASE", "COMMIT"],
    )
    assert words(work) == (
        2,
        ["BEGIN", "WITH", "SAVEPOINT", "INSERT", "SELECT", "RELEASE", "COMMIT"],
    )
    assert words(lambda: once_result(key)) == (0, ["SELECT"])


@contextmanager
def replays(sender: Any = None) -> Iterator[list[dict[str, Any]]]:
    """Collect what once_replayed sends."""
    collected: list[dict[str, Any]] = []

    def receive(**values: Any) -> None:
        collected.append(values)

    once_replayed.connect(receive, sender=sender)
    try:
        yield collected
    finally:
        once_replayed.disconnect(receive, sender=sender)


@pytest.mark.parametrize("kind", ["row", "name"])
def test_a_replay_is_told(
    name: str, key: str, job: Job, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By one signal and one line, which name both tokens; work that runs tells nothing."""
    resource: Any = name if kind == "name" else JobProxy.objects.get()
    caplog.set_level(logging.DEBUG, "django_fencing")

    with replays() as sent, suppress(OnceMismatch):
        do(resource, key, write)
        assert sent == []
        with fenced_atomic(resource):
            once(key, never)
            lease = current_lease()
        do(resource, key, never, payload="other")

    [values] = sent
    model = type(lease.row)
    assert (values["sender"], values["lease"], values["key"]) == (model, lease, key)
    assert values["resource"] == lease.resource
    lines = [r for r in caplog.records if r.getMessage().startswith("once_replayed")]
    assert [(line.levelno, line.getMessage()) for line in lines] == [
        (
            logging.INFO,
            f"once_replayed resource={lease.resource} key={key} token=2 done_under=1",
        )
    ]


def test_a_receiver_that_fails_changes_nothing(
    name: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by an error of its own, nor by one of the database."""

    def receive(**values: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1/0")

    do(name, key, write)
    once_replayed.connect(receive)
    try:
        with fenced_atomic(name):
            assert once(key, never)["text"] == "done"
            write("after")
    finally:
        once_replayed.disconnect(receive)
    assert written() == ["done", "after"]


# Databases


@everywhere
@pytest.mark.parametrize("alias", ["default", "other", "sqlite", "repeatable"])
def test_the_record_is_in_the_database_of_the_transaction(name: str, key: str, alias: str) -> None:
    """There it is committed or rolled back with the work, and there it is looked for."""

    def break_off() -> None:
        with fenced_atomic(name, using=alias):
            once(key, write, "lost", alias)
            raise KeyError

    with suppress(KeyError):
        break_off()
    with fenced_atomic(name, using=alias):
        first = once(key, write, "kept", alias, payload=1)
        assert once_result(key) == first
    with pytest.raises(OnceMismatch):
        do(name, key, never, payload=2, using=alias)

    assert do(name, key, never, payload=1, using=alias) == first == {"text": "kept", "entries": 1}
    assert once_result(key, using=alias) == first
    assert record_of(key, alias)
    elsewhere = {"default", "other", "sqlite"} - {"default" if alias == "repeatable" else alias}
    assert [once_result(key, NOTHING, using=other) for other in elsewhere] == [NOTHING] * 2


@everywhere
@pytest.mark.parametrize("outer", ["default", "other"])
def test_of_two_fenced_transactions_the_newest_keeps_the_record(
    name: str, key: str, outer: str
) -> None:
    """Whichever database each is of, and after its end the older one does so."""
    inner = {"default": "other", "other": "default"}[outer]
    with fenced_atomic(name, using=outer):
        with fenced_atomic(f"{name}:inner", using=inner):
            once(key, write, "inner", inner)
        once(f"{key}:2", write, "outer", outer)
        assert once_result(key, NOTHING) is NOTHING

    assert record_of(key, inner).resource == f"{name}:inner"
    assert record_of(f"{key}:2", outer).resource == name
    assert OnceRecord.objects.using(outer).count() == 1
    assert OnceRecord.objects.using(inner).count() == 1


@everywhere
def test_a_function_that_is_entered_again_keeps_the_record_with_its_work(
    name: str, key: str
) -> None:
    """In the transaction of its own lock, though that of another database is newer."""
    work = with_fenced_lock(name, once=key)(write)

    with fenced_atomic(name), fenced_atomic(f"{name}:inner", using="other"):
        work("first")

    assert work("second")["text"] == "first"
    assert written() == ["first"]
    assert not OnceRecord.objects.using("other").exists()


@committing("default", "sqlite")
def test_threads_do_it_once_on_sqlite(name: str, key: str) -> None:
    """Which has one writer at a time."""

    def one(number: int) -> Any:
        return do(f"{name}:{number}", key, write, str(number), "sqlite", using="sqlite")["text"]

    results = in_threads(*(partial(one, number) for number in range(4)))

    assert (len(written("sqlite")), results) == (1, written("sqlite") * 4)


@pytest.mark.django_db
def test_it_works_in_the_transaction_of_a_test_case(name: str, key: str) -> None:
    """A project can test its own work, and nothing is left of it."""
    assert do(name, key, write) == do(name, key, never)
    with pytest.raises(TransactionManagementError):
        once(key, never)
