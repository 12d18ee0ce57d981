"""The row that is read, raised by one and written."""

from django.db import models

from django_fencing.models import FencedResource


class Account(FencedResource):
    amount = models.IntegerField(default=0)
