"""Paths of other servers' APIs that are not supported here.

An explicit error helps more than a 404: some clients try every endpoint of OpenAI's API.
"""

from __future__ import annotations

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.errors import EndpointNotSupported

_UNSUPPORTED = {
    "audio": "Recordings",
    "images": "Images",
    "videos": "Videos",
    "moderations": "Moderations",
    "files": "Files",
    "uploads": "Uploads",
    "batches": "Batches",
    "fine_tuning": "Fine-tuning jobs",
    "fine-tunes": "Fine-tuning jobs",
    "vector_stores": "Vector stores",
    "assistants": "Assistants",
    "threads": "Assistants",
    "conversations": "Conversations",
    "containers": "Containers",
    "evals": "Evaluations",
    "organization": "Organizations",
    "realtime": "Realtime sessions",
    "edits": "Edits",
    "complete": "Anthropic's older completions",
    "pooling": "Pooled states",
    "classify": "Classes",
}
_UNSUPPORTED_OF_OLLAMA = {
    "create": "New models",
    "copy": "Copies of models",
    "push": "Uploads of models",
    "blobs": "Uploads of files",
    "me": "Accounts of Ollama's",
    "signout": "Accounts of Ollama's",
    "experimental": "Searches of the web",
}
_UNSUPPORTED_BELOW_SERVED = {
    "/v1/chat/completions/{id}": "Stored chat completions",
    "/v1/chat/completions/{id}/{rest:path}": "Stored chat completions",
    "/v1/responses/input_tokens": "Counts of input tokens without an answer",
    "/v1/messages/batches": "Batches of messages",
    "/v1/messages/batches/{rest:path}": "Batches of messages",
}
"""Paths below those of endpoints. Otherwise ``POST /v1/responses/input_tokens`` would be a wrong
method of the response named "input_tokens"."""
_OF_BATCHES = ("files", "batches")
_WITHOUT_VERSION = ("pooling", "classify")


class UnsupportedEndpoint:
    """Answers every method with `EndpointNotSupported`."""

    def __init__(self, feature: str) -> None:
        self._feature = feature

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._feature.lower() in _OF_BATCHES:
            raise EndpointNotSupported(
                f"{self._feature} require --batch-dir, which is not set on this server."
            )
        raise EndpointNotSupported(
            f"{self._feature} are not supported: this server generates, embeds and ranks text."
        )


def unsupported_routes(*, batches: bool) -> list[Route]:
    """Return the routes of these paths; with ``batches``, files and batches are not among them."""
    left_out = _OF_BATCHES if batches else ()
    paths = {f"/v1/{name}": each for name, each in _UNSUPPORTED.items() if name not in left_out}
    paths |= {f"/{name}": _UNSUPPORTED[name] for name in _WITHOUT_VERSION}
    paths |= {f"/api/{name}": feature for name, feature in _UNSUPPORTED_OF_OLLAMA.items()}
    whole = {path + rest: each for path, each in paths.items() for rest in ("", "/{rest:path}")}
    return [
        Route(path, UnsupportedEndpoint(feature))
        for path, feature in (whole | _UNSUPPORTED_BELOW_SERVED).items()
    ]
