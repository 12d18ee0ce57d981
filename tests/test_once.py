"""once: work is done once, and every later call gets its result."""

import json
import logging
import math
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import (
    IntegrityError,
    connection,
    transaction,
)
from django.db.transaction import TransactionManagementError
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_fencing.conf import conf
from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import InvalidResource, OnceMismatch
from django_fencing.leases import current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.models import OnceRecord
from django_fencing.once import once, once_result
from django_fencing.signals import once_replayed
from tests.helpers import (
    SECONDS,
    committing,
    counted_calls,
    in_threads,
    keys_of,
    statements,
)
from tests.shop.models import Counter, Job, JobProxy
from tests.work import BAD_KEYS, NOTHING, do, fail, never, record_of, write, written

ROOT = Path(__file__).parents[1]

pytestmark = committing("default")

everywhere = committing("default", "repeatable", "other", "sqlite")


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


def test_it_is_known_when_a_record_was_used_last(name: str, key: str) -> None:
    """To a day: a replay within it writes nothing."""
    do(name, key, write)
    rows = OnceRecord.objects.filter(pk=record_of(key).pk)
    rows.update(used_at=timezone.now() - timedelta(days=9))

    with statements() as first:
        do(name, key, never)
    with statements() as second:
        do(name, key, never)

    assert timezone.now() - rows.get().used_at < timedelta(minutes=1)
    written = [[sql for sql in sent if sql.startswith("UPDATE")] for sent in (first, second)]
    assert [len(updates) for updates in written] == [1, 0]


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
