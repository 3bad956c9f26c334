"""The requests of `tests.e2e.chaos`, and the comparison of their answers."""

from __future__ import annotations

import base64
import io
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
VECTOR_ERROR = 1e-5
"""Between vectors of length 1 of the same text, in batches of any size. On CPUs they are equal."""
CLEAR_GAP = 1e-3
"""The least lead of the best token over the second, as log-probability, in a greedy answer of an
engine that does not promise the same bits. A batch of another size changes it by about a hundredth
of this."""
SCORED, SCORED_CHAT = {"logprobs": 2}, {"logprobs": True, "top_logprobs": 2}
"""What asks for log-probabilities, which are compared, or show how close the answer is to another
one."""
WORDS = "the of and to in is that it was for on are as with they be at one have this".split()
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"enum": ["red", "green", "blue", "the colour of the sea"]},
                "twice": {"type": "boolean"},
                "way": {"enum": ["along the wall", "over the door and the window", "around"]},
            },
            "required": ["colour", "twice", "way"],
            "additionalProperties": False,
        },
    },
}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "paint", "schema": TOOL["function"]["parameters"]},  # type: ignore[index]
}


@dataclass(frozen=True)
class Question:
    """A request whose answer is the same each time: it is greedy, or has a seed."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def can_stream(self) -> bool:
        return self.path in (CHAT, COMPLETIONS)


@dataclass
class Reply:
    """What a client has received of an answer. Of choices: their index -> ..."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    calls: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    finishes: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    scores: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The log-probability of each token."""
    vectors: dict[int, list[float]] = field(default_factory=dict)
    tokens: int | None = None
    ids: set[str] = field(default_factory=set)
    least_gap: float = float("inf")

    def add(self, body: dict[str, Any]) -> None:
        """Add a whole answer, or an event of a stream."""
        if "choices" not in body:
            self.vectors = {item["index"]: item["embedding"] for item in body["data"]}
            self.tokens = body["usage"]["prompt_tokens"]
            return
        self.ids.add(body["id"])
        if body.get("usage"):
            self.tokens = body["usage"]["completion_tokens"]
        for choice in body["choices"]:
            index = choice["index"]
            part = choice.get("message") or choice.get("delta") or {}
            self.texts[index] += choice.get("text") or part.get("content") or ""
            for call in part.get("tool_calls") or []:
                function = call["function"]
                self.calls[index] += (function.get("name") or "") + (
                    function.get("arguments") or ""
                )
            if choice["finish_reason"] is not None:
                self.finishes[index].append(choice["finish_reason"])
            self.scores[index] += _scores(choice.get("logprobs"))
            self.least_gap = min([self.least_gap, *_gaps(choice.get("logprobs"))])

    def is_same(self, expected: Reply) -> bool:
        """Return whether this is ``expected``, with its log-probabilities if that has any."""
        return (
            self.texts == expected.texts
            and self.calls == expected.calls
            and self.finishes == expected.finishes
            and self.tokens == expected.tokens
            and (not expected.scores or self.scores == expected.scores)
            and self.vectors.keys() == expected.vectors.keys()
            and all(
                np.allclose(vector, expected.vectors[index], rtol=0, atol=VECTOR_ERROR)
                for index, vector in self.vectors.items()
            )
        )

    def begins(self, whole: Reply) -> bool:
        """Return whether this is ``whole`` up to somewhere."""
        return (
            all(whole.texts[i].startswith(text) for i, text in self.texts.items())
            and all(whole.calls[i].startswith(call) for i, call in self.calls.items())
            and all(
                scores == whole.scores[i][: len(scores)]
                for i, scores in self.scores.items()
                if whole.scores
            )
        )

    @property
    def is_complete(self) -> bool:
        """Whether each choice has ended once."""
        return bool(self.texts) and all(len(self.finishes[index]) == 1 for index in self.texts)


def _scores(logprobs: dict[str, Any] | None) -> list[float]:
    """Return the log-probability of each token."""
    found = logprobs or {}
    of_chat = (token["logprob"] for token in found.get("content") or [])
    return [*(found.get("token_logprobs") or []), *of_chat]


