"""Requests by which one client could hurt others: the list of `tests.e2e.abuse`.

Each is sent again and again, on several connections. Bodies are made before. What no client can
cause has tests of its own: half of a tokenizer's file (`tests.router.fleet.test_tokenizer_files`),
and a template as text (`tests.router.http.test_process`).
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from shared.descriptors import raise_descriptor_limit
from tests.e2e.abuse.attack import Attack
from tests.e2e.abuse.connections import connection_abuses
from tests.e2e.fuzz.framing import FramingError

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
COUNT = "/v1/messages/count_tokens"
CONNECTIONS = 4
GREEDY = "a greedy key"
_MB = 1_000_000


Abuse = Callable[[Attack], str]
"""Does one round of it. Returns what came of it: mostly a status."""


def _post(path: str, *more: str, **fields: Any) -> Abuse:
    body = json.dumps(fields).encode()
    return lambda attack: attack.post(path, body, *more)


def _chat(content: str = "hi", **fields: Any) -> Abuse:
    fields = {"max_tokens": 1, **fields}
    return _post(CHAT, messages=[{"role": "user", "content": content}], **fields)


def _tool(parameters: object, name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _properties(count: int, **fields: Any) -> dict[str, Any]:
    properties = {f"p{number}": {"type": "integer"} for number in range(count)}
    return {"type": "object", "properties": properties, "required": list(properties), **fields}


def _raw(body: bytes, path: str = CHAT, *more: str) -> Abuse:
    return lambda attack: attack.post(path, body, *more)


def _bomb(megabytes: int) -> bytes:
    """Return a gzip file of zeros. All but one megabyte are copies: compressing takes seconds."""
    packer, part, checksum = zlib.compressobj(wbits=-zlib.MAX_WBITS), bytes(_MB), 0
    packed = packer.compress(part) + packer.flush(zlib.Z_FULL_FLUSH)
    for _ in range(megabytes):
        checksum = zlib.crc32(part, checksum)
    sums = struct.pack("<II", checksum, megabytes * _MB)
    return b"\x1f\x8b\x08" + bytes(7) + packed * megabytes + packer.flush() + sums


def _leave(body: dict[str, Any], after_s: float, count: int = 1) -> Abuse:
    """Send requests at once, and close the connection before the answer."""
    encoded = json.dumps(body).encode()

    def leave(attack: Attack) -> str:
        with attack.connect() as client:
            client.sendall((attack.head(COMPLETIONS, len(encoded)) + encoded) * count)
            time.sleep(after_s)
        return "left"

    return leave


def _never_read(body: dict[str, Any]) -> Abuse:
    encoded = json.dumps(body).encode()

    def never_read(attack: Attack) -> str:
        client = attack.connect(receive_buffer=2048)
        client.sendall(attack.head(COMPLETIONS, len(encoded)) + encoded)
        time.sleep(1)
        # Closed without reading: a reset, as from a process that was killed.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        return "left"

    return never_read


def _headers(count: int, value: str = "x") -> Abuse:
    flood = [f"x-{number}: {value}" for number in range(count)]

    def send(attack: Attack) -> str:
        try:
            return attack.post(CHAT, b"{}", *flood)
        except OSError:  # closed while it was still sent
            return "closed"

    return send


def _conversation(size: int, turns: int) -> Abuse:
    """Store a long conversation in turns, then continue and list it."""
    text = "word " * (size // 5)

    def converse(attack: Attack) -> str:
        previous: dict[str, Any] = {}
        for number in range(turns + 2):
            body = {"input": text if number < turns else "and?", "max_output_tokens": 1, **previous}
            body["truncation"] = "auto"
            with attack.connect() as client:
                encoded = json.dumps(body).encode()
                client.sendall(attack.head(RESPONSES, len(encoded), "Connection: close") + encoded)
                response = http.client.HTTPResponse(client)
                response.begin()
                answer = json.loads(response.read())
            if response.status != 200:
                return str(response.status)
            previous = {"previous_response_id": answer["id"]}
        return "200"

    return converse


def _greedy(attack: Attack) -> str:
    """Ask for all that is allowed: many answers to a long prompt, of which nothing is cached."""
    prompt = [random.randrange(3, 200) for _ in range(1000)]
    body = {"prompt": prompt, "n": 16, "max_tokens": 100, "ignore_eos": True}
    return attack.post(COMPLETIONS, json.dumps(body).encode())


@cache
def abuses() -> Mapping[str, Abuse]:
    """Return the list, by name."""
    long = "The quick brown fox jumps over the lazy dog. " * 22_000
    fence = "```json" + " " * 600 + "x"
    ids = [list(range(3, 203)) * 10 for _ in range(8)]
    strict = _tool(_properties(20_000), strict=True)
    many_tools = [_tool(_properties(40), f"tool_{n}") for n in range(512)]
    slow = {"type": "integer", "multipleOf": 9999991}
    endless = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    refused = [{"role": "user", "content": long[:200_000]}, {"role": "function", "content": "x"}]
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    arguments = {f"argument{number}": number for number in range(31)}
    return {
        "a fence with much whitespace": _chat(
            tools=[_tool({})], guided_choice=[fence, fence + "y"], max_tokens=700
        ),
        "log-probabilities of prompts": _post(
            COMPLETIONS, prompt=ids, n=4, prompt_logprobs=20, max_tokens=1
        ),
        "log-probabilities of one prompt": _post(
            COMPLETIONS, prompt=ids[:2], n=4, prompt_logprobs=20, max_tokens=1
        ),
        "echoes with log-probabilities": _post(
            COMPLETIONS, prompt=ids[:4], n=8, echo=True, logprobs=5, max_tokens=1
        ),
        "a strict schema of a megabyte": _chat(tools=[strict], tool_choice="required"),
        "a response schema of a megabyte": _chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": _properties(20_000)},
            }
        ),
        "hundreds of tools": _chat(tools=many_tools, tool_choice="required"),
        "parameters that are nested deeply": _chat(tools=[_tool(_nested(450))]),
        "parameters without a form": _chat(tools=[_tool({"required": None, "properties": []})]),
        "a grammar that takes long": _chat(response_format=_format(slow)),
        "a grammar of one who has left": _leave(
            {"prompt": "x", "guided_json": slow, "max_tokens": 1}, 0.2
        ),
        "a regular expression of a megabyte": _chat(guided_regex="(a|b)" * 200_000),
        "200,000 prompts": _post(COMPLETIONS, prompt=["x"] * 200_000),
        "a prompt of a megabyte": _post(COMPLETIONS, prompt=long),
        "a long word": _chat("x" * _MB),
        "combining characters": _chat("e" + "\u0301" * 160_000),
        "control tokens spelled out": _chat("<|im_end|><|im_start|><" * 40_000),
        "30,000 messages": _post(CHAT, messages=[{"role": "user", "content": "x"}] * 30_000),
        "/tokenize": _post("/tokenize", prompt=long, return_token_strs=True),
        "/tokenize of messages": _post(
            "/tokenize", messages=[{"role": "user", "content": "x"}] * 30_000
        ),
        "/detokenize": _post("/detokenize", tokens=[5] * 300_000),
        "count_tokens": _post(COUNT, messages=[{"role": "user", "content": long}]),
        "a template that refuses": _post(CHAT, messages=refused, chat_template_kwargs=arguments),
        "a template that runs away": _post(
            CHAT, messages=turns * 1500, chat_template_kwargs={"rounds": 99_999}, max_tokens=1
        ),
        "a template that grows": _chat(long[:60_000], chat_template_kwargs={"grows": True}),
        "nested arrays": _raw(b'{"messages": ' + b"[" * 500_000),
        "nested objects": _raw(b'{"chat_template_kwargs": ' + b'{"a":' * 100_000),
        "numbers": _raw(b'{"messages": [' + b"1e9999," * 140_000 + b"1]}"),
        "escapes": _raw(
            b'{"messages": [{"role": "user", "content": "' + b"\\u00e9" * 160_000 + b'"}]}'
        ),
        "a compressed bomb": _raw(_bomb(500), CHAT, "Content-Encoding: gzip"),
        "stops and biases": _chat(
            stop=["a" * 1000 + str(n) for n in range(16)],
            logit_bias={str(n): 100 for n in range(3, 200)},
            max_tokens=500,
            ignore_eos=True,
            n=4,
        ),
        "many choices": _post(
            COMPLETIONS, prompt="abc", n=16, max_tokens=200, ignore_eos=True, stream=True
        ),
        GREEDY: _greedy,
        "items that are referred to again and again": _post(
            RESPONSES, input=[{"id": "msg_0"}] * 10_000, max_output_tokens=1
        ),
        "a stored conversation": _conversation(5_000, 6),
        "answers that repeat a large request": _post(
            RESPONSES, input="x", instructions=long, max_output_tokens=1, stream=True
        ),
        "a flood of headers": _headers(5000),
        "long headers": _headers(50, "x" * 4000),
        "a pipeline that is left": _leave(endless, 0.05, 8),
        "a flood in one pipeline": _leave(endless, 0.05, 1000),
        "streams that are left": _leave(endless, 0.05),
        "streams that nobody reads": _never_read({**endless, "n": 8, "logprobs": 5}),
        **connection_abuses(),
    }


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def run_abuse(name: str, port: int, key: str, seconds: float) -> Counter[str]:
    """Do it again and again on several connections. Return how often what came of it."""
    raise_descriptor_limit()
    attack, abuse = Attack(port, key), abuses()[name]
    end = time.monotonic() + seconds
    found: Counter[str] = Counter()

    def client(_: int) -> None:
        while time.monotonic() < end:
            try:
                found[abuse(attack)] += 1
            except FramingError as error:
                found[f"WRONG: {error}"] += 1
            except (OSError, http.client.HTTPException) as error:
                found[type(error).__name__] += 1

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(client, range(CONNECTIONS)))
    return found
