"""Fixtures that many tests use."""

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.test import override_settings
from services import Services

from django_fencing import flow
from django_fencing.locks import fenced_lock
from tests.helpers import cache_at, make_scripts_known
from tests.proxy import Proxy, proxied
from tests.shop.models import Job


@pytest.fixture(autouse=True)
def own_leases() -> None:
    """Let no test hold a lease that an earlier one has left, in a traceback say."""
    flow._held.clear()


@pytest.fixture(autouse=True, scope="session")
def known_scripts() -> None:
    """Let the server know the scripts, so that no test counts what makes them known to it."""
    with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
        make_scripts_known(client)


@pytest.fixture
def name() -> str:
    """Return the name of a resource that nothing else uses."""
    return f"test:{uuid.uuid4().hex}"


@pytest.fixture
def key() -> str:
    """Return the key of work that nobody else does."""
    return f"key:{uuid.uuid4().hex}"


@pytest.fixture
def client() -> Iterator[Any]:
    """Yield a client of the Redis that all tests share: never flush it."""
    with redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True) as client:
        yield client


@pytest.fixture
def job(transactional_db: None) -> Job:
    """Return a saved row with a fence."""
    return Job.objects.create(amount=10)


@pytest.fixture(scope="session")
def private_services() -> Iterator[Services]:
    """Yield a Valkey without persistence, which a test may flush, stop and restart."""
    with Services(postgres=False, valkey_args=["--save", ""]) as services:
        yield services


@pytest.fixture
def private_redis(private_services: Services) -> Iterator[Any]:
    """Let the app use a Valkey of this test's own, empty, and yield a client of it."""
    url = private_services.redis_url
    caches_setting = {
        "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url},
    }
    with redis.Redis.from_url(url, decode_responses=True) as client:
        client.flushall()
        make_scripts_known(client)
        with override_settings(CACHES=caches_setting):
            yield client
            for cache in caches.all(initialized_only=True):
                cache.client.get_client().connection_pool.disconnect()


@pytest.fixture
def proxy(private_services: Services, private_redis: Any) -> Iterator[Proxy]:
    """Let the app reach this test's own Valkey over a bad line, with its scripts in place."""
    socket = private_services.directory / "valkey.sock"
    path = socket.with_name(f"{uuid.uuid4().hex[:12]}.sock")
    with proxied(str(socket), path) as proxy, cache_at(proxy.url, SOCKET_TIMEOUT=1):
        with fenced_lock("warm-up", register=False) as lease:
            lease.ensure_held()
            lease.extend()
        private_redis.flushall()
        yield proxy
