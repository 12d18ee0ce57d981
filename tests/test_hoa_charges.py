"""The example's monthly charges: once per month, whatever the replicas do."""

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from datetime import date
from decimal import Decimal
from io import StringIO
from typing import Any
from unittest import mock

import pytest
from config.settings import seconds_from
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import DatabaseError
from django.db.models import ProtectedError
from hoa.charges import (
    Outcome,
    amounts_due,
    charge_month,
    generate_monthly_charges,
    lock_name,
    work_key,
    write_run,
)
from hoa.demo.guards import VARIANTS
from hoa.meters import MeterService, MetersUnavailable, read_meters, reading
from hoa.models import Charge, MonthlyChargeRun, Organization
from hoa.samples import sample_organization

from django_fencing.exceptions import (
    LeaseLost,
    LockHeld,
    StaleToken,
    StoreUnavailable,
    UnfencedWrite,
)
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.once import once
from tests.helpers import SECONDS, in_background, in_threads

pytestmark = pytest.mark.django_db(transaction=True)

MONTH = date(2026, 11, 1)


@pytest.fixture
def organization(transactional_db: None) -> Organization:
    """Return an organization with three units."""
    return sample_organization(f"test {uuid.uuid4().hex}")


@pytest.fixture
def meters(settings: Any) -> Iterator[MeterService]:
    """Yield the service that the example asks; it answers at once."""
    with MeterService() as service:
        settings.METERS_URL = service.url
        yield service


@pytest.fixture
def held_meters(settings: Any) -> Iterator[MeterService]:
    """Yield the service that the example asks; it answers when it is told to."""
    with MeterService(hold=True) as service:
        settings.METERS_URL = service.url
        yield service


def test_each_unit_is_charged_its_fee_and_its_water(
    organization: Organization, meters: MeterService
) -> None:
    """One run with its total, one charge per unit, and each balance is raised by its charge."""
    organization.units.filter(label="A1").update(balance=Decimal("-7.00"))

    result = generate_monthly_charges(organization, MONTH)

    assert result.outcome is Outcome.CHARGED
    assert result.run == MonthlyChargeRun.objects.get(organization=organization)
    units = {unit.label: unit for unit in organization.units.all()}
    charges = {charge.unit.label: charge.amount for charge in result.run.charges.all()}
    assert charges == {
        label: unit.fee + reading(label, "2026-11") * Decimal("2.50")
        for label, unit in units.items()
    }
    assert units["A1"].balance == charges["A1"] - 7
    assert units["B1"].balance == charges["B1"]
    assert result.run.total == sum(charges.values())


def test_the_run_keeps_the_token_of_its_lease(
    organization: Organization, meters: MeterService
) -> None:
    """It is the one that the fence has registered."""
    run = generate_monthly_charges(organization, MONTH).run

    with fenced_lock(lock_name(organization)) as lease:
        assert run.token == lease.token - 1


def test_a_month_is_charged_once_and_its_run_is_returned(
    organization: Organization, meters: MeterService
) -> None:
    """Any day stands for its month; the next month is another one."""
    first = generate_monthly_charges(organization, MONTH)
    second = generate_monthly_charges(organization, date(2026, 11, 30))
    other = generate_monthly_charges(organization, date(2026, 12, 1))

    assert (second.outcome, second.run) == (Outcome.ALREADY_RUN, first.run)
    assert other.outcome is Outcome.CHARGED
    assert organization.runs.count() == 2


def test_a_held_lock_is_refused_and_nothing_is_written(
    organization: Organization, held_meters: MeterService
) -> None:
    """A replica that comes while another asks the meters is told so; the other one charges."""

    def charge() -> Any:
        return generate_monthly_charges(organization, MONTH)

    with in_background(charge) as first:
        held_meters.arrived(1)
        [second] = in_threads(charge)
        runs_meanwhile = organization.runs.count()
        held_meters.let_go(1)

    assert isinstance(second, LockHeld)
    assert second.resource == lock_name(organization)
    assert runs_meanwhile == 0
    assert first.result().outcome is Outcome.CHARGED


def test_organizations_do_not_wait_for_each_other(
    organization: Organization, held_meters: MeterService
) -> None:
    """The lock's name has the organization's key: one is charged while another is at work."""
    other = sample_organization(f"{organization.name} again")
    with in_background(lambda: generate_monthly_charges(organization, MONTH)) as first:
        held_meters.arrived(1)
        held_meters.let_go(2)
        second = generate_monthly_charges(other, MONTH)
        held_meters.let_go(1)

    assert first.result().outcome is second.outcome is Outcome.CHARGED


