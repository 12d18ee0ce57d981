"""A lease that is entered once more by the flow that holds it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from django_fencing import flow
from django_fencing.leases import Lease
from django_fencing.resources import Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Reentry:
    """
    Stands for an acquisition where the flow holds the resource already, in a block of its own.

    It asks nobody, waits for nothing, and its end ends nothing.
    """

    lease: Lease
    register: bool

    def enter(self) -> Lease:
        """Return the lease, registered if the inner lock says so: the current one from now on."""
        if self.register:
            self.lease._register_anew()
        flow.hold(self.lease)
        return self.lease

    def leave(self) -> None:
        """Let the one be the current lease that was so before."""
        flow.let_go(self.lease, flow.current_flow())

    @contextmanager
    def leased(self) -> Iterator[Lease]:
        """Hold the lease."""
        lease = self.enter()
        try:
            yield lease
        finally:
            self.leave()

    @contextmanager
    def opened(self) -> Iterator[Lease]:
        """Hold the lease with its fenced transaction open, as a savepoint where it is already."""
        with self.leased() as lease, lease.atomic():
            yield lease

    def undone(self) -> AbstractContextManager[None]:
        """Undo nothing: that is left to the block that has acquired the lease."""
        return nullcontext()


def entered(resource: Resource, by: flow.Flow, *, register: bool) -> Reentry | None:
    """Return how the flow `by` enters `resource` again, None if it does not hold it in a block."""
    for lease in reversed(flow.held()):
        if lease.place == resource.place and lease._is_entered_by(by):
            return Reentry(lease=lease, register=register)
    return None
