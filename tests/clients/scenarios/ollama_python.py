"""Ollama's own client."""

import json
from functools import partial

import harness as h
import ollama

FEW = {"num_predict": 60, "temperature": 0}
client = ollama.Client(h.URL, headers=h.HEADERS)
caller = ollama.Client(h.CALLER, headers=h.HEADERS)
asked = [{"role": "user", "content": h.QUESTION}]


def chat() -> None:
    answer = client.chat(h.MODEL, asked, options=FEW)
    h.check(h.ANSWER in answer.message.content and answer.done_reason == "stop", answer)
    h.check(min(answer.eval_count, answer.eval_duration, answer.total_duration) > 0, answer)
    first = client.generate(h.MODEL + ":latest", h.QUESTION, options=FEW)
    h.check(h.ANSWER in first.response and first.context, first)
    again = client.generate(h.MODEL, "And of Italy?", options=FEW, context=first.context)
    h.check(again.prompt_eval_count > len(first.context), again)
    names = [model.model for model in client.list().models]
    h.check(h.MODEL + ":latest" in names, names)
    shown = client.show(h.MODEL)
    h.check("completion" in shown.capabilities and shown.details.family == "llama", shown)
    (running, *_) = client.ps().models
    h.check(running.context_length > 0 and running.expires_at, running)
    h.check(client.generate(h.MODEL).done_reason == "load", "an empty prompt loads")


def stream() -> None:
    *parts, last = client.chat(h.MODEL, asked, stream=True, options=FEW)
    h.check(h.ANSWER in "".join(part.message.content for part in parts), parts)
    h.check(last.done and last.prompt_eval_count > 0, last)
    *parts, last = client.generate(h.MODEL, h.QUESTION, stream=True, options=FEW)
    h.check(h.ANSWER in "".join(part.response for part in parts) and last.done, parts)


def tools() -> None:
    question = [{"role": "user", "content": "Tell me the weather in Rome."}]
    for is_streamed in (False, True):
        made = caller.chat(h.MODEL, question, tools=[h.weather], stream=is_streamed)
        messages = [part.message for part in made] if is_streamed else [made.message]
        (call,) = [call for message in messages for call in message.tool_calls or ()]
        function = call.function
        h.check(function.name == "weather" and function.arguments == {"city": "Rome"}, call)
    result = {"role": "tool", "content": h.weather(**function.arguments)}
    result["tool_name"] = function.name
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    last = caller.chat(h.MODEL, [*question, reply, result], tools=[h.weather])
    h.check(last.message.content == "It is sunny.", last)
    thought = caller.chat(h.MODEL, [{"role": "user", "content": "Think of Rome."}], think=True)
    h.check(thought.message.thinking and thought.message.content == "Rome it is.", thought)


def structured() -> None:
    answer = client.chat(h.MODEL, asked, format=h.CITY_SCHEMA, options=FEW)
    h.check(json.loads(answer.message.content)["city"] in h.CITIES, answer)
    whole = client.generate(h.MODEL, h.QUESTION, format="json", options={"num_predict": 200})
    h.check(whole.response.startswith("{"), whole)


def errors() -> None:
    failure = partial(h.failure, ollama.ResponseError)
    fields = {"model": h.MODEL, "messages": asked}
    missing = failure(client.chat, **fields | {"model": "nobody"})
    h.check(missing.status_code == 404 and "nobody" in missing.error, missing)
    wrong = failure(client.chat, options={"temperature": -1}, **fields)
    h.check(wrong.status_code == 400 and "options.temperature" in wrong.error, wrong)
    stranger = ollama.Client(h.URL, headers={"authorization": "Bearer wrong"})
    h.check(failure(stranger.chat, **fields).status_code == 401, "the wrong key")
    embedding = failure(client.embed, model=h.MODEL, input="a text")
    h.check(embedding.status_code == 400, "no embeddings")


def cancel() -> None:
    before = h.aborts()
    options = {"num_predict": 1500, "ignore_eos": True}
    parts = client.generate(h.MODEL, h.LONG, stream=True, options=options)
    next(parts)
    parts.close()
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