def test_meters_that_cannot_be_read_leave_nothing_behind(
    organization: Organization, meters: MeterService, settings: Any
) -> None:
    """Nothing is written, and the lock is free for the next attempt."""
    with MeterService() as broken:
        settings.METERS_URL = broken.url
    with pytest.raises(MetersUnavailable, match=broken.url):
        generate_monthly_charges(organization, MONTH)
    written = Charge.objects.count() + MonthlyChargeRun.objects.count()

    settings.METERS_URL = meters.url
    result = generate_monthly_charges(organization, MONTH)

    assert written == 0
    assert result.outcome is Outcome.CHARGED


@pytest.mark.parametrize("answer", [{}, {"A1": "a lot"}, None, ["A1"]])
def test_an_answer_that_makes_no_sense_is_no_reading(meters: MeterService, answer: Any) -> None:
    """A missing meter, or what is no number, is an error and never a zero."""
    senseless = mock.patch.object(meters, "answer", return_value=answer)

    with senseless, pytest.raises(MetersUnavailable):
        read_meters(["A1"], MONTH)


def test_a_paused_replica_cannot_charge_after_its_successor_has_begun(
    organization: Organization, held_meters: MeterService, client: Any
) -> None:
    """The textbook hole: both found the month not charged, and the paused one writes first."""
    paused, successor = overtaken("fenced", organization, held_meters, client)

    assert isinstance(paused, StaleToken)
    assert successor.outcome is Outcome.CHARGED
    assert times_charged(organization) == 1


@pytest.mark.parametrize("guard", ["plain", "textbook"])
def test_without_the_fence_the_same_replicas_charge_twice(
    guard: str, organization: Organization, held_meters: MeterService, client: Any
) -> None:
    """The twin: the same work, with a plain lock and with a token compared when written."""
    _, successor = overtaken(guard, organization, held_meters, client)

    assert successor.outcome is Outcome.CHARGED
    assert times_charged(organization) == 2


def test_a_paused_replica_cannot_charge_after_its_successor_has_ended(
    organization: Organization, held_meters: MeterService, client: Any
) -> None:
    """The other order: the successor has written and released when the paused one goes on."""
    with in_background(lambda: generate_monthly_charges(organization, MONTH)) as paused:
        held_meters.arrived(1)
        client.delete(VARIANTS["fenced"].lock_key(organization))
        held_meters.let_go(2)
        successor = generate_monthly_charges(organization, MONTH)
        held_meters.let_go(1)

    assert isinstance(paused.exception(), StaleToken)
    assert successor.outcome is Outcome.CHARGED
    assert times_charged(organization) == 1


def test_a_late_second_run_gets_the_result_of_the_first(
    organization: Organization, meters: MeterService
) -> None:
    """Also by another way than the lock of charges, as from a script: once() alone decides."""
    first = generate_monthly_charges(organization, MONTH)
    with fenced_lock("some script") as lease:
        late = charge_month(organization, MONTH, lease)
        with lease.atomic():
            latest = once(work_key(organization, MONTH), pytest.fail)

    assert (late.outcome, late.run) == (Outcome.ALREADY_RUN, first.run)
    assert latest["run"] == first.run.pk
    assert times_charged(organization) == 1


def test_without_once_a_late_second_run_charges_again(
    organization: Organization, meters: MeterService
) -> None:
    """The twin: the same writes under the same lock, whose fence accepts both."""
    for _ in range(2):
        with fenced_lock(lock_name(organization)) as lease:
            amounts = amounts_due(organization, MONTH, lease.token)
            with lease.atomic():
                write_run(organization, MONTH, amounts, lease.token)

    assert times_charged(organization) == 2


def test_two_locks_do_not_charge_a_month_twice(
    organization: Organization, held_meters: MeterService
) -> None:
    """Both have found it not charged, and neither is overtaken: the second gets the first's run."""

    def charge(name: str) -> Any:
        with fenced_lock(name) as lease:
            return charge_month(organization, MONTH, lease)

    with in_background(lambda: charge("a script")) as first:
        held_meters.arrived(1)
        with in_background(lambda: charge("another script")) as second:
            held_meters.arrived(2)
            held_meters.let_go(1)
            held_meters.let_go(2)

    outcomes = {first.result().outcome, second.result().outcome}
    assert outcomes == {Outcome.CHARGED, Outcome.ALREADY_RUN}
    assert first.result().run == second.result().run
    assert times_charged(organization) == 1


