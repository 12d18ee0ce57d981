"""System checks: each mistake has an id, and the sound setting has none."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from django.contrib import admin
from django.core import checks
from django.core.cache import caches
from django.db import models, router
from django.test import override_settings
from django.test.utils import isolate_apps
from services import Services

from django_fencing.admin import FencedResourceAdmin
from django_fencing.checks import check_settings
from django_fencing.conf import conf, faults
from django_fencing.models import FencedResource
from tests.helpers import counted_calls
from tests.shop.models import Composite, Job, Plain

ROOT = Path(__file__).parents[1]

REDIS = "django_redis.cache.RedisCache"
DJANGO_REDIS = "django.core.cache.backends.redis.RedisCache"
LOCAL_MEMORY = "django.core.cache.backends.locmem.LocMemCache"
CLOSED_PORT = "redis://127.0.0.1:1"

OTHERS_THAN_REDIS = {
    "locmem": {"BACKEND": LOCAL_MEMORY},
    "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
    "db": {"BACKEND": "django.core.cache.backends.db.DatabaseCache", "LOCATION": "cache"},
    "file": {"BACKEND": "django.core.cache.backends.filebased.FileBasedCache", "LOCATION": "/x"},
    "shards": {
        "BACKEND": REDIS,
        "LOCATION": [f"{CLOSED_PORT}/1", f"{CLOSED_PORT}/2"],
        "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
    },
}


def refuse_to_connect(*args: Any) -> None:
    """Stand in for socket.connect() where nothing may be sent."""
    raise AssertionError(f"somebody connects to {args}")


def found(*, deploy: bool = False, **fencing: Any) -> list[checks.CheckMessage]:
    """Run the checks with FENCING set so, and return what those of this app say."""
    with override_settings(FENCING=fencing):
        messages = checks.run_checks(include_deployment_checks=deploy)
    ours = [message for message in messages if (message.id or "").startswith("django_fencing.")]
    return [message for message in ours if message.obj is not Composite]


def ids(messages: list[checks.CheckMessage]) -> list[str]:
    """Return the ids of some messages without the app's label."""
    return [str(message.id).removeprefix("django_fencing.") for message in messages]


def only(messages: list[checks.CheckMessage]) -> checks.CheckMessage:
    """Return the one message."""
    assert len(messages) == 1, messages
    return messages[0]


def deployed(**fencing: Any) -> list[checks.CheckMessage]:
    """Run the checks as of --deploy in a project that names itself."""
    return found(deploy=True, PREFIX="shop", **fencing)


def redis_at(url: str, backend: str = REDIS, **options: Any) -> dict[str, Any]:
    """Return a cache in the Redis at `url`."""
    return {"BACKEND": backend, "LOCATION": url, **({"OPTIONS": options} if options else {})}


@pytest.fixture(autouse=True)
def silence() -> Iterator[list[str]]:
    """Let the settings be read anew, and collect what the checks send."""
    with counted_calls() as calls:
        yield calls


# The settings


def test_sound_settings_are_no_mistake(silence: list[str]) -> None:
    """And nothing is asked of Redis or of a database: this test may not use any."""
    assert found() == []
    assert silence == []


def test_a_server_that_is_away_is_no_mistake_and_costs_no_time() -> None:
    """A deployment checks its settings where no server can be reached."""
    caches_setting = {
        "default": redis_at(CLOSED_PORT),
        "other": redis_at(f"{CLOSED_PORT}/1"),
        "django": redis_at(f"{CLOSED_PORT}/2", DJANGO_REDIS),
    }
    began = time.monotonic()

    with (
        override_settings(CACHES=caches_setting),
        mock.patch.object(socket.socket, "connect", refuse_to_connect),
    ):
        assert found() == []

    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("TLL", 5),
        ("TTL", "30"),
        ("TTL", 90_000),
        ("MAX_TTL", None),
        ("WAIT", -1),
        ("IDLE_TTL", float("nan")),
        ("PREFIX", ""),
        ("CACHE", 7),
        ("STORE", None),
        ("DATABASE", "nowhere"),
        ("NAMESPACE", "tests.test_checks.missing"),
        ("NAMESPACE", 7),
        ("NAMESPACE", None),
        ("CLIENT_FACTORY", "tests.test_checks.ROOT"),
    ],
)
def test_a_setting_that_means_nothing_is_an_error(key: str, value: Any) -> None:
    """E001 names it."""
    message = only(found(**{key: value}))

    assert message.id == "django_fencing.E001"
    assert message.level == checks.ERROR
    assert key in message.msg


