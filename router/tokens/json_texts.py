"""Decoding of JSON from clients and models, whose escapes may stand for invalid characters."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def decoded_json(text: str, *, strict: bool = True) -> Any:
    """Return ``text`` decoded, ``strict`` as in `json.loads`. Half of a surrogate pair becomes a
    replacement character, because it could not be encoded for a tokenizer or a client.

    Raises what `json.loads` raises."""
    value = json.loads(text, strict=strict)
    if _SURROGATE.search(text) is None:
        return value
    written = json.dumps(value, ensure_ascii=False)
    return json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
