from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.tokens import tokenization_cache
from router.tokens.tokenization_cache import TokenizationCache, common_prefix_length
from tests.router.chat_tokenizer import write_chat_tokenizer

BEGIN, END = "<|im_start|>", "<|im_end|>\n"


class Fixture:
    """A history with a real tokenizer, which counts what it was made to encode."""

    def __init__(self, tokenizer: Tokenizer, **options: int) -> None:
        self.tokenizer = tokenizer
        self.encoded = 0
        added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        self.history = TokenizationCache(added, self._raw, self._encode, **options)

    def _raw(self, token: int) -> bytes:
        return self.tokenizer.decode([token], skip_special_tokens=False).encode()

    def _encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def letters(self, text: str) -> list[int]:
        return [self.tokenizer.encode(char).ids[0] for char in text]

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    @property
    def end(self) -> int:
        return int(self.tokenizer.token_to_id("<|im_end|>"))


def make(**options: int) -> Fixture:
    with tempfile.TemporaryDirectory() as directory:
        return Fixture(write_chat_tokenizer(Path(directory)), **options)


def test_a_prompt_goes_on_with_the_tokens_of_the_reply() -> None:
    fixture = make()
    asked = BEGIN + "hello" + END + BEGIN
    prompt = fixture.history.tokenize("s", asked)
    output = [*fixture.letters("hello"), fixture.end]
    fixture.history.extend("s", prompt, output)
    encoded = fixture.encoded
    following = asked + "hello" + END + BEGIN + "more"
    tokens = fixture.history.tokenize("s", following)
    assert tokens[: len(prompt) + len(output)] == [*prompt, *output]
    assert fixture.text(tokens) == following
    assert fixture.encoded - encoded <= len(END + BEGIN + "more")
    comparison = fixture.history.comparison("s", tokens)
    assert comparison.common_tokens == comparison.earlier_tokens == len(prompt) + len(output)
    assert comparison.earlier_token is None


def test_text_that_was_changed_is_not_continued() -> None:
    fixture = make()
    asked = BEGIN + "hello" + END + BEGIN
    prompt = fixture.history.tokenize("s", asked)
    fixture.history.extend("s", prompt, [*fixture.letters("hello"), fixture.end])
    for reply in ("hell", "hello ", "help", "", "hello<|im_start|>"):
        text = asked + reply + END
        assert fixture.history.tokenize("s", text) == fixture.tokenizer.encode(text).ids


def test_an_unknown_reply_or_scope_changes_nothing() -> None:
    fixture = make()
    asked = BEGIN + "hello" + END + BEGIN
    prompt = fixture.history.tokenize("s", asked)
    fixture.history.extend("s", [1, 2, 3], [4])
    fixture.history.extend("other", prompt, fixture.letters("hello"))
    text = asked + "hello" + END
    assert fixture.history.tokenize("s", text) == fixture.tokenizer.encode(text).ids
    assert fixture.history.comparison("other", prompt).earlier_tokens == 0


def test_half_a_character_at_the_end_of_a_reply_is_no_text_to_go_on_from() -> None:
    fixture = make()
    asked = BEGIN + "x" + END + BEGIN
    prompt = fixture.history.tokenize("s", asked)
    fixture.history.extend("s", prompt, fixture.tokenizer.encode("日").ids[:2])
    for reply in ("日", "\ufffd", ""):
        text = asked + reply + END
        assert fixture.history.tokenize("s", text) == fixture.tokenizer.encode(text).ids


def test_the_choices_of_one_prompt_can_all_be_continued() -> None:
    fixture = make()
    asked = BEGIN + "x" + END + BEGIN
    prompt = fixture.history.tokenize("s", asked)
    replies = ["hello", "world", ""]
    outputs = [[*fixture.letters(reply), fixture.end] for reply in replies]
    for output in outputs:
        fixture.history.extend("s", prompt, output)
    for reply, output in zip(replies, outputs, strict=True):
        tokens = fixture.history.tokenize("s", asked + reply + END + BEGIN)
        assert tokens[: len(prompt) + len(output)] == [*prompt, *output]


def test_scopes_do_not_touch_each_other() -> None:
    fixture = make()
    asked = BEGIN + "x" + END + BEGIN
    output = [*fixture.letters("hello"), fixture.end]
    for scope in ("a", "b", "c"):
        prompt = fixture.history.tokenize(scope, asked)
        fixture.history.extend(scope, prompt, output)
    for scope in ("c", "a", "b"):
        tokens = fixture.history.tokenize(scope, asked + "hello" + END)
        assert tokens[: len(prompt) + len(output)] == [*prompt, *output]


def test_a_prompt_is_compared_to_few_however_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = make()
    for number in range(300):
        fixture.history.tokenize("s", f"{BEGIN}you are{BEGIN}{number:03}")
    compared: list[Any] = []

    def count(one: Any, other: Any) -> int:
        compared.append(one)
        return common_prefix_length(one, other)

    monkeypatch.setattr(tokenization_cache, "common_prefix_length", count)
    fixture.history.tokenize("s", f"{BEGIN}you are{BEGIN}123 and more")
    assert f"{BEGIN}you are{BEGIN}123" in compared
    assert len(compared) <= 4
    assert len(fixture.history) == 300  # the one that it goes on from is gone


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    fixture = make(max_bytes=6000)
    for number in range(50):
        fixture.history.tokenize("s", BEGIN + str(number) * 20 + END)
    assert 1 < len(fixture.history) < 10
    last = fixture.history.tokenize("s", BEGIN + "49" * 20 + END + "x")
    assert fixture.history.comparison("s", last).common_tokens > 1
    huge = fixture.history.tokenize("s", BEGIN + "h" * 5000)
    assert fixture.text(huge) == BEGIN + "h" * 5000
    assert len(fixture.history) == 0


def test_random_conversations_keep_their_text() -> None:
    """However conversations branch, are cut and come back, a prompt is the text that it was."""
    draw = random.Random(11)
    fixture = make(max_bytes=100_000)
    pieces = [
        "hello",
        " wor",
        "ld",
        "é",
        "日",
        "🌍",
        "\n",
        "<think>",
        "</think>",
        END,
        BEGIN,
        "<|im",
    ]
    texts = [BEGIN]
    kept = 0
    for _ in range(150):
        known = draw.choice(texts[-30:])
        text = known[: draw.randrange(len(known) + 1)] if draw.random() < 0.3 else known
        text = BEGIN + text.removeprefix(BEGIN) + "".join(draw.choices(pieces, k=3))
        tokens = fixture.history.tokenize("s", text)
        assert fixture.text(tokens) == text
        kept += tokens != fixture.tokenizer.encode(text).ids
        reply = "".join(draw.choices(pieces, k=draw.randrange(4)))
        output = [t for char in reply for t in fixture.tokenizer.encode(char).ids]
        fixture.history.extend("s", tokens, [*output, fixture.end])
        texts.append((text + reply + END)[-2000:] if len(text) > 4000 else text + reply + END)
    assert kept > 25
