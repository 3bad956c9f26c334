"""Anthropic's Python client."""

import json
from typing import Any

import anthropic
from harness import (
    ANSWER,
    CITIES,
    CITY_SCHEMA,
    KEY,
    LONG,
    MODEL,
    QUESTION,
    URL,
    aborts,
    check,
    check_aborted,
    run,
)

# Any: an answer without the part that a scenario reads fails the scenario.
client: Any = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
greedy = {"extra_body": {"temperature": 0}}  # newer releases have no such argument
asked = [{"role": "user", "content": QUESTION}]
tool = {"name": "weather", "description": "Weather of a city", "input_schema": CITY_SCHEMA}


def chat() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=20, messages=asked, **greedy)
    check(ANSWER in answer.content[0].text, answer)
    check(answer.stop_reason == "end_turn", answer)
    count = client.messages.count_tokens(model=MODEL, messages=asked).input_tokens
    usage = answer.usage
    check(usage.input_tokens + usage.cache_read_input_tokens == count, answer)


def stream() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=20, messages=asked, **greedy, system="Be brief."
    ) as events:
        text = "".join(events.text_stream)
        message = events.get_final_message()
    check(text == message.content[0].text, message)
    check(ANSWER in text and message.usage.output_tokens > 0, message)


def tools() -> None:
    fields = {"model": MODEL, "max_tokens": 60, "tools": [tool], **greedy}
    choice = {"type": "tool", "name": "weather"}
    first = client.messages.create(messages=asked, tool_choice=choice, **fields)
    call = next(block for block in first.content if block.type == "tool_use")
    check(call.input["city"] in CITIES and first.stop_reason == "tool_use", first)
    with client.messages.stream(messages=asked, tool_choice=choice, **fields) as events:
        streamed = events.get_final_message().content[-1]
    check(streamed.input == call.input, streamed)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [
        *asked,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    check(client.messages.create(messages=turns, **fields).content, "an answer to the result")


def structured() -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=60,
        messages=asked,
        output_config={"format": {"type": "json_schema", "schema": CITY_SCHEMA}},
    )
    check(json.loads(answer.content[0].text)["city"] in CITIES, answer)


def errors() -> None:
    try:
        client.messages.create(model="nobody", max_tokens=5, messages=asked)
        check(False, "no error")
    except anthropic.NotFoundError as error:
        body: Any = error.body
        check(body["error"]["type"] == "not_found_error" and error.request_id, body)
    try:
        client.messages.create(
            model=MODEL, max_tokens=5, messages=asked, extra_body={"temperature": 1.5}
        )
        check(False, "no error")
    except anthropic.BadRequestError as error:
        check("temperature" in str(error), error)
    try:
        client.with_options(api_key="wrong").messages.create(
            model=MODEL, max_tokens=5, messages=asked
        )
        check(False, "no error")
    except anthropic.AuthenticationError:
        pass


def cancel() -> None:
    before = aborts()
    with client.messages.create(
        model=MODEL,
        max_tokens=1500,
        messages=[{"role": "user", "content": LONG}],
        stream=True,
        extra_body={"ignore_eos": True},
    ) as events:
        for event in events:
            if event.type == "content_block_delta":
                break
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
