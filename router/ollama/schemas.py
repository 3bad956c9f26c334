"""Request bodies of Ollama's API."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from router.encoding.embedding import MAX_TEXTS
from router.errors import InvalidRequest, InvalidValue
from router.schemas.body import RequestBody, TokenId, refused
from router.schemas.conversation import MAX_TOOLS, Tool
from router.schemas.requests import MAX_STOP_STRINGS, LogprobsCount, StopString
from router.schemas.sampling import Penalty

_DURATION = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:ns|us|µs|μs|ms|s|m|h))+")
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|μs|ms|s|m|h)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}

ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
KeepAlive = Annotated[
    float | Annotated[str, Meta(max_length=64)],
    Meta(description="Seconds, or a duration such as `5m`; negative: forever."),
]
MAX_IMAGES = 256
"""Of a message, or of a prompt."""
_MAX = 2**31 - 1
# Some clients send integers as floats (4096.0).
Natural = Annotated[int, Meta(ge=0, le=_MAX)] | Annotated[float, Meta(ge=0, le=_MAX)]
Limit = Annotated[int, Meta(ge=-2, le=_MAX)] | Annotated[float, Meta(ge=-2, le=_MAX)]
Extent = Annotated[int, Meta(ge=-1, le=_MAX)] | Annotated[float, Meta(ge=-1, le=_MAX)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | Annotated[float, Meta(ge=-1, le=2**53)]


class OllamaOptions(Struct, frozen=True, kw_only=True):
    """Options of generation. ``ignore_eos`` is an extension of this server. Unknown options are
    accepted and have no effect."""

    num_predict: Limit | None = None
    num_ctx: Natural | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Extent | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=100)] | None = None
    repeat_last_n: Extent | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None


class OllamaFunctionCall(Struct, frozen=True):
    name: Annotated[str, Meta(max_length=1024)]
    arguments: dict[str, Any] | str | None = None


class OllamaToolCall(Struct, frozen=True):
    """A tool call in an earlier answer."""

    function: OllamaFunctionCall
    id: str | None = None


class OllamaMessage(Struct, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[str], Meta(max_length=MAX_IMAGES)] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaModelUse(RequestBody, frozen=True, kw_only=True):
    """Fields of all endpoints that use a model."""

    any_media_type = True

    model: ModelName
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None

    @property
    def keep_s(self) -> float | None:
        """The seconds without a request until the model is unloaded; infinity: never, None: as
        configured. Raises `InvalidValue`."""
        if self.keep_alive is None:
            return None
        seconds = _seconds(self.keep_alive)
        return math.inf if seconds < 0 else seconds

    def check(self) -> None:
        _ = self.keep_s


class OllamaRequest(OllamaModelUse, frozen=True, kw_only=True):
    """Fields of both generating endpoints."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobsCount | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer: the request only loads or unloads the model."""
        return False

    def check(self) -> None:
        super().check()
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise InvalidValue("'format' must be \"json\" or a JSON schema.", param="format")


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    """A conversation to answer. Without messages it loads the model, or unloads it if
    ``keep_alive`` is 0."""

    may_have_images = True

    messages: Annotated[list[OllamaMessage], Meta(max_length=100_000)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None

    @property
    def image_chars(self) -> int:
        return sum(len(image) for each in self.messages or () for image in each.images or ())

    @property
    def is_empty(self) -> bool:
        return not self.messages


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    """A prompt to answer. Without one it loads the model, or unloads it if ``keep_alive`` is 0."""

    may_have_images = True

    prompt: str = ""
    suffix: Annotated[
        str | None, Meta(description="The text after the answer, for models that can insert.")
    ] = None
    system: str | None = None
    raw: bool | None = None
    images: Annotated[list[str], Meta(max_length=MAX_IMAGES)] | None = None
    context: Annotated[list[TokenId], Meta(max_length=2**20)] | None = None

    template: Annotated[Any, refused("", advice="Use '--chat-template', or 'raw'.")] = None

    @property
    def image_chars(self) -> int:
        return sum(map(len, self.images or ()))

    @property
    def is_empty(self) -> bool:
        return not self.prompt and not self.suffix

    def check(self) -> None:
        super().check()
        plain = "raw" if self.raw else "suffix" if self.suffix else None
        for name in ("system", "context", "images"):
            if plain and getattr(self, name):
                raise InvalidRequest(f"'{plain}' cannot be combined with '{name}'.", param=name)
        if self.raw and self.suffix:
            raise InvalidRequest("'raw' cannot be combined with 'suffix'.", param="suffix")


class OllamaEmbedRequest(OllamaModelUse, frozen=True, kw_only=True):
    """Texts to embed. Without texts it only loads the model."""

    texts_field: ClassVar = "input"

    input: str | Annotated[list[str], Meta(max_length=MAX_TEXTS)] = ""
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=_MAX)] | None = None

    @property
    def texts(self) -> list[str]:
        if isinstance(self.input, list):
            return self.input
        return [self.input] if self.input else []


class OllamaEmbeddingRequest(OllamaModelUse, frozen=True, kw_only=True):
    """A text to embed. Without one it only loads the model."""

    texts_field: ClassVar = "prompt"
    truncate: ClassVar = True
    dimensions: ClassVar = None

    prompt: str = ""

    @property
    def texts(self) -> list[str]:
        return [self.prompt] if self.prompt else []


class OllamaModelRequest(RequestBody, frozen=True, kw_only=True):
    """The name of a model. ``name`` is the deprecated form of ``model``."""

    any_media_type = True

    model: ModelName | None = None
    name: ModelName | None = None

    @property
    def wanted(self) -> str:
        return self.model or self.name or ""

    def check(self) -> None:
        if not self.wanted:
            raise InvalidRequest("'model' is required.", param="model")


class OllamaPullRequest(OllamaModelRequest, frozen=True, kw_only=True):
    stream: bool | None = None


def _seconds(given: float | str) -> float:
    """Return a duration in seconds. Text is in Go's format. Raises `InvalidValue`."""
    if isinstance(given, str):
        text = given.strip()
        if _DURATION.fullmatch(text):
            size = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
            return -size if text.startswith("-") else size
        try:
            given = float(text)
        except ValueError:
            given = math.nan
    if math.isfinite(given):
        return given
    raise InvalidValue(
        "'keep_alive' must be a number of seconds or a duration like '5m'.", param="keep_alive"
    )
