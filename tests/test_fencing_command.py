"""manage.py fencing: what it says, how it ends, and that looking changes nothing."""

import getpass
import json
import os
import pwd
import socket
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any
from unittest import mock

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from django_fencing import operators
from django_fencing.exceptions import LockHeld, StaleToken
from django_fencing.locks import fenced_lock
from django_fencing.models import Fence, FenceEvent
from django_fencing.names import Keys
from django_fencing.operators import Forced, Outcome
from django_fencing.resources import resolve
from tests.helpers import (
    cache_at,
    commit,
    committing,
    expire,
    keys_of,
    monitored,
    row_locked,
    taken_over,
)
from tests.shop.models import Code, Document, Job, UrgentJob
from tests.test_commands import NOWHERE, process

pytestmark = committing("default", "other")

READS = {"ZRANGE", "PTTL", "HMGET", "ZSCORE", "GET", "DUMP"}


def run(*arguments: str) -> str:
    """Run the command, and return what it prints."""
    out = StringIO()
    call_command("fencing", *arguments, stdout=out)
    return out.getvalue()


def said(*arguments: str) -> Any:
    """Run the command with --json, and return the value."""
    return json.loads(run(*arguments, "--json"))


def failed(code: int, *arguments: str) -> str:
    """Run the command, check its return code, and return the one line that it says on stderr."""
    with pytest.raises(CommandError) as caught:
        run(*arguments)
    assert caught.value.returncode == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tenant(name: str) -> Any:
    """Let NAMESPACE be `name`."""
    return override_settings(FENCING={**settings.FENCING, "NAMESPACE": name})


def line_of(table: str, resource: str) -> str:
    """Return the one line of the table that has the resource."""
    lines = [(line, map(str.strip, line.split("  "))) for line in table.splitlines()]
    (line,) = [line for line, cells in lines if resource in cells]
    return line


# locks


def test_locks_lists_what_is_held(name: str, private_redis: Any) -> None:
    """A table with the holder that `release` wants."""
    lease = fenced_lock(name, ttl=60).acquire()

    head, line = run("locks").splitlines()

    columns = ["RESOURCE", "STATE", "TOKEN", "FUNCTION", "HOST", "PID", "SINCE", "HOLDER"]
    assert [column for column in head.split() if column != "TENANT"] == columns
    assert f"{name}  held, 59." in line or f"{name}  held, 60.0" in line
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()][-6:]
    assert cells[:4] == [
        str(lease.token),
        "tests.test_fencing_command.test_locks_lists_what_is_held",
        socket.gethostname(),
        str(os.getpid()),
    ]
    assert cells[4].startswith(str(time.gmtime().tm_year))
    assert cells[4].endswith("Z")
    assert cells[5] == lease.holder.id.hex


def test_locks_as_json(name: str, private_redis: Any) -> None:
    """Numbers as numbers, times in ISO 8601."""
    lease = fenced_lock(name, ttl=60).acquire()

    (found,) = said("locks")

    assert found["resource"] == name
    assert found["tenant"] == settings.FENCING["NAMESPACE"]
    assert found["lease"].pop("remaining") == pytest.approx(60, abs=5)
    since = datetime.fromisoformat(found["lease"].pop("since"))
    assert abs(datetime.now(UTC) - since) < timedelta(seconds=30)
    assert found["lease"] == {
        "holder": lease.holder.id.hex,
        "token": lease.token,
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "function": "tests.test_fencing_command.test_locks_as_json",
    }


def test_locks_without_any(private_redis: Any) -> None:
    """A sentence, or an empty list."""
    assert run("locks") == "No lock is held, and none has lapsed within the last hour.\n"
    assert said("locks") == []


