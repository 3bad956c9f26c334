"""Workloads: conversations of random words, by seed, so that no cache has seen them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

WorkloadName = Literal["fixed", "mixed", "shared-prefix", "multi-turn", "long-join"]
Endpoint = Literal["chat", "completions"]

WORDS = """time year people way day man thing woman life child world school state family
student group country problem hand part place case week company system program question work
government number night point home water room mother area money story fact month lot right
study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education""".split()
"""Each is one token of most vocabularies."""
TASK = "Tell a long story with all of these words, in this order."
"""Ends the prompts of a chat, so that answers are as long as allowed."""


class TokenRange(NamedTuple):
    """A number of tokens: fixed, or random for each request, log-uniform."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> TokenRange:
        """Return the range for ``N`` or ``N:M``. Raises ValueError."""
        least, _, most = text.partition(":")
        found = cls(int(least), int(most or least))
        if not 0 < found.least <= found.most:
            raise ValueError(f"{text!r} is not a range of tokens")
        return found

    def draw(self, rng: random.Random) -> int:
        low, high = math.log(self.least), math.log(self.most)
        return min(self.most, max(self.least, round(math.exp(rng.uniform(low, high)))))

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


class WorkloadShape(NamedTuple):
    """The lengths of a workload, in words, each about one token."""

    name: WorkloadName
    input_tokens: TokenRange
    output_tokens: TokenRange
    prefix_tokens: int = 1000
    prefixes: int = 1
    turns: int = 1
    join_tokens: int = 2000


DEFAULTS: dict[WorkloadName, WorkloadShape] = {
    "fixed": WorkloadShape("fixed", TokenRange(128, 128), TokenRange(64, 64)),
    "mixed": WorkloadShape("mixed", TokenRange(16, 1024), TokenRange(16, 128)),
    "shared-prefix": WorkloadShape("shared-prefix", TokenRange(32, 32), TokenRange(32, 32)),
    "multi-turn": WorkloadShape("multi-turn", TokenRange(64, 64), TokenRange(64, 64), turns=4),
    "long-join": WorkloadShape("long-join", TokenRange(64, 64), TokenRange(512, 512)),
}


class Question(NamedTuple):
    """One request of a conversation: the user's message, and the max length of the answer."""

    text: str
    output_tokens: int
    group: str
    """The kind under which first-token times are grouped."""


class Conversation(NamedTuple):
    questions: tuple[Question, ...]


def words(rng: random.Random, count: int) -> str:
    """Return about ``count`` tokens of text."""
    return " ".join(rng.choices(WORDS, k=count))


def conversations(workload: WorkloadShape, seed: int) -> Iterator[Conversation]:
    """Yield conversations without end, always the same for a ``seed``."""
    rng = random.Random(seed)
    prefixes = [words(rng, workload.prefix_tokens) for _ in range(workload.prefixes)]
    number = 0
    while True:
        questions = []
        for turn in range(workload.turns):
            text = words(rng, workload.input_tokens.draw(rng))
            group = ""
            if workload.name == "shared-prefix":
                text = f"{prefixes[number % len(prefixes)]} {text}"
                group = "first of its prefix" if number < len(prefixes) else "later"
            elif workload.name == "multi-turn":
                group = "first turn" if turn == 0 else "later turns"
            questions.append(Question(text, workload.output_tokens.draw(rng), group))
        yield Conversation(tuple(questions))
        number += 1


class Asking(NamedTuple):
    """How a question becomes a request."""

    endpoint: Endpoint
    model: str
    fields: dict[str, Any]
    """Extra fields of every request."""

    @property
    def path(self) -> str:
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, question: Question, before: list[dict[str, str]]) -> dict[str, Any]:
        """Return the request for ``question`` after the messages ``before`` of a chat."""
        body = {"model": self.model, "max_tokens": question.output_tokens, **self.fields}
        if self.endpoint == "completions":
            return {**body, "prompt": question.text}
        return {**body, "messages": [*before, said(question)]}


def said(question: Question) -> dict[str, str]:
    """Return ``question`` as the message of a chat."""
    return {"role": "user", "content": f"{question.text}\n\n{TASK}"}
