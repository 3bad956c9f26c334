"""AutoGen, with its client for OpenAI's chats."""

import asyncio
import json
from typing import Any

import harness as h
from autogen_core import CancellationToken, FunctionCall
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from models import City
from openai import NotFoundError

asked = [UserMessage(content=h.QUESTION, source="user")]
weather = FunctionTool(h.weather, "Weather of a city")


def client(model: str = h.MODEL, **fields: Any) -> Any:
    info = {
        **dict.fromkeys(("function_calling", "json_output", "structured_output"), True),
        "vision": False,
        "family": ModelFamily.UNKNOWN,
    }
    settings = {"max_tokens": 60, "temperature": 0, "max_retries": 0, **fields}
    return OpenAIChatCompletionClient(
        model=model, base_url=h.URL + "/v1", api_key=h.KEY, model_info=info, **settings
    )


async def streamed(**fields: Any) -> Any:
    """Return the last part of a stream, which is the whole answer."""
    *_, last = [part async for part in client().create_stream(asked, **fields)]
    return last


def chat() -> None:
    answer = asyncio.run(client().create(asked))
    h.check(h.ANSWER in answer.content and answer.usage.completion_tokens > 0, answer)


def stream() -> None:
    answer = asyncio.run(streamed())
    h.check(h.ANSWER in answer.content, answer)


def tools() -> None:
    required: Any = {"tools": [weather], "tool_choice": "required"}
    for first in (
        asyncio.run(client().create(asked, **required)),
        asyncio.run(streamed(**required)),
    ):
        (call,) = first.content
        h.check(isinstance(call, FunctionCall) and "city" in json.loads(call.arguments), first)
    result = FunctionExecutionResult(
        content="sunny", name="weather", call_id=call.id, is_error=False
    )
    said = AssistantMessage(content=first.content, source="assistant")
    messages = [*asked, said, FunctionExecutionResultMessage(content=[result])]
    last = asyncio.run(client().create(messages, tools=[weather]))
    h.check(last.finish_reason, last)


def structured() -> None:
    answer = asyncio.run(client().create(asked, json_output=City))
    h.check(City.model_validate_json(answer.content).city in h.CITIES, answer)


def errors() -> None:
    async def ask() -> None:
        await client("nobody").create(asked)

    error = h.failure(NotFoundError, lambda: asyncio.run(ask()))
    h.check(error.status_code == 404, error)


def cancel() -> None:
    before = h.aborts()

    async def begin() -> None:
        long: Any = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
        question = [UserMessage(content=h.LONG, source="user")]
        token = CancellationToken()
        parts = client().create_stream(question, extra_create_args=long, cancellation_token=token)
        async for _ in parts:
            token.cancel()
            break
        await parts.aclose()

    asyncio.run(begin())
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
