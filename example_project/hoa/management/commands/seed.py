"""manage.py seed"""

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from hoa import samples
from hoa.commands import one_line_errors


class Command(BaseCommand):
    help = (
        "Make the sample organizations, vendors and complaints, as far as they are missing, and "
        "with DEBUG a login as well."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        with one_line_errors():
            for name, texts in samples.ORGANIZATIONS.items():
                organization = samples.sample_organization(name)
                self.stdout.write(f"organization {organization.pk}: {name}")
                for text in texts:
                    complaint = samples.sample_complaint(organization, text)
                    self.stdout.write(f"  complaint {complaint.pk}: {text}")
            for name, ends_on in samples.VENDORS.items():
                vendor = samples.sample_vendor(name, ends_on)
                self.stdout.write(f"vendor {vendor.pk}: {name}, contracts end {ends_on}")
            if settings.DEBUG:
                user = samples.sample_user("manager")
                self.stdout.write(f"user {user}, password {user}")
