"""A view under its lock: what it answers, the transactions of its request, its streams."""

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, cast

from django.core.signals import request_finished
from django.db import connections, transaction
from django.dispatch import receiver
from django.http import Http404, HttpRequest, HttpResponse

from django_fencing import flow, ledger, replies
from django_fencing.calls import Entry
from django_fencing.exceptions import LockHeld, NoSuchRow
from django_fencing.leases import Lease
from django_fencing.problems import ANSWERED, answer

# https://www.rfc-editor.org/rfc/rfc9110#name-safe-methods
_SAFE = ("GET", "HEAD", "OPTIONS", "TRACE")


def request_of(argument: object) -> HttpRequest | None:
    """Return the request that `argument` is, or that it wraps, as Django REST framework's do."""
    if isinstance(argument, HttpRequest):
        return argument
    rest_framework = sys.modules.get("rest_framework.request")
    if rest_framework and isinstance(argument, rest_framework.Request):
        return cast("HttpRequest", argument._request)
    return None


# What ends the leases of streams that are no more.
_dropped: deque[Callable[[], None]] = deque()


@receiver(request_finished, dispatch_uid="django_fencing")
def end_dropped_streams(**kwargs: Any) -> None:
    """End the leases of streams that were dropped before they were closed."""
    ledger.flush()
    while _dropped:
        try:
            end = _dropped.popleft()
        except IndexError:  # another thread has just taken the last one
            return
        end()


class OwnTransactions(set[str]):
    """
    The `_non_atomic_requests` of a decorated view: Django opens no transaction around it.

    A transaction that is open before the lock would make its release come before the commit.
    The view opens those of ATOMIC_REQUESTS itself, inside the lock. The members are the aliases
    for which the project has said @transaction.non_atomic_requests.
    """

    def __contains__(self, alias: object) -> bool:
        return True

    def __init__(self, function: Any = None) -> None:
        said = getattr(function, "_non_atomic_requests", ())
        super().__init__(said)
        self._are_opened_deeper = isinstance(said, OwnTransactions)  # by another lock

    @contextmanager
    def opened(self, request: HttpRequest, fenced: str = "") -> Iterator[None]:
        """Open the transactions that Django would have opened, except that on `fenced`."""
        with ExitStack() as opened:
            for alias in self._to_open(request, fenced):
                opened.enter_context(transaction.atomic(using=alias))
            yield

    def _to_open(self, request: HttpRequest, fenced: str) -> Iterator[str]:
        if self._are_opened_deeper:
            return
        match = getattr(request, "resolver_match", None)
        # Said above this decorator, of the view that the URL leads to.
        said = set(getattr(match.func, "_non_atomic_requests", ())) if match else set()
        for alias, options in connections.settings.items():
            wanted = options["ATOMIC_REQUESTS"] and alias not in said.union(self)
            # Where the decorator sits deeper, Django has opened it already.
            if wanted and alias != fenced and not flow.in_transaction(alias):
                yield alias


# The request whose view is being called under a lock, here and in what this call has started.
_locked: ContextVar[HttpRequest | None] = ContextVar("_locked", default=None)


class ViewCall(Entry):
    """A call of a view."""

    def __init__(
        self, request: HttpRequest, transactions: OwnTransactions, *, responds: bool
    ) -> None:
        # An error passes through another lock's view that calls this one, and rolls it back.
        self._is_outermost = _locked.get() is not request
        self._responds = responds
        self._request = request
        self.is_work = request.method not in _SAFE
        self._transactions = transactions

    def answered(self, locked: Callable[[], Any]) -> Any:
        """Answer the ANSWERED errors, those of the body too."""
        if not self._is_outermost:
            return locked()
        before = _locked.set(self._request)
        try:
            return locked()
        except ANSWERED as error:
            if not self._responds:
                raise
            _roll_back_requests()
            return answer(self._request, error)
        finally:
            _locked.reset(before)

    def missing(self, error: NoSuchRow) -> Exception:
        return Http404(str(error)) if self._responds else error

    def run(self, body: Callable[[], Any], lease: Lease) -> Any:
        """Run the body in the transactions of ATOMIC_REQUESTS, and keep the lease for a stream."""
        alias = lease.place[0]
        with self._transactions.opened(self._request, alias):
            response = body()
            # Django REST framework has made a response of an exception.
            failed = getattr(response, "exception", False) is True
            if failed and flow.fenced_by(alias) is lease:
                transaction.set_rollback(True, using=alias)
        if getattr(response, "streaming", False):
            end = lease._keep()
            response._resource_closers.append(end)  # after those of what is streamed
            # Nobody closes a response that a middleware drops. A finalizer may run anywhere, so
            # it only notes what is to be ended.
            weakref.finalize(response, _dropped.append, end).atexit = False
        return response

    def skipped(self, held: LockHeld) -> HttpResponse:
        return HttpResponse(status=204)

    def payload(self) -> Any:
        return replies.payload_of(self._request)

    def kept(self, result: Any) -> Any:
        return replies.kept(result)

    def fresh(self, result: Any, kept: Any) -> Any:
        return result  # with its cookies

    def replayed(self, kept: Any, key: str) -> HttpResponse:
        return replies.restored(kept)


def _roll_back_requests() -> None:
    """Let Django roll back what it has opened for the request: its view has not done its work."""
    for connection in connections.all(initialized_only=True):
        if connection.settings_dict["ATOMIC_REQUESTS"] and flow.in_transaction(connection.alias):
            connection.set_rollback(True)
