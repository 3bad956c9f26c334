"""A matcher follows the outputs of its sequence, forwards and backwards."""

from __future__ import annotations

import numpy
import pytest
from llguidance import LLTokenizer

from engine.grammar.compiled import GrammarError, compile_grammar
from engine.grammar.matcher import GrammarMatcher
from shared.wire import Grammar


def ids(tokenizer: LLTokenizer, text: str) -> list[int]:
    return [tokenizer.tokenize_str(letter)[0] for letter in text]


def test_a_matcher_can_undo_all_its_outputs(tokenizer: LLTokenizer) -> None:
    grammar = compile_grammar(tokenizer, Grammar(kind="regex", source="(ab|cd)x"))
    matcher, other = GrammarMatcher(grammar), GrammarMatcher(grammar)
    matcher.advance(ids(tokenizer, "abx"))
    assert matcher.inner is not None and matcher.inner.is_accepting()
    matcher.rollback(3)
    matcher.advance(ids(tokenizer, "cd"))
    assert matcher.num_outputs == 2
    other.advance(ids(tokenizer, "cd"))
    assert other.inner is not None
    assert matcher.inner.compute_bitmask() == other.inner.compute_bitmask()


def test_after_a_forbidden_token_every_advance_is_an_error(tokenizer: LLTokenizer) -> None:
    grammar = compile_grammar(tokenizer, Grammar(kind="regex", source="ab"))
    matcher = GrammarMatcher(grammar)
    for _ in range(2):
        with pytest.raises(GrammarError):
            matcher.advance(ids(tokenizer, "x"))
    GrammarMatcher(grammar).advance(ids(tokenizer, "ab"))  # other matchers are not affected


def test_a_grammar_with_after_applies_behind_these_tokens_only(tokenizer: LLTokenizer) -> None:
    grammar = compile_grammar(tokenizer, Grammar(kind="regex", source="ab"))
    matcher = GrammarMatcher(grammar, after=ids(tokenizer, "<>"))
    matcher.advance(ids(tokenizer, "xyz<a<>"))
    assert matcher.inner is not None
    mask = numpy.frombuffer(matcher.inner.compute_bitmask(), numpy.uint8)
    allowed = numpy.flatnonzero(numpy.unpackbits(mask, bitorder="little"))
    assert ids(tokenizer, "a")[0] in allowed and ids(tokenizer, "b")[0] not in allowed
    matcher.advance(ids(tokenizer, "a"))
    matcher.rollback(2)
    assert matcher.inner is None
    matcher.advance(ids(tokenizer, ">ab"))
    assert matcher.inner.is_accepting()


def test_it_goes_on_after_an_error_if_it_begins_again(tokenizer: LLTokenizer) -> None:
    grammar = compile_grammar(tokenizer, Grammar(kind="regex", source="abc"))
    matcher = GrammarMatcher(grammar)
    a, b, c, x = (tokenizer.tokenize_str(text)[0] for text in "abcx")
    matcher.advance([a])
    with pytest.raises(GrammarError):
        matcher.advance([x, b])
    matcher.begin_again(1)
    matcher.advance([b, c])
    assert matcher.num_outputs == 3 and matcher.inner is not None and matcher.inner.is_accepting()
