"""The same answers for fencing errors that any view raises."""

from django.http import HttpRequest, HttpResponse
from django.utils.deprecation import MiddlewareMixin

from django_fencing import http


class FencingMiddleware(MiddlewareMixin):
    """
    Answers LockHeld and LeaseLost by 409 and StoreUnavailable by 503, as a decorated view does.

    It needs no other middleware, and may stand anywhere in MIDDLEWARE.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Return the answer, or None for all other exceptions."""
        return http.answer(request, exception) if isinstance(exception, http.ANSWERED) else None
