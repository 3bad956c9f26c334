"""instructor, over OpenAI's client."""

from typing import Any

import instructor
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
from models import City

plain = openai.OpenAI(base_url=URL + "/v1", api_key=KEY, max_retries=0)
asked: Any = [{"role": "user", "content": QUESTION}]
fields: Any = {
    "model": MODEL,
    "messages": asked,
    "temperature": 0,
    "max_tokens": 60,
    "max_retries": 0,
}


def client(mode: Any) -> Any:
    return instructor.from_openai(plain, mode=mode)


def chat() -> None:
    answer = client(instructor.Mode.TOOLS).chat.completions.create(response_model=None, **fields)
    check(ANSWER in answer.choices[0].message.content, answer)


def stream() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        parts = list(client(mode).create_partial(response_model=City, **fields))
        check(len(parts) > 2 and parts[-1].city in CITIES, parts)


def tools() -> None:
    answer = client(instructor.Mode.TOOLS).create(response_model=City, **fields)
    check(answer.city in CITIES, answer)


def structured() -> None:
    answer = client(instructor.Mode.JSON_SCHEMA).create(response_model=City, **fields)
    check(answer.city in CITIES, answer)


def errors() -> None:
    try:
        client(instructor.Mode.TOOLS).create(response_model=City, **fields | {"model": "nobody"})
        check(False, "no error")
    except Exception as error:
        check("nobody" in str(error), error)


def cancel() -> None:
    before = aborts()
    long: Any = {"max_tokens": 1500, "messages": [{"role": "user", "content": LONG}]}
    chunks = client(instructor.Mode.TOOLS).chat.completions.create(
        response_model=None, stream=True, extra_body={"ignore_eos": True}, **fields | long
    )
    next(iter(chunks))
    chunks.close()
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
