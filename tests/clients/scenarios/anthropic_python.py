"""Anthropic's Python client."""

import json
from typing import Any

import anthropic
import harness as h

# Any: an answer without the part that a scenario reads fails the scenario.
client: Any = anthropic.Anthropic(base_url=h.URL, api_key=h.KEY, max_retries=0)
few: dict[str, Any] = {"model": h.MODEL, "max_tokens": 60}
few["extra_body"] = {"temperature": 0}  # newer releases have no such argument
asked = [{"role": "user", "content": h.QUESTION}]
tool = {"name": "weather", "description": "Weather of a city", "input_schema": h.CITY_SCHEMA}


def chat() -> None:
    answer = client.messages.create(messages=asked, **few)
    h.check(h.ANSWER in answer.content[0].text, answer)
    h.check(answer.stop_reason == "end_turn", answer)
    count = client.messages.count_tokens(model=h.MODEL, messages=asked).input_tokens
    usage = answer.usage
    h.check(usage.input_tokens + usage.cache_read_input_tokens == count, answer)


def stream() -> None:
    with client.messages.stream(messages=asked, system="Be brief.", **few) as events:
        text = "".join(events.text_stream)
        message = events.get_final_message()
    h.check(text == message.content[0].text, message)
    h.check(h.ANSWER in text and message.usage.output_tokens > 0, message)


def tools() -> None:
    fields = {"tools": [tool], **few}
    choice = {"type": "tool", "name": "weather"}
    first = client.messages.create(messages=asked, tool_choice=choice, **fields)
    call = next(block for block in first.content if block.type == "tool_use")
    h.check(call.input["city"] in h.CITIES and first.stop_reason == "tool_use", first)
    with client.messages.stream(messages=asked, tool_choice=choice, **fields) as events:
        streamed = events.get_final_message().content[-1]
    h.check(streamed.input == call.input, streamed)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [
        *asked,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    h.check(client.messages.create(messages=turns, **fields).content, "an answer to the result")


def structured() -> None:
    form = {"format": {"type": "json_schema", "schema": h.CITY_SCHEMA}}
    answer = client.messages.create(messages=asked, output_config=form, **few)
    h.check(json.loads(answer.content[0].text)["city"] in h.CITIES, answer)


def errors() -> None:
    create, fields = client.messages.create, {"max_tokens": 5, "messages": asked}
    missing: Any = h.failure(anthropic.NotFoundError, create, model="nobody", **fields)
    kind = missing.body["error"]["type"]
    h.check(kind == "not_found_error" and missing.request_id, missing.body)
    fields["model"] = h.MODEL
    hot = {"temperature": 1.5}
    bad = h.failure(anthropic.BadRequestError, create, extra_body=hot, **fields)
    h.check("temperature" in str(bad), bad)
    stranger = client.with_options(api_key="wrong")
    h.failure(anthropic.AuthenticationError, stranger.messages.create, **fields)


def cancel() -> None:
    before = h.aborts()
    with client.messages.create(
        model=h.MODEL,
        max_tokens=1500,
        messages=[{"role": "user", "content": h.LONG}],
        stream=True,
        extra_body={"ignore_eos": True},
    ) as events:
        for event in events:
            if event.type == "content_block_delta":
                break
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
