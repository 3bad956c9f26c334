"""Content that is not text: a note in its place, where the operator wants that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.wire import Submit
from tests.router.conftest import Server
from tests.router.scripted_engine import ScriptedEngine

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server("--skip-unsupported-content")


@pytest.fixture(scope="module")
def engine(server: Server, model_dir: Path, says: Callable[[str], Any]) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(server.address, model_dir, script=says("hello world"))
    server.wait_ready()
    yield engine
    engine.leave()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [IMAGE, {"type": "text", "text": "What is this?"}]}
                ]
            },
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_image", "image_url": "x"}],
                    },
                    {"role": "user", "content": "What is this?"},
                ]
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 20,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": "x"}},
                            {"type": "text", "text": "What is this?"},
                        ],
                    }
                ],
            },
        ),
    ],
    ids=["chat", "responses", "messages"],
)
def test_a_note_stands_in_place_of_an_image(
    server: Server, engine: ScriptedEngine, tokenizer: Tokenizer, path: str, body: dict[str, Any]
) -> None:
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    prompt = tokenizer.decode(engine.got(Submit)[-1].token_ids, skip_special_tokens=False)
    assert "was removed: this server accepts text only.]" in prompt and "What is this?" in prompt


def test_a_block_of_claude_codes_own_is_not_for_the_model(
    server: Server, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330;"}
    body = {
        "max_tokens": 20,
        "system": [billing, {"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert server.client.post("/v1/messages", json=body).status_code == 200
    prompt = tokenizer.decode(engine.got(Submit)[-1].token_ids, skip_special_tokens=False)
    assert "Be brief." in prompt and "billing" not in prompt


def test_a_message_needs_content(server: Server, engine: ScriptedEngine) -> None:
    answer = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content"


def test_clients_may_ask_for_the_head_of_the_start_page(server: Server) -> None:
    assert server.client.head("/").status_code == 200
    assert server.client.get("/").headers["content-type"].startswith("text/html")