def test_all_faults_of_the_settings_are_told_at_once() -> None:
    """In the order in which the README lists them, each with its default."""
    messages = found(TTL="soon", WAIT=-1, CACHE=7)

    assert ids(messages) == ["E001"] * 3
    assert [message.msg.split("'")[1] for message in messages] == ["CACHE", "TTL", "WAIT"]
    assert messages[1].hint == "Without FENCING['TTL'] it is 30."


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("TLL", "Did you mean 'TTL' instead of 'TLL'?"),
        ("max_ttl", "Did you mean 'MAX_TTL' instead of 'max_ttl'?"),
        ("x", "Leave them out."),
        (3, "Leave them out."),
    ],
)
def test_an_unknown_setting_is_likened_to_a_known_one(key: Any, hint: str) -> None:
    """The message lists all of them, the hint the nearest."""
    with override_settings(FENCING={key: 1}):
        assert [hint_of for _, hint_of in faults()] == [hint]


@pytest.mark.parametrize("given", [["TTL"], None], ids=repr)
def test_a_setting_that_is_no_dictionary_is_an_error(given: Any) -> None:
    """E001 says what it must be."""
    conf.__init__()  # as in a new process
    with override_settings(FENCING=given):
        messages = checks.run_checks()

    assert [message.id for message in messages if message.obj is not Composite] == [
        "django_fencing.E001"
    ]


def tenant() -> str:
    """Refuse to say which tenant it is, as a project does outside of a request."""
    raise AssertionError("asked for the tenant")


@pytest.mark.parametrize("namespace", [tenant, "tests.test_checks.tenant"], ids=["code", "path"])
def test_the_tenant_is_not_asked_for(namespace: Any) -> None:
    """Which one it is may not be known yet."""
    assert found(NAMESPACE=namespace) == []
    assert ids(found(deploy=True, NAMESPACE=namespace)) in (["W006", "W008"], ["W008", "W006"])


# Where the leases are kept


# Its client is not installed.
MEMCACHED = "django.core.cache.backends.memcached.PyMemcacheCache"


@pytest.mark.parametrize("backend", [f"{DJANGO_REDIS}s", "missing.cache.Cache", MEMCACHED])
def test_a_cache_that_cannot_be_imported_is_an_error(backend: str) -> None:
    """E002 names the alias, whatever Django's own checks make of it."""
    with override_settings(CACHES={"default": {"BACKEND": backend, "LOCATION": "x"}}):
        message = only(check_settings())

    assert message.id == "django_fencing.E002"
    assert message.msg.startswith("FENCING['CACHE'] is 'default': ")


@pytest.mark.parametrize("backend", [f"{DJANGO_REDIS}s", "missing.cache.Cache", MEMCACHED])
def test_another_cache_that_cannot_be_imported_is_none_of_ours(backend: str) -> None:
    """Django says so."""
    others = {"other": {"BACKEND": backend, "LOCATION": "x"}}
    with override_settings(CACHES={"default": redis_at(CLOSED_PORT), **others}):
        assert check_settings() == []


@pytest.mark.parametrize("cache", OTHERS_THAN_REDIS.values(), ids=OTHERS_THAN_REDIS.keys())
def test_a_cache_that_excludes_nobody_is_an_error(cache: dict[str, Any]) -> None:
    """E002 names the kind and the ways out."""
    with override_settings(CACHES={"default": cache}):
        message = only(found())

    assert message.id == "django_fencing.E002"
    assert message.level == checks.ERROR
    assert "FENCING['CACHE'] is 'default'" in message.msg
    for way_out in (REDIS, DJANGO_REDIS, "FENCING['CLIENT_FACTORY']"):
        assert way_out in f"{message.msg} {message.hint}"


