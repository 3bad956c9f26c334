"""Query parameters of lists, which come in pages."""

from __future__ import annotations

import re

from starlette.requests import Request

from router.errors import InvalidValue


def page_limit(request: Request, default: int, most: int) -> int:
    """Return how many entries a page has. Raises `InvalidValue`."""
    text = request.query_params.get("limit", str(default))
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= most:
        raise InvalidValue(f"'limit' must be a number between 1 and {most}.", param="limit")
    return int(text)


def newest_first(request: Request) -> bool:
    """Return whether a page begins with the newest entry. Raises `InvalidValue`."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidValue("'order' must be 'asc' or 'desc'.", param="order")
    return order == "desc"
