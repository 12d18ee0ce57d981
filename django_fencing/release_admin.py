"""The admin's page that ends a lease which is stuck."""

from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.decorators import method_decorator
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods

from django_fencing import http, operators, states
from django_fencing.conf import conf
from django_fencing.exceptions import StoreUnavailable
from django_fencing.grants import LeaseRecord
from django_fencing.models import Fence
from django_fencing.names import Keys, namespace_of
from django_fencing.overview import ShownLease
from django_fencing.resources import Resource, tenant

_CHANGELIST = "django_fencing_fence_changelist"
_RELEASE = "django_fencing_fence_release"
_MAY_RELEASE = "django_fencing.force_release"


class ReleasingAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Lets those who have the permission `force_release` end a lease that was shown to them."""

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
            lease = states.look(keys)
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
            "holder": lease and states.described(lease),
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

    def release_url(self, request: HttpRequest, item: ShownLease) -> str:
        """Return the address of the page that asks whether to end the lease, "" if none does."""
        if item.lease is None or not request.user.has_perm(_MAY_RELEASE):
            return ""
        query = urlencode({"key": item.keys.member, "holder": item.lease.holder})
        page = reverse(f"admin:{_RELEASE}", current_app=self.admin_site.name)
        return f"{page}?{query}"


def _obstacle(lease: LeaseRecord | None, resource: Resource | None, shown: str) -> str:
    """Say why the lease cannot be ended, "" if it can."""
    if lease is None:
        return _("Nobody holds it any more: nothing was done.")
    if lease.holder != shown:
        return _("It is held by {holder}, and not as it was shown: nothing was done.").format(
            holder=states.described(lease)
        )
    if resource is None:
        return _(
            "Its fence cannot be found, so its holder could not be fenced: nothing was done. "
            "It ends by itself."
        )
    return ""
