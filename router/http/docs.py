"""`/openapi.json`, and `/docs`: a page that shows it and sends requests, loading nothing else."""

from __future__ import annotations

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
    return Response(request.app.state.openapi, media_type="application/json")


async def show_docs(request: Request) -> Response:
    return HTMLResponse(_PAGE, headers={"content-security-policy": _POLICY})


OPERATIONS = (
    Operation(
        path="/openapi.json",
        endpoint=show_openapi,
        summary="This description of the API",
        tag="Server",
        access="open",
        response_type=dict,
    ),
    Operation(
        path="/docs",
        endpoint=show_docs,
        summary="A page to read this description and to try requests",
        tag="Server",
        access="open",
        media_type="text/html",
    ),
)
