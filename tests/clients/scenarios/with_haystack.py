"""Haystack, with its generator for OpenAI's chats."""

import asyncio
from typing import Any

import harness as h
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from models import City
from openai import NotFoundError

asked = [ChatMessage.from_user(h.QUESTION)]
weather = Tool("weather", "Weather of a city", h.CITY_SCHEMA, h.weather)


def generator(model: str = h.MODEL, **fields: Any) -> Any:
    settings = {"max_tokens": 60, "temperature": 0}
    return OpenAIChatGenerator(
        Secret.from_token(h.KEY),
        model,
        api_base_url=h.URL + "/v1",
        generation_kwargs=settings,
        max_retries=0,
        **fields,
    )


def chat() -> None:
    (reply,) = generator().run(asked)["replies"]
    h.check(h.ANSWER in reply.text and reply.meta["usage"]["completion_tokens"] > 0, reply)


def stream() -> None:
    parts: list[str] = []
    (reply,) = generator(streaming_callback=lambda part: parts.append(part.content)).run(asked)[
        "replies"
    ]
    h.check(h.ANSWER in reply.text and "".join(parts) == reply.text, reply)


def tools() -> None:
    required = {"tool_choice": "required"}
    for callback in (None, lambda part: None):
        model = generator(tools=[weather], streaming_callback=callback)
        (first,) = model.run(asked, generation_kwargs=required)["replies"]
        (call,) = first.tool_calls
        h.check(call.arguments["city"] in h.CITIES, first)
        result = ChatMessage.from_tool(h.weather(**call.arguments), origin=call)
        (last,) = model.run([*asked, first, result])["replies"]
        h.check(last.meta["finish_reason"], last)


def structured() -> None:
    (reply,) = generator().run(asked, generation_kwargs={"response_format": City})["replies"]
    h.check(City.model_validate_json(reply.text).city in h.CITIES, reply)


def errors() -> None:
    error = h.failure(NotFoundError, generator("nobody").run, asked)
    h.check(error.status_code == 404, error)


def cancel() -> None:
    before = h.aborts()
    long: Any = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}

    async def begin() -> None:
        begun = asyncio.Event()

        async def seen(part: Any) -> None:
            begun.set()

        question = [ChatMessage.from_user(h.LONG)]
        model = generator(streaming_callback=seen)
        running = asyncio.create_task(model.run_async(question, generation_kwargs=long))
        await asyncio.wait_for(begun.wait(), 60)
        running.cancel()

    asyncio.run(begin())
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
