"""Pictures through a whole server, with the clients of OpenAI and Anthropic: all APIs, streamed."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.e2e.server import Server, serving
from tests.vision_models import make_vision_model, needs_mlx_vlm, picture

needs_mlx_vlm()


def in_base64(seed: int) -> str:
    data = io.BytesIO()
    picture(seed).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


PICTURE = in_base64(1)
URL = f"data:image/png;base64,{PICTURE}"
IMAGE_URL: Any = {"type": "image_url", "image_url": {"url": URL}}
BLOCK: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PICTURE},
}
TOOL: Any = {"name": "look", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_vision_model("idefics3", tmp_path_factory.mktemp("models") / "idefics3")
    with serving(model, "--no-ssd", "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture(scope="module")
def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def anthropic(server: Server) -> Anthropic:
    return Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0)


def test_the_clients_see_the_same_answer_in_each_api(
    server: Server, openai: OpenAI, anthropic: Anthropic
) -> None:
    greedy: Any = {"temperature": 0}
    question = {"type": "text", "text": "What is it?"}
    chat: Any = [{"role": "user", "content": [IMAGE_URL, question]}]
    whole = openai.chat.completions.create(model="tiny", messages=chat, max_tokens=8, **greedy)
    text = whole.choices[0].message.content
    chunks = openai.chat.completions.create(
        model="tiny", messages=chat, max_tokens=8, stream=True, **greedy
    )
    assert text == "".join(each.choices[0].delta.content or "" for each in chunks)

    given: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": URL, "detail": "auto"},
                {"type": "input_text", "text": "What is it?"},
            ],
        }
    ]
    events: Any = list(
        openai.responses.create(
            model="tiny", input=given, max_output_tokens=8, stream=True, **greedy
        )
    )
    written = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(written) == text
    assert whole.usage is not None
    assert events[-1].response.usage.input_tokens == whole.usage.prompt_tokens

    blocks: Any = [{"role": "user", "content": [BLOCK, question]}]
    with anthropic.messages.stream(model="tiny", messages=blocks, max_tokens=8) as stream:
        message = stream.get_final_message()
    assert "".join(each.text for each in message.content if each.type == "text") == text
    counted = anthropic.messages.count_tokens(model="tiny", messages=blocks)
    assert counted.input_tokens == whole.usage.prompt_tokens

    ollama = server.client.post(
        "/api/chat",
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": "What is it?", "images": [PICTURE]}],
            "options": {"num_predict": 8, "temperature": 0},
        },
    )
    lines = [json.loads(line) for line in ollama.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == text


def test_a_second_turn_finds_the_picture(openai: OpenAI) -> None:
    turns: Any = [{"role": "user", "content": [IMAGE_URL, {"type": "text", "text": "a" * 40}]}]
    first = openai.chat.completions.create(model="tiny", messages=turns, max_tokens=4)
    reply = first.choices[0].message.content or ""
    turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and now?"}]
    second = openai.chat.completions.create(model="tiny", messages=turns, max_tokens=4)
    assert first.usage is not None and second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None and (details.cached_tokens or 0) >= 32
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_results_of_tools_may_be_pictures(anthropic: Anthropic) -> None:
    turns: Any = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [BLOCK]}],
        },
    ]
    bare = anthropic.messages.count_tokens(model="tiny", messages=turns[:2] + turns[:1])
    message = anthropic.messages.create(model="tiny", messages=turns, max_tokens=4, tools=[TOOL])
    assert message.usage.input_tokens > bare.input_tokens
