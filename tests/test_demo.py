"""manage.py demo: it shows what it says, and leaves nothing running."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import IO, Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from hoa.demo.guards import VARIANTS
from hoa.demo.replicas import Unexpected
from hoa.demo.verdict import Observed
from hoa.management.commands.demo import Command
from hoa.models import Organization

from tests.helpers import wait_until

MANAGE = Path(__file__).parent.parent / "example_project" / "manage.py"

DUE = Decimal("100.00")

# How each guard has to end.
TWICE = Observed(
    runs=2,
    charges=6,
    charged=2 * DUE,
    balances=2 * DUE,
    due=DUE,
    endings={"A": "LockNotOwnedError", "B": "charged"},
)
ONCE = Observed(
    runs=1,
    charges=3,
    charged=DUE,
    balances=DUE,
    due=DUE,
    endings={"A": "StaleToken", "B": "charged"},
)


@pytest.fixture
def environ(transactional_db: None) -> Iterator[dict[str, str]]:
    """Yield an environment with a database of this test's own, and the Redis of all tests."""
    name = f"fencing_demo_{uuid.uuid4().hex}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
    url = urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{name}").geturl()
    others = {key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"}
    yield {**others, "DATABASE_URL": url, "PYTHONPATH": os.pathsep.join(sys.path)}
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_the_demo_charges_twice_twice_and_once_with_the_fence(environ: dict[str, str]) -> None:
    """Within 30 seconds, and what the database held before is all that it holds afterwards."""
    run(environ, "migrate")
    run(environ, "seed")
    tables = ("dumpdata", "hoa", "django_fencing")
    before = run(environ, *tables)

    began = time.monotonic()
    demo = run(environ, "demo")
    took = time.monotonic() - began

    _, verdict = demo.split("Verdict")
    assert re.findall(r"charged \w+", verdict) == ["charged twice", "charged twice", "charged once"]
    assert took < 30
    assert run(environ, *tables) == before


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_an_interrupted_demo_leaves_no_replica(
    environ: dict[str, str], number: signal.Signals, code: int
) -> None:
    """Not even the one that is paused at that moment."""
    demo = subprocess.Popen(
        [sys.executable, MANAGE, "demo", "--ttl=20"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with demo:
        replicas = replicas_at_the_pause(demo.stdout)
        running = [pid for pid in replicas if is_running(pid)]
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=20)

    assert len(running) == 2
    assert demo.returncode == code
    assert "Traceback" not in errors
    wait_until(lambda: not any(is_running(pid) for pid in replicas))


@pytest.mark.parametrize(
    ("guard", "found"),
    [
        ("plain", ONCE),
        ("textbook", replace(TWICE, endings={"A": "RefusedByToken", "B": "charged"})),
        ("fenced", TWICE),
        ("fenced", replace(ONCE, endings={"A": "held", "B": "charged"})),
        ("fenced", replace(ONCE, balances=2 * DUE)),
        ("fenced", replace(ONCE, charged=DUE / 2, balances=DUE / 2)),
    ],
)
def test_a_demo_that_ends_otherwise_fails(guard: str, found: Observed) -> None:
    """Whatever was to be shown and was not: the verdict is an error that names the guard."""
    observed = {"plain": TWICE, "textbook": TWICE, "fenced": ONCE, guard: found}

    with pytest.raises(CommandError, match=guard) as caught:
        Command(stdout=StringIO()).conclude(observed)

    assert caught.value.returncode == 1


def test_a_demo_that_ends_as_it_has_to_does_not_fail() -> None:
    """The verdict says how often each guard let the month be charged."""
    written = StringIO()

    Command(stdout=written).conclude({"plain": TWICE, "textbook": TWICE, "fenced": ONCE})

    for variant in VARIANTS.values():
        assert variant.title in written.getvalue()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("error", [Unexpected("It hangs."), TimeoutError("It hangs.")])
def test_a_demo_that_breaks_off_fails(error: Exception) -> None:
    """It says under which guard, and removes its organization."""
    play = mock.patch("hoa.management.commands.demo.play", side_effect=error)

    with play, pytest.raises(CommandError, match="broke off under 'plain': It hangs."):
        call_command("demo", stdout=StringIO())

    assert not Organization.objects.exists()


@pytest.mark.parametrize("missing", ["DATABASE_URL", "REDIS_URL"])
def test_without_servers_every_other_command_says_how_to_get_them(missing: str) -> None:
    """One line that names both ways, and no traceback."""
    environ = {"DATABASE_URL": "sqlite://:memory:", "REDIS_URL": "redis://", missing: ""}

    ended = manage({**environ, "PYTHONPATH": os.pathsep.join(sys.path)}, "seed")

    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"{missing} is not set")
    assert "make demo" in line
    assert "python example_project/services.py" in line


@pytest.mark.parametrize("command", ["check", "makemigrations --check --dry-run"])
def test_the_project_is_in_order(command: str) -> None:
    """The admin with its views passes Django's checks, and no migration is missing."""
    environ = {"DATABASE_URL": "sqlite://:memory:", "REDIS_URL": "redis://"}

    ended = manage({**environ, "PYTHONPATH": os.pathsep.join(sys.path)}, *command.split())

    assert (ended.returncode, ended.stderr) == (0, "")


def run(environ: dict[str, str], *command: str) -> str:
    """Return what the command writes to its output; it has to succeed and to warn of nothing."""
    ended = manage(environ, *command)
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    return ended.stdout


def manage(environ: dict[str, str], *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", MANAGE, *command],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def replicas_at_the_pause(output: IO[Any] | None) -> set[int]:
    """Read the timeline until a replica is paused, and return the process ids it names."""
    assert output is not None
    seen = ""
    while "SIGSTOP" not in seen:
        line = output.readline()
        assert line, f"The demo ended early:\n{seen}"
        seen += line
    return {int(pid) for pid in re.findall(r"\(pid (\d+)\)", seen)}


def is_running(pid: int) -> bool:
    """Tell if the process runs or is paused. A zombie does neither (proc_pid_stat(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
