"""
Models of unusual shapes, each with a table for one test only, which Django does not manage.

The app is installed by the tests that use it: its models would be in everybody's checks.
"""

import uuid
from typing import Any, ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F
from django.db.models.expressions import Col

from django_fencing.models import FencedResource


class Shape(FencedResource):
    amount = models.IntegerField(default=0)

    class Meta:
        abstract = True


class TextShape(Shape):
    id = models.TextField(primary_key=True)

    class Meta:
        app_label, managed = "odd", False


class WildShape(Shape):
    id = models.BigAutoField(primary_key=True, db_column="Key No: {1}")
    spaced = models.TextField(db_column="a column's name", default="")
    upper = models.TextField(db_column="UPPER", default="")
    braces = models.TextField(db_column="{braces}", default="")
    keyword = models.TextField(db_column="select", default="")
    presented = models.TextField(default="")

    class Meta:
        app_label, managed = "odd", False
        db_table = "Wild 'table' {0}"


class ProxyShape(WildShape):
    class Meta:
        app_label, managed = "odd", False
        proxy = True


class GuardShape(Shape):
    """Its table has a name that statements of the package might use."""

    class Meta:
        app_label, managed = "odd", False
        db_table = "guard"


class GeneratedShape(Shape):
    double = models.GeneratedField(
        expression=F("amount") * 2, output_field=models.IntegerField(), db_persist=True
    )
    data = models.JSONField(default=dict)
    nested = ArrayField(ArrayField(models.TextField()), default=list)
    raw = models.BinaryField(default=b"%s\0")

    class Meta:
        app_label, managed = "odd", False


class ChildShape(GeneratedShape):
    extra = models.TextField(default="", db_column="Extra Text")

    class Meta:
        app_label, managed = "odd", False
        db_table = "Child 'table'"


class RevealedCol(Col):
    """What packages select that encrypt in the database."""

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        sql, params = super().as_sql(compiler, connection)
        return f"convert_from(decode({sql}, 'base64'), 'UTF8')", params


class DatabaseCipherField(models.TextField):
    """Is encrypted and decrypted by the database, as those of django-pgcrypto-fields are."""

    def get_placeholder(self, value: Any, compiler: Any, connection: Any) -> str:
        return "encode(convert_to(%s, 'UTF8'), 'base64')"

    # Of Django 6.1.
    def get_placeholder_sql(self, value: Any, compiler: Any, connection: Any) -> Any:
        return self.get_placeholder(value, compiler, connection), (value,)

    def get_col(self, alias: str, output_field: Any = None) -> Any:
        return RevealedCol(alias, self, output_field or self)

    @property
    def cached_col(self) -> Any:
        return RevealedCol(self.model._meta.db_table, self)


class CipherShape(Shape):
    secret = DatabaseCipherField(default="")

    class Meta:
        app_label, managed = "odd", False


class FormattedField(models.TextField):
    """Is selected by a function with a parameter, which may be another one each time."""

    length = 9

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        return f"left({sql}, %s)", (*params, self.length)


class FormattedShape(Shape):
    formatted = FormattedField(default="50%")

    class Meta:
        app_label, managed = "odd", False


class Deferring(models.Manager[Any]):
    def get_queryset(self) -> Any:
        return super().get_queryset().defer("last_fence_token", "last_fence_holder", "amount")


class DeferredShape(Shape):
    objects: ClassVar[Any] = Deferring()

    class Meta:
        app_label, managed = "odd", False
        base_manager_name = "objects"


class ReversedField(models.TextField):
    """Is seen otherwise by the application than by the database."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        return value[::-1]

    def get_prep_value(self, value: Any) -> Any:
        return value[::-1]


class KeyShape(Shape):
    id = ReversedField(primary_key=True)

    class Meta:
        app_label, managed = "odd", False


class DateShape(Shape):
    id = models.DateTimeField(primary_key=True)

    class Meta:
        app_label, managed = "odd", False


class DecimalShape(Shape):
    id = models.DecimalField(primary_key=True, max_digits=9, decimal_places=3)

    class Meta:
        app_label, managed = "odd", False


class UuidShape(Shape):
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)

    class Meta:
        app_label, managed = "odd", False


class AddressShape(Shape):
    id = models.GenericIPAddressField(primary_key=True)

    class Meta:
        app_label, managed = "odd", False


class Regional(Shape):
    """Has partitions."""

    region = models.IntegerField(default=1)

    class Meta:
        app_label, managed = "odd", False
        db_table = "odd_regional"


class InSchema(Shape):
    class Meta:
        app_label, managed = "odd", False
        db_table = 'odd"."row'


class ChildInSchema(InSchema):
    extra = models.IntegerField(default=0)

    class Meta:
        app_label, managed = "odd", False
        db_table = 'odd"."child'
