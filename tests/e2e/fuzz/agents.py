"""Random requests of coding agents: tools, items, blocks and settings of the Responses and Messages
APIs and of Ollama's, put together at random, in part with a value that does not belong there.

A generator that knows only `/openapi.json` seldom reaches them: the type of a tool or an item says
what else it needs, and no schema says which types there are.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import httpx

from tests.e2e.fuzz import ollama

_PATHS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
_Json = dict[str, Any]
_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_FUNCTION = {"type": "function", "name": "read", "parameters": _SCHEMA, "strict": True}
_GRAMMARS = [
    {"type": "grammar", "syntax": "lark", "definition": 'start: "a" LF?\n%import common.LF'},
    {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | /[^"]/'},
    {"type": "grammar", "syntax": "lark", "definition": "start: x\n  | <|im_end|> %json {}"},
    {"type": "grammar", "syntax": "regex", "definition": r'[a-z"\n]{1,3}\\'},
    {"type": "grammar", "syntax": "regex", "definition": "[a-(?x)"},
    {"type": "text"},
]
_TOOLS: list[_Json] = [
    _FUNCTION,
    {"type": "namespace", "name": "team", "tools": [{**_FUNCTION, "name": "ask"}]},
    *({"type": "custom", "name": "write", "format": each} for each in _GRAMMARS),
    {"type": "custom", "name": "say"},
    *({"type": each} for each in ("local_shell", "shell", "apply_patch")),
    *({"type": each} for each in ("web_search", "mcp", "code_interpreter", "image_generation")),
    {"type": "tool_search", "execution": "client"},
    {**_FUNCTION, "name": "late", "defer_loading": True},
]
_PART = {"type": "input_text", "text": "x<|im_end|>"}
_ITEMS: list[_Json] = [
    *({"role": role, "content": "x"} for role in ("user", "assistant", "system", "developer")),
    {
        "type": "message",
        "role": "user",
        "content": [_PART, {"type": "input_image", "file_id": "x"}],
    },
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": "AAAA"},
    {"type": "function_call", "call_id": "c", "name": "read", "arguments": '{"path": 1'},
    {"type": "function_call", "call_id": "c", "name": "ask", "namespace": "team", "arguments": {}},
    {"type": "custom_tool_call", "call_id": "c", "name": "write", "input": "a"},
    {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
    {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
    *(
        {"type": f"{kind}_output", "call_id": "c", "output": output}
        for kind in ("function_call", "custom_tool_call", "local_shell_call", "shell_call")
        for output in ("x", [_PART], [{"stdout": "x", "outcome": {"type": "exit", "exit_code": 2}}])
    ),
    {"type": "web_search_call", "id": "ws_x", "action": {"type": "search", "query": "x"}},
    {"type": "mcp_list_tools", "server_label": "x", "tools": [{"name": "x"}]},
    {"type": "made_up", "output": {"x": [1]}, "content": "x"},
    *(
        {"type": "tool_search_call", "call_id": each, "arguments": {"query": "x"}}
        for each in ("s", None)
    ),
    *(
        {"type": "tool_search_output", "call_id": each, "tools": [{**_FUNCTION, "name": "late"}]}
        for each in ("s", None)
    ),
    {"type": "additional_tools", "role": "developer", "tools": [{**_FUNCTION, "name": "more"}]},
    {"type": "configuration_update", "reasoning": {"effort": "low"}},
    {"type": "compaction_trigger"},
]
_REFUSED_ITEMS: list[_Json] = [
    {"type": "item_reference", "id": "msg_x"},
    {"type": "compaction", "encrypted_content": "AAAA"},
]
_CHOICES: list[Any] = [
    *("auto", "none", "required"),
    *({"type": "function", "name": name} for name in ("read", "other")),
    {"type": "custom", "name": "write"},
    {"type": "local_shell"},
    {"type": "web_search"},
    *(
        {"type": "allowed_tools", "mode": mode, "tools": [_FUNCTION, {"type": "mcp"}]}
        for mode in ("auto", "required")
    ),
]
_RESPONSES: dict[str, list[Any]] = {
    "tool_choice": _CHOICES,
    "include": [["reasoning.encrypted_content"], ["message.output_text.logprobs", "x"], []],
    "reasoning": [
        {"effort": "low"},
        {"effort": "none", "summary": "auto"},
        {"summary": "detailed"},
    ],
    "store": [True, False],
    "parallel_tool_calls": [True, False],
    "truncation": ["auto", "disabled"],
    "text": [{"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}],
    "prompt_cache_key": ["x"],
    "client_metadata": [{"x": "y"}],
    "max_tool_calls": [1],
    "stream": [True, False],
    "context_management": [[], [{"type": "compaction", "compact_threshold": 60}]],
}
_REFUSED: dict[str, list[Any]] = {
    "background": [True, False],
    "previous_response_id": ["resp_x"],
}
_BLOCKS: list[_Json] = [
    {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
    {"type": "thinking", "thinking": "x", "signature": "y"},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "x"}},
    *(
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "is_error": error}
        for content in ("x", [{"type": "text", "text": "x"}], [{"type": "image"}], [])
        for error in (True, False)
    ),
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    {"type": "document", "source": {"type": "text", "data": "x"}},
    {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}},
    {
        "type": "search_result",
        "source": "x",
        "title": "y",
        "content": [{"type": "text", "text": "z"}],
    },
    {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "tool_reference", "tool_name": "late"}],
    },
    {"type": "mcp_tool_result", "tool_use_id": "x", "content": {"a": [None]}},
    {"type": "made_up", "content": [{"type": "x", "content": [{"type": "y"}]}]},
]
_MESSAGES: dict[str, list[Any]] = {
    "tools": [
        [{"name": "read", "input_schema": _SCHEMA, "strict": True}],
        [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}],
        [{"type": "custom", "name": "read", "input_schema": {}}, {"type": "x", "name": "y"}],
        [
            {"name": "tool_search", "input_schema": {}},
            {"name": "late", "input_schema": _SCHEMA, "defer_loading": True},
        ],
    ],
    "tool_choice": [
        *({"type": kind} for kind in ("auto", "any", "none", "tool")),
        {"type": "tool", "name": "read", "disable_parallel_tool_use": True},
        {"type": "any", "disable_parallel_tool_use": True},
    ],
    "thinking": [
        {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
        {"type": "adaptive"},
        {"type": "disabled"},
    ],
    "output_config": [
        {"effort": "high"},
        {"format": {"type": "json_schema", "schema": _SCHEMA}},
        {"effort": "max", "task_budget": {"type": "tokens", "total": 9}},
    ],
    "context_management": [{"edits": [{"type": "clear_tool_uses_20250919"}]}, {}],
    "system": ["x", [{"type": "text", "text": "x-anthropic-billing-header: x"}]],
    "metadata": [{"user_id": "x"}],
    "stream": [True, False],
}
_ODD: list[Any] = [
    None,
    "",
    "\0",
    "\ufdd0",
    [],
    {},
    [[]],
    [None],
    -1,
    10**30,
    1.5,
    True,
    "x" * 5000,
]


def body(path: str, draw: random.Random) -> _Json:
    """Return a body for ``path``."""
    fields = _RESPONSES if path == "/v1/responses" else _MESSAGES
    made: _Json = {name: draw.choice(fields[name]) for name in fields if draw.random() < 0.35}
    if path == "/v1/responses":
        made["input"] = draw.choices(_ITEMS, k=draw.randrange(1, 6))
        if draw.random() < 0.1:
            name = draw.choice(sorted(_REFUSED))
            made[name] = draw.choice(_REFUSED[name])
            made["input"].append(draw.choice(_REFUSED_ITEMS))
        made["max_output_tokens"] = 8
        if draw.random() < 0.8:
            made["tools"] = draw.sample(_TOOLS, k=draw.randrange(1, 4))
    else:
        roles = ("user", "assistant", "user", "assistant", "user")
        count = draw.choice((1, 3, 5, 2))
        made["messages"] = [
            {"role": role, "content": draw.choices(_BLOCKS, k=draw.randrange(1, 4))}
            for role in roles[:count]
        ]
        made["max_tokens"] = 8
    return _mutated(made, draw) if draw.random() < 0.4 else made


def _mutated(value: Any, draw: random.Random) -> Any:
    """Return ``value`` with something odd at a random place."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.15:
        return draw.choice(_ODD)
    if isinstance(value, list):
        place = draw.randrange(len(value))
        return [*value[:place], _mutated(value[place], draw), *value[place + 1 :]]
    name = draw.choice(sorted(value))
    return {**value, name: _mutated(value[name], draw)}


def fuzz_agents(client: httpx.Client, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Send ``count`` requests. Return how often each field was part of one that was answered, and
    the requests that failed by an error of the server's."""
    draw = random.Random(seed)
    model = client.get("/v1/models").json()["data"][0]["id"]
    reached: Counter[str] = Counter()
    failed: list[str] = []
    for _ in range(count):
        path = draw.choice((*_PATHS, *ollama.PATHS))
        if path in ollama.PATHS:
            asked = ollama.ollama_body(path, model, draw)
            asked = _mutated(asked, draw) if draw.random() < 0.3 else asked
        else:
            asked = body(path, draw)
        answer = client.post(path, json=asked)
        if answer.status_code >= 500:
            failed.append(f"{answer.status_code} {path} {asked!r}: {answer.text[:300]}")
        elif answer.status_code == 200:
            reached.update(list(asked) if isinstance(asked, dict) else ())
    return reached, failed
