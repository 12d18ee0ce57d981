"""The admin: the page of the fence tokens, and forms that save under the row's lock."""

from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.options import TO_FIELD_VAR
from django.contrib.admin.utils import flatten_fieldsets, quote, unquote
from django.contrib.auth import get_permission_codename
from django.core.checks import CheckMessage, Error
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import models
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.csrf import csrf_protect

from django_fencing import http
from django_fencing.exceptions import FencingError, LeaseLost, LockHeld
from django_fencing.locks import FencedLock
from django_fencing.models import FENCE_FIELDS, Fence, FencedResource
from django_fencing.overview import fenced_models, overview

# The token of the row that a form was made from.
_SEEN = "_fence_token"

_SHOWN_FENCE = ("shown_fence_token", "last_fence_holder")


@admin.register(Fence)
class FenceAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows leases and fences. Nothing can be changed here."""

    fields = ("name", *FENCE_FIELDS)

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

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
            "leases": [(item, self._url(request, item.row)) for item in found.leases],
            "fences": [(item, self._url(request, item.row)) for item in found.fences],
            "choices": [(one._meta.label_lower, _title(one), one is model) for one in shown],
            "title_of_fences": _title(model),
            "search": search,
            **(extra_context or {}),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_fencing/fence/change_list.html", context)

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


class FencedResourceAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """
    An admin of a FencedResource model that saves a row under its lock.

    The fence is shown and cannot be edited. Saving takes the row's lock without waiting, and
    is one fenced transaction, inlines included. Where somebody else holds the lock, or has
    held it since the form was opened, the form says so and nothing is saved.

    Adding and deleting take no lock, nor do actions and list_editable, which is refused.
    """

    transactions = http.OwnTransactions()

    @method_decorator(csrf_protect)
    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        """Show the form; save what it sends under the lock."""
        rest = (object_id, form_url, extra_context)
        row = self._row_to_save(request, object_id)
        if row is None:
            with self.transactions.opened(request):
                return super().changeform_view(request, *rest)
        seen = request.POST.get(_SEEN, "")
        lock = FencedLock(
            resource=row,
            wait=0,
            register=False,
            function=f"{type(self).__module__}.{type(self).__qualname__}",
            seen=int(seen) if seen.isdecimal() and len(seen) < 20 else None,
        )
        acquisition = lock.ask()
        try:
            with (
                acquisition.opened(),
                self.transactions.opened(request, acquisition.resource.alias),
            ):
                return super().changeform_view(request, *rest)
        except http.ANSWERED as error:
            request.fence_refusal = _refusal(error)  # type: ignore[attr-defined]
        with self.transactions.opened(request):
            return super().changeform_view(request, *rest)

    def change_view(self, *args: Any, **kwargs: Any) -> Any:
        """Show the form; save what it sends under the lock."""
        return super().change_view(*args, **kwargs)

    # Django opens no transaction of ATOMIC_REQUESTS around what has this attribute.
    change_view._non_atomic_requests = transactions  # type: ignore[attr-defined]

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the row, which a form that was refused goes on to see as it was opened."""
        row = super().get_object(request, object_id, from_field)
        if row is not None and hasattr(request, "fence_refusal"):
            row.fence_seen = request.POST.get(_SEEN, "")
        return row

    def get_form(
        self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any
    ) -> Any:
        """Return the form class; for a save that was refused, one that says why."""
        form: Any = super().get_form(request, obj, change=change, **kwargs)
        if refusal := getattr(request, "fence_refusal", None):
            return type(form)(form.__name__, (_RefusedForm, form), {"fence_refusal": refusal})
        return form

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave the fence to a section of its own."""
        return [field for field in super().get_fields(request, obj) if field not in _SHOWN_FENCE]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Add the section with the fence, unless the fieldsets have it."""
        fieldsets = [*super().get_fieldsets(request, obj)]
        if obj is None or _SHOWN_FENCE[0] in flatten_fieldsets(fieldsets):
            return fieldsets
        return [*fieldsets, (_("Fence"), {"fields": _SHOWN_FENCE})]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Add the fence to what cannot be edited."""
        return [*dict.fromkeys([*super().get_readonly_fields(request, obj), *_SHOWN_FENCE])]

    @admin.display(description=gettext_lazy("last fence token"))
    def shown_fence_token(self, row: FencedResource) -> str:
        """Show the token, and let the form send it back."""
        seen = getattr(row, "fence_seen", row.last_fence_token)
        hidden = '{}<input type="hidden" name="{}" value="{}">'
        return format_html(hidden, row.last_fence_token, _SEEN, seen)

    def check(self, **kwargs: Any) -> list[CheckMessage]:
        """Refuse a model without a fence, and list_editable, which saves without the lock."""
        messages = super().check(**kwargs)
        if not issubclass(self.model, FencedResource):
            fault = f"{self.model.__name__} is no FencedResource."
            messages.append(Error(fault, obj=self.__class__, id="django_fencing.E006"))
        if self.list_editable:
            fault = "list_editable would save rows without their lock."
            messages.append(Error(fault, obj=self.__class__, id="django_fencing.E007"))
        return messages

    def _row_to_save(self, request: HttpRequest, object_id: str | None) -> Any:
        """Return the row that this request may save, None if it is none or may not."""
        if request.method != "POST" or object_id is None:
            return None
        if self.save_as and "_saveasnew" in request.POST:
            return None
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        row = self.get_object(request, unquote(object_id), to_field)
        return row if row is not None and self.has_change_permission(request, row) else None


def _title(model: type[models.Model]) -> str:
    return _("names") if model is Fence else str(model._meta.verbose_name_plural)


class _RefusedForm:
    """Makes a form invalid."""

    fence_refusal: ClassVar[str]

    def clean(self) -> None:
        raise ValidationError(self.fence_refusal, code="refused")


def _refusal(error: FencingError) -> str:
    """Say why nothing was saved, and what to do."""
    if isinstance(error, LockHeld):
        return _("Nothing was saved: somebody else is working on this. Try again in a moment.")
    if isinstance(error, LeaseLost):
        return _(
            "Nothing was saved: somebody else has worked on this since you opened the form. "
            "Open it anew, and look at what has changed before you save."
        )
    return _(
        "Nothing was saved: it cannot be told at the moment whether somebody else is working "
        "on this. Try again in a moment."
    )
