"""One log line per request: its client, its cost, its duration.

It never contains prompts, texts or keys.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

from router.generation.summary import summarize
from shared import logs

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_MAX_PATH = 200


@dataclass
class RequestRecord:
    """The known facts of a request that has been answered."""

    method: str
    path: str
    request_id: str
    client_id: str | None
    """The client's own id of the request (`x-client-request-id`)."""
    began_at: float = field(default_factory=time.monotonic)
    status: int = 0
    """0 until the response has begun."""
    error_code: str | None = None
    """Code of an error response, or of a stream that the client cut off."""

    @classmethod
    def begin(cls, scope: Scope, path: str, request_id: str, headers: Headers) -> RequestRecord:
        client_id = headers.get("x-client-request-id", "")
        return cls(
            scope["method"], path, request_id, client_id if _PLAIN.fullmatch(client_id) else None
        )

    @property
    def final_status(self) -> int:
        """The status; 499 if the client disconnected before there was one."""
        return self.status or 499

    @property
    def is_trouble(self) -> bool:
        """Whether an operator should see it: a rejection for lack of capacity, a server error, or a
        stream cut off by an error."""
        was_cut = self.status == 200 and self.error_code not in (None, "client_disconnected")
        return self.status == 429 or self.status >= 500 or was_cut

    def write(self, scope: Scope, level: int) -> None:
        """Write the line. Unknown fields are omitted."""
        if not logger.isEnabledFor(level):
            return
        state = scope["state"]
        # A path is the client's text: it is shown completely only if it cannot be mistaken for
        # something else.
        shown = self.path[:_MAX_PATH]
        shown = shown if _PLAIN.fullmatch(shown) else ascii(shown)
        total_s = time.monotonic() - self.began_at
        fields: dict[str, object] = {"key": state["tenant"].name or None}
        if (generation := state.get("generation")) is not None:
            found = summarize(generation)
            fields |= {
                "model": found.model,
                "prompt_tokens": found.prompt_tokens,
                "cached_tokens": found.cached_tokens,
                "output_tokens": found.output_tokens,
                "queue_s": _between(found.arrived_at, found.placed_at),
                "first_token_s": _between(self.began_at, found.first_token_at),
                "finish": None if self.error_code else found.finish,
                "id": found.id,
            }
        fields |= state.get("audit", {})
        fields |= {
            "total_s": round(total_s, 4),
            "error": self.error_code,
            "request_id": self.request_id,
            "client_id": self.client_id,
        }
        parts = {"method": self.method, "path": shown, "status": self.final_status}
        logs.event(logger, level, " ".join(map(str, parts.values())), fields, parts)


def _between(earlier: float | None, later: float | None) -> float | None:
    return None if earlier is None or later is None else round(later - earlier, 4)
