"""Masks on logits, unpacked by the host or by the device."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
import numpy
import pytest
from llguidance import LLTokenizer

import engine.sampling.masks as sampling_masks
from engine.backend import arrays
from engine.grammar import compiled
from engine.grammar.cache import GrammarCache
from engine.plan import Decode
from engine.sampling import noise
from engine.sampling.masks import GrammarMasker
from engine.sampling.sampler import Sampler
from shared.wire import Grammar, SamplingParams
from tests.tiny_models import EOS, VOCAB_SIZE

WIDTH = VOCAB_SIZE + 13  # with rows of the embedding that have no token


@pytest.fixture
def masker(tokenizer: LLTokenizer) -> GrammarMasker:
    return GrammarMasker(GrammarCache(tokenizer), WIDTH)


def decode(row: int, source: str | None, **fields: Any) -> Decode:
    grammar = None if source is None else Grammar(kind="regex", source=source)
    fields = {"sampling": SamplingParams(seed=row), "token_id": 5, "output_index": 0, **fields}
    return Decode(
        slot=row,
        position=0,
        grammar=grammar,
        constrained=grammar is not None,
        history=(),
        **fields,
    )


@pytest.mark.parametrize("host", [True, False])
def test_masks_change_only_constrained_rows(
    tokenizer: LLTokenizer, masker: GrammarMasker, monkeypatch: pytest.MonkeyPatch, host: bool
) -> None:
    monkeypatch.setattr(arrays, "array_namespace", lambda: numpy if host else mx)
    decodes = [decode(0, None), decode(1, "[abc]"), decode(2, None), decode(3, "x|")]
    pending = masker.start(decodes, [5] * 4)
    assert pending is not None
    masks = pending.result()
    assert (masks.rows, masks.failed) == ([1, 3], [])
    logits = mx.random.normal((4, WIDTH), key=mx.random.key(0))
    masked = numpy.array(masks.apply(logits))
    given = numpy.array(logits)
    left = [set(numpy.flatnonzero(row > -math.inf)) for row in masked]
    assert left[0] == left[2] == set(range(WIDTH))
    assert left[1] == {tokenizer.tokenize_str(letter)[0] for letter in "abc"}
    assert left[3] == {tokenizer.tokenize_str("x")[0], EOS}
    for row, tokens in enumerate(left):
        places = sorted(tokens)
        assert (masked[row, places] == given[row, places]).all()


def test_a_grammar_whose_masks_take_too_long_fails_alone_and_is_refused_from_then_on(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ways to divide a text in two or three are more with each letter."""
    for module in (compiled, sampling_masks):
        monkeypatch.setattr(module, "SLOW_MASK_S", 0.002)
    monkeypatch.setattr(compiled, "PATIENCE_S", 0.02)
    grammars = GrammarCache(tokenizer)
    masker = GrammarMasker(grammars, WIDTH)
    sources = "start: s\ns: s s s | s s | /[a-z]/", "start: /[a-z]+/"
    slow, usual = (Grammar(kind="lark", source=source) for source in sources)
    token = tokenizer.tokenize_str("a")[0]
    for index in range(200):
        rows = [
            msgspec.structs.replace(
                decode(row, None, output_index=index, token_id=token),
                grammar=None if index else grammar,
                constrained=True,
            )
            for row, grammar in enumerate((slow, usual))
        ]
        pending = masker.start(rows, [token] * 2)
        assert pending is not None
        found = pending.result()
        if found.failed:
            break
    assert [row for row, _ in found.failed] == [0] and found.rows == [1]
    error = grammars.find(slow)
    assert isinstance(error, compiled.GrammarError) and "takes too long" in str(error)
    assert isinstance(grammars.find(usual), compiled.CompiledGrammar)


def test_slow_masks_now_and_then_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(compiled, "time", SimpleNamespace(monotonic=lambda: now))
    served, slow = compiled.MaskTime(), compiled.SLOW_MASK_S + compiled.PATIENCE_S / 10
    for _ in range(100):
        served.add(slow)
        now += compiled.PATIENCE_S / 10 / compiled.FORGIVEN_SHARE
    for _ in range(10):
        served.add(slow)
    with pytest.raises(compiled.GrammarError, match="takes too long"):
        served.add(slow)


def test_forbidden_tokens_are_allowed_only_if_nothing_else_is(
    tokenizer: LLTokenizer, masker: GrammarMasker
) -> None:
    rows = [decode(0, "x|", forbidden=(EOS,)), decode(1, "", forbidden=(EOS,))]
    pending = masker.start(rows, [5] * 2)
    assert pending is not None
    allowed = pending.result().allowed
    assert list(numpy.flatnonzero(allowed[0])) == tokenizer.tokenize_str("x")
    assert list(numpy.flatnonzero(allowed[1])) == [EOS]


def test_the_only_token_that_is_allowed_is_chosen_whatever_the_noise(
    tokenizer: LLTokenizer, masker: GrammarMasker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lowest(xp: Any, keys: object, tokens: Any) -> Any:
        return xp.zeros(tokens.shape)

    monkeypatch.setattr(noise, "uniform", lowest)
    sampler = Sampler()
    sampler.masker = masker
    hot = SamplingParams(seed=0, temperature=2.0, top_p=0.9, top_k=5, min_p=0.2)
    decodes = [decode(0, "x", sampling=hot)]
    masks = sampler.start_masks(decodes, [5])
    sampled = sampler.sample(mx.zeros((1, WIDTH)), decodes, mx.array([5], mx.int32), masks)
    assert sampled.tokens.tolist() == tokenizer.tokenize_str("x")


def test_guesses_are_what_the_grammar_allows_and_may_be_wrong(
    tokenizer: LLTokenizer, masker: GrammarMasker
) -> None:
    sampler = Sampler()
    sampler.masker = masker
    a, b, c, d, e, x = (tokenizer.tokenize_str(letter)[0] for letter in "abcdex")
    logits = mx.zeros((1, WIDTH))
    logits[0, mx.array([c, x])] = mx.array([1.0, 2.0])

    def step(number: int) -> list[Decode]:
        source = None if number else "ab(c|d)e"
        return [msgspec.structs.replace(decode(0, source, output_index=number), constrained=True)]

    def sample(number: int, token: int) -> int:
        masks, given = sampler.start_masks(step(number), [token]), mx.array([token], mx.int32)
        sampled = sampler.sample(logits, step(number), given, masks)
        assert not sampled.failed
        return sampled.tokens.item()

    def guess(number: int, *tokens: int) -> list[int]:
        found = []
        for index, token in enumerate(tokens, number):
            found.append(sampler.guess(logits, step(index), mx.array([token], mx.int32)).item())
        return found

    assert sample(0, 5) == a
    assert guess(1, a, b, c, e, EOS, x, x) == [b, c, e, EOS, x, x, x]  # anything after the end
    assert sample(1, a) == b
    assert guess(2, x, x) == [x, x]  # what it does not allow
    assert sample(2, b) == c
    assert sample(3, d) == e
