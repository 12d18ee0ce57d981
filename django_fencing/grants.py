"""Frozen values: who asks, and what the store answers."""

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID, uuid4

# Tokens stay exact in Lua and in JSON, whose numbers are doubles (IEEE 754: 53 bits).
TOKEN_LIMIT = 2**53

# Steps over the tokens that a lost counter had issued and nobody had registered yet.
JUMP = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The identity of one acquisition. Only `id` is ever compared; the rest is for people."""

    id: UUID = field(default_factory=uuid4)
    host: str
    pid: int
    flow: str  # the name of the thread or the task
    function: str  # "hoa.charges.generate_monthly_charges"

    def __str__(self) -> str:
        return f"{self.function} (host {self.host}, pid {self.pid}, {self.flow})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The store has given the lease."""

    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The store has not given the lease, or took it back before the body began."""

    remaining: float | None = None  # seconds until the present lease ends; None: unknown
    held_by: str | None = None  # the present holder, for people
    came: int = 0  # when the refused one came, as the store counts; 0: it does not wait
    place: int | None = None  # of the refused one in the line of those who wait, from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease as the store shows it to people. What cannot be read is empty."""

    remaining: float | None  # seconds; None: it has no expiry, so this app has not written it
    holder: str = ""  # what take_over() is told: the holder's id, or a digest of what is there
    token: int | None = None
    host: str = ""
    pid: str = ""
    function: str = ""
    since: datetime | None = None
    model: str = ""  # "app.model" of the row
    pk: str = ""
