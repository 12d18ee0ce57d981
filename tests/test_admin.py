"""FencedResourceAdmin: a form saves its row under the row's lock, or says why it does not."""

import functools
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from django import forms
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.core.exceptions import ImproperlyConfigured
from django.core.validators import MaxValueValidator
from django.db import connection, connections, transaction
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import include, path, reverse
from django.utils import timezone

from django_fencing import flow
from django_fencing.admin import FencedResourceAdmin
from django_fencing.exceptions import LockHeld
from django_fencing.leases import Lease
from django_fencing.locks import fenced_atomic, fenced_lock
from django_fencing.signals import lease_acquired, lease_released
from tests.browser import fields_of, logged_in, superuser
from tests.helpers import (
    cache_at,
    commit,
    counted_calls,
    expire,
    held_elsewhere,
    in_threads,
    keys_of,
)
from tests.shop.admin import EntryInline, JobAdmin
from tests.shop.models import Entry, Job, Plain, UrgentJob

HELD = "Nothing was saved: somebody else is working on this."
MOVED = "Nothing was saved: somebody else has worked on this since you opened the form."
UNSEEN = "Nothing was saved: this form does not say what it was made from"
UNKNOWN = "Nothing was saved: it cannot be told at the moment"

CLOSED_PORT = "redis://127.0.0.1:1?db=0"

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]

urlpatterns = [path("admin/", admin.site.urls)]


def address(row: Any, view: str = "change") -> str:
    """Return the address of a row's page."""
    return reverse(f"admin:shop_{row._meta.model_name}_{view}", args=[row.pk])


@pytest.fixture
def job() -> Job:
    """Return a saved row whose form is complete."""
    return Job.objects.create(amount=10, note="ours")


@pytest.fixture
def browser() -> Any:
    """Return the browser of somebody who may do everything."""
    return superuser()


def opened(browser: Any, row: Any) -> dict[str, str]:
    """Open the form of a row, and return what stands in it."""
    return fields_of(browser.get(address(row)))


def sent(browser: Any, row: Any, form: dict[str, str], **changes: Any) -> Any:
    """Send a form with these changes, and return the response."""
    return browser.post(address(row), {**form, **changes})


def assert_refused(response: Any, reason: str) -> None:
    """Check that the page is the form, with the reason."""
    assert response.status_code == 200
    assert reason in response.content.decode()


def assert_saved(response: Any, row: Any, **values: Any) -> None:
    """Check that the browser is sent on, and that the row has these values."""
    assert response.status_code == 302
    row.refresh_from_db()
    assert {name: getattr(row, name) for name in values} == values


def assert_untouched(row: Any) -> None:
    """Check that the row is as it was made, and that this flow left no lease behind."""
    row.refresh_from_db()
    assert (row.amount, row.note) == (10, "ours")
    assert not Entry.objects.exists()
    assert not LogEntry.objects.exists()
    assert flow.held() == []


def held_and_opened(browser: Any, row: Any) -> tuple[Lease, dict[str, str]]:
    """Let another thread register, then open the form: its token is that of the lease."""
    (lease,) = in_threads(fenced_lock(row).acquire)
    return lease, opened(browser, row)


def write_and_release(lease: Lease, write: Callable[[], Any]) -> None:
    """Let the holder write, and end."""
    assert in_threads(lambda: commit(lease, write)) == [None]
    lease.release()


@contextmanager
def when_acquired(action: Callable[[], Any]) -> Iterator[None]:
    """Run `action` between the store's grant and the registration."""

    def act(**kwargs: Any) -> None:
        lease_acquired.disconnect(act)
        action()

    lease_acquired.connect(act, weak=False)
    try:
        yield
    finally:
        lease_acquired.disconnect(act)


@contextmanager
def while_saving(action: Callable[[], Any]) -> Iterator[None]:
    """Run `action` before each row that the form of a job saves."""
    save_model = JobAdmin.save_model

    def acting(self: Any, *args: Any) -> None:
        action()
        save_model(self, *args)

    with mock.patch.object(JobAdmin, "save_model", acting):
        yield


@contextmanager
def atomic_requests() -> Iterator[None]:
    """Let Django open a transaction around each view."""
    with mock.patch.dict(connections["default"].settings_dict, ATOMIC_REQUESTS=True):
        yield


@contextmanager
def registered(admin_class: Any) -> Iterator[None]:
    """Let another admin show the jobs."""
    site = admin.AdminSite()
    site.register(Job, admin_class)
    with override_settings(ROOT_URLCONF=(path("admin/", site.urls),)):
        yield


# The fence on the form


def test_the_fence_is_shown_and_is_no_field(browser: Any, job: Job) -> None:
    """Token and holder stand in a section of their own."""
    with fenced_lock(job) as lease:
        pass

    response = browser.get(address(job))

    assert str(lease.holder.id) in response.content.decode()
    fields = fields_of(response)
    assert fields["_fence_token"] == str(lease.token)
    assert not {"last_fence_token", "last_fence_holder"} & fields.keys()
    assert "Fence" in [str(fieldset.name) for fieldset in response.context["adminform"]]


def test_the_form_of_a_new_row_shows_no_fence(browser: Any) -> None:
    """There is none yet."""
    fields = fields_of(browser.get(reverse("admin:shop_job_add")))

    assert "_fence_token" not in fields


