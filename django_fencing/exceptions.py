"""What can go wrong, as one tree.

FencingError
├── LockHeld            somebody else holds the resource
├── LeaseLost           this lease no longer holds it
│   └── StaleToken      ... and the database has proved it
├── StoreUnavailable    the store could not be asked, or gave no usable answer
├── InvalidResource     what was passed cannot be locked (also a ValueError)
│   └── NoSuchRow       ... because there is no such row
├── InsideTransaction   a transaction is open where none may be
├── UnfencedWrite       a locked or protected row is written around its lease
└── OnceMismatch        work that was done once is asked for with another payload

The attributes carry the values of the message. Every error survives pickle with them.
"""

from uuid import UUID


class FencingError(Exception):
    """Base of every error that django_fencing raises."""

    def __init__(self, message: str, *, resource: str | None = None) -> None:
        super().__init__(message)
        self.resource = resource


class LockHeld(FencingError):
    """
    Somebody else holds the resource, or it could not be registered in time.

    `retry_after` is the number of seconds until the present lease ends unless it is extended,
    1 where that is unknown. `held_by` describes the present holder for logs, None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str | None = None,
        retry_after: float | None = None,
        held_by: str | None = None,
    ) -> None:
        super().__init__(message, resource=resource)
        self.retry_after = retry_after
        self.held_by = held_by


class LeaseLost(FencingError):
    """The lease with this `token` no longer holds the resource."""

    def __init__(
        self, message: str, *, resource: str | None = None, token: int | None = None
    ) -> None:
        super().__init__(message, resource=resource)
        self.token = token


class StaleToken(LeaseLost):
    """
    The fence in the database is no longer this lease's registration.

    `fence_token` and `fence_holder` are what the fence says now, None where its row is gone.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str | None = None,
        token: int | None = None,
        fence_token: int | None = None,
        fence_holder: UUID | None = None,
    ) -> None:
        super().__init__(message, resource=resource, token=token)
        self.fence_token = fence_token
        self.fence_holder = fence_holder


class StoreUnavailable(FencingError):
    """The store could not be reached, refused the command, or holds a value nobody can use."""


class InvalidResource(FencingError, ValueError):
    """The resource is not a name, a saved row or (Model, pk) that can be locked."""


class NoSuchRow(InvalidResource):
    """The row to lock does not exist (any more)."""


class InsideTransaction(FencingError):
    """A transaction is open on the fence's database where the lock must stand outside of it."""


class UnfencedWrite(FencingError):
    """
    A row is written around its lease.

    This flow holds its lease, and writes outside of lease.atomic() or from old values; or the
    table is protected by ProtectFence(..., require_lease=True).
    """


class OnceMismatch(FencingError):
    """
    The work of this `key` was done with another payload, under the lease with this `token`.

    Nothing has run, and the stored result stands.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str | None = None,
        key: str | None = None,
        token: int | None = None,
    ) -> None:
        super().__init__(message, resource=resource)
        self.key = key
        self.token = token
