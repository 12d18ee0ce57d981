"""The settings: `FENCING` in the project's settings, read at the moment of use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any, cast

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.module_loading import import_string

from django_fencing.timing import seconds

DEFAULTS: dict[str, Any] = {
    "CACHE": "default",
    "DATABASE": "default",
    "STORE": "django_fencing.stores.redis.RedisStore",
    "TTL": 30,
    "MAX_TTL": 86_400,
    "WAIT": 0,
    "MAX_RENEWAL": 3_600,
    "IDLE_TTL": 604_800,
    "PREFIX": "fencing",
    "NAMESPACE": "",
    "LEDGER": True,
    "CLIENT_FACTORY": None,
}

_NOTHING: dict[str, Any] = {}


# Whose leases an operator looks at, instead of NAMESPACE's.
_tenant: ContextVar[str | None] = ContextVar("_tenant", default=None)


@contextmanager
def namespace(name: str | None) -> Iterator[None]:
    """Let NAMESPACE be `name` during the block, unless that is None."""
    before = _tenant.set(name)
    try:
        yield
    finally:
        _tenant.reset(before)


class Conf:
    """One property per setting. Durations are seconds."""

    def __init__(self) -> None:
        self._checked: object = object()  # the FENCING whose keys are known to be right
        self._lengths: dict[str, tuple[object, float]] = {}  # that were found in it, as read

    @property
    def cache(self) -> str:
        """Alias in CACHES of the django-redis cache whose Redis keeps the leases."""
        return self._text("CACHE")

    @property
    def database(self) -> str:
        """Alias in DATABASES of the `Fence` table: where named resources are fenced."""
        alias = self._text("DATABASE")
        if alias not in connections:
            raise ImproperlyConfigured(f"FENCING['DATABASE'] is {alias!r}: there is none.")
        return alias

    @property
    def store(self) -> str:
        """Dotted path of the store's class."""
        return self._text("STORE")

    @property
    def ttl(self) -> float:
        """Length of a lease that does not say its own."""
        return self._seconds("TTL", most="MAX_TTL")

    @property
    def max_ttl(self) -> float:
        """The longest lease, wait or extension that may be asked for."""
        return self._seconds("MAX_TTL", most=2**31)

    @property
    def wait(self) -> float:
        """How long to wait for a lock that does not say its own; 0 is one attempt."""
        return self._seconds("WAIT", most="MAX_TTL", zero=True)

    @property
    def max_renewal(self) -> float:
        """For how long a lease may be renewed."""
        return self._seconds("MAX_RENEWAL", most=2**31)

    @property
    def idle_ttl(self) -> float:
        """After how long without use a resource leaves no key in Redis."""
        return self._seconds("IDLE_TTL", most=2**32)

    @property
    def prefix(self) -> str:
        """First part of every key in Redis."""
        return self._text("PREFIX")

    @property
    def namespace(self) -> str:
        """The tenant, read at each acquire: a text without dots, or what a callable returns."""
        value = _tenant.get()
        value = self._namespace_of()() if value is None else value
        if not isinstance(value, str):
            raise ImproperlyConfigured(f"FENCING['NAMESPACE'] must give a text, not {value!r}.")
        return value

    @property
    def ledger(self) -> bool:
        """Whether what was refused, lost or healed is kept in the table `FenceEvent`."""
        value = self._read("LEDGER")
        if not isinstance(value, bool):
            raise ImproperlyConfigured(f"FENCING['LEDGER'] must be True or False, not {value!r}.")
        return value

    @property
    def client_factory(self) -> Callable[[], Any] | None:
        """A callable that returns the redis-py client to use instead of the cache's."""
        value = self._read("CLIENT_FACTORY")
        return None if value is None else self._callable("CLIENT_FACTORY", value)

    def _namespace_of(self) -> Callable[[], Any]:
        value = self._read("NAMESPACE")
        if callable(value) or (isinstance(value, str) and "." in value):
            return self._callable("NAMESPACE", value)
        if not isinstance(value, str):
            raise ImproperlyConfigured(f"FENCING['NAMESPACE'] must be a text, not {value!r}.")
        return lambda: value

    def _read(self, key: str) -> Any:
        given = _given()
        if given is not self._checked:
            _refuse_unknown(given)
            self._checked, self._lengths = given, {}
        return given.get(key, DEFAULTS[key])

    def _text(self, key: str) -> str:
        value = self._read(key)
        if not isinstance(value, str) or not value:
            raise ImproperlyConfigured(
                f"FENCING[{key!r}] must be a text that is not empty, not {value!r}."
            )
        return value

    def _seconds(self, key: str, *, most: float | str, zero: bool = False) -> float:
        """Return a duration of at most `most` seconds, or as long as the setting of that name."""
        value = self._read(key)
        found, length = self._lengths.get(key, (_NOTHING, 0.0))
        if found is value:
            return length
        if isinstance(most, str):
            most = float(getattr(self, most.lower()))
        try:
            length = seconds(f"FENCING[{key!r}]", value, most=most, zero=zero)
        except (TypeError, ValueError) as error:
            of = "" if key in _given() else f" That is the default: set FENCING[{key!r}] as well."
            raise ImproperlyConfigured(f"{error}{of}") from error
        self._lengths[key] = value, length
        return length

    def _callable(self, key: str, value: Any) -> Callable[[], Any]:
        try:
            found = import_string(value) if isinstance(value, str) else value
        except ImportError as error:
            raise ImproperlyConfigured(f"FENCING[{key!r}]: {error}") from error
        if not callable(found):
            raise ImproperlyConfigured(f"FENCING[{key!r}] must name a callable, not {found!r}.")
        return cast("Callable[[], Any]", found)


