"""pydantic-ai."""

import asyncio
from typing import Any

import harness as h
from models import City
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=h.URL + "/v1", api_key=h.KEY)
settings: Any = {"max_tokens": 60, "temperature": 0}


def agent(name: str = h.MODEL, **fields: Any) -> Any:
    return Agent(OpenAIChatModel(name, provider=provider), model_settings=settings, **fields)


def chat() -> None:
    answer = agent().run_sync(h.QUESTION)
    h.check(h.ANSWER in answer.output, answer)


def stream() -> None:
    async def texts() -> list[str]:
        async with agent().run_stream(h.QUESTION) as answer:
            return [text async for text in answer.stream_text(delta=True)]

    text = "".join(asyncio.run(texts()))
    h.check(h.ANSWER in text, text)


def tools() -> None:
    answer = agent(output_type=ToolOutput(City), retries=0).run_sync(h.QUESTION)
    h.check(answer.output.city in h.CITIES, answer)
    again = agent().run_sync("And?", message_history=answer.all_messages())
    h.check(isinstance(again.output, str), again)


def structured() -> None:
    answer = agent(output_type=NativeOutput(City), retries=0).run_sync(h.QUESTION)
    h.check(answer.output.city in h.CITIES, answer)


def errors() -> None:
    error = h.failure(ModelHTTPError, agent("nobody").run_sync, h.QUESTION)
    h.check(error.status_code == 404, error)


def cancel() -> None:
    before = h.aborts()
    long: Any = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}

    async def begin() -> None:
        running = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 60)
        running.cancel()

    async def read() -> None:
        async with agent().run_stream(h.LONG, model_settings=long) as answer:
            async for _ in answer.stream_text(delta=True):
                begun.set()

    begun = asyncio.Event()
    asyncio.run(begin())
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
