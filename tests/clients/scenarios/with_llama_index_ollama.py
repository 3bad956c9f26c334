"""LlamaIndex, through its package for Ollama."""

from typing import Any

import harness as h
import ollama
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from models import City

asked = [ChatMessage(role="user", content=h.QUESTION)]


def model(url: str = h.URL, **fields: Any) -> Any:
    options = {"num_predict": 60, "temperature": 0, **fields.pop("options", {})}
    fields = {"model": h.MODEL, "additional_kwargs": options, "request_timeout": 120.0, **fields}
    return Ollama(base_url=url, client=ollama.Client(url, headers=h.HEADERS), **fields)


def chat() -> None:
    llm = model()
    answer = llm.chat(asked)
    h.check(h.ANSWER in answer.message.content, answer)
    h.check(answer.raw["usage"]["completion_tokens"] > 0, answer.raw)
    h.check(h.ANSWER in llm.complete(h.QUESTION).text, "a prompt")
    h.check(llm.metadata.context_window == llm.get_context_window(), llm.metadata)


def stream() -> None:
    *_, last = model().stream_chat(asked)
    h.check(h.ANSWER in last.message.content, last)


def tools() -> None:
    question = "Tell me the weather in Rome."
    tool = FunctionTool.from_defaults(h.weather)
    llm = model(h.CALLER)
    first = llm.chat_with_tools([tool], user_msg=question)
    (call,) = llm.get_tool_calls_from_response(first)
    h.check(call.tool_kwargs == {"city": "Rome"}, first)
    said = ChatMessage(role="user", content=question)
    result = ChatMessage(role="tool", content="sunny", additional_kwargs={"tool_name": "weather"})
    last = llm.chat_with_tools([tool], chat_history=[said, first.message, result])
    h.check(last.message.content == "It is sunny.", last)


def structured() -> None:
    prompt = PromptTemplate("{question}")
    answer = model().structured_predict(City, prompt, question=h.QUESTION)
    h.check(answer.city in h.CITIES, answer)


def errors() -> None:
    missing = model(model="nobody", context_window=1000)
    error = h.failure(ollama.ResponseError, missing.chat, asked)
    h.check(error.status_code == 404 and "nobody" in str(error), error)


def cancel() -> None:
    before = h.aborts()
    options = {"num_predict": 1500, "ignore_eos": True}
    parts = model(options=options).stream_chat([ChatMessage(role="user", content=h.LONG)])
    next(parts)
    parts.close()
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
