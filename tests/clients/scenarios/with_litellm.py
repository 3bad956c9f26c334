"""LiteLLM, through three APIs."""

import json
import os
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from harness import (
    ANSWER,
    CALLER,
    CITIES,
    CITY_SCHEMA,
    KEY,
    LONG,
    MODEL,
    QUESTION,
    URL,
    NotApplicable,
    aborts,
    check,
    check_aborted,
    run,
)

asked = [{"role": "user", "content": QUESTION}]
tool = {"type": "function", "function": {"name": "weather", "parameters": CITY_SCHEMA}}
OPENAI = {"model": "openai/" + MODEL, "api_base": URL + "/v1"}
ANTHROPIC = {"model": "anthropic/" + MODEL, "api_base": URL}
OLLAMA = {"model": "ollama_chat/" + MODEL, "api_base": URL}


def complete(way: dict[str, str], messages: Any = asked, **fields: Any) -> Any:
    fields = {"max_tokens": 60, "num_retries": 0, **way, **fields}
    return litellm.completion(messages=messages, api_key=KEY, **fields)


def chat_by(way: dict[str, str]) -> None:
    answer = complete(way)
    check(ANSWER in answer.choices[0].message.content, answer)
    check(answer.usage.completion_tokens > 0, answer)


def stream_by(way: dict[str, str]) -> None:
    chunks = complete(way, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(ANSWER in text, text)


def tools_by(way: dict[str, str]) -> None:
    if way is OLLAMA:  # no call can be required there
        call_through_ollama()
        return
    first = complete(way, tools=[tool], tool_choice="required")
    message = first.choices[0].message
    call = message.tool_calls[0]
    check(json.loads(call.function.arguments)["city"] in CITIES, first)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = complete(way, [*asked, message.model_dump(), result], tools=[tool])
    check(last.choices, last)


def call_through_ollama() -> None:
    way = OLLAMA | {"api_base": CALLER}
    question = {"role": "user", "content": "Tell me the weather in Rome."}
    first = complete(way, [question], tools=[tool])
    call = first.choices[0].message.tool_calls[0]
    check(json.loads(call.function.arguments) == {"city": "Rome"}, first)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = complete(way, [question, first.choices[0].message.model_dump(), result], tools=[tool])
    check(last.choices[0].message.content == "It is sunny.", last)


def structured_by(way: dict[str, str]) -> None:
    schema = {"name": "city", "schema": CITY_SCHEMA, "strict": True}
    answer = complete(way, response_format={"type": "json_schema", "json_schema": schema})
    check(json.loads(answer.choices[0].message.content)["city"] in CITIES, answer)


def errors_by(way: dict[str, str]) -> None:
    try:
        complete(way | {"model": way["model"].replace(MODEL, "nobody")})
        check(False, "no error")
    except litellm.NotFoundError as error:
        check("nobody" in str(error), error)
    except litellm.APIConnectionError as error:  # what all errors of this API become
        check(way["model"].startswith("ollama") and "nobody" in str(error), error)


def cancel_by(way: dict[str, str]) -> None:
    if way is not OPENAI:
        raise NotApplicable("it cannot close a stream of this API")
    before = aborts()
    messages = [{"role": "user", "content": LONG}]
    extra = {"ignore_eos": True}
    chunks = complete(way, messages, stream=True, max_tokens=1500, extra_body=extra)
    next(iter(chunks))
    chunks.completion_stream.close()
    check_aborted(before)


def named(
    action: Callable[[dict[str, str]], None], way: dict[str, str], name: str
) -> Callable[[], None]:
    def scenario() -> None:
        action(way)

    scenario.__name__ = name
    return scenario


actions = (chat_by, stream_by, tools_by, structured_by, errors_by, cancel_by)
run(
    *(named(action, OPENAI, action.__name__[:-3]) for action in actions),
    *(named(action, OLLAMA, "ollama_" + action.__name__[:-3]) for action in actions),
    *(named(action, ANTHROPIC, "messages_" + action.__name__[:-3]) for action in actions),
)
