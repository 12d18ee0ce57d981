"""The admin of some models, as a project registers them; Document, for one, is not among them."""

from typing import ClassVar

from django.contrib import admin

from django_fencing.admin import FencedResourceAdmin
from tests.shop.models import Code, Entry, Job, Named, Plain, UrgentJob


class EntryInline(admin.TabularInline):  # type: ignore[type-arg]
    model = Entry
    extra = 1


@admin.register(Job)
class JobAdmin(FencedResourceAdmin):
    inlines: ClassVar = [EntryInline]
    save_as = True


admin.site.register([UrgentJob, Code, Named], FencedResourceAdmin)
admin.site.register(Plain)
