"""ProtectFence in the migrations of a project of its own."""

import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from tests.helpers import committing, sql

pytestmark = committing("default")


SETTINGS = """
import os
SECRET_KEY = "x"
USE_TZ = {use_tz}
INSTALLED_APPS = ["django.contrib.contenttypes", {apps}]
DATABASES = {{"default": {database}}}
CACHES = {{"default": {{
    "BACKEND": "django_redis.cache.RedisCache", "LOCATION": os.environ["REDIS_URL"]
}}}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
FENCING = {{"NAMESPACE": "{namespace}"}}
"""

CRATE = """
from django.db import models
from django_fencing.models import FencedResource
class Crate(FencedResource):
    weight = models.IntegerField(default=0)
"""

INITIAL = """migrations.CreateModel("Crate", [
    ("id", models.BigAutoField(primary_key=True)),
    ("last_fence_token", models.BigIntegerField(default=0, db_default=0, editable=False)),
    ("last_fence_holder", models.UUIDField(null=True, editable=False)),
    ("weight", models.IntegerField(default=0)),
])"""

MIGRATION = """
from django.db import migrations, models
from django_fencing.operations import ProtectFence, UnprotectFence
class Migration(migrations.Migration):
    dependencies = {dependencies}
    operations = [{operations}]
"""

SCRIPT = """
import django; django.setup()
from django.db import connection
from depot.models import *
def sql(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else None
"""

# Prints what the guard of a crate says.
LOWER = """
crate = Crate.objects.create()
Crate.objects.filter(pk=crate.pk).update(last_fence_token=9)
try:
    sql("UPDATE depot_crate SET last_fence_token = 3")
except Exception as error:
    print(type(error).__name__)
else:
    print("lowered")
"""


class Project:
    """A project with an app `depot`, whose commands run in processes of their own."""

    def __init__(self, folder: Path, database: dict[str, Any], **values: Any) -> None:
        self.folder = folder
        self.app("depot", CRATE)
        values = {"use_tz": True, "apps": '"django_fencing", "depot"', **values}
        found = SETTINGS.format(database=database, namespace=uuid.uuid4().hex, **values)
        (folder / "project_settings.py").write_text(found)
        self.migration("0001_initial", INITIAL)

    def app(self, name: str, models: str) -> None:
        (self.folder / name / "migrations").mkdir(parents=True)
        for part in ("", "migrations"):
            (self.folder / name / part / "__init__.py").write_text("")
        (self.folder / name / "models.py").write_text(models)

    def migration(
        self, name: str, operations: str, *after: tuple[str, str], app: str = "depot"
    ) -> None:
        text = MIGRATION.format(dependencies=list(after), operations=operations)
        (self.folder / app / "migrations" / f"{name}.py").write_text(text)

    def run(self, *args: str) -> str:
        search = os.pathsep.join([str(self.folder), *sys.path])
        environ = {"PYTHONPATH": search, "DJANGO_SETTINGS_MODULE": "project_settings"}
        done = subprocess.run(
            [sys.executable, "-m", *args],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env={**os.environ, **environ},
        )
        assert done.returncode == 0, done.stderr[-1500:]
        return done.stdout.strip()

    def python(self, code: str) -> str:
        (self.folder / "script.py").write_text(SCRIPT + textwrap.dedent(code))
        return self.run("script")


@contextmanager
def project(vendor: str, folder: Path, **values: Any) -> Iterator[Project]:
    """Make a project with an empty database."""
    if vendor == "sqlite":
        file = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(folder / "db.sqlite3")}
        yield Project(folder, file, **values)
        return
    name = f"attack_{uuid.uuid4().hex[:8]}"
    place = {key: connection.settings_dict[key] for key in ("ENGINE", "USER", "HOST", "PORT")}
    password = {"PASSWORD": connection.settings_dict["PASSWORD"]}
    sql(f"CREATE DATABASE {name}")
    try:
        yield Project(folder, {**place, **password, "NAME": name}, **values)
    finally:
        sql(f"DROP DATABASE {name} WITH (FORCE)")


PROTECT = 'ProtectFence("Crate", require_lease=True)'
UNPROTECT = 'UnprotectFence("Crate", require_lease=True)'
FIRST, SECOND = ("depot", "0001_initial"), ("depot", "0002_protect")


@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
@pytest.mark.parametrize(
    ("operation", "then"),
    [
        ('migrations.DeleteModel("Crate")', ""),
        ('migrations.RenameModel("Crate", "Box")', CRATE.replace("Crate", "Box")),
    ],
    ids=["deleted", "renamed"],
)
def test_a_protected_model_may_be_deleted_or_renamed_later(
    tmp_path: Path, vendor: str, operation: str, then: str
) -> None:
    """`migrate` ends well, and goes on doing so, whether the guard was undone before or not."""
    with project(vendor, tmp_path) as made:
        made.migration("0002_protect", PROTECT, FIRST)
        made.migration("0003_later", operation, SECOND)
        (tmp_path / "depot" / "models.py").write_text(then)
        made.run("django", "migrate")


@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
def test_the_fence_of_a_model_may_be_removed_later(tmp_path: Path, vendor: str) -> None:
    """A model that is no FencedResource any more is written as any other."""
    removed = ", ".join(
        f'migrations.RemoveField("Crate", "last_fence_{name}")' for name in ("token", "holder")
    )
    plain = CRATE.replace("(FencedResource)", "(models.Model)")
    with project(vendor, tmp_path) as made:
        made.migration("0002_protect", PROTECT, FIRST)
        made.migration("0003_later", f"{UNPROTECT}, {removed}", SECOND)
        (tmp_path / "depot" / "models.py").write_text(plain)
        made.run("django", "migrate")
        made.python("Crate.objects.create(); Crate.objects.update(weight=2)")


