"""gunicorn with several workers under load: one vendor per complaint, an answer for everyone."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.utils import timezone
from hoa.models import Complaint, Organization, Vendor, VendorAssignment, VendorContract

from tests.helpers import SECONDS, keys_of, unprotected

pytestmark = pytest.mark.django_db(transaction=True)

REQUESTS = 200
ROOT = Path(__file__).parent.parent

Answer = tuple[int, dict[str, Any]]  # the status and the JSON


@pytest.fixture
def vendor(transactional_db: None) -> Vendor:
    """Return a vendor with a contract for an organization."""
    organization = Organization.objects.create(name=f"test {uuid.uuid4().hex}")
    vendor = Vendor.objects.create(name="Ace Plumbing")
    today = timezone.localdate()
    VendorContract.objects.create(
        vendor=vendor,
        organization=organization,
        starts_on=today - timedelta(days=30),
        ends_on=today + timedelta(days=30),
    )
    return vendor


@pytest.fixture(scope="module")
def port(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Yield the port of the example's server."""
    with serving("config.wsgi", tmp_path_factory.mktemp("gunicorn")) as port:
        yield port


def complaints_about(vendor: Vendor, count: int) -> list[Complaint]:
    """Return so many complaints that the vendor may be assigned to."""
    organization = vendor.contracts.get().organization
    return Complaint.objects.bulk_create(
        Complaint(organization=organization, text=f"Number {number}.") for number in range(count)
    )


def test_of_200_requests_for_one_complaint_exactly_one_succeeds(
    vendor: Vendor, port: int, client: Any
) -> None:
    """All others are told why not, none fails otherwise, and no lease is left."""
    [complaint] = complaints_about(vendor, 1)

    answers = assign_at_once(port, vendor, [complaint] * REQUESTS)

    assert outcomes(answers) == {"assigned": 1, "refused": REQUESTS - 1}
    assert VendorAssignment.objects.get().complaint == complaint
    assert not client.exists(keys_of(complaint).lease)


def test_of_4_requests_for_each_of_50_complaints_exactly_one_succeeds(
    vendor: Vendor, port: int, client: Any
) -> None:
    """Nobody is refused because of another complaint."""
    complaints = complaints_about(vendor, 50)
    asked = [complaint for complaint in complaints for _ in range(4)]

    answers = assign_at_once(port, vendor, asked)

    assert len(answers) == REQUESTS
    for complaint in complaints:
        its_own = [one for one, of in zip(answers, asked, strict=True) if of == complaint]
        assert outcomes(its_own) == {"assigned": 1, "refused": 3}
        assert complaint.assignments.count() == 1
        assert not client.exists(keys_of(complaint).lease)


def test_without_the_lock_the_same_requests_assign_it_more_than_once(
    vendor: Vendor, tmp_path: Path
) -> None:
    """The twin: the same server and the same checks and writes, in a plain transaction."""
    [complaint] = complaints_about(vendor, 1)

    with unprotected("Complaint"), serving("tests.unfenced", tmp_path) as port:
        answers = assign_at_once(port, vendor, [complaint] * REQUESTS)

    assert outcomes(answers)["assigned"] == complaint.assignments.count() > 1


def outcomes(answers: list[Answer]) -> Counter[str]:
    """Count the answers, after a look whether each refusal is one that says why."""
    counted: Counter[str] = Counter()
    for status, said in answers:
        if status == 201:
            counted["assigned"] += 1
        else:
            assert (status, said["code"]) in [(409, "lock-held"), (409, "assignment-refused")]
            counted["refused"] += 1
    return counted


@contextmanager
def serving(application: str, directory: Path) -> Iterator[int]:
    """Run gunicorn with 3 workers of 4 threads, and yield its port of the loopback interface."""
    with (directory / "gunicorn.log").open("w") as log:
        with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
            port = listener.getsockname()[1]
            server = start(application, listener.fileno(), log)
        # From here on the port is the server's alone: requests wait for its workers in a queue.
        try:
            yield port
        finally:
            end(server)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def start(application: str, listener: int, log: Any) -> "subprocess.Popen[bytes]":
    """Start gunicorn on the socket, with this test's database and the Redis of all tests."""
    options = ["--workers=3", "--threads=4", "--preload", "--no-control-socket"]
    return subprocess.Popen(
        [sys.executable, "-m", "gunicorn", application, f"--bind=fd://{listener}", *options],
        env={
            **os.environ,
            "DATABASE_URL": database_url(),
            "DJANGO_SETTINGS_MODULE": "config.settings",
            "FENCING_NAMESPACE": settings.FENCING["NAMESPACE"],
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        cwd=ROOT,
        pass_fds=[listener],
        stdout=log,
        stderr=log,
        process_group=0,
    )


def end(server: "subprocess.Popen[bytes]") -> None:
    """End the server with its workers: in order, or else by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(server.pid, number)  # which is still its own: nobody has waited for it
        try:
            server.wait(SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return


def database_url() -> str:
    name = connection.settings_dict["NAME"]
    return urlsplit(os.environ["DATABASE_URL"])._replace(path=f"/{name}").geturl()


def assign_at_once(port: int, vendor: Vendor, complaints: list[Complaint]) -> list[Answer]:
    """Send a request for each of the complaints, all of them at once, and return the answers."""
    headers = logged_in()

    async def send_all() -> list[Answer]:
        async with asyncio.timeout(SECONDS):
            sent = (post(port, complaint, vendor, headers) for complaint in complaints)
            return await asyncio.gather(*sent)

    return asyncio.run(send_all())


def logged_in() -> dict[str, str]:
    """Return the headers of a client that has logged in and has seen a form."""
    client = Client()
    client.force_login(User.objects.create_user("manager"))
    client.get("/")
    cookies = "; ".join(f"{name}={cookie.value}" for name, cookie in client.cookies.items())
    return {"Cookie": cookies, "X-CSRFToken": client.cookies["csrftoken"].value}


async def post(port: int, complaint: Complaint, vendor: Vendor, headers: dict[str, str]) -> Answer:
    """Ask for one assignment over a connection of its own."""
    body = json.dumps({"vendor": vendor.pk})
    lines = [f"POST /api/complaints/{complaint.pk}/assignment/ HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Connection: close", f"Content-Length: {len(body)}", "", body]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write("\r\n".join(lines).encode())
        head, _, said = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
        await writer.wait_closed()
    return int(head.split()[1]), json.loads(said)
