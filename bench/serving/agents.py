"""Recorded sessions of coding agents, replayed: how much of each prompt is found in the cache.

The baseline is the common prefix of a prompt and an earlier one of the same conversation. It is
computed here from the tokens of both, independently of the server."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.servers import mlx_lm_server, ours
from bench.serving import sessions
from bench.serving.models import CONTEXT, make_short_demo
from bench.serving.sessions import Request
from engine.model.demo import demo_model_path
from engine.replica.forecast import forecast
from router.anthropic.schemas import MessagesRequest
from router.anthropic.translation import chat_request as from_messages
from router.responses.schemas import ResponsesRequest
from router.responses.sealing import ReasoningSeal
from router.responses.tools import client_tools
from router.responses.translation import chat_request as from_responses
from router.responses.translation import resolve_input
from router.schemas.requests import ChatRequest
from router.tokens.conversations.tools import tool_schema
from router.tokens.templates import TOKEN_BREAK, ChatTemplate
from shared.settings import Settings

LAYERS = 1
"""Layers of the demo model: a session has 30 prompts of up to 20,000 tokens."""
BUDGET_TOKENS, LONGEST_TOKENS = 30_000, 12_000
"""Memory in tokens of `agents_in_budget`, and the longest prompts there."""
FLAGS = (
    *("--max-prompt-tokens", str(CONTEXT), "--max-request-bytes", "10000000"),
    *("--reasoning-key", sessions.REASONING_KEY),
)
_BLOCK = Settings().block_size
_TIMEOUT_S = 600
_CHAT = "/v1/chat/completions"
_LIMITS = {
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    _CHAT: "max_tokens",
}


class Turn(NamedTuple):
    """One replayed request. Numbers are tokens of its prompt."""

    line: str
    prompt: int
    cached: int
    known: int
    """Tokens in common with an earlier prompt of the same line."""
    before: int
    """Tokens of the previous prompt in the line; more than ``known`` if that is not a prefix."""
    first_s: float
    why: str
    """The answer's x-debug-cache."""
    error: str = ""

    @property
    def known_in_blocks(self) -> int:
        return self.known // _BLOCK * _BLOCK


class Share(NamedTuple):
    """How much of the turns of a session was found in the cache."""

    least: float
    """The smallest fraction of known tokens found, over all turns with at least a block of them."""
    known: float
    """The fraction of all known tokens."""
    prompts: float
    """The fraction of all prompt tokens."""


def agents(model: str, runs: int) -> None:
    """Replay each session on both servers: from RAM, and here also after a restart."""
    with tempfile.TemporaryDirectory(prefix="bench-") as private:
        path = Path(model)
        if model.startswith("demo"):
            path = make_short_demo(demo_model_path(), Path(private) / "model", LAYERS)
        for name in sessions.names():
            requests = sessions.with_titles(sessions.read(name))
            tokens = prompt_tokens(path, requests)
            print(f"\n{name}: {len(requests)} requests, prompts of up to {max(map(len, tokens)):,}")
            ssd = Path(private) / f"ssd-{name}"
            flags = (*FLAGS, "--ssd-policy", "write_through")
            with ours(str(path), *flags, ssd=ssd) as port:
                mine = replay(port, requests, tokens)
            _print("this server, in RAM", mine)
            with ours(str(path), *flags, ssd=ssd) as port:
                _print("after a restart", replay(port, requests, tokens, again=True))
            with mlx_lm_server(path) as port:
                theirs = replay(port, requests, tokens, as_chat=True)
            _print("mlx_lm.server", theirs)
            pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if not (a.error or b.error)]
            for what, warm in (("first of a line", False), ("later ones", True)):
                ratios = [a.first_s / b.first_s for a, b in pairs if bool(a.known) is warm]
                print(f"    ratio of first-token times, {what}: {statistics.median(ratios):.2f}")


def agents_in_budget(model: str, runs: int) -> None:
    """Replay the shorter prompts of all sessions, one session after the other, on both servers with
    the same bytes of memory for their prompt caches, and without an SSD."""
    with tempfile.TemporaryDirectory(prefix="bench-") as private:
        path = Path(model)
        if model.startswith("demo"):
            path = make_short_demo(demo_model_path(), Path(private) / "model", LAYERS)
        token_bytes = forecast(path, Settings(kv_bits=16)).spec.token_bytes
        requests, tokens = [], []
        for name in sessions.names():
            its = sessions.with_titles(sessions.read(name))
            for request, prompt in zip(its, prompt_tokens(path, its), strict=True):
                if len(prompt) <= LONGEST_TOKENS:
                    requests.append(request._replace(line=f"{name} {request.line}"))
                    tokens.append(prompt)
        longest, blocks = max(map(len, tokens)), BUDGET_TOKENS // _BLOCK
        print(f"{len(requests)} requests, prompts of up to {longest:,}; {BUDGET_TOKENS:,} tokens")
        with ours(str(path), *FLAGS, "--no-ssd", "--num-blocks", str(blocks)) as port:
            _print("this server", replay(port, requests, tokens))
        budget = ("--prompt-cache-bytes", str(BUDGET_TOKENS * token_bytes))
        with mlx_lm_server(path, *budget) as port:
            _print("mlx_lm.server", replay(port, requests, tokens, as_chat=True))


