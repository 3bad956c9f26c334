"""LangChain, through its package for Anthropic."""

from typing import Any

import anthropic
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
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from models import City


def model(**fields: Any) -> Any:
    fields = {"model": MODEL, "max_tokens": 60, **fields}
    return ChatAnthropic(base_url=URL, api_key=KEY, max_retries=0, **fields)


def chat() -> None:
    answer = model().invoke(QUESTION)
    check(ANSWER in answer.text and answer.usage_metadata["output_tokens"] > 0, answer)


def stream() -> None:
    chunks = list(model().stream(QUESTION))
    check(ANSWER in "".join(chunk.text for chunk in chunks), chunks)
    check(any(chunk.usage_metadata for chunk in chunks), chunks)


def tools() -> None:
    asked = HumanMessage(QUESTION)
    first = model().bind_tools([City], tool_choice="City").invoke([asked])
    (call,) = first.tool_calls[:1]
    check(call["args"]["city"] in CITIES, first)
    result = ToolMessage("sunny", tool_call_id=call["id"])
    check(model().bind_tools([City]).invoke([asked, first, result]).type == "ai", "an answer")


def structured() -> None:
    answer = model().with_structured_output(City, method="json_schema").invoke(QUESTION)
    check(answer.city in CITIES, answer)


def errors() -> None:
    try:
        model(model="nobody").invoke(QUESTION)
        check(False, "no error")
    except anthropic.NotFoundError as error:
        check("nobody" in str(error), error)


def cancel() -> None:
    before = aborts()
    chunks = model(max_tokens=1500).stream(LONG, extra_body={"ignore_eos": True})
    next(chunks)
    next(chunks)
    chunks.close()
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
