"""What has a fence is written under its lease only, whatever writes it."""

from django.db import migrations

from django_fencing.operations import ProtectFence


class Migration(migrations.Migration):
    dependencies = [("hoa", "0001_initial")]

    operations = [
        ProtectFence("MonthlyChargeRun", require_lease=True),
        ProtectFence("Complaint", require_lease=True),
    ]