@pytest.mark.parametrize("thousands", [True, False])
def test_a_long_token_is_shown_with_its_digits_alone(
    browser: Any, job: Job, thousands: bool
) -> None:
    """It is a name, not an amount."""
    Job.objects.filter(pk=job.pk).update(last_fence_token=1234567)

    with override_settings(USE_THOUSAND_SEPARATOR=thousands):
        response = browser.get(address(job))

    assert '<div class="readonly">1234567<input' in response.content.decode()
    assert_saved(sent(browser, job, fields_of(response), amount=11), job, amount=11)


@pytest.mark.parametrize("token", ["999", "-1", "x", str(10**30)])
def test_a_forged_fence_changes_nothing(browser: Any, job: Job, token: str) -> None:
    """The fence is moved by the lease alone."""
    forged = {"last_fence_token": token, "last_fence_holder": str(uuid.uuid4())}

    response = sent(browser, job, opened(browser, job), amount=11, **forged)

    assert_saved(response, job, amount=11, last_fence_token=1)
    assert str(job.last_fence_holder) != forged["last_fence_holder"]


@pytest.mark.parametrize("token", ["x", "-1", str(10**30), "", None, "²", "1.5"])
def test_a_form_without_its_token_is_not_saved(browser: Any, job: Job, token: str | None) -> None:
    """It cannot be told whether somebody has worked on the row since: no lock is taken."""
    form = opened(browser, job)
    del form["_fence_token"]
    given = {} if token is None else {"_fence_token": token}

    with counted_calls() as calls:
        response = sent(browser, job, form, amount=11, **given)

    assert_refused(response, UNSEEN)
    assert_untouched(job)
    assert calls == []


@pytest.mark.parametrize("field", ["_fence_content", "entry_set-_fence_content"])
@pytest.mark.parametrize("content", ["x", "é", "", None])
def test_a_form_without_what_it_was_made_from_is_not_saved(
    browser: Any, job: Job, field: str, content: str | None
) -> None:
    """It cannot be told whether it would overwrite anything."""
    entry = Entry.objects.create(job=job, text="old")
    form = opened(browser, job)
    del form[field]
    given = {} if content is None else {field: content}

    assert_refused(sent(browser, job, form, amount=11, **given), MOVED)
    entry.delete()
    assert_untouched(job)


def test_a_token_of_the_future_does_not_move_the_fence(browser: Any, job: Job) -> None:
    """Who forges it does without the comparison of tokens, and still saves under the lock."""
    response = sent(browser, job, opened(browser, job), amount=11, _fence_token="9" * 19)

    assert_saved(response, job, amount=11, last_fence_token=1)


def test_a_forged_token_is_escaped_on_the_page(browser: Any, job: Job) -> None:
    """What a form has sent comes back as text."""
    forged = {"_fence_token": '"><script>', "_fence_content": "</form>"}

    response = sent(browser, job, opened(browser, job) | forged)

    assert_refused(response, UNSEEN)
    assert fields_of(response).items() >= forged.items()


# Saving


def test_saving_holds_the_lock_and_names_the_admin(browser: Any, job: Job, client: Any) -> None:
    """The lease is in Redis while the row is saved, and is gone afterwards."""
    leases = []
    form = opened(browser, job)

    with while_saving(lambda: leases.append(client.hgetall(keys_of(job).lease))):
        response = sent(browser, job, form, amount=11)

    assert_saved(response, job, amount=11)
    (lease,) = leases
    assert lease["function"] == "tests.shop.admin.JobAdmin"
    assert lease["token"] == str(job.last_fence_token)
    assert lease["holder"] == job.last_fence_holder.hex
    assert not client.exists(keys_of(job).lease)


def test_a_form_is_one_fenced_transaction_with_its_inlines(
    browser: Any, job: Job, client: Any
) -> None:
    """What fails at its end takes all of it back, the move of the fence too."""
    form = opened(browser, job) | {"amount": "11", "entry_set-0-text": "first"}

    with (
        mock.patch.object(JobAdmin, "log_change", side_effect=KeyError("log")),
        pytest.raises(KeyError),
    ):
        sent(browser, job, form)

    assert_untouched(job)
    assert job.last_fence_token == 0
    assert not client.exists(keys_of(job).lease)

    response = sent(browser, job, form)

    assert_saved(response, job, amount=11)
    assert Entry.objects.get(job=job).text == "first"


def test_inlines_are_saved_in_the_fenced_transaction(browser: Any, job: Job) -> None:
    """They are protected by the same lease."""
    fencing = []
    save_formset = JobAdmin.save_formset

    def spying(self: Any, *args: Any, **kwargs: Any) -> None:
        fencing.append(flow.fenced_by("default"))
        save_formset(self, *args, **kwargs)

    with mock.patch.object(JobAdmin, "save_formset", spying):
        sent(browser, job, opened(browser, job), **{"entry_set-0-text": "first"})

    job.refresh_from_db()
    assert [lease.token for lease in fencing] == [job.last_fence_token]


def test_a_lease_that_runs_out_while_the_form_is_saved_is_no_failure(
    browser: Any, job: Job, client: Any
) -> None:
    """Nobody can have registered: the row stayed locked."""
    form = opened(browser, job)

    with while_saving(lambda: expire(client, job)):
        response = sent(browser, job, form, amount=11)

    assert_saved(response, job, amount=11)


