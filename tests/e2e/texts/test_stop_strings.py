"""Text in many scripts through the whole server, streamed or not, cut at any stop string.

The output weights of the model are zeros, so all tokens are equally likely, whatever the batch
holds. A text thus depends on its seed and grammar alone, and is exactly reproducible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from tests.e2e.server import Server, content_of, events_of, serving
from tests.tiny_models import make_tiny

PROMPTS = 40
CLUSTERS = (
    *("🌍", "👍🏽", "👩‍👩‍👧", "🇩🇪", "1️⃣", "日", "語", "한", "鿕", "𠮷", "。"),
    *("e\u0301", "a\u0308\u0323", "n\u0303", "क्षि", "ที่", "é", "ß", "ש\u05b8", "ﷺ"),
    *(" the", " that", " with", "on", "\n", " ", "\u200d", "\u2028", '"', "\\"),
)
"""Characters as a reader sees them, and single tokens (the words of `tiny_models`)."""


@dataclass(frozen=True)
class Reply:
    text: str
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True)
class Question:
    """A request, complete but for ``stop`` and ``stream``."""

    path: str
    fields: dict[str, Any]

    def ask(self, server: Server, **fields: Any) -> Reply:
        body = server.answer(self.path, **self.fields, **fields)
        reason = body["choices"][0]["finish_reason"]
        return Reply(content_of(body), reason, body["usage"]["completion_tokens"])

    def stream(self, server: Server, **fields: Any) -> Reply:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        text, reason, tokens = "", "", 0
        with server.client.stream("POST", self.path, json=self.fields | fields) as answer:
            assert answer.status_code == 200, answer.read()
            for event in events_of(answer):
                if "done" in event:
                    return Reply(text, reason, tokens)
                tokens = (event["usage"] or {}).get("completion_tokens", tokens)
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                    text += piece or ""
                    reason = choice["finish_reason"] or reason
        raise AssertionError("the stream was cut")


def question(number: int) -> Question:
    """Return a question. Every fourth has no grammar, so its text contains partial characters."""
    chance = random.Random(number)
    prompt = "".join(chance.choices(CLUSTERS, k=chance.randrange(1, 40)))
    fields: dict[str, Any] = {"seed": number, "temperature": 1, "max_tokens": 100}
    if number % 4 == 0:
        fields |= {"max_tokens": chance.randrange(4, 12), "ignore_eos": True}
    else:
        # From all of them, those of many tokens would be rare.
        some = [CLUSTERS[(4 * number + which) % len(CLUSTERS)] for which in range(4)]
        any_of_them = "|".join(cluster.replace("\\", r"\\") for cluster in some)
        fields["structured_outputs"] = {"regex": f"({any_of_them}){{3,5}}"}
    if number % 2:
        message = {"role": "user", "content": prompt}
        return Question("/v1/chat/completions", fields | {"messages": [message]})
    return Question("/v1/completions", fields | {"prompt": prompt})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_tiny("llama", tmp_path_factory.mktemp("uniform"))
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["lm_head.weight"] = mx.zeros_like(weights["lm_head.weight"])
    mx.save_safetensors(str(model / "model.safetensors"), weights, metadata={"format": "mlx"})
    with serving(model, "--no-ssd") as running:
        yield running


def for_all(function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(16) as clients:
        return list(clients.map(function, range(PROMPTS)))


@pytest.mark.slow
def test_streaming_and_stop_strings_at_any_offset_do_not_change_the_text(server: Server) -> None:
    def check(number: int) -> Reply:
        asked = question(number)
        whole = asked.ask(server)
        assert asked.stream(server) == whole
        chance = random.Random(number)
        for start in range(len(whole.text)):
            stop = whole.text[start : start + chance.randrange(1, 5)]
            ask = asked.stream if (number + start) % 2 else asked.ask
            cut = ask(server, stop=stop)
            assert cut.text == whole.text[: whole.text.index(stop)], (number, stop)
            assert cut.finish_reason == "stop"
        return whole

    texts = [reply.text for reply in for_all(check)]
    together = "".join(texts)
    assert len(set(texts)) == PROMPTS
    assert all(cluster in together for cluster in CLUSTERS)
    assert "\ufffd" in together
    assert not any("\ufffd" in text for number, text in enumerate(texts) if number % 4)
