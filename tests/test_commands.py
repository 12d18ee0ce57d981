"""with_fenced_lock on management commands: how they end, and what stops them."""

import gc
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
import redis
from django.core.management import CommandError, call_command
from django.core.management.base import BaseCommand
from django.db import connection, connections

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import (
    InvalidResource,
    LeaseLost,
    LockHeld,
    StaleToken,
    StoreUnavailable,
)
from django_fencing.leases import Lease, current_lease
from django_fencing.locks import fenced_atomic, fenced_lock
from tests.helpers import SECONDS, cache_at, committing, in_threads, keys_of, taken_over, wait_until
from tests.shop.models import Job

ROOT = Path(__file__).parents[1]

NOWHERE = "unix:///nowhere/valkey.sock"

pytestmark = committing("default")


class Process:
    """A command in a process of its own, as cron starts it."""

    def __init__(self, *command: str, **environment: str) -> None:
        database = urlsplit(os.environ["DATABASE_URL"])
        paths = [str(ROOT), str(ROOT / "example_project")]
        environment |= {
            "DATABASE_URL": database._replace(path=f"/{connection.settings_dict['NAME']}").geturl(),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        with handler(signal.SIGINT, signal.default_int_handler):  # what is ignored is inherited
            self._process = subprocess.Popen(
                [sys.executable, "-X", "dev", "-W", "error", "-m", "django", *command],
                bufsize=0,
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

    def reach(self, step: str) -> None:
        """Wait until it says that it stands at `step`."""
        ready, _, _ = select.select([self._process.stdout], [], [], SECONDS)
        assert ready, "The command says nothing."
        assert self._process.stdout.readline().decode() == f"{step}\n"

    def order(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n".encode())

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> tuple[int, list[str]]:
        """Say nothing more, wait for its end, and return its code and the lines on stderr."""
        self.output, errors = self._process.communicate(timeout=2 * SECONDS)
        return self._process.returncode, errors.decode().splitlines()

    def close(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def process(*command: str, **environment: str) -> Iterator[Process]:
    with closing(Process(*command, **environment)) as process:
        yield process


@contextmanager
def handler(number: signal.Signals, wanted: Any) -> Iterator[None]:
    """Let a signal be handled in another way."""
    former = signal.signal(number, wanted)
    try:
        yield
    finally:
        signal.signal(number, former)


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """Let the signals do what they do in a new process, whatever they do in this one."""
    with (
        handler(signal.SIGTERM, signal.SIG_DFL),
        handler(signal.SIGINT, signal.default_int_handler),
    ):
        yield


@pytest.fixture
def organization(name: str) -> str:
    """Return what names a resource that nothing else uses."""
    return name.partition(":")[2]


def command_of(
    body: Callable[..., Any], resource: Any, *, takes_lease: bool = False, **options: Any
) -> BaseCommand:
    """Return a command whose handle() is `body` under a lock."""

    class Command(BaseCommand):
        requires_system_checks = ()

        @with_fenced_lock(resource, **options)
        def handle(self, *args: Any, **given: Any) -> Any:
            return body()

        @with_fenced_lock(resource, **options)
        def handle_with_lease(self, *args: Any, lease: Lease, **given: Any) -> Any:
            return body(lease)

    command = Command(stderr=StringIO())
    if takes_lease:
        command.handle = command.handle_with_lease  # type: ignore[method-assign]
    return command


def raising(error: BaseException) -> Callable[[], None]:
    """Return a body that raises."""

    def body() -> None:
        raise error

    return body


def never() -> None:
    pytest.fail("The body ran.")


# How a run ends, as cron sees it.


def test_a_run_that_is_done_ends_with_zero_and_says_nothing(organization: str) -> None:
    """What it has written is committed."""
    with process("charge", organization) as run:
        assert run.end() == (0, [])

    assert Job.objects.filter(note=organization).count() == 1


def test_a_run_that_finds_the_lock_held_ends_with_75(organization: str) -> None:
    """Its one line names the resource and who holds it."""
    resource = f"charges:{organization}"

    with fenced_lock(resource), process("charge", organization) as run:
        code, [line] = run.end()

    assert code == 75
    assert re.fullmatch(f"CommandError: '{resource}' is held by .*; try again in .* s.", line)
    assert not Job.objects.exists()


def test_a_run_that_another_has_overtaken_ends_with_76(organization: str, client: Any) -> None:
    """Nothing of it is written, and its one line says what the fence says."""
    resource = f"exports:{organization}"
    with process("export", organization) as run:
        run.reach("at work")
        taken_over(fenced_lock(resource), client).release()

        code, lines = run.end()

    assert code == 76
    assert len(lines) == 1, lines
    assert re.match(f"CommandError: .*'{resource}'", lines[0])
    assert not Job.objects.exists()


def test_a_run_without_a_store_ends_with_69(organization: str) -> None:
    """Its one line names the resource and says why."""
    with process("charge", organization, REDIS_URL=NOWHERE) as run:
        code, [line] = run.end()

    assert code == 69
    assert re.match(f"CommandError: Cannot acquire 'charges:{organization}': .*connect", line)
    assert not Job.objects.exists()


def test_a_run_keeps_the_code_that_its_body_exits_with(organization: str, client: Any) -> None:
    """What it has written is rolled back, as at any exception, and the lock is free."""
    with process("charge", organization) as run:
        run.order("7")
        assert run.end() == (7, [])

    assert not Job.objects.exists()
    assert not client.exists(keys_of(f"charges:{organization}").lease)


def test_a_run_that_may_be_skipped_ends_with_zero_and_says_so(organization: str) -> None:
    """One line on stderr: cron has something to mail."""
    resource = f"exports:{organization}"

    with fenced_lock(resource), process("export", organization) as run:
        code, [line] = run.end()

    assert code == 0
    assert re.fullmatch(f"Skipped: '{resource}' is held by .*; try again in .* s.", line)
    assert not Job.objects.exists()


def test_a_run_whose_options_name_nothing_ends_with_64() -> None:
    """An option that was not given does not lock "None"."""
    with process("charge") as run:
        code, [line] = run.end()

    assert code == 64
    assert re.match("CommandError: .*'organization' gives no name.*not None", line)


# How a call ends, as code sees it.


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LockHeld("held"), 75),
        (LeaseLost("lost"), 76),
        (StaleToken("stale"), 76),
        (StoreUnavailable("refused:\nconnection refused"), 69),
        (InvalidResource("no name"), 64),
    ],
    ids=repr,
)
def test_an_error_of_the_body_has_its_return_code_too(
    name: str, error: Exception, code: int
) -> None:
    """In one line, and with the error as the cause."""
    with pytest.raises(CommandError) as caught:
        call_command(command_of(raising(error), name))

    assert caught.value.returncode == code
    assert caught.value.__cause__ is error
    assert str(caught.value) == str(error).replace("\n", " ")


@pytest.mark.parametrize("takes_lease", [False, True])
def test_a_call_that_finds_the_lock_held_raises_command_error(name: str, takes_lease: bool) -> None:
    """The error behind it is at hand."""
    with fenced_lock(name), pytest.raises(CommandError) as caught:
        call_command(command_of(never, name, takes_lease=takes_lease))

    assert caught.value.returncode == 75
    assert isinstance(caught.value.__cause__, LockHeld)
    assert caught.value.__cause__.resource == name


def test_a_call_that_is_overtaken_raises_command_error(name: str, client: Any) -> None:
    """Whether the store or the database has found out."""

    def ask_store(lease: Lease) -> None:
        taken_over(fenced_lock(name), client).release()
        lease.ensure_held()

    def ask_database(lease: Lease) -> None:
        taken_over(fenced_lock(name), client).release()
        with lease.atomic():
            never()

    for body, kind in ((ask_store, LeaseLost), (ask_database, StaleToken)):
        with pytest.raises(CommandError) as caught:
            call_command(command_of(body, name, takes_lease=True))

        assert caught.value.returncode == 76
        assert type(caught.value.__cause__) is kind


def test_a_call_without_a_store_raises_command_error(name: str) -> None:
    """The body does not run."""
    with cache_at(f"{NOWHERE}?db=0"), pytest.raises(CommandError) as caught:
        call_command(command_of(never, name))

    assert caught.value.returncode == 69
    assert isinstance(caught.value.__cause__, StoreUnavailable)


def test_other_errors_pass_as_they_are(name: str) -> None:
    """A CommandError keeps its own return code."""
    for error in (KeyError(name), CommandError("no", returncode=3), SystemExit(4)):
        with pytest.raises(type(error)) as caught:
            call_command(command_of(raising(error), name))

        assert caught.value is error


def test_a_call_that_may_be_skipped_returns_after_one_line(name: str) -> None:
    """On the command's own stderr."""
    command = command_of(never, name, on_held="skip")
    written = StringIO()

    with fenced_lock(name):
        call_command(command, stderr=written)

    [line] = written.getvalue().splitlines()
    assert line.startswith(f"Skipped: {name!r} is held by ")


def test_a_callable_says_what_a_refused_call_does(name: str) -> None:
    """What it returns is what handle() returns: a text is written to stdout."""
    command = command_of(never, name, on_held=lambda held: f"{held.resource} is busy")
    written = StringIO()

    with fenced_lock(name):
        call_command(command, stdout=written)

    assert written.getvalue() == f"{name} is busy\n"


def test_a_command_that_does_not_respond_raises_the_plain_errors(name: str) -> None:
    """And it handles no signal."""
    seen = []
    quiet = command_of(lambda: seen.append(handlers()), name, respond=False)

    with fenced_lock(name), pytest.raises(LockHeld):
        call_command(quiet)
    call_command(quiet)

    assert seen == [(signal.SIG_DFL, signal.default_int_handler)]


def test_the_name_is_made_of_the_options(organization: str) -> None:
    """Those that handle() collects as keywords, as commands do."""
    resources = []

    class Command(BaseCommand):
        requires_system_checks = ()

        def add_arguments(self, parser: Any) -> None:
            parser.add_argument("organization")
            parser.add_argument("--month")

        @with_fenced_lock("charges:{organization}:{month}")
        def handle(self, *args: Any, **options: Any) -> None:
            resources.append(current_lease().resource)

    call_command(Command(), organization, month="2026-11")
    call_command(Command(), organization, "--month=11:2026")

    assert resources == [f"charges:{organization}:{month}" for month in ("2026-11", "11%3A2026")]


# Signals.

CODES = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("number", "code"), CODES)
@pytest.mark.parametrize("order", ["", "query"])
def test_a_signal_stops_a_run_in_order(
    organization: str, client: Any, number: signal.Signals, code: int, order: str
) -> None:
    """In Python code or in a query: nothing is written, and the next run may begin at once."""
    resource = f"charges:{organization}"
    with process("charge", organization) as run:
        run.reach("at work")
        if order:
            run.order(order)
            run.reach("asking")
            wait_until(is_asked)
        assert client.exists(keys_of(resource).lease)

        run.send(number)
        run.reach("cleaning up")
        ended = run.end()
        lease = fenced_lock(resource).acquire()

    assert ended == (code, [f"Stopped by {number.name}."])
    assert lease.release()
    assert not Job.objects.exists()


