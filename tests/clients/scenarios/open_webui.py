"""The calls that Open WebUI makes to a server: the list of models, a streamed answer, and the
title of the conversation. (The application itself is too large to install here.)"""

import json
from typing import Any

import harness as h
import httpx

client = httpx.Client(
    base_url=h.URL + "/v1", headers={"authorization": f"Bearer {h.KEY}"}, timeout=120
)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": h.MODEL, "messages": [{"role": "user", "content": text}], **fields}


def chat() -> None:
    models = client.get("/models").json()
    h.check(h.MODEL in [model["id"] for model in models["data"]], models)
    title = client.post(
        "/chat/completions", json=body(h.QUESTION, stream=False, max_completion_tokens=60)
    )
    h.check(h.ANSWER in title.json()["choices"][0]["message"]["content"], title.text)


def stream() -> None:
    asked = body(h.QUESTION, stream=True, stream_options={"include_usage": True})
    with client.stream("POST", "/chat/completions", json=asked) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    h.check(lines[-1] == "data: [DONE]", lines[-1])
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    h.check(h.ANSWER in text and chunks[-1]["usage"]["completion_tokens"] > 0, text)


def tools() -> None:
    raise h.NotApplicable("it describes tools in the prompt")


def structured() -> None:
    raise h.NotApplicable("it has no structured output")


def errors() -> None:
    answer = client.post("/chat/completions", json=body(h.QUESTION) | {"model": "nobody"})
    h.check(
        answer.status_code == 404 and "nobody" in answer.json()["error"]["message"], answer.text
    )


def cancel() -> None:
    before = h.aborts()
    asked = body(h.LONG, stream=True, max_tokens=1500, ignore_eos=True)
    with client.stream("POST", "/chat/completions", json=asked) as answer:
        next(answer.iter_bytes())
    h.check_aborted(before)


h.run(chat, stream, tools, structured, errors, cancel)
