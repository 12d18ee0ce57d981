"""What the page "Fence tokens" shows: leases of the store, fences of the database."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any, cast
from urllib.parse import unquote

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.core.paginator import Page, Paginator
from django.db import models, router
from django.db.models import QuerySet
from django.db.models.functions import Substr

from django_fencing.conf import conf
from django_fencing.exceptions import InvalidResource, StoreUnavailable
from django_fencing.grants import LeaseRecord
from django_fencing.models import Fence, FencedResource, fence_model
from django_fencing.names import Keys, encoded, namespace_of, read_slug, slugs_of
from django_fencing.resources import Resource, of_fence, of_tenant, resolve, tenant
from django_fencing.stores.base import Listed, Look, get_store

PER_PAGE = 25

# What lapsed longer ago stays in the store until it is trimmed, and is of no interest.
_LAPSED_SINCE = timedelta(hours=1)

# Seconds that each step waits for the store, on the page and elsewhere.
_PATIENCE = 0.5
_PATIENCE_OF_ALL = 2.0

# So many leases are looked at in one round trip.
_AT_ONCE = 500

# Of the key in a lease only so many characters are certain not to be cut.
_LONGEST_WHOLE = 60

Row = tuple[type[models.Model], str]  # model and primary key


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLease:
    """A lease that is held, or that lapsed at `ended` without a release."""

    resource: str
    row: Row | None  # if it is known
    lease: LeaseRecord | None
    keys: Keys
    ended: datetime | None = None

    @property
    def tenant(self) -> str:
        """The namespace."""
        return namespace_of(self.keys.member)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFence:
    """A fence, and the lease that its resource has at the moment."""

    resource: str
    row: Row
    fence: FencedResource
    lease: LeaseRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """One page. `outage` says why there are no leases on it, if the store cannot be asked."""

    leases: list[ShownLease]
    fences: list[ShownFence]
    lease_page: Page[Any]  # where it is among all
    fence_page: Page[Any]
    outage: str


def fenced_models() -> list[type[FencedResource]]:
    """Return the models that define a fence, that of the names first."""
    others = [
        model
        for model in apps.get_models()
        if issubclass(model, FencedResource)
        and model is not Fence
        and not model._meta.proxy
        and fence_model(model) is model
    ]
    return [Fence, *sorted(others, key=lambda model: model._meta.label)]


def overview(
    model: type[FencedResource], *, search: str = "", leases: str = "1", fences: str = "1"
) -> Overview:
    """
    Return a page of the leases, and one of the fences of `model`, whose resources match `search`.

    It takes two SQL statements, and two round trips to the store.
    """
    search = unicodedata.normalize("NFC", search)
    fence_page = Paginator(_fences(model, search), PER_PAGE).get_page(fences)
    rows = list(fence_page.object_list)
    resources = [_resource(row) for row in rows]
    outage = ""
    looks: Iterator[Look]
    lease_page: Page[Any]
    try:
        with get_store().inspect(_PATIENCE) as inspector:
            found = _listed(inspector.listed(), search, tenant())
            lease_page = Paginator(found, PER_PAGE).get_page(leases)
            known = [resource.keys for resource in resources if resource]
            looks = iter(
                inspector.look([*(item.keys for _, item in lease_page.object_list), *known])
            )
    except (StoreUnavailable, ImproperlyConfigured) as error:
        outage = str(error)
        lease_page = Paginator([], PER_PAGE).get_page(1)
        looks = repeat(Look(lease=None, listed=False))
    shown = [_shown_lease(name, item, next(looks)) for name, item in lease_page.object_list]
    return Overview(
        leases=[lease for lease in shown if lease],
        fences=[
            _shown_fence(row, resource, next(looks).lease if resource else None)
            for row, resource in zip(rows, resources, strict=True)
        ],
        lease_page=lease_page,
        fence_page=fence_page,
        outage=outage,
    )


def all_leases(namespace: str | None) -> list[ShownLease]:
    """Return every lease of a tenant, of all of them if None. Raise StoreUnavailable."""
    with get_store().inspect(_PATIENCE_OF_ALL) as inspector:
        found = _listed(inspector.listed(), "", namespace)
        looks: list[Look] = []
        for start in range(0, len(found), _AT_ONCE):
            part = found[start : start + _AT_ONCE]
            looks += inspector.look([item.keys for _, item in part])
    pairs = zip(found, looks, strict=True)
    shown = (_shown_lease(name, item, look) for (name, item), look in pairs)
    return [lease for lease in shown if lease]


def _listed(
    listed: Sequence[Listed], search: str, namespace: str | None
) -> list[tuple[str, Listed]]:
    """Return the resources of a tenant, or of all, whose name matches, with their names."""
    recent = datetime.now(UTC) - _LAPSED_SINCE
    named = ((_name(item, namespace), item) for item in listed if item.ends > recent)
    wanted = search.casefold()
    return [(name, item) for name, item in named if name and wanted in name.casefold()]


def _name(item: Listed, namespace: str | None) -> str | None:
    _, _, slug = item.keys.member.partition(":")
    return read_slug(slug, namespace_of(item.keys.member) if namespace is None else namespace)


def _shown_lease(name: str, item: Listed, look: Look) -> ShownLease | None:
    if not look.lease and not look.listed:
        return None  # released since it was listed
    row = _row_of(name, item, look.lease)
    ended = None if look.lease else item.ends
    return ShownLease(resource=name, row=row, lease=look.lease, keys=item.keys, ended=ended)


def _shown_fence(
    row: FencedResource, resource: Resource | None, lease: LeaseRecord | None
) -> ShownFence:
    name = resource.name if resource else str(row)
    return ShownFence(resource=name, row=(type(row), str(row.pk)), fence=row, lease=lease)


def _row_of(name: str, item: Listed, lease: LeaseRecord | None) -> Row | None:
    """Return what the admin can show of the resource: the row, or the `Fence` of a name."""
    kind, _, slug = item.keys.member.partition(":")
    if kind != "row":
        return (Fence, slug) if kind == "name" else None
    label, _, rest = name.partition(":")
    pk, _, alias = rest.partition("@")
    model = _model(lease.model if lease else label)
    if model is None or "…" in name:
        return None
    if alias and alias != router.db_for_read(model):
        return None
    owner = fence_model(model)
    if label != owner._meta.label_lower:  # a fence name of its own
        return (model, lease.pk) if lease and len(lease.pk) < _LONGEST_WHOLE else None
    # A multi-table child may have a primary key of its own.
    return (model if cast("Any", model._meta.pk).remote_field else owner, unquote(pk))


def _model(label: str) -> type[FencedResource] | None:
    try:
        model = apps.get_model(label)
    except (LookupError, ValueError):
        return None
    return model if issubclass(model, FencedResource) else None


def _resource(row: FencedResource) -> Resource | None:
    try:
        return of_fence(row) if isinstance(row, Fence) else resolve(row)
    except InvalidResource:  # a composite primary key
        return None


def _fences(model: type[FencedResource], search: str) -> QuerySet[FencedResource]:
    """Return the fences that anybody has registered at, past the model's managers."""
    if "\0" in search:  # PostgreSQL's text cannot hold it
        return QuerySet(model).none()
    if model is Fence:
        names: QuerySet[Any] = QuerySet(Fence, using=conf.database)
        namespace = tenant()
        prefix = slugs_of(namespace)[0] if namespace else ""
        names = of_tenant(names, "name", namespace).annotate(shown=Substr("name", len(prefix) + 1))
        return names.filter(shown__icontains=encoded(search)).order_by("name")
    rows: QuerySet[Any] = QuerySet(model, using=router.db_for_read(model))
    rows = rows.filter(last_fence_token__gt=0)
    return _matching(rows, model, search).order_by("pk")


def _matching(
    rows: QuerySet[FencedResource], model: type[FencedResource], search: str
) -> QuerySet[FencedResource]:
    """Search by the primary key, with or without the model's name before it."""
    if not search:
        return rows
    pk = search.removeprefix(f"{model._meta.label_lower}:")
    key = cast("Any", model._meta.pk)
    if isinstance(key, models.CharField | models.TextField):
        return rows.filter(pk__icontains=pk)
    try:
        return rows.filter(pk=key.to_python(pk))
    except (ValidationError, ValueError, TypeError):
        return rows.none()
