"""LiteLLM, through three APIs."""

import json
import os
from collections.abc import Callable
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import harness as h
import litellm

asked = [{"role": "user", "content": h.QUESTION}]
tool = {"type": "function", "function": {"name": "weather", "parameters": h.CITY_SCHEMA}}
OPENAI = {"model": "openai/" + h.MODEL, "api_base": h.URL + "/v1"}
ANTHROPIC = {"model": "anthropic/" + h.MODEL, "api_base": h.URL}
OLLAMA = {"model": "ollama_chat/" + h.MODEL, "api_base": h.URL}


def complete(way: dict[str, str], messages: Any = asked, **fields: Any) -> Any:
    fields = {"max_tokens": 60, "num_retries": 0, **way, **fields}
    return litellm.completion(messages=messages, api_key=h.KEY, **fields)


def chat_by(way: dict[str, str]) -> None:
    answer = complete(way)
    h.check(h.ANSWER in answer.choices[0].message.content, answer)
    h.check(answer.usage.completion_tokens > 0, answer)


def stream_by(way: dict[str, str]) -> None:
    chunks = complete(way, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    h.check(h.ANSWER in text, text)


def tools_by(way: dict[str, str]) -> None:
    if way is OLLAMA:  # no call can be required there
        call_through_ollama()
        return
    first = complete(way, tools=[tool], tool_choice="required")
    message = first.choices[0].message
    call = message.tool_calls[0]
    h.check(json.loads(call.function.arguments)["city"] in h.CITIES, first)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = complete(way, [*asked, message.model_dump(), result], tools=[tool])
    h.check(last.choices, last)


def call_through_ollama() -> None:
    way = OLLAMA | {"api_base": h.CALLER}
    question = {"role": "user", "content": "Tell me the weather in Rome."}
    first = complete(way, [question], tools=[tool])
    call = first.choices[0].message.tool_calls[0]
    h.check(json.loads(call.function.arguments) == {"city": "Rome"}, first)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = complete(way, [question, first.choices[0].message.model_dump(), result], tools=[tool])
    h.check(last.choices[0].message.content == "It is sunny.", last)


def structured_by(way: dict[str, str]) -> None:
    schema = {"name": "city", "schema": h.CITY_SCHEMA, "strict": True}
    answer = complete(way, response_format={"type": "json_schema", "json_schema": schema})
    h.check(json.loads(answer.choices[0].message.content)["city"] in h.CITIES, answer)


def errors_by(way: dict[str, str]) -> None:
    missing = way | {"model": way["model"].replace(h.MODEL, "nobody")}
    error = h.failure(litellm.NotFoundError, complete, missing)
    h.check("nobody" in str(error), error)


def cancel_by(way: dict[str, str]) -> None:
    if way is not OPENAI:
        raise h.NotApplicable("it cannot close a stream of this API")
    before = h.aborts()
    messages = [{"role": "user", "content": h.LONG}]
    extra = {"ignore_eos": True}
    chunks = complete(way, messages, stream=True, max_tokens=1500, extra_body=extra)
    next(iter(chunks))
    chunks.completion_stream.close()
    h.check_aborted(before)


def named(
    action: Callable[[dict[str, str]], None], way: dict[str, str], name: str
) -> Callable[[], None]:
    def scenario() -> None:
        action(way)

    scenario.__name__ = name
    return scenario


actions = (chat_by, stream_by, tools_by, structured_by, errors_by, cancel_by)
h.run(
    *(named(action, OPENAI, action.__name__[:-3]) for action in actions),
    *(named(action, OLLAMA, "ollama_" + action.__name__[:-3]) for action in actions),
    *(named(action, ANTHROPIC, "messages_" + action.__name__[:-3]) for action in actions),
)
