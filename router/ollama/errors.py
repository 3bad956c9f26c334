"""Errors in Ollama's shape."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, json

from router.errors import ApiError, ModelNotFound


class OllamaError(Struct, frozen=True):
    error: Annotated[str, Meta(description="What is wrong, in words.")]


def error_body(error: ApiError) -> bytes:
    message = error.message
    if isinstance(error, ModelNotFound):
        message = f"model not found: {message}"  # clients look for these words
    return json.encode(OllamaError(message))


def is_ollama_path(path: str) -> bool:
    """Return whether clients of ``path`` expect errors in this shape."""
    return path.startswith("/api/")
