"""Tokens that a grammar forces, as drafts."""

from __future__ import annotations

from typing import Any

from llguidance import LLTokenizer

from engine.grammar.compiled import CompiledGrammar, compile_grammar
from engine.grammar.forced import ForcedSource
from shared import wire
from shared.wire import Grammar

SOURCE = "(yes|no), because of the temperature"
PROMPT = [9, 8]


def source_of(tokenizer: LLTokenizer, **fields: Any) -> ForcedSource | None:
    grammar = Grammar(kind="regex", source=SOURCE, **fields)
    return ForcedSource.of(request_with(grammar), compile_grammar(tokenizer, grammar))


def request_with(grammar: Grammar) -> wire.Submit:
    return wire.Submit(
        request_id="a",
        attempt=0,
        token_ids=PROMPT,
        sampling=wire.SamplingParams(seed=1),
        max_tokens=9,
        stop_token_ids=[],
        grammar=grammar,
    )


def test_tokens_are_proposed_where_only_one_text_is_allowed(tokenizer: LLTokenizer) -> None:
    source = source_of(tokenizer)
    assert source is not None
    assert source.propose(PROMPT, 5) is None
    begun = [*PROMPT, *tokenizer.tokenize_str("yes")]
    rest = tokenizer.tokenize_str(", because of the temperature")
    proposal = source.propose(begun, 100)
    assert proposal is not None and list(proposal.tokens) == rest
    proposal = source.propose([*begun, *rest[:3]], 2)
    assert proposal is not None and list(proposal.tokens) == rest[3:5]


def test_nothing_is_proposed_before_the_grammar_applies_nor_after_an_error(
    tokenizer: LLTokenizer,
) -> None:
    (mark,) = tokenizer.tokenize_str("x")
    source = source_of(tokenizer, after=[mark])
    assert source is not None
    begun = [*PROMPT, *tokenizer.tokenize_str("n")]
    assert source.propose(begun, 5) is None
    begun += [mark, *tokenizer.tokenize_str("n")]
    assert source.propose(begun, 5) is not None
    assert source.propose([*begun, mark], 5) is None
    assert source.propose([*begun, mark], 5) is None


def test_grammars_that_may_be_large_get_no_second_matcher(tokenizer: LLTokenizer) -> None:
    grammar = Grammar(kind="regex", source=SOURCE)
    heavy = CompiledGrammar(compile_grammar(tokenizer, grammar).initial_matcher, heavy=True)
    request = request_with(grammar)
    assert ForcedSource.of(request, heavy) is None
    assert ForcedSource.of(request, None) is None
