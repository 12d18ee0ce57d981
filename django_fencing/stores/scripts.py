"""The Lua scripts: each is one atomic step, sent by its digest."""

import functools
import hashlib
from importlib.resources import files
from typing import Any

import redis

from django_fencing.exceptions import StoreUnavailable
from django_fencing.resources import Resource
from django_fencing.stores.asking import asking
from django_fencing.stores.clients import FAILURES

# What is put between lease.lua and these scripts.
_SHARED = {
    "acquire": ("counter", "queue"),
    "reissue": ("counter",),
    "release": ("queue",),
    "take_over": ("counter",),
}


def run(
    name: str, resource: Resource, keys: list[str], args: list[Any], patience: float | None = None
) -> list[str]:
    """
    Run a script by its digest; where the server has lost it, send it whole. Return texts.

    Raise StoreUnavailable. `patience` is that of asking().
    """
    script, digest = _script(name)
    rest = (len(keys), *keys, *args)
    try:
        ask = asking(patience)
        try:
            reply = ask("EVALSHA", digest, *rest)
        except redis.exceptions.NoScriptError:
            reply = ask("EVAL", script, *rest)
    except FAILURES as error:
        raise StoreUnavailable(
            f"Cannot {name.replace('_', ' ')} {resource.name!r}: {error}", resource=resource.name
        ) from error
    return [_text(part) for part in (reply if isinstance(reply, list) else [reply])]


@functools.cache
def _script(name: str) -> tuple[str, str]:
    """Return the script and its SHA-1, by which EVALSHA names it."""
    folder = files("django_fencing.stores") / "lua"
    parts = ["lease", *_SHARED.get(name, ()), name]
    text = "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in parts)
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _text(part: Any) -> str:
    return part.decode(errors="replace") if isinstance(part, bytes) else str(part)
