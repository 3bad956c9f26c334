"""The cache of compiled grammars."""

from __future__ import annotations

import pytest
from llguidance import LLParserLimits, LLTokenizer

from engine.grammar.cache import GrammarCache
from engine.grammar.compiled import GrammarError, compile_grammar, raise_if_error
from engine.grammar.matcher import GrammarMatcher
from shared.wire import Grammar

WORDS = Grammar(kind="regex", source=r"(\w+ ?){1,200}")
LITTLE = LLParserLimits(step_lexer_fuel=2000, verbose_errors=False)


def test_a_grammar_whose_lexer_is_exhausted_is_compiled_again(tokenizer: LLTokenizer) -> None:
    cache = GrammarCache(tokenizer)
    compiled = compile_grammar(tokenizer, WORDS, LITTLE)
    cache.add(WORDS, compiled)
    assert cache.find(WORDS) is compiled
    matcher = GrammarMatcher(compiled)
    assert matcher.inner is not None
    with pytest.raises(GrammarError, match=r"^lexer error: too many expressions constructed$"):
        for token in tokenizer.tokenize_str("many words " * 20):
            matcher.inner.compute_bitmask()
            raise_if_error(matcher.inner)
            matcher.advance([token])
    assert not compiled.is_usable
    assert cache.find(WORDS) is None
    assert cache.get(WORDS) is not compiled and cache.get(WORDS).is_usable
