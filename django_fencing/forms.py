"""What a form in the admin was made from, and the refusal of one for which that has changed."""

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

from django.conf import settings
from django.core.exceptions import NON_FIELD_ERRORS, FieldDoesNotExist, ValidationError
from django.db import models
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.translation import gettext as _

from django_fencing.exceptions import (
    FencingError,
    InvalidResource,
    LeaseLost,
    LockHeld,
    UnfencedWrite,
)
from django_fencing.models import FencedResource

# What a form sends back: the token of its row, and a digest of what stood in each of its fields.
# That of an inline has its prefix.
_SEEN = "_fence_token"
_CONTENT = "_fence_content"

_DIGEST = re.compile(r"([^ =]+)=([0-9a-f]{32})")


class Comparison:
    """
    The comparison of what is sent with what it was made from; with a `refusal`, its end.

    A form or formset that it has made is invalid if it is refused. `passed` says whether the form
    was compared, and may be saved; `shown` whether it is shown once more instead.
    """

    def __init__(self, data: Mapping[str, str], refusal: str = "") -> None:
        self.passed = self.shown = False
        self._data = data
        self._refusal = refusal

    def of_form(self, made: Any) -> "_Made":
        """Return a class of forms like `made`."""
        return _Made(made, self._look_at_form)

    def of_formset(self, made: Any) -> "_Made":
        """Return a class of formsets like `made`."""
        return _Made(made, self._look_at_formset)

    def _look_at_form(self, form: Any) -> None:
        clean = form.full_clean

        def full_clean() -> None:
            self.passed = False
            refusal = self._refusal_of("", [form])
            clean()
            self.passed = not refusal
            if refusal:
                form.add_error(NON_FIELD_ERRORS, ValidationError(refusal, code="refused"))

        form.full_clean = full_clean

    def _look_at_formset(self, formset: Any) -> None:
        clean = formset.full_clean

        def full_clean() -> None:
            refusal = (
                "" if self._refusal else self._refusal_of(formset.prefix, formset.initial_forms)
            )
            clean()
            if refusal:
                formset._non_form_errors.append(ValidationError(refusal, code="refused"))

        formset.full_clean = full_clean

    def _refusal_of(self, prefix: str, forms: Iterable[Any]) -> str:
        """Return why these are refused, "" if they are not."""
        if self._refusal:
            return self._refusal
        sent = dict(_DIGEST.findall(self._data.get(_name(prefix), "")))
        shown = _shown(forms)
        same = all(_is_digest(name, value, sent.get(name, "")) for name, value in shown.items())
        return "" if same else _moved()


class _Made:
    """Stands for a class of forms or formsets, whatever it is, and looks at each that it makes."""

    def __init__(self, made: Any, look: Callable[[Any], None]) -> None:
        self._made = made
        self._look = look

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._made(*args, **kwargs)
        self._look(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


def made_from(row: FencedResource, form: Any, formsets: Iterable[Any]) -> dict[str, str]:
    """Return what the form of `row` and the formsets of its inlines are to send back."""
    contents = {_name(formset.prefix): _digests(formset.initial_forms) for formset in formsets}
    return {_SEEN: str(row.last_fence_token), _name(""): _digests([form]), **contents}


def sent_back(
    data: Mapping[str, str], formsets: Iterable[Any], registered: int | None
) -> dict[str, str]:
    """
    Return what these have sent back, to be sent once more: it stays what they were made from.

    Where the lease of this sending has `registered` for good, its token stands for what was seen.
    """
    names = [_SEEN, _name(""), *(_name(formset.prefix) for formset in formsets)]
    sent = {name: data.get(name, "") for name in names}
    return sent if registered is None else {**sent, _SEEN: str(registered)}


def token_in(data: Mapping[str, str]) -> int | None:
    """Return the token that a form has sent back, None if it has sent none."""
    token = data.get(_SEEN, "")
    return int(token) if token.isdecimal() and len(token) < 20 else None


def refusal_of(error: FencingError | None) -> str:
    """Say why nothing was saved, and what to do; None stands for a form that was not made here."""
    if error is None:
        return _(
            "Nothing was saved: this form does not say what it was made from, so it cannot be "
            "told whether somebody else has worked on this since. Open it anew."
        )
    if isinstance(error, LockHeld):
        return _("Nothing was saved: somebody else is working on this. Try again in a moment.")
    if isinstance(error, LeaseLost | InvalidResource):
        return _moved()
    if isinstance(error, UnfencedWrite):
        return _("Nothing was saved: a row that belongs to this one is written under its own lock.")
    return _(
        "Nothing was saved: it cannot be told at the moment whether somebody else is working "
        "on this. Try again in a moment."
    )


def _moved() -> str:
    return _(
        "Nothing was saved: somebody else has worked on this since you opened the form. "
        "Open it anew, and look at what has changed before you save."
    )


def _name(prefix: str) -> str:
    return f"{prefix}-{_CONTENT}" if prefix else _CONTENT


def _digests(forms: Iterable[Any]) -> str:
    return " ".join(f"{name}={_digest(name, value)}" for name, value in _shown(forms).items())


def _is_digest(name: str, value: str, sent: str) -> bool:
    """Say whether `sent` is of this value, by this or a former secret key."""
    keys = (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    return any(constant_time_compare(sent, _digest(name, value, key)) for key in keys)


def _digest(name: str, value: str, key: Any = None) -> str:
    """Digest what a field holds. It is keyed: who sees the form may not see the field."""
    return salted_hmac(f"{__name__}.{name}", value, key, algorithm="sha256").hexdigest()[:32]


def _shown(forms: Iterable[Any]) -> dict[str, str]:
    """Return what the rows of these forms hold in the fields that the forms write."""
    shown = {}
    for number, form in enumerate(forms):
        if form.prefix:  # in a formset
            shown[f"{number}.pk"] = repr(form.instance.pk)
        for name in form.fields:
            if (value := _held(form, name)) is not None:
                shown[f"{number}.{name}"] = value
    return shown


def _held(form: Any, name: str) -> str | None:
    """Return what the row holds in a field, None if it is nothing of the database."""
    try:
        field = form.instance._meta.get_field(name)
    except FieldDoesNotExist:
        field = None
    if not isinstance(field, models.Field):  # a field of the form alone, or of the other side
        value = form.initial.get(name, form.fields[name].initial)
        return repr(value) if isinstance(value, str | int | float | Decimal) else _keys(value)
    value = field.value_from_object(form.instance)
    keys = _keys(value)
    return repr(field.get_prep_value(value)) if keys is None else keys


def _keys(value: Any) -> str | None:
    """Return the primary keys of rows, in any order; None for a value of another kind."""
    if isinstance(value, models.Model):
        return repr(value.pk)
    if isinstance(value, models.QuerySet | list | tuple | set):
        rows = list(value)
        if isinstance(value, models.QuerySet) or any(isinstance(row, models.Model) for row in rows):
            return repr(sorted(repr(getattr(row, "pk", row)) for row in rows))
    return None