def is_asked() -> bool:
    """Say whether a session of this database sleeps in a query."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event = 'PgSleep'"
        )
        return bool(cursor.fetchone()[0])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), CODES[1]])
def test_a_second_signal_ends_a_run_whose_cleaning_up_hangs(
    organization: str, number: signal.Signals, code: int
) -> None:
    """SIGTERM as it does without a handler; Ctrl-C as another KeyboardInterrupt."""
    with process("charge", organization) as run:
        run.reach("at work")
        run.send(number)
        run.reach("cleaning up")

        run.send(number)
        ended, _ = run.end()

    assert ended == code
    assert not Job.objects.exists()


@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
@pytest.mark.parametrize(("number", "code"), CODES)
def test_a_signal_while_acquiring_never_leaves_a_lease(
    number: signal.Signals, code: int, held: bool, organization: str
) -> None:
    """At any moment of the first 20 ms, a hundred times; and while it waits for the lock."""
    rounds = 20 if held else 100
    arguments = [number.name, f"--rounds={rounds}", *(["--held"] if held else [])]
    with process("be_interrupted", *arguments) as run:
        assert run.end() == (0, [])

    end = "KeyboardInterrupt" if number is signal.SIGINT else f"SystemExit({code})"
    assert json.loads(run.output) == {end: rounds}


def test_ctrl_c_in_a_call_stays_a_keyboard_interrupt(name: str, client: Any) -> None:
    """Only the command line makes a return code of it."""
    command = command_of(lambda: signal.raise_signal(signal.SIGINT), name)

    with pytest.raises(KeyboardInterrupt):
        call_command(command)

    assert not client.exists(keys_of(name).lease)


def test_sigterm_in_a_call_ends_the_process_in_order(name: str, client: Any) -> None:
    """Every handler up the stack may do its part, for it is an exception."""

    def body() -> None:
        Job.objects.create(note=name)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        call_command(command_of(body, name))

    assert caught.value.code == 143
    assert not client.exists(keys_of(name).lease)
    assert not Job.objects.exists()


def test_sigterm_in_a_command_that_a_command_calls_ends_both(name: str, client: Any) -> None:
    """It is said once."""
    inner = command_of(lambda: signal.raise_signal(signal.SIGTERM), f"{name}:inner")
    outer = command_of(lambda lease: call_command(inner), f"{name}:outer", takes_lease=True)

    with pytest.raises(SystemExit) as caught:
        call_command(outer)

    assert caught.value.code == 143
    assert outer.stderr.getvalue() + inner.stderr.getvalue() == "Stopped by SIGTERM.\n"
    assert not client.exists(keys_of(f"{name}:outer").lease, keys_of(f"{name}:inner").lease)


@pytest.mark.parametrize(
    "error",
    [None, KeyError("x"), LockHeld("x"), SystemExit(3), KeyboardInterrupt(), signal.SIGTERM],
    ids=repr,
)
def test_handlers_are_restored_however_the_body_ends(name: str, error: Any) -> None:
    """While it runs SIGTERM has a handler; SIGINT keeps its own."""
    seen = []

    def body() -> None:
        seen.append(handlers())
        if error is signal.SIGTERM:
            signal.raise_signal(error)
        elif error is not None:
            raise error

    before = handlers()
    try:
        call_command(command_of(body, name))
    except BaseException as raised:  # noqa: BLE001 - what it raises is tested elsewhere
        seen.append(type(raised))

    assert handlers() == before == (signal.SIG_DFL, signal.default_int_handler)
    assert seen[0][0] not in before
    assert seen[0][1] is before[1]
    assert len(seen) == (1 if error is None else 2)


def test_handlers_are_restored_after_a_refusal(name: str) -> None:
    """The lock is held, the store is away, or nothing is named."""
    before = handlers()

    with fenced_lock(name), pytest.raises(CommandError):
        call_command(command_of(never, name))
    with cache_at(f"{NOWHERE}?db=0"), pytest.raises(CommandError):
        call_command(command_of(never, name))
    with pytest.raises(CommandError):
        call_command(command_of(never, "name:{missing}"))

    assert handlers() == before


def handlers() -> tuple[Any, Any]:
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)


def test_a_handler_of_the_projects_own_is_left_alone(name: str) -> None:
    """It is called, and the body goes on."""
    called = []

    def own(number: int, frame: FrameType | None) -> None:
        called.append(number)

    def body() -> None:
        signal.raise_signal(signal.SIGTERM)
        called.append("went on")

    with handler(signal.SIGTERM, own):
        call_command(command_of(body, name))
        assert signal.getsignal(signal.SIGTERM) is own

    assert called == [signal.SIGTERM, "went on"]


def test_a_handler_that_the_body_installs_is_left_alone(name: str) -> None:
    """It is the body's own business."""

    def own(number: int, frame: FrameType | None) -> None: ...

    call_command(command_of(lambda: str(signal.signal(signal.SIGTERM, own))[:0], name))

    assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_is_ignored_stays_ignored(name: str, number: signal.Signals) -> None:
    """As under nohup, or where a supervisor has said so."""
    ran = []

    def body() -> None:
        signal.raise_signal(number)
        ran.append(signal.getsignal(number))

    with handler(number, signal.SIG_IGN):
        call_command(command_of(body, name))
        assert signal.getsignal(number) is signal.SIG_IGN

    assert ran == [signal.SIG_IGN]


