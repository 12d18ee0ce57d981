"""Names as text: what a name may be, how it is written in a key, which keys belong to it."""

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote, unquote

from django_fencing.exceptions import InvalidResource

# The separator between namespace and name, and braces, which Redis Cluster reads as a hash tag,
# are not among these: https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/
_READABLE = "-._~:/@+=,;!$&*()'#?"

_LONGEST = 200
_DIGEST = 32
_TAGS = 64


def checked(name: object, what: str = "A resource's name") -> str:
    """
    Return `name` in Unicode's normal form C, so that one spelling is one resource.

    Raise InvalidResource unless it is a text that is not blank and has no NUL and no surrogate.
    """
    if not isinstance(name, str):
        raise InvalidResource(f"{what} must be a text, not {name!r}.")
    text = unicodedata.normalize("NFC", "".join((name,)))
    if not text.strip():
        raise InvalidResource(f"{what} must not be empty.")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InvalidResource(f"{what} must not hold NUL or surrogates: {text!r}.")
    return text


def encoded(text: str, readable: str = _READABLE) -> str:
    """Return `text` in printable ASCII: injective, and the same in every process."""
    return quote(text, safe=readable)


def slug(name: str, namespace: str = "") -> str:
    """
    Return what a key and `Fence.name` hold for `name`: at most 200 bytes, never ambiguous.

    "|" and "%~" cannot come out of the encoding, so no name reads like another's namespace or
    like another's shortened form.
    """
    whole = encoded(name)
    if namespace:
        whole = f"{encoded(checked(namespace))}|{whole}"
    if len(whole) <= _LONGEST:
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST]
    return f"{whole[: _LONGEST - _DIGEST - 2]}%~{digest}"


def read_slug(slug: str, namespace: str = "") -> str | None:
    """Return the name that `slug` holds, "…" for what is cut off; None if another tenant has it."""
    prefix = f"{encoded(namespace)}|" if namespace else ""
    if not slug.startswith(prefix) or "|" in slug.removeprefix(prefix):
        return None
    shown, cut, _ = slug.removeprefix(prefix).partition("%~")
    if not cut:
        return unquote(shown)
    # It may be cut within a letter, or within what stands for a byte of it.
    return unquote(re.sub("%.?$", "", shown), errors="ignore") + "…"


def slugs_of(namespace: str) -> tuple[str, str]:
    """
    Return the first slug of a tenant, and what comes after the last one in the order of bytes.

    A LIKE would not tell upper case from lower on SQLite.
    """
    whole = encoded(checked(namespace))
    return f"{whole}|", f"{whole}}}"


def namespace_of(member: str) -> str:
    """Return the tenant of what Keys.member holds."""
    _, _, slug = member.partition(":")
    encoded_namespace, bar, _ = slug.partition("|")
    return unquote(encoded_namespace) if bar else ""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The keys of one resource. They share the slot of one of 64 fixed tags of Redis Cluster."""

    base: str  # "fencing:{42}"
    member: str  # "name:import:tenant-1": the resource within its tag

    @classmethod
    def of(cls, prefix: str, member: str) -> "Keys":
        tag = int.from_bytes(hashlib.sha256(member.encode()).digest()[:4]) % _TAGS
        return cls(base=f"{prefix}:{{{tag}}}", member=member)

    @classmethod
    def of_member(cls, member: str, prefix: str) -> "Keys | None":
        """Return the keys of what was shown as this member, None if it can be none."""
        kind, colon, slug = member.partition(":")
        is_one = slug and colon and (kind in ("row", "name") or kind.startswith("name@"))
        is_short = len(member) < _LONGEST * 2 and member.isascii() and member.isprintable()
        return cls.of(prefix, member) if is_one and is_short else None

    @classmethod
    def every_tag(cls, prefix: str) -> "list[Keys]":
        """Return keys of no member for each tag: what belongs to the tag can be told by them."""
        return [cls(base=f"{prefix}:{{{tag}}}", member="") for tag in range(_TAGS)]

    @cached_property
    def lease(self) -> str:
        """The hash with the present lease; it has an expiry always."""
        return f"{self.base}:lease:{self.member}"

    @cached_property
    def token(self) -> str:
        """The counter that proposes tokens."""
        return f"{self.base}:token:{self.member}"

    @cached_property
    def held(self) -> str:
        """The sorted set of this tag's held resources, by the millisecond at which they lapse."""
        return f"{self.base}:held"

    @cached_property
    def queue(self) -> str:
        """The sorted set of those who wait for this resource, by the time at which they came."""
        return f"{self.base}:queue:{self.member}"

    @cached_property
    def beats(self) -> str:
        """The sorted set of those who wait, by the millisecond until which each is alive."""
        return f"{self.base}:beats:{self.member}"

    @cached_property
    def wakes(self) -> str:
        """First part of the lists of those who wait, each followed by the holder's id."""
        return f"{self.base}:wake:{self.member}:"

    @cached_property
    def done(self) -> str:
        """The sorted set of this tag's holders that released or gave up a moment ago."""
        return f"{self.base}:done"
