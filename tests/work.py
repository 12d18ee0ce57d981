"""Work with an effect that can be counted, for the tests of once()."""

from collections.abc import Callable
from typing import Any

import pytest

from django_fencing.conf import conf
from django_fencing.locks import fenced_atomic
from django_fencing.models import OnceRecord
from django_fencing.names import slug
from django_fencing.once import once
from tests.helpers import (
    SECONDS,
)
from tests.shop.models import Entry

NOTHING = object()

BAD_KEYS = ["", " \t", 7, None, b"key", "a\0b", "a\ud800"]


def write(text: str = "done", alias: str = "default") -> Any:
    """Have an effect, and return a result that says which one it was."""
    Entry.objects.using(alias).create(text=text)
    return {"text": text, "entries": Entry.objects.using(alias).count()}


def written(alias: str = "default") -> list[str]:
    """Return the effects, in order."""
    return list(Entry.objects.using(alias).order_by("pk").values_list("text", flat=True))


def never(*args: Any) -> Any:
    pytest.fail("The work was done.")


def fail(text: str = "failed") -> Any:
    write(text)
    raise KeyError(text)


def do(resource: str, key: str, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do work once, in a fenced transaction of its own."""
    using = options.pop("using", None)
    with fenced_atomic(resource, using=using, wait=SECONDS):
        return once(key, func, *args, **options)


def record_of(key: str, alias: str = "default") -> OnceRecord:
    return OnceRecord.objects.using(alias).get(pk=slug(key, conf.namespace))