def test_one_form_after_another_is_saved(browser: Any, job: Job) -> None:
    """Each opens with the token of the one before."""
    for amount in (11, 12, 13):
        response = sent(browser, job, opened(browser, job), amount=amount, _continue="1")

        assert_saved(response, job, amount=amount)
        assert response.url == address(job)


def test_a_multi_table_child_is_saved_under_its_parents_lock(browser: Any, client: Any) -> None:
    """Both tables are written in one fenced transaction."""
    child = UrgentJob.objects.create(amount=10, note="ours", deadline=7)
    form = opened(browser, child)

    assert_saved(sent(browser, child, form, amount=11, deadline=8), child, amount=11, deadline=8)
    assert Job.objects.get(pk=child.pk).last_fence_token == 1

    with held_elsewhere((Job, child.pk)):
        assert_refused(sent(browser, child, opened(browser, child), amount=12), HELD)
    assert_refused(sent(browser, child, form, amount=12), MOVED)
    child.refresh_from_db()
    assert (child.amount, child.deadline) == (11, 8)


# Refused


def test_a_row_that_somebody_holds_is_not_saved(browser: Any, job: Job, client: Any) -> None:
    """The form says so, keeps what was typed in, and leaves the other's lease alone."""
    form = opened(browser, job)
    typed = {"amount": "11", "note": "for <you>", "entry_set-0-text": "first"}

    with held_elsewhere(job, register=False) as lease:
        response = sent(browser, job, form, **typed)

        assert client.hget(keys_of(job).lease, "holder") == lease.holder.id.hex

    assert_refused(response, HELD)
    assert fields_of(response).items() >= typed.items()
    assert_untouched(job)
    assert not client.exists(keys_of(job).lease)


def test_a_refused_form_can_be_sent_again(browser: Any, job: Job) -> None:
    """Where the other holder has registered nothing, there is nothing to look at anew."""
    form = opened(browser, job)
    with held_elsewhere(job, register=False):
        refused = sent(browser, job, form, amount=11)

    response = sent(browser, job, fields_of(refused))

    assert_saved(response, job, amount=11)


def test_a_refused_form_stays_refused_once_the_other_has_written(browser: Any, job: Job) -> None:
    """Its token stays that of the form as it was opened, however often it is sent."""
    form = opened(browser, job)
    with held_elsewhere(job) as lease:
        refused = sent(browser, job, form, amount=11)
        with lease.atomic() as row:
            row.amount = 99
            row.save()
    assert_refused(refused, HELD)

    for _ in range(2):
        refused = sent(browser, job, fields_of(refused))

        assert_refused(refused, MOVED)
        assert fields_of(refused)["_fence_token"] == form["_fence_token"]
        assert fields_of(refused)["amount"] == "11"
    job.refresh_from_db()
    assert job.amount == 99

    assert_saved(sent(browser, job, opened(browser, job), amount=12), job, amount=12)


def test_a_row_that_has_moved_on_is_not_saved(browser: Any, job: Job, client: Any) -> None:
    """The form does not bring old columns over newer ones."""
    form = opened(browser, job)
    with fenced_atomic(job) as row:
        row.note = "theirs"
        row.save()

    response = sent(browser, job, form, amount=11)

    assert_refused(response, MOVED)
    job.refresh_from_db()
    assert (job.amount, job.note) == (10, "theirs")
    assert flow.held() == []
    assert not client.exists(keys_of(job).lease)


def test_of_two_tabs_the_second_is_refused(browser: Any, job: Job) -> None:
    """Both were opened before the first was saved."""
    first, second = opened(browser, job), opened(browser, job)

    assert_saved(sent(browser, job, first, amount=11), job, amount=11)
    assert_refused(sent(browser, job, second, amount=12), MOVED)

    job.refresh_from_db()
    assert job.amount == 11


def test_a_double_click_saves_once(browser: Any, job: Job) -> None:
    """Two requests with one form: one saves, whichever comes first."""
    form = opened(browser, job) | {"entry_set-0-text": "first"}
    other = superuser()

    responses = in_threads(
        lambda: sent(browser, job, form),
        lambda: sent(other, job, form),
    )

    assert sorted(response.status_code for response in responses) == [200, 302]
    assert Entry.objects.count() == 1
    assert LogEntry.objects.count() == 1


def test_an_invalid_form_moves_nothing(browser: Any, job: Job) -> None:
    """Neither the corrected form is refused, nor one that was opened before, by whomever."""
    form = opened(browser, job)
    for _ in range(2):
        invalid = sent(browser, job, form, amount="many", note="mine")

        assert_refused(invalid, "Enter a whole number.")
        assert fields_of(invalid)["_fence_token"] == "0"
        assert '<div class="readonly">0<input' in invalid.content.decode()
    assert_untouched(job)
    assert job.last_fence_token == 0

    assert_saved(sent(browser, job, fields_of(invalid), amount=11), job, amount=11, note="mine")


@pytest.mark.django_db(transaction=True, databases=["default", "repeatable"])
def test_an_invalid_form_can_be_corrected_above_read_committed(browser: Any) -> None:
    """There it registers in a transaction of its own, so the form carries the new token."""

    class RepeatableAdmin(FencedResourceAdmin):
        def get_queryset(self, request: Any) -> Any:
            return super().get_queryset(request).using("repeatable")

    row = Job.objects.using("repeatable").create(amount=10)
    with registered(RepeatableAdmin):
        invalid = sent(browser, row, opened(browser, row), amount="many")
        assert_refused(invalid, "Enter a whole number.")
        assert fields_of(invalid)["_fence_token"] == "1"
        assert_saved(sent(browser, row, fields_of(invalid), amount=11, note="x"), row, amount=11)