def test_a_command_in_another_thread_handles_no_signal(name: str) -> None:
    """Python lets only the main thread do so. The command works."""
    seen = []

    [result] = in_threads(lambda: call_command(command_of(lambda: seen.append(handlers()), name)))

    assert result is None
    assert seen == [(signal.SIG_DFL, signal.default_int_handler)]


# Interrupts at every line.


class Interrupt:
    """A trace function that raises KeyboardInterrupt at a given line of the acquisition."""

    def __init__(self, step: int) -> None:
        self._left = step
        self.place: tuple[str, int] | None = None
        self.holding = False  # the body has begun

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        module = frame.f_globals.get("__name__", "")
        if self.holding or not (module == "contextlib" or module.startswith("django_fencing.")):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.place = f"{module}.{frame.f_code.co_qualname}", frame.f_lineno
                raise KeyboardInterrupt
        return self


def a_lock(name: str, interrupt: Interrupt) -> None:
    with fenced_lock(name):
        interrupt.holding = True


def a_fenced_transaction(name: str, interrupt: Interrupt) -> None:
    with fenced_atomic(name):
        interrupt.holding = True


def a_decorated_function(name: str, interrupt: Interrupt) -> None:
    @with_fenced_lock(name)
    def work() -> None:
        interrupt.holding = True

    work()


