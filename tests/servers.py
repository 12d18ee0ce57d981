"""A pytest plugin: one PostgreSQL and one Valkey for the whole run, before settings are read."""

import os
import tempfile
from contextlib import ExitStack

import pytest
from services import ensure_services

_running = ExitStack()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Start what DATABASE_URL and REDIS_URL do not name. The workers of xdist inherit both."""
    _running.enter_context(ensure_services(os.environ))
    if "SQLITE_FILE" not in os.environ:
        folder = _running.enter_context(tempfile.TemporaryDirectory(prefix="fencing-tests-"))
        os.environ["SQLITE_FILE"] = f"{folder}/tests.sqlite3"
        _running.callback(os.environ.pop, "SQLITE_FILE")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Stop what was started here."""
    _running.close()
