"""Mistral's `/v1/fim/completions`, whose answers have the form of OpenAI's chat completions."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec.structs import replace

from router.api.endpoints import GenerationEndpoint
from router.api.fim import fim_prompts
from router.api.sse import encode_event
from router.fleet.engines.engine import Model
from router.generation.choice import Choice, OutputDelta
from router.generation.generation import Generation
from router.generation.sampling import fim_room
from router.openai.writer import DONE, ChatCompletionWriter, CompletionWriter
from router.schemas.completions import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    FinishReason,
)
from router.schemas.requests import FimRequest
from router.tokens.image_prompts import Prompt
from router.tokens.tokenization_cache import LengthCheck


class FimCompletions(GenerationEndpoint[FimRequest, FimRequest]):
    body_type = FimRequest
    response_type = ChatCompletion
    event_type = ChatCompletionChunk
    stream_terminator = DONE
    example: ClassVar = {"prompt": "def add(", "suffix": "return a + b", "max_tokens": 32}
    prompt_field = "prompt"

    def translate(self, body: FimRequest) -> FimRequest:
        return body

    def writer(self, body: FimRequest, model: str) -> FimWriter:
        return FimWriter(body, model)

    def tokenize_prompts(
        self,
        request: FimRequest,
        model: Model,
        cache_scope: str | None = None,
        check_length: LengthCheck | None = None,
    ) -> list[Prompt]:
        room = fim_room(model, request.max_tokens)
        return fim_prompts(model, "model").prompts(
            [request.prompt], request.suffix or "", room=room
        )


class FimWriter(ChatCompletionWriter):
    """Clients read the content of every chunk, and the usage of the last one with a choice."""

    def __init__(self, body: FimRequest, model: str) -> None:
        CompletionWriter.__init__(self, body, model)
        self._hides_reasoning = False

    def choice_end(self, generation: Generation, choice: Choice) -> bytes:
        last = self._chunk_choice(generation, choice.index, OutputDelta(), choice.finish_reason)
        return encode_event(msgspec.json.encode(self._chunk([last], generation.usage())))

    def _chunk_choice(
        self, generation: Generation, index: int, delta: OutputDelta, reason: FinishReason | None
    ) -> ChatChunkChoice:
        found = super()._chunk_choice(generation, index, delta, reason)
        return replace(found, delta=replace(found.delta, content=delta.text))
