"""A model with recurrent layers behind a whole server that is restarted."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import HYBRID, Server, cached_tokens, content_of, serving

LETTERS = "QXZJ"
"""The tiny tokenizer has a token for each, and none for several of them."""
NEW = "now"
PAGE = 64


def complete(server: Server, prompt: str) -> dict[str, Any]:
    return server.complete(prompt, 40, guided_regex=f"[{LETTERS}]{{40}}")


def computed(answer: dict[str, Any]) -> int:
    """Return how many tokens of the prompt were not found."""
    return int(answer["usage"]["prompt_tokens"]) - cached_tokens(answer)


def files(directory: Path) -> dict[Path, list[Path]]:
    """Return the files on the SSD by their namespaces: pages, and states."""
    found: dict[Path, list[Path]] = {}
    for path in directory.rglob("*.safetensors"):
        found.setdefault(path.parents[2], []).append(path)
    return found


@pytest.mark.slow
def test_after_a_restart_the_second_turn_of_a_hybrid_computes_little_more_than_what_is_new(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    model = tiny_model(HYBRID)
    pick = random.Random(4)
    prompt = "".join(pick.choice(LETTERS) for _ in range(210))
    flags = ("--ssd-cache-dir", str(tmp_path), "--ssd-policy", "write_through")
    with serving(model, "--no-ssd") as server:
        turn = prompt + content_of(complete(server, prompt)) + NEW
        expected = content_of(complete(server, turn))
    with serving(model, *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as server:
        assert prompt + content_of(complete(server, prompt)) + NEW == turn
    pages, states = sorted(files(tmp_path).values(), key=len, reverse=True)
    assert len(pages) >= len(turn) // PAGE and states
    with serving(model, *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as server:
        answer = complete(server, turn)
        assert computed(answer) <= PAGE + len(NEW) + 40
        assert content_of(answer) == expected
        server.wait_metric("mlx_lm_server_cached_ssd_tokens_total")
    for path in files(tmp_path)[states[0].parents[2]]:  # of the second answer too
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with serving(model, *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as server:
        answer = complete(server, turn)
        assert computed(answer) == answer["usage"]["prompt_tokens"]
        assert content_of(answer) == expected
        server.wait_metric("mlx_lm_server_store_corrupt_total")
