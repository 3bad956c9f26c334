"""LangChain, through its package for OpenAI or for Anthropic: the one that is installed."""

from importlib.util import find_spec
from typing import Any

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
from models import City

if find_spec("langchain_openai"):
    from langchain_openai import ChatOpenAI as Chat
    from openai import NotFoundError

    FIELDS = {"base_url": URL + "/v1", "temperature": 0}
    CHOICE, STREAM = "any", {"stream_usage": True}
else:
    from anthropic import NotFoundError  # type: ignore[assignment]
    from langchain_anthropic import ChatAnthropic as Chat

    FIELDS = {"base_url": URL}
    CHOICE, STREAM = "City", {}


def model(**fields: Any) -> Any:
    fields = {"model": MODEL, "max_tokens": 60, "api_key": KEY, **FIELDS, **fields}
    return Chat(max_retries=0, **fields)


def chat() -> None:
    answer = model().invoke(QUESTION)
    check(ANSWER in answer.text and answer.usage_metadata["output_tokens"] > 0, answer)


def stream() -> None:
    chunks = list(model(**STREAM).stream(QUESTION))
    check(ANSWER in "".join(chunk.text for chunk in chunks), chunks)
    check(any(chunk.usage_metadata for chunk in chunks), chunks)


def tools() -> None:
    asked = HumanMessage(QUESTION)
    first = model().bind_tools([City], tool_choice=CHOICE).invoke([asked])
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
    except NotFoundError as error:
        check("nobody" in str(error) and '"model_not_found"' in error.response.text, error)


def cancel() -> None:
    before = aborts()
    chunks = model(max_tokens=1500).stream(LONG, extra_body={"ignore_eos": True})
    next(chunks)
    next(chunks)
    chunks.close()
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
