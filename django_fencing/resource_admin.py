"""The admin of your own models: forms and deletions under the row's lock."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.options import TO_FIELD_VAR
from django.contrib.admin.utils import flatten_fieldsets, unquote
from django.core.checks import CheckMessage, Error
from django.db import router, transaction
from django.http import HttpRequest, HttpResponseRedirect
from django.utils.decorators import method_decorator
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.csrf import csrf_protect

from django_fencing import flow, forms, http, problems
from django_fencing.comparing import comparing, name_of, reading_from, with_fence
from django_fencing.exceptions import FencingError, InvalidResource, LockHeld, UnfencedWrite
from django_fencing.forms import Comparison
from django_fencing.locks import FencedLock
from django_fencing.models import FencedResource

_SHOWN_FENCE = ("shown_fence_token", "last_fence_holder")


class FencedResourceAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """
    An admin of a FencedResource model that saves a row under its lock.

    The fence is shown and cannot be edited. Saving takes the row's lock without waiting, and
    is one fenced transaction, inlines included. Where somebody else holds the lock, or has
    registered or changed what the form would write since it was opened, the form says so and
    nothing is saved.

    Deleting takes the lock too, on the row's own page: there is no action that deletes selected
    rows. Adding takes no lock, nor do your own actions; list_editable is refused. What an
    overridden change_view() writes before it calls this one is no part of the transaction.
    """

    transactions = http.OwnTransactions()
    comparison: Comparison | None = None  # of what is sent, while that is looked at

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
        if (seen := forms.token_in(request.POST)) is None:
            return self._refused(None, request, *rest)
        lock = FencedLock(resource=row, wait=0, register=False, function=name_of(self), seen=seen)
        acquisition = lock.ask()
        try:
            with acquisition.undone(), ExitStack() as held:
                try:
                    held.enter_context(acquisition.opened())
                except (*problems.ANSWERED, InvalidResource) as error:
                    return self._refused(error, request, *rest)
                return self._compared(acquisition.resource.alias, request, *rest)
        except UnfencedWrite as error:  # an inline's table is protected
            return self._refused(error, request, *rest)

    def _refused(self, error: FencingError | None, request: HttpRequest, *rest: Any) -> Any:
        """Show the form that was sent, with the reason why it is not saved."""
        refusing = comparing(self, Comparison(request.POST, forms.refusal_of(error)))
        with self.transactions.opened(request):
            return super(FencedResourceAdmin, refusing).changeform_view(request, *rest)

    def _compared(self, alias: str, request: HttpRequest, *rest: Any) -> Any:
        """Save the form that was sent, if nothing has changed; the fenced transaction is open."""
        comparison = Comparison(request.POST)
        admin = comparing(self, comparison, alias)
        with self.transactions.opened(request, alias):
            response = super(FencedResourceAdmin, admin).changeform_view(request, *rest)
            if comparison.shown:  # nothing was saved, so nobody has worked on the row
                transaction.set_rollback(True, using=alias)
            return response

    def render_change_form(
        self,
        request: HttpRequest,
        context: Any,
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> Any:
        """Show the fence, whatever the fieldsets are, and let the form send it back."""
        if obj is not None:
            shown = context["adminform"]
            formsets = [inline.formset for inline in context["inline_admin_formsets"]]
            if self.comparison is None:
                obj.fence_sent_back = forms.made_from(obj, shown.form, formsets)
            else:
                self.comparison.shown = True
                obj.fence_sent_back = forms.sent_back(request.POST, formsets, self._registered(obj))
            if _SHOWN_FENCE[0] not in flatten_fieldsets(shown.fieldsets):
                shown.fieldsets = [*shown.fieldsets, (_("Fence"), {"fields": _SHOWN_FENCE})]
            shown.readonly_fields = [*dict.fromkeys([*shown.readonly_fields, *_SHOWN_FENCE])]
        return super().render_change_form(request, context, add, change, form_url, obj)

    @method_decorator(csrf_protect)
    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> Any:
        """Ask whether to delete; do so under the lock."""
        row = self._sent_row(request, object_id)
        if row is None or not self.has_delete_permission(request, row):
            with self.transactions.opened(request):
                return super().delete_view(request, object_id, extra_context)
        acquisition = FencedLock(resource=row, wait=0, register=False, function=name_of(self)).ask()
        try:
            with acquisition.undone(), acquisition.opened():
                return self._delete(acquisition.resource.alias, request, object_id, extra_context)
        except (*problems.ANSWERED, InvalidResource, UnfencedWrite) as error:
            self.message_user(request, _not_deleted(error), messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())

    def _delete(self, alias: str, request: HttpRequest, *rest: Any) -> Any:
        """Delete, unless other rows need this one; the fenced transaction is open."""
        deleting: Any = copy.copy(self)
        deleting.get_queryset = reading_from(alias, self.get_queryset)  # not from a replica
        deleting.get_object = with_fence(deleting.get_object, alias)
        deleted: list[Any] = []
        deleting.delete_model = _noting(deleted, self.delete_model)
        with self.transactions.opened(request, alias):
            response = super(FencedResourceAdmin, deleting).delete_view(request, *rest)
            if not deleted:  # so nobody has worked on it
                transaction.set_rollback(True, using=alias)
            return response

    # Django 6.1 added an argument, and looks for its name.
    def get_actions(self, request: HttpRequest, action_location: Any = None, **kwargs: Any) -> Any:
        """Leave out the action that would delete rows without their locks."""
        if action_location is not None:
            kwargs["action_location"] = action_location
        actions = super().get_actions(request, **kwargs)
        actions.pop("delete_selected", None)
        return actions

    def get_urls(self) -> Any:
        """Let Django open no transaction of ATOMIC_REQUESTS around what takes the lock."""
        urls: list[Any] = super().get_urls()
        for url in urls:
            if str(getattr(url, "name", "")).endswith(("_change", "_delete")):
                url.callback._non_atomic_requests = self.transactions
        return urls

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave the fence to a section of its own."""
        return [field for field in super().get_fields(request, obj) if field not in _SHOWN_FENCE]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Add the fence to what cannot be edited."""
        return [*dict.fromkeys([*super().get_readonly_fields(request, obj), *_SHOWN_FENCE])]

    @admin.display(description=gettext_lazy("last fence token"))
    def shown_fence_token(self, row: FencedResource) -> str:
        """Show the token, and what the form is to send back."""
        sent_back = getattr(row, "fence_sent_back", {})
        hidden = '<input type="hidden" name="{}" value="{}">'
        # What is not saved is rolled back, the move of the fence too.
        token = forms.token_in(sent_back) if self.comparison else row.last_fence_token
        return format_html("{}{}", token, format_html_join("", hidden, sent_back.items()))

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
        if self.save_as and "_saveasnew" in request.POST:
            return None
        row = self._sent_row(request, object_id)
        return row if row is not None and self.has_change_permission(request, row) else None

    def _sent_row(self, request: HttpRequest, object_id: str | None) -> Any:
        """Return the row that a POST is about."""
        if request.method != "POST" or object_id is None:
            return None
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        if to_field and not self.to_field_allowed(request, to_field):
            return None  # Django refuses it
        return self.get_object(request, unquote(object_id), to_field)

    def _registered(self, row: FencedResource) -> int | None:
        """Return the token by which this sending has moved the fence, whatever becomes of it."""
        lease = flow.fenced_by(router.db_for_write(type(row), instance=row))
        if lease is None or self.comparison is None or not self.comparison.passed:
            return None
        return lease.token if lease._is_registered else None


def _noting(deleted: list[Any], delete_model: Callable[..., Any]) -> Callable[..., Any]:
    def delete(request: HttpRequest, row: Any) -> None:
        delete_model(request, row)
        deleted.append(row)

    return delete


def _not_deleted(error: FencingError) -> str:
    if isinstance(error, LockHeld):
        return _("Nothing was deleted: somebody else is working on this. Try again in a moment.")
    if isinstance(error, InvalidResource):
        return _("Nothing was deleted: it is not there any more.")
    if isinstance(error, UnfencedWrite):
        return _(
            "Nothing was deleted: a row that belongs to this one is written under its own lock. "
            "Delete that one first."
        )
    return _(
        "Nothing was deleted: it cannot be told at the moment whether somebody else is working "
        "on this. Try again in a moment."
    )
