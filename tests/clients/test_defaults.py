"""What whole servers serve without a flag: long reasoning, long conversations, photos."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests.agents.model import CONTEXT, write_weights
from tests.e2e.server import Server, cached_tokens, events_of, serving
from tests.router.api.test_limits import APIS, asked, text_of
from tests.tiny_models import EOS, make_tiny
from tests.vision_models import make_vision_model, needs_mlx_vlm

THOUGHTS, ANSWER = 700, "Paris!"
NAMED = ("--served-model-name", "tiny", "--no-ssd")


def make_thinker(path: Path) -> Path:
    """Write a model that says `ANSWER` after `THOUGHTS` tokens of reasoning. Return ``path``."""
    make_tiny("llama", path)  # for its tokenizer
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    words = [f"why{number}? " for number in range(THOUGHTS)]
    added = [AddedToken(text, special=False) for text in ("<think>", "</think>", *words)]
    tokenizer.add_tokens(added)
    tokenizer.save(str(path / "tokenizer.json"))
    letters = [tokenizer.encode(letter).ids[0] for letter in ANSWER]
    newline = tokenizer.encode("\n").ids[-1]  # ends the prompt
    begin, *thoughts = (tokenizer.token_to_id(token.content) for token in (added[0], *added[2:]))
    end = tokenizer.token_to_id("</think>")
    chain = [newline, begin, *thoughts, end, *letters, EOS]
    follows = dict(pairwise(chain))
    write_weights(path, tokenizer.get_vocab_size(), follows, EOS)
    return path


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(make_thinker(tmp_path_factory.mktemp("thinker")), *NAMED) as running:
        yield running


@pytest.mark.parametrize("path", APIS)
def test_a_model_that_reasons_for_long_still_answers(thinking: Server, path: str) -> None:
    assert text_of(path, thinking.answer(path, **asked(path, "Where?"))) == ANSWER


def test_its_reasoning_is_longer_than_an_answer_without_reasoning(thinking: Server) -> None:
    answer = thinking.answer("/v1/chat/completions", **asked("/v1/chat/completions", "Where?"))
    assert answer["usage"]["completion_tokens"] > THOUGHTS > 512


@pytest.mark.timeout(300)
def test_a_conversation_of_60000_tokens_is_served_and_its_progress_reported(
    tmp_path: Path,
) -> None:
    model = make_tiny(
        "llama",
        tmp_path / "model",
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
    )
    question = [{"role": "user", "content": "0 " * 30_000}]
    body = {"messages": question, "max_tokens": 4, "stream": True, "return_progress": True}
    body["stream_options"] = {"include_usage": True}
    with serving(model, *NAMED) as server:
        for again in (False, True):
            url = "/v1/chat/completions"
            with server.client.stream("POST", url, json=body, timeout=240) as answer:
                *events, last, _ = events_of(answer)
            tokens = last["usage"]["prompt_tokens"]
            assert 60_000 <= tokens < 62_000
            found = [each["prompt_progress"] for each in events if "prompt_progress" in each]
            counts = [each["processed"] for each in found]
            assert counts == sorted(counts) and counts[-1] == tokens
            assert {each["total"] for each in found} == {tokens}
            assert found[-1]["cache"] == cached_tokens(last)
            if again:
                assert cached_tokens(last) > 0.9 * tokens
            else:
                assert len({*counts}) > 2, "it takes some seconds"
                assert 0 < found[0]["time_ms"] < found[-1]["time_ms"]


def test_a_photo_of_3_mb_is_seen(tmp_path: Path) -> None:
    needs_mlx_vlm()
    data = io.BytesIO()
    Image.frombytes("RGB", (1024, 1024), os.urandom(3 * 1024 * 1024)).save(data, "PNG")
    assert len(data.getvalue()) > 3_000_000
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    shown = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "this"}]
    with serving(make_vision_model("llava", tmp_path / "model"), *NAMED) as server:
        without = server.chat("this")["usage"]["prompt_tokens"]
        assert server.chat(shown)["usage"]["prompt_tokens"] > without
