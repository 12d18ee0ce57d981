"""What a caller may lock."""

import uuid
from enum import StrEnum
from typing import Any

import pytest
from django.test import override_settings
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy

from django_fencing.exceptions import InvalidResource
from django_fencing.locks import fenced_lock
from django_fencing.models import Fence
from django_fencing.resources import resolve
from tests.helpers import counted_calls
from tests.shop.models import (
    Code,
    Composite,
    Document,
    Job,
    JobProxy,
    Named,
    Numbered,
    Owner,
    Plain,
    Profile,
    UrgentJob,
    VeryUrgentJob,
)

pytestmark = pytest.mark.django_db(databases=["default", "other"])


class Kind(StrEnum):
    NIGHTLY = "nightly"


def test_a_name_is_fenced_by_its_row_in_fence() -> None:
    """The key of a name, without namespace, is its text."""
    with override_settings(FENCING={}):
        resource = resolve("import:tenant-1")

    assert (resource.name, resource.model, resource.pk) == (
        "import:tenant-1",
        Fence,
        "import:tenant-1",
    )
    assert resource.keys.lease.endswith("}:lease:name:import:tenant-1")


def test_a_row_is_fenced_by_itself() -> None:
    """A row and (Model, pk) are one resource, however the pk is written."""
    job = Job.objects.create()

    names = {resolve(given).name for given in (job, (Job, job.pk), (Job, str(job.pk)))}

    assert names == {f"shop.job:{job.pk}"} == {job.fence_name}
    assert resolve(job).place == ("default", Job, job.pk)


@pytest.mark.parametrize("model", [UrgentJob, VeryUrgentJob, JobProxy])
def test_children_and_proxies_share_the_fence_of_their_parent(model: type[Job]) -> None:
    """One row is one resource, through whichever model it is reached."""
    row = model.objects.create()
    parent = Job.objects.get(pk=row.pk)

    resources = [resolve(given) for given in (row, (model, row.pk), parent, (Job, row.pk))]

    assert {resource.name for resource in resources} == {f"shop.job:{row.pk}"}
    assert {resource.place for resource in resources} == {("default", Job, row.pk)}


def test_a_child_with_a_primary_key_of_its_own_is_locked_by_its_parents() -> None:
    """The fence is found by the key of the model that defines it."""
    row = Numbered.objects.create(number="n-1")

    assert resolve(row).place == resolve((Numbered, "n-1")).place == ("default", Job, row.id)


def test_other_kinds_of_primary_keys() -> None:
    """UUIDs, texts that need encoding, and relations."""
    document = Document.objects.create()
    code = Code.objects.create(code="a:b@c")
    profile = Profile.objects.create(owner=Owner.objects.create())

    assert resolve((Document, str(document.pk))).name == f"shop.document:{document.pk}"
    assert resolve(code).name == "shop.code:a%3Ab%40c"
    assert resolve((Profile, profile.pk)).name == resolve(profile).name


def test_a_fence_name_of_the_models_own_is_used_for_both_forms() -> None:
    """(Model, pk) loads the row to ask it."""
    row = Named.objects.create(reference="K-17")

    assert resolve((Named, row.pk)).name == resolve(row).name == "case K-17"


def test_the_alias_is_part_of_the_resource() -> None:
    """The same key in another database is another row."""
    here, there = Job.objects.create(pk=7), Job.objects.using("other").create(pk=7)

    assert resolve(there).name == resolve((Job, 7), "other").name == "shop.job:7@other"
    assert resolve(here).keys.lease != resolve(there).keys.lease
    assert resolve("import", "other").keys.lease != resolve("import").keys.lease
    assert resolve("import@other").keys.lease != resolve("import", "other").keys.lease


def test_the_namespace_is_read_at_each_use() -> None:
    """Two tenants hold one name, and one pk, at the same time."""
    job = Job.objects.create()
    keys = set()

    for tenant in ("", "one", "two"):
        with override_settings(FENCING={"NAMESPACE": tenant}):
            keys |= {resolve("import").keys.lease, resolve(job).keys.lease}

    assert len(keys) == 6


