"""Content that is not text: a note in its place, where the operator wants that."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import Server, error_of, ok
from tests.router.scripted_engine import ScriptedEngine

FLAGS = ("--skip-unsupported-content",)
QUESTION = "What is this?"
TEXT = {"type": "text", "text": QUESTION}
BLOCK = {"type": "image", "source": {"type": "url", "url": "x"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "x"}
IMAGES = {"images": ["aGk="]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [IMAGE, TEXT]}]},
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [INPUT_IMAGE]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]},
            {"role": "user", "content": QUESTION},
        ]
    },
    "/v1/messages": {"max_tokens": 20, "messages": [{"role": "user", "content": [BLOCK, TEXT]}]},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": QUESTION} | IMAGES]},
    "/api/generate": {"model": "tiny", "prompt": QUESTION} | IMAGES,
}


@pytest.mark.parametrize("path", BODIES)
def test_a_note_stands_in_place_of_an_image(
    server: Server, lasting_engine: ScriptedEngine, path: str
) -> None:
    ok(server.client.post(path, json=BODIES[path]))
    prompt = lasting_engine.last_prompt
    assert "was removed: this server accepts text only.]" in prompt and QUESTION in prompt


def test_a_block_of_claude_codes_own_is_not_for_the_model(
    server: Server, lasting_engine: ScriptedEngine
) -> None:
    billing = "x-anthropic-billing-header: cc_version=2.1.330;"
    system = [{"type": "text", "text": text} for text in (billing, "Be brief.")]
    ok(server.client.post("/v1/messages", json=BODIES["/v1/messages"] | {"system": system}))
    prompt = lasting_engine.last_prompt
    assert "Be brief." in prompt and "billing" not in prompt


def test_a_message_needs_content(server: Server, lasting_engine: ScriptedEngine) -> None:
    answer = server.chat(messages=[{"role": "user"}])
    assert error_of(answer)["param"] == "messages[0].content"
