"""Where the pages and the JSON endpoints are."""

from django.urls import path

from hoa import api, views

urlpatterns = [
    path("", views.start, name="start"),
    path("organizations/<int:pk>/", views.organization, name="organization"),
    path("complaints/<int:pk>/", views.complaint, name="complaint"),
    path("api/organizations/<int:pk>/charges/", api.charges, name="api-charges"),
    path("api/complaints/<int:pk>/assignment/", api.assignment, name="api-assignment"),
]