def replay(
    port: int,
    requests: Sequence[Request],
    tokens: Sequence[list[int]],
    *,
    as_chat: bool = False,
    again: bool = False,
) -> list[Turn]:
    """Post all ``requests``, one after the other, for one token each. ``tokens`` are the tokens
    of their prompts. ``as_chat``: to `/v1/chat/completions`. ``again``: all of them were sent
    before."""
    turns = []
    earlier: dict[str, list[list[int]]] = {}
    for request, prompt in zip(requests, tokens, strict=True):
        line = earlier.setdefault(request.line, [])
        known = len(prompt) if again else max((_common(prompt, each) for each in line), default=0)
        before = len(line[-1]) if line else 0
        line.append(prompt)
        path = _CHAT if as_chat else request.path
        body = chat_body(request) if as_chat else request.body
        began = time.perf_counter()
        usage, why, error = _post(port, path, body)
        first_s = time.perf_counter() - began
        turn = Turn(request.line, 0, 0, known, before, first_s, why, error)
        turns.append(turn if error else turn._replace(prompt=usage[0], cached=usage[1]))
    return turns


def share(turns: Sequence[Turn]) -> Share:
    """Return the fraction found of the blocks that were known."""
    known = [turn for turn in turns if turn.known_in_blocks]
    return Share(
        min((turn.cached / turn.known_in_blocks for turn in known), default=1.0),
        sum(min(turn.cached, turn.known_in_blocks) for turn in known)
        / max(1, sum(turn.known_in_blocks for turn in known)),
        sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns),
    )


def chat_body(request: Request) -> dict[str, Any]:
    """Return the body of ``request`` for `/v1/chat/completions`."""
    if request.path == _CHAT:
        return request.body
    chat = _translated(request)
    tools = [tool_schema(tool) for tool in chat.prompt_tools]
    messages = [_without_none(msgspec.to_builtins(message)) for message in chat.messages]
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
    return {"messages": messages, **({"tools": tools} if tools else {})}


def prompt_tokens(model: Path, requests: Sequence[Request]) -> list[list[int]]:
    """Return the tokens of each prompt, rendered with the template of the model in ``model``."""
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(model)
    template = ChatTemplate(tokenizer, {}, has_reasoning=True)
    prompts = []
    for request in requests:
        chat = _translated(request)
        text = template.render(chat.messages, chat.prompt_tools, chat.template_args)
        text = text.replace(TOKEN_BREAK, "")
        prompts.append(list(tokenizer.encode(text, add_special_tokens=False)))
    return prompts


def _translated(request: Request) -> ChatRequest:
    if request.path == _CHAT:
        return msgspec.convert(request.body, ChatRequest)
    if request.path == "/v1/messages":
        return from_messages(msgspec.convert(request.body, MessagesRequest))
    body = msgspec.convert(request.body, ResponsesRequest)
    unseal = ReasoningSeal(sessions.REASONING_KEY).unseal
    items = resolve_input(body.input, lambda _: sys.exit("a reference"), unseal)
    return from_responses(body, items, client_tools(body.tools or ()))


def _post(port: int, path: str, body: dict[str, Any]) -> tuple[tuple[int, int], str, str]:
    """Return (prompt tokens, cached tokens), x-debug-cache and the error."""
    body = {name: value for name, value in body.items() if name not in _LIMITS.values()}
    body = {**body, "stream": False, _LIMITS[path]: 1, "temperature": 0}
    body.pop("stream_options", None)
    body.pop("max_completion_tokens", None)
    body.pop("model", None)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-debug-cache": "1"},
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            why = answer.headers.get("x-debug-cache", "")
            usage = json.load(answer)["usage"]
    except urllib.error.HTTPError as error:
        return (0, 0), "", f"{error.code}: {error.read()[:200].decode(errors='replace')}"
    except OSError as error:
        return (0, 0), "", str(error)
    return _of_usage(usage), why, ""


def _of_usage(usage: dict[str, Any]) -> tuple[int, int]:
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached
    name = "prompt_tokens" if "prompt_tokens" in usage else "input_tokens"
    details = usage.get(f"{name}_details") or {}
    return int(usage[name]), int(details.get("cached_tokens") or 0)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _print(what: str, turns: Sequence[Turn]) -> None:
    served = [turn for turn in turns if not turn.error]
    refused = [turn.error for turn in turns if turn.error]
    if refused:
        print(f"    {what}: {len(refused)} refused, such as {refused[0]}")
    if not served:
        return
    found = share(served)
    firsts = [turn.first_s for turn in served if not turn.known]
    later = [turn.first_s for turn in served if turn.known]
    times = [f"{statistics.median(each) * 1000:,.0f} ms" for each in (firsts, later) if each]
    print(
        f"    {what}: {found.known:.1%} of what was known, at least {found.least:.1%} of a prompt;"
        f" {found.prompts:.1%} of all tokens; first tokens {' and '.join(times)}",
        flush=True,
    )
