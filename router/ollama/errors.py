"""Errors in Ollama's format."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, json

from router.errors import ApiError, ModelNotFound


class OllamaError(Struct, frozen=True):
    error: Annotated[str, Meta(description="The error message.")]


def error_body(error: ApiError) -> bytes:
    message = error.message
    if isinstance(error, ModelNotFound):
        message = f"model not found: {message}"  # clients look for these words
    return json.encode(OllamaError(message))


def is_ollama_path(path: str) -> bool:
    """Return whether clients of ``path`` expect errors in this format."""
    return path.startswith("/api/")