def test_locks_says_what_has_lapsed(name: str, private_redis: Any) -> None:
    """Within the last hour, without a release."""
    fenced_lock(name).acquire()
    fenced_lock(f"{name} of old").acquire()
    for each, minutes in ((name, 10), (f"{name} of old", 70)):
        expire(private_redis, each)
        keys = keys_of(each)
        ended = datetime.now(UTC) - timedelta(minutes=minutes)
        private_redis.zadd(keys.held, {keys.member: ended.timestamp() * 1000})

    table = run("locks")

    ended = datetime.now(UTC) - timedelta(minutes=10)
    assert f"lapsed {ended:%Y-%m-%d %H:%M}" in line_of(table, name)
    assert "of old" not in table
    (found,) = said("locks")
    assert (found["lease"], found["lapsed_at"][:16]) == (None, f"{ended:%Y-%m-%dT%H:%M}")


def test_locks_of_all_tenants_and_of_one(name: str, private_redis: Any) -> None:
    """With a column that says whose each is; --namespace "" is no tenant."""
    for each in ("", "one", "zwei | ü"):
        with tenant(each):
            fenced_lock(f"{name} of {each}").acquire()

    table = run("locks")

    assert table.split()[0] == "TENANT"
    assert line_of(table, f"{name} of one").startswith("one ")
    assert line_of(table, f"{name} of zwei | ü").startswith("zwei | ü  ")
    assert {found["tenant"] for found in said("locks")} == {"", "one", "zwei | ü"}
    for each in ("", "one", "zwei | ü"):
        (found,) = said("locks", "--namespace", each)
        assert (found["tenant"], found["resource"]) == (each, f"{name} of {each}")
    assert run("locks", "--namespace", "").split()[0] == "RESOURCE"
    assert said("locks", "--namespace", "three") == []


def test_locks_with_what_other_programs_have_written(name: str, private_redis: Any) -> None:
    """It is listed, as far as it can be read."""
    fenced_lock(name).acquire()
    private_redis.set(keys_of(name).lease, "what is that?")
    table = run("locks")
    assert "held, without an end" in line_of(table, name)
    assert "sha1:" in line_of(table, name)


@pytest.mark.parametrize("sign", ["\n", "\r", "\x1b[2J", "\x9b", "\u202e"])
def test_a_name_does_not_garble_the_table(name: str, private_redis: Any, sign: str) -> None:
    """Each resource has one line, and a terminal takes nothing in it for an order."""
    fenced_lock(f"{name}{sign}x").acquire()
    table = run("locks")
    assert len(table.split("\n")) == 3
    assert sign == "\n" or sign not in table
    assert f"{name}{sign}x" == said("locks")[0]["resource"]


def test_a_garbled_tenant_hides_nobody(name: str, private_redis: Any) -> None:
    """One member that no tenant can have written leaves the others in the list."""
    fenced_lock(name).acquire()
    garbled = Keys.of("fencing", "name:%20|x")
    private_redis.zadd(garbled.held, {garbled.member: time.time() * 1000 + 9_000})

    assert name in run("locks")


@pytest.mark.parametrize(
    "resource",
    ["two words", "ünïcode 锁 🔒", "100% {sure} %41", "a/b:c@d", "long " * 60, "é" * 150],
    ids=["space", "unicode", "percent", "signs", "long", "long unicode"],
)
def test_any_name_can_be_shown_and_released(name: str, private_redis: Any, resource: str) -> None:
    """As it was given to fenced_lock()."""
    resource = f"{resource}{name}"
    lease = fenced_lock(resource).acquire()
    (listed,) = said("locks")
    found = said("show", resource)

    assert listed["resource"].rstrip("…") in resource
    assert found["resource"] == resource
    assert found["lease"]["holder"] == listed["lease"]["holder"] == lease.holder.id.hex
    assert "was ended" in run("release", resource, "--holder", lease.holder.id.hex)
    with pytest.raises(StaleToken):
        commit(lease)


# show


