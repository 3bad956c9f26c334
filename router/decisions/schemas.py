"""Bodies and answers of the endpoints for decisions, in the shapes of their clients.

Three shapes share one path, and their fields tell them apart: TypeSafe's (``state``, and
``questions`` by id), OpenAI's (``input``, and a list of ``questions``), and mlx-vlm's, which is the
first with other types of questions.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from router.decisions.questions import MAX_QUESTIONS
from router.errors import ErrorInfo, InvalidRequest
from router.responses.schemas import InputItem
from router.schemas.body import RequestBody, refused
from router.schemas.other_servers import Salt

_NO_REASONING = "The answer is read at the first token, so that the model cannot reason before it."

Name = Annotated[str, Meta(max_length=512)]


class SystemOneQuestion(Struct, frozen=True, kw_only=True):
    """A question in TypeSafe's form. ``criteria`` of a ``noul`` say what is ``true`` and what is
    ``false``; those of a ``choice`` are names, or descriptions by name; those of a ``score`` are
    its levels, the lowest first. mlx-vlm has ``bool`` and ``multi_label`` too."""

    type: Literal["noul", "bool", "boolean", "choice", "score", "multi_label", "box"]
    instructions: Annotated[Any, Meta(description="Text, or an object or array.")] = None
    criteria: dict[str, Any] | list[Any] | None = None
    threshold: Annotated[float, Meta(ge=0, le=1)] | None = None


class QuestionPart(Struct, frozen=True, kw_only=True):
    """Text, or ``input_json`` with its ``data``."""

    type: str
    text: str | None = None
    data: dict[str, Any] | list[Any] | None = None


class ChoiceValue(Struct, frozen=True, kw_only=True):
    value: str | bool
    description: str | None = None


class ScaleLevel(Struct, frozen=True, kw_only=True):
    label: str
    description: str | None = None


class ListedQuestion(Struct, frozen=True, kw_only=True):
    """A question in OpenAI's form."""

    type: Literal["predicate", "choice", "score"]
    instructions: str | list[QuestionPart] | None = None
    name: Name | None = None
    choices: list[ChoiceValue] | None = None
    levels: list[ScaleLevel] | None = None


class SentPicture(Struct, frozen=True, kw_only=True):
    """A picture: its content in ``base64``, or a URL as in chats."""

    base64: str | None = None
    content_type: str | None = None
    url: str | None = None

    @property
    def source(self) -> str:
        return self.base64 or self.url or ""


def _inlined(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of ``kind`` without references."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="{name}")

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(each) for each in value]
        if not isinstance(value, dict):
            return value
        if isinstance(name := value.get("$ref"), str):
            return inline(parts[name])
        return {key: inline(each) for key, each in value.items()}

    found: dict[str, Any] = inline(schema)
    return found