def test_a_deleted_model_leaves_no_function(tmp_path: Path) -> None:
    with project("postgresql", tmp_path) as made:
        made.migration("0002_protect", PROTECT, FIRST)
        made.migration("0003_later", f'{UNPROTECT}, migrations.DeleteModel("Crate")', SECOND)
        made.run("django", "migrate")
        left = made.python("print(sql(\"SELECT proname FROM pg_proc WHERE proname ~ '_guard_'\"))")
    assert left == "[]"


@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
def test_a_model_that_comes_back_is_protected_again(tmp_path: Path, vendor: str) -> None:
    """Going back behind its deletion is going back to where it was protected."""
    with project(vendor, tmp_path) as made:
        made.migration("0002_protect", PROTECT, FIRST)
        made.run("django", "migrate")
        made.migration("0003_later", f'{UNPROTECT}, migrations.DeleteModel("Crate")', SECOND)
        made.run("django", "migrate")
        made.run("django", "migrate", "depot", "0002")
        assert made.python(LOWER) == "StaleToken"


def test_a_guard_in_another_operation_is_restored_too(tmp_path: Path) -> None:
    """SQLite's tables are made anew whatever the guard was wrapped in."""
    wrapped = f"migrations.SeparateDatabaseAndState(database_operations=[{PROTECT}])"
    altered = 'migrations.AlterField("Crate", "weight", models.BigIntegerField(default=3))'
    with project("sqlite", tmp_path) as made:
        made.migration("0002_protect", wrapped, FIRST)
        made.migration("0003_later", altered, SECOND)
        made.run("django", "migrate")
        assert made.python(LOWER) == "StaleToken"


@pytest.mark.parametrize("again", [True, False])
def test_what_was_unprotected_is_restored_only_if_it_is_protected_again(
    tmp_path: Path, again: bool
) -> None:
    """As a data migration does; the last operation counts."""
    altered = 'migrations.AlterField("Crate", "weight", models.BigIntegerField(default=3))'
    with project("sqlite", tmp_path) as made:
        made.migration("0002_protect", PROTECT, FIRST)
        made.migration("0003_later", f"{UNPROTECT}, {PROTECT}" if again else UNPROTECT, SECOND)
        made.migration("0004_last", altered, ("depot", "0003_later"))
        made.run("django", "migrate")
        assert made.python(LOWER) == ("StaleToken" if again else "lowered")


def test_migrations_that_are_faked_need_no_table(tmp_path: Path) -> None:
    with project("sqlite", tmp_path) as made:
        made.migration("0002_protect", PROTECT, FIRST)
        made.run("django", "migrate", "contenttypes")
        made.run("django", "migrate", "depot", "--fake")


def test_a_child_of_another_app_needs_an_operation_of_its_own(tmp_path: Path) -> None:
    """Its table may be there before the guard of its parent or after: the apps' names decide."""
    child = """migrations.CreateModel("Big", [
        ("crate_ptr", models.OneToOneField("depot.Crate", models.CASCADE, primary_key=True,
                                           parent_link=True, auto_created=True)),
        ("size", models.IntegerField(default=0))], bases=("depot.crate",))"""
    apps = '"django_fencing", "depot", "zone"'
    with project("postgresql", tmp_path, apps=apps) as made:
        made.app(
            "zone",
            "from depot.models import *\n"
            "class Big(Crate):\n    size = models.IntegerField(default=0)",
        )
        made.migration("0001_initial", child, FIRST, app="zone")
        made.migration("0002_protect", PROTECT, FIRST)
        made.run("django", "migrate")
        said = made.python(
            """
            from zone.models import Big
            Big.objects.create()
            try:
                Big.objects.update(size=3)
            except Exception as error:
                print(type(error).__name__)
            """
        )
    assert said == ""


@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
def test_a_connection_that_is_older_than_the_app_explains_too(tmp_path: Path, vendor: str) -> None:
    """An app that stands before it in INSTALLED_APPS asks the database in its ready()."""
    ready = """
from django.apps import AppConfig
from django.db import connection
class EarlyConfig(AppConfig):
    name = "early"
    def ready(self):
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
"""
    apps = '"early", "django_fencing", "depot"'
    with project(vendor, tmp_path, apps=apps) as made:
        made.app("early", "")
        (tmp_path / "early" / "apps.py").write_text(ready)
        made.migration("0002_protect", PROTECT, FIRST)
        made.run("django", "migrate")
        assert made.python(LOWER) == "StaleToken"


def test_the_ledger_is_kept_without_time_zones(tmp_path: Path) -> None:
    """SQLite and MySQL take no aware datetime where USE_TZ is off."""
    with project("sqlite", tmp_path, use_tz=False) as made:
        made.run("django", "migrate")
        found = made.python(
            """
            from django_fencing.locks import fenced_lock
            from django_fencing.models import FenceEvent
            from django_fencing.resources import resolve
            from django_redis import get_redis_connection
            lease = fenced_lock("x").acquire()
            get_redis_connection().delete(resolve("x").keys.lease)
            try:
                lease.extend()
            except Exception:
                print(FenceEvent.objects.count())
            """
        )
    assert found == "1"
