"""instructor, over OpenAI's client."""

from typing import Any

import harness as h
import instructor
import openai
from models import City

plain = openai.OpenAI(base_url=h.URL + "/v1", api_key=h.KEY, max_retries=0)
asked: Any = [{"role": "user", "content": h.QUESTION}]
fields: Any = {
    "model": h.MODEL,
    "messages": asked,
    "temperature": 0,
    "max_tokens": 60,
    "max_retries": 0,
}


def client(mode: Any) -> Any:
    return instructor.from_openai(plain, mode=mode)


def chat() -> None:
    answer = client(instructor.Mode.TOOLS).chat.completions.create(response_model=None, **fields)
    h.check(h.ANSWER in answer.choices[0].message.content, answer)


def stream() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        parts = list(client(mode).create_partial(response_model=City, **fields))
        h.check(len(parts) > 2 and parts[-1].city in h.CITIES, parts)


def tools() -> None:
    answer = client(instructor.Mode.TOOLS).create(response_model=City, **fields)
    h.check(answer.city in h.CITIES, answer)


def structured() -> None:
    answer = client(instructor.Mode.JSON_SCHEMA).create(response_model=City, **fields)
    h.check(answer.city in h.CITIES, answer)


def errors() -> None:
    create = client(instructor.Mode.TOOLS).create
    error = h.failure(Exception, create, response_model=City, **fields | {"model": "nobody"})
    h.check("nobody" in str(error), error)


def cancel() -> None:
    before = h.aborts()
    long: Any = {"max_tokens": 1500, "messages": [{"role": "user", "content": h.LONG}]}
    chunks = client(instructor.Mode.TOOLS).chat.completions.create(
        response_model=None, stream=True, extra_body={"ignore_eos": True}, **fields | long
    )
    next(iter(chunks))
    chunks.close()
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
