"""OpenAI's Python client: chat completions and responses."""

import json
from typing import Any

import harness as h
import openai

# Any: an answer without the part that a scenario reads fails the scenario.
client: Any = openai.OpenAI(base_url=h.URL + "/v1", api_key=h.KEY, max_retries=0)
asked = [{"role": "user", "content": h.QUESTION}]
few = {"model": h.MODEL, "temperature": 0, "max_tokens": 60}
responses_few = {"model": h.MODEL, "temperature": 0, "max_output_tokens": 60}
weather = {"name": "weather", "description": "Weather of a city", "parameters": h.CITY_SCHEMA}
tool = {"type": "function", "function": weather}
flat_tool = {"type": "function", **weather, "strict": True}
endless = {"stream": True, "extra_body": {"ignore_eos": True}}


def chat() -> None:
    answer = client.chat.completions.create(messages=asked, **few)
    h.check(h.ANSWER in answer.choices[0].message.content, answer)
    h.check(answer.choices[0].finish_reason == "stop", answer)
    h.check(answer.usage.total_tokens > answer.usage.completion_tokens > 0, answer)


def stream() -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}, **few}
    chunks = list(client.chat.completions.create(messages=asked, **fields))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    h.check(h.ANSWER in text, text)
    h.check(chunks[-1].usage.completion_tokens > 0, chunks[-1])


def tools() -> None:
    fields = {"tools": [tool], **few}
    first = client.chat.completions.create(messages=asked, tool_choice="required", **fields)
    message = first.choices[0].message
    call = message.tool_calls[0]
    h.check(json.loads(call.function.arguments)["city"] in h.CITIES, call)
    h.check(first.choices[0].finish_reason == "tool_calls", first)
    with client.chat.completions.stream(messages=asked, tool_choice="required", **fields) as events:
        streamed = events.get_final_completion().choices[0].message.tool_calls[0]
    h.check(streamed.function.arguments == call.function.arguments, streamed)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = client.chat.completions.create(messages=[*asked, message, result], **fields)
    h.check(last.choices[0].message.content is not None, last)


def structured() -> None:
    schema = {"name": "city", "schema": h.CITY_SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = client.chat.completions.create(messages=asked, response_format=form, **few)
    h.check(json.loads(answer.choices[0].message.content)["city"] in h.CITIES, answer)


def errors() -> None:
    create = client.chat.completions.create
    missing = h.failure(openai.NotFoundError, create, model="nobody", messages=asked)
    h.check(missing.code == "model_not_found", missing.code)
    bad = h.failure(openai.BadRequestError, create, model=h.MODEL, messages=asked, temperature=5)
    h.check(bad.param == "temperature", bad.param)
    h.failure(openai.AuthenticationError, client.with_options(api_key="wrong").models.list)


def cancel() -> None:
    before = h.aborts()
    long = [{"role": "user", "content": h.LONG}]
    with client.chat.completions.create(
        model=h.MODEL, messages=long, max_tokens=1500, **endless
    ) as chunks:
        next(iter(chunks))
    h.check_aborted(before)


def responses_chat() -> None:
    answer = client.responses.create(input=h.QUESTION, **responses_few)
    h.check(h.ANSWER in answer.output_text, answer)
    h.check(answer.status == "completed", answer)
    again = client.responses.create(input="And?", previous_response_id=answer.id, **responses_few)
    h.check(again.usage.input_tokens > answer.usage.input_tokens, again)
    h.check(client.responses.retrieve(answer.id).output_text == answer.output_text, "stored")
    h.check(len(client.responses.input_items.list(again.id).data) == 3, "input items")
    client.responses.delete(answer.id)


def responses_stream() -> None:
    with client.responses.stream(input=h.QUESTION, **responses_few) as events:
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        h.check(text == events.get_final_response().output_text, text)
    h.check(h.ANSWER in text, text)


def responses_tools() -> None:
    fields = {"tools": [flat_tool], **responses_few}
    choice = {"type": "function", "name": "weather"}
    first = client.responses.create(input=h.QUESTION, tool_choice=choice, **fields)
    calls = [item for item in first.output if item.type == "function_call"]
    h.check(json.loads(calls[0].arguments)["city"] in h.CITIES, first)
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"}
    last = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    h.check(last.output, last)
    given = [{"role": "user", "content": h.QUESTION}, *first.output, result]
    again = client.responses.create(input=given, store=False, **fields)
    h.check(again.output, again)


def responses_structured() -> None:
    form = {"type": "json_schema", "name": "city", "schema": h.CITY_SCHEMA, "strict": True}
    answer = client.responses.create(input=h.QUESTION, text={"format": form}, **responses_few)
    h.check(json.loads(answer.output_text)["city"] in h.CITIES, answer)


def responses_errors() -> None:
    retrieve, create = client.responses.retrieve, client.responses.create
    missing = h.failure(openai.NotFoundError, retrieve, "resp_nobody")
    h.check(missing.code == "response_not_found", missing.code)
    asked = {"model": h.MODEL, "input": h.QUESTION, "tools": [{"type": "function"}]}
    bad = h.failure(openai.BadRequestError, create, **asked)
    h.check(bad.param == "tools[0].name", bad.param)


def responses_cancel() -> None:
    before = h.aborts()
    with client.responses.create(
        model=h.MODEL, input=h.LONG, max_output_tokens=1500, **endless
    ) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                break
    h.check_aborted(before)


h.run(
    *(chat, stream, tools, structured, errors, cancel),
    *(responses_chat, responses_stream, responses_tools, responses_structured),
    *(responses_errors, responses_cancel),
)
