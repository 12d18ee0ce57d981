"""Everything can be looked at. What the database protects is saved under its lock."""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from django_fencing.admin import FencedResourceAdmin
from hoa.models import (
    Charge,
    Complaint,
    Escalation,
    MonthlyChargeRun,
    Notice,
    Organization,
    Statement,
    Unit,
    Vendor,
    VendorAssignment,
    VendorContract,
)

admin.site.register([Organization, Vendor, VendorContract])


@admin.register(Unit)
class UnitAdmin(admin.ModelAdmin):
    list_display = ("label", "organization", "fee", "balance")


@admin.register(MonthlyChargeRun)
class MonthlyChargeRunAdmin(FencedResourceAdmin):
    list_display = ("organization", "month", "total", "token", "created_at")
    readonly_fields = ("token",)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False  # the balances would stay raised


@admin.register(Charge)
class ChargeAdmin(admin.ModelAdmin):
    list_display = ("run", "unit", "amount")


@admin.register(Statement)
class StatementAdmin(admin.ModelAdmin):
    list_display = ("unit", "month", "token")
    readonly_fields = ("token",)


@admin.register(Complaint)
class ComplaintAdmin(FencedResourceAdmin):
    list_display = ("id", "organization", "text", "status", "urgent", "last_fence_token")


@admin.register(Escalation)
class EscalationAdmin(admin.ModelAdmin):
    list_display = ("complaint", "due_at", "created_at")


@admin.register(Notice)
class NoticeAdmin(admin.ModelAdmin):
    list_display = ("organization", "text", "publish_at", "published_at")


@admin.register(VendorAssignment)
class VendorAssignmentAdmin(admin.ModelAdmin):
    list_display = ("complaint", "vendor", "token", "created_at")
    readonly_fields = ("token",)
