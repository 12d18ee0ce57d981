"""with_fenced_lock on tasks: those of Celery, and those of Django 6."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from celery.backends.base import Backend
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging

from django_fencing.decorators import with_fenced_lock
from django_fencing.exceptions import (
    FencingError,
    InsideTransaction,
    InvalidResource,
    LeaseLost,
    LockHeld,
    StaleToken,
    StoreUnavailable,
)
from django_fencing.leases import Lease
from django_fencing.locks import fenced_lock
from django_fencing.signals import lock_contended
from tests.helpers import (
    SECONDS,
    acquired,
    cache_at,
    committing,
    held_elsewhere,
    keys_of,
    taken_over,
)
from tests.shop.models import Job

pytestmark = committing("default")

ERRORS = [
    LockHeld("held", resource="x", retry_after=1.5, held_by="another"),
    LeaseLost("lost", resource="x", token=1),
    StaleToken("stale", resource="x", token=1, fence_token=2, fence_holder=UUID(int=3)),
    StoreUnavailable("away", resource="x"),
    InvalidResource("no name", resource="x"),
    InsideTransaction("open", resource="x"),
]


@pytest.fixture
def organization(name: str) -> str:
    """Return what names a resource that nothing else uses."""
    return name.partition(":")[2]


@pytest.fixture
def app() -> Iterator[Celery]:
    """Yield an app that retries without a pause."""
    with Celery(
        "tests", broker="memory://", backend="cache+memory://", set_as_current=False
    ) as app:
        app.conf.update(
            accept_content=["json", "pickle"],
            broker_transport_options={"polling_interval": 0.01},
            result_backend="cache+memory://",
            result_serializer="pickle",
            broker_connection_retry_on_startup=False,
            worker_hijack_root_logger=False,
        )
        yield app


def task_of(app: Celery, body: Callable[..., Any] = lambda lease: None, **options: Any) -> Any:
    """Return a task as the documentation writes it."""

    @app.task(
        bind=True,
        shared=False,  # with the apps of the other tests
        autoretry_for=(LockHeld, StoreUnavailable),
        **{"retry_backoff": False, "default_retry_delay": 0, "max_retries": 3, **options},
    )
    @with_fenced_lock("charges:{organization_id}")
    def charge(self: Any, organization_id: str, month: str = "may", *, lease: Lease) -> int:
        body(lease)
        with lease.atomic():
            Job.objects.create(note=organization_id)
        return self.request.retries

    return charge


@contextmanager
def refusals(then: Callable[[int], None] = lambda count: None) -> Iterator[list[str]]:
    """Collect who was refused, and call `then` with their number each time."""
    refused: list[str] = []

    def receive(resource: str, **values: Any) -> None:
        refused.append(resource)
        then(len(refused))

    lock_contended.connect(receive)
    try:
        yield refused
    finally:
        lock_contended.disconnect(receive)


def test_a_task_has_the_arguments_that_its_callers_give(app: Celery, organization: str) -> None:
    """Celery checks them when the task is sent: the lease is none of them."""
    app.conf.task_always_eager = True
    charge = task_of(app)

    assert charge.delay(organization).get() == 0
    assert charge.delay(organization_id=organization, month="june").get() == 0
    with pytest.raises(TypeError, match="organization_id"):
        charge.delay()
    with pytest.raises(TypeError, match="lease"):
        charge.delay(organization, lease=1)

    assert "lease" not in inspect.signature(charge.run).parameters
    assert Job.objects.filter(note=organization).count() == 2


def test_a_task_is_retried_until_the_lock_is_free_and_is_done_once(
    app: Celery, organization: str, client: Any
) -> None:
    """Positional and keyword arguments lock the same name at each try."""
    resource = f"charges:{organization}"
    held = acquired(resource)

    with refusals(lambda count: count == 3 and held.release()) as refused:
        result = task_of(app).apply(kwargs={"organization_id": organization})

    assert result.get() == 3
    assert refused == [resource] * 3
    assert Job.objects.filter(note=organization).count() == 1
    assert not client.exists(keys_of(resource).lease)


def test_a_task_is_retried_while_the_store_is_away(app: Celery, organization: str) -> None:
    """And gives up with the error itself."""
    with cache_at("unix:///nowhere/valkey.sock?db=0"):
        result = task_of(app).apply([organization])

    with pytest.raises(StoreUnavailable):
        result.get()
    assert not Job.objects.exists()


def test_a_task_whose_lock_stays_held_gives_up(app: Celery, organization: str) -> None:
    """With the error itself, after as many tries as it may have."""
    with held_elsewhere(f"charges:{organization}"), refusals() as refused:
        result = task_of(app, max_retries=2).apply([organization])

    with pytest.raises(LockHeld) as caught:
        result.get()
    assert caught.value.resource == f"charges:{organization}"
    assert len(refused) == 3
    assert not Job.objects.exists()


def test_a_task_that_was_overtaken_is_not_retried(
    app: Celery, organization: str, client: Any
) -> None:
    """Its successor has done the work, or will."""
    runs = []

    def overtake(lease: Lease) -> None:
        runs.append(lease.token)
        taken_over(fenced_lock(lease.resource), client).release()

    result = task_of(app, overtake).apply([organization])

    with pytest.raises(StaleToken):
        result.get()
    assert runs == [1]
    assert not Job.objects.exists()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_the_way_to_the_caller_with_what_they_carry(
    app: Celery, error: FencingError
) -> None:
    """As Celery's result backends write them, in pickle."""
    backend = Backend(app, serializer="pickle")

    sent = backend.encode(backend.prepare_exception(error))
    found = backend.exception_to_python(backend.decode(sent))

    assert type(found) is type(error)
    assert found.args == error.args
    assert vars(found) == vars(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_in_json_keep_their_kind_and_their_message(app: Celery, error: FencingError) -> None:
    """More than that Celery does not write in JSON."""
    backend = Backend(app, serializer="json")

    sent = backend.encode(backend.prepare_exception(error))
    found = backend.exception_to_python(backend.decode(sent))

    assert type(found) is type(error)
    assert found.args == error.args


@contextmanager
def working(app: Celery) -> Iterator[None]:
    """Run a worker in a thread, which leaves the logging of the other tests as it is."""

    def leave_logging(**kwargs: Any) -> None:
        """Celery configures no logging where anybody says that they do."""

    setup_logging.connect(leave_logging)
    try:
        with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=SECONDS):
            yield
    finally:
        setup_logging.disconnect(leave_logging)
        logging.captureWarnings(False)


