"""Validation errors for clients, made from msgspec's messages."""

from __future__ import annotations

import re

from router.errors import InvalidRequest, InvalidValue

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)(?:\[\.\.\.\])?`$")
_MISSING = re.compile(r"missing required field `(\w+)`")


def validation_error(reason: str) -> InvalidRequest:
    """Return an error for msgspec's ``reason``, such as "Expected `int`, got `str` - at `$.n`"."""
    path = _PATH.search(reason)
    param = path[1] if path else ""
    missing = _MISSING.search(reason)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
    of_key = "key in " if " - at `key` in " in reason else ""
    reason = _PATH.sub("", reason).replace("`", "'")
    at = f"{of_key}'{param}': " if param else ""
    return InvalidValue(f"Invalid {at}{reason}.", param=param or None)