def test_names_and_rows_have_key_spaces_of_their_own() -> None:
    """A row whose fence name is a text shares nothing with that text."""
    row = Named.objects.create(reference="K-17")

    assert resolve("case K-17").keys.lease != resolve(row).keys.lease


def test_a_text_that_reads_like_a_row_is_refused() -> None:
    """It would exclude nobody who locks the row."""
    with pytest.raises(InvalidResource, match=r"pass the row or \(Job, pk\)"):
        resolve("shop.job:7")

    assert resolve("shop.plain:7").name == "shop.plain:7"
    assert resolve("shop.unknown:7").name == "shop.unknown:7"


def test_a_member_of_a_text_enumeration_stands_for_its_value() -> None:
    """What it prints plays no part."""
    assert resolve(Kind.NIGHTLY).name == "nightly"
    assert type(resolve(Kind.NIGHTLY).name) is str


def test_a_lazy_row_is_a_row() -> None:
    """As request.user is one."""
    job = Job.objects.create()

    assert resolve(SimpleLazyObject(lambda: job)).name == job.fence_name


def test_the_floor_is_the_token_that_the_row_was_loaded_with() -> None:
    """It is a hint: odd values and deferred fields count for nothing."""
    Job.objects.create(pk=1, last_fence_token=0)
    Job.objects.filter(pk=1).update(last_fence_token=41)

    assert resolve(Job.objects.get(pk=1)).floor == 41
    assert resolve(Job.objects.only("pk").get(pk=1)).floor == 0
    for odd in (None, "41", -1, 2**52, True, 1.5):
        job = Job.objects.get(pk=1)
        job.last_fence_token = odd
        assert resolve(job).floor == 0


bad_resources: list[Any] = [
    None,
    "",
    7,
    7.5,
    b"name",
    "a\0b",
    "\ud800",
    gettext_lazy("name"),
    ["a", "b"],
    (),
    (Job,),
    (Job, None),
    (Job, True),
    (Job, 1.0),
    (Job, "seven"),
    (Job, 1, 2),
    (Plain, 1),
    (str, 1),
    (Fence, "name"),
    (Composite, (1, 2)),
    Fence(name="name"),
    Job,
    Job(),
    Job(pk=7),
    Document(id=uuid.UUID(int=7)),
    Plain(pk=1),
    ...,
]


@pytest.mark.parametrize("given", bad_resources, ids=repr)
def test_what_cannot_be_locked_is_refused_before_anything_is_sent(given: Any) -> None:
    """The error is a ValueError too, and says what a resource is."""
    with counted_calls() as calls, pytest.raises(InvalidResource) as caught:
        fenced_lock(given).acquire()

    assert isinstance(caught.value, ValueError)
    assert str(caught.value)
    assert calls == []


def test_the_errors_name_the_way_out() -> None:
    """What is missing, and what to pass instead."""
    with pytest.raises(InvalidResource, match=r"is not saved.*or pass \(Job, pk\)"):
        resolve(Job(pk=7))
    with pytest.raises(InvalidResource, match="let it inherit from FencedResource"):
        resolve((Plain, 1))
    with pytest.raises(InvalidResource, match="has no row 'n-9' in 'default'"):
        resolve((Numbered, "n-9"))
    with pytest.raises(InvalidResource, match="a row knows its database"):
        resolve(Job.objects.create(), "other")


def test_a_row_that_does_not_exist_is_refused_and_leaves_no_lease(client: Any) -> None:
    """Registering finds that there is nothing to lock."""
    missing = uuid.uuid4()

    with pytest.raises(InvalidResource, match="has no row in database 'default'"):
        fenced_lock((Document, missing)).acquire()

    assert not client.exists(resolve((Document, missing)).keys.lease)
