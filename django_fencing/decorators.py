"""with_fenced_lock: a whole function under a lock."""

import functools
import inspect
import string
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from typing import Any, Literal, ParamSpec, TypeVar
from uuid import UUID

from asgiref.sync import iscoroutinefunction
from django.db import models

from django_fencing.exceptions import InvalidResource, LockHeld
from django_fencing.locks import FencedLock
from django_fencing.names import checked, encoded
from django_fencing.resources import ResourceLike
from django_fencing.timing import Duration

P = ParamSpec("P")
R = TypeVar("R")

OnHeld = Literal["raise", "skip"] | Callable[[LockHeld], Any]


def with_fenced_lock(
    resource: ResourceLike | Callable[..., ResourceLike],
    *,
    ttl: Duration | None = None,
    wait: Duration | None = None,
    using: str | None = None,
    atomic: bool | None = None,
    on_held: OnHeld = "raise",
) -> Callable[[Callable[P, R]], Callable[..., R]]:
    """
    Run the function under the fenced lock of `resource`.

    A text may name parameters, as in "monthly-charges:{organization_id}": each is a text, a
    whole number, a date, a UUID or a saved row, and is percent-encoded, so that joined values
    never collide. A callable is given the call's arguments and returns a name, a row or
    (Model, pk).

    The function runs as one fenced transaction, unless it has a keyword-only parameter
    `lease`: then it is given the lease, and opens its own lease.atomic(). `atomic` overrides
    that choice.

    Where the lock is held, `on_held` says what the call does: "raise" LockHeld, "skip" and
    return None, or return what a callable makes of the LockHeld. `ttl`, `wait`, `using` and
    all other errors are those of fenced_lock(). Raise TypeError at decoration for what cannot
    be run under a lock: coroutine functions, generators, classes.
    """
    if on_held not in ("raise", "skip") and not callable(on_held):
        raise TypeError(f'on_held must be "raise", "skip" or a callable, not {on_held!r}.')

    if isinstance(resource, type):
        raise TypeError(f"A resource is not a class: pass a row or ({resource.__name__}, pk).")

    def decorate(function: Callable[P, R]) -> Callable[..., R]:
        _refuse_deferred(function)
        signature = inspect.signature(function)
        takes_lease = _takes_lease(signature)
        in_transaction = not takes_lease if atomic is None else atomic
        resource_of = _resource_of_call(resource, signature)
        label = _label(function)

        @functools.wraps(function)
        def fenced(*args: Any, **kwargs: Any) -> Any:
            lock = FencedLock(
                resource=resource_of(*args, **kwargs),
                ttl=ttl,
                wait=wait,
                using=using,
                register=not in_transaction,
                function=label,
            )
            with ExitStack() as held:
                try:
                    lease = held.enter_context(lock.opened() if in_transaction else lock)
                except LockHeld as error:
                    if on_held == "raise":
                        raise
                    return None if on_held == "skip" else on_held(error)
                if takes_lease:
                    kwargs["lease"] = lease
                return function(*args, **kwargs)

        return fenced

    return decorate


def _refuse_deferred(function: Any) -> None:
    """Refuse what returns before its body has run: the lock would be gone by then."""
    called = getattr(function, "__call__", None)  # noqa: B004 - of a callable object
    if isinstance(function, type):
        fault = "is a class: decorate a method of it"
    elif isinstance(function, staticmethod | classmethod):
        fault = f"hides its function: put @with_fenced_lock below @{type(function).__name__}"
    elif not callable(function):
        fault = 'is no function: was the decorator used without its resource, as in ("name")?'
    elif any(map(iscoroutinefunction, (function, called))):
        fault = "is a coroutine function, which cannot be locked yet: lock a plain function"
    elif any(map(_is_generator, (function, called))):
        fault = "is a generator: its body would run after the lock is released"
    else:
        return
    raise TypeError(f"{function!r} {fault}.")


def _is_generator(function: Any) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _takes_lease(signature: inspect.Signature) -> bool:
    lease = signature.parameters.get("lease")
    return lease is not None and lease.kind is inspect.Parameter.KEYWORD_ONLY


def _label(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"


def _resource_of_call(
    resource: ResourceLike | Callable[..., ResourceLike], signature: inspect.Signature
) -> Callable[..., ResourceLike]:
    """Return what gives a call's resource from its arguments."""
    if isinstance(resource, str):
        return _Template(resource, signature)
    if isinstance(resource, tuple | models.Model):
        return lambda *args, **kwargs: resource
    if callable(resource):
        return resource
    raise TypeError(f"A resource is a text, a row, (Model, pk) or a callable, not {resource!r}.")


class _Template:
    """A name with parameters of the function in braces."""

    def __init__(self, text: str, signature: inspect.Signature) -> None:
        try:
            self._pieces = list(string.Formatter().parse(text))
        except ValueError as error:
            raise InvalidResource(f"The name {text!r} is no template: {error}.") from error
        parameters = list(signature.parameters.values())
        if _takes_lease(signature):
            parameters.remove(signature.parameters["lease"])
        self._signature = signature.replace(parameters=parameters)
        named = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        for _, field, specification, conversion in self._pieces:
            if field is None:
                continue
            if field not in named:
                fault = f"which is no parameter of it: {', '.join(sorted(named)) or 'it has none'}"
            elif specification or conversion:
                fault = "which must stand alone, without a format"
            else:
                continue
            raise InvalidResource(
                f"The name {text!r} of the function's lock has the field {{{field}}}, {fault}. "
                f"A callable may make any name of the arguments."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        call = self._signature.bind(*args, **kwargs)
        call.apply_defaults()
        parts = (
            literal + ("" if field is None else _value_in_name(field, call.arguments[field]))
            for literal, field, *_ in self._pieces
        )
        return "".join(parts)


def _value_in_name(parameter: str, given: Any) -> str:
    value = given
    if isinstance(value, models.Model):
        value = None if value._state.adding else value.pk
    if isinstance(value, date):
        value = value.isoformat()
    if not isinstance(value, str | int | UUID) or value == "":
        raise InvalidResource(
            f"The parameter {parameter!r} gives no name: it must be a text that is not empty, a "
            f"whole number, a date, a UUID or a saved row, not {given!r}."
        )
    # A member of a text enumeration stands for its value.
    text = "".join((value,)) if isinstance(value, str) else str(value)
    return encoded(checked(text), readable="-._~")