def a_decorated_function_with_a_lease(name: str, interrupt: Interrupt) -> None:
    @with_fenced_lock(name)
    def work(*, lease: Lease) -> None:
        interrupt.holding = True

    work()


WAYS = [
    a_lock,
    a_fenced_transaction,
    a_decorated_function,
    a_decorated_function_with_a_lease,
]


def interrupted_everywhere(
    way: Callable[[str, Interrupt], None], name: str
) -> Iterator[tuple[str, tuple[str, int]]]:
    """Interrupt an acquisition at its first line, then another one at its second, and so on."""
    way(f"{name}:0", Interrupt(0))  # everything is connected and loaded
    for step in itertools.count(1):
        interrupt = Interrupt(step)
        resource = f"{name}:{step}"
        former = sys.gettrace()
        sys.settrace(interrupt)
        try:
            way(resource, interrupt)
        except KeyboardInterrupt:
            sys.settrace(former)
        else:
            return
        finally:
            sys.settrace(former)
        assert interrupt.place is not None
        yield resource, interrupt.place


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_at_any_line_of_the_acquisition_leaves_no_lease(
    way: Callable[[str, Interrupt], None], name: str, client: Any
) -> None:
    """For whatever stops a body in Python: Ctrl-C, and SIGTERM in a command."""
    steps, left = 0, []

    for resource, place in interrupted_everywhere(way, name):
        steps += 1
        if client.exists(keys_of(resource).lease):
            gc.collect()
            if client.exists(keys_of(resource).lease):
                left.append(place)
        if connection.in_atomic_block:
            forget_connection()

    assert steps > 100
    assert left == []


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_at_any_line_of_the_acquisition_leaves_no_transaction_open(
    way: Callable[[str, Interrupt], None], name: str
) -> None:
    """It would hold up every successor, and be in the way of all else in this thread."""
    left = []

    for _, place in interrupted_everywhere(way, name):
        if connection.in_atomic_block:
            left.append(place)
            forget_connection()

    assert left == []


def forget_connection() -> None:
    """Let this thread have a connection that is in order."""
    connection.connection.close()
    del connections["default"]


def test_an_interrupt_between_a_command_and_its_reply_mixes_up_no_replies(
    name: str, private_redis: Any
) -> None:
    """A connection on which a reply is on its way is not used again."""
    with fenced_lock(name):  # everything is connected and loaded
        pass
    read = redis.Redis.parse_response
    interrupts = iter([KeyboardInterrupt])

    def parse_response(self: Any, *args: Any, **options: Any) -> Any:
        if interrupt := next(interrupts, None):
            raise interrupt
        return read(self, *args, **options)

    private_redis.client_pause(100)  # the reply comes later than the next command is sent
    with (
        mock.patch.object(redis.Redis, "parse_response", parse_response),
        pytest.raises(KeyboardInterrupt),
        fenced_lock(name),
    ):
        never()

    assert not private_redis.exists(keys_of(name).lease)
    with fenced_lock(name) as lease:
        lease.ensure_held()