@pytest.mark.parametrize(
    "fencing",
    [
        {"CACHE": "nowhere"},
        {"STORE": "tests.test_checks.missing"},
        {"STORE": "tests.test_checks.ROOT"},
        {"STORE": "django_fencing.stores.base.Listed"},
    ],
    ids=["cache", "path", "object", "class"],
)
def test_a_store_that_is_none_is_an_error(fencing: dict[str, str]) -> None:
    """E002 names it."""
    message = only(found(**fencing))

    assert message.id == "django_fencing.E002"
    ((key, _),) = fencing.items()
    assert f"FENCING['{key}']" in message.msg


@pytest.mark.parametrize("backend", [REDIS, DJANGO_REDIS])
def test_a_redis_cache_is_sound(backend: str) -> None:
    """That of django-redis and Django's own."""
    with override_settings(CACHES={"default": redis_at(CLOSED_PORT, backend)}):
        assert found() == []


def test_a_factory_makes_the_cache_irrelevant() -> None:
    """It is not called: it may connect."""

    def factory() -> Any:
        raise AssertionError("the factory was called")

    with override_settings(CACHES={"default": OTHERS_THAN_REDIS["locmem"]}):
        assert found(CLIENT_FACTORY=factory) == []


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ("redis://localhost:6379/1", redis_at("redis://127.0.0.1:6379/1")),
        ("redis://127.0.0.1/1", redis_at("redis://localhost:6379/1")),
        ("redis://cache:6379", redis_at("redis://cache:6379/0")),
        ("redis://cache:6379/3", redis_at("redis://cache:6379/3", DJANGO_REDIS)),
        ("redis://cache:6379/3", redis_at("redis://cache:6379?db=3", DJANGO_REDIS)),
        ("redis://cache:6379/3", redis_at("redis://cache:6379", DJANGO_REDIS, db="3")),
        ("redis://cache:6379/3", redis_at("redis://user:secret@cache:6379/3")),
        ("redis://cache:6379/3", redis_at("rediss://cache:6379/3")),
        ("redis://cache:6379/3", redis_at("redis://cache:6379/3") | {"KEY_PREFIX": "x"}),
        ("unix:///run/redis.sock", redis_at("unix:///run/redis.sock?db=0")),
        ("unix:///run/redis.sock?db=2", redis_at("unix:///run/redis.sock?db=2", DJANGO_REDIS)),
    ],
)
def test_a_cache_whose_clear_ends_the_leases_is_a_warning(mine: str, other: Any) -> None:
    """W001 names the cache, whatever way the database is written in."""
    with override_settings(CACHES={"default": redis_at(mine), "pages": other}):
        message = only(found())

    assert message.id == "django_fencing.W001"
    assert message.level == checks.WARNING
    assert "'pages'" in message.msg
    assert "FENCING['CACHE']" in str(message.hint)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ("redis://cache:6379/1", redis_at("redis://cache:6379/2")),
        ("redis://cache:6379/1", redis_at("redis://cache:6379")),
        ("redis://cache:6379/1", redis_at("redis://cache:6380/1")),
        ("redis://cache:6379/1", redis_at("redis://cache2:6379/1", DJANGO_REDIS)),
        ("unix:///run/redis.sock", redis_at("unix:///run/redis2.sock")),
        ("unix:///run/redis.sock", redis_at("redis://localhost")),
        ("redis://cache:6379/1", OTHERS_THAN_REDIS["locmem"]),
        ("redis://cache:6379/1", OTHERS_THAN_REDIS["dummy"]),
        ("redis://cache:6379/1", OTHERS_THAN_REDIS["shards"]),
    ],
)
def test_a_cache_in_another_database_is_sound(mine: str, other: Any) -> None:
    """Its clear() leaves the leases alone."""
    with override_settings(CACHES={"default": redis_at(mine), "pages": other}):
        assert found() == []


def test_the_alias_of_the_locks_is_the_one_that_is_compared() -> None:
    """Two other caches may share a database with each other."""
    caches_setting = {
        "default": redis_at("redis://cache/0"),
        "pages": redis_at("redis://cache/0"),
        "locks": redis_at("redis://cache/1"),
    }

    with override_settings(CACHES=caches_setting):
        assert found(CACHE="locks") == []
        assert ids(found()) == ["W001"]


