"""The example's pages and JSON endpoints: login, both operations, and what a loser is told."""

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from hoa.charges import lock_name
from hoa.meters import MeterService
from hoa.models import Complaint, Organization, Vendor, VendorAssignment, VendorContract
from hoa.samples import sample_organization

from django_fencing.exceptions import LeaseLost
from django_fencing.locks import fenced_atomic, fenced_lock
from tests.helpers import cache_at, expire, in_background, in_threads, statements

pytestmark = pytest.mark.django_db(transaction=True)

NOBODY_LISTENS = "redis://127.0.0.1:1?db=0"
PAGE = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}  # as browsers ask


@pytest.fixture
def organization(transactional_db: None) -> Organization:
    """Return an organization with three units."""
    return sample_organization(f"test {uuid.uuid4().hex}")


@pytest.fixture
def complaint(organization: Organization) -> Complaint:
    """Return an open complaint."""
    return Complaint.objects.create(organization=organization, text="It drips.")


@pytest.fixture
def vendor(organization: Organization) -> Vendor:
    """Return a vendor with a contract."""
    vendor = Vendor.objects.create(name="Ace Plumbing")
    today = timezone.localdate()
    VendorContract.objects.create(
        vendor=vendor,
        organization=organization,
        starts_on=today - timedelta(days=30),
        ends_on=today + timedelta(days=30),
    )
    return vendor


@pytest.fixture
def stranger(transactional_db: None) -> Vendor:
    """Return a vendor without a contract."""
    return Vendor.objects.create(name="Swift Lifts")


@pytest.fixture
def user(transactional_db: None) -> User:
    """Return a user who may log in."""
    return User.objects.create_user("manager", None, "manager")


@pytest.fixture
def browser(user: User) -> Client:
    """Return a browser of the user, who is logged in."""
    browser = Client(headers=PAGE)
    browser.force_login(user)
    return browser


@pytest.fixture
def script(user: User) -> Client:
    """Return a client of the JSON endpoints that is logged in."""
    script = Client()
    script.force_login(user)
    return script


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


def page_of(row: Organization | Complaint) -> str:
    kind = "complaints" if isinstance(row, Complaint) else "organizations"
    return f"/{kind}/{row.pk}/"


def api_of(row: Organization | Complaint) -> str:
    return f"/api{page_of(row)}{'assignment' if isinstance(row, Complaint) else 'charges'}/"


def send(script: Client, row: Organization | Complaint, **values: object) -> Any:
    """Post the values as JSON."""
    return script.post(api_of(row), values, content_type="application/json")


def code_of(response: Any) -> tuple[int, str]:
    """Return the status and the code of a problem, after a look at its form."""
    assert response["Content-Type"] == "application/problem+json"
    said = response.json()
    assert said["status"] == response.status_code
    assert said.keys() == {"type", "title", "status", "detail", "code"}
    return response.status_code, said["code"]


def text_after(response: Any, browser: Client) -> str:
    """Return the page to which the response to a POST leads."""
    assert response.status_code == 302
    page = browser.get(response.url)
    assert page.status_code == 200
    return str(page.content.decode())


# Login


def test_every_page_asks_for_a_login_and_comes_back(
    complaint: Complaint, vendor: Vendor, user: User
) -> None:
    """Nothing is shown and nothing is done before."""
    browser = Client(headers=PAGE)
    urls = ["/", page_of(complaint), page_of(complaint.organization)]

    asked = [browser.get(url).url for url in urls]
    posted = browser.post(page_of(complaint), {"vendor": vendor.pk})
    refused = browser.post(posted.url, {"username": "manager", "password": "wrong"})
    entered = browser.post(
        "/login/",
        {"username": "manager", "password": "manager", "next": page_of(complaint)},
    )

    assert asked == [f"/login/?next={url}" for url in urls]
    assert posted.url == f"/login/?next={page_of(complaint)}"
    assert "correct username and password" in refused.content.decode()
    assert "It drips." in text_after(entered, browser)
    assert not complaint.assignments.exists()


def test_after_logging_out_the_pages_are_closed(browser: Client) -> None:
    """It is a POST, as it changes something."""
    out = browser.post("/logout/")

    assert out.url == "/login/"
    assert browser.get("/").url == "/login/?next=/"


def test_a_script_without_a_login_is_told_so(complaint: Complaint, vendor: Vendor) -> None:
    """401 instead of a page, whatever it asks for."""
    answers = [
        Client().get(api_of(complaint)),
        Client().get(api_of(complaint.organization)),
        send(Client(), complaint, vendor=vendor.pk),
        send(Client(), complaint.organization, month="2026-11"),
    ]

    assert {code_of(answer) for answer in answers} == {(401, "login-required")}
    assert not complaint.assignments.exists()


