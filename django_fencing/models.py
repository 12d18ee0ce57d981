"""Rows with a fence: the mixin for your models, and the table of fenced names."""

from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar, Self, cast

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, models, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import format_number
from django.utils import timezone

from django_fencing import flow
from django_fencing.exceptions import UnfencedWrite
from django_fencing.names import encoded

FENCE_FIELDS = ("last_fence_token", "last_fence_holder")


class FencedResource(models.Model):
    """
    Gives each row of your model a fence: the newest lease that the database knows for it.

    `last_fence_token` and `last_fence_holder` are moved by django_fencing alone: save() never
    writes them, and a new row or a clone starts at 0 and no holder.

    While this flow holds the row's lease, save() and delete() raise UnfencedWrite outside the
    lease's atomic(), and for an instance that was loaded before the lease was registered. The
    fence doubles as the load mark, so stale columns never overwrite newer ones.
    """

    last_fence_token = models.BigIntegerField(
        default=0, db_default=0, editable=False, help_text="Token of the newest registered lease."
    )
    last_fence_holder = models.UUIDField(
        null=True, editable=False, help_text="Holder of the newest registered lease."
    )

    class Meta:
        abstract = True

    @property
    def fence_name(self) -> str:
        """
        The resource's name: "app.model:pk", and "@alias" where that is not the default database.

        Multi-table children and proxies have the name of the model that defines the fence.
        Override it only by something that never changes in the life of the row.
        """
        alias = router.db_for_write(type(self), instance=self)
        return row_name(fence_model(type(self)), fence_pk(self), alias)

    @classmethod
    def from_db(cls, *args: Any, **kwargs: Any) -> Self:
        """Load as usual, and note the fence as it was then: deferred columns may come later."""
        row = super().from_db(*args, **kwargs)
        row._note_fence()
        return row

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        """Refresh as usual. Reading some fields anew does not make the others fresh."""
        super().refresh_from_db(using, fields, from_queryset)
        defers = from_queryset is not None and from_queryset.query.deferred_loading[0]
        if fields is None and not defers:
            self._note_fence()

    def _note_fence(self) -> None:
        read = self.__dict__.get
        self._fence_when_loaded = (read("last_fence_token"), read("last_fence_holder"))

    def save_base(
        self,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> None:
        """Save as usual, without the fence. Raise UnfencedWrite as the class says."""
        self._refuse_unfenced("save", using)
        super().save_base(raw, force_insert, force_update, using, update_fields)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> Any:
        """Delete as usual. Raise UnfencedWrite as the class says."""
        self._refuse_unfenced("delete", using)
        return super().delete(using=using, keep_parents=keep_parents)

    delete.alters_data = True  # type: ignore[attr-defined]

    # Django 6.0 added an argument to _do_update.
    def _do_update(self, base_qs: Any, using: Any, pk_val: Any, values: Any, *args: Any) -> Any:
        values = [value for value in values if value[0].name not in FENCE_FIELDS]
        return super()._do_update(base_qs, using, pk_val, values, *args)

    def _do_insert(
        self, manager: Any, using: Any, fields: Any, returning_fields: Any, raw: bool
    ) -> Any:
        # A fixture (raw) brings its fence along; a child's own table has none.
        if not raw and any(field.name in FENCE_FIELDS for field in fields):
            self.last_fence_token, self.last_fence_holder = 0, None
        return super()._do_insert(manager, using, fields, returning_fields, raw)  # type: ignore[misc]

    def _refuse_unfenced(self, action: str, using: str | None) -> None:
        alias = using or router.db_for_write(type(self), instance=self)
        leases = flow.held()
        if fencing := flow.fenced_by(alias):
            leases.append(fencing)
        if not leases:
            return
        place = (alias, fence_model(type(self)), fence_pk(self))
        here = [lease for lease in leases if lease.place == place]
        if not here:
            return
        if fencing is None or fencing not in here:
            fault = "outside of lease.atomic()"
        elif vars(self).get("_fence_when_loaded") != (fencing.token, fencing.holder.id):
            fault = (
                "from an instance that was loaded before the lock: "
                "use the row that atomic() yields, which is current_lease().row too"
            )
        else:
            return
        resource = here[-1].resource
        raise UnfencedWrite(
            f"Cannot {action} {resource!r}, whose lease this thread or task holds, {fault}.",
            resource=resource,
        )


class NameField(models.CharField):  # type: ignore[type-arg]
    """Text that the database compares byte by byte."""

    collations: ClassVar = {"postgresql": "C", "sqlite": "BINARY", "mysql": "utf8mb4_bin"}

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        parameters = super().db_parameters(connection)
        return {**parameters, "collation": self.collations.get(connection.vendor)}


class Fence(FencedResource):
    """The fence of a named resource."""

    name = NameField(max_length=255, primary_key=True)
    registered_at = models.DateTimeField(
        null=True, editable=False, db_index=True, help_text="When a lease has registered last."
    )

    class Meta:
        verbose_name_plural = "fence tokens"
        permissions = (("force_release", "Can force the release of leases"),)

    def __str__(self) -> str:
        return str(self.name)


class FenceFloor(models.Model):
    """One row: the highest token of the named fences that were pruned. New ones begin above it."""

    token = models.BigIntegerField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.token)


