"""Questions of several kinds, by number, for answers that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.speculation.repetitive import CITIES, QUESTIONS, code_edit

TOPICS = (
    "a lighthouse, a bakery, the sea, an old clock, a train at night, a garden, a lost letter, "
    "two brothers, the first snow, a market, a violin, a bridge, a mountain village, a storm"
).split(", ")
TASKS = (
    "reverses a string, counts the words of a text, finds the largest number in a list, checks "
    "whether a number is prime, merges two sorted lists, converts miles to kilometres, removes "
    "duplicates from a list, sums the digits of a number, finds the most common letter"
).split(", ")
LANGUAGES = "Python JavaScript C Go Rust".split()
CODE_CHARACTERS = 900


class ChatQuestion(NamedTuple):
    """A question, and the one that follows its answer."""

    text: str
    then: str = ""


def _chat(number: int) -> ChatQuestion:
    return ChatQuestion(QUESTIONS[number % len(QUESTIONS)])


def _story(number: int) -> ChatQuestion:
    place = CITIES[number // len(TOPICS) % len(CITIES)]
    return ChatQuestion(f"Tell me a story about {TOPICS[number % len(TOPICS)]} in {place}.")


def _code(number: int) -> ChatQuestion:
    language = LANGUAGES[number // len(TASKS) % len(LANGUAGES)]
    return ChatQuestion(f"Write a function in {language} that {TASKS[number % len(TASKS)]}.")


def _list(number: int) -> ChatQuestion:
    count, place = 5 + number % 7, CITIES[number % len(CITIES)]
    return ChatQuestion(f"List {count} things to see in {place}, with a sentence about each.")


def _edit(number: int) -> ChatQuestion:
    return ChatQuestion(code_edit(number, most=CODE_CHARACTERS))


def _talk(number: int) -> ChatQuestion:
    return ChatQuestion(QUESTIONS[(number + 7) % len(QUESTIONS)], "Say the same in other words.")


KINDS: dict[str, Callable[[int], ChatQuestion]] = {
    "chat": _chat,
    "story": _story,
    "code": _code,
    "list": _list,
    "edit": _edit,
    "talk": _talk,
}
"""``edit`` has a prompt of some 300 tokens, ``talk`` a second question after an answer."""


def questions(kinds: Sequence[str], first: int, count: int) -> list[tuple[str, ChatQuestion]]:
    """Return ``count`` questions with their kinds, which take turns, from number ``first`` on."""
    numbers = range(first, first + count)
    names = [kinds[number % len(kinds)] for number in numbers]
    found = zip(names, numbers, strict=True)
    return [(name, KINDS[name](number // len(kinds))) for name, number in found]