def test_show_says_all(name: str, client: Any) -> None:
    """The lease, the counter, the fence, the last events."""
    lock = fenced_lock(name, ttl=60)
    former = lock.acquire()
    lease = taken_over(lock, client)
    with pytest.raises(StaleToken):
        commit(former)

    lines = run("show", name).splitlines()

    shown = {line[:13].strip(): line[14:] for line in lines[:-1]}
    assert list(shown) == [
        *("resource", "kind", "lease", "held by", "holder", "since", "counter"),
        *("fence token", "fence holder"),
    ]
    assert shown["resource"] == name
    assert shown["lease"].startswith(("held, 59.", "held, 60.0"))
    assert shown["held by"].endswith(f"pid {os.getpid()}, token 2)")
    assert shown["holder"] == lease.holder.id.hex
    assert (shown["counter"], shown["fence token"]) == ("2", "2")
    assert shown["fence holder"] == lease.holder.id.hex
    assert f"token 1 of {socket.gethostname()}" in lines[-1]


def test_show_as_json(name: str, client: Any) -> None:
    """All of it, the same keys whether held or free."""
    lease = fenced_lock(name).acquire()
    held = said("show", name)
    lease.release()
    free = said("show", name)

    keys = {"resource", "kind", "lease", "counter", "fence_token", "fence_holder", "locked_by"}
    assert set(held) == set(free) == keys | {"events"}
    assert held["lease"]["token"] == held["counter"] == held["fence_token"] == lease.token
    assert held["fence_holder"] == str(lease.holder.id)
    assert free["lease"] is None
    assert free["events"] == []


def test_show_tells_who_keeps_the_row(name: str) -> None:
    """A holder that hangs in its transaction holds no lease any more, and the row all the same."""
    fenced_lock(name).acquire().release()
    with row_locked(name) as pid:
        kept = run("show", name)
        as_json = said("show", name)["locked_by"]
        with pytest.raises(LockHeld, match="`manage.py fencing show` tells which"):
            fenced_lock(name, ttl=0.2).acquire()
    free = run("show", name)

    line = line_of(kept.replace("row locked by", "row locked by  "), "row locked by")
    assert f"PostgreSQL backend {pid}" in line
    assert "idle in transaction, in a transaction since 2" in line
    assert f"SELECT pg_terminate_backend({pid}) ends it" in line
    assert [(each["pid"], each["state"]) for each in as_json] == [(pid, "idle in transaction")]
    assert "row locked by" not in free
    assert said("show", name)["locked_by"] == []


def test_show_without_redis(name: str) -> None:
    """The fence, and that the rest is not known."""
    fenced_lock(name).acquire().release()
    out = StringIO()
    with cache_at(NOWHERE), pytest.raises(CommandError, match="Cannot") as caught:
        call_command("fencing", "show", name, stdout=out)

    assert caught.value.returncode == 69
    lines = out.getvalue().splitlines()
    assert "lease         unknown" in lines
    assert "fence token   1" in lines


def test_show_without_the_database(name: str) -> None:
    """The lease, and that the rest is not known; other actions say so in one line."""
    lease = fenced_lock(name, ttl=60).acquire()
    known = connections["default"].settings_dict
    connections["default"].close()
    out = StringIO()
    with mock.patch.dict(known, {"NAME": f"missing-{uuid.uuid4().hex}"}):
        with pytest.raises(CommandError, match="missing-") as caught:
            call_command("fencing", "show", name, stdout=out)
        connections["default"].close()
        failed(69, "prune", "--older-than", "1d")
        connections["default"].close()
    lease.release()

    assert caught.value.returncode == 69
    lines = out.getvalue().splitlines()
    assert f"holder        {lease.holder.id.hex}" in lines
    assert "fence token   unknown" in lines


def test_a_dry_run_says_that_it_is_one(name: str) -> None:
    """In JSON too."""
    lease = fenced_lock(name).acquire()
    arguments = ("release", name, "--holder", lease.holder.id.hex)
    dry = said(*arguments, "--dry-run")
    lease.ensure_held()
    wet = said(*arguments)

    assert (dry["dry_run"], wet["dry_run"]) == (True, False)


