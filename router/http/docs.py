"""`/docs`: a page that shows `/openapi.json` and sends requests, with nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

_PAGE = Path(__file__).with_name("docs.html").read_text(encoding="utf-8")
_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline';"
    " style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def show_docs(request: Request) -> Response:
    return HTMLResponse(_PAGE, headers={"content-security-policy": _POLICY})
