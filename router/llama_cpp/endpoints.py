"""`/infill`."""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace

from router.api.endpoints import GenerationEndpoint
from router.api.operations import Operation, generation_operation
from router.errors import InfillNotSupported
from router.fleet.engines.engine import Model
from router.fleet.router import Router
from router.generation.sampling import fim_room
from router.llama_cpp.parsers import LimitedReplyParser, SilentReplyParser
from router.llama_cpp.schemas import InfillAnswer, InfillRequest
from router.llama_cpp.writer import InfillWriter
from router.tokens.fim import OtherFile
from router.tokens.image_prompts import Prompt
from router.tokens.reply_parser import ReplyParser
from router.tokens.tokenization_cache import LengthCheck

_NO_NAME = "tmp"
"""llama.cpp's name of a file without one."""


def operations(router: Router) -> list[Operation]:
    summary, errors = "Fill a gap in a text", (InfillNotSupported,)
    return [
        generation_operation("/infill", Infill(router), summary, "llama.cpp", errors=errors),
    ]


class Infill(GenerationEndpoint[InfillRequest, InfillRequest]):
    body_type = InfillRequest
    response_type = event_type = InfillAnswer
    example: ClassVar = {
        "input_prefix": "def add(a, b):\n",
        "input_suffix": "\n\nprint(add(1, 2))\n",
        "n_predict": 32,
    }
    prompt_field = "input_prefix"
    field_names: ClassVar = {"max_tokens": "n_predict", "prompt": "input_prefix"}

    def translate(self, body: InfillRequest) -> InfillRequest:
        # Editors send no temperature, but samplers that prefer the most likely text.
        return body if body.temperature is not None else replace(body, temperature=0.0)

    def writer(self, body: InfillRequest, model: str) -> InfillWriter:
        return InfillWriter(body, model)

    def max_tokens(self, request: InfillRequest, model: Model) -> int | None:
        return 1 if request.max_tokens == 0 else request.max_tokens

    def tokenize_prompts(
        self,
        request: InfillRequest,
        model: Model,
        cache_scope: str | None = None,
        check_length: LengthCheck | None = None,
    ) -> list[Prompt]:
        fim = model.renderer.fim
        if fim is None:
            raise InfillNotSupported(
                f"Infill is not supported by this model: the tokenizer of {model.names[0]} has no "
                "tokens for fill-in-the-middle that this server knows."
            )
        others = [
            OtherFile(each.filename or _NO_NAME, each.text) for each in request.input_extra or ()
        ]
        return fim.prompts(
            [request.input_prefix + request.prompt],
            request.input_suffix,
            others,
            room=fim_room(model, self.max_tokens(request, model)),
        )

    def reply_parser(self, request: InfillRequest, model: Model, prompt: list[int]) -> ReplyParser:
        if request.max_tokens == 0:
            return SilentReplyParser()
        limit_ms = request.t_max_predict_ms or 0
        max_s = limit_ms / 1000 if limit_ms > 0 else None
        return LimitedReplyParser(max_s, request.n_indent or 0)
