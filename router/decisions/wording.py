"""The texts in which the model reads questions. Each asks for the label of one option."""

from __future__ import annotations

from collections.abc import Sequence

from router.decisions.questions import Option, TypedQuestion

INSTRUCTIONS = (
    "You answer one question about the text or the conversation that you are given. "
    "Reply with the label of your answer and nothing else."
)
"""The system message."""


def binary_text(question: TypedQuestion, labels: Sequence[str], order: Sequence[int]) -> str:
    """Return the text of a question that is true or false, whose ``labels`` are in the order of
    its options. ``order`` is that in which they are mentioned."""
    lines = _opening(question)
    described = [
        f"{labels[number]}: {question.options[number].description}"
        for number in order
        if question.options[number].description
    ]
    named = " or ".join(labels[number] for number in order)
    if labels[0].lower() not in ("yes", "true"):
        meanings = [f"{labels[number]} means {('yes', 'no')[number]}" for number in order]
        named += f" ({', '.join(meanings)})"
    return "\n".join([*lines, *described, f"Answer {named}."])


def label_text(question: TypedQuestion, option: Option) -> TypedQuestion:
    """Return the question whether one label of a ``multi`` question applies."""
    described = f" ({option.description})" if option.description else ""
    asked = f"{question.text}\n" if question.text else ""
    return TypedQuestion(
        kind="binary",
        asked_as="bool",
        path=question.path,
        text=f'{asked}Does the label "{option.text}"{described} apply?',
        options=BINARY,
    )


BINARY: tuple[Option, ...] = (Option(value=True, text="yes"), Option(value=False, text="no"))
"""The options of a question that is true or false."""


def listed_text(question: TypedQuestion, labels: Sequence[str], order: Sequence[int]) -> str:
    """Return the text of a question whose options are listed in ``order``, each with the label
    beside it."""
    noun = "level" if question.kind == "score" else "option"
    lines = [
        f"{label}. {_shown(question, number)}" for label, number in zip(labels, order, strict=True)
    ]
    return "\n".join([*_opening(question), *lines, f"Answer with the label of one {noun}."])


def _opening(question: TypedQuestion) -> list[str]:
    return [f"Question: {question.text}"] if question.text else ["Question: What applies?"]


def _shown(question: TypedQuestion, number: int) -> str:
    option = question.options[number]
    return f"{option.text}: {option.description}" if option.description else option.text
