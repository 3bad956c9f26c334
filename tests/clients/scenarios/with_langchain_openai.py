"""LangChain, through its package for OpenAI."""

from typing import Any

import openai
from harness import (
    ANSWER,
    CITIES,
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
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from models import City


def model(**fields: Any) -> Any:
    fields = {"model": MODEL, "max_tokens": 60, "temperature": 0, **fields}
    return ChatOpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0, **fields)


def chat() -> None:
    answer = model().invoke(QUESTION)
    check(ANSWER in answer.content and answer.usage_metadata["output_tokens"] > 0, answer)


def stream() -> None:
    chunks = list(model(stream_usage=True).stream(QUESTION))
    check(ANSWER in "".join(chunk.content for chunk in chunks), chunks)
    check(any(chunk.usage_metadata for chunk in chunks), chunks)


def tools() -> None:
    asked = HumanMessage(QUESTION)
    bound = model().bind_tools([City])
    first = model().bind_tools([City], tool_choice="any").invoke([asked])
    (call,) = first.tool_calls[:1]
    check(call["args"]["city"] in CITIES, first)
    result = ToolMessage("sunny", tool_call_id=call["id"])
    check(bound.invoke([asked, first, result]).type == "ai", "an answer to the result")


def structured() -> None:
    answer = model().with_structured_output(City, method="json_schema").invoke(QUESTION)
    check(answer.city in CITIES, answer)


def errors() -> None:
    try:
        model(model="nobody").invoke(QUESTION)
        check(False, "no error")
    except openai.NotFoundError as error:
        check(error.code == "model_not_found", error)


def cancel() -> None:
    before = aborts()
    chunks = model(max_tokens=1500, extra_body={"ignore_eos": True}).stream(LONG)
    next(chunks)
    chunks.close()
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
