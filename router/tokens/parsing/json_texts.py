"""JSON in texts of clients and models, whose escapes may spell out what no text can have."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def decoded_json(text: str, *, strict: bool = True) -> Any:
    """Return ``text`` decoded, ``strict`` as for `json.loads`. Half of a surrogate pair becomes a
    replacement character: it could not be encoded, neither for a tokenizer nor for a client.

    Raises what `json.loads` raises."""
    value = json.loads(text, strict=strict)
    if _SURROGATE.search(text) is None:
        return value
    written = json.dumps(value, ensure_ascii=False)
    return json.loads(written.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
