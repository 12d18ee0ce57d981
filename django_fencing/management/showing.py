"""How the command shows what it has found: for a terminal, and as JSON."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from django_fencing.overview import ShownLease
from django_fencing.states import State

_COLUMNS = ("RESOURCE", "STATE", "TOKEN", "FUNCTION", "HOST", "PID", "SINCE", "HOLDER")


def leases(found: Sequence[ShownLease]) -> Iterator[str]:
    """Yield the lines of a table, with a column of the tenants where there are some."""
    if not found:
        yield "No lock is held, and none has lapsed within the last hour."
        return
    tenants = any(item.tenant for item in found)
    rows = [(item.tenant, *_row(item)) if tenants else _row(item) for item in found]
    columns = ("TENANT", *_COLUMNS) if tenants else _COLUMNS
    cells = [list(columns), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()


def lease(state: State) -> str:
    if state.store_outage:
        return "unknown"
    return _ends(state.lease.remaining) if state.lease else "free"


def fence(state: State) -> object:
    if state.database_outage:
        return "unknown"
    token = state.fence_token
    return "there is no such row" if token is None else token or "nobody has registered"


def _row(item: ShownLease) -> Sequence[object]:
    if item.lease is None:
        state = f"lapsed {moment(item.ended)}"
        return (item.resource, state, "", "", "", "", "", "")
    held = item.lease
    token = "" if held.token is None else held.token
    return (
        item.resource,
        _ends(held.remaining),
        token,
        held.function,
        held.host,
        held.pid,
        moment(held.since),
        held.holder,
    )


def lease_json(item: ShownLease) -> dict[str, Any]:
    return {
        "resource": item.resource,
        "tenant": item.tenant,
        "lease": item.lease and record_json(item.lease),
        "lapsed_at": item.ended,
    }


def record_json(lease: Any) -> dict[str, Any]:
    names = ("holder", "token", "remaining", "host", "pid", "function", "since")
    return {name: getattr(lease, name) for name in names}


def plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def moment(when: datetime | None) -> str:
    return "" if when is None else f"{when:%Y-%m-%d %H:%M:%S}Z"


def _ends(remaining: float | None) -> str:
    return "held, without an end" if remaining is None else f"held, {remaining:.1f} s left"


def printable(cell: object) -> str:
    """Return a cell without what a terminal would obey."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in str(cell)
    )