@pytest.mark.django_db(transaction=True)  # with all apps, which a worker checks when it starts
def test_a_worker_retries_and_tells_what_became_of_it(app: Celery, organization: str) -> None:
    """Over a broker: one task gets the lock at its third try, another gives up."""
    charge = task_of(app)
    held = acquired(f"charges:{organization}")
    hopeless = f"{organization}-2"
    keeper = acquired(f"charges:{hopeless}")

    def let_go(count: int) -> None:
        if count == 2:
            held.release()

    with working(app):
        with refusals(let_go) as refused:
            assert charge.delay(organization).get(SECONDS) == 2
        with refusals() as hopelessly:
            result = charge.delay(hopeless)
            with pytest.raises(LockHeld) as caught:
                result.get(SECONDS)

    assert len(refused) == 2
    assert len(hopelessly) == 4
    assert keeper.release()
    assert caught.value.retry_after > 20
    assert Job.objects.filter(note=organization).count() == 1


# Django's own tasks.


@with_fenced_lock("charges:{organization_id}")
def charge_later(organization_id: str) -> str:
    Job.objects.create(note=organization_id)
    return "done"


@with_fenced_lock("charges:{organization_id}")
async def charge_asynchronously(organization_id: str, *, lease: Lease) -> int:
    await Job.objects.acreate(note=organization_id)
    return lease.token


@pytest.fixture
def django_tasks(settings: Any) -> Any:
    """Return Django's module, whose backend runs each task at once."""
    module = pytest.importorskip("django.tasks", reason="Django 5.2 has no tasks.")
    settings.TASKS = {"default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"}}
    return module


def test_a_task_of_django_runs_under_its_lock(django_tasks: Any, organization: str) -> None:
    """A function or a coroutine function, with the arguments that its callers give."""
    for function, value in ((charge_later, "done"), (charge_asynchronously, 2)):
        result = django_tasks.task(function).enqueue(organization_id=organization)

        assert result.status == django_tasks.TaskResultStatus.SUCCESSFUL
        assert result.return_value == value
    assert Job.objects.filter(note=organization).count() == 2


def test_a_task_of_django_that_finds_its_lock_held_has_failed(
    django_tasks: Any, organization: str
) -> None:
    """Its result says with which error."""
    with held_elsewhere(f"charges:{organization}"):
        for function in (charge_later, charge_asynchronously):
            result = django_tasks.task(function).enqueue(organization)

            assert result.status == django_tasks.TaskResultStatus.FAILED
            assert [error.exception_class for error in result.errors] == [LockHeld]
    assert not Job.objects.exists()
