"""An agent's conversation on real engines.

A grammar makes the random models write the recorded replies. They spell them in tokens that no
tokenizer would choose.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import agent_transcript as transcript
from tests.e2e.server import HYBRID, Server, assert_error, serving
from tests.router.chat_tokenizer import TEMPLATE
from tests.tiny_models import Kind, make_tiny

CONTEXT = 32_768
TURNS = 6
"""Of the twenty: two questions, with calls, reasoning and text in the answers."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"sign": {"enum": ["+", "-"]}, "exact": {"type": "boolean"}},
            "required": ["sign", "exact"],
            "additionalProperties": False,
        },
    },
}
FLAGS = (
    "--reasoning-parser=think",
    f"--max-prompt-tokens={CONTEXT}",
    f"--max-generation-tokens={CONTEXT}",
)


def make_agent(kind: Kind, path: Path) -> Path:
    """Make a tiny model with a long context and a template for reasoning and tools."""
    make_tiny(kind, path)
    for name, changes in (
        ("config.json", {"max_position_embeddings": CONTEXT}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE, "model_max_length": CONTEXT}),
    ):
        file = path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(make_agent("llama", tmp_path_factory.mktemp("llama")), *FLAGS) as server:
        yield server


@pytest.mark.slow
def test_an_agent_computes_little_more_than_new_tokens_on_a_hybrid(tmp_path: Path) -> None:
    replies = transcript.replies()

    def ask(number: int, body: dict[str, Any]) -> dict[str, Any]:
        return server.answer(
            "/v1/chat/completions",
            **body,
            structured_outputs={"choice": [replies[number]]},
            chat_template_kwargs={"keep_reasoning": True},
            max_tokens=2000,
            temperature=1,
            seed=number,
        )

    with serving(make_agent(HYBRID, tmp_path / "hybrid"), *FLAGS) as server:
        played = transcript.play(ask, TURNS)
    transcript.assert_little_is_computed_again(played, 16)


def test_a_forced_tool_call_has_valid_arguments(llama: Server) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for seed in range(4):
        fields = {"tools": [ADD], "tool_choice": named, "temperature": 1, "seed": seed}
        (choice,) = llama.chat("hi", 400, **fields)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["sign"] in "+-" and isinstance(arguments["exact"], bool)
    bad = {"type": "object", "properties": {"x": {"type": "nonsense"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad, "strict": True}}
    messages = [{"role": "user", "content": "hi"}]
    answer = llama.post("/v1/chat/completions", messages=messages, tools=[tool])
    assert assert_error(answer, 400)["param"] == "tools"
