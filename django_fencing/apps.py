"""The app's configuration."""

from django.apps import AppConfig
from django.db import connections
from django.db.backends.signals import connection_created
from django.db.models.signals import post_migrate


class FencingConfig(AppConfig):
    name = "django_fencing"
    verbose_name = "Fencing"

    def ready(self) -> None:
        # These need the models.
        from django_fencing import checks  # noqa: F401 - registers them
        from django_fencing.operations import restore
        from django_fencing.refusals import explain_on

        connection_created.connect(explain_on, dispatch_uid="django_fencing")
        for connection in connections.all(initialized_only=True):
            explain_on(connection)  # another app may have asked the database before
        post_migrate.connect(restore, sender=self, dispatch_uid="django_fencing")