def test_a_run_is_written_under_its_own_lease_only(
    organization: Organization, meters: MeterService
) -> None:
    """The table is protected, and so is its organization."""
    run = generate_monthly_charges(organization, MONTH).run

    with pytest.raises(UnfencedWrite):
        MonthlyChargeRun.objects.filter(pk=run.pk).update(total=0)
    with pytest.raises(ProtectedError):
        organization.delete()
    with fenced_atomic(run) as locked:
        locked.total = 0
        locked.save()

    assert organization.runs.get().total == 0


def test_the_command_says_in_one_line_what_it_came_to(
    organization: Organization, held_meters: MeterService
) -> None:
    """Charged, nothing to do, charged already: all of them are a success."""
    arguments = ("generate_monthly_charges", organization.pk, "2026-11")
    errors = StringIO()
    with in_background(lambda: output_of(*arguments)) as charging:
        held_meters.arrived(1)
        [held] = in_threads(lambda: output_of(*arguments, stderr=errors))
        held_meters.let_go(1)
    again = output_of(*arguments)

    run = organization.runs.get()
    assert charging.result() == f"{run} is charged: {run.total} in all, token {run.token}.\n"
    assert held == ""
    [skipped] = errors.getvalue().splitlines()
    assert skipped.startswith(f"Skipped: '{lock_name(organization)}' is held by ")
    assert again == f"{run} was charged already: {run.total} in all.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("0", "2026-11"), "There is no organization 0."), (("1", "11/2026"), "looks like 2026-11")],
)
def test_the_command_refuses_what_it_cannot_charge(
    arguments: tuple[str, str], message: str
) -> None:
    """An unknown organization and a month that is none."""
    with pytest.raises(CommandError, match=message):
        output_of("generate_monthly_charges", *arguments)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LockHeld("held"), 75),
        (LeaseLost("lost"), 76),
        (StaleToken("stale"), 76),
        (StoreUnavailable("refused:\nconnection refused"), 69),
        (MetersUnavailable("off"), 1),
        (DatabaseError("connection lost\nat once"), 1),
    ],
)
def test_an_error_is_one_line_and_a_return_code(
    organization: Organization, error: Exception, code: int
) -> None:
    """So that cron and scripts can tell them apart. To be held later than at first is no skip."""
    command = "hoa.management.commands.generate_monthly_charges"
    with (
        mock.patch(f"{command}.charge_month", side_effect=error),
        pytest.raises(CommandError) as caught,
    ):
        output_of("generate_monthly_charges", organization.pk, "2026-11")

    assert caught.value.returncode == code
    assert str(caught.value) == str(error).replace("\n", " ")


def test_the_length_of_a_lease_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may say it; anything else is an error that names the variable."""
    lengths = []
    for value in ("", "4.5"):
        monkeypatch.setenv("FENCING_TTL", value)
        lengths.append(seconds_from("FENCING_TTL", 30))
    monkeypatch.setenv("FENCING_TTL", "soon")

    assert lengths == [30, 4.5]
    with pytest.raises(ImproperlyConfigured, match="FENCING_TTL must be a number of seconds"):
        seconds_from("FENCING_TTL", 30)


def overtaken(
    guard: str, organization: Organization, meters: MeterService, client: Any
) -> tuple[Any, Any]:
    """
    Let two replicas charge in the demo's order, and return what each came to.

    The first asks the meters and its lock runs out; the second asks too; the first gets its
    answer and writes; then the second does.
    """
    variant = VARIANTS[guard]

    def charge() -> Any:
        return variant.charge(organization, MONTH, ttl=SECONDS)

    with in_background(charge) as first:
        meters.arrived(1)
        assert client.delete(variant.lock_key(organization)) == 1
        with in_background(charge) as second:
            meters.arrived(2)
            meters.let_go(1)
            wait([first], SECONDS)
            meters.let_go(2)
    return outcome_of(first.result), outcome_of(second.result)


def outcome_of(result: Callable[[], Any]) -> Any:
    try:
        return result()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return error


def times_charged(organization: Organization) -> int:
    """Return how many runs there are, after a look whether the money agrees."""
    runs = organization.runs.count()
    for unit in organization.units.all():
        amounts = [charge.amount for charge in unit.charges.all()]
        assert len(amounts) == runs
        assert unit.balance == sum(amounts)
    return runs


def output_of(*command: Any, **options: Any) -> str:
    written = StringIO()
    call_command(*command, stdout=written, **options)
    return written.getvalue()
