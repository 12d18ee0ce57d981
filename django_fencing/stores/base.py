"""What a store does for the protocol, and which store the settings name."""

import functools
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from typing import NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from django_fencing.conf import conf
from django_fencing.grants import Grant, Holder, LeaseRecord, Refusal
from django_fencing.names import Keys
from django_fencing.resources import Resource
from django_fencing.signals import key_values, logger

# Seconds by which Store.wait() may be late: Redis looks ten times a second (`hz`) whether a client
# has been blocked for long enough.
LATENESS = 0.12

# Of which process and which settings the log has said what its store is.
_introduced: set[tuple[object, ...]] = set()


class Finding(NamedTuple):
    """What was looked at, whether it is well (None: to be noted), and what is said of it."""

    what: str
    well: bool | None
    said: str


class Store(ABC):
    """
    Keeps at most one lease per resource, each with an expiry and a growing token.

    Every operation is one atomic step, compares the holder's id, and may be repeated, late
    or doubled: it never touches another holder's lease. Durations are seconds. Each raises
    StoreUnavailable if the store cannot be asked or holds a value that nobody can use; where it
    takes `patience`, also if the store has not answered after so many seconds, else after as many
    as its client waits.
    """

    @abstractmethod
    def acquire(
        self,
        resource: Resource,
        holder: Holder,
        *,
        ttl: float,
        floor: int,
        waits: float = 0,
        came: int = 0,
        patience: float | None = None,
    ) -> Grant | Refusal:
        """
        Grant the lease unless another holds it; to the same holder, the same token again.

        Who `waits` for so many seconds before it asks again stands in line, at the place of the
        time at which it `came`, and nobody who came later is granted the lease before. With 0 it
        leaves the line.
        """

    def wait(
        self,
        resource: Resource,
        holder: Holder,
        seconds: float,
        cancelled: threading.Event | None = None,
    ) -> bool | None:
        """
        Wait until it is the holder's turn, for so many seconds and LATENESS at most; say if it is.

        Return None at once where one has to ask again and again instead. Raise CancelledError as
        soon as `cancelled` is set.
        """
        return None

    @abstractmethod
    def reissue(self, resource: Resource, holder: Holder, *, above: int) -> Grant | Refusal:
        """Give the holder's own lease a token well above `above`, which the fence has reached."""

    @abstractmethod
    def confirm(self, resource: Resource, holder: Holder, *, patience: float | None = None) -> bool:
        """Say whether the lease is still the holder's."""

    @abstractmethod
    def extend(
        self, resource: Resource, holder: Holder, *, ttl: float, patience: float | None = None
    ) -> bool:
        """Let the holder's own lease end `ttl` seconds from now; False if it is not held."""

    @abstractmethod
    def release(
        self,
        resource: Resource,
        holder: Holder,
        *,
        again: bool = False,
        patience: float | None = None,
    ) -> bool:
        """
        End the holder's own lease, and say whether this or an earlier release has ended it.

        It is the turn of the first one in the line then. Who only waited leaves the line.

        The holder is remembered as done for a minute, so that an acquire of it that arrives
        late is refused, unless it will ask `again`.
        """

    @abstractmethod
    def take_over(
        self, resource: Resource, shown: str, holder: Holder, *, ttl: float, floor: int
    ) -> Grant | Refusal | None:
        """
        Swap the lease that was `shown` for the holder's own, with the next token.

        `shown` is LeaseRecord.holder. Refuse if another holds the resource meanwhile; return None
        if nobody does.
        """

    @abstractmethod
    def inspect(self, seconds: float) -> AbstractContextManager["Inspector"]:
        """Open a view of the leases whose every step gives up after so many seconds."""

    def examined(self, seconds: float) -> Iterable[Finding]:
        """Yield what is to be said of the store's server. Raise StoreUnavailable."""
        return ()

    def forget(self, resource: Resource, *holders: Holder) -> None:  # noqa: B027 - it may keep none
        """Forget what is kept of a resource that nobody will ever lock again."""

    def describe(self) -> dict[str, object]:
        """Return what the log says of the store at its first use in a process."""
        return {}


class Listed(NamedTuple):
    """A resource that is held, or whose lease has lapsed without a release."""

    keys: Keys
    ends: datetime  # by the store's clock


class Look(NamedTuple):
    """A resource at this moment: its lease if there is one, and whether it is listed still."""

    lease: LeaseRecord | None
    listed: bool


class Inspector(ABC):
    """Shows leases, and changes nothing. Each step is one round trip per server."""

    @abstractmethod
    def listed(self) -> list[Listed]:
        """
        Return what is held, and what has lapsed within about an hour, the latest end first.

        Raise StoreUnavailable. Past 10,000 some are left out.
        """

    @abstractmethod
    def look(self, keys: Sequence[Keys]) -> list[Look]:
        """Look at each resource. Raise StoreUnavailable."""

    @abstractmethod
    def counters(self, keys: Sequence[Keys]) -> list[int | None]:
        """Return what each counter has proposed last, None where there is none that can be read."""


def get_store() -> Store:
    """Return the store that FENCING["STORE"] names."""
    return _store_class(conf.store)()


@functools.cache
def _store_class(path: str) -> type[Store]:
    try:
        kind = import_string(path)
    except ImportError as error:
        raise ImproperlyConfigured(f"FENCING['STORE']: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Store)):
        raise ImproperlyConfigured(f"FENCING['STORE'] must name a Store, not {kind!r}.")
    return kind


def introduce(store: Store) -> None:
    """Log one line at the first use of this store in this process: which one it is."""
    if not logger.isEnabledFor(logging.INFO):
        return
    key = (os.getpid(), type(store), conf.cache, conf.prefix)
    if key not in _introduced:
        _introduced.add(key)
        kind = f"{type(store).__module__}.{type(store).__qualname__}"
        logger.info("%s", key_values("store_used", {"store": kind, **store.describe()}))
