"""A view's request as a payload, and its response as JSON that it can be made from again."""

import base64
import hashlib
import json
import sys
from io import BytesIO
from typing import Any

from django.http import HttpRequest, HttpResponse, QueryDict
from django.http.request import RawPostDataException

_URLENCODED, _MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"

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
    unrendered: Any = response
    if _is_bare(response):
        content = {
            "data": _data(unrendered.data),
            "template_name": unrendered.template_name,
            "content_type": unrendered.content_type,
        }
    else:
        if not getattr(response, "is_rendered", True):
            unrendered.render()  # which may change the headers
        content = {
            "content": base64.b64encode(response.content).decode(),
            "reason": response.reason_phrase,
        }
    return {"status": response.status_code, "headers": list(response.items()), **content}


def restored(found: Any) -> HttpResponse:
    """Return the response that kept() has put into JSON."""
    response: HttpResponse
    if "data" in found:
        response = _rest_framework().Response(
            found["data"],
            status=found["status"],
            template_name=found["template_name"],
            content_type=found["content_type"],
        )
    else:
        content = base64.b64decode(found["content"])
        response = HttpResponse(content, status=found["status"], reason=found["reason"])
    for name in dict(response.items()):
        del response[name]
    for name, value in found["headers"]:
        response[name] = value
    return response


def _body(request: HttpRequest) -> Any:
    if request.content_type in (_URLENCODED, _MULTIPART):
        form, files = _form(request)
        digests = {name: [_digest_of(file) for file in found] for name, found in files.lists()}
        return {"form": {**dict(form.lists()), _CSRF: None}, "files": digests}
    body = _raw(request)
    try:
        canonical = json.dumps(json.loads(body), sort_keys=True, allow_nan=False)
    except (ValueError, RecursionError):
        return {"bytes": hashlib.sha256(body).hexdigest()}
    return {"json": canonical}


def _form(request: HttpRequest) -> tuple[Any, Any]:
    """Return the form's fields and files, which Django reads of a POST only."""
    if request.method == "POST":
        return request.POST, request.FILES
    if request.content_type == _MULTIPART:
        return request.parse_file_upload(request.META, BytesIO(_raw(request)))
    return QueryDict(_raw(request), encoding=request.encoding), QueryDict()


def _raw(request: HttpRequest) -> bytes:
    try:
        return request.body
    except RawPostDataException as error:
        raise TypeError(
            "The body of the request was read before once= could: say what to compare by payload=."
        ) from error


def _digest_of(file: Any) -> Any:
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


def _data(data: Any) -> Any:
    """Return what Django REST framework's own renderer would make of it."""
    from rest_framework.utils.encoders import JSONEncoder  # type: ignore[import-untyped]

    return json.loads(json.dumps(data, cls=JSONEncoder))


def _rest_framework() -> Any:
    return sys.modules.get("rest_framework.response")
