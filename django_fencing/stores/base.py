"""What a store does for the protocol, and which store the settings name."""

from abc import ABC, abstractmethod
from enum import Enum

from django.utils.module_loading import import_string

from django_fencing.conf import conf
from django_fencing.grants import Grant, Holder, Refusal
from django_fencing.resources import Resource


class Released(Enum):
    """What a release found."""

    FREED = "freed"  # the holder's own lease, which is gone now
    GONE = "gone"  # no lease at all
    OTHER = "other"  # somebody else's lease, left as it was


class Store(ABC):
    """
    Keeps at most one lease per resource, each with an expiry and a growing token.

    Every operation is one atomic step, compares the holder's id, and may be repeated, late
    or doubled: it never touches another holder's lease. Durations are seconds. Each raises
    StoreUnavailable if the store cannot be asked or holds a value that nobody can use.
    """

    @abstractmethod
    def acquire(
        self, resource: Resource, holder: Holder, *, ttl: float, floor: int
    ) -> Grant | Refusal:
        """Grant the lease unless another holds it; to the same holder, the same token again."""

    @abstractmethod
    def reissue(self, resource: Resource, holder: Holder, *, above: int) -> Grant | Refusal:
        """Give the holder's own lease a token well above `above`, which the fence has reached."""

    @abstractmethod
    def confirm(self, resource: Resource, holder: Holder) -> bool:
        """Say whether the lease is still the holder's."""

    @abstractmethod
    def extend(self, resource: Resource, holder: Holder, *, ttl: float) -> bool:
        """Let the holder's own lease end `ttl` seconds from now; False if it is not held."""

    @abstractmethod
    def release(self, resource: Resource, holder: Holder, *, bury: bool = False) -> Released:
        """
        End the holder's own lease.

        `bury` leaves a tombstone for a minute: an acquire of this holder whose outcome is
        unknown, and which may arrive late, is refused.
        """


def get_store() -> Store:
    """Return the store that FENCING["STORE"] names."""
    store: Store = import_string(conf.store)()
    return store
