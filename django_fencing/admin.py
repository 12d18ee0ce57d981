"""The admin's pages: fence tokens, the ledger, what was done once. A stuck lease can be ended."""

from datetime import datetime
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db import models
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils import dateformat
from django.utils.html import format_html_join
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_fencing import states
from django_fencing.conf import conf
from django_fencing.grants import LeaseRecord
from django_fencing.models import Fence, FenceEvent, OnceRecord
from django_fencing.names import read_slug
from django_fencing.overview import fenced_models, overview
from django_fencing.release_admin import ReleasingAdmin
from django_fencing.resource_admin import FencedResourceAdmin
from django_fencing.resources import of_fence, of_tenant, tenant

__all__ = ["FencedResourceAdmin"]


# So many lines of the ledger are shown at a fence.
_LAST_EVENTS = 10


class _ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows rows. Who may delete them is the site's affair, unless it is said otherwise."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Fence)
class FenceAdmin(_ReadOnlyAdmin, ReleasingAdmin):
    """Shows leases and fences. Who has the permission `force_release` can end a lease."""

    fields = (
        "shown_name",
        "shown_fence_token",
        "last_fence_holder",
        "registered_at",
        "lease",
        "counter",
        "locked_by",
        "last_events",
    )
    readonly_fields = (
        "shown_name",
        "shown_fence_token",
        "lease",
        "counter",
        "locked_by",
        "last_events",
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        fences: QuerySet[Any] = QuerySet(Fence, using=conf.database)
        return of_tenant(fences, "name", tenant()).order_by("name")

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        """Return the fence, with what the store says of its resource."""
        fence = super().get_object(request, object_id, from_field)
        if fence is not None:
            fence.seen = states.state(of_fence(fence))
        return fence

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave out the ledger for those who may not see it."""
        may = self._may_view(request, FenceEvent)
        return self.fields if may else [name for name in self.fields if name != "last_events"]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> TemplateResponse:
        """Show the page, with a warning instead of the leases if the store cannot be asked."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        shown = [model for model in fenced_models() if self._may_view(request, model)]
        labels = {model._meta.label_lower: model for model in shown}
        model = labels.get(request.GET.get("model", ""), Fence)
        search = request.GET.get("q", "").strip()
        found = overview(
            model,
            search=search,
            leases=request.GET.get("leases", "1"),
            fences=request.GET.get("fences", "1"),
        )
        context = {
            **self.admin_site.each_context(request),
            "title": _("Fence tokens"),
            "opts": self.opts,
            "overview": found,
            "leases": [
                (item, self._url(request, item.row), self.release_url(request, item))
                for item in found.leases
            ],
            "fences": [(item, self._url(request, item.row)) for item in found.fences],
            "choices": [(one._meta.label_lower, _title(one), one is model) for one in shown],
            "title_of_fences": _title(model),
            "search": search,
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_fencing/fence/change_list.html", context)

    @admin.display(description=gettext_lazy("last fence token"))
    def shown_fence_token(self, fence: Fence) -> str:
        """Show all digits, in groups nowhere."""
        return str(fence.last_fence_token)

    @admin.display(description=gettext_lazy("name"))
    def shown_name(self, fence: Any) -> str:
        """Show the name as it was given."""
        return read_slug(fence.name, tenant()) or str(fence.name)

    @admin.display(description=gettext_lazy("lease"))
    def lease(self, fence: Any) -> str:
        """Say who holds the lock, and for how long."""
        if fence.seen.store_outage:
            return _("unknown: {error}").format(error=fence.seen.store_outage)
        lease = fence.seen.lease
        return _line_of(lease) if lease else _("free")

    @admin.display(description=gettext_lazy("counter"))
    def counter(self, fence: Any) -> str:
        """Show the token that the store has proposed last."""
        if fence.seen.store_outage:
            return _("unknown")
        return _("none") if fence.seen.counter is None else str(fence.seen.counter)

    @admin.display(description=gettext_lazy("row locked by"))
    def locked_by(self, fence: Any) -> str:
        """Say whose open transaction keeps the row locked."""
        return "; ".join(map(str, fence.seen.locked_by)) or _("nobody")

    @admin.display(description=gettext_lazy("last events"))
    def last_events(self, fence: Any) -> str:
        """Show what has happened to the resource, the newest line first."""
        events = states.events(self.shown_name(fence))[:_LAST_EVENTS]
        lines = [(_moment(event.created_at), event.message) for event in events]
        return format_html_join("", "<div>{} {}</div>", lines) or _("none")

    def _may_view(self, request: HttpRequest, model: type[models.Model]) -> bool:
        """Say whether the user may see rows of `model`, registered in this admin or not."""
        if registered := self.admin_site._registry.get(model):
            return registered.has_view_permission(request)
        permission = f"{model._meta.app_label}.{get_permission_codename('view', model._meta)}"
        return model is Fence or request.user.has_perm(permission)

    def _url(self, request: HttpRequest, row: tuple[type[models.Model], str] | None) -> str:
        """Return the address of the row's page in this admin, "" if the user has none."""
        if row is None or row[0] not in self.admin_site._registry:
            return ""
        model, pk = row
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_change"
        if not self._may_view(request, model):
            return ""
        return reverse(name, args=[quote(pk)], current_app=self.admin_site.name)


@admin.register(FenceEvent)
class FenceEventAdmin(_ReadOnlyAdmin):
    """Shows this tenant's part of the ledger, the newest line first."""

    list_display = ("created_at", "kind", "resource", "message")
    list_display_links = ("created_at",)
    list_filter = ("kind", "created_at")
    search_fields = ("resource", "message")
    ordering = ("-pk",)
    exclude = ("namespace",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        events: QuerySet[Any] = QuerySet(FenceEvent, using=conf.database)
        return events.filter(namespace=tenant()).order_by("-pk")


@admin.register(OnceRecord)
class OnceRecordAdmin(_ReadOnlyAdmin):
    """Shows this tenant's work that was done once. To delete one lets the work be done again."""

    list_display = ("shown_key", "resource", "token", "created_at")
    list_filter = ("created_at",)
    search_fields = ("key", "resource")
    fields = ("shown_key", "resource", "token", "created_at", "used_at", "result", "fingerprint")
    readonly_fields = ("shown_key",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        records: QuerySet[Any] = QuerySet(OnceRecord, using=conf.database).order_by("-created_at")
        return of_tenant(records, "key", tenant())

    @admin.display(description=gettext_lazy("key"), ordering="key")
    def shown_key(self, record: OnceRecord) -> str:
        return read_slug(record.key, tenant()) or record.key


def _line_of(lease: LeaseRecord) -> str:
    """Say who holds a lease, since when and for how long, in one line."""
    state = render_to_string("admin/django_fencing/fence/lease.html", {"lease": lease}).strip()
    since = _moment(lease.since) if lease.since else _("unknown")
    return _("{state}, by {holder} since {since}").format(
        state=state, holder=states.described(lease), since=since
    )


def _moment(moment: datetime) -> str:
    """Say when, in the time zone of the site."""
    local = localtime(moment) if is_aware(moment) else moment
    return dateformat.format(local, "Y-m-d H:i:s T")


def _title(model: type[models.Model]) -> str:
    return _("names") if model is Fence else str(model._meta.verbose_name_plural)