def test_connections_that_are_closed_under_other_threads_are_a_warning() -> None:
    """W002, for the setting as for the option."""
    option = {"default": redis_at(CLOSED_PORT, CLOSE_CONNECTION=True)}
    against = {"default": redis_at(CLOSED_PORT, CLOSE_CONNECTION=False)}

    with override_settings(CACHES=option):
        by_option = only(found())
    with override_settings(DJANGO_REDIS_CLOSE_CONNECTION=True):
        by_setting = only(found())
        with override_settings(CACHES=against):
            assert found() == []

    for message in (by_option, by_setting):
        assert message.id == "django_fencing.W002"
        assert "DJANGO_REDIS_CLOSE_CONNECTION" in str(message.hint)


def test_a_setting_of_django_redis_says_nothing_of_djangos_own_cache() -> None:
    """Which keeps its connections."""
    with override_settings(
        CACHES={"default": redis_at(CLOSED_PORT, DJANGO_REDIS)}, DJANGO_REDIS_CLOSE_CONNECTION=True
    ):
        assert found() == []


def test_a_counter_that_is_forgotten_early_is_a_warning() -> None:
    """W004, below twice the longest lease."""
    message = only(found(MAX_TTL=100, IDLE_TTL=199))

    assert message.id == "django_fencing.W004"
    assert "IDLE_TTL" in str(message.hint)
    assert found(MAX_TTL=100, IDLE_TTL=200) == []


# Models and databases


@pytest.fixture
def shop() -> Iterator[Any]:
    """Yield the app to which the models belong that the test defines, without those it has."""
    with isolate_apps("tests.shop") as isolated:
        yield isolated.get_app_config("shop")


def faults_of(app: Any) -> list[checks.CheckMessage]:
    """Return what the checks of this app say of the models of another."""
    messages = checks.run_checks(app_configs=[app], tags=[checks.Tags.models])
    return [one for one in messages if (one.id or "").startswith("django_fencing.")]


def test_a_model_with_a_fence_is_sound(shop: Any) -> None:
    """Its children and proxies too, and whatever its primary key is."""

    class Order(FencedResource):
        reference = models.CharField(max_length=9, primary_key=True)

        class Meta:
            app_label = "shop"

    class Urgent(Order):
        class Meta:
            app_label = "shop"

    class Shown(Order):
        class Meta:
            app_label = "shop"
            proxy = True

    assert faults_of(shop) == []


def test_a_model_that_replaces_the_fence_is_an_error(shop: Any) -> None:
    """E004 names the field; a subclass of such a field counts."""

    class Order(FencedResource):
        last_fence_token = models.IntegerField(default=0)

        class Meta:
            app_label = "shop"

    message = only(faults_of(shop))
    assert message.id == "django_fencing.E004"
    assert message.obj is Order
    assert "last_fence_token" in message.msg
    assert "Rename" in str(message.hint)


def test_a_field_that_is_almost_the_fence_is_an_error(shop: Any) -> None:
    """It would not start at 0, or could be edited."""

    class Order(FencedResource):
        last_fence_holder = models.UUIDField(null=True)

        class Meta:
            app_label = "shop"

    assert ids(faults_of(shop)) == ["E004"]


def test_a_property_that_hides_the_fence_is_an_error(shop: Any) -> None:
    """The column is there, and nobody can read it."""

    class Order(FencedResource):
        last_fence_token = property(lambda self: 7)

        class Meta:
            app_label = "shop"

    assert ids(faults_of(shop)) == ["E004"]


def test_a_model_without_the_column_is_an_error(shop: Any) -> None:
    """None takes a field of an abstract model away."""

    class Order(FencedResource):
        last_fence_holder = None  # type: ignore[assignment]

        class Meta:
            app_label = "shop"

    assert ids(faults_of(shop)) == ["E004"]


def test_a_composite_key_is_an_error(shop: Any) -> None:
    """E005 says what to lock instead."""

    class Line(FencedResource):
        pk = models.CompositePrimaryKey("first", "second")
        first = models.IntegerField()
        second = models.IntegerField()

        class Meta:
            app_label = "shop"

    message = only(faults_of(shop))
    assert message.id == "django_fencing.E005"
    assert message.obj is Line
    assert "lock a name" in str(message.hint)