@pytest.mark.parametrize("where", [page_of, api_of])
def test_a_post_without_its_csrf_token_is_refused(
    complaint: Complaint, vendor: Vendor, user: User, where: Callable[[Any], str]
) -> None:
    """On the pages and for JSON alike; with the token it is carried out."""
    client = Client(enforce_csrf_checks=True, headers=PAGE)
    client.force_login(user)
    client.get("/")
    as_json = {"content_type": "application/json"} if where is api_of else {}

    refused = client.post(where(complaint), {"vendor": vendor.pk}, **as_json)
    written = complaint.assignments.count()
    token = {"X-CSRFToken": client.cookies["csrftoken"].value}
    done = client.post(where(complaint), {"vendor": vendor.pk}, headers=token, **as_json)

    assert refused.status_code == 403
    assert written == 0
    assert done.status_code in (201, 302)
    assert complaint.assignments.count() == 1


# Pages


def test_a_vendor_is_assigned_on_the_page_of_the_complaint(
    browser: Client, complaint: Complaint, vendor: Vendor, stranger: Vendor
) -> None:
    """The form offers who has a contract, and afterwards says who is assigned."""
    before = browser.get(page_of(complaint)).content.decode()
    after = text_after(browser.post(page_of(complaint), {"vendor": vendor.pk}), browser)

    assert vendor.name in before
    assert stranger.name not in before
    assert "Ace Plumbing is assigned." in after
    assert f"fencing token {complaint.assignments.get().token}" in after
    assert "<select" not in after


def test_a_month_is_charged_on_the_page_of_the_organization(
    browser: Client, organization: Organization, meters: MeterService
) -> None:
    """Once: the second time the page says that it is done."""
    url = page_of(organization)

    first = text_after(browser.post(url, {"month": "2026-11"}), browser)
    second = text_after(browser.post(url, {"month": "2026-11"}), browser)

    run = organization.runs.get()
    assert f"2026-11 is charged: {run.total} in all." in first
    assert f"2026-11 was charged already: {run.total} in all." in second
    for unit in organization.units.all():
        assert f">{unit.balance}<" in first


def test_the_start_page_shows_complaints_and_the_last_three_runs(
    browser: Client, complaint: Complaint, meters: MeterService
) -> None:
    """Of each organization, in a number of queries that does not depend on how many there are."""
    organization = complaint.organization
    for month in (8, 9, 10, 11):
        browser.post(page_of(organization), {"month": f"2026-{month:02}"})

    with statements() as few:
        page = browser.get("/").content.decode()
    other = sample_organization(f"{organization} again")
    Complaint.objects.create(organization=other, text="It is dark.")
    with statements() as more:
        browser.get("/")

    for shown in (organization.name, "It drips.", "November 2026", "September 2026"):
        assert shown in page
    assert "August 2026" not in page
    assert len(few) == len(more)


def test_pages_without_anything_to_show_say_so(
    browser: Client, organization: Organization, complaint: Complaint
) -> None:
    """No run, no vendor with a contract, no organization."""
    assert "No month is charged yet." in browser.get(page_of(organization)).content.decode()
    assert "No vendor has a contract" in browser.get(page_of(complaint)).content.decode()

    with fenced_atomic(complaint) as protected:
        protected.delete()
    organization.delete()
    assert "seed" in browser.get("/").content.decode()


def test_what_an_owner_writes_is_only_text(browser: Client, organization: Organization) -> None:
    """Markup in a complaint is shown as it was typed."""
    complaint = Complaint.objects.create(organization=organization, text="<script>x</script>")

    for url in ("/", page_of(complaint)):
        page = browser.get(url).content.decode()
        assert "<script>" not in page
        assert "&lt;script&gt;" in page


def test_a_refused_assignment_is_a_message(
    browser: Client, complaint: Complaint, vendor: Vendor, stranger: Vendor
) -> None:
    """On the page from which it came: no choice, no contract, and assigned already."""
    url = page_of(complaint)

    nobody = text_after(browser.post(url), browser)
    uncontracted = text_after(browser.post(url, {"vendor": stranger.pk}), browser)
    browser.post(url, {"vendor": vendor.pk})
    late = text_after(browser.post(url, {"vendor": vendor.pk}), browser)

    assert "Choose a vendor" in nobody
    assert "Swift Lifts has no contract" in uncontracted
    assert "already assigned to Ace Plumbing" in late
    assert complaint.assignments.get().vendor == vendor


def test_a_refused_charge_is_a_message(
    browser: Client, organization: Organization, settings: Any
) -> None:
    """No month, and meters that cannot be read."""
    with MeterService() as broken:
        settings.METERS_URL = broken.url

    no_month = text_after(browser.post(page_of(organization), {"month": "11/2026"}), browser)
    no_meters = text_after(browser.post(page_of(organization), {"month": "2026-11"}), browser)

    assert "A month looks like 2026-11." in no_month
    assert f"The meters at {broken.url} cannot be read" in no_meters
    assert not organization.runs.exists()


