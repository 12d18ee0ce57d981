"""A call of a decorated function: the resource that its arguments name, and how it ends."""

import functools
import inspect
import string
from collections.abc import Callable
from datetime import date
from typing import Any, cast
from uuid import UUID

from django.db import models

from django_fencing.exceptions import InvalidResource, LockHeld, NoSuchRow
from django_fencing.leases import Lease
from django_fencing.names import checked, encoded
from django_fencing.resources import ResourceLike


class Call:
    """A call of a plain function, which enters a lock again that its flow holds."""

    reenters = True
    is_work = True  # which may be done once; else it only looks

    def answered(self, locked: Callable[[], Any]) -> Any:
        """Return what `locked` returns, and turn its errors into what the caller expects."""
        return locked()

    def run(self, body: Callable[[], Any], lease: Lease) -> Any:
        """Run the body, whose lease is held."""
        return body()

    def missing(self, error: NoSuchRow) -> Exception:
        """Return what is raised where the row to lock does not exist."""
        return error

    def skipped(self, held: LockHeld) -> Any:
        """Return what stands for the result of a body that has not run."""
        return None

    def payload(self) -> Any:
        """Return what is compared where the work was done once before."""
        return None

    def kept(self, result: Any) -> Any:
        """Return what is stored of work that is done once."""
        return result

    def fresh(self, result: Any, kept: Any) -> Any:
        """Return the result of work that has just been done."""
        return kept

    def replayed(self, kept: Any, key: str) -> Any:
        """Return the result of work that was done before."""
        return kept


class Entry(Call):
    """A call by which work comes in: it asks the store, whatever its flow holds."""

    reenters = False


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function` as it is called, whatever it claims to wrap."""
    inner: Any = inspect.unwrap(function, stop=_says_how_it_is_called)
    if isinstance(inner, functools.partial):
        inner = functools.partial(inner.func, *inner.args, **inner.keywords)
    return inspect.signature(inner, follow_wrapped=not _is_called_otherwise(inner))


def _says_how_it_is_called(function: Any) -> bool:
    return hasattr(function, "__signature__") or _is_called_otherwise(function)


def _is_called_otherwise(function: Any) -> bool:
    """
    Say whether the function that `function` wraps has other parameters.

    method_decorator() makes its partial of a bound method look like the method. as_view() gives
    the view the attributes of `dispatch`.
    """
    is_view = hasattr(function, "view_class") or hasattr(function, "cls")
    return is_view or (isinstance(function, functools.partial) and hasattr(function, "__wrapped__"))


def takes_lease(signature: inspect.Signature) -> bool:
    """Say whether the function asks for the lease, by a keyword-only parameter `lease`."""
    lease = signature.parameters.get("lease")
    return lease is not None and lease.kind is inspect.Parameter.KEYWORD_ONLY


def without_lease(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature that the function's callers see."""
    if not takes_lease(signature):
        return signature
    parameters = [p for name, p in signature.parameters.items() if name != "lease"]
    return signature.replace(parameters=parameters)


def label_of(function: Any) -> str:
    """Return what a lease says of who asked."""
    while isinstance(function, functools.partial):
        function = function.func
    if owner := getattr(function, "__self__", None):  # `dispatch` is often an inherited one
        return f"{type(owner).__module__}.{type(owner).__qualname__}.{function.__name__}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def key_of_call(once: str | Callable[..., str], signature: inspect.Signature) -> Callable[..., str]:
    """Return what gives the key of a call's work from its arguments."""
    if isinstance(once, str):
        return _Template(once, without_lease(signature), "The key {!r} of the function's work")
    if callable(once) and not isinstance(once, type):
        return once
    raise TypeError(f"once is a text or a callable that returns one, not {once!r}.")


def resource_of_call(
    resource: ResourceLike | Callable[..., ResourceLike], signature: inspect.Signature
) -> Callable[..., ResourceLike]:
    """Return what gives a call's resource from its arguments."""
    if isinstance(resource, str):
        return _Template(resource, without_lease(signature), "The name {!r} of the function's lock")
    if isinstance(resource, tuple | models.Model):
        return lambda *args, **kwargs: resource
    if callable(resource):
        return resource
    raise TypeError(f"A resource is a text, a row, (Model, pk) or a callable, not {resource!r}.")


class _Template:
    """A text with parameters of the function in braces. `what` is the text, for messages."""

    def __init__(self, text: str, signature: inspect.Signature, what: str) -> None:
        self._what = what.format(text)
        try:
            self._pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise InvalidResource(f"{self._what} is no template: {error}.") from error
        self._text = text or checked(text, self._what)
        self._signature = signature
        for _, field, specification, conversion in self._pieces:
            if field is None:
                continue
            if specification or conversion:
                raise self._invalid(field, "which must stand alone, without a format")
            self._refuse_unknown(field)

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        call = self._signature.bind(*args, **kwargs)
        call.apply_defaults()
        return "".join(
            literal + ("" if field is None else self._encoded(field, self._value(field, call)))
            for literal, field, *_ in self._pieces
        )

    def _refuse_unknown(self, field: str) -> None:
        kinds = {name: parameter.kind for name, parameter in self._signature.parameters.items()}
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [name for name, kind in kinds.items() if kind not in variable]
        takes_more = inspect.Parameter.VAR_KEYWORD in kinds.values()
        if field in named or (takes_more and field.isidentifier() and field not in kinds):
            return
        raise self._invalid(
            field, f"which is no parameter of it: {', '.join(sorted(named)) or 'it has none'}"
        )

    def _value(self, field: str, call: inspect.BoundArguments) -> Any:
        if field in call.arguments:
            return call.arguments[field]
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD and field in call.arguments[name]:
                return call.arguments[name][field]
        raise self._invalid(field, "which this call was not given as a keyword")

    def _encoded(self, field: str, given: Any) -> str:
        value = given
        if isinstance(value, models.Model):
            value = None if value._state.adding else value.pk
        if isinstance(value, date):
            value = value.isoformat()
        if isinstance(value, bool) or not isinstance(value, str | int | UUID) or value == "":
            raise InvalidResource(
                f"The parameter {field!r} gives no name for {self._text!r}: it must be a text that "
                f"is not empty, a whole number, a date, a UUID or a saved row, not {given!r}."
            )
        return encoded(checked(_written(value)), readable="-._~")

    def _invalid(self, field: str, fault: str) -> InvalidResource:
        return InvalidResource(
            f"{self._what} has the field {{{field}}}, {fault}. "
            f"A callable may make any text of the arguments."
        )


def _written(value: str | int | UUID) -> str:
    """Return the value as text; a member of an enumeration stands for its value."""
    if issubclass(type(value), str):  # not a lazy object that passes for one
        return "".join((cast("str", value),))
    try:
        return int.__repr__(value) if issubclass(type(value), int) else str(value)
    except ValueError as error:  # Python writes no number of more than 4,300 digits
        raise InvalidResource(f"A number is too long for a name: {error}.") from error
