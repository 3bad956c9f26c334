"""Requests and answers in OpenAI's form: questions are a list, about the items of an input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from router.api.translation import with_paths
from router.decisions.questions import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    DecisionTask,
    Option,
    TypedAnswer,
    TypedQuestion,
)
from router.decisions.readout import choice_confidence, expected_level, score_confidence
from router.decisions.schemas import (
    DecisionAnswer,
    DecisionRequest,
    Items,
    ListedProbability,
    ListedQuestion,
    QuestionPart,
)
from router.decisions.wording import BINARY
from router.errors import InvalidRequest, InvalidValue, NotFound
from router.responses.schemas import CALL_OUTPUT_TYPES, CALL_TYPES, InputItem
from router.responses.translation import conversation, resolve_input
from router.schemas.conversation import ChatMessage, unsupported_content
from router.schemas.validation import validation_error

MAX_LEVELS = 100
"""OpenAI documents no limit."""


def parsed_task(body: DecisionRequest) -> DecisionTask:
    """Return the task of ``body``. Raises `InvalidRequest`, which names the field."""
    if not isinstance(body.questions, list):
        raise InvalidValue(
            "'questions' must be a list for an 'input'; questions by id need 'state'.",
            param="questions",
        )
    if not 1 <= len(body.questions) <= MAX_QUESTIONS:
        raise InvalidValue(
            f"'questions' has {len(body.questions)} questions; there must be 1 to {MAX_QUESTIONS}.",
            param="questions",
        )
    if body.images is not None:
        raise InvalidRequest("Put images into 'input', as 'input_image'.", param="images")
    questions = [_question(path, given) for path, given in with_paths(body.questions, "questions")]
    items = _converted(_with_json_texts(body.input), Items, "input")
    if isinstance(items, str):
        messages = [ChatMessage("user", items)] if items else []
        return DecisionTask(
            messages=messages, is_conversation=False, questions=questions, context_field="input"
        )
    _check_calls(items)
    resolved = resolve_input(items, lambda _: None, lambda _: None)
    return DecisionTask(
        messages=conversation(resolved),
        is_conversation=True,
        questions=questions,
        context_field="input",
    )


def _converted(given: Any, kind: Any, path: str) -> Any:
    """Return ``given``, the value at ``path``, as a ``kind``. Raises `InvalidRequest`."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        invalid = validation_error(str(error))
        inner = invalid.param or ""
        param = path + (inner if inner.startswith("[") or not inner else f".{inner}")
        reason = invalid.message.partition(": ")[2] if inner else invalid.message
        raise InvalidValue(f"Invalid '{param}': {reason or invalid.message}", param=param) from None


def _with_json_texts(given: Any) -> Any:
    """Return the items of an input with text in place of parts of JSON."""
    if not isinstance(given, list):
        return given
    found = []
    for item in given:
        if isinstance(item, dict) and isinstance(content := item.get("content"), list):
            found.append({**item, "content": [_text_part(part) for part in content]})
        else:
            found.append(item)
    return found


def _text_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "input_json":
        return {"type": "input_text", "text": _json_text(part.get("data"))}
    return part


