"""The tests' settings: PostgreSQL at two isolation levels, a second database, and SQLite."""

import os
import tempfile
from pathlib import Path

import dj_database_url

SECRET_KEY = "tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django_fencing",
    "tests.shop",
]

POSTGRESQL = dj_database_url.parse(os.environ["DATABASE_URL"])
DATABASES = {
    "default": POSTGRESQL,
    # The same database at another isolation level, as psycopg.IsolationLevel counts them.
    "repeatable": POSTGRESQL
    | {"OPTIONS": {"isolation_level": 3}, "TEST": {"MIRROR": "default"}},
    "other": POSTGRESQL | {"TEST": {"NAME": "test_fencing_other"}},
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "OPTIONS": {"timeout": 20},
        "TEST": {"NAME": str(Path(tempfile.gettempdir()) / f"fencing-tests-{os.getpid()}.sqlite3")},
    },
}

CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": os.environ["REDIS_URL"],
    },
}

# The workers of xdist share one Redis, and their rows the same primary keys.
FENCING = {"NAMESPACE": os.environ.get("PYTEST_XDIST_WORKER", "")}
