from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer

from router.tokens import tokenization_cache
from router.tokens.tokenization_cache import LengthCheck, TokenizationCache, common_prefix_length
from router.tokens.vocabulary import Vocabulary

CHAT_MODEL = True
BEGIN, END = "<|im_start|>", "<|im_end|>\n"


def asked(question: str) -> str:
    return BEGIN + question + END + BEGIN


class CountingCache(TokenizationCache):
    """A cache with a real tokenizer. It counts the characters that are encoded."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        token_bytes: Callable[[int], bytes] | None = None,
        **options: int,
    ) -> None:
        """Without ``token_bytes``, every token is whole characters."""
        self.tokenizer = tokenizer
        self.encoded = 0
        added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
        token_bytes = token_bytes or (lambda token: self.text([token]).encode())
        super().__init__(added, token_bytes, self._counted, **options)

    def _counted(self, text: str, check_length: LengthCheck | None) -> list[int]:
        self.encoded += len(text)
        found = self.tokenizer.encode(text, add_special_tokens=False)
        if check_length is not None:
            check_length(len(found))
        return found.ids

    def ids(self, text: str) -> list[int]:
        """Return the tokens that the tokenizer itself chooses."""
        return self.tokenizer.encode(text).ids

    def reply(self, text: str) -> list[int]:
        """Return tokens of a reply: a letter each, and the end."""
        letters = [token for char in text for token in self.ids(char)]
        return [*letters, self.tokenizer.token_to_id("<|im_end|>")]

    def answer(self, question: str, text: str, scope: str = "s") -> list[int]:
        """Have a prompt answered; return its tokens with those of the reply."""
        prompt, output = self.tokenize(scope, asked(question)), self.reply(text)
        self.extend(scope, prompt, output)
        return [*prompt, *output]

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)


@pytest.fixture
def cache(tokenizer: Tokenizer) -> CountingCache:
    return CountingCache(tokenizer)


def test_a_prompt_continues_with_the_tokens_of_the_reply(cache: CountingCache) -> None:
    known = cache.answer("hello", "hello")
    encoded = cache.encoded
    following = asked("hello") + "hello" + END + BEGIN + "more"
    tokens = cache.tokenize("s", following)
    assert tokens[: len(known)] == known
    assert cache.text(tokens) == following
    assert cache.encoded - encoded <= len(END + BEGIN + "more")
    comparison = cache.comparison("s", tokens)
    assert comparison.common_tokens == comparison.earlier_tokens == len(known)
    assert comparison.earlier_token is None


def test_a_prompt_that_is_too_long_changes_nothing(cache: CountingCache) -> None:
    cache.answer("hello", "hello")
    following = asked("hello") + "hello" + END + BEGIN + "more" + END
    length = len(cache.tokenize("s", following))
    longer = following + BEGIN + "and more"

    def check(num_tokens: int) -> None:
        if num_tokens > length:
            raise ValueError(num_tokens)

    for scope in ("s", "other"):  # continued, and from the beginning
        with pytest.raises(ValueError):
            cache.tokenize(scope, longer, check)
    assert len(cache) == 1
    encoded = cache.encoded
    assert len(cache.tokenize("s", following, check)) == length
    assert cache.encoded - encoded < len(following) / 2


def test_an_unknown_reply_or_scope_changes_nothing(cache: CountingCache) -> None:
    prompt = cache.tokenize("s", asked("hello"))
    cache.extend("s", [1, 2, 3], [4])
    cache.extend("other", prompt, cache.reply("hello"))
    text = asked("hello") + "hello" + END
    assert cache.tokenize("s", text) == cache.ids(text)
    assert cache.comparison("other", prompt).earlier_tokens == 0


def test_half_a_character_at_the_end_of_a_reply_is_not_continued(cache: CountingCache) -> None:
    cache.extend("s", cache.tokenize("s", asked("x")), cache.ids("日")[:2])
    for reply in ("日", "\ufffd", ""):
        text = asked("x") + reply + END
        assert cache.tokenize("s", text) == cache.ids(text)


@pytest.mark.parametrize("rest", ["", "x"])
def test_a_reply_with_half_a_character_in_it_is_continued(
    tokenizer: Tokenizer, vocabulary: Vocabulary, rest: str
) -> None:
    cache = CountingCache(tokenizer, vocabulary.token_bytes)
    prompt = cache.tokenize("s", asked("x"))
    output = [*cache.ids("日")[:2], *cache.reply(rest)]
    cache.extend("s", prompt, output)
    tokens = cache.tokenize("s", asked("x") + "\ufffd" + rest + END + BEGIN)
    assert tokens[: len(prompt) + len(output)] == [*prompt, *output]


def test_of_replies_with_the_same_text_the_latest_is_continued(cache: CountingCache) -> None:
    letters = cache.reply("hello")
    fewer = [*cache.ids("hello"), letters[-1]]
    assert fewer != letters
    for scope, *outputs in (("a", letters, fewer), ("b", fewer, letters)):
        prompt = cache.tokenize(scope, asked("x"))
        for output in outputs:
            cache.extend(scope, prompt, output)
        tokens = cache.tokenize(scope, asked("x") + "hello" + END + BEGIN)
        assert tokens[: len(prompt) + len(output)] == [*prompt, *output]


def test_the_choices_of_one_prompt_can_all_be_continued(cache: CountingCache) -> None:
    prompt = cache.tokenize("s", asked("x"))
    outputs = {reply: cache.reply(reply) for reply in ("hello", "world", "")}
    for output in outputs.values():
        cache.extend("s", prompt, output)
    for reply, output in outputs.items():
        tokens = cache.tokenize("s", asked("x") + reply + END + BEGIN)
        assert tokens[: len(prompt) + len(output)] == [*prompt, *output]


def test_a_prompt_is_compared_to_few_of_many_entries(
    cache: CountingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        cache.tokenize("s", f"{BEGIN}you are{BEGIN}{number:03}")
    compared: list[Any] = []

    def count(one: Any, other: Any) -> int:
        compared.append(one)
        return common_prefix_length(one, other)

    monkeypatch.setattr(tokenization_cache, "common_prefix_length", count)
    cache.tokenize("s", f"{BEGIN}you are{BEGIN}123 and more")
    assert f"{BEGIN}you are{BEGIN}123" in compared
    assert len(compared) <= 4
    assert len(cache) == 300  # the one that it continues is dropped


def test_memory_is_bounded_and_the_oldest_entry_is_dropped_first(tokenizer: Tokenizer) -> None:
    cache = CountingCache(tokenizer, max_bytes=6000)
    for number in range(50):
        cache.tokenize("s", BEGIN + str(number) * 20 + END)
    assert 1 < len(cache) < 10
    last = cache.tokenize("s", BEGIN + "49" * 20 + END + "x")
    assert cache.comparison("s", last).common_tokens > 1
    huge = cache.tokenize("s", BEGIN + "h" * 5000)
    assert cache.text(huge) == BEGIN + "h" * 5000
    assert len(cache) == 0


def test_random_conversations_keep_their_text(tokenizer: Tokenizer) -> None:
    """A prompt keeps its text when conversations branch, are cut, and are continued."""
    draw = random.Random(11)
    cache = CountingCache(tokenizer, max_bytes=100_000)
    words = ("hello", " wor", "ld", "é", "日", "🌍", "\n", "<think>", "</think>")
    pieces = [*words, END, BEGIN, "<|im"]
    texts = [BEGIN]
    kept = 0
    for _ in range(150):
        known = draw.choice(texts[-30:])
        text = known[: draw.randrange(len(known) + 1)] if draw.random() < 0.3 else known
        text = BEGIN + text.removeprefix(BEGIN) + "".join(draw.choices(pieces, k=3))
        tokens = cache.tokenize("s", text)
        assert cache.text(tokens) == text
        kept += tokens != cache.ids(text)
        reply = "".join(draw.choices(pieces, k=draw.randrange(4)))
        cache.extend("s", tokens, cache.reply(reply))
        texts.append((text + reply + END)[-2000:] if len(text) > 4000 else text + reply + END)
    assert kept > 25
