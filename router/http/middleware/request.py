"""Processing of every request, whatever its path: an id, a check of its key, error responses."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.anthropic.errors import is_anthropic_path
from router.decisions.errors import is_decisions_path
from router.errors import ApiError, ClientDisconnected, HostForbidden, InternalError, NotFound
from router.fleet.metrics.loop_lag import LoopLag
from router.fleet.metrics.prometheus import Metrics
from router.fleet.tenants.tenant import EVERYBODY, Tenant
from router.http.middleware.access_log import RequestRecord
from router.http.middleware.api_keys import AdminKey, ApiKeys, SingleKey
from router.http.middleware.error_responses import error_response
from router.http.middleware.hosts import AllowedHosts
from router.http.middleware.traces import RequestTrace
from shared.settings import Settings
from shared.tracing import Tracing

logger = logging.getLogger(__name__)

_NAMES_MODELS = frozenset({"/health", "/readyz", "/metrics"})
"""Paths, not protected by a key, that reveal the models."""
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
        metrics_key_paths: frozenset[str],
        admin_key_paths: frozenset[str],
        metrics: Metrics,
        loop_lag: LoopLag,
        tracing: Tracing | None,
    ) -> None:
        """``public_paths`` never require a key, ``metrics_key_paths`` only the ``--metrics-key``,
        ``admin_key_paths`` the ``--admin-key``, if set. ``metrics`` counts ``metric_paths`` by
        name."""
        self._app = app
        self._root_path = settings.root_path.rstrip("/")
        self._keys = keys
        self._hosts = AllowedHosts(settings.allowed_host)
        self._metrics_key = SingleKey(settings.metrics_key)
        self._admin_key = AdminKey(settings.admin_key, keys, admin_key_paths)
        self._metric_paths = metric_paths
        self._public_paths = public_paths
        self._metrics_key_paths = metrics_key_paths
        self._metrics = metrics
        self._loop_lag = loop_lag
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._loop_lag.watching():
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = "req_" + uuid.uuid4().hex
        path = self._strip_root_path(scope)
        record = RequestRecord.begin(scope, path, request_id, headers)
        limits_left: dict[str, str] = {}
        """Headers that `router.fleet.tenants.rate_limits` sets while the request is admitted."""

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic_path(path):
                    headers["request-id"] = request_id
                if is_decisions_path(path):
                    headers["x-typesafe-request-id"] = request_id
                if traceparent := scope["state"].get("traceparent"):
                    headers["traceparent"] = traceparent
                for name, value in limits_left.items():
                    headers[name] = value
            await send(message)

        scope.setdefault("state", {}).update(
            request_id=request_id, path=path, tenant=EVERYBODY, limits_left=limits_left
        )
        if self._tracing is not None and path not in self._public_paths:
            trace = scope["state"]["trace"] = RequestTrace(self._tracing, headers, record)
            scope["state"]["traceparent"] = trace.traceparent
        try:
            tenant = self._authorize(path, headers, scope)
            scope["state"].update(tenant=tenant, api_key=tenant.name)
            if path == "/metrics":
                scope["state"]["may_administer"] = self._admin_key.is_sent(headers)
            await self._app(scope, receive, send_with_id)
        except ClientDisconnected:
            record.error_code = "client_disconnected"
        except ApiError as error:
            record.error_code = error.code or error.type
            if not record.status:  # otherwise the server closes the connection
                await error_response(error, scope)(scope, receive, send_with_id)
        except Exception:
            record.error_code = "internal_error"
            logger.exception("%s %s failed (%s)", scope["method"], path, request_id)
            if record.status:
                raise  # the response has begun: the server closes the connection
            await error_response(InternalError(), scope)(scope, receive, send_with_id)
        finally:
            if (held := scope["state"].get("image_memory")) is not None:
                held.close()
            self._finish(scope, path, record)

    def _finish(self, scope: Scope, path: str, record: RequestRecord) -> None:
        """Count and log an answered request."""
        state, status = scope["state"], str(record.final_status)
        known = path if path in self._metric_paths else state.get("template", "other")
        if (generation := state.get("generation")) is not None and generation.stream_error:
            record.error_code = generation.stream_error.code or generation.stream_error.type
        is_probe = path in self._public_paths or path == "/metrics"
        if record.is_trouble and not is_probe:
            what = f"{status} {record.error_code or ''}".strip()
            self._metrics.recent.note(known, what, request_id=record.request_id)
        self._metrics.requests.labels(known, status).inc()
        if not is_probe:
            self._metrics.key_requests.labels(state["tenant"].name, status).inc()
        if record.status == 429:
            self._metrics.key_refusals.labels(state["tenant"].name, record.error_code).inc()
        if (trace := state.get("trace")) is not None:
            trace.end(scope, known)
        record.write(scope, logging.DEBUG if is_probe else logging.INFO)

    def _authorize(self, path: str, headers: Headers, scope: Scope) -> Tenant:
        if "\n" in path:  # routes match with one at their end, and the rules below do not
            raise NotFound("The path has a line break.")
        is_public = path in self._public_paths
        if is_public and path not in _NAMES_MODELS:
            return EVERYBODY
        if path in self._metrics_key_paths and self._metrics_key:
            self._metrics_key.check(headers)
            return EVERYBODY
        if self._admin_key.guards(path):
            return self._admin_key.check(headers)
        if not self._keys and not self._hosts.allows(headers.get("host")):
            raise HostForbidden(
                "This server has no API keys, and responds only to known host names: add this "
                "name with --allowed-host, or use API keys."
            )
        if is_public or path in self._metrics_key_paths:
            return EVERYBODY
        return self._keys.identify(headers, scope)

    def _strip_root_path(self, scope: Scope) -> str:
        """Return the path without ``--root-path``, which some proxies keep and others strip."""
        path: str = scope["path"]
        if self._root_path and (path + "/").startswith(self._root_path + "/"):
            scope["root_path"] = self._root_path
            if path == self._root_path:
                scope["path"] = path + "/"
            return path[len(self._root_path) :] or "/"
        return path
