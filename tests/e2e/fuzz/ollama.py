"""Random bodies for Ollama's API, for `tests.e2e.fuzz.agents`."""

from __future__ import annotations

import random
from typing import Any

PATHS = ("/api/chat", "/api/generate", "/api/show")

_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
_MESSAGES: list[dict[str, Any]] = [
    *({"role": role, "content": "x<|im_end|>"} for role in ("user", "system", "assistant")),
    {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [_CALL, _CALL]},
    {"role": "assistant", "tool_calls": [{**_CALL, "id": "c"}]},
    {"role": "tool", "content": "sunny", "tool_name": "weather"},
    {"role": "tool", "content": "sunny", "tool_call_id": "c"},
    {"role": "user", "content": "x", "images": ["aGk="]},
    {"role": "user", "content": "x" * 400},
]
_OPTIONS: dict[str, list[Any]] = {
    "num_ctx": [0, 4, 64, 4096.0],
    "seed": [-1, 0, 42, 1.0],
    "stop": ["x", ["a", "b"], []],
    "temperature": [0, 0.7, 2],
    "top_k": [-1, 0, 40.0],
    "top_p": [0.5, 1],
    "min_p": [0, 0.1],
    "repeat_penalty": [0, 1.1],
    "repeat_last_n": [-1, 0, 64],
    "presence_penalty": [-2, 1],
    "frequency_penalty": [0.5],
    "num_gpu": [1],
    "typical_p": [0.7],
}
_FIELDS: dict[str, list[Any]] = {
    "stream": [True, False],
    "format": ["", "json", _SCHEMA, {"type": "nonsense"}],
    "think": [True, False, "low", "max"],
    "keep_alive": [0, -1, "5m", "0s", 1.5],
    "logprobs": [True, False],
    "top_logprobs": [0, 20],
    "truncate": [True, False],
}
_CHAT: dict[str, list[Any]] = {
    "tools": [
        [],
        [{"type": "function", "function": {"name": "weather", "parameters": _SCHEMA}}],
        [{"type": "function", "function": {"name": "weather"}}],
    ]
}
_GENERATE: dict[str, list[Any]] = {
    "raw": [True, False],
    "system": ["", "be kind"],
    "context": [[], [1, 2, 3], [10**6]],
    "suffix": ["", "x"],
    "template": ["", "{{ .Prompt }}"],
    "images": [[], ["aGk="]],
}


def ollama_body(path: str, model: str, draw: random.Random) -> dict[str, Any]:
    """Return a body for ``path``; its answer has few tokens."""
    name = draw.choice((model, f"{model}:latest"))
    if path == "/api/show":
        return {draw.choice(("model", "name")): name, "verbose": draw.random() < 0.5}
    own = _CHAT if path == "/api/chat" else _GENERATE
    made = _drawn({**_FIELDS, **own}, draw) | {"model": name}
    made["options"] = _drawn(_OPTIONS, draw) | {"num_predict": draw.choice((4, 4.0, 8))}
    if path == "/api/chat":
        made["messages"] = draw.choices(_MESSAGES, k=draw.randrange(6))
    else:
        made["prompt"] = draw.choice(("", "x", "x" * 400))
    return made


def _drawn(fields: dict[str, list[Any]], draw: random.Random) -> dict[str, Any]:
    return {name: draw.choice(fields[name]) for name in fields if draw.random() < 0.3}
