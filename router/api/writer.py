"""The interface of the writers of each API's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.errors import ApiError
from router.generation.choice import Choice, OutputDelta
from router.generation.generation import Generation


class OutputWriter(Protocol):
    """Writes the answer to one request, complete or as the events of a stream.

    A stream is written in this order: `opening`; `stream_start`; for each choice its `delta`s and,
    once its ``finish_reason`` is set, `choice_end`; `stream_end`. `error` may replace the rest at
    any time after `opening`. The returned bytes are sent as they are and may be empty.
    """

    id: str
    stream_type: bytes
    """The media type of a stream."""
    repeats_request: bool
    """Whether complete answers, and all events of a stream but its deltas, may contain the request
    and the answer so far. If these are large, they are written on a thread."""

    @property
    def keep_alive(self) -> bytes:
        """Sent while there is no event, to keep the connection alive."""

    def opening(self) -> bytes:
        """Return the events that need no engine. May run on any thread."""

    def full_response(self, generation: Generation, deltas: Sequence[OutputDelta]) -> list[bytes]:
        """Return the complete answer of a finished ``generation``, in pieces; ``deltas`` has one
        per choice."""

    def stream_start(self, generation: Generation) -> bytes: ...

    def delta(self, generation: Generation, choice: Choice, delta: OutputDelta) -> bytes: ...

    def choice_end(self, generation: Generation, choice: Choice) -> bytes: ...

    def stream_end(self, generation: Generation) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...
