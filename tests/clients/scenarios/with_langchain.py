"""LangChain, through its package for OpenAI or for Anthropic: the one that is installed."""

from importlib.util import find_spec
from typing import Any

import harness as h
from langchain_core.messages import HumanMessage, ToolMessage
from models import City

if find_spec("langchain_openai"):
    from langchain_openai import ChatOpenAI as Chat
    from openai import NotFoundError

    FIELDS = {"base_url": h.URL + "/v1", "temperature": 0}
    CHOICE, STREAM, ERROR = "any", {"stream_usage": True}, '"model_not_found"'
else:
    from anthropic import NotFoundError  # type: ignore[assignment]
    from langchain_anthropic import ChatAnthropic as Chat

    FIELDS = {"base_url": h.URL}
    CHOICE, STREAM, ERROR = "City", {}, '"not_found_error"'


def model(**fields: Any) -> Any:
    fields = {"model": h.MODEL, "max_tokens": 60, "api_key": h.KEY, **FIELDS, **fields}
    return Chat(max_retries=0, **fields)


def chat() -> None:
    answer = model().invoke(h.QUESTION)
    h.check(h.ANSWER in answer.text and answer.usage_metadata["output_tokens"] > 0, answer)


def stream() -> None:
    chunks = list(model(**STREAM).stream(h.QUESTION))
    h.check(h.ANSWER in "".join(chunk.text for chunk in chunks), chunks)
    h.check(any(chunk.usage_metadata for chunk in chunks), chunks)


def tools() -> None:
    asked = HumanMessage(h.QUESTION)
    first = model().bind_tools([City], tool_choice=CHOICE).invoke([asked])
    (call,) = first.tool_calls[:1]
    h.check(call["args"]["city"] in h.CITIES, first)
    result = ToolMessage("sunny", tool_call_id=call["id"])
    h.check(model().bind_tools([City]).invoke([asked, first, result]).type == "ai", "an answer")


def structured() -> None:
    answer = model().with_structured_output(City, method="json_schema").invoke(h.QUESTION)
    h.check(answer.city in h.CITIES, answer)


def errors() -> None:
    error = h.failure(NotFoundError, model(model="nobody").invoke, h.QUESTION)
    h.check("nobody" in str(error) and ERROR in error.response.text, error)


def cancel() -> None:
    before = h.aborts()
    chunks = model(max_tokens=1500).stream(h.LONG, extra_body={"ignore_eos": True})
    next(chunks)
    next(chunks)
    chunks.close()
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
