"""
Run by tests/test_mariadb.py in a process of its own: the protocol on MariaDB.

PyMySQL stands in for mysqlclient, which has no wheels: Django needs the version it asks for.
"""

import os
import sys
import uuid
from typing import Any

import pymysql

pymysql.version_info = (2, 2, 8, "final", 0)  # type: ignore[assignment]
pymysql.__version__ = "2.2.8"
pymysql.install_as_MySQLdb()

import django  # noqa: E402
from config import settings as example  # noqa: E402
from django.conf import settings  # noqa: E402

socket = sys.argv[1]
settings.configure(
    **{name: value for name, value in vars(example).items() if name.isupper()}
    | {
        "DATABASES": {
            "default": {
                "ENGINE": "django.db.backends.mysql",
                "NAME": "fencing",
                "USER": "root",
                "OPTIONS": {"unix_socket": socket, "charset": "utf8mb4"},
            }
        },
        "FENCING": {"NAMESPACE": uuid.uuid4().hex},
        "INSTALLED_APPS": [app for app in example.INSTALLED_APPS if app != "django.contrib.admin"],
    }
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from hoa.models import Complaint, Organization  # noqa: E402

from django_fencing.exceptions import OnceMismatch, StaleToken, UnfencedWrite  # noqa: E402
from django_fencing.locks import fenced_atomic, fenced_lock  # noqa: E402
from django_fencing.models import Fence, FenceEvent  # noqa: E402
from django_fencing.once import once, once_result  # noqa: E402
from django_fencing.resources import resolve  # noqa: E402
from django_fencing.stores.clients import client  # noqa: E402


def refused(error: type[Exception], write: Any) -> None:
    try:
        write()
    except error:
        return
    raise AssertionError(f"It was not refused as {error.__name__}.")


def overtaken(resource: Any) -> None:
    """Let a lease be overtaken, and its late write refused."""
    lock = fenced_lock(resource)
    first = lock.acquire()
    client().delete(resolve(resource).keys.lease)
    second = lock.acquire()

    def write() -> None:
        with first.atomic():
            pass

    refused(StaleToken, write)
    with second.atomic():
        pass
    second.release()


def main() -> None:
    call_command("migrate", verbosity=0)
    organization = Organization.objects.create(name="one")
    complaint = Complaint.objects.create(organization=organization, text="It leaks.")
    rows = Complaint.objects.filter(pk=complaint.pk)

    for resource in (complaint, "a name é"):
        overtaken(resource)
    with fenced_atomic(complaint) as row:
        row.text = "It is dry."
        row.save()
    refused(UnfencedWrite, lambda: locked_write(complaint))
    assert rows.get().text == "It is dry."

    refused(StaleToken, lambda: rows.update(last_fence_token=1))
    refused(StaleToken, lambda: rows.update(last_fence_holder=uuid.uuid4()))
    refused(
        StaleToken,
        lambda: Complaint.objects.bulk_create(
            [Complaint(pk=complaint.pk, organization=organization, text="x")],
            update_conflicts=True,
            update_fields=["last_fence_token", "last_fence_holder"],
        ),
    )
    assert rows.get().last_fence_token == 4

    done: list[int] = []
    for _ in range(2):
        with fenced_atomic("charges"):
            assert once("kéy", lambda: done.append(1) or len(done), payload=1) == 1
    refused(OnceMismatch, lambda: with_payload(2))
    assert (once_result("kéy"), done) == (1, [1])

    assert FenceEvent.objects.filter(kind="refused").count() == 2
    assert all(Fence.objects.values_list("registered_at", flat=True))
    call_command("fencing", "doctor")
    call_command("fencing", "prune", "--older-than", "0s")
    client().flushdb()
    with fenced_lock("another name") as lease:
        assert lease.token > 1_000_000

    call_command("migrate", "hoa", "zero", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("SHOW TRIGGERS")
        assert cursor.fetchall() == ()
    print("well done")  # noqa: T201 - for the test


def locked_write(complaint: Complaint) -> None:
    with fenced_lock(complaint):
        complaint.save()


def with_payload(payload: int) -> None:
    with fenced_atomic("charges"):
        once("kéy", lambda: 0, payload=payload)


if __name__ == "__main__":
    os.environ.pop("DJANGO_SETTINGS_MODULE", None)
    main()
