"""The example's server with an assignment that takes no lock; `gunicorn tests.unfenced` runs it."""

import time

from config.wsgi import application  # before the models are imported
from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.urls import include, path
from django_redis import get_redis_connection
from hoa import assignments
from hoa.api import assignment_of, endpoint, posted
from hoa.forms import vendor_in
from hoa.models import Complaint, Organization, Vendor

__all__ = ["application"]

SECONDS = 10

contracted_vendors = assignments.contracted_vendors


def contracted_vendors_later(organization: Organization) -> QuerySet[Vendor]:
    """Return when two requests have found that nobody is assigned, and none has written."""
    redis = get_redis_connection()
    arrived = f"unfenced:{settings.FENCING['NAMESPACE']}:{organization.pk}"
    redis.incr(arrived)
    redis.expire(arrived, 60)
    deadline = time.monotonic() + SECONDS
    while int(redis.get(arrived)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return contracted_vendors(organization)


assignments.contracted_vendors = contracted_vendors_later


@endpoint
def assign(request: HttpRequest, pk: int) -> HttpResponse:
    """Do what the example does, in a plain transaction."""
    with transaction.atomic():
        complaint = get_object_or_404(Complaint, pk=pk)
        made = assignments.place_assignment(complaint, vendor_in(posted(request)))
    return JsonResponse(assignment_of(complaint, made), status=201)


urlpatterns = [
    path("api/complaints/<int:pk>/assignment/", assign),
    path("", include("hoa.urls")),
]
settings.ROOT_URLCONF = __name__
