"""The settings."""

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_fencing.conf import DEFAULTS, conf, faults


def tenant() -> str:
    """Stand for what a project computes from its current tenant."""
    return "tenant-1"


def nothing() -> None:
    """Stand for a tenant that is not set."""


NOT_CALLABLE = 1


def test_the_defaults_hold_without_the_setting(settings: Any) -> None:
    """A project needs no FENCING at all."""
    del settings.FENCING

    assert (conf.cache, conf.database, conf.prefix, conf.namespace) == (
        "default",
        "default",
        "fencing",
        "",
    )
    assert (conf.ttl, conf.max_ttl, conf.wait, conf.idle_ttl) == (30, 86_400, 0, 604_800)
    assert conf.client_factory is None
    assert conf.store == "django_fencing.stores.redis.RedisStore"


def test_settings_are_read_at_the_moment_of_use() -> None:
    """override_settings is followed, inside and after."""
    with override_settings(FENCING={"TTL": 5}):
        assert conf.ttl == 5

    assert conf.ttl == 30


def test_unknown_keys_are_an_error() -> None:
    """A misspelt key is not ignored."""
    with (
        override_settings(FENCING={"TLL": 5}),
        pytest.raises(ImproperlyConfigured, match="unknown keys: TLL. The known ones are CACHE, "),
    ):
        conf.ttl  # noqa: B018


def test_the_setting_must_be_a_dictionary() -> None:
    """Anything else is an error that says so."""
    with (
        override_settings(FENCING=["TTL"]),
        pytest.raises(ImproperlyConfigured, match="must be a dictionary"),
    ):
        conf.ttl  # noqa: B018


@pytest.mark.parametrize(
    ("key", "value", "attribute"),
    [
        ("TTL", 0, "ttl"),
        ("TTL", "30", "ttl"),
        ("TTL", 90_000, "ttl"),
        ("WAIT", -1, "wait"),
        ("MAX_TTL", None, "max_ttl"),
        ("IDLE_TTL", float("nan"), "idle_ttl"),
        ("PREFIX", "", "prefix"),
        ("CACHE", None, "cache"),
        ("NAMESPACE", "tests.test_conf.missing", "namespace"),
        ("NAMESPACE", "tests.test_conf.nothing", "namespace"),
        ("NAMESPACE", 7, "namespace"),
        ("CLIENT_FACTORY", "tests.test_conf.NOT_CALLABLE", "client_factory"),
    ],
)
def test_bad_values_are_an_error_that_names_the_key(key: str, value: Any, attribute: str) -> None:
    """Each setting says what it must be."""
    with (
        override_settings(FENCING={key: value}),
        pytest.raises(ImproperlyConfigured, match=rf"FENCING\['{key}'\]"),
    ):
        getattr(conf, attribute)


def test_a_default_that_does_not_fit_is_told_as_such() -> None:
    """Nobody has written it: the error says what to add, and the hint does not praise it."""
    with override_settings(FENCING={"MAX_TTL": 10}):
        with pytest.raises(
            ImproperlyConfigured, match=r"That is the default: set FENCING\['TTL'\]"
        ):
            conf.ttl  # noqa: B018
        ((fault, hint),) = faults()

    assert "at most 10 seconds, not 30" in fault
    assert "30" not in hint


@pytest.mark.parametrize("value", ["tenant-1", "tests.test_conf.tenant", tenant])
def test_the_namespace_is_a_text_or_what_a_callable_returns(value: Any) -> None:
    """A dotted path is called at each use."""
    with override_settings(FENCING={"NAMESPACE": value}):
        assert conf.namespace == "tenant-1"


def test_every_setting_has_a_property() -> None:
    """The defaults and the properties are one list."""
    properties = {name for name in vars(type(conf)) if not name.startswith("_")}

    assert properties == {key.lower() for key in DEFAULTS}