def test_a_few_letters_of_the_holder_are_too_few(name: str) -> None:
    """It says so, and nothing is done; letters of another holder are those of another."""
    lease = fenced_lock(name).acquire()
    assert "at least" in failed(1, "release", name, "--holder", lease.holder.id.hex[:4])
    foreign = failed(1, "release", name, "--holder", "0" * 32)
    lease.ensure_held()
    lease.release()

    assert f"as {lease.holder.id.hex}, and not as it was shown" in foreign


def test_show_of_what_nobody_has_used(name: str, client: Any) -> None:
    """Free, and no counter comes to be: C77."""
    assert run("show", name).splitlines() == [
        f"resource      {name}",
        "kind          name",
        "lease         free",
        "fence token   nobody has registered",
    ]
    assert said("show", name)["counter"] is None
    assert not client.exists(keys_of(name).token, keys_of(name).lease)
    assert not Fence.objects.exists()


def test_show_has_the_last_five_events(name: str) -> None:
    """The newest first, of this resource and this tenant."""
    for number in range(7):
        lease = fenced_lock(name).acquire()
        operators.force_release(resolve(name), lease.holder.id.hex, reason=f"no. {number}")
    with tenant("foreign"):
        lease = fenced_lock(name).acquire()
        operators.force_release(resolve(name), lease.holder.id.hex, reason="foreign")

    events = [event["message"] for event in said("show", name)["events"]]

    assert [event.rpartition(": ")[2] for event in events] == [f"no. {n}" for n in (6, 5, 4, 3, 2)]


@pytest.mark.parametrize("form", ["shop.{}:{}", "Shop.{}:{}"])
def test_show_of_a_row(form: str) -> None:
    """By app.model:pk, as its fence is called."""
    job = Job.objects.create()
    lease = fenced_lock(job).acquire()
    text = f"shop.{'Job' if form[0] == 'S' else 'job'}:{job.pk}"
    assert said("show", text)["lease"]["holder"] == lease.holder.id.hex
    assert said("show", text)["resource"] == f"shop.job:{job.pk}"
    lease.release()


def test_show_of_rows_with_other_keys() -> None:
    """A uuid; a child, by its own model and by its parent's."""
    document, urgent = Document.objects.create(), UrgentJob.objects.create()
    first, second = fenced_lock(document).acquire(), fenced_lock(urgent).acquire()

    for text in (f"shop.document:{document.pk}", f"shop.document:{document.pk.hex}"):
        assert said("show", text)["lease"]["holder"] == first.holder.id.hex
    for model in ("urgentjob", "job", "jobproxy"):
        found = said("show", f"shop.{model}:{urgent.pk}")
        assert found["lease"]["holder"] == second.holder.id.hex
        assert found["fence_token"] == second.token


@pytest.mark.parametrize("pk", ["a:b", "a:b:c", "100%", "ü ", "a@b"])
def test_show_of_rows_whose_key_is_a_text(pk: str) -> None:
    """The form that the lists show is understood, whatever the key has in it."""
    pk += uuid.uuid4().hex[:8]
    lease = fenced_lock(Code.objects.create(code=pk)).acquire()

    found = said("show", lease.resource)

    assert found["resource"] == lease.resource
    assert found["lease"]["holder"] == lease.holder.id.hex


def test_a_key_with_an_at_sign_is_not_taken_for_another_row() -> None:
    """`a@b` as it stands is either that row or a mistake, never the row `a`."""
    pk = uuid.uuid4().hex[:8]
    other = fenced_lock(Code.objects.create(code=pk)).acquire()
    fenced_lock(Code.objects.create(code=f"{pk}@b")).acquire()

    try:
        found = said("show", f"shop.code:{pk}@b")
    except CommandError:
        return
    assert found["lease"]["holder"] != other.holder.id.hex


# Other databases


def test_names_of_another_database(name: str) -> None:
    """By --using; the name's namesake is another resource."""
    here, there = fenced_lock(name).acquire(), fenced_lock(name, using="other").acquire()

    assert said("show", name)["lease"]["holder"] == here.holder.id.hex
    assert said("show", name, "--using", "other")["lease"]["holder"] == there.holder.id.hex
    run("release", name, "--using", "other", "--holder", there.holder.id.hex)
    with pytest.raises(StaleToken):
        commit(there)
    commit(here)