# What a loser is told


def test_who_comes_to_a_held_lock_gets_a_page_that_says_what_to_do(
    browser: Client, complaint: Complaint, vendor: Vendor
) -> None:
    """Both operations: 409, how long to wait, a way back, and nothing is written."""
    organization = complaint.organization
    with fenced_lock(complaint), fenced_lock(lock_name(organization)):
        answers = in_threads(
            lambda: browser.post(page_of(complaint), {"vendor": vendor.pk}),
            lambda: browser.post(page_of(organization), {"month": "2026-11"}),
        )

    for answer, row in zip(answers, (complaint, organization), strict=True):
        page = answer.content.decode()
        assert answer.status_code == 409
        assert f"Wait {answer['Retry-After']} seconds, go back, and look" in page
        assert f'href="{page_of(row)}"' in page
    assert not complaint.assignments.exists()
    assert not organization.runs.exists()


def test_a_script_that_comes_to_a_held_lock_is_told_when_to_come_back(
    script: Client, complaint: Complaint, vendor: Vendor
) -> None:
    """Both operations: 409, the code of the package, and nothing is written."""
    organization = complaint.organization
    with fenced_lock(complaint), fenced_lock(lock_name(organization)):
        answers = in_threads(
            lambda: send(script, complaint, vendor=vendor.pk),
            lambda: send(script, organization, month="2026-11"),
        )

    assert [code_of(answer) for answer in answers] == [(409, "lock-held")] * 2
    assert all(int(answer["Retry-After"]) > 0 for answer in answers)
    assert not complaint.assignments.exists()
    assert not organization.runs.exists()


def test_who_is_overtaken_while_the_meters_are_asked_is_told_so(
    script: Client, organization: Organization, held_meters: MeterService, client: Any
) -> None:
    """The fence refuses the late write, and the answer says that trying again needs a look."""
    with in_background(lambda: send(script, organization, month="2026-11")) as paused:
        held_meters.arrived(1)
        expire(client, lock_name(organization))
        held_meters.let_go(2)
        run = send(script, organization, month="2026-11")
        held_meters.let_go(1)

    assert code_of(paused.result()) == (409, "stale-token")
    assert "Retry-After" not in paused.result()
    assert run.status_code == 201
    assert organization.runs.get().token == run.json()["token"]


def test_without_redis_nothing_is_begun_and_everything_can_be_looked_at(
    browser: Client, script: Client, complaint: Complaint, vendor: Vendor
) -> None:
    """503 for both operations, as a page and as JSON."""
    organization = complaint.organization
    with cache_at(NOBODY_LISTENS):
        pages = [
            browser.post(page_of(complaint), {"vendor": vendor.pk}),
            browser.post(page_of(organization), {"month": "2026-11"}),
        ]
        problems = [
            send(script, complaint, vendor=vendor.pk),
            send(script, organization, month="2026-11"),
        ]
        looks = [browser.get(url) for url in ("/", page_of(complaint), page_of(organization))]

    assert [page.status_code for page in pages] == [503, 503]
    assert all("Please try again in a moment" in page.content.decode() for page in pages)
    assert [code_of(problem) for problem in problems] == [(503, "store-unavailable")] * 2
    assert [look.status_code for look in looks] == [200, 200, 200]
    assert not complaint.assignments.exists()
    assert not organization.runs.exists()


def test_an_assignment_that_is_rolled_back_is_not_announced(
    browser: Client, complaint: Complaint, vendor: Vendor
) -> None:
    """The message is there after the commit only: the next page would show it."""
    with mock.patch("hoa.views.redirect", side_effect=LeaseLost("lost")):
        lost = browser.post(page_of(complaint), {"vendor": vendor.pk})
    page = browser.get(page_of(complaint)).content.decode()

    assert lost.status_code == 409
    assert "is assigned" not in page
    assert not complaint.assignments.exists()


# JSON


def test_a_script_assigns_a_vendor_and_asks_for_the_assignment(
    script: Client, complaint: Complaint, vendor: Vendor
) -> None:
    """201 with the state that GET tells afterwards; the second attempt is refused."""
    before = script.get(api_of(complaint)).json()
    made = send(script, complaint, vendor=vendor.pk)
    refused = send(script, complaint, vendor=vendor.pk)

    assignment = complaint.assignments.get()
    state = {"complaint": complaint.pk, "status": "assigned", "vendor": vendor.pk}
    assert before == {"complaint": complaint.pk, "status": "open", "vendor": None}
    assert (made.status_code, made.json()) == (201, {**state, "token": assignment.token})
    assert script.get(api_of(complaint)).json() == made.json()
    assert code_of(refused) == (409, "assignment-refused")
    assert refused.json()["detail"].endswith("is already assigned to Ace Plumbing.")