def _json_text(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError:
        raise InvalidRequest("A value in JSON is nested too deeply.", param="input") from None


def _check_calls(items: Sequence[InputItem]) -> None:
    """Raise `InvalidRequest` if a result has no call before it."""
    called: set[str | None] = set()
    for path, item in with_paths(items, "input"):
        if item.type in CALL_TYPES:
            called.add(item.call_id)
        elif item.type in CALL_OUTPUT_TYPES and item.call_id not in called:
            raise InvalidValue(
                f"'{path}.call_id': no call before it has the id '{item.call_id}'.",
                param=f"{path}.call_id",
            )
        elif item.type == "item_reference" or (item.type is None and item.role is None):
            raise NotFound(f"'{path}': items are not stored here.", param=path)


def _question(path: str, given: Any) -> TypedQuestion:
    asked: ListedQuestion = _converted(given, ListedQuestion, path)
    text = "\n".join(_texts(asked.instructions or "", f"{path}.instructions")).strip()
    if not text and (asked.instructions is not None or asked.type == "predicate"):
        raise InvalidValue(
            f"'{path}.instructions' must not be empty.", param=f"{path}.instructions"
        )
    options = BINARY
    if asked.type == "choice":
        options = _choices(asked, f"{path}.choices")
    elif asked.type == "score":
        options = _levels(asked, f"{path}.levels")
    kind = "binary" if asked.type == "predicate" else asked.type
    return TypedQuestion(
        kind=kind, asked_as=asked.type, path=path, name=asked.name, text=text, options=options
    )


def _texts(instructions: str | list[QuestionPart], path: str) -> Iterator[str]:
    if isinstance(instructions, str):
        yield instructions
        return
    for part_path, part in with_paths(instructions, path):
        if part.type == "input_json" and part.data is not None:
            yield _json_text(part.data)
        elif part.type in ("input_text", "text") and part.text is not None:
            yield part.text
        elif part.type == "input_image":
            raise InvalidRequest(
                f"'{part_path}': put images into 'input', which all questions are about.",
                param=part_path,
                code="unsupported_content",
            )
        else:
            raise unsupported_content(part.type, part_path)


def _choices(asked: ListedQuestion, path: str) -> tuple[Option, ...]:
    choices = asked.choices or []
    _check_count(path, len(choices), 2, MAX_OPTIONS)
    seen: set[tuple[type, str | bool]] = set()
    for choice_path, choice in with_paths(choices, path):
        if (value := (type(choice.value), choice.value)) in seen:
            raise InvalidValue(
                f"'{choice_path}.value' is there twice: {choice.value!r}.",
                param=f"{choice_path}.value",
            )
        seen.add(value)
    shown = [_shown(each.value) for each in choices]
    times = Counter(shown)
    return tuple(
        Option(
            value=each.value,
            # Text that reads like a value of another type is quoted.
            text=text if times[text] == 1 else _json_text(each.value),
            description=(each.description or "").strip(),
        )
        for each, text in zip(choices, shown, strict=True)
    )


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _levels(asked: ListedQuestion, path: str) -> tuple[Option, ...]:
    levels = asked.levels or []
    _check_count(path, len(levels), 1, MAX_LEVELS)
    return tuple(
        Option(value=each.label, text=each.label, description=(each.description or "").strip())
        for each in levels
    )


def _check_count(path: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        raise InvalidValue(
            f"'{path}' has {count} entries; there must be {least} to {most}.", param=path
        )


def written_answers(
    questions: Sequence[TypedQuestion], answers: Sequence[TypedAnswer]
) -> list[DecisionAnswer]:
    return [_written(*each) for each in zip(questions, answers, strict=True)]


def _written(question: TypedQuestion, answer: TypedAnswer) -> DecisionAnswer:
    found, mass = list(answer.probabilities), answer.label_mass
    kind, name = question.asked_as, question.name
    if question.kind == "binary":
        return DecisionAnswer(type=kind, name=name, probability=found[0], label_mass=mass)
    if question.kind == "score":
        return DecisionAnswer(
            type=kind,
            name=name,
            score=expected_level(found),
            confidence=score_confidence(found),
            probabilities=[
                ListedProbability(value=level, label=str(option.value), probability=p)
                for level, (option, p) in enumerate(zip(question.options, found, strict=True))
            ],
            label_mass=mass,
        )
    return DecisionAnswer(
        type=kind,
        name=name,
        choice=question.options[found.index(max(found))].value,
        confidence=choice_confidence(found),
        probabilities=[
            ListedProbability(value=option.value, label=UNSET, probability=p)
            for option, p in zip(question.options, found, strict=True)
        ],
        label_mass=mass,
    )
