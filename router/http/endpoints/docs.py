"""`/openapi.json`, and `/docs`: a page that shows it and sends requests, loading nothing else.

The page is our own: 10 kB under the strict policy below. Swagger UI (swagger-ui-dist 5.35) would
add 1.9 MB of script and styles to the wheel and to each container.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from router.api.operations import Operation

_PAGE = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline';"
    " style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def show_openapi(request: Request) -> Response:
    document = await asyncio.to_thread(request.app.state.openapi)  # made by the first request
    return Response(document, media_type="application/json")


async def show_docs(request: Request) -> Response:
    return HTMLResponse(_PAGE, headers={"content-security-policy": _POLICY})


_operation = partial(Operation, tag="Server", access="open")
OPERATIONS = (
    _operation("/openapi.json", show_openapi, "This description of the API", response_type=dict),
    _operation(
        "/docs",
        show_docs,
        "A page to read this description and to try requests",
        media_type="text/html",
    ),
)
