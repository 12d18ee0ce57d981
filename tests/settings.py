"""The tests' settings: PostgreSQL at two isolation levels, a second database, and SQLite."""

import os

from config.settings import *  # noqa: F403 - the example's, with more databases and models
from config.settings import DATABASES, INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.shop"]

POSTGRESQL = DATABASES["default"]
DATABASES = {
    "default": POSTGRESQL,
    # The same database at another isolation level, as psycopg.IsolationLevel counts them.
    "repeatable": POSTGRESQL | {"OPTIONS": {"isolation_level": 3}, "TEST": {"MIRROR": "default"}},
    # And at one that Django does not know of.
    "snapshot": POSTGRESQL
    | {
        "OPTIONS": {"options": r"-c default_transaction_isolation=repeatable\ read"},
        "TEST": {"MIRROR": "default"},
    },
    "other": POSTGRESQL | {"TEST": {"NAME": "test_fencing_other"}},
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "OPTIONS": {"timeout": 20, "init_command": "PRAGMA synchronous = OFF"},
        "TEST": {"NAME": os.environ.get("SQLITE_FILE", ":memory:")},
    },
}

# The workers of xdist share one Redis, and their rows the same primary keys.
FENCING = {"NAMESPACE": os.environ.get("PYTEST_XDIST_WORKER", "")}

# Of a model that is here to be refused.
SILENCED_SYSTEM_CHECKS = ["django_fencing.E005"]
