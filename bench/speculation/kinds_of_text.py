"""Sixty prompts of twenty kinds, three of each: for `bench every-kind`."""

from __future__ import annotations

from typing import Any

from bench.speculation.repetitive import SCHEMA, Workload, code_edit, quote, records
from shared.wire import SamplingParams

LIST = "apples, pears, plums, cherries, apricots, peaches, lemons, figs, grapes, melons"
ROWS = "Ada, 36, Paris\nBruno, 41, Oslo\nChloe, 29, Vienna\nDario, 52, Athens\nElena, 33, Lisbon"
SENTENCES = (
    "The library opens at nine. Children may borrow five books. Dogs must stay outside.",
    "Our train was late. We waited in the cold station and drank tea until it came.",
    "The garden has three old trees. In spring birds build nests in them every year.",
)
ASKED = {
    "chat": "Why is the sky blue?|How do I boil an egg?|What is a good way to learn a language?",
    "story": "Tell me a story about {}.;a fox and a crow|a lonely robot|the last lighthouse keeper",
    "poem": "Write a poem about {}.;the sea|winter|an old clock",
    "email": "Write an email that {}.;asks for a day off|invites to a party|thanks for a present",
    "reasoning": "{} Think step by step.;A train goes 60 km in 45 minutes. How fast is it?"
    "|Anna is older than Ben, and Ben is older than Cleo. Who is the youngest?"
    "|I have 23 apples, eat 5 and buy twice as many as are left. How many are there?",
    "explanation": "Explain {} to a child.;photosynthesis|electricity|how bridges are built",
    "list of ideas": "List twenty {}, one a line.;animals|names for a bakery|things to pack",
    "list, repeated": f"Repeat this list {{}}: {LIST};three times|five times|twice, one a line",
    "series": "Count from {}.;1 to 60|100 down to 50|1 to 30, and write the square of each",
    "code": "Write a Python function that {}.;sorts a list|reads a CSV file|checks a password",
    "code, explained": "What does this do, line by line?\n\nfor i in range({}):\n    print(i * i)\n"
    ";10|3, 9|0, 20, 2",
    "table": f"Make a Markdown table with {{}} of:\n{ROWS};name, age and city|name and city|all",
    "JSON, free": f"Write as a JSON list of objects with {{}}:\n{ROWS}"
    ";name, age and city|city and name|name and age",
    "CSV": f"Add {{}} to each line, and write all lines:\n{ROWS};the country|a number|',ok'",
}
EACH = {
    "translation": "Translate to French: {}",
    "rewriting": "Write the same text in capital letters: {}",
    "summary": "Summarize in one sentence, then write the text once more: {}",
}
SAMPLED = ("chat", "story", "poem", "email", "explanation", "list of ideas")
TOKENS = (64, 256, 64)
"""Max tokens of the answers to the three prompts of each kind."""


def _sampled(number: int) -> dict[str, Any]:
    return {"sampling": SamplingParams(seed=number, temperature=0.8)}


def _asked() -> dict[str, list[str]]:
    found = {}
    for kind, asked in ASKED.items():
        template, _, words = asked.rpartition(";")
        found[kind] = [(template or "{}").format(word) for word in words.split("|")]
    for kind, template in EACH.items():
        found[kind] = [template.format(sentences) for sentences in SENTENCES]
    return found


def _questions(kind: str, asked: list[str]) -> Workload:
    def text(number: int) -> str:
        return asked[number % len(asked)]

    if kind in SAMPLED:
        return Workload(text, is_chat=True, fields=_sampled)
    return Workload(text, is_chat=True)


KINDS = {kind: _questions(kind, asked) for kind, asked in _asked().items()} | {
    "code edit": Workload(lambda number: code_edit(number, most=600)),
    "quoting": Workload(lambda number: quote(number, most=400)),
    "JSON to a schema": Workload(records, fields=lambda number: {"grammar": SCHEMA}),
}
