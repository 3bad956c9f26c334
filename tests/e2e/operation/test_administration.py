"""A whole server that is administrated while it serves: restarts, and caches that are cleared."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.commands import cli
from tests.e2e.server import Server, cached_tokens, llama_server

PROMPT = "one two three four " * 20

server = llama_server("--admin-key", "boss", "--ssd-policy", "write_through")


def command(server: Server, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    asked = [f"--url={server.url}", "--admin-key=boss", "--json"]
    assert cli.main([*words, *asked]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_restart_breaks_no_stream(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    def incarnations() -> list[str]:
        engines = command(server, capsys, "engines")["engines"]
        return [one["incarnation"] for one in engines if one["ready"]]

    fields = {"max_tokens": 600, "ignore_eos": True}
    expected = server.text(PROMPT, **fields)
    before = incarnations()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.text, PROMPT, **fields) for _ in range(2)]
        command(server, capsys, "restart", "--wait")
        texts = [each.result(60) for each in running]
    assert texts == [expected] * 2
    server.wait_until(lambda: len(incarnations()) == 1, 30, "the old engine is gone")
    assert incarnations() != before
    assert server.text(PROMPT, **fields) == expected


def test_cleared_caches_are_empty_in_ram_and_on_ssd(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def cached() -> int:
        return cached_tokens(server.complete(PROMPT))

    cached()
    assert cached() > 0
    server.wait_until(lambda: blocks(server) > 0, 30, "blocks are on SSD")
    command(server, capsys, "cache", "clear")
    server.wait_until(lambda: blocks(server) == 0, 30, "no block is on SSD")
    assert cached() == 0
    assert cached() > 0


def blocks(server: Server) -> float:
    return server.metric("mlx_lm_server_store_blocks")
