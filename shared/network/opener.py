"""HTTP requests to servers, which may be on this machine."""

from __future__ import annotations

from functools import cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import BaseHandler, OpenerDirector, ProxyHandler, Request, build_opener

from shared.network.host_names import is_loopback


@cache
def opener(*handlers: type[BaseHandler] | BaseHandler) -> OpenerDirector:
    """Return an opener that uses the proxies of the environment, except for this machine."""
    return build_opener(_ProxyToOthers, *handlers)


class _ProxyToOthers(ProxyHandler):
    """A proxy would look for 127.0.0.1 on its own machine."""

    def proxy_open(self, req: Request, proxy: str, type: str) -> Any:
        if is_loopback(urlsplit(f"//{req.host}").hostname or ""):
            return None
        return super().proxy_open(req, proxy, type)
