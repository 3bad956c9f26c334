"""LangChain, through its package for Ollama."""

from typing import Any

import ollama
from harness import (
    ANSWER,
    CALLER,
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
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaLLM
from models import City

HEADERS = {"headers": {"authorization": f"Bearer {KEY}"}}


def model(**fields: Any) -> Any:
    fields = {"model": MODEL, "num_predict": 60, "temperature": 0, "base_url": URL, **fields}
    return ChatOllama(client_kwargs=HEADERS, **fields)


@tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


def chat() -> None:
    answer = model(validate_model_on_init=True).invoke(QUESTION)
    check(ANSWER in answer.content and answer.usage_metadata["output_tokens"] > 0, answer)
    plain = OllamaLLM(
        model=MODEL, base_url=URL, num_predict=60, temperature=0, client_kwargs=HEADERS
    )
    check(ANSWER in plain.invoke(QUESTION), "a prompt")


def stream() -> None:
    chunks = list(model(keep_alive="5m", num_ctx=2048).stream(QUESTION))
    check(ANSWER in "".join(chunk.content for chunk in chunks), chunks)
    check(any(chunk.usage_metadata for chunk in chunks), chunks)


def tools() -> None:
    asked = HumanMessage("Tell me the weather in Rome.")
    bound = model(base_url=CALLER).bind_tools([weather])
    first = bound.invoke([asked])
    (call,) = first.tool_calls
    check(call["args"] == {"city": "Rome"}, first)
    last = bound.invoke([asked, first, ToolMessage("sunny", tool_call_id=call["id"])])
    check(last.content == "It is sunny.", last)
    thought = model(base_url=CALLER, reasoning=True).invoke("Think of Rome.")
    check(thought.additional_kwargs["reasoning_content"], thought)


def structured() -> None:
    answer = model().with_structured_output(City, method="json_schema").invoke(QUESTION)
    check(answer.city in CITIES, answer)


def errors() -> None:
    try:
        model(model="nobody").invoke(QUESTION)
        check(False, "no error")
    except ollama.ResponseError as error:
        check(error.status_code == 404 and "nobody" in str(error), error)


def cancel() -> None:
    before = aborts()
    chunks = model(num_predict=1500).stream(LONG, options={"ignore_eos": True, "num_predict": 1500})
    next(chunks)
    chunks.close()
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
