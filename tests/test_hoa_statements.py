"""The example's long command: chunk after chunk under one lease, and resumed where it stopped."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from hoa.management.commands import export_statements
from hoa.models import Charge, MonthlyChargeRun, Organization, Statement
from hoa.statements import statements_lock, units_without_statement, write_statements

from django_fencing.exceptions import LeaseLost
from django_fencing.locks import fenced_lock
from tests.helpers import expire, held_elsewhere, in_threads, keys_of, taken_over

pytestmark = pytest.mark.django_db(transaction=True)

MANAGE = Path(__file__).parent.parent / "example_project" / "manage.py"
MONTH = date(2026, 11, 1)
UNITS = 7


@pytest.fixture
def organization(transactional_db: None) -> Organization:
    """Return an organization with some units, one of which was charged."""
    organization = Organization.objects.create(name=f"test {uuid.uuid4().hex}")
    for number in range(UNITS):
        organization.units.create(label=f"A{number}", fee=Decimal(40), balance=number)
    run = MonthlyChargeRun.objects.create(organization=organization, month=MONTH, total=42)
    Charge.objects.create(run=run, unit=organization.units.get(label="A0"), amount=42)
    return organization


def export(organization: Organization, **options: Any) -> list[str]:
    """Run the command, and return its lines."""
    out = StringIO()
    call_command(
        "export_statements", str(organization.pk), "2026-11", chunk=2, stdout=out, **options
    )
    return out.getvalue().splitlines()


@contextmanager
def after_chunk(number: int, action: Any) -> Iterator[None]:
    """Run `action` after so many chunks."""
    chunks = iter(range(1, 100))

    def sleep(seconds: float) -> None:
        if next(chunks) == number:
            action()

    with mock.patch.object(export_statements, "time", mock.Mock(sleep=sleep)):
        yield


def assert_each_has_one(organization: Organization) -> None:
    """Check that each unit has one statement."""
    written = Statement.objects.filter(unit__organization=organization, month=MONTH)
    assert written.count() == UNITS
    assert not units_without_statement(organization, MONTH)


@pytest.mark.parametrize("renew", [False, True])
def test_each_unit_gets_its_statement_and_the_progress_is_shown(
    organization: Organization, renew: bool, client: Any
) -> None:
    """A second run finds nothing to do."""
    lines = export(organization, renew=renew)

    assert lines == [f"{done} of 7 statements, token 1" for done in (2, 4, 6, 7)]
    assert_each_has_one(organization)
    charged = Statement.objects.get(unit__label="A0", unit__organization=organization)
    assert charged.text.splitlines()[1:] == ["November 2026: 42.00", "Balance: 0.00"]
    assert charged.token == 1
    assert export(organization, renew=renew) == ["There is nothing left to write."]
    assert not client.exists(keys_of(statements_lock(organization, MONTH)).lease)


def export_as_process(organization: Organization, *arguments: str) -> list[str]:
    command = [sys.executable, MANAGE, "export_statements", str(organization.pk), "2026-11"]
    name = connection.settings_dict["NAME"]
    base = os.environ["DATABASE_URL"].rpartition("/")[0]
    ran = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "DATABASE_URL": f"{base}/{name}", "FENCING_TTL": "0.9"}
        | {"DJANGO_SETTINGS_MODULE": "config.settings"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ran.stdout.splitlines()


@pytest.mark.parametrize("renew", [False, True])
def test_chunks_may_take_longer_in_all_than_the_lease_lasts(
    organization: Organization, renew: bool
) -> None:
    """Each of them is shorter, or a thread renews. The process is a real one."""
    pause = "1.2" if renew else "0.4"
    options = ["--chunk", "3", "--pause", pause, *(["--renew"] if renew else [])]

    lines = export_as_process(organization, *options)

    assert lines[-1].startswith("7 of 7 statements")
    assert_each_has_one(organization)


def test_a_chunk_that_outlasts_its_lease_stops_the_job(organization: Organization) -> None:
    """The twin of the renewed one: extend() tells that the lease is over."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        export_as_process(organization, "--chunk", "3", "--pause", "1.2")

    assert caught.value.returncode == 76
    assert "3 of 7 statements" in caught.value.stdout
    assert len(caught.value.stderr.splitlines()) == 1


@pytest.mark.parametrize("renew", [False, True])
def test_a_job_that_was_overtaken_stops_and_is_resumed(
    organization: Organization, renew: bool, client: Any
) -> None:
    """What it had written stands, and nothing is written twice."""
    lock = fenced_lock(statements_lock(organization, MONTH))

    def overtake() -> None:
        assert in_threads(lambda: taken_over(lock, client).release()) == [True]

    with after_chunk(2, overtake), pytest.raises(CommandError) as caught:
        export(organization, renew=renew)

    assert caught.value.returncode == 76
    assert len(units_without_statement(organization, MONTH)) == UNITS - 4
    assert export(organization, renew=renew) == [
        "2 of 3 statements, token 3",
        "3 of 3 statements, token 3",
    ]
    assert_each_has_one(organization)


def test_two_jobs_at_once_write_each_statement_once(
    organization: Organization, client: Any
) -> None:
    """One has stood still in a chunk, and the other has taken over: the late chunk is refused."""
    name = statements_lock(organization, MONTH)
    with fenced_lock(name) as paused:
        chunks = write_statements(organization, MONTH, paused, 2)
        assert next(chunks) == 2
        expire(client, name)
        assert in_threads(lambda: export(organization)) == [
            [f"{done} of 5 statements, token 2" for done in (2, 4, 5)]
        ]
        with pytest.raises(LeaseLost):
            next(chunks)

    assert_each_has_one(organization)


def test_a_second_command_is_told_to_come_again(organization: Organization) -> None:
    """75, and nothing is written."""
    with (
        held_elsewhere(statements_lock(organization, MONTH)),
        pytest.raises(CommandError) as caught,
    ):
        export(organization)

    assert caught.value.returncode == 75
    assert len(units_without_statement(organization, MONTH)) == UNITS


def test_an_organization_that_does_not_exist_is_one_line(transactional_db: None) -> None:
    """And no lock is taken."""
    with pytest.raises(CommandError, match="There is no organization 0"):
        call_command("export_statements", "0", "2026-11")
