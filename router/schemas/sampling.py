"""Fields of all APIs that control how an answer is generated."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from router.errors import InvalidRequest
from router.schemas.body import RequestBody, TokenId
from router.schemas.other_servers import OtherServersFields, Salt, Seed

MAX_BIASES = 1024
REPETITION_CONTEXT_SIZE = 20
"""mlx-lm's default of ``repetition_context_size``."""
REPEAT_LAST_N = 64
"""llama.cpp's default of ``repeat_last_n``."""
_NAMES = (
    ("repetition_penalty", "repeat_penalty"),
    ("repetition_context_size", "repeat_last_n"),
)
"""Our names of the penalty of repetitions, and llama.cpp's."""

Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingRequest(OtherServersFields, RequestBody, frozen=True, kw_only=True):
    """Fields of all APIs that control how an answer is generated. None: not set."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1, description="0: the most likely token.")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    repetition_context_size: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=MAX_BIASES)] | None = None
    seed: Seed | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Salt | None = None

    @property
    def repetition(self) -> tuple[float, int]:
        """The repetition penalty, and to how many of the last tokens it applies (0: all). Raises
        `InvalidRequest` if it is given under both of its names."""
        for ours, theirs in _NAMES:
            if getattr(self, ours) is not None and getattr(self, theirs) is not None:
                raise InvalidRequest(f"'{theirs}' and '{ours}' are the same field.", param=theirs)
        penalty, size = self.repetition_penalty or 1.0, self.repetition_context_size
        if self.repeat_penalty is not None:
            penalty = self.repeat_penalty or 1.0
            size = REPEAT_LAST_N if size is None else size
        if self.repeat_last_n == 0:
            return 1.0, 0
        if self.repeat_last_n is not None:
            size = max(0, self.repeat_last_n)
        return penalty, REPETITION_CONTEXT_SIZE if size is None else size


def sampling_fields(request: SamplingRequest) -> dict[str, Any]:
    """Return the fields shared by requests of all APIs, by name."""
    return {name: getattr(request, name) for name in SamplingRequest.__struct_fields__}
