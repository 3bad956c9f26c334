"""Texts whose answers repeat earlier text, and some that do not: for `bench speculation`."""

from __future__ import annotations

import bisect
import calendar
import colorsys
import fnmatch
import heapq
import inspect
import json
import posixpath
import random
import shlex
import statistics
import string
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

from shared.wire import Grammar, SamplingParams

MODULES = (bisect, calendar, colorsys, fnmatch, heapq, posixpath, shlex, statistics, string)
CODE_LENGTHS, QUOTE_LENGTH = range(400, 1200), 600
"""Characters."""
QUESTIONS = """Why is the sky blue?
Write a short poem about a lighthouse.
How do I boil an egg?
Explain photosynthesis to a child.
What should I see in Rome in two days?
Give me three ideas for a birthday present.
What is the difference between a virus and a bacterium?
Write an email that asks for a day off.
How does a bicycle stay upright?
Tell me a story about a fox and a crow.
What is a good way to learn a language?
Why do leaves change their colour?
Describe the taste of a mango.
How are bridges built?
What did people eat in the Middle Ages?
Suggest a name for a small bakery.""".splitlines()
NAMES = (
    "Ada Bruno Chloe Dario Elena Farid Greta Hugo Ines Jonas Kira Luca Mira Nils Olga Piet".split()
)
CITIES = "Paris Lisbon Vienna Oslo Dublin Prague Athens Madrid".split()


@dataclass(frozen=True)
class Workload:
    """Requests of one kind: text ``number``, and fields of `Submit`."""

    text: Callable[[int], str]
    is_chat: bool = False
    fields: Callable[[int], dict[str, Any]] = field(default=lambda number: {})


def code_edit(number: int, most: int | None = None) -> str:
    """Ask for a change to a file, ``most`` characters of which are given."""
    name, code = CODE[number % len(CODE)]
    return (
        f"The file before:\n\n```python\n{code[:most]}```\n\n"
        f"The same file with `{name}` renamed to `new_{name}`:\n\n```python\n"
    )


def quote(number: int, most: int | None = None) -> str:
    """Ask to repeat a text, ``most`` characters of it."""
    text = QUOTES[number % len(QUOTES)][:most]
    return f"The text:\n\n{text}\n\nThe same text once more, word for word:\n\n"


def records(number: int, people: int = 4) -> str:
    first, *others = [_person(number, i) for i in range(people)]
    lines = "\n".join(", ".join(map(str, person.values())) for person in others)
    known = ", ".join(map(str, first.values()))
    return f"{known}\n{json.dumps([first])}\n\n{lines}\n"


def _person(number: int, index: int) -> dict[str, Any]:
    rng = random.Random(100 * number + index)
    name = rng.choice(NAMES)
    return {
        "first_name": name,
        "year_of_birth": rng.randrange(1940, 2010),
        "city_of_residence": rng.choice(CITIES),
        "email_address": f"{name.lower()}{rng.randrange(100)}@example.org",
    }


def _schema() -> str:
    kinds = {name: type(value) for name, value in _person(0, 0).items()}
    one = {
        "type": "object",
        "properties": {n: {"type": "integer" if k is int else "string"} for n, k in kinds.items()},
        "required": list(kinds),
        "additionalProperties": False,
    }
    return json.dumps({"type": "array", "items": one, "minItems": 6})


def _functions() -> Iterator[tuple[str, str]]:
    for module in MODULES:
        for name, function in sorted(vars(module).items()):
            if inspect.isfunction(function) and function.__code__.co_filename == module.__file__:
                code = textwrap.dedent(inspect.getsource(function))
                if len(code) in CODE_LENGTHS:
                    yield name, code


CODE = list(_functions())
QUOTES = [text.strip()[:QUOTE_LENGTH] for _, text in sorted(topics.items()) if len(text) > 1000]
SCHEMA = Grammar(kind="json_schema", source=_schema())
WORKLOADS = {
    "code edit": Workload(code_edit),
    "quoting": Workload(quote),
    "JSON": Workload(records, fields=lambda number: {"grammar": SCHEMA}),
    "chat": Workload(
        lambda number: QUESTIONS[number % len(QUESTIONS)],
        is_chat=True,
        fields=lambda number: {"sampling": SamplingParams(seed=number, temperature=0.8)},
    ),
}
