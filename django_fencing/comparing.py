"""An admin that compares the form that it is sent with what the form was made from."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

from django_fencing.forms import Comparison
from django_fencing.models import FENCE_FIELDS


def comparing(of: Any, comparison: Comparison, alias: str = "") -> Any:
    """Return an admin like this one that compares what it is sent, and reads from `alias`."""
    # What a subclass has overridden is asked here, and cannot let a form pass.
    admin: Any = copy.copy(of)
    get_form, get_formsets = admin.get_form, admin.get_formsets_with_inlines
    get_queryset = admin.get_queryset
    get_inlines, save_form = admin.get_inline_instances, admin.save_form

    def compared_form(*args: Any, **kwargs: Any) -> Any:
        return comparison.of_form(get_form(*args, **kwargs))

    def compared_formsets(request: HttpRequest, obj: Any = None) -> Iterator[Any]:
        for formset, inline in get_formsets(request, obj):
            asked = (inline.has_change_permission, inline.has_delete_permission)
            writes = any(may(request, obj) for may in asked)
            yield comparison.of_formset(formset) if writes else formset, inline

    def inlines(*args: Any, **kwargs: Any) -> Any:
        found = get_inlines(*args, **kwargs)
        for inline in found:
            inline.get_queryset = reading_from(alias, inline.get_queryset)
        return found

    def save_compared_form(request: HttpRequest, form: Any, change: bool) -> Any:
        if not comparison.passed:
            raise ImproperlyConfigured(
                f"{name_of(of)} would save a form without comparing it: let full_clean() of the "
                f"form that get_form() makes decide whether it is valid."
            )
        return save_form(request, form, change)

    admin.comparison = comparison
    admin.get_form, admin.get_formsets_with_inlines = compared_form, compared_formsets
    admin.get_object = with_fence(admin.get_object, alias)
    admin.save_form = save_compared_form
    if alias:  # and not from a replica
        admin.get_queryset = reading_from(alias, get_queryset)
        admin.get_inline_instances = inlines
    return admin


def with_fence(get_object: Callable[..., Any], alias: str) -> Callable[..., Any]:
    """Let the rows have their fence, which an admin's queryset may defer."""

    def whole_row(*args: Any, **kwargs: Any) -> Any:
        row = get_object(*args, **kwargs)
        if row is not None and row.get_deferred_fields().intersection(FENCE_FIELDS):
            row.refresh_from_db(using=alias or None, fields=FENCE_FIELDS)
            row._note_fence()  # it was just read, under the row lock
        return row

    return whole_row


def reading_from(alias: str, get_queryset: Callable[..., Any]) -> Callable[..., Any]:
    return lambda request: get_queryset(request).using(alias)


def name_of(of: Any) -> str:
    """Return what a lease says of who asked."""
    return f"{type(of).__module__}.{type(of).__qualname__}"
