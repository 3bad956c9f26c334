"""The request and the answers of llama.cpp's `/infill` (``tools/server/README.md``)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from router.schemas.body import refused, unless
from router.schemas.completions import ComputedPrompt
from router.schemas.other_servers import Seed
from router.schemas.requests import GenerationRequest

MAX_FILES = 1024
MAX_FIELDS = 64

Milliseconds = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class InfillFile(Struct, frozen=True, kw_only=True):
    """Another file of the repository, or a part of one."""

    text: str
    filename: str | None = None


class InfillRequest(GenerationRequest, frozen=True, kw_only=True):
    """The text around a gap. ``prompt`` is the current line up to the cursor, after
    ``input_prefix``. With an ``n_predict`` of 0, the prompt is only put into the cache."""

    may_be_empty: ClassVar = True

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillFile], Meta(max_length=MAX_FILES)] | None = None
    prompt: str = ""
    t_max_predict_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="End the answer after this time, counted from its first token, if it has a "
            "line end already. 0, -1: no limit."
        ),
    ] = None
    n_indent: (
        Annotated[
            int,
            Meta(ge=0, le=2**31 - 1, description="End the answer at a line with less indentation."),
        ]
        | None
    ) = None
    response_fields: (
        Annotated[
            list[str],
            Meta(
                max_length=MAX_FIELDS,
                description="Return only these; `timings/prompt_n` is a field of `timings`.",
            ),
        ]
        | None
    ) = None
    samplers: Annotated[
        list[str] | str | None, Meta(description="Accepted, without effect: the order is fixed.")
    ] = None
    t_max_prompt_ms: Annotated[
        Milliseconds | None, Meta(description="Accepted, without effect, as in llama.cpp.")
    ] = None
    seed: Annotated[Seed | None, unless(-1, 2**32 - 1)] = None

    n: Annotated[Any, refused(1)] = None
    prompt_logprobs: Annotated[Any, refused()] = None

    @property
    def continues_prompt(self) -> bool:
        return True


class InfillTimings(Struct, frozen=True, kw_only=True):
    cache_n: Annotated[int, Meta(description="Tokens of the prompt found in a cache.")]
    prompt_n: Annotated[int, Meta(description="Tokens of the prompt that were computed.")]
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillSettings(Struct, frozen=True, kw_only=True):
    """The parameters that took effect."""

    n_predict: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop: list[str]


class InfillAnswer(Struct, frozen=True, kw_only=True):
    """A complete answer, or an event of a stream. Events before the last have neither ``timings``
    nor what follows ``model``; ``response_fields`` chooses among the fields."""

    index: int | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET
    id_slot: int | UnsetType = UNSET
    stop: bool | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: Annotated[
        int | UnsetType, Meta(description="Tokens of the prompt, computed or cached.")
    ] = UNSET
    prompt_progress: ComputedPrompt | UnsetType = UNSET
    model: str | UnsetType = UNSET
    generation_settings: InfillSettings | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: Annotated[
        bool | UnsetType, Meta(description="Whether text was left out to fit the context.")
    ] = UNSET
    stop_type: Annotated[
        Literal["eos", "limit", "word"] | UnsetType,
        Meta(description="`limit`: by `n_predict`, `t_max_predict_ms` or `n_indent`."),
    ] = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: Annotated[
        int | UnsetType, Meta(description="Tokens of the prompt found in a cache.")
    ] = UNSET
    timings: InfillTimings | UnsetType = UNSET
