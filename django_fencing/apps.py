"""The app's configuration."""

from django.apps import AppConfig


class FencingConfig(AppConfig):
    name = "django_fencing"
    verbose_name = "Fencing"

    def ready(self) -> None:
        from django_fencing import checks  # noqa: F401 - registers them; needs the models
