"""A view's request as a payload, and its response as JSON that it can be made from again."""

import base64
import hashlib
import json
import sys
from typing import Any, NoReturn

from django.http import HttpRequest, HttpResponse
from django.http.request import RawPostDataException

_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")

# It is another one in each form that Django renders.
_CSRF = "csrfmiddlewaretoken"


def payload_of(request: HttpRequest) -> Any:
    """Return what the request asks for: method, path, query, and the body without its order."""
    return {
        "method": request.method,
        "path": request.path,
        "query": dict(request.GET.lists()),
        "body": _body(request),
    }


def kept(response: Any) -> Any:
    """
    Return the response in JSON: status, headers without cookies, content.

    Raise TypeError for what is none, or has no content yet.
    """
    if not isinstance(response, HttpResponse):
        raise TypeError(
            f"once= keeps a view's HttpResponse, and not {response!r}: a stream has no content."
        )
    found = {"status": response.status_code, "headers": list(response.items())}
    template_response: Any = response
    if _is_bare(response):
        return {**found, "data": template_response.data}
    if not getattr(response, "is_rendered", True):
        template_response.render()
    content = base64.b64encode(response.content).decode()
    return {**found, "reason": response.reason_phrase, "content": content}


def restored(found: Any) -> HttpResponse:
    """Return the response that kept() has put into JSON."""
    headers = dict(found["headers"])
    if "data" in found:
        return _rest_framework().Response(found["data"], found["status"], headers=headers)  # type: ignore[no-any-return]
    return HttpResponse(
        base64.b64decode(found["content"]),
        status=found["status"],
        reason=found["reason"],
        headers=headers,
    )


def _body(request: HttpRequest) -> Any:
    if request.content_type in _FORMS:
        files = {name: [_file(file) for file in found] for name, found in request.FILES.lists()}
        return {"form": {**dict(request.POST.lists()), _CSRF: None}, "files": files}
    try:
        body = request.body
    except RawPostDataException as error:
        raise TypeError(
            "The body of the request was read before once= could: say what to compare by payload=."
        ) from error
    try:
        return {"json": json.loads(body, parse_constant=_refuse)}
    except (ValueError, RecursionError):
        return {"bytes": hashlib.sha256(body).hexdigest()}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}.")


def _file(file: Any) -> Any:
    digest = hashlib.sha256()
    for chunk in file.chunks():
        digest.update(chunk)
    file.seek(0)
    return [file.name, digest.hexdigest()]


def _is_bare(response: Any) -> bool:
    """Say whether it is one of Django REST framework whose renderer is not chosen yet."""
    module = _rest_framework()
    is_its_own = module is not None and isinstance(response, module.Response)
    return is_its_own and not hasattr(response, "accepted_renderer")


def _rest_framework() -> Any:
    return sys.modules.get("rest_framework.response")