def test_an_invalid_form_keeps_what_it_was_made_from(browser: Any, job: Job) -> None:
    """It is refused as well, and does not become valid by being sent again."""
    lease, form = held_and_opened(browser, job)
    write_and_release(lease, lambda: Job.objects.update(note="theirs"))

    for amount in ("many", "11"):
        response = sent(browser, job, form, amount=amount)
        form = fields_of(response)

        assert_refused(response, MOVED)
    job.refresh_from_db()
    assert (job.amount, job.note) == (10, "theirs")


def test_an_older_holder_that_registers_after_our_grant_is_noticed(
    browser: Any, job: Job, client: Any
) -> None:
    """Its token is below ours, but above the one that the form was made from."""
    form = opened(browser, job)
    older = fenced_lock(job, register=False).acquire()
    expire(client, job)

    def write() -> None:
        with older.atomic() as row:
            row.note = "theirs"
            row.save()

    with when_acquired(lambda: in_threads(write)):
        response = sent(browser, job, form, amount=11)

    assert_refused(response, MOVED)
    job.refresh_from_db()
    assert (job.amount, job.note, job.last_fence_token) == (10, "theirs", older.token)


def test_what_a_holder_writes_that_has_registered_before_is_noticed(
    browser: Any, job: Job, client: Any
) -> None:
    """Its token is the one that the form shows, so the form's content is compared."""
    lease, form = held_and_opened(browser, job)
    write_and_release(lease, lambda: Job.objects.update(amount=15))

    for _ in range(2):
        response = sent(browser, job, form, note="mine")

        assert_refused(response, MOVED)
        form = fields_of(response)
    job.refresh_from_db()
    assert (job.amount, job.note) == (15, "ours")
    assert not client.exists(keys_of(job).lease)

    assert_saved(sent(browser, job, opened(browser, job), note="mine"), job, amount=15, note="mine")


def test_what_a_holder_writes_beside_the_form_does_not_refuse_it(browser: Any, job: Job) -> None:
    """The form writes its own fields only, so nothing is lost."""

    class NoteAdmin(FencedResourceAdmin):
        fields = ("note",)

    with registered(NoteAdmin):
        lease, form = held_and_opened(browser, job)
        write_and_release(lease, lambda: Job.objects.update(amount=15))

        assert_saved(sent(browser, job, form, note="mine"), job, amount=15, note="mine")


@pytest.mark.parametrize("change", ["text", "row", "gone"])
def test_what_a_holder_does_to_the_rows_of_an_inline_is_noticed(
    browser: Any, job: Job, change: str
) -> None:
    """They are saved by the form as well. One that was added meanwhile is not overwritten."""
    entry = Entry.objects.create(job=job, text="old")
    lease, form = held_and_opened(browser, job)

    def work() -> None:
        if change == "text":
            Entry.objects.update(text="new")
        elif change == "gone":
            entry.delete()
        else:
            Entry.objects.create(job=job, text="another")

    write_and_release(lease, work)
    response = sent(browser, job, form, note="mine")

    if change == "row":
        assert_saved(response, job, note="mine")
        assert Entry.objects.count() == 2
    else:
        assert_refused(response, MOVED)
        assert [row.text for row in Entry.objects.all()] == ["new"] * (change == "text")


def test_an_inline_that_the_user_may_not_change_is_not_compared(job: Job) -> None:
    """The form does not write it."""
    Entry.objects.create(job=job, text="old")
    browser = logged_in("shop.change_job", "shop.view_entry")

    assert_saved(sent(browser, job, opened(browser, job), amount=11), job, amount=11)


def test_a_refused_form_is_logged_as_refused(browser: Any, job: Job, caplog: Any) -> None:
    """With the token of the form, and as no loss: it never held the row."""
    form = opened(browser, job)
    fenced_lock(job).acquire().release()
    caplog.clear()

    with caplog.at_level("INFO", "django_fencing"):
        assert_refused(sent(browser, job, form, amount=11), MOVED)

    lines = [record.getMessage() for record in caplog.records if record.name == "django_fencing"]
    lines = [line for line in lines if not line.startswith("store_used ")]
    assert [line.split()[0] for line in lines] == ["lease_acquired", "token_refused"]
    assert lines[1].endswith("token=2 seen=0 fence_token=1")


@pytest.mark.parametrize("leases", [0, 3])
def test_a_lost_counter_does_not_refuse_a_row_that_has_not_moved(
    browser: Any, job: Job, client: Any, leases: int
) -> None:
    """The token of the row counts, whatever Redis proposes."""
    for _ in range(leases):
        fenced_lock(job).acquire().release()
    form = opened(browser, job)
    client.delete(keys_of(job).token)

    assert_saved(sent(browser, job, form, amount=11), job, amount=11)
    assert job.last_fence_token > leases


def test_a_lost_counter_does_not_hide_that_a_row_has_moved(
    browser: Any, job: Job, client: Any
) -> None:
    """A higher token is taken only for a row that is as the form shows it."""
    form = opened(browser, job)
    fenced_lock(job).acquire().release()
    client.delete(keys_of(job).token)

    with when_acquired(lambda: client.delete(keys_of(job).token)):
        assert_refused(sent(browser, job, form, amount=11), MOVED)

    assert_untouched(job)


