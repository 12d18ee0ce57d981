"""The admin's pages: fence tokens, the ledger, what was done once. A stuck lease can be ended."""

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.contrib.auth import get_permission_codename
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import models
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.decorators import method_decorator
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods

from django_fencing import http, operators
from django_fencing.conf import conf
from django_fencing.exceptions import StoreUnavailable
from django_fencing.grants import LeaseRecord
from django_fencing.models import Fence, FenceEvent, OnceRecord
from django_fencing.names import Keys, namespace_of, read_slug
from django_fencing.overview import ShownLease, fenced_models, overview
from django_fencing.resource_admin import FencedResourceAdmin
from django_fencing.resources import Resource, of_tenant, tenant

__all__ = ["FencedResourceAdmin"]


_CHANGELIST = "django_fencing_fence_changelist"
_RELEASE = "django_fencing_fence_release"
_MAY_RELEASE = "django_fencing.force_release"


class _ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows rows. Who may delete them is the site's affair, unless it is said otherwise."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Fence)
class FenceAdmin(_ReadOnlyAdmin):
    """Shows leases and fences. Who has the permission `force_release` can end a lease."""

    fields = ("name", "shown_fence_token", "last_fence_holder")
    readonly_fields = ("shown_fence_token",)

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
                (item, self._url(request, item.row), self._release_url(request, item))
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

    def get_urls(self) -> Any:
        """Add the page that asks whether to end a lease."""
        release = self.admin_site.admin_view(self.release_view)
        # The lock is taken outside of any transaction.
        release._non_atomic_requests = http.OwnTransactions()  # type: ignore[attr-defined]
        return [path("release/", release, name=_RELEASE), *super().get_urls()]

    @method_decorator(require_http_methods(["GET", "HEAD", "POST"]))
    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask whether to end the lease that was shown; do so at a POST."""
        if not request.user.has_perm(_MAY_RELEASE):
            raise PermissionDenied
        given = request.POST if request.method == "POST" else request.GET
        keys = Keys.of_member(given.get("key", ""), conf.prefix)
        if keys is None or namespace_of(keys.member) != tenant():
            raise Http404("There is no such resource.")
        shown = given.get("holder", "")
        lease = resource = None
        try:
            lease = operators.look(keys)
            resource = operators.resource_of_lease(keys, lease) if lease else None
            obstacle = _obstacle(lease, resource, shown)
            if resource and lease and not obstacle and request.method == "POST":
                return self._release(request, resource, shown)
        except (StoreUnavailable, ImproperlyConfigured) as error:
            obstacle = _("The store cannot be asked: {error}").format(error=error)
        if request.method == "POST":
            self.log_change(request, Fence(name=keys.member.partition(":")[2]), obstacle)
            self.message_user(request, obstacle, messages.ERROR)
            return self._back()
        context = {
            **self.admin_site.each_context(request),
            "title": _("End a lease"),
            "opts": self.opts,
            "resource": resource,
            "lease": lease,
            "holder": lease and operators.described(lease),
            "key": keys.member,
            "shown": shown,
            "obstacle": obstacle,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_fencing/fence/release.html", context)

    def _release(self, request: HttpRequest, resource: Resource, shown: str) -> HttpResponse:
        """End the lease, and leave an entry in the admin's own log, whatever came of it."""
        user, reason = str(request.user), request.POST.get("reason", "").replace("\0", "").strip()
        forced = operators.force_release(resource, shown, user=user, reason=reason)
        row: Any = Fence(name=resource.pk)
        if resource.model is not Fence:
            row = QuerySet(resource.model, using=resource.alias).filter(pk=resource.pk).first()
        line = _("Lock of {resource}: {said}.").format(resource=resource.name, said=forced.said)
        self.log_change(request, row or Fence(name=resource.name), line)
        done = forced.outcome is operators.Outcome.RELEASED
        self.message_user(request, line, messages.SUCCESS if done else messages.WARNING)
        return self._back()

    def _back(self) -> HttpResponse:
        page = reverse(f"admin:{_CHANGELIST}", current_app=self.admin_site.name)
        return HttpResponseRedirect(page)

    def _release_url(self, request: HttpRequest, item: ShownLease) -> str:
        """Return the address of the page that asks whether to end the lease, "" if none does."""
        if item.lease is None or not request.user.has_perm(_MAY_RELEASE):
            return ""
        query = urlencode({"key": item.keys.member, "holder": item.lease.holder})
        page = reverse(f"admin:{_RELEASE}", current_app=self.admin_site.name)
        return f"{page}?{query}"

    @admin.display(description=gettext_lazy("last fence token"))
    def shown_fence_token(self, fence: Fence) -> str:
        """Show all digits, in groups nowhere."""
        return str(fence.last_fence_token)

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


def _obstacle(lease: LeaseRecord | None, resource: Resource | None, shown: str) -> str:
    """Say why the lease cannot be ended, "" if it can."""
    if lease is None:
        return _("Nobody holds it any more: nothing was done.")
    if lease.holder != shown:
        return _("It is held by {holder}, and not as it was shown: nothing was done.").format(
            holder=operators.described(lease)
        )
    if resource is None:
        return _(
            "Its fence cannot be found, so its holder could not be fenced: nothing was done. "
            "It ends by itself."
        )
    return ""


def _title(model: type[models.Model]) -> str:
    return _("names") if model is Fence else str(model._meta.verbose_name_plural)
