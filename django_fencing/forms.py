"""Forms of rows: what each was made from, and the refusal of those that it has changed for."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.translation import gettext as _

from django_fencing.exceptions import FencingError, InvalidResource, LeaseLost, LockHeld
from django_fencing.models import FencedResource

# What a form sends back: the token of its row, and a digest of what stood in its fields. Those of
# an inline have its prefix.
_SEEN = "_fence_token"
_CONTENT = "_fence_content"

_REFUSED = "refused"


def made_from(row: FencedResource, form: Any, formsets: Iterable[Any]) -> dict[str, str]:
    """Return what the form of `row` and the formsets of its inlines are to send back."""
    contents = {_name(formset.prefix): _digest(formset.initial_forms) for formset in formsets}
    return {_SEEN: str(row.last_fence_token), _name(""): _digest([form]), **contents}


def sent_back(data: Mapping[str, str], form: Any, formsets: Iterable[Any]) -> dict[str, str]:
    """Return what these have sent back, to be sent once more."""
    names = [_SEEN, _name(""), *(_name(formset.prefix) for formset in formsets)]
    return {name: data.get(name, "") for name in names}


def token_in(data: Mapping[str, str]) -> int | None:
    """Return the token that a form has sent back, None if it has sent none."""
    token = data.get(_SEEN, "")
    return int(token) if token.isdecimal() and len(token) < 20 else None


def is_refused(form: Any, formsets: Iterable[Any]) -> bool:
    """Say whether one of these was refused, rather than found invalid."""
    faults = [*form.errors.as_data().get(NON_FIELD_ERRORS, ())]
    for formset in formsets:
        faults += formset.non_form_errors().as_data()
    return any(fault.code == _REFUSED for fault in faults)


def comparing(made: Any, refusal: str = "") -> Any:
    """
    Return a class of form or formset like `made` that is invalid if its content has changed.

    With `refusal`, the reason, it is invalid in any case.
    """
    base = _ComparingFormSet if hasattr(made, "management_form") else _ComparingForm
    return type(made)(made.__name__, (base, made), {"refusal": refusal})


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
    return _(
        "Nothing was saved: it cannot be told at the moment whether somebody else is working "
        "on this. Try again in a moment."
    )


def _moved() -> str:
    return _(
        "Nothing was saved: somebody else has worked on this since you opened the form. "
        "Open it anew, and look at what has changed before you save."
    )


class _Comparing:
    """Is invalid if what it was made from has changed."""

    refusal: ClassVar[str]
    data: Mapping[str, str]

    def refuse_changed(self, prefix: str, forms: Iterable[Any]) -> None:
        sent = self.data.get(_name(prefix), "")
        if refusal := self.refusal:
            raise ValidationError(refusal, code=_REFUSED)
        if not constant_time_compare(sent, _digest(forms)):
            raise ValidationError(_moved(), code=_REFUSED)


class _ComparingForm(_Comparing):
    def clean(self) -> Any:
        self.refuse_changed("", [self])
        return super().clean()  # type: ignore[misc]


class _ComparingFormSet(_Comparing):
    prefix: str
    initial_forms: Iterable[Any]

    def clean(self) -> None:
        self.refuse_changed(self.prefix, self.initial_forms)
        super().clean()  # type: ignore[misc]


def _name(prefix: str) -> str:
    return f"{prefix}-{_CONTENT}" if prefix else _CONTENT


def _digest(forms: Iterable[Any]) -> str:
    """
    Digest what the rows of these forms had in the fields that the forms write.

    It is keyed, because a form that leaves a row's column out must not tell it.
    """
    shown = [
        [str(form.instance.pk), [[name, _shown(form, name)] for name in form.fields]]
        for form in forms
    ]
    return salted_hmac(__name__, json.dumps(shown), algorithm="sha256").hexdigest()


def _shown(form: Any, name: str) -> Any:
    """Return the text, or texts in any order, that stood in a field."""
    value = form.fields[name].prepare_value(form.initial.get(name))
    if isinstance(value, list | tuple | set):
        return sorted(map(str, value))
    return str(value)
