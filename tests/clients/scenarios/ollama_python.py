"""Ollama's own client."""

import json

import ollama
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
    aborts,
    check,
    check_aborted,
    run,
)

HEADERS = {"authorization": f"Bearer {KEY}"}
FEW = {"num_predict": 60, "temperature": 0}
client = ollama.Client(URL, headers=HEADERS)
caller = ollama.Client(CALLER, headers=HEADERS)
asked = [{"role": "user", "content": QUESTION}]


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The name of a city.
    """
    return f"sunny in {city}"


def failure(action: object, **fields: object) -> ollama.ResponseError:
    try:
        action(**fields)  # type: ignore[operator]
    except ollama.ResponseError as error:
        return error
    raise AssertionError("no error")


def chat() -> None:
    answer = client.chat(MODEL, asked, options=FEW)
    check(ANSWER in answer.message.content and answer.done_reason == "stop", answer)
    check(answer.eval_count > 0 and answer.eval_duration > 0 and answer.total_duration > 0, answer)
    first = client.generate(MODEL + ":latest", QUESTION, options=FEW)
    check(ANSWER in first.response and first.context, first)
    again = client.generate(MODEL, "And of Italy?", options=FEW, context=first.context)
    check(again.prompt_eval_count > len(first.context), again)
    names = [model.model for model in client.list().models]
    check(MODEL + ":latest" in names, names)
    shown = client.show(MODEL)
    check("completion" in shown.capabilities and shown.details.family == "llama", shown)
    (running, *_) = client.ps().models
    check(running.context_length > 0 and running.expires_at, running)
    check(client.generate(MODEL).done_reason == "load", "an empty prompt loads")


def stream() -> None:
    *parts, last = client.chat(MODEL, asked, stream=True, options=FEW)
    check(ANSWER in "".join(part.message.content for part in parts), parts)
    check(last.done and last.prompt_eval_count > 0, last)
    *parts, last = client.generate(MODEL, QUESTION, stream=True, options=FEW)
    check(ANSWER in "".join(part.response for part in parts) and last.done, parts)


def tools() -> None:
    question = [{"role": "user", "content": "Tell me the weather in Rome."}]
    for is_streamed in (False, True):
        made = caller.chat(MODEL, question, tools=[weather], stream=is_streamed)
        messages = [part.message for part in made] if is_streamed else [made.message]
        (call,) = [call for message in messages for call in message.tool_calls or ()]
        check(call.function.name == "weather" and call.function.arguments == {"city": "Rome"}, call)
    result = {
        "role": "tool",
        "content": weather(**call.function.arguments),
        "tool_name": call.function.name,
    }
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    last = caller.chat(MODEL, [*question, reply, result], tools=[weather])
    check(last.message.content == "It is sunny.", last)
    thought = caller.chat(MODEL, [{"role": "user", "content": "Think of Rome."}], think=True)
    check(thought.message.thinking and thought.message.content == "Rome it is.", thought)


def structured() -> None:
    answer = client.chat(MODEL, asked, format=CITY_SCHEMA, options=FEW)
    check(json.loads(answer.message.content)["city"] in CITIES, answer)
    whole = client.generate(MODEL, QUESTION, format="json", options={"num_predict": 200})
    check(whole.response.startswith("{"), whole)


def errors() -> None:
    missing = failure(client.chat, model="nobody", messages=asked)
    check(missing.status_code == 404 and "nobody" in missing.error, missing)
    wrong = failure(client.chat, model=MODEL, messages=asked, options={"temperature": -1})
    check(wrong.status_code == 400 and "options.temperature" in wrong.error, wrong)
    stranger = ollama.Client(URL, headers={"authorization": "Bearer wrong"})
    check(failure(stranger.chat, model=MODEL, messages=asked).status_code == 401, "the wrong key")
    check(failure(client.embed, model=MODEL, input="a text").status_code == 501, "no embeddings")


def cancel() -> None:
    before = aborts()
    options = {"num_predict": 1500, "ignore_eos": True}
    parts = client.generate(MODEL, LONG, stream=True, options=options)
    next(parts)
    parts.close()
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
