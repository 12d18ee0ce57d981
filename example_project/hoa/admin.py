"""Everything can be looked at; the fence and its tokens cannot be edited."""

from django.contrib import admin

from hoa.models import (
    Charge,
    Complaint,
    MonthlyChargeRun,
    Organization,
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
class MonthlyChargeRunAdmin(admin.ModelAdmin):
    list_display = ("organization", "month", "total", "token", "created_at")
    readonly_fields = ("token",)


@admin.register(Charge)
class ChargeAdmin(admin.ModelAdmin):
    list_display = ("run", "unit", "amount")


@admin.register(Complaint)
class ComplaintAdmin(admin.ModelAdmin):
    list_display = ("id", "organization", "text", "status", "last_fence_token")
    readonly_fields = ("last_fence_token", "last_fence_holder")


@admin.register(VendorAssignment)
class VendorAssignmentAdmin(admin.ModelAdmin):
    list_display = ("complaint", "vendor", "token", "created_at")
    readonly_fields = ("token",)
