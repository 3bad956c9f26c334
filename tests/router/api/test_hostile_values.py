"""Values that JSON can spell and that programs trip over, in fields of all APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.router.conftest import Server

CHAT_MODEL = True
FLAGS = ("--max-prompt-tokens=100000", "--ollama-manage")
VALUES = (
    *(r'"\ud800"', r'"\ud83d\ude00\udfff"', r'"\u0000\ufdd0\uffff\u2028"'),
    *("1" * 400, "-" + "1" * 400, "1" * 5000, "1e400", "-1e-400", "NaN"),
    *("[" * 900 + "]" * 900, "[" * 50_000, '{"a": 1, "a": 2}', "true", "null", ""),
)
ASKED = '"messages": [{"role": "user", "content": "x"}]'
OLLAMA = '"model": "tiny", "stream": false'
RESULT = '{"role": "tool", "tool_call_id": "c", "content": "3"}'
OUTPUT = '{"type": "function_call_output", "call_id": "c", "output": "1"}'
ANSWER = '{"type": "tool_result", "tool_use_id": "c", "content": "1"}'


def calls(arguments: str) -> Iterator[tuple[str, str]]:
    """Yield paths and bodies with an earlier call that has these ``arguments``."""
    called = f'"name": "f", "arguments": {arguments}'
    turn = f'{{"role": "assistant", "tool_calls": [{{"id": "c", "function": {{{called}}}}}]}}'
    chat = f'"messages": [{{"role": "user", "content": "x"}}, {turn}, {RESULT}]'
    yield "/v1/chat/completions", f"{{{chat}}}"
    yield "/tokenize", f"{{{chat}}}"
    yield "/api/chat", f"{{{OLLAMA}, {chat}}}"
    call = f'{{"type": "function_call", "call_id": "c", {called}}}'
    yield "/v1/responses", f'{{"input": [{call}, {OUTPUT}]}}'
    block = f'{{"type": "tool_use", "id": "c", "name": "f", "input": {arguments}}}'
    turns = (
        f'{{"role": "assistant", "content": [{block}]}}, {{"role": "user", "content": [{ANSWER}]}}'
    )
    yield "/v1/messages", f'{{"max_tokens": 4, "messages": [{turns}]}}'


def bodies() -> Iterator[tuple[str, str]]:
    """Yield paths and bodies: each value as it is, in an object, and that as text."""
    for value in VALUES:
        whole = f'{{"a": {value}}}'
        forms = (value or "0", whole, json.dumps(whole))
        for form in forms:
            yield from calls(form)
            for field in ("chat_template_kwargs", "guided_json", "metadata", "seed", "cache_salt"):
                yield "/v1/chat/completions", f'{{{ASKED}, "{field}": {form}}}'
            for field in ("keep_alive", "format", "options", "think"):
                yield "/api/chat", f'{{{OLLAMA}, {ASKED}, "{field}": {form}}}'
        yield "/v1/embeddings", f'{{"input": [{value}]}}'
        yield "/v1/rerank", f'{{"query": "x", "documents": [{value}]}}'


def test_no_value_is_an_error_of_the_server(server: Server) -> None:
    server.join("hello", context_length=100_000)
    headers = {"content-type": "application/json"}
    wrong = []
    for path, body in bodies():
        answer = server.client.post(path, content=body.encode(), headers=headers)
        if answer.status_code not in (200, 400):
            wrong.append((answer.status_code, path, body[:200], answer.text[:200]))
    assert not wrong, wrong[:10]
