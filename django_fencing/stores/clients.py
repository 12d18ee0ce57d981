"""Which redis-py client the settings name, and which server and database it talks to."""

from typing import Any, NamedTuple

import redis
from django.conf import settings
from django.core.cache import InvalidCacheBackendError, caches
from django.core.cache.backends.redis import RedisCache
from django.core.exceptions import ImproperlyConfigured
from django_redis.client import DefaultClient, ShardClient
from redis.client import NEVER_DECODE
from redis.exceptions import RedisClusterException

from django_fencing.conf import conf

# Replies come as bytes whatever `decode_responses` the client has: a value that another program
# wrote need not be text.
RAW: dict[str, Any] = {NEVER_DECODE: []}

# All that a command may raise where the server cannot be asked.
FAILURES = (redis.RedisError, RedisClusterException, OSError)


# What a cache raises whose module, or whose own client, is not there.
_NO_CACHE = (InvalidCacheBackendError, ImportError)


class Server(NamedTuple):
    """What a server says of itself; None where it does not."""

    name: str  # "redis" or "valkey"
    version: str
    eviction: str | None  # maxmemory-policy
    persists: bool | None


def client() -> Any:
    """Return the client whose server keeps the leases. Raise ImproperlyConfigured."""
    if factory := conf.client_factory:
        return factory()
    try:
        cache = caches[conf.cache]
    except _NO_CACHE as error:
        raise ImproperlyConfigured(f"FENCING['CACHE'] is {conf.cache!r}: {error}") from error
    found = _client_of(cache)
    if found is None:
        kind = type(getattr(cache, "client", cache))
        raise ImproperlyConfigured(
            f"FENCING['CACHE'] is {conf.cache!r}, a {kind.__module__}.{kind.__qualname__}, in "
            f"which no lock can be kept that excludes other processes. Name a cache with the "
            f"BACKEND 'django_redis.cache.RedisCache' and its default, herd or sentinel client, "
            f"or Django's own '{RedisCache.__module__}.RedisCache', or set "
            f"FENCING['CLIENT_FACTORY']."
        )
    return found


def is_refusal(answer: object) -> bool:
    """Say whether a pipeline's answer is an error other than that the key holds something else."""
    return isinstance(answer, redis.RedisError) and "WRONGTYPE" not in str(answer)


def sharing() -> list[str]:
    """Return the other cache aliases whose clear() would flush the leases. Nothing is sent."""
    if conf.client_factory:  # it may connect
        return []
    mine = _database_of(client())
    others = [alias for alias in settings.CACHES if alias != conf.cache]
    return [alias for alias in others if mine and _database_of_cache(alias) == mine]


def closes_after_requests() -> bool:
    """Say whether django-redis disconnects the leases' cache after each request."""
    if conf.client_factory or isinstance(caches[conf.cache], RedisCache):
        return False
    given = getattr(settings, "DJANGO_REDIS_CLOSE_CONNECTION", False)
    options: Any = settings.CACHES[conf.cache].get("OPTIONS", {})
    return bool(options.get("CLOSE_CONNECTION", given))


def servers(client: Any) -> list[Server]:
    """
    Return what the server says of itself, or each primary of a cluster.

    Raise one of the FAILURES if one cannot be asked.
    """
    primaries = getattr(client, "get_primaries", None)
    if primaries is None:
        return [_server(client)]
    return [_server(client, target_nodes=node) for node in primaries()]


def _server(client: Any, **options: Any) -> Server:
    info = client.info(**options)
    valkey = info.get("valkey_version")
    persists = None
    if "aof_enabled" in info:
        persists = bool(info["aof_enabled"]) or _saves(client, **options)
    return Server(
        name="valkey" if valkey else "redis",
        version=str(valkey or info.get("redis_version", "unknown")),
        eviction=info.get("maxmemory_policy"),
        persists=persists,
    )


def _saves(client: Any, **options: Any) -> bool | None:
    """Say whether snapshots are taken, None where the server does not let one ask."""
    try:
        return bool(client.config_get("save", **options).get("save"))
    except redis.ResponseError:
        return None


def _client_of(cache: Any) -> Any:
    """Return the client through which `cache` writes, None if it is no one Redis server."""
    if isinstance(cache, RedisCache):
        return cache._cache.get_client(write=True)
    used = getattr(cache, "client", None)
    if isinstance(used, DefaultClient) and not isinstance(used, ShardClient):
        return used.get_client(write=True)
    return None


def _database_of_cache(alias: str) -> tuple[Any, ...] | None:
    try:
        return _database_of(_client_of(caches[alias]))
    except _NO_CACHE:
        return None


def _database_of(client: Any) -> tuple[Any, ...] | None:
    """Return server and number of the database, None where that is not one database."""
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        return None
    options = pool.connection_kwargs
    host = options.get("host", "localhost")
    address = "127.0.0.1" if host == "localhost" else host, options.get("port", 6379)
    service = getattr(pool, "service_name", None)
    return service or options.get("path") or address, str(options.get("db") or 0)