def _gaps(logprobs: dict[str, Any] | None) -> Iterator[float]:
    """Yield the lead of the best token over the second at each position."""
    of_completion = [list(best.values()) for best in (logprobs or {}).get("top_logprobs") or []]
    of_chat = [
        [one["logprob"] for one in token["top_logprobs"]]
        for token in (logprobs or {}).get("content") or []
    ]
    for best in of_completion + of_chat:
        first, *others = sorted(best, reverse=True)
        yield first - others[0] if others else 0.0  # two tokens of the same text


def make_questions(names: tuple[str, ...], seed: int, *, is_short: bool) -> list[Question]:
    """Return questions of all kinds for each of the models and adapters ``names``: one of each kind
    with a shorter answer if it ``is_short``.

    Prompts are the same for each, so an answer from the cache of another one is noticed."""
    found: list[Question] = []
    long_tokens = 100 if is_short else 300
    for name in names:
        chance = random.Random(seed)
        head = _words(chance, 250)
        match name:
            case "text":
                found += _to_embed(name, chance)
            case "images":
                found += _of_images(name, chance)
            case "ranks":  # they are slow, and do not give the same bits in each batch
                all_kinds = _to_generate(name, chance, head, long_tokens)
                found += [each for each in all_kinds if each.kind in ("short", "shared prefix")]
            case _:
                found += _to_generate(name, chance, head, long_tokens)
    last_of_kind = {(each.kind, each.body["model"]): each for each in found}
    return list(last_of_kind.values()) if is_short else found


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(count))


def _to_embed(model: str, chance: random.Random) -> Iterator[Question]:
    for number in range(1, 9):
        texts = [_words(chance, chance.randrange(1, 60)) for _ in range(number)]
        yield Question("embeddings", EMBEDDINGS, {"model": model, "input": texts})


def _of_images(model: str, chance: random.Random) -> Iterator[Question]:
    for number in range(8):
        images = [
            {"type": "image_url", "image_url": {"url": _image(chance)}}
            for _ in range(1 + number % 2)
        ]
        content = [{"type": "text", "text": _words(chance, 5)}, *images]
        body: dict[str, Any] = {"model": model}
        body["messages"] = [{"role": "user", "content": content}]
        body |= {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        yield Question("image", CHAT, body | SCORED_CHAT)


def _image(chance: random.Random) -> str:
    """Return a picture of noise, as URL."""
    data = io.BytesIO()
    size = chance.randrange(20, 40), 20
    Image.frombytes("RGB", size, chance.randbytes(3 * size[0] * size[1])).save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _to_generate(
    model: str, chance: random.Random, head: str, long_tokens: int
) -> Iterator[Question]:
    common = {"model": model, "temperature": 0}
    plain = {**common, "ignore_eos": True}
    drawn = {"model": model, "temperature": 1.0, "ignore_eos": True}
    for number in range(8):
        body = {"prompt": _words(chance, 3 + 5 * number), "max_tokens": 12 + 6 * number, **plain}
        yield Question("short", COMPLETIONS, body | SCORED)
    for _ in range(4):
        body = {"prompt": _words(chance, 12), "max_tokens": long_tokens, **plain}
        yield Question("long", COMPLETIONS, body | SCORED)
        body = {"prompt": f"{head} {_words(chance, 9)}", "max_tokens": 24, **plain}
        yield Question("shared prefix", COMPLETIONS, body | SCORED)
        talk = [
            {"role": role, "content": _words(chance, 15)} for role in ("user", "assistant", "user")
        ]
        body = {"messages": talk, "max_tokens": 40, **plain}
        yield Question("chat", CHAT, body | SCORED_CHAT)
        body = {"messages": talk, "max_tokens": 60, "seed": chance.randrange(1000), **drawn}
        yield Question("sampled chat", CHAT, body)
    for number in range(2):
        talk = [{"role": "user", "content": _words(chance, 9)}]
        body = {"messages": talk, "max_tokens": 400, "response_format": FORM, **common}
        yield Question("grammar", CHAT, body)
        body = {"messages": talk, "max_tokens": 400, "tools": [TOOL], **common}
        yield Question("tool call", CHAT, {**body, "tool_choice": "required"})
        body = {"prompt": _words(chance, 20), "max_tokens": 30, "n": 2, "seed": number, **drawn}
        yield Question("two choices", COMPLETIONS, body)
