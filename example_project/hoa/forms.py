"""What may be asked for: the same for the pages and for the JSON endpoints."""

from datetime import date
from typing import Any, cast

from django import forms
from django.core.exceptions import BadRequest
from django.shortcuts import get_object_or_404

from hoa.models import Vendor


def _always(message: str) -> dict[str, str]:
    return {"required": message, "invalid": message}


class VendorForm(forms.Form):
    vendor = forms.IntegerField(error_messages=_always("Choose a vendor, by its number."))


class MonthForm(forms.Form):
    month = forms.DateField(
        input_formats=["%Y-%m"], error_messages=_always("A month looks like 2026-11.")
    )


def vendor_in(data: Any) -> Vendor:
    """Return the vendor that is chosen. Raise BadRequest, or Http404 if there is none."""
    return get_object_or_404(Vendor, pk=_cleaned(VendorForm(data))["vendor"])


def month_in(data: Any) -> date:
    """Return the first day of the month. Raise BadRequest."""
    return cast("date", _cleaned(MonthForm(data))["month"])


def _cleaned(form: forms.Form) -> dict[str, Any]:
    if form.is_valid():
        return form.cleaned_data
    raise BadRequest(" ".join(str(error) for errors in form.errors.values() for error in errors))
