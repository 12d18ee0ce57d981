"""The app's configuration."""

from django.apps import AppConfig


class FencingConfig(AppConfig):
    name = "django_fencing"
    verbose_name = "Fencing"
