"""What is shipped, and what is said about it."""

import json
import logging
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from celery import Celery
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import RequestFactory

from django_fencing import exceptions, signals
from django_fencing.conf import DEFAULTS
from tests.shop.models import Job

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.django_db
def test_the_migrations_are_complete() -> None:
    """One initial migration, and it says what the models say."""
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)

    migrations = ROOT / "django_fencing" / "migrations"
    assert [path.name for path in sorted(migrations.glob("0*.py"))] == ["0001_initial.py"]


def test_the_settings_table_is_the_settings() -> None:
    """Same keys, same order, same defaults."""
    rows = re.findall(r"^\| `([A-Z_]+)` \| `(.+?)` \|", README, re.MULTILINE)

    assert {key: eval(default) for key, default in rows} == DEFAULTS  # noqa: S307 - our own text
    assert [key for key, _ in rows] == list(DEFAULTS)


def test_the_readme_names_every_error() -> None:
    """And no error that does not exist."""
    named = set(re.findall(r"^\| `([A-Z][a-z]+[A-Za-z]+)` \| ", README, re.MULTILINE))
    defined = {
        name
        for name, value in vars(exceptions).items()
        if isinstance(value, type) and issubclass(value, exceptions.FencingError)
    }

    assert named == defined - {"FencingError"}


def test_readme_and_changelog_have_one_sentence_per_line() -> None:
    """A line that ends one sentence begins no other."""
    for name in ("README.md", "CHANGELOG.md", "example_project/README.md"):
        text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
        for line in text.splitlines():
            assert not re.search(r"[a-z)`][.?!] +[A-Z`]", line), (name, line)


def test_scripts_templates_and_the_marker_of_types_are_in_the_package() -> None:
    """They are data, which a build may forget."""
    package = files("django_fencing")

    assert (package / "py.typed").is_file()
    for script in ("acquire", "confirm", "counter", "extend", "lease", "reissue", "release"):
        assert (package / "stores" / "lua" / f"{script}.lua").is_file()
    assert (package / "templates" / "django_fencing" / "conflict.html").is_file()
    assert (package / "templates/admin/django_fencing/fence/change_list.html").is_file()


def test_the_package_can_be_imported_before_django_is_set_up() -> None:
    """Its top holds nothing: an app with models cannot import them at load time."""
    code = "import django_fencing, django_fencing.exceptions, django_fencing.timing"

    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.django_db(transaction=True)
def test_the_code_of_the_readme_runs(job: Job) -> None:
    """Each block, in the order of the page, on a row of our own in place of its model."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    blocks = [block for block in blocks if "CACHES =" not in block and "models.py" not in block]
    namespace: dict[str, Any] = {
        "__name__": "tests.shop.readme",
        "Complaint": Job,
        "complaint": job,
        "ask_for_quotes": lambda row: row.note,
        "read_meters": lambda *arguments: arguments,
    }

    Celery("readme").set_current()  # not one that other tests have closed
    with mock.patch("django.contrib.admin.register", return_value=lambda found: found):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), namespace)  # noqa: S102 - our own text
    namespace["publish_notices"](7)
    namespace["generate_monthly_charges"](7, month="2026-11")
    request = RequestFactory().post("/", {"vendor": "Ace Plumbing"})
    request.user = User(is_active=True)
    answer = namespace["assign_vendor"](request, job.pk)
    call_command(namespace["Command"]())
    namespace["charge"].run(7)
    namespace["close"](Job.objects.get())

    assert len(blocks) == 9
    assert json.loads(answer.content) == {"token": 3}
    assert namespace["result"] == namespace["charge_month"](7, "2026-11") == {"charged": 3}
    assert not Job.objects.exists()


def test_the_readme_names_every_system_check() -> None:
    """And none that does not exist."""
    package = ROOT / "django_fencing"
    code = (package / "checks.py").read_text() + (package / "resource_admin.py").read_text()

    named = re.findall(r"^\| `(django_fencing\.[EW]\d+)` \|", README, re.MULTILINE)

    assert named == sorted(set(re.findall(r'id="(django_fencing\.[EW]\d+)"', code)))


def test_the_readme_names_every_signal_and_its_level() -> None:
    """And none that does not exist."""
    rows = re.findall(r"^\| `([a-z_]+)` \| ([A-Z]+) \| .* \| .* \|$", README, re.MULTILINE)

    defined = [value for value in vars(signals).values() if isinstance(value, signals.LeaseSignal)]

    assert rows == [(signal.name, logging.getLevelName(signal.level)) for signal in defined]
