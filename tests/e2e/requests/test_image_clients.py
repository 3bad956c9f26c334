"""Pictures through a whole server, with the clients of OpenAI and Anthropic: all APIs, streamed.

The model was trained to name colours, so that answers show whether the picture arrived."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI

from tests.e2e.requests.naming_model import COLOURS, QUESTION, in_png, make_naming_model
from tests.e2e.server import Server, at_once, content_of, serving
from tests.vision_models import needs_mlx_vlm

if TYPE_CHECKING:  # its import takes two seconds, in every process that collects tests
    from anthropic import Anthropic

needs_mlx_vlm()


def in_base64(colour: str, seed: int = 1_000_000) -> str:
    """Return a picture that the model was not trained with."""
    return base64.b64encode(in_png(colour, seed)).decode()


def image_url(data: str) -> Any:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def image_block(data: str) -> Any:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


ASKED: Any = {"type": "text", "text": QUESTION}
GREEDY: Any = {"temperature": 0}
TOOL: Any = {"name": "look", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_naming_model(tmp_path_factory.mktemp("models") / "naming")
    with serving(model, "--no-ssd", "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture(scope="module")
def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def anthropic(server: Server) -> Anthropic:
    from anthropic import Anthropic

    return Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("colour", COLOURS)
def test_a_colour_is_named_in_each_api(
    server: Server, openai: OpenAI, anthropic: Anthropic, colour: str
) -> None:
    data = in_base64(colour)
    chat: Any = [{"role": "user", "content": [image_url(data), ASKED]}]
    fields: Any = {"model": "tiny", "messages": chat, "max_tokens": 8, **GREEDY}
    whole = openai.chat.completions.create(**fields)
    assert whole.choices[0].message.content == colour
    chunks = openai.chat.completions.create(stream=True, **fields)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == colour

    shown = {"type": "input_image", "image_url": image_url(data)["image_url"]["url"]}
    given: Any = [{"role": "user", "content": [shown, {"type": "input_text", "text": QUESTION}]}]
    fields = {"model": "tiny", "input": given, "max_output_tokens": 8, **GREEDY}
    events: Any = list(openai.responses.create(stream=True, **fields))
    written = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(written) == colour
    assert whole.usage is not None
    assert events[-1].response.usage.input_tokens == whole.usage.prompt_tokens

    blocks: Any = [{"role": "user", "content": [image_block(data), ASKED]}]
    fields = {"model": "tiny", "messages": blocks, "max_tokens": 8, "extra_body": GREEDY}
    with anthropic.messages.stream(**fields) as stream:
        message = stream.get_final_message()
    assert "".join(each.text for each in message.content if each.type == "text") == colour
    counted = anthropic.messages.count_tokens(model="tiny", messages=blocks)
    assert counted.input_tokens == whole.usage.prompt_tokens

    asked = [{"role": "user", "content": QUESTION, "images": [data]}]
    options = {"num_predict": 8, "temperature": 0}
    ollama = server.post("/api/chat", model="tiny", messages=asked, options=options)
    lines = [json.loads(line) for line in ollama.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == colour


def test_pictures_that_are_asked_about_at_once_keep_their_colours(server: Server) -> None:
    asked = [(colour, in_base64(colour, 2_000_000 + n)) for n in range(3) for colour in COLOURS]

    def named(data: str) -> str:
        return content_of(server.chat([image_url(data), ASKED], 8))

    assert at_once(named, [data for _, data in asked]) == [colour for colour, _ in asked]


def test_a_second_turn_finds_the_picture(openai: OpenAI) -> None:
    text = {"type": "text", "text": "a" * 40}
    turns: Any = [{"role": "user", "content": [image_url(in_base64("red")), text]}]
    first = openai.chat.completions.create(model="tiny", messages=turns, max_tokens=4)
    reply = first.choices[0].message.content or ""
    turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and now?"}]
    second = openai.chat.completions.create(model="tiny", messages=turns, max_tokens=4)
    assert first.usage is not None and second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None and (details.cached_tokens or 0) >= 32
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_results_of_tools_may_be_pictures(anthropic: Anthropic) -> None:
    shown = image_block(in_base64("red"))
    turns: Any = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [shown]}],
        },
    ]
    bare = anthropic.messages.count_tokens(model="tiny", messages=turns[:2] + turns[:1])
    message = anthropic.messages.create(model="tiny", messages=turns, max_tokens=4, tools=[TOOL])
    assert message.usage.input_tokens > bare.input_tokens