def test_a_row_that_another_transaction_keeps_locked_is_not_saved(browser: Any, job: Job) -> None:
    """Whoever holds it without our lock works on it too."""
    form = opened(browser, job)

    def send() -> Any:
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '5s'")
        return sent(browser, job, form, amount=11)

    with transaction.atomic():
        Job.objects.select_for_update().get(pk=job.pk)
        (response,) = in_threads(send)

    assert_refused(response, HELD)
    assert_untouched(job)


def test_without_the_store_nothing_is_saved(browser: Any, job: Job) -> None:
    """The form says that it cannot be told, and keeps what was typed in."""
    form = opened(browser, job)

    with cache_at(CLOSED_PORT):
        response = sent(browser, job, form, amount=11)

    assert_refused(response, UNKNOWN)
    assert fields_of(response)["amount"] == "11"
    assert_untouched(job)


def test_a_row_that_is_deleted_under_the_form_is_no_server_error(browser: Any, job: Job) -> None:
    """It went between the lock and the transaction."""
    form = opened(browser, job)
    browser.raise_request_exception = False

    with when_acquired(lambda: in_threads(Job.objects.get(pk=job.pk).delete)):
        response = sent(browser, job, form, amount=11)

    assert response.status_code < 500
    assert not Job.objects.exists()


def test_an_admin_with_a_form_of_its_own_saves_nothing_that_was_refused(
    browser: Any, job: Job
) -> None:
    """Its get_form() does not ask the one that makes the form invalid."""

    class OwnForm(forms.ModelForm):
        class Meta:
            model = Job
            fields = ("amount", "note")

    form = opened(browser, job)

    with (
        mock.patch.object(JobAdmin, "get_form", return_value=OwnForm),
        held_elsewhere(job, register=False),
    ):
        sent(browser, job, form, amount=11)

    assert_untouched(job)


def test_fieldsets_of_its_own_do_not_keep_a_second_tab_from_being_refused(
    browser: Any, job: Job
) -> None:
    """The fence is shown and sent back whatever an admin says about its fields."""

    class OwnAdmin(FencedResourceAdmin):
        def get_fieldsets(self, request: Any, obj: Any = None) -> Any:
            return [(None, {"fields": ["amount", "note"]})]

        def get_readonly_fields(self, request: Any, obj: Any = None) -> Any:
            return []

    with registered(OwnAdmin):
        first, second = opened(browser, job), opened(browser, job)

        assert_saved(sent(browser, job, first, amount=11), job, amount=11)
        assert_refused(sent(browser, job, second, amount=12), MOVED)


def test_the_fence_may_stand_anywhere_on_the_form(browser: Any, job: Job) -> None:
    """It is shown once."""

    class OwnAdmin(FencedResourceAdmin):
        fields = ("shown_fence_token", "amount")

    with registered(OwnAdmin):
        response = browser.get(address(job))
        assert response.content.decode().count('name="_fence_token"') == 1

        assert_saved(sent(browser, job, fields_of(response), amount=11), job, amount=11)