def test_a_vendor_without_a_contract_is_refused(
    script: Client, complaint: Complaint, stranger: Vendor
) -> None:
    """The same status and code as any refusal; the detail says which it is."""
    refused = send(script, complaint, vendor=stranger.pk)

    assert code_of(refused) == (409, "assignment-refused")
    assert "Swift Lifts has no contract" in refused.json()["detail"]
    assert not complaint.assignments.exists()


def test_a_script_charges_a_month_and_asks_for_the_runs(
    script: Client, organization: Organization, meters: MeterService
) -> None:
    """201 when it is charged, 200 when it was before."""
    before = script.get(api_of(organization)).json()
    made = send(script, organization, month="2026-11")
    again = send(script, organization, month="2026-11")

    run = organization.runs.get()
    state = {"month": "2026-11", "total": str(run.total), "token": run.token}
    whole = {"organization": organization.pk, **state}
    assert before == {"organization": organization.pk, "runs": []}
    assert (made.status_code, made.json()) == (201, {**whole, "outcome": "charged"})
    assert (again.status_code, again.json()) == (200, {**whole, "outcome": "already run"})
    assert script.get(api_of(organization)).json()["runs"] == [state]


def test_meters_that_cannot_be_read_are_a_bad_gateway(
    script: Client, organization: Organization, settings: Any
) -> None:
    """The fault is neither the client's nor this server's."""
    with MeterService() as broken:
        settings.METERS_URL = broken.url

    answer = send(script, organization, month="2026-11")

    assert code_of(answer) == (502, "meters-unavailable")
    assert not organization.runs.exists()


BODIES = ["", "{", "[]", "7", "null", "\xff", '"vendor"', "{}", "[" * 100_000]
VENDORS = [None, True, "x", "", 1.5, [1], {"pk": 1}, "\0", "9" * 5000]
MONTHS = [None, 202611, "11/2026", "2026-13", "2026-11-01", "0000-01", ["2026-11"], "\ud800"]


def test_a_body_that_makes_no_sense_is_a_bad_request(script: Client, complaint: Complaint) -> None:
    """No JSON, or no object with what is needed."""
    for row in (complaint, complaint.organization):
        for body in BODIES:
            posted = body.encode("latin-1")
            answer = script.post(api_of(row), posted, content_type="application/json")

            assert code_of(answer) == (400, "bad-request"), body
            assert answer.json()["detail"]


def test_a_value_that_makes_no_sense_is_a_bad_request(script: Client, complaint: Complaint) -> None:
    """The detail says what is wanted instead."""
    cases = [(complaint, "vendor", value) for value in VENDORS]
    cases += [(complaint.organization, "month", value) for value in MONTHS]
    for row, name, value in cases:
        posted = json.dumps({name: value})  # in ASCII, unlike what Client makes of it
        answer = script.post(api_of(row), posted, content_type="application/json")

        assert code_of(answer) == (400, "bad-request"), value
        assert name in answer.json()["detail"].lower()


def test_a_vendor_that_is_not_there_is_not_found(
    browser: Client, script: Client, complaint: Complaint
) -> None:
    """As a page and as JSON."""
    for pk in (0, -1, 2**63, 10**100):
        page = browser.post(page_of(complaint), {"vendor": pk})
        answer = send(script, complaint, vendor=pk)

        assert page.status_code == 404
        assert code_of(answer) == (404, "not-found")


def test_rows_that_are_not_there_are_not_found(
    browser: Client, script: Client, vendor: Vendor
) -> None:
    """As pages and as JSON, for looking and for changing."""
    for row in (Organization(pk=0), Complaint(pk=2**63)):
        values = {"vendor": vendor.pk, "month": "2026-11"}

        assert browser.get(page_of(row)).status_code == 404
        assert browser.post(page_of(row), values).status_code == 404
        assert code_of(script.get(api_of(row))) == (404, "not-found")
        assert code_of(send(script, row, **values)) == (404, "not-found")
    assert not VendorAssignment.objects.exists()


def test_only_a_post_writes(browser: Client, complaint: Complaint, vendor: Vendor) -> None:
    """GET and HEAD send no statement that changes anything, whatever they carry."""
    rows = (complaint, complaint.organization)
    urls = ["/", *map(page_of, rows), *map(api_of, rows)]
    values = {"vendor": vendor.pk, "month": "2026-11"}

    with statements() as sent:
        answers = [
            getattr(browser, method)(url, values) for method in ("get", "head") for url in urls
        ]
        refused = [getattr(browser, method)(url) for method in ("put", "delete") for url in urls]

    assert {answer.status_code for answer in answers} == {200}
    assert {answer.status_code for answer in refused} == {405}
    assert {sql.split()[0] for sql in sent} == {"SELECT"}
