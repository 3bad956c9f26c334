"""LangChain, through its package for Ollama."""

from typing import Any

import harness as h
import ollama
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaLLM
from models import City

HEADERS = {"headers": h.HEADERS}


def model(**fields: Any) -> Any:
    fields = {"model": h.MODEL, "num_predict": 60, "temperature": 0, "base_url": h.URL, **fields}
    return ChatOllama(client_kwargs=HEADERS, **fields)


def chat() -> None:
    answer = model(validate_model_on_init=True).invoke(h.QUESTION)
    h.check(h.ANSWER in answer.content and answer.usage_metadata["output_tokens"] > 0, answer)
    plain = OllamaLLM(
        model=h.MODEL, base_url=h.URL, num_predict=60, temperature=0, client_kwargs=HEADERS
    )
    h.check(h.ANSWER in plain.invoke(h.QUESTION), "a prompt")


def stream() -> None:
    chunks = list(model(keep_alive="5m", num_ctx=2048).stream(h.QUESTION))
    h.check(h.ANSWER in "".join(chunk.content for chunk in chunks), chunks)
    h.check(any(chunk.usage_metadata for chunk in chunks), chunks)


def tools() -> None:
    asked = HumanMessage("Tell me the weather in Rome.")
    bound = model(base_url=h.CALLER).bind_tools([tool(h.weather)])
    first = bound.invoke([asked])
    (call,) = first.tool_calls
    h.check(call["args"] == {"city": "Rome"}, first)
    last = bound.invoke([asked, first, ToolMessage("sunny", tool_call_id=call["id"])])
    h.check(last.content == "It is sunny.", last)
    thought = model(base_url=h.CALLER, reasoning=True).invoke("Think of Rome.")
    h.check(thought.additional_kwargs["reasoning_content"], thought)


def structured() -> None:
    answer = model().with_structured_output(City, method="json_schema").invoke(h.QUESTION)
    h.check(answer.city in h.CITIES, answer)


def errors() -> None:
    error = h.failure(ollama.ResponseError, model(model="nobody").invoke, h.QUESTION)
    h.check(error.status_code == 404 and "nobody" in str(error), error)


def cancel() -> None:
    before = h.aborts()
    chunks = model(num_predict=1500).stream(
        h.LONG, options={"ignore_eos": True, "num_predict": 1500}
    )
    next(chunks)
    chunks.close()
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
