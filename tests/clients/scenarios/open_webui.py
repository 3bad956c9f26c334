"""The calls that Open WebUI makes to a server: the list of models, a streamed answer, and the
title of the conversation. (The application itself is too large to install here.)"""

import json
from typing import Any

import httpx
from harness import (
    ANSWER,
    KEY,
    LONG,
    MODEL,
    QUESTION,
    URL,
    NotApplicable,
    aborts,
    check,
    check_aborted,
    run,
)

client = httpx.Client(base_url=URL + "/v1", headers={"authorization": f"Bearer {KEY}"}, timeout=120)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def chat() -> None:
    models = client.get("/models").json()
    check(MODEL in [model["id"] for model in models["data"]], models)
    title = client.post(
        "/chat/completions", json=body(QUESTION, stream=False, max_completion_tokens=60)
    )
    check(ANSWER in title.json()["choices"][0]["message"]["content"], title.text)


def stream() -> None:
    asked = body(QUESTION, stream=True, stream_options={"include_usage": True})
    with client.stream("POST", "/chat/completions", json=asked) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    check(lines[-1] == "data: [DONE]", lines[-1])
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    check(ANSWER in text and chunks[-1]["usage"]["completion_tokens"] > 0, text)


def tools() -> None:
    raise NotApplicable("it describes tools in the prompt")


def structured() -> None:
    raise NotApplicable("it has no structured output")


def errors() -> None:
    answer = client.post("/chat/completions", json=body(QUESTION) | {"model": "nobody"})
    check(answer.status_code == 404 and "nobody" in answer.json()["error"]["message"], answer.text)


def cancel() -> None:
    before = aborts()
    asked = body(LONG, stream=True, max_tokens=1500, ignore_eos=True)
    with client.stream("POST", "/chat/completions", json=asked) as answer:
        next(answer.iter_bytes())
    check_aborted(before)


run(chat, stream, tools, structured, errors, cancel)
