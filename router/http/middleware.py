"""What happens to every request, whatever its path: an id, a key, an answer in one shape."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.anthropic.errors import error_body, is_anthropic_path
from router.errors import (
    ApiError,
    ClientDisconnected,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Unauthorized,
)
from router.fleet.metrics import Metrics
from shared.settings import Settings

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class ApiKeys:
    """The API keys that are let in. Only their digests are kept, and compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def from_settings(cls, settings: Settings) -> ApiKeys:
        """``--api-key`` and the lines of ``--api-key-file``. Raises OSError, ValueError."""
        keys = list(settings.api_key)
        if settings.api_key_file is not None:
            lines = Path(settings.api_key_file).read_text(encoding="utf-8").splitlines()
            found = [line.strip() for line in lines]
            found = [line for line in found if line and not line.startswith("#")]
            if not found:
                raise ValueError(f"--api-key-file: no key in {settings.api_key_file}")
            keys += found
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def identify(self, headers: Headers) -> str:
        """A short name of the key in ``headers``, safe to log. Raises `Unauthorized`."""
        given = _bearer(headers) or headers.get("x-api-key", "")
        if not given:
            raise Unauthorized("An API key is needed: Authorization: Bearer KEY.")
        digest = _digest(given)
        found = [known for known in self._digests if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthorized("The API key is not valid.")
        return found[0].hex()[:12]


def _bearer(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class RequestMiddleware:
    """ASGI middleware around everything else."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        keys: ApiKeys,
        metric_paths: frozenset[str],
        public_paths: frozenset[str],
        metrics: Metrics,
    ) -> None:
        """``public_paths`` are never behind a key, ``metric_paths`` counted by name in
        ``metrics``."""
        self._app = app
        self._root_path = settings.root_path.rstrip("/")
        self._keys = keys
        self._metrics_keys = ApiKeys([settings.metrics_key] if settings.metrics_key else [])
        self._metric_paths = metric_paths
        self._public_paths = public_paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = "req_" + uuid.uuid4().hex
        path = self._strip_root_path(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic_path(path):
                    headers["request-id"] = request_id
            await send(message)

        scope.setdefault("state", {}).update(request_id=request_id, path=path)
        try:
            scope["state"]["api_key"] = self._authorize(path, headers)
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            logger.debug("%s: the client is gone", request_id)
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send_with_id)
        except Exception:
            logger.exception("%s %s failed (%s)", scope["method"], path, request_id)
            if status:
                raise  # too late for an answer: the server closes the connection
            await error_response(InternalError(), scope)(scope, receive, send_with_id)
        finally:
            known = path if path in self._metric_paths else scope["state"].get("template", "other")
            self._metrics.requests.labels(known, str(status or 499)).inc()
            elapsed_ms = 1000 * (time.monotonic() - began)
            logger.debug(
                "%s %s %d %.0f ms (%s)", scope["method"], path, status, elapsed_ms, request_id
            )

    def _authorize(self, path: str, headers: Headers) -> str:
        if path in self._public_paths:
            return ""
        keys = self._metrics_keys if path == "/metrics" else self._keys
        return keys.identify(headers) if keys else ""

    def _strip_root_path(self, scope: Scope) -> str:
        """The path without ``--root-path``, for proxies that pass it on and those that do not."""
        path: str = scope["path"]
        if self._root_path and path.startswith(self._root_path + "/"):
            scope["root_path"] = self._root_path
            return path[len(self._root_path) :]
        return path


def error_response(error: ApiError, scope: Scope) -> Response:
    """In the shape that callers of the path know."""
    state = scope["state"]
    body = (
        error_body(error, state["request_id"]) if is_anthropic_path(state["path"]) else error.body()
    )
    return Response(body, error.status, headers=error.headers(), media_type="application/json")


async def http_exception_handler(request: Request, error: Exception) -> Response:
    """Starlette's own errors (unknown path, wrong method) in our shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound(f"There is no {request.url.path} here."), request.scope)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        message = f"{request.method} is not allowed for {request.url.path}."
        return error_response(MethodNotAllowed(message, allow), request.scope)
    return error_response(InvalidRequest(str(error.detail)), request.scope)
