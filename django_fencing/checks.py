"""System checks: mistakes of the settings and models, before the first lock finds them."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import models, router
from django.db.models.query_utils import DeferredAttribute

from django_fencing.conf import DEFAULTS, conf, faults
from django_fencing.models import FENCE_FIELDS, Fence, FencedResource
from django_fencing.stores import clients
from django_fencing.stores.asking import impatient
from django_fencing.stores.base import get_store
from django_fencing.stores.redis import RedisStore

# Seconds that a check under --deploy waits for the server.
_PATIENCE = 2.0

# The oldest major version on which the scripts are tested.
_OLDEST_REDIS = 7


@register(Tags.caches)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """Read every setting, and ask the store whether it can exclude other processes."""
    if found := list(faults()):
        return [Error(fault, hint=hint, id="django_fencing.E001") for fault, hint in found]
    try:
        store = get_store()
        clients_of_store = isinstance(store, RedisStore)
        shared = clients.sharing() if clients_of_store else []
    except ImproperlyConfigured as error:
        hint = "Name a cache in Redis in FENCING['CACHE'], or another store in FENCING['STORE']."
        return [Error(str(error), hint=hint, id="django_fencing.E002")]
    return [*_shared_database(shared), *_closed_connections(clients_of_store), *_short_memory()]


@register(Tags.models)
def check_models(app_configs: Iterable[Any] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Look at each FencedResource model of the project."""
    configs = apps.get_app_configs() if app_configs is None else app_configs
    return [
        message
        for config in configs
        for model in config.get_models()
        if issubclass(model, FencedResource) and not model._meta.proxy
        for message in _faults(model)
    ]


@register(Tags.models)
def check_fence_table(**kwargs: Any) -> list[CheckMessage]:
    """Look for the table of named fences in the database that the settings name."""
    try:
        alias = conf.database
    except ImproperlyConfigured:
        return []  # E001
    if not router.allow_migrate_model(alias, Fence):
        return [
            Error(
                f"Named resources are fenced in database {alias!r}, in which the routers allow no "
                f"table for {Fence._meta.label}.",
                hint="Let allow_migrate() accept it, or name another database in "
                "FENCING['DATABASE'].",
                id="django_fencing.E003",
            )
        ]
    routed = router.db_for_write(Fence)
    if routed != alias:
        return [
            Warning(
                f"Named resources are fenced in database {alias!r}, but the routers send "
                f"{Fence._meta.label} to {routed!r}: your own queries look for them there.",
                hint=f"Let db_for_read() and db_for_write() return {alias!r} for it, or set "
                f"FENCING['DATABASE'] to {routed!r}.",
                id="django_fencing.W003",
            )
        ]
    return []


@register(Tags.caches, deploy=True)
def check_deployment(**kwargs: Any) -> list[CheckMessage]:
    """Ask the server for what would end leases early, and look for what projects share."""
    messages = [*_shared_prefix()]
    try:
        if isinstance(get_store(), RedisStore):
            with impatient(_PATIENCE) as client:
                faults_of_servers = map(_server_faults, clients.servers(client))
                messages += {fault.id: fault for fault in chain(*faults_of_servers)}.values()
    except ImproperlyConfigured:
        pass  # E001 or E002
    except clients.FAILURES as error:
        messages.append(
            Warning(
                f"The server that keeps the leases cannot be asked: {error}",
                hint="Without it no lock is granted.",
                id="django_fencing.W009",
            )
        )
    return messages


def _shared_database(aliases: list[str]) -> Iterator[CheckMessage]:
    if aliases:
        names = ", ".join(map(repr, sorted(aliases)))
        yield Warning(
            f"The cache {names} is in the Redis database that keeps the leases: its clear() ends "
            f"every lease.",
            hint="Give the locks a database of their own, as in redis://host:6379/1, under an "
            "alias that FENCING['CACHE'] names.",
            id="django_fencing.W001",
        )


def _closed_connections(is_redis: bool) -> Iterator[CheckMessage]:
    if is_redis and clients.closes_after_requests():
        yield Warning(
            f"django-redis disconnects the cache {conf.cache!r} after each request, other threads' "
            f"connections too: a lock that one of them takes at that moment fails.",
            hint="Leave out DJANGO_REDIS_CLOSE_CONNECTION and the option CLOSE_CONNECTION.",
            id="django_fencing.W002",
        )


def _short_memory() -> Iterator[CheckMessage]:
    if conf.idle_ttl < 2 * conf.max_ttl:
        yield Warning(
            f"FENCING['IDLE_TTL'] is {conf.idle_ttl:g} s, less than twice MAX_TTL, "
            f"{conf.max_ttl:g} s: a counter may be forgotten while a lease is held, and then the "
            f"next acquire costs two steps more.",
            hint="Raise IDLE_TTL or lower MAX_TTL.",
            id="django_fencing.W004",
        )


def _faults(model: type[models.Model]) -> Iterator[CheckMessage]:
    for name in FENCE_FIELDS:
        if not _is_inherited(model, name):
            yield Error(
                f"{model._meta.label} replaces {name}, in which FencedResource keeps the fence.",
                hint="Rename your own field or attribute.",
                obj=model,
                id="django_fencing.E004",
            )
    if isinstance(model._meta.pk, models.CompositePrimaryKey):
        yield Error(
            f"{model._meta.label} has a composite primary key: its rows cannot be locked.",
            hint="Do not inherit from FencedResource, and lock a name that is made of the key.",
            obj=model,
            id="django_fencing.E005",
        )


def _is_inherited(model: type[models.Model], name: str) -> bool:
    given: Any = FencedResource._meta.get_field(name)
    fields: dict[str, Any] = {field.name: field for field in model._meta.fields}
    shadowed = not isinstance(getattr(model, name, None), DeferredAttribute)
    return not shadowed and fields[name].deconstruct()[1:] == given.deconstruct()[1:]


def _server_faults(server: clients.Server) -> Iterator[CheckMessage]:
    if server.eviction not in (None, "noeviction"):
        yield Warning(
            f"The server that keeps the leases evicts keys (maxmemory-policy "
            f"{server.eviction}): a lease may end before its time.",
            hint="Set maxmemory-policy to noeviction on the server of the locks.",
            id="django_fencing.W005",
        )
    if server.persists is False:
        yield Warning(
            "The server that keeps the leases persists nothing: its restart ends every lease.",
            hint="Turn on appendonly. The fence refuses late writes in any case.",
            id="django_fencing.W006",
        )
    major = server.version.partition(".")[0]
    if server.name == "redis" and major.isdigit() and int(major) < _OLDEST_REDIS:
        yield Warning(
            f"The server that keeps the leases is Redis {server.version}.",
            hint=f"django_fencing is tested on Redis {_OLDEST_REDIS} and newer, and on Valkey.",
            id="django_fencing.W007",
        )


def _shared_prefix() -> Iterator[CheckMessage]:
    try:
        prefix = conf.prefix
    except ImproperlyConfigured:
        return
    if prefix == DEFAULTS["PREFIX"]:
        yield Warning(
            f"FENCING['PREFIX'] is {prefix!r}, as it is by default: projects that share a Redis "
            f"database share their locks.",
            hint="Name the project in FENCING['PREFIX'].",
            id="django_fencing.W008",
        )
