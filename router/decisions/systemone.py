"""Requests and answers in TypeSafe's form, which mlx-vlm's extends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from router.api.translation import joined_content
from router.decisions.errors import InvalidDecision
from router.decisions.questions import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    DecisionTask,
    Kind,
    Option,
    TypedAnswer,
    TypedQuestion,
)
from router.decisions.readout import choice_confidence, expected_level, score_confidence
from router.decisions.schemas import (
    DecisionAnswer,
    DecisionMetadata,
    DecisionRequest,
    SystemOneQuestion,
)
from router.decisions.wording import BINARY
from router.errors import NotSupported
from router.schemas.conversation import ChatMessage
from router.schemas.images import SentImage
from router.schemas.validation import validation_error

MAX_LEVELS = 10
_KINDS: Mapping[str, Kind] = {
    "noul": "binary",
    "bool": "binary",
    "boolean": "binary",
    "choice": "choice",
    "score": "score",
    "multi_label": "multi",
}


def parsed_task(body: DecisionRequest) -> DecisionTask:
    """Return the task of ``body``. Raises `InvalidDecision` and `NotSupported`."""
    if not isinstance(body.questions, dict):
        raise InvalidDecision(
            "'questions' must be an object, by id, for a 'state'; a list of questions needs "
            "'input'.",
            "questions",
        )
    if not 1 <= len(body.questions) <= MAX_QUESTIONS:
        raise InvalidDecision(
            f"'questions' has {len(body.questions)} questions; there must be 1 to {MAX_QUESTIONS}.",
            "questions",
        )
    if body.state is UNSET and not body.images:
        raise InvalidDecision("'state' is required.", "state", code="missing")
    questions = [_question(name, given) for name, given in body.questions.items()]
    state = None if body.state is UNSET else body.state
    texts = [] if state is None else [as_text(state, "state")]
    content = joined_content([*_images(body), *texts], "")
    messages = [ChatMessage("user", content)] if content else []
    return DecisionTask(messages=messages, is_conversation=False, questions=questions)


def _images(body: DecisionRequest) -> list[SentImage]:
    found = []
    for number, each in enumerate(body.images or ()):
        path = f"images[{number}]"
        if isinstance(each, str):
            found.append(SentImage(type="image", source=each, is_url=True, path=path))
            continue
        if (each.base64 is None) == (each.url is None):
            raise InvalidDecision(f"'{path}' must have either 'base64' or 'url'.", path)
        found.append(
            SentImage(
                type="image",
                source=each.source,
                is_url=each.base64 is None,
                path=path,
                media_type=each.content_type,
            )
        )
    return found


def as_text(value: Any, *path: str) -> str:
    """Return a value as the model reads it: text as it is, anything else as JSON in its order."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        name = ".".join(path)
        raise InvalidDecision(f"'{name}' is nested too deeply.", *path) from None


def _question(name: str, given: Any) -> TypedQuestion:
    path = "questions", name
    try:
        asked = msgspec.convert(given, SystemOneQuestion)
    except msgspec.ValidationError as error:
        invalid = validation_error(str(error))
        field = (invalid.param,) if invalid.param else ()
        raise InvalidDecision(f"Question '{name}': {invalid.message}", *path, *field) from None
    if asked.type == "box":
        raise NotSupported(
            f"Question '{name}': questions of type 'box' are not supported.",
            param=f"questions.{name}.type",
        )
    kind = _KINDS[asked.type]
    text = "" if asked.instructions is None else as_text(asked.instructions, *path, "instructions")
    text = text.strip()
    if kind == "binary":
        options = _binary_options(asked, name)
        if not text and not any(option.description for option in options):
            raise InvalidDecision(
                f"Question '{name}' needs 'instructions' or 'criteria'.", *path, "instructions"
            )
    elif kind == "score":
        options = _levels(asked, name)
    else:
        options = _choices(asked, name)
    return TypedQuestion(
        kind=kind,
        asked_as=asked.type,
        path=".".join(path),
        name=name,
        text=text,
        options=options,
        threshold=0.5 if asked.threshold is None else asked.threshold,
    )


def _binary_options(asked: SystemOneQuestion, name: str) -> tuple[Option, ...]:
    path = "questions", name, "criteria"
    criteria = asked.criteria or {}
    if not isinstance(criteria, dict) or not criteria.keys() <= {"true", "false"}:
        raise InvalidDecision(
            f"Question '{name}': 'criteria' must be an object with 'true' and 'false'.", *path
        )
    described = (criteria.get("true"), criteria.get("false"))
    return tuple(
        Option(
            value=each.value,
            text=each.text,
            description="" if given is None else as_text(given, *path).strip(),
        )
        for each, given in zip(BINARY, described, strict=True)
    )