class RequestForm(forms.ModelForm):
    """A form that is given the request, as many projects write it."""

    def __init__(self, *args: Any, request: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class NewAdmin(FencedResourceAdmin):
    """Hands the request on by a class whose instances are of another one."""

    form = RequestForm

    def get_form(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        form: Any = super().get_form(request, obj, **kwargs)

        class WithRequest(form):  # type: ignore[misc]
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                return form(*args, request=request, **kwargs)

        return WithRequest


class PartialAdmin(FencedResourceAdmin):
    """Hands the request on by a partial."""

    form = RequestForm
    fields = ("amount", "note")

    def get_form(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        return functools.partial(super().get_form(request, obj, **kwargs), request=request)


class OwnCleaningForm(forms.ModelForm):
    """A form that does not call clean()."""

    def _clean_form(self) -> None:
        pass


@pytest.mark.parametrize(
    "own",
    [NewAdmin, PartialAdmin, type("Cleaning", (FencedResourceAdmin,), {"form": OwnCleaningForm})],
)
def test_forms_of_every_making_are_compared(browser: Any, job: Job, own: Any) -> None:
    """Held, without the store, without a token, overtaken, changed: none of them is saved."""
    with registered(own):
        lease, form = held_and_opened(browser, job)
        assert_refused(sent(browser, job, form, amount=11), HELD)
        assert_refused(sent(browser, job, form | {"_fence_token": ""}, amount=11), UNSEEN)
        with cache_at(CLOSED_PORT):
            assert_refused(sent(browser, job, form, amount=11), UNKNOWN)
        write_and_release(lease, lambda: Job.objects.update(note="theirs"))
        assert_refused(sent(browser, job, form, amount=11), MOVED)

        assert_saved(
            sent(browser, job, opened(browser, job), amount=11), job, amount=11, note="theirs"
        )
        assert_refused(sent(browser, job, form, amount=12), MOVED)


def test_a_form_that_decides_for_itself_is_not_saved(browser: Any, job: Job) -> None:
    """Where the comparison cannot have been made, that is a fault of the project."""

    class Careless(forms.ModelForm):
        def is_valid(self) -> bool:
            return True

    class CarelessAdmin(FencedResourceAdmin):
        form = Careless

    with registered(CarelessAdmin), pytest.raises(ImproperlyConfigured, match="full_clean"):
        sent(browser, job, opened(browser, job), amount=11)

    assert_untouched(job)


def test_what_get_form_does_to_its_fields_counts(browser: Any, job: Job) -> None:
    """As in Django's own admin: the class is used as it is."""

    class FieldsAdmin(FencedResourceAdmin):
        def get_form(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
            form = super().get_form(request, obj, **kwargs)
            form.base_fields["amount"].help_text = "in cents"
            form.base_fields["amount"].validators.append(MaxValueValidator(20))
            form.base_fields["reason"] = forms.CharField(initial=timezone.now)
            return form

        def get_fieldsets(self, request: Any, obj: Any = None) -> Any:
            return [(None, {"fields": ["amount", "note"]})]

    with registered(FieldsAdmin):
        form = opened(browser, job)
        assert_refused(sent(browser, job, form, amount=21, reason="x"), "less than or equal to 20")
        assert_saved(sent(browser, job, form, amount=20, reason="x"), job, amount=20)


def test_rows_that_a_form_field_begins_with_are_compared(browser: Any, job: Job) -> None:
    """Such as those of the other side of a relation, which no column of the row holds."""
    rows = [Plain.objects.create() for _ in range(3)]
    chosen = rows[:1]

    class Choosing(forms.ModelForm):
        plains = forms.ModelMultipleChoiceField(Plain.objects.all(), required=False)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fields["plains"].initial = list(chosen)

    class ChoosingAdmin(FencedResourceAdmin):
        form = Choosing
        fields = ("amount", "note", "plains")

    with registered(ChoosingAdmin):
        form = opened(browser, job)
        chosen.append(rows[1])
        assert_refused(sent(browser, job, form, amount=11), MOVED)
        form = opened(browser, job)
        chosen.reverse()
        assert_saved(sent(browser, job, form, amount=11), job, amount=11)


def test_values_that_only_look_different_are_not_compared(browser: Any, job: Job) -> None:
    """What a form adds to its beginning does not count, nor a field that it drops when sent."""

    class Adding(forms.ModelForm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.initial["note"] = str(timezone.now())
            if self.is_bound:
                del self.fields["note"]

    class AddingAdmin(FencedResourceAdmin):
        form = Adding

    with registered(AddingAdmin):
        assert_saved(sent(browser, job, opened(browser, job), amount=11), job, amount=11)


def test_a_formset_that_is_invalid_before_it_is_cleaned_keeps_what_it_was_made_from(
    browser: Any, job: Job
) -> None:
    """Too many rows, say: the next sending is refused all the same."""
    Entry.objects.create(job=job, text="old")

    class OneInline(EntryInline):
        max_num = 1

        def get_formset(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
            return super().get_formset(request, obj, validate_max=True, **kwargs)

    class OneAdmin(FencedResourceAdmin):
        inlines = (OneInline,)

    two = {"entry_set-TOTAL_FORMS": "2", "entry_set-1-text": "new", "entry_set-1-job": job.pk}
    with registered(OneAdmin):
        lease, form = held_and_opened(browser, job)
        write_and_release(lease, lambda: Entry.objects.update(text="theirs"))
        response = sent(browser, job, form, **two, **{"entry_set-1-id": ""})
        again = fields_of(response) | {"entry_set-TOTAL_FORMS": "1"}
        assert_refused(sent(browser, job, again), MOVED)

    assert Entry.objects.get().text == "theirs"


def test_rows_of_an_inline_that_the_user_may_delete_are_compared(job: Job) -> None:
    """What was changed meanwhile is not deleted unseen."""
    Entry.objects.create(job=job, text="old")
    browser = logged_in("shop.change_job", "shop.view_entry", "shop.delete_entry")
    lease, form = held_and_opened(browser, job)
    write_and_release(lease, lambda: Entry.objects.update(text="theirs"))

    assert_refused(sent(browser, job, form, **{"entry_set-0-DELETE": "on"}), MOVED)
    assert Entry.objects.get().text == "theirs"


class Replicas:
    """Sends reads to another connection, which may lag behind."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "repeatable" if model._meta.app_label == "shop" else None

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_relation(self, *rows: Any, **hints: Any) -> bool:
        return True


@pytest.mark.django_db(transaction=True, databases=["default", "repeatable"])
def test_a_form_is_saved_from_the_database_that_is_written(browser: Any, job: Job) -> None:
    """Whatever the router reads from elsewhere."""
    Entry.objects.create(job=job, text="old")
    with override_settings(DATABASE_ROUTERS=[Replicas()]):
        response = sent(
            browser, job, opened(browser, job), amount=11, **{"entry_set-0-text": "new"}
        )

    assert response.status_code == 302
    job.refresh_from_db(using="default")
    assert (job.amount, Entry.objects.get().text) == (11, "new")


def test_an_admin_may_keep_something_of_the_request_on_itself(browser: Any, job: Job) -> None:
    """What get_form() has noted is there when the row is saved."""

    class NotingAdmin(FencedResourceAdmin):
        opened_amount = None

        def get_form(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
            self.opened_amount = obj and obj.amount
            return super().get_form(request, obj, **kwargs)

        def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
            obj.note = f"was {self.opened_amount}"
            super().save_model(request, obj, form, change)

    other = Job.objects.create(amount=77)
    with registered(NotingAdmin):
        form = opened(browser, job)
        opened(browser, other)
        assert_saved(sent(browser, job, form, amount=11), job, note="was 10")


def test_a_former_secret_key_still_tells_what_a_form_was_made_from(browser: Any, job: Job) -> None:
    """As the sessions, forms outlive its rotation."""
    form = opened(browser, job)

    rotated = {"SECRET_KEY": "new", "SECRET_KEY_FALLBACKS": [settings.SECRET_KEY]}
    with override_settings(**rotated):
        response = sent(superuser(), job, form, amount=11)

    assert_saved(response, job, amount=11)


@pytest.mark.parametrize("few", [{"only": ["amount"]}, {"defer": ["last_fence_holder"]}], ids=str)
def test_an_admin_that_loads_some_columns_saves(
    browser: Any, job: Job, few: dict[str, list[str]]
) -> None:
    """The row's fence is read where it is not among them."""
    ((which, columns),) = few.items()

    class FewAdmin(FencedResourceAdmin):
        def get_queryset(self, request: Any) -> Any:
            return getattr(Job.objects, which)(*columns)

    with registered(FewAdmin):
        assert_saved(sent(browser, job, opened(browser, job), amount=11), job, amount=11)


def test_a_lock_that_a_commit_hook_does_not_get_is_no_refusal_of_the_form(
    browser: Any, job: Job, name: str
) -> None:
    """The row is saved by then, and the page must not say otherwise."""
    form = opened(browser, job)
    browser.raise_request_exception = False

    def hook() -> None:
        raise LockHeld("held", resource=name, retry_after=1)

    with while_saving(lambda: transaction.on_commit(hook)):
        response = sent(browser, job, form, amount=11)

    job.refresh_from_db()
    assert job.amount == 11
    assert "Nothing was saved" not in response.content.decode()


# Who may


def test_looking_takes_no_lock(browser: Any, job: Job) -> None:
    """Neither a form that is opened nor the list asks Redis."""
    with counted_calls() as calls:
        responses = [
            browser.get(address(job)),
            browser.head(address(job)),
            browser.get(address(job, "history")),
            browser.get(reverse("admin:shop_job_changelist")),
        ]

    assert [response.status_code for response in responses] == [200] * 4
    assert calls == []


def test_a_user_who_may_only_look_gets_no_lock(job: Job) -> None:
    """Refused as everywhere in the admin, before the lock."""
    browser = logged_in("shop.view_job")
    form = opened(browser, job)

    with counted_calls() as calls:
        response = sent(browser, job, form, amount=11)

    assert response.status_code == 403
    assert calls == []
    assert_untouched(job)


def test_who_is_not_logged_in_gets_no_lock(job: Job) -> None:
    """Sent to the login."""
    with counted_calls() as calls:
        response = sent(Client(), job, {}, amount=11)

    assert response.status_code == 302
    assert response.url.startswith(reverse("admin:login"))
    assert calls == []


def test_a_forged_request_gets_no_lock(job: Job) -> None:
    """The form's CSRF token is asked for before anything else."""
    browser = superuser(enforce_csrf_checks=True)
    form = opened(browser, job)

    with counted_calls() as calls:
        response = sent(browser, job, form, amount=11, csrfmiddlewaretoken="forged")

    assert response.status_code == 403
    assert calls == []
    assert_untouched(job)
    assert_saved(sent(browser, job, form, amount=11), job, amount=11)


def test_a_row_that_is_not_there_takes_no_lock(browser: Any, job: Job) -> None:
    """Django sends the browser back to the start."""
    form = opened(browser, job)

    with counted_calls() as calls:
        responses = [
            browser.post(reverse("admin:shop_job_change", args=[pk]), form) for pk in (0, "x")
        ]

    assert [response.url for response in responses] == [reverse("admin:index")] * 2
    assert calls == []


@pytest.mark.parametrize(("field", "value"), [("nothing", "1"), ("note", "ours")])
def test_a_forged_to_field_is_a_bad_request(browser: Any, job: Job, field: str, value: str) -> None:
    """As in Django's own admin, and before the lock."""
    form = opened(browser, job) | {"_to_field": field}
    browser.raise_request_exception = False

    with counted_calls() as calls:
        response = browser.post(reverse("admin:shop_job_change", args=[value]), form)

    assert response.status_code == 400
    assert calls == []


# Django's other ways


def test_saving_works_under_atomic_requests(browser: Any, job: Job) -> None:
    """The request's transaction is the fenced one, and ends before the lease does."""
    seen: list[Any] = []
    form = opened(browser, job)

    def look(**kwargs: Any) -> None:
        seen.extend(in_threads(lambda: Job.objects.get(pk=job.pk).amount))

    lease_released.connect(look)
    try:
        with atomic_requests():
            response = sent(browser, job, form, amount=11)
    finally:
        lease_released.disconnect(look)

    assert_saved(response, job, amount=11)
    assert seen == [11]


def test_a_refusal_under_atomic_requests_is_a_form_too(browser: Any, job: Job) -> None:
    """Nothing is left open behind it."""
    form = opened(browser, job)

    with atomic_requests(), held_elsewhere(job, register=False):
        response = sent(browser, job, form, amount=11)

    assert_refused(response, HELD)
    assert_untouched(job)
    assert not connection.in_atomic_block


def test_looking_and_adding_are_transactions_under_atomic_requests(browser: Any, job: Job) -> None:
    """As they are in Django's own admin."""
    inside = []
    get_queryset = JobAdmin.get_queryset

    def spying(self: Any, request: Any) -> Any:
        inside.append(connection.in_atomic_block)
        return get_queryset(self, request)

    with atomic_requests(), mock.patch.object(JobAdmin, "get_queryset", spying):
        form = opened(browser, job)
        response = browser.post(reverse("admin:shop_job_add"), form)

    assert response.status_code == 302
    assert inside
    assert all(inside)


def test_an_overridden_change_view_works_under_atomic_requests(browser: Any, job: Job) -> None:
    """A subclass that adds something to the page does not have to know of transactions."""

    class ContextAdmin(FencedResourceAdmin):
        def change_view(
            self, request: Any, object_id: str, form_url: str = "", extra_context: Any = None
        ) -> Any:
            return super().change_view(request, object_id, form_url, {"shop": "open"})

    with registered(ContextAdmin), atomic_requests():
        form = opened(browser, job)
        response = sent(browser, job, form, amount=11)

    assert_saved(response, job, amount=11)


def test_a_copy_is_saved_as_new_without_the_lock(browser: Any, job: Job) -> None:
    """It is a row of its own, whose fence starts anew; the held one stays as it is."""
    form = opened(browser, job)
    with held_elsewhere(job):
        response = sent(browser, job, form, amount=11, _saveasnew="Save as new")

    assert response.status_code == 302
    copy = Job.objects.exclude(pk=job.pk).get()
    assert (copy.amount, copy.last_fence_token, copy.last_fence_holder) == (11, 0, None)
    job.refresh_from_db()
    assert job.amount == 10


def test_a_popup_is_saved_under_the_lock(browser: Any, job: Job) -> None:
    """It closes itself, or shows the form with the reason."""
    form = opened(browser, job) | {"_popup": "1", "_to_field": "id"}

    with held_elsewhere(job, register=False):
        assert_refused(sent(browser, job, form, amount=11), HELD)
    response = sent(browser, job, form, amount=11)

    assert response.status_code == 200
    assert "popup_response" in response.content.decode()
    job.refresh_from_db()
    assert (job.amount, job.last_fence_token) == (11, 2)


def test_adding_takes_no_lock(browser: Any, job: Job) -> None:
    """A new row has no lease."""
    form = opened(browser, job)

    with counted_calls() as calls:
        added = browser.post(reverse("admin:shop_job_add"), form | {"amount": "11"})

    assert added.status_code == 302
    assert Job.objects.filter(amount=11).exists()
    assert calls == []


def test_deleting_takes_the_lock(browser: Any, job: Job) -> None:
    """It is one fenced transaction, after a page that asks; the lock is free afterwards."""
    with counted_calls() as calls:
        asked = browser.get(address(job, "delete"))
        calls_to_ask = list(calls)
        deleted = browser.post(address(job, "delete"), {"post": "yes"})

    assert (asked.status_code, deleted.status_code) == (200, 302)
    assert (calls_to_ask, calls) == ([], ["EVALSHA", "EVALSHA"])
    assert not Job.objects.exists()


def test_what_somebody_works_on_is_not_deleted(browser: Any, job: Job) -> None:
    """The page says so, and asks once more."""
    with held_elsewhere(job):
        page = browser.post(address(job, "delete"), {"post": "yes"}, follow=True)

    assert page.redirect_chain == [(address(job, "delete"), 302)]
    assert "Nothing was deleted: somebody else is working on this." in page.content.decode()
    assert Job.objects.exists()


def test_rows_are_not_deleted_without_their_locks(browser: Any, job: Job) -> None:
    """There is no action that deletes what is selected."""
    page = reverse("admin:shop_job_changelist")
    browser.post(page, {"action": "delete_selected", "_selected_action": [job.pk], "post": "yes"})

    assert "delete_selected" not in browser.get(page).content.decode()
    assert Job.objects.exists()


def test_an_admin_site_of_another_name_works(browser: Any, job: Job) -> None:
    """Its pages have addresses of their own."""
    site = admin.AdminSite(name="office")
    site.register(Job, FencedResourceAdmin)
    urls = (path("office/", site.urls), path("admin/", include((urlpatterns, "x"))))

    with override_settings(ROOT_URLCONF=urls):
        page = reverse("office:shop_job_change", args=[job.pk])
        response = browser.post(page, fields_of(browser.get(page)) | {"amount": "11"})

    assert_saved(response, job, amount=11)


# What it costs


def test_saving_costs_two_calls_and_four_statements_over_django(browser: Any, job: Job) -> None:
    """The row is read to be locked and is registered; Django's transaction is a savepoint."""
    plain = type("PlainAdmin", (admin.ModelAdmin,), {"inlines": JobAdmin.inlines})

    def cost() -> tuple[list[str], list[str]]:
        form = opened(browser, job)
        with counted_calls() as calls, CaptureQueriesContext(connection) as queries:
            assert sent(browser, job, form, amount=11).status_code == 302
        return calls, [query["sql"].split()[0] for query in queries.captured_queries]

    cost()  # the scripts are in place and the content types are known
    with registered(plain):
        no_calls, bare = cost()
    calls, fenced = cost()

    assert no_calls == []
    assert calls == ["EVALSHA", "EVALSHA"]
    more = {word: fenced.count(word) - bare.count(word) for word in {*fenced, *bare}}
    assert {word: count for word, count in more.items() if count} == {
        "SELECT": 1,
        "WITH": 1,
        "SAVEPOINT": 1,
        "RELEASE": 1,
    }
