"""Delete what nobody has used for long: fences of names, records of once(), events."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connections, models, transaction
from django.db.models import F, QuerySet

from django_fencing import flow
from django_fencing.exceptions import StoreUnavailable
from django_fencing.grants import Grant, Holder
from django_fencing.models import Fence, FenceEvent, FenceFloor, OnceRecord
from django_fencing.names import checked
from django_fencing.resources import Resource, of_fence, of_tenant
from django_fencing.stores.base import Store, get_store

# So many are deleted in one transaction, each under its own lock, which lasts for so many seconds.
_BATCH = 100
_TTL = 60.0

# So many failures in a row are the store's.
_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """
    What was not used since `before`, in the database `alias`: of a tenant, or of all if None.

    A named fence that anybody holds stays. The highest deleted token is kept: a new fence begins
    above it, so that no token comes round again.
    """

    alias: str
    before: datetime
    namespace: str | None = None

    def count(self) -> dict[str, int]:
        """Count what would be looked at."""
        counted = (self._fences(), self._records(), self._events())
        return dict(zip(_KINDS, (rows.count() for rows in counted), strict=True))

    def delete(self) -> dict[str, int]:
        """
        Delete it, and return how many of each there were.

        Raise StoreUnavailable, and InsideTransaction in a transaction on that database.
        """
        flow.refuse_transaction(self.alias, "prune", "fences", "do so outside of it.")
        deleted = (
            sum(self._delete_fences()),
            sum(self._delete_rows(OnceRecord)),
            sum(self._delete_rows(FenceEvent)),
        )
        return dict(zip(_KINDS, deleted, strict=True))

    def _fences(self) -> QuerySet[Any]:
        old = Fence.objects.using(self.alias).filter(registered_at__lt=self.before)
        return self._of_tenant(old, "name")

    def _records(self) -> QuerySet[Any]:
        old = OnceRecord.objects.using(self.alias).filter(used_at__lt=self.before)
        return self._of_tenant(old, "key")

    def _events(self) -> QuerySet[Any]:
        old = FenceEvent.objects.using(self.alias).filter(created_at__lt=self.before)
        if self.namespace is None:
            return old
        return old.filter(namespace=checked(self.namespace) if self.namespace else "")

    def _of_tenant(self, rows: QuerySet[Any], key: str) -> QuerySet[Any]:
        return rows if self.namespace is None else of_tenant(rows, key, self.namespace)

    def _delete_fences(self) -> Iterator[int]:
        """Yield how many fences each batch has deleted, each under its own lock."""
        store, last = get_store(), ""
        while fences := list(self._fences().filter(name__gt=last).order_by("name")[:_BATCH]):
            last = fences[-1].name
            holder = flow.new_holder("fencing prune")
            resources = [(of_fence(fence, self.alias), fence.last_fence_token) for fence in fences]
            try:
                yield self._delete_leased(list(_leased(store, holder, resources)))
            finally:
                with suppress(StoreUnavailable):  # they run out
                    for resource, _ in resources:
                        store.release(resource, holder)

    def _delete_leased(self, leased: list[tuple[Resource, int]]) -> int:
        """Delete those of the leased fences that are old still, and keep their highest token."""
        floors = FenceFloor.objects.using(self.alias)
        with transaction.atomic(using=self.alias):
            # First a write: SQLite would let two prunes read, and then neither of them write.
            floors.filter(pk=1).update(token=F("token"))
            rows = self._fences().filter(pk__in=[resource.pk for resource, _ in leased])
            if connections[self.alias].features.has_select_for_update_skip_locked:
                rows = rows.select_for_update(skip_locked=True)
            names = set(rows.values_list("pk", flat=True))
            if not names:
                return 0
            highest = max(token for resource, token in leased if resource.pk in names)
            floors.get_or_create(pk=1, defaults={"token": highest})
            floors.filter(token__lt=highest).update(token=highest)
            deleted, _ = self._fences().filter(pk__in=names).delete()
        return deleted

    def _delete_rows(self, model: type[models.Model]) -> Iterator[int]:
        old = self._records if model is OnceRecord else self._events
        while keys := list(old().values_list("pk", flat=True)[:_BATCH]):
            deleted, _ = old().filter(pk__in=keys).delete()
            yield deleted


def _leased(
    store: Store, holder: Holder, resources: list[tuple[Resource, int]]
) -> Iterator[tuple[Resource, int]]:
    """
    Yield what nobody holds, leased, with the tokens of the leases.

    What cannot be leased, because its counter is broken, stays. Raise StoreUnavailable if that goes
    on and on.
    """
    failures, most = 0, min(_FAILURES, len(resources))
    for resource, floor in resources:
        try:
            answer = store.acquire(resource, holder, ttl=_TTL, floor=floor)
        except StoreUnavailable:
            failures += 1
            if failures == most:
                raise
            continue
        failures = 0
        if isinstance(answer, Grant):
            yield resource, answer.token


_KINDS = ("fences", "once records", "events")