class Routed:
    """A router that sends the fences of names to one database, and lets tables be in some."""

    def __init__(self, written: str | None, tables: set[str]) -> None:
        self.written = written
        self.tables = tables

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return self.written if model._meta.label == "django_fencing.Fence" else None

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db in self.tables if app_label == "django_fencing" else None


def routed(written: str | None, *tables: str) -> Any:
    """Let a router send the fences to `written`, where `tables` names the aliases with a table."""
    return mock.patch.object(router, "routers", [Routed(written, {*tables})])


def test_a_database_without_the_table_is_an_error() -> None:
    """E003: the first lock of a name would fail."""
    with routed("other", "other"):
        message = only(found())
        assert found(DATABASE="other") == []

    assert message.id == "django_fencing.E003"
    assert "'default'" in message.msg
    assert "FENCING['DATABASE']" in str(message.hint)


def test_a_router_that_sends_the_table_elsewhere_is_a_warning() -> None:
    """W003: fences are read and written in the database of the settings."""
    with routed("other", "default", "other"):
        message = only(found())
        assert found(DATABASE="other") == []

    assert message.id == "django_fencing.W003"
    assert "'other'" in message.msg
    assert "FENCING['DATABASE']" in str(message.hint)


# The admin


def errors_of(model: Any, **attributes: Any) -> list[str]:
    """Return the ids of what is wrong with an admin of `model`."""
    kind = type("ShopAdmin", (FencedResourceAdmin,), attributes)
    return ids(kind(model, admin.AdminSite()).check())


def test_an_admin_of_a_fenced_model_is_sound() -> None:
    """With the fence in its list, its fieldsets and its own read-only fields, too."""
    shown: dict[str, Any] = {
        "list_display": ["pk", "last_fence_token", "amount"],
        "readonly_fields": ["last_fence_token", "last_fence_holder"],
        "fieldsets": [(None, {"fields": ["amount", "last_fence_token", "shown_fence_token"]})],
        "save_as": True,
    }

    assert errors_of(Job) == []
    assert errors_of(Job, **shown) == []


def test_an_admin_of_a_model_without_a_fence_is_an_error() -> None:
    """E006."""
    assert errors_of(Plain) == ["E006"]


def test_a_list_that_saves_rows_is_an_error() -> None:
    """E007: it would do so without their locks."""
    assert errors_of(Job, list_display=["pk", "amount"], list_editable=["amount"]) == ["E007"]


# manage.py check


