"""A quantized KV cache through the real processes, compared with mlx-lm with the same."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.server import at_once, cached_tokens, serving
from tests.e2e.texts.test_demo import HEAD
from tests.oracle import Oracle, oracle

MAX_TOKENS = 12
QUESTIONS = ["What is the capital of France?", "Why is the sky blue?"]
PAGE = 64
PAGE_ELEMENTS = PAGE * 30 * 2 * 3 * 64
"""Tokens x layers x (keys and values) x heads x head dimension."""


@pytest.fixture(scope="module")
def truth(demo_model: Path) -> Oracle:
    return oracle(demo_model, kv_bits=8)


def files(directory: Path) -> list[Path]:
    return list(directory.rglob("*.safetensors"))


@pytest.mark.slow
def test_a_text_is_the_same_with_a_cold_prefix_and_one_from_ram_or_ssd(
    tmp_path: Path, truth: Oracle
) -> None:
    flags = ("--kv-bits=8", "--ssd-cache-dir", str(tmp_path), "--ssd-policy=write_through")
    asked = [truth.chat(HEAD * 2 + question) for question in QUESTIONS]
    pages = {tuple(prompt[:end]) for prompt in asked for end in range(PAGE, len(prompt), PAGE)}
    with serving("demo-fp32", *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as first:
        ask = partial(first.complete, max_tokens=MAX_TOKENS, logprobs=1)
        cold, ram = list(map(ask, asked)), at_once(ask, asked)
        first.wait_until(lambda: len(files(tmp_path)) >= len(pages), 60, "pages on the SSD")
    sizes = {file.stat().st_size for file in files(tmp_path)}
    assert max(sizes) <= 0.55 * 2 * PAGE_ELEMENTS, "more than 55 % of the bytes of a 16-bit type"
    with serving("demo-fp32", *flags, _MLX_LM_SERVER_CHECK_INTEGRITY="1") as second:
        ssd = [second.complete(prompt, MAX_TOKENS, logprobs=1) for prompt in asked]
        second.wait_metric("mlx_lm_server_cached_ssd_tokens_total")
    assert cached_tokens(cold[0]) == 0
    for prompt, *answers in zip(asked, cold, ram, ssd, strict=True):
        assert all(cached_tokens(answer) >= len(prompt) - PAGE for answer in answers[1:])
        found = [answer["choices"][0] for answer in answers]
        (text,) = {choice["text"] for choice in found}
        truth.check(prompt, MAX_TOKENS, text)
        if sys.platform == "linux":
            scores = [choice["logprobs"]["token_logprobs"] for choice in found]
            assert scores[0] and scores == scores[:1] * len(found)
