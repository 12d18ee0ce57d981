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

from tests.shop.models import Job


@pytest.fixture
def name() -> str:
    """Return the name of a resource that nothing else uses."""
    return f"test:{uuid.uuid4().hex}"


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
        with override_settings(CACHES=caches_setting):
            yield client
            for cache in caches.all(initialized_only=True):
                cache.client.get_client().connection_pool.disconnect()