def test_manage_py_check_fails_and_names_the_ways_out(tmp_path: Path) -> None:
    """As a deployment runs it."""
    settings = f"""
        from tests.settings import *
        CACHES = {{"default": {{"BACKEND": {LOCAL_MEMORY!r}}}}}
    """
    (tmp_path / "local_memory.py").write_text(textwrap.dedent(settings))
    paths = [str(tmp_path), str(ROOT), str(ROOT / "example_project")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    process = subprocess.run(
        [sys.executable, str(ROOT / "example_project/manage.py"), "check"],
        env=environment | {"DJANGO_SETTINGS_MODULE": "local_memory"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert process.returncode == 1
    assert "(django_fencing.E002)" in process.stderr
    assert "Traceback" not in process.stderr
    for way_out in (REDIS, DJANGO_REDIS, "FENCING['CLIENT_FACTORY']"):
        assert way_out in process.stderr


# manage.py check --deploy


@pytest.fixture(scope="module")
def unsafe_server() -> Iterator[Services]:
    """Yield a Valkey that evicts keys and keeps no snapshot."""
    options = ["--maxmemory-policy", "allkeys-lru", "--maxmemory", "100mb", "--save", ""]
    with Services(postgres=False, valkey_args=options) as services:
        yield services


@pytest.fixture(scope="module")
def safe_server() -> Iterator[Services]:
    """Yield a Valkey that appends to a file."""
    with Services(postgres=False, valkey_args=["--appendonly", "yes"]) as services:
        yield services


@pytest.fixture
def at() -> Iterator[Any]:
    """Let the app use the server at a URL."""
    with override_settings():
        yield lambda services: override_settings(CACHES={"default": redis_at(services.redis_url)})
        for cache in caches.all(initialized_only=True):
            if hasattr(cache, "client"):
                cache.client.get_client().connection_pool.disconnect()


def test_a_server_that_is_safe_is_sound(at: Any, safe_server: Services) -> None:
    """Neither eviction nor a restart ends a lease."""
    with at(safe_server):
        assert deployed() == []


def test_a_server_that_evicts_and_forgets_is_two_warnings(at: Any, unsafe_server: Services) -> None:
    """W005 and W006, under --deploy only."""
    with at(unsafe_server):
        evicts, forgets = sorted(deployed(), key=lambda message: str(message.id))
        assert found(PREFIX="shop") == []

    assert ids([evicts, forgets]) == ["W005", "W006"]
    assert "allkeys-lru" in evicts.msg
    assert "noeviction" in str(evicts.hint)
    assert "appendonly" in str(forgets.hint)


def test_snapshots_are_persistence(at: Any, private_redis: Any, private_services: Services) -> None:
    """A restart finds most of the leases again."""
    with at(private_services):
        assert ids(deployed()) == ["W006"]

        private_redis.config_set("save", "60 1000")
        try:
            assert deployed() == []
        finally:
            private_redis.config_set("save", "")


def test_what_a_server_does_not_tell_is_no_warning(
    private_redis: Any, private_services: Services
) -> None:
    """Hosted ones forbid CONFIG."""
    private_redis.acl_setuser(
        "guest", enabled=True, nopass=True, commands=["+@all", "-config"], keys=["*"]
    )
    url = private_services.redis_url.replace("unix://", "unix://guest:x@")

    with override_settings(CACHES={"default": redis_at(url)}):
        messages = deployed()
        caches["default"].client.get_client().connection_pool.disconnect()

    assert messages == []


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"redis_version": "6.2.14"}, ["W007"]),
        ({"redis_version": "7.0.0"}, []),
        ({"redis_version": "10.0.0"}, []),
        ({"redis_version": "7.2.4", "valkey_version": "8.0.0"}, []),
        ({"redis_version": "6.2.4", "valkey_version": "8.0.0"}, []),
        ({"redis_version": "unstable"}, []),
        ({}, []),
    ],
)
def test_an_old_redis_is_a_warning(info: dict[str, str], expected: list[str]) -> None:
    """W007, below the oldest that the scripts are tested on."""

    class Client:
        def info(self) -> dict[str, str]:
            return info

    messages = deployed(CLIENT_FACTORY=Client)

    assert ids(messages) == expected
    assert all("7" in str(message.hint) for message in messages)


def test_the_default_prefix_is_a_warning(at: Any, safe_server: Services) -> None:
    """W008: projects that share a database would share their locks."""
    with at(safe_server):
        message = only(found(deploy=True))

    assert message.id == "django_fencing.W008"
    assert "FENCING['PREFIX']" in str(message.hint)


def test_a_server_that_is_away_is_a_warning() -> None:
    """W009."""
    with override_settings(CACHES={"default": redis_at(CLOSED_PORT)}):
        message = only(deployed())

    assert message.id == "django_fencing.W009"
    assert "no lock is granted" in str(message.hint)


def test_a_server_that_never_answers_is_a_warning_soon() -> None:
    """W009, whatever time-outs the cache has."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()

        with override_settings(CACHES={"default": redis_at(url, SOCKET_TIMEOUT=60)}):
            message = only(deployed())

    assert message.id == "django_fencing.W009"
    assert time.monotonic() - began < 5


def test_mistakes_of_the_settings_are_told_once_under_deploy() -> None:
    """There is no server to ask then."""
    with override_settings(CACHES={"default": OTHERS_THAN_REDIS["locmem"]}):
        assert ids(deployed()) == ["E002"]
    assert ids(deployed(TLL=1)) == ["E001"]


def test_the_password_of_a_server_is_in_no_message() -> None:
    """Neither of those that name an alias nor of those that quote an error."""
    url = "redis://user:hush7@127.0.0.1:1/0"
    with override_settings(CACHES={"default": redis_at(url), "pages": redis_at(url)}):
        messages = deployed()

    assert ids(messages) == ["W001", "W009"]
    assert "hush7" not in str(messages)
