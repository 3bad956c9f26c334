"""A server whose KV memory holds 6,000 tokens: conversations, and those who come beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.server import Server, assert_error, at_once, cached_tokens, serving
from tests.tiny_models import VOCAB_SIZE, make_tiny

BLOCKS, BLOCK, PAGE = 375, 16, 64
CONTEXT = 16_384


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("models") / "llama"
    model = make_tiny("llama", path, max_position_embeddings=CONTEXT)
    with serving(model, "--num-blocks", str(BLOCKS), "--no-ssd") as running:
        yield running


def tokens(seed: int, count: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(3, VOCAB_SIZE) for _ in range(count)]


def turns(server: Server, seed: int) -> list[tuple[int, int]]:
    """Talk until the prompt has 3,400 tokens, without a pause. Return for each turn but the first
    the tokens of the turn before, and how many of them were found."""
    text, found, before = tokens(seed, 1_500), [], 0
    while len(text) <= 3_400:
        answer = server.complete(text, 20, ignore_eos=True)
        if before:
            found.append((before, cached_tokens(answer)))
        before = len(text)
        text = text + tokens(seed + len(text), 400)
    return found


def test_each_turn_finds_the_one_before_and_two_conversations_run(server: Server) -> None:
    for before, found in turns(server, 1):
        assert found > before - PAGE, (before, found)
    for both in at_once(lambda seed: turns(server, seed), (2, 3)):
        assert len(both) == 4
    assert server.metric("mlx_lm_server_kv_unevictable_bytes") == 0


def test_nobody_is_refused_beside_a_long_answer_nor_right_after_it(server: Server) -> None:
    text = tokens(9, 2_200)
    stream = server.stream(text, 300)
    next(stream)
    answers = [server.post("/v1/completions", prompt="abc", max_tokens=4) for _ in range(12)]
    assert [answer.status_code for answer in answers] == [200] * 12
    for _ in stream:
        pass
    assert server.post("/v1/completions", prompt=text, max_tokens=4).status_code == 200


def test_an_answer_is_as_long_as_memory_allows(server: Server) -> None:
    model = server.client.get("/v1/models").json()["data"][0]
    room = model["context_length"]
    assert BLOCKS * BLOCK * 0.9 < room <= BLOCKS * BLOCK < CONTEXT
    text = tokens(5, room - 40)
    answer = server.complete(text, 2_000, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 40
    longer: httpx.Response = server.post("/v1/completions", prompt=[*text, *text], max_tokens=4)
    assert_error(longer, 400, "context_length_exceeded")
