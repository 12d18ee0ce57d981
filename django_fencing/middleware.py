"""The same answers for fencing errors that any view raises."""

from django.http import Http404, HttpRequest, HttpResponse
from django.utils.deprecation import MiddlewareMixin

from django_fencing import problems
from django_fencing.exceptions import NoSuchRow


class FencingMiddleware(MiddlewareMixin):
    """
    Answers LockHeld and LeaseLost by 409, OnceMismatch by 422 and StoreUnavailable by 503.

    It needs no other middleware, and may stand anywhere in MIDDLEWARE.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Return the answer, or None for all other exceptions. A row that is not there is a 404."""
        if isinstance(exception, NoSuchRow):
            raise Http404(str(exception)) from exception
        return (
            problems.answer(request, exception)
            if isinstance(exception, problems.ANSWERED)
            else None
        )