@pytest.mark.parametrize("way", ["--using", "@"])
def test_rows_of_another_database(way: str) -> None:
    """By --using, and by the name that the lists show: never the row of the default database."""
    pk = Job.objects.create().pk
    Job.objects.using("other").create(pk=pk)
    here = fenced_lock((Job, pk)).acquire()
    there = fenced_lock((Job, pk), using="other").acquire()
    arguments = [there.resource] if way == "@" else [f"shop.job:{pk}", "--using", "other"]

    shown = said("show", *arguments)

    assert (shown["resource"], shown["lease"]["holder"]) == (there.resource, there.holder.id.hex)
    run("release", *arguments, "--holder", there.holder.id.hex)
    with pytest.raises(StaleToken):
        commit(there)
    commit(here)


def test_the_wrong_database_of_a_row_is_a_mistake() -> None:
    """It says so instead of showing another one."""
    with pytest.raises(CommandError) as caught:
        run("show", "shop.job:1@other", "--using", "default")
    assert caught.value.returncode == 64


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "some name", "--using", "nowhere"),
        ("release", "some name", "--using", "nowhere", "--holder", "x"),
        ("prune", "--older-than", "1d", "--database", "nowhere"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_unknown_database_is_one_line(arguments: tuple[str, ...]) -> None:
    """And no traceback."""
    with pytest.raises(CommandError, match="nowhere"):
        run(*arguments)


# release


def test_release_ends_the_lease(name: str, client: Any) -> None:
    """One line; the ledger has the user and the reason."""
    lease = fenced_lock(name).acquire()

    text = run("release", name, "--holder", str(lease.holder.id), "--reason", "its pod is gone")

    assert text.startswith(f"{name}: the lease of tests.test_fencing_command.")
    assert text.endswith("and its holder is fenced by token 2.\n")
    assert not client.exists(keys_of(name).lease)
    with pytest.raises(StaleToken):
        commit(lease)
    event = FenceEvent.objects.get(kind="forced")
    assert event.user == getpass.getuser()
    assert event.message.endswith(": its pod is gone")


def test_release_as_json(name: str) -> None:
    """The outcome as one word."""
    lease = fenced_lock(name).acquire()
    found = said("release", name, "--holder", lease.holder.id.hex)
    assert (found["resource"], found["outcome"]) == (name, "released")
    assert "was ended" in found["said"]


def test_release_of_a_changed_holder(name: str, client: Any) -> None:
    """1, and nothing is done: C72. The JSON says the same."""
    former = fenced_lock(name).acquire()
    lease = taken_over(fenced_lock(name), client)
    arguments = ("release", name, "--holder", former.holder.id.hex)

    line = failed(1, *arguments)

    assert line.startswith(f"{name}: it is held by tests.")
    assert line.endswith("and not as it was shown: nothing was done.")
    out = StringIO()
    with pytest.raises(CommandError):
        call_command("fencing", *arguments, "--json", stdout=out)
    assert json.loads(out.getvalue())["outcome"] == "changed"
    lease.ensure_held()
    commit(lease)
    assert not FenceEvent.objects.filter(kind="forced").exists()


def test_release_of_what_is_free(name: str) -> None:
    """1, and nothing is done."""
    assert failed(1, "release", name, "--holder", uuid.uuid4().hex) == (
        f"{name}: nobody holds it: nothing was done."
    )


def test_release_that_cannot_fence(name: str) -> None:
    """75: to be tried again."""
    forced = Forced(outcome=Outcome.NOT_FENCED, said="ended, but not fenced yet")
    with mock.patch.object(operators, "force_release", return_value=forced):
        line = failed(75, "release", name, "--holder", "x")
    assert line == f"{name}: ended, but not fenced yet."


def test_release_by_digest(name: str, client: Any) -> None:
    """What cannot be read is ended as it is shown."""
    client.set(keys_of(name).lease, "???")
    holder = said("show", name)["lease"]["holder"]
    assert holder.startswith("sha1:")
    run("release", name, "--holder", holder)
    assert not client.exists(keys_of(name).lease)


def test_release_within_a_tenant(name: str) -> None:
    """--namespace says whose; the namesake of another one goes on."""
    with tenant("one"):
        lease = fenced_lock(name).acquire()
    with tenant("two"):
        other = fenced_lock(name).acquire()
    holder = lease.holder.id.hex
    failed(1, "release", name, "--holder", holder, "--namespace", "two")

    run("release", name, "--holder", holder, "--namespace", "one")

    with pytest.raises(StaleToken):
        commit(lease)
    commit(other)
    assert FenceEvent.objects.get(kind="forced").namespace == "one"


def test_release_as_a_dry_run(name: str) -> None:
    """It says it, and does nothing."""
    lease = fenced_lock(name).acquire()
    text = run("release", name, "--holder", lease.holder.id.hex, "--dry-run")
    assert "would be ended" in text
    lease.ensure_held()
    commit(lease)


def test_release_of_a_row_with_any_key() -> None:
    """By the name that is shown."""
    lease = fenced_lock(Code.objects.create(code=f"x:y@z % {uuid.uuid4().hex[:8]}")).acquire()
    run("release", lease.resource, "--holder", lease.holder.id.hex)
    with pytest.raises(StaleToken):
        commit(lease)


def test_release_by_a_user_without_a_name(name: str) -> None:
    """As in a container that runs under any number: no LOGNAME, and no line in /etc/passwd."""
    lease = fenced_lock(name).acquire()
    rest = {key: os.environ[key] for key in ("PATH",) if key in os.environ}
    with (
        mock.patch.dict(os.environ, rest, clear=True),
        mock.patch.object(pwd, "getpwuid", side_effect=KeyError("uid not found")),
    ):
        run("release", name, "--holder", lease.holder.id.hex)
    with pytest.raises(StaleToken):
        commit(lease)


# What is not understood


@pytest.mark.parametrize("text", ["shop.job:seven", "shop.urgentjob:999999", "", " "])
def test_what_cannot_be_locked(text: str) -> None:
    """64, in one line."""
    failed(64, "show", text)
    failed(64, "release", text, "--holder", "x")


def test_an_unknown_model_is_a_name(name: str) -> None:
    """Any text may be one, so it is free."""
    assert said("show", f"nosuch.model:{name}")["lease"] is None
    assert said("show", f"shop.entry:{name}")["lease"] is None


def test_a_row_that_is_not_there_is_free() -> None:
    """Nothing is asked of the row before it is locked, and it is said that there is none."""
    assert said("show", "shop.job:999999")["fence_token"] is None


@pytest.mark.parametrize("namespace", [" ", "a\0b"])
def test_a_namespace_that_nobody_can_have(name: str, namespace: str) -> None:
    """64, in one line."""
    failed(64, "show", name, "--namespace", namespace)


@pytest.mark.parametrize(
    "age", ["", "90", "d", "-1d", "1.5d", "1y", "1 d", "9999999d", "1d1h", "1D"]
)
def test_ages_that_are_none(age: str) -> None:
    """Refused before anything is deleted."""
    with pytest.raises(CommandError, match="--older-than"):
        run("prune", f"--older-than={age}")


def test_an_age_before_any_calendar() -> None:
    """Nothing is that old; it is not a traceback."""
    with suppress(CommandError):
        assert "0 fences" in run("prune", "--older-than", "999999w")


@pytest.mark.parametrize("arguments", [(), ("unlock",), ("release", "x"), ("show",), ("prune",)])
def test_arguments_that_are_missing(arguments: tuple[str, ...]) -> None:
    """A message, and no traceback."""
    with pytest.raises(CommandError):
        run(*arguments)


def test_wrong_settings_are_one_line(name: str) -> None:
    """As the checks say it."""
    with override_settings(FENCING={**settings.FENCING, "PREFIXX": "x"}):
        assert "PREFIXX" in failed(1, "show", name)


# The store is away


@pytest.mark.parametrize(
    "arguments",
    [
        ("locks",),
        ("show", "x"),
        ("release", "x", "--holder", "y"),
        ("locks", "--json"),
        ("show", "x", "--json"),
    ],
    ids=" ".join,
)
def test_an_unreachable_store(arguments: tuple[str, ...]) -> None:
    """69, in one line."""
    with cache_at("redis://127.0.0.1:1?db=0"):
        assert failed(69, *arguments)


def test_a_prune_without_a_store(name: str) -> None:
    """69; no fence is deleted that anybody may hold."""
    with fenced_lock(name):
        pass
    Fence.objects.update(registered_at=datetime.now(UTC) - timedelta(days=9))
    with cache_at("redis://127.0.0.1:1?db=0"):
        failed(69, "prune", "--older-than", "1d")
    assert Fence.objects.count() == 1


# What it sends


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("action", ["locks", "show", "release --dry-run", "prune --dry-run"])
def test_looking_sends_reads_only(name: str, private_redis: Any, action: str, json: bool) -> None:
    """No write, no script, no KEYS, no SCAN."""
    lease = fenced_lock(name).acquire()
    private_redis.set(keys_of(f"{name} unreadable").lease, "x")
    arguments = {
        "locks": ["locks"],
        "show": ["show", name],
        "release --dry-run": ["release", name, "--holder", lease.holder.id.hex, "--dry-run"],
        "prune --dry-run": ["prune", "--older-than", "0s", "--dry-run"],
    }[action]
    with monitored(private_redis) as commands:
        run(*arguments, *(["--json"] if json else []))

    assert {command[0] for command in commands} <= READS
    assert len(commands) <= 64 + 2 * 4


def test_ten_thousand_foreign_keys_cost_nothing(name: str, private_redis: Any) -> None:
    """The number of commands does not depend on them, nor does the time."""
    lease = fenced_lock(name).acquire()

    def measure() -> tuple[int, float]:
        began = time.perf_counter()
        with monitored(private_redis) as commands:
            assert name in run("locks")
            run("show", name)
        return len(commands), time.perf_counter() - began

    before, _ = measure()
    private_redis.mset({f"session:{number}": "x" * 50 for number in range(10_000)})
    after, seconds = measure()

    assert before == after
    assert seconds < 1
    lease.release()


def test_many_leases_are_listed(name: str, private_redis: Any) -> None:
    """More than are looked at in one round trip, each once."""
    for number in range(1_050):
        fenced_lock(f"{name} {number}", register=False).acquire()

    assert len({found["resource"] for found in said("locks")}) == 1_050
    assert len(run("locks").splitlines()) == 1_051


# prune and doctor, in short: test_prune.py and test_doctor.py have the rest


def test_prune_says_what_it_deleted(name: str) -> None:
    """In text and in JSON."""
    for each in (name, f"{name} too"):
        with fenced_lock(each):
            pass
    Fence.objects.update(registered_at=datetime.now(UTC) - timedelta(days=9))

    dry = run("prune", "--older-than", "1d", "--dry-run")
    assert dry == "2 fences, 0 once records, 0 events would be looked at.\n"
    assert run("prune", "--older-than", "1w") == "2 fences, 0 once records, 0 events deleted.\n"
    assert said("prune", "--older-than", "1w") == {"fences": 0, "once records": 0, "events": 0}


def test_prune_of_one_tenant_leaves_the_others(name: str) -> None:
    """--namespace is the tenant, for this action as for the others."""
    for each in ("one", "two"):
        with tenant(each), fenced_lock(name):
            pass
    Fence.objects.update(registered_at=datetime.now(UTC) - timedelta(days=9))
    with suppress(CommandError):  # a refusal would be as good
        run("prune", "--older-than", "1d", "--namespace", "one")
    with tenant("two"):
        assert Fence.objects.filter(pk=resolve(name).pk).exists()


def test_doctor_says_that_all_is_well(private_redis: Any) -> None:
    """A line for each finding."""
    private_redis.config_set("maxmemory-policy", "noeviction")
    lines = run("doctor").splitlines()
    assert lines[0] == "ok    settings: leases in the cache 'default'"
    assert {line.split()[0] for line in lines} == {"ok", "note"}
    assert all(found["well"] is not False for found in said("doctor"))


def test_doctor_that_finds_something(private_redis: Any) -> None:
    """1, and which it is; the JSON comes first."""
    private_redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        assert failed(1, "doctor") == "Wrong: eviction."
        out = StringIO()
        with pytest.raises(CommandError):
            call_command("fencing", "doctor", "--json", stdout=out)
        (wrong,) = [found for found in json.loads(out.getvalue()) if found["well"] is False]
        assert wrong["what"] == "eviction"
    finally:
        private_redis.config_set("maxmemory-policy", "noeviction")


# As a process


def test_a_process_shows_and_releases(name: str, client: Any) -> None:
    """0, nothing on stderr; then 1, with one line."""
    lease = fenced_lock(name, ttl=300).acquire()
    with process("fencing", "show", name, "--json") as shows:
        assert shows.end() == (0, [])
        holder = json.loads(shows.output)["lease"]["holder"]
    with process("fencing", "release", name, "--holder", holder) as releases:
        assert releases.end() == (0, [])
    with process("fencing", "release", name, "--holder", holder) as again:
        code, lines = again.end()
    assert (code, len(lines)) == (1, 1)
    assert "nobody holds it: nothing was done." in lines[0]
    with pytest.raises(StaleToken):
        commit(lease)


def test_a_process_without_a_store() -> None:
    """69, one line, no traceback."""
    with process("fencing", "locks", REDIS_URL=NOWHERE) as locks:
        code, lines = locks.end()
    assert (code, len(lines)) == (69, 1)


def test_a_process_with_wrong_arguments() -> None:
    """2, as usual; and 64 for what cannot be locked."""
    with process("fencing", "prune", "--older-than", "soon") as prunes:
        assert prunes.end()[0] == 2
    with process("fencing", "show", "shop.job:seven") as shows:
        code, lines = shows.end()
    assert (code, len(lines)) == (64, 1)


def test_help_tells_the_return_codes() -> None:
    """Each that the command can end with."""
    with process("fencing", "--help") as helps:
        code, _ = helps.end()
    text = " ".join(helps.output.decode().split())
    assert code == 0
    for part in ("0 done", "1 nothing was done", "2 the arguments", "64 what", "69 Redis", "75 re"):
        assert part in text


def test_djangos_own_options_may_follow_the_action(name: str) -> None:
    """As after every other command; before it they count as well."""
    settings_module = f"--settings={os.environ['DJANGO_SETTINGS_MODULE']}"
    for arguments in (
        ["locks", settings_module, "--no-color", "--traceback", "-v", "2"],
        [settings_module, "--no-color", "-v2", "locks"],
    ):
        with process("fencing", *arguments) as ran:
            assert ran.end() == (0, [])
    with process("fencing", "locks", "--settings=nowhere") as failing:
        assert failing.end()[0] == 1


def test_resource_of_understands_rows_and_names() -> None:
    """A name is what is no row of a model with a fence."""
    job, code = Job.objects.create(), Code.objects.create(code="a@b")
    for text in (f"shop.job:{job.pk}", f"Shop.Job:{job.pk}"):
        assert operators.resource_of(text) == resolve((Job, job.pk))
    for text in ("shop.code:a%40b", "shop.code:a@b"):
        assert operators.resource_of(text) == resolve(code)
    for text in ("shop.job", "import:7", "nowhere.job:7", "shop.jop:1", "shop.entry:1"):
        assert operators.resource_of(text) == resolve(text)
