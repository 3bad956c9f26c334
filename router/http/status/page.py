"""`/`: the page with the status of the server and a chat.

Its files are in `router/page/`, served unchanged; they load nothing from elsewhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from router.api.operations import Operation
from router.errors import NotFound
from router.fleet.router import Router
from router.http.status.feed import StatusFeed

_FOLDER = Path(__file__).parents[2] / "page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # cached, but revalidated with its ETag
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def response(self, request: Request) -> Response:
        """Return the file, or a response that the client already has it."""
        headers = {**_HEADERS, "etag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in (each.strip().removeprefix("W/") for each in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


_FILES = {
    path.name: PageFile(path.read_bytes(), _MEDIA_TYPES[path.suffix])
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _MEDIA_TYPES
}
_START = _FILES.pop("index.html")
PATHS = frozenset(f"/page/{name}" for name in _FILES)
"""The paths of its files."""


def operations(router: Router) -> list[Operation]:
    """Return the page, its files, and the feed that it shows."""
    start = _with_base(_START, router.settings.root_path.rstrip("/"))

    async def show_page(request: Request) -> Response:
        return start.response(request)

    async def show_file(request: Request) -> Response:
        found = _FILES.get(request.path_params["file"])
        if found is None:
            raise NotFound("The page has no such file.")
        return found.response(request)

    operation = partial(Operation, tag="Server", access="open")
    return [
        operation("/", show_page, "The status and chat page", media_type="text/html"),
        StatusFeed(router).operation,
        operation(
            "/page/{file}",
            show_file,
            "A file of the page",
            media_type="text/javascript",
            errors=(NotFound,),
        ),
    ]


def _with_base(start: PageFile, root_path: str) -> PageFile:
    """Return the page with addresses relative to ``root_path``, for whatever path was requested.

    Without a root path they are relative to the page's own address, which works behind any proxy.
    """
    if not root_path:
        return start
    base = f'<head>\n  <base href="{root_path}/">'
    return PageFile(start.content.replace(b"<head>", base.encode(), 1), start.media_type)
