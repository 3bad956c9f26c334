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


BILLING = "x-anthropic-billing-header: cc_version=2.1.330.a; cc_entrypoint=cli; cch="
RULES = "Be brief.\n\nBe kind."


@pytest.mark.parametrize("end", ["0a1f9;", "77b2c;", "00000"])
@pytest.mark.parametrize("between", ["\n", "\n\n", None])
def test_the_billing_line_of_claude_code_is_not_for_the_model(
    server: Server, lasting_engine: ScriptedEngine, end: str, between: str | None
) -> None:
    hi = {"role": "user", "content": "hi"}
    text = f"{BILLING}{end}{between or ''}"
    blocks = [{"type": "text", "text": text}, {"type": "text", "text": RULES}]
    system: Any = blocks if between is None else text + RULES
    joined = text + ("\n" if between is None else "") + RULES
    prompts = set()
    for path, body in (
        ("/v1/messages", {"system": system, "messages": [hi], "max_tokens": 9}),
        ("/v1/messages", {"system": [{"type": "text", "text": joined}], "messages": [hi],
                          "max_tokens": 9}),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": system}, hi]}),
        ("/v1/responses", {"input": "hi", "instructions": joined}),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": RULES}, hi]}),
    ):  # fmt: skip
        ok(server.client.post(path, json=body))
        prompts.add(lasting_engine.last_prompt)
    assert len(prompts) == 1, prompts


def test_a_system_message_of_the_billing_line_alone_is_none(
    server: Server, lasting_engine: ScriptedEngine
) -> None:
    hi = {"role": "user", "content": "hi"}
    ok(server.chat(messages=[{"role": "system", "content": BILLING + "1;"}, hi]))
    alone = lasting_engine.last_prompt
    ok(server.chat(messages=[hi]))
    assert lasting_engine.last_prompt == alone


def test_a_message_needs_content(server: Server, lasting_engine: ScriptedEngine) -> None:
    answer = server.chat(messages=[{"role": "user"}])
    assert error_of(answer)["param"] == "messages[0].content"
