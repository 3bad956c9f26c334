"""What every request gets, whatever its path: an id, a check of its key, an answer to errors."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.anthropic.errors import is_anthropic_path
from router.errors import ApiError, ClientDisconnected, InternalError
from router.fleet.metrics import Metrics
from router.http.api_keys import ApiKeys
from router.http.error_responses import error_response
from shared.settings import Settings

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


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
        """``public_paths`` never need a key. ``metrics`` counts ``metric_paths`` by name."""
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
                raise  # the answer has begun: the server closes the connection
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
        """Return the path without ``--root-path``, which some proxies pass on and others strip."""
        path: str = scope["path"]
        if self._root_path and path.startswith(self._root_path + "/"):
            scope["root_path"] = self._root_path
            return path[len(self._root_path) :]
        return path
