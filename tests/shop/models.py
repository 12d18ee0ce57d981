"""Models of every shape that a fence may meet."""

import uuid
from typing import Any, ClassVar

from django.db import models

from django_fencing.models import FencedResource


class Job(FencedResource):
    """The plain case."""

    amount = models.IntegerField(default=0)
    note = models.TextField(default="")


class Entry(models.Model):
    """A row that is protected by a job's fence, but has none."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, null=True)
    text = models.TextField(default="")


class Counter(models.Model):
    """A row that is protected by a named resource."""

    value = models.IntegerField(default=0)


class UrgentJob(Job):
    """A multi-table child: its fence is its parent's."""

    deadline = models.IntegerField(default=0)


class VeryUrgentJob(UrgentJob):
    """A grandchild."""


class JobProxy(Job):
    class Meta:
        proxy = True


class Numbered(Job):
    """A child with a primary key of its own."""

    number = models.CharField(max_length=10, primary_key=True)
    job = models.OneToOneField(Job, on_delete=models.CASCADE, parent_link=True)


class Document(FencedResource):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    title = models.TextField(default="")


class Owner(models.Model):
    name = models.TextField(default="")


class OwnedManager(models.Manager[Any]):
    """Joins a nullable relation, defers columns, and hides rows."""

    def get_queryset(self) -> models.QuerySet[Any]:
        rows = super().get_queryset().select_related("owner").only("id", "owner__name")
        return rows.filter(deleted=False)


class Owned(FencedResource):
    """Its managers do what breaks FOR UPDATE, and its names need quoting."""

    owner = models.ForeignKey(Owner, on_delete=models.CASCADE, null=True)
    deleted = models.BooleanField(default=False)
    amount = models.IntegerField(default=0, db_column="order")
    restored = models.DateTimeField(null=True)

    objects: ClassVar[models.Manager[Any]] = OwnedManager()

    class Meta:
        db_table = "fencing guard 7"


class Code(FencedResource):
    """A text as primary key."""

    code = models.CharField(max_length=40, primary_key=True)


class Named(FencedResource):
    """A fence name of its own."""

    reference = models.CharField(max_length=40)

    @property
    def fence_name(self) -> str:
        return f"case {self.reference}"


class Profile(FencedResource):
    """Its primary key is a relation."""

    owner = models.OneToOneField(Owner, on_delete=models.CASCADE, primary_key=True)


class Composite(FencedResource):
    pk = models.CompositePrimaryKey("first", "second")
    first = models.IntegerField()
    second = models.IntegerField()


class Plain(models.Model):
    """No fence at all."""
