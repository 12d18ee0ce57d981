"""The admin: the page of the fence tokens, and forms that save under the row's lock."""

import copy
from contextlib import ExitStack
from typing import Any, ClassVar, cast

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
from django_fencing.exceptions import FencingError, InvalidResource, LeaseLost, LockHeld
from django_fencing.locks import FencedLock
from django_fencing.models import Fence, FencedResource
from django_fencing.overview import fenced_models, overview

# The token of the row that a form was made from.
_SEEN = "_fence_token"

_SHOWN_FENCE = ("shown_fence_token", "last_fence_holder")


@admin.register(Fence)
class FenceAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Shows leases and fences. Nothing can be changed here."""

    fields = ("name", "shown_fence_token", "last_fence_holder")
    readonly_fields = ("shown_fence_token",)

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


class FencedResourceAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """
    An admin of a FencedResource model that saves a row under its lock.

    The fence is shown and cannot be edited. Saving takes the row's lock without waiting, and
    is one fenced transaction, inlines included. Where somebody else holds the lock, or has
    registered since the form was opened, the form says so and nothing is saved. What a holder
    writes that had registered before the form was opened is not noticed.

    What the form was made from is sent back by `shown_fence_token`: fieldsets that leave it out
    are saved under the lock, and without that comparison.

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
        view: Any = super().changeform_view
        row = self._row_to_save(request, object_id)
        if row is not None:
            acquisition = self._lock(request, row).ask()
            with acquisition.undone(), ExitStack() as held:
                try:
                    held.enter_context(acquisition.opened())
                except (*http.ANSWERED, InvalidResource) as error:
                    refused = self._refusing(request, error)
                    view = super(FencedResourceAdmin, refused).changeform_view
                else:
                    with self.transactions.opened(request, acquisition.resource.alias):
                        return view(request, *rest)
        with self.transactions.opened(request):
            return view(request, *rest)

    def get_urls(self) -> Any:
        """Let Django open no transaction of ATOMIC_REQUESTS around the form."""
        urls: list[Any] = super().get_urls()
        for url in urls:
            if str(getattr(url, "name", "")).endswith("_change"):
                url.callback._non_atomic_requests = self.transactions
        return urls

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
            hint = "Let the model inherit from FencedResource, or the admin from admin.ModelAdmin."
            messages.append(Error(fault, hint, obj=self.__class__, id="django_fencing.E006"))
        if self.list_editable:
            fault = "list_editable would save rows without their lock."
            hint = "Leave out list_editable: a row is saved on its own page."
            messages.append(Error(fault, hint, obj=self.__class__, id="django_fencing.E007"))
        return messages

    def _row_to_save(self, request: HttpRequest, object_id: str | None) -> Any:
        """Return the row that this request may save, None if it is none or may not."""
        if request.method != "POST" or object_id is None:
            return None
        if self.save_as and "_saveasnew" in request.POST:
            return None
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if to_field and not self.to_field_allowed(request, to_field):
            return None  # Django refuses it
        row = self.get_object(request, unquote(object_id), to_field)
        return row if row is not None and self.has_change_permission(request, row) else None

    def _lock(self, request: HttpRequest, row: FencedResource) -> FencedLock:
        seen = request.POST.get(_SEEN, "")
        return FencedLock(
            resource=row,
            wait=0,
            register=False,
            function=f"{type(self).__module__}.{type(self).__qualname__}",
            seen=int(seen) if seen.isdecimal() and len(seen) < 20 else None,
        )

    def _refusing(self, request: HttpRequest, error: FencingError) -> "FencedResourceAdmin":
        """Return an admin like this one, whose form says why it is refused and is never valid."""
        # What a subclass has overridden is asked here, and cannot let the form pass.
        get_form: Any = self.get_form
        get_object: Any = self.get_object

        def refused_form(*args: Any, **kwargs: Any) -> Any:
            form = get_form(*args, **kwargs)
            return type(form)(form.__name__, (_RefusedForm, form), {"refusal": _refusal(error)})

        def row_as_opened(*args: Any, **kwargs: Any) -> Any:
            row = get_object(*args, **kwargs)
            if row is not None:
                row.fence_seen = request.POST.get(_SEEN, "")
            return row

        refusing: Any = copy.copy(self)
        refusing.get_form, refusing.get_object = refused_form, row_as_opened
        return cast("FencedResourceAdmin", refusing)


def _title(model: type[models.Model]) -> str:
    return _("names") if model is Fence else str(model._meta.verbose_name_plural)


class _RefusedForm:
    """Makes a form invalid."""

    refusal: ClassVar[str]

    def clean(self) -> None:
        raise ValidationError(self.refusal, code="refused")


def _refusal(error: FencingError) -> str:
    """Say why nothing was saved, and what to do."""
    if isinstance(error, LockHeld):
        return _("Nothing was saved: somebody else is working on this. Try again in a moment.")
    if isinstance(error, LeaseLost | InvalidResource):
        return _(
            "Nothing was saved: somebody else has worked on this since you opened the form. "
            "Open it anew, and look at what has changed before you save."
        )
    return _(
        "Nothing was saved: it cannot be told at the moment whether somebody else is working "
        "on this. Try again in a moment."
    )
