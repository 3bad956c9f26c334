"""Content that is not text: a note in its place, where the operator wants that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.conftest import Server, error_of, ok
from tests.router.scripted_engine import ScriptedEngine

FLAGS = ("--skip-unsupported-content",)
BLOCK = {"type": "image", "source": {"type": "url", "url": "x"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def engine(server: Server, model_dir: Path) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(server.address, model_dir, says="hello world")
    server.wait_ready()
    yield engine
    engine.leave()


QUESTION = "What is this?"
INPUT_IMAGE = {"type": "input_image", "image_url": "x"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": QUESTION}]}]
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [INPUT_IMAGE]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]},
            {"role": "user", "content": QUESTION},
        ]
    },
    "/v1/messages": {
        "max_tokens": 20,
        "messages": [{"role": "user", "content": [BLOCK, {"type": "text", "text": QUESTION}]}],
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_a_note_stands_in_place_of_an_image(
    server: Server, engine: ScriptedEngine, path: str
) -> None:
    ok(server.client.post(path, json=BODIES[path]))
    prompt = engine.last_prompt
    assert "was removed: this server accepts text only.]" in prompt and QUESTION in prompt


def test_a_block_of_claude_codes_own_is_not_for_the_model(
    server: Server, engine: ScriptedEngine
) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330;"}
    body = {
        "max_tokens": 20,
        "system": [billing, {"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert server.client.post("/v1/messages", json=body).status_code == 200
    prompt = engine.last_prompt
    assert "Be brief." in prompt and "billing" not in prompt


def test_a_message_needs_content(server: Server, engine: ScriptedEngine) -> None:
    answer = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user"}]})
    assert error_of(answer)["param"] == "messages[0].content"


def test_clients_may_ask_for_the_head_of_the_start_page(server: Server) -> None:
    assert server.client.head("/").status_code == 200
    assert server.client.get("/").headers["content-type"].startswith("text/html")