def _given() -> Any:
    """Return FENCING as it is at the moment."""
    try:
        return settings.FENCING
    except AttributeError:
        # It costs twenty times as much to find out that a setting is missing as to read one, and
        # an acquisition reads many. override_settings() forgets it, as it does all that was read.
        return vars(settings).setdefault("FENCING", _NOTHING)


def _refuse_unknown(given: Any) -> None:
    if not isinstance(given, dict):
        raise ImproperlyConfigured(f"FENCING must be a dictionary, not {given!r}.")
    if unknown := given.keys() - DEFAULTS.keys():
        raise ImproperlyConfigured(
            f"FENCING has unknown keys: {', '.join(sorted(map(str, unknown)))}. "
            f"The known ones are {', '.join(DEFAULTS)}."
        )


conf = Conf()


def faults() -> Iterator[tuple[str, str]]:
    """
    Read every setting, and yield what is wrong and what may be done.

    A callable is not called: which tenant it is may not be known yet.
    """
    given = _given()
    try:
        _refuse_unknown(given)
    except ImproperlyConfigured as error:
        yield str(error), _hint_of_unknown(given)
        return
    for key in DEFAULTS:
        try:
            conf._namespace_of() if key == "NAMESPACE" else getattr(conf, key.lower())
        except ImproperlyConfigured as error:
            if f"[{key!r}]" in str(error):  # and not of MAX_TTL, which bounds others
                less = f"Without FENCING[{key!r}] it is {DEFAULTS[key]!r}."
                more = f"FENCING[{key!r}] has to fit the other settings, and is not set."
                yield str(error), less if key in given else more


def _hint_of_unknown(given: Any) -> str:
    if not isinstance(given, dict):
        return 'As in FENCING = {"TTL": 60}, or leave it out.'
    unknown = sorted(map(str, given.keys() - DEFAULTS.keys()))
    similar = {key: get_close_matches(key.upper(), DEFAULTS, n=1) for key in unknown}
    meant = [f"{near[0]!r} instead of {key!r}" for key, near in similar.items() if near]
    return f"Did you mean {', '.join(meant)}?" if meant else "Leave them out."