def _levels(asked: SystemOneQuestion, name: str) -> tuple[Option, ...]:
    path = "questions", name, "criteria"
    levels = asked.criteria
    if not isinstance(levels, list):
        raise InvalidDecision(
            f"Question '{name}': 'criteria' must be a list of levels, the lowest first.", *path
        )
    if not 1 <= len(levels) <= MAX_LEVELS:
        raise InvalidDecision(
            f"Question '{name}' has {len(levels)} levels; there must be 1 to {MAX_LEVELS}.", *path
        )
    if any(not isinstance(level, str | dict | list) or not level for level in levels):
        raise InvalidDecision(f"Question '{name}': every level needs a description.", *path)
    return tuple(
        Option(value=str(number), text=as_text(level, *path).strip(), given=level)
        for number, level in enumerate(levels)
    )


def _choices(asked: SystemOneQuestion, name: str) -> tuple[Option, ...]:
    path = "questions", name, "criteria"
    criteria = asked.criteria
    if isinstance(criteria, dict):
        named = list(criteria.items())
    elif isinstance(criteria, list) and all(isinstance(each, str) for each in criteria):
        named = [(each, None) for each in criteria]
    else:
        raise InvalidDecision(
            f"Question '{name}': 'criteria' must be an object of descriptions by name, or a list "
            "of names.",
            *path,
        )
    if not 1 <= len(named) <= MAX_OPTIONS:
        raise InvalidDecision(
            f"Question '{name}' has {len(named)} options; there must be 1 to {MAX_OPTIONS}.", *path
        )
    seen: set[str] = set()
    for option, _ in named:
        if not option.strip() or option in seen:
            what = "a name that is empty" if not option.strip() else f"'{option}' twice"
            raise InvalidDecision(f"Question '{name}': 'criteria' has {what}.", *path)
        seen.add(option)
    return tuple(
        Option(
            value=option,
            text=option,
            description="" if given is None else as_text(given, *path).strip(),
        )
        for option, given in named
    )


# -- answers ---------------------------------------------------------------------


def written_answers(
    questions: Sequence[TypedQuestion], answers: Sequence[TypedAnswer], *, with_values: bool
) -> dict[str, DecisionAnswer]:
    """Return the answers by id. ``with_values``: also in mlx-vlm's form, whose clients read
    ``value`` and ``metadata``."""
    return {
        question.name or "": _written(question, answer, with_values)
        for question, answer in zip(questions, answers, strict=True)
    }


def has_other_types(questions: Sequence[TypedQuestion]) -> bool:
    """Return whether any of ``questions`` has a type that only mlx-vlm's form has."""
    return any(each.asked_as in ("bool", "multi_label") for each in questions)


def _written(question: TypedQuestion, answer: TypedAnswer, with_values: bool) -> DecisionAnswer:
    mass, found = answer.label_mass, list(answer.probabilities)
    by_value = dict(zip((str(each.value) for each in question.options), found, strict=True))
    if question.kind == "binary":
        if question.asked_as == "bool":
            value = found[0] >= question.threshold
            return DecisionAnswer(type="bool", value=value, probability=found[0], label_mass=mass)
        return DecisionAnswer(type="noul", noul=found[0], label_mass=mass)
    if question.kind == "multi":
        applying = [each for each, p in by_value.items() if p >= question.threshold]
        return DecisionAnswer(
            type="multi_label", value=applying, probabilities=dict(by_value), label_mass=mass
        )
    if question.kind == "choice":
        best = str(question.options[found.index(max(found))].value)
        confidence = choice_confidence(found)
        metadata = DecisionMetadata(confidence=confidence)
        return DecisionAnswer(
            type="choice",
            choice=best,
            confidence=confidence,
            probabilities=dict(by_value),
            value=best if with_values else UNSET,
            metadata=metadata if with_values else UNSET,
            label_mass=mass,
        )
    score, confidence = expected_level(found), score_confidence(found)
    legend = {str(option.value): option.given for option in question.options}
    metadata = DecisionMetadata(confidence=confidence, legend=legend)
    return DecisionAnswer(
        type="score",
        score=score,
        confidence=confidence,
        legend=legend,
        probabilities=dict(by_value),
        value=score if with_values else UNSET,
        metadata=metadata if with_values else UNSET,
        label_mass=mass,
    )