_QUESTIONS = (
    Annotated[dict[str, SystemOneQuestion], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    | Annotated[list[ListedQuestion], Meta(min_length=1, max_length=MAX_QUESTIONS)]
)


class DecisionRequest(RequestBody, frozen=True, kw_only=True):
    """Questions about a ``state`` (TypeSafe's form) or an ``input`` (OpenAI's). Each question is
    answered by itself. Fields that are not named here are ignored."""

    any_media_type: ClassVar[bool] = False
    may_have_images: ClassVar[bool] = True

    model: Name | None = None
    state: Annotated[
        Any, Meta(description="What the questions are about: text, or an object or array.")
    ] = UNSET
    input: Annotated[
        Any,
        Meta(
            description="The same in OpenAI's form: text, or the items of a conversation.",
            extra_json_schema={"anyOf": [{"type": "string"}, {"type": "array"}]},
        ),
    ] = UNSET
    questions: Annotated[
        Any,
        Meta(
            description="By id (TypeSafe's form), or a list (OpenAI's).",
            extra_json_schema=_inlined(_QUESTIONS),
        ),
    ]
    images: Annotated[list[str | SentPicture], Meta(description="Pictures before `state`.")] | (
        None
    ) = None
    temperature: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=100,
                description="Divides the scores of labels: above 1, probabilities are less "
                "extreme (default: `--decision-temperature`).",
            ),
        ]
        | None
    ) = None
    samples: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=8,
                description="Orders of the options over which probabilities are averaged.",
            ),
        ]
        | None
    ) = None
    cache_salt: Salt | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None

    stream: Annotated[Any, refused(False, advice="Answers come as a whole.")] = None
    assets: Annotated[Any, refused({}, advice="Use 'images'.")] = None
    audio: Annotated[Any, refused([])] = None
    tools: Annotated[Any, refused([])] = None
    think: Annotated[Any, refused(False, advice=_NO_REASONING)] = None
    thinking: Annotated[Any, refused(False, advice=_NO_REASONING)] = None
    enable_thinking: Annotated[Any, refused(False, advice=_NO_REASONING)] = None
    reasoning_effort: Annotated[Any, refused("none", advice=_NO_REASONING)] = None
    reasoning: Annotated[Any, refused({}, {"effort": "none"}, advice=_NO_REASONING)] = None

    @property
    def is_listed(self) -> bool:
        """Whether the body has OpenAI's form."""
        return self.input is not UNSET

    @property
    def image_chars(self) -> int:
        own = sum(len(each if isinstance(each, str) else each.source) for each in self.images or ())
        if not isinstance(self.input, list):
            return own
        parts = (
            part
            for item in self.input
            if isinstance(item, dict)
            for name in ("content", "output")
            if isinstance(content := item.get(name), list)
            for part in content
            if isinstance(part, dict) and isinstance(part.get("image_url"), str)
        )
        return own + sum(len(part["image_url"]) for part in parts)

    def check(self) -> None:
        if self.is_listed and self.state is not UNSET:
            raise InvalidRequest(
                "'input' and 'state' are two forms of the same: send one of them.", param="state"
            )


Items = str | Annotated[list[InputItem], Meta(min_length=1)]


# -- answers ---------------------------------------------------------------------


class ListedProbability(Struct, frozen=True, kw_only=True):
    value: str | bool | int
    label: str | UnsetType = UNSET
    probability: float


class DecisionMetadata(Struct, frozen=True, kw_only=True):
    confidence: float
    legend: dict[str, Any] | UnsetType = UNSET


class DecisionAnswer(Struct, frozen=True, kw_only=True):
    """An answer; its type decides which fields it has."""

    type: str
    name: str | UnsetType | None = UNSET
    noul: Annotated[float, Meta(description="The probability of yes.")] | UnsetType = UNSET
    probability: float | UnsetType = UNSET
    choice: str | bool | UnsetType = UNSET
    score: Annotated[float, Meta(description="The expected level, from 0.")] | UnsetType = UNSET
    value: bool | str | float | list[str] | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    legend: dict[str, Any] | UnsetType = UNSET
    probabilities: dict[str, float] | list[ListedProbability] | UnsetType = UNSET
    metadata: DecisionMetadata | UnsetType = UNSET
    label_mass: Annotated[
        float,
        Meta(
            description="The probability that the model gives to all labels together: near 0, it "
            "would rather write something else."
        ),
    ]


class DecisionInputDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class DecisionOutputDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class DecisionUsage(Struct, frozen=True, kw_only=True):
    input_tokens: Annotated[
        int, Meta(description="What the questions share counts once, and then each question.")
    ]
    output_tokens: int = 0
    cached_tokens: int | UnsetType = UNSET
    input_tokens_details: DecisionInputDetails | UnsetType = UNSET
    output_tokens_details: DecisionOutputDetails | UnsetType = UNSET
    total_tokens: int | UnsetType = UNSET


class DecisionResponse(Struct, frozen=True, kw_only=True):
    model: str
    answers: dict[str, DecisionAnswer] | list[DecisionAnswer]
    usage: DecisionUsage


class ErrorDetail(Struct, frozen=True, kw_only=True):
    loc: list[str]
    msg: str
    type: str


class DecisionErrorResponse(Struct, frozen=True, kw_only=True):
    """An error in OpenAI's form and in TypeSafe's."""

    error: ErrorInfo
    detail: str | list[ErrorDetail]
