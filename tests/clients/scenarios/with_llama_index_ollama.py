"""LlamaIndex, through its package for Ollama."""

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
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from models import City

HEADERS = {"authorization": f"Bearer {KEY}"}
asked = [ChatMessage(role="user", content=QUESTION)]


def model(url: str = URL, **fields: Any) -> Any:
    options = {"num_predict": 60, "temperature": 0, **fields.pop("options", {})}
    fields = {"model": MODEL, "additional_kwargs": options, "request_timeout": 120.0, **fields}
    return Ollama(base_url=url, client=ollama.Client(url, headers=HEADERS), **fields)


def weather(city: str) -> str:
    """Tell the weather."""
    return f"sunny in {city}"


def chat() -> None:
    llm = model()
    answer = llm.chat(asked)
    check(ANSWER in answer.message.content, answer)
    check(answer.raw["usage"]["completion_tokens"] > 0, answer.raw)
    check(ANSWER in llm.complete(QUESTION).text, "a prompt")
    check(llm.metadata.context_window == llm.get_context_window(), llm.metadata)


def stream() -> None:
    *_, last = model().stream_chat(asked)
    check(ANSWER in last.message.content, last)


def tools() -> None:
    question = "Tell me the weather in Rome."
    tool = FunctionTool.from_defaults(weather)
    llm = model(CALLER)
    first = llm.chat_with_tools([tool], user_msg=question)
    (call,) = llm.get_tool_calls_from_response(first)
    check(call.tool_kwargs == {"city": "Rome"}, first)
    said = ChatMessage(role="user", content=question)
    result = ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_name": "weather"})
    last = llm.chat_with_tools([tool], chat_history=[said, first.message, result])
    check(last.message.content == "It is sunny.", last)


def structured() -> None:
    prompt = PromptTemplate("{question}")
    answer = model().structured_predict(City, prompt, question=QUESTION)
    check(answer.city in CITIES, answer)


def errors() -> None:
    try:
        model(model="nobody", context_window=1000).chat(asked)
        check(False, "no error")
    except ollama.ResponseError as error:
        check(error.status_code == 404 and "nobody" in str(error), error)


def cancel() -> None:
    before = aborts()
    options = {"num_predict": 1500, "ignore_eos": True}
    parts = model(options=options).stream_chat([ChatMessage(role="user", content=LONG)])
    next(parts)
    parts.close()
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
