"""What a caller may lock, resolved: a name, a saved row, or (Model, pk)."""

import functools
from dataclasses import dataclass
from typing import Any, cast

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import models, router
from django.db.models import QuerySet

from django_fencing.conf import conf
from django_fencing.exceptions import InvalidResource, NoSuchRow
from django_fencing.models import Fence, FencedResource, fence_model, fence_pk, row_name
from django_fencing.names import Keys, checked, namespace_of, read_slug, slug, slugs_of

ResourceLike = str | models.Model | tuple[type[models.Model], Any]

# Above this a value in the row's __dict__ is no token that Redis could continue from.
_HIGHEST_FLOOR = 2**52


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One resource: its name, its keys in the store, and the place of its fence."""

    name: str
    keys: Keys
    alias: str  # the database of the fence, written through
    model: type[FencedResource]  # defines the fence; Fence for a name
    pk: Any  # in that model
    row_model: type[FencedResource]  # what lease.row is
    floor: int = 0  # a hint: a token that the fence has reached
    namespace: str = ""  # the tenant

    @property
    def place(self) -> tuple[str, type[FencedResource], Any]:
        """Where the fence is: the identity of the resource in the database."""
        return (self.alias, self.model, self.pk)


def resolve(given: ResourceLike, using: str | None = None) -> Resource:
    """
    Return the resource that `given` means. Nothing is sent for a name or a row.

    (Model, pk) of a multi-table child, or of a model with its own `fence_name`, is loaded.
    Raise InvalidResource for anything that cannot be locked.
    """
    if isinstance(given, str):
        return _named(given, using)
    if isinstance(given, models.Model):
        return _row(given, using)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], type):
        return _addressed(*given, using)
    raise InvalidResource(f"A resource is a name, a saved row or (Model, pk), not {given!r}.")


def tenant() -> str:
    """Return NAMESPACE, in one spelling."""
    namespace = conf.namespace
    return checked(namespace, "FENCING['NAMESPACE']") if namespace else ""


def of_tenant(rows: QuerySet[Any], key: str, namespace: str) -> QuerySet[Any]:
    """Return those rows whose `key`, a slug, is of this tenant; "" has none."""
    if not namespace:
        return rows.exclude(**{f"{key}__contains": "|"})
    first, end = slugs_of(namespace)
    return rows.filter(**{f"{key}__gte": first, f"{key}__lt": end})


def _named(given: str, using: str | None) -> Resource:
    database = conf.database
    return _of_given_name(given, tenant(), conf.prefix, database, using or database)


@functools.lru_cache(maxsize=1024)
def _of_given_name(given: str, namespace: str, prefix: str, database: str, alias: str) -> Resource:
    name = checked(given)
    _refuse_row_name(name)
    return _of_name(name, slug(name, namespace), namespace, prefix, database, alias)


def of_fence(fence: Fence, alias: str = "") -> Resource:
    """Return the resource of a name's fence in a database, that of the settings if "" ."""
    namespace = tenant()
    name = read_slug(fence.name, namespace)
    if name is None:
        namespace = namespace_of(f"name:{fence.name}")
        name = read_slug(fence.name, namespace) or fence.name
    database = conf.database
    return _of_name(name, fence.name, namespace, conf.prefix, database, alias or database)


def _of_name(
    name: str, key: str, namespace: str, prefix: str, database: str, alias: str
) -> Resource:
    kind = "name" if alias == database else f"name@{alias}"
    return Resource(
        name=name,
        keys=Keys.of(prefix, f"{kind}:{key}"),
        alias=alias,
        model=Fence,
        pk=key,
        row_model=Fence,
        namespace=namespace,
    )


def _refuse_row_name(name: str) -> None:
    label, colon, _ = name.partition(":")
    app_label, dot, model_name = label.partition(".")
    if not (colon and dot):
        return
    try:
        model = apps.get_model(app_label, model_name)
    except LookupError:
        return
    if issubclass(model, FencedResource):
        raise InvalidResource(
            f"{name!r} reads like the fence of a row, but a text locks only a name: "
            f"pass the row or ({model.__name__}, pk).",
            resource=name,
        )


def _row(row: models.Model, using: str | None) -> Resource:
    model = _fenced(row.__class__)  # not type(): request.user is a lazy object
    fenced = cast("FencedResource", row)
    if using is not None:
        raise InvalidResource("`using` is for names and (Model, pk): a row knows its database.")
    if row._state.adding or row.pk is None:
        raise InvalidResource(
            f"{row!r} is not saved, so there is no row to lock. "
            f"Save it first, or pass ({model.__name__}, pk)."
        )
    return _of_row(fenced, router.db_for_write(model, instance=row))


def _addressed(model: type[Any], pk: Any, using: str | None) -> Resource:
    model = _fenced(model)
    key = model._meta.pk
    if pk is None or isinstance(pk, bool | float):
        raise InvalidResource(f"{pk!r} is no primary key of {model._meta.label}.")
    try:
        pk = key.to_python(pk)
    except (ValidationError, ValueError, TypeError) as error:
        raise InvalidResource(f"{pk!r} is no primary key of {model._meta.label}.") from error
    alias = using or router.db_for_write(model)
    owner = fence_model(model)
    if owner is model._meta.concrete_model and model.fence_name is FencedResource.fence_name:
        return _resource(row_name(owner, pk, alias), alias, owner, pk, model)
    rows: models.QuerySet[FencedResource] = models.QuerySet(model, using=alias)
    try:
        row = rows.get(pk=pk)
    except model.DoesNotExist as error:
        raise NoSuchRow(f"{model._meta.label} has no row {pk!r} in {alias!r}.") from error
    return _of_row(row, alias)


def _fenced(model: type[Any]) -> type[FencedResource]:
    if not issubclass(model, FencedResource):
        raise InvalidResource(
            f"{model.__name__} has no fence: let it inherit from FencedResource, or lock a name."
        )
    if model._meta.abstract:
        raise InvalidResource(f"{model.__name__} is abstract: it has no rows.")
    if issubclass(model, Fence):
        raise InvalidResource("The fence of a name is locked by that name, as a text.")
    if isinstance(model._meta.pk, models.CompositePrimaryKey):
        raise InvalidResource(f"{model._meta.label} has a composite primary key: lock a name.")
    return model


def _of_row(row: FencedResource, alias: str) -> Resource:
    known = row.__dict__.get("last_fence_token")
    floor = known if type(known) is int and 0 < known < _HIGHEST_FLOOR else 0
    model = row.__class__
    return _resource(row.fence_name, alias, fence_model(model), fence_pk(row), model, floor)


def _resource(
    fence_name: str,
    alias: str,
    model: type[FencedResource],
    pk: Any,
    row_model: type[FencedResource],
    floor: int = 0,
) -> Resource:
    name, namespace = checked(fence_name), tenant()
    return Resource(
        name=name,
        keys=_keys_of_row(name, namespace, conf.prefix),
        alias=alias,
        model=model,
        pk=pk,
        row_model=row_model,
        floor=floor,
        namespace=namespace,
    )


@functools.lru_cache(maxsize=1024)
def _keys_of_row(name: str, namespace: str, prefix: str) -> Keys:
    return Keys.of(prefix, f"row:{slug(name, namespace)}")
