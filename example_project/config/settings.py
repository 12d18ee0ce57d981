"""Settings of the example project: both servers are named by the environment."""

import os
from pathlib import Path

import dj_database_url
from django.core.exceptions import ImproperlyConfigured


def url_of_server(variable: str) -> str:
    if url := os.environ.get(variable):
        return url
    raise ImproperlyConfigured(
        f"{variable} is not set. Run `make demo`, which starts its own PostgreSQL and Valkey, or "
        f"run `python example_project/services.py` and export what it prints."
    )


def seconds_from(variable: str, default: float) -> float:
    try:
        return float(os.environ.get(variable) or default)
    except ValueError as error:
        raise ImproperlyConfigured(f"{variable} must be a number of seconds: {error}.") from error


BASE_DIR = Path(__file__).resolve().parent.parent

DATABASES = {"default": dj_database_url.parse(url_of_server("DATABASE_URL"))}
if DATABASES["default"]["ENGINE"].endswith("postgresql"):
    # A holder that freezes inside its transaction keeps its row locked for so long.
    bounds = "-c idle_in_transaction_session_timeout=60s"
    DATABASES["default"].setdefault("OPTIONS", {}).setdefault("options", bounds)

CACHES = {
    "default": {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": url_of_server("REDIS_URL"),
    },
}

FENCING = {
    # Longer than a usual run: asking the meters takes 10 seconds at most.
    "TTL": seconds_from("FENCING_TTL", 30),
    # Databases that share one Redis need a namespace each, because their rows have the same keys.
    "NAMESPACE": os.environ.get("FENCING_NAMESPACE", ""),
}

# The service that `manage.py serve_meters` runs.
METERS_URL = os.environ.get("METERS_URL", "http://127.0.0.1:8765")

SECRET_KEY = "not a secret: this project never leaves your machine"  # noqa: S105
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
ROOT_URLCONF = "config.urls"
WSGI_APPLICATION = "config.wsgi.application"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "start"
LOGOUT_REDIRECT_URL = "login"
STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

INSTALLED_APPS = [
    "hoa",  # before django_fencing, because its conflict.html extends the package's
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_fencing",
]

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django_fencing.middleware.FencingMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
