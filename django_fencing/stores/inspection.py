"""What the leases in Redis look like, for people: no KEYS, no SCAN, nothing is written."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from django_fencing.conf import conf
from django_fencing.exceptions import StoreUnavailable
from django_fencing.grants import LeaseRecord
from django_fencing.names import Keys
from django_fencing.stores import clients
from django_fencing.stores.base import Inspector, Listed, Look

# Of each of the 64 tags, the latest to end first.
_MOST_OF_A_TAG = 160

_HOLDER = re.compile("[0-9a-fA-F]{32}")

# The year 2100.
_LATEST = 4_102_444_800

_FIELDS = ("holder", "token", "host", "pid", "function", "acquired_at", "model", "pk")


class RedisInspector(Inspector):
    """Reads the sorted sets of held resources, and their leases, through one client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def listed(self) -> list[Listed]:
        tags = Keys.every_tag(conf.prefix)
        latest = ("0", str(_MOST_OF_A_TAG - 1), "REV", "WITHSCORES")
        found = self._ask([("ZRANGE", tag.held, *latest) for tag in tags])
        listed = [
            Listed(keys=replace(tag, member=_text(member)), ends=_moment(float(score)))
            for tag, members in zip(tags, found, strict=True)
            for member, score in _pairs(members)
        ]
        return sorted(listed, key=lambda lease: lease.ends, reverse=True)

    def look(self, keys: Sequence[Keys]) -> list[Look]:
        commands = [
            command
            for key in keys
            for command in (
                ("PTTL", key.lease),
                ("HMGET", key.lease, *_FIELDS),
                ("ZSCORE", key.held, key.member),
            )
        ]
        answers = iter(self._ask(commands))
        looks = [
            Look(lease=_record(ends, values), listed=score is not None)
            for ends, values, score in zip(answers, answers, answers, strict=True)
        ]
        return self._with_digests(keys, looks)

    def counters(self, keys: Sequence[Keys]) -> list[int | None]:
        found = self._ask([("GET", key.token) for key in keys])
        return [None if isinstance(value, Exception) else _number(_text(value)) for value in found]

    def _with_digests(self, keys: Sequence[Keys], looks: list[Look]) -> list[Look]:
        """Name leases whose holder cannot be read by the digest of what is there."""
        unread = [
            number for number, look in enumerate(looks) if look.lease and not look.lease.holder
        ]
        dumps = self._ask([("DUMP", keys[number].lease) for number in unread])
        for number, dump in zip(unread, dumps, strict=True):
            lease = looks[number].lease
            if lease and isinstance(dump, bytes):
                digest = hashlib.sha1(dump, usedforsecurity=False).hexdigest()
                looks[number] = looks[number]._replace(
                    lease=replace(lease, holder=f"sha1:{digest}")
                )
        return looks

    def _ask(self, commands: Sequence[tuple[str, ...]]) -> list[Any]:
        """Send all at once. A value that is no lease gives an exception in its place."""
        try:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command, **clients.RAW)
            answers: list[Any] = pipeline.execute(raise_on_error=False) if commands else []
        except clients.FAILURES as error:
            raise StoreUnavailable(f"Cannot look at the leases: {error}") from error
        refused = (answer for answer in answers if clients.is_refusal(answer))
        if (refusal := next(refused, None)) is not None:
            raise StoreUnavailable(f"Cannot look at the leases: {refusal}") from refusal
        return answers


def _pairs(members: Any) -> list[tuple[Any, Any]]:
    """Return members with their scores, which come nested in RESP3."""
    if isinstance(members, Exception):  # the key holds something else
        return []
    if members and isinstance(members[0], list | tuple):
        return [(member, score) for member, score in members]
    return list(zip(members[::2], members[1::2], strict=True))


def _record(ends: int, values: Any) -> LeaseRecord | None:
    if ends == -2:
        return None
    remaining = None if ends == -1 else ends / 1000
    if isinstance(values, Exception):
        return LeaseRecord(remaining=remaining)
    holder, token, host, pid, function, since, model, pk = map(_text, values)
    return LeaseRecord(
        remaining=remaining,
        holder=holder if _HOLDER.fullmatch(holder) else "",
        token=_number(token),
        host=host,
        pid=pid,
        function=function,
        since=None if (milliseconds := _number(since)) is None else _moment(milliseconds),
        model=model,
        pk=pk,
    )


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _moment(milliseconds: float) -> datetime:
    """Return the time; what another program has written may be out of any calendar."""
    return datetime.fromtimestamp(min(max(milliseconds / 1000, 0), _LATEST), UTC)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
