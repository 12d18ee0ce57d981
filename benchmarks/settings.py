"""Settings of the benchmarks: the servers are named by DATABASE_URL and REDIS_URL."""

import os

import dj_database_url

SECRET_KEY = "benchmarks"  # noqa: S105 - nothing is signed
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django_fencing", "benchmarks"]
DATABASES = {"default": dj_database_url.parse(os.environ["DATABASE_URL"])}
CACHES = {
    "default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": os.environ["REDIS_URL"]}
}