class OnceRecord(models.Model):
    """What came of work that is done once, written in the transaction that did it."""

    key = NameField(max_length=255, primary_key=True)
    resource = models.TextField(help_text="What was locked.")
    token = models.BigIntegerField(help_text="Token of the lease under which it was done.")
    fingerprint = models.CharField(max_length=64, help_text="SHA-256 of the payload.")
    result = models.TextField(help_text="As JSON; empty while the work is being done.")
    created_at = models.DateTimeField(default=timezone.now)
    used_at = models.DateTimeField(
        default=timezone.now, db_index=True, help_text="When it was asked for last, to a day."
    )

    class Meta:
        verbose_name = "work done once"
        verbose_name_plural = "work done once"

    def __str__(self) -> str:
        return str(self.key)


class FenceEvent(models.Model):
    """One line of the ledger."""

    class Kind(models.TextChoices):
        REFUSED = "refused", "token refused"
        LOST = "lost", "lease lost"
        HEALED = "healed", "counter healed"
        FORCED = "forced", "release forced"

    kind = models.CharField(max_length=20, choices=Kind)
    namespace = models.TextField(blank=True, help_text="The tenant.")
    resource = models.TextField()
    token = models.BigIntegerField(null=True)
    holder = models.UUIDField(null=True, help_text="Of the lease that this happened to.")
    user = models.TextField(blank=True, help_text="Who has done it, if it was a person.")
    message = models.TextField()
    created_at = models.DateTimeField(db_index=True)

    def __str__(self) -> str:
        return f"{self.resource}: {self.message}"


def fence_model(model: type[models.Model]) -> type[FencedResource]:
    """Return the model that defines the fence of `model`: the parent for a multi-table child."""
    return cast("type[FencedResource]", model._meta.get_field("last_fence_token").model)


def fence_pk(row: FencedResource) -> Any:
    """Return the row's primary key in the model that defines its fence."""
    key = fence_model(row.__class__)._meta.pk
    return key.to_python(getattr(row, key.attname))


def row_name(model: type[FencedResource], pk: Any, alias: str) -> str:
    """Return the default fence name of the row `pk` of `model`, which defines the fence."""
    place = "" if alias == DEFAULT_DB_ALIAS else f"@{alias}"
    key = _key_as_text(model._meta.pk, pk)
    return f"{model._meta.label_lower}:{encoded(key, readable='-._~')}{place}"


def _key_as_text(field: Any, pk: Any) -> str:
    """Return a key in one spelling, whether it was loaded or given."""
    if isinstance(field, models.DecimalField) and isinstance(pk, Decimal):
        with suppress(InvalidOperation):  # no row has a key of so many digits
            return str(format_number(pk, field.max_digits, field.decimal_places))
    if isinstance(pk, datetime) and settings.USE_TZ:
        default = timezone.get_default_timezone()  # which the ORM takes a naive one for
        aware = pk if timezone.is_aware(pk) else timezone.make_aware(pk, default)
        return str(aware.astimezone(UTC))
    return str(pk)
