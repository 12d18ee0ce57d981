"""The admin of one model, as a project registers it."""

from django.contrib import admin

from django_fencing.admin import FencedResourceAdmin
from tests.shop.models import Job

admin.site.register(Job, FencedResourceAdmin)
