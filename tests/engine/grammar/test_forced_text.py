"""Text that a grammar forces, within a bound that does not depend on the grammar."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.compiled import compile_grammar, json_grammar
from engine.grammar.forced import ForcedSource
from engine.grammar.forced_text import MORE_BYTES, NEEDED_BYTES
from engine.grammar.matcher import GrammarMatcher
from shared.wire import Grammar
from tests.shared.submits import submit

LONG = [
    Grammar(kind="regex", source="a{200000}"),
    Grammar(kind="json_schema", source=json.dumps({"const": "lorem ipsum dolor " * 1700})),
    Grammar(kind="lark", source='start: a{3000}\na: "hello world, "'),
]
SHORT = [
    Grammar(kind="regex", source="(yes|no|none|nowhere), because of (the temperature|this|thee)"),
    Grammar(kind="regex", source="the(re|m)? [ab]?(aa|ab|ba){1,3}x*"),
    Grammar(kind="json_schema", source=json.dumps({"enum": ["the man", "thé", "日本", 17]})),
    Grammar(
        kind="json_schema",
        source=json.dumps(
            {
                "properties": {"name": {"type": "string", "maxLength": 5}, "is": {"const": "a b"}},
                "required": ["name", "is"],
                "additionalProperties": False,
            }
        ),
    ),
]


def allowed(mask: Any) -> list[int]:
    bits = numpy.unpackbits(mask.view(numpy.uint8), bitorder="little")
    found: list[int] = numpy.flatnonzero(bits).tolist()
    return found


@pytest.mark.parametrize("grammar", LONG, ids=lambda g: g.kind)
def test_no_step_computes_all_of_a_long_forced_text(
    tokenizer: LLTokenizer, grammar: Grammar
) -> None:
    compiled = compile_grammar(tokenizer, grammar)
    assert not compiled.initial_matcher.deep_copy().compute_ff_tokens()
    matcher = GrammarMatcher(compiled)
    source = ForcedSource.of(submit("a", [9], grammar=grammar), compiled)
    assert matcher.inner is not None and source is not None
    tokens = [9]
    began = time.monotonic()
    for _ in range(100):
        proposal = source.propose(tokens, 16)
        assert proposal is not None and len(proposal.tokens) <= NEEDED_BYTES + MORE_BYTES
        mask = numpy.frombuffer(matcher.inner.compute_bitmask(), numpy.int32)
        token = matcher.forced_token(mask)
        tokens.append(allowed(mask)[0] if token is None else token)
        matcher.advance(tokens[-1:])
    assert time.monotonic() - began < 5  # instead of 20 s


@pytest.mark.parametrize("grammar", SHORT, ids=range(len(SHORT)))
def test_a_forced_text_has_the_tokens_that_llguidance_would_force(
    tokenizer: LLTokenizer, grammar: Grammar
) -> None:
    compiled = compile_grammar(tokenizer, grammar)
    rng = random.Random(0)
    for _ in range(30):
        forcing = LLMatcher(tokenizer, _text(grammar))
        matcher = GrammarMatcher(compiled)
        assert matcher.inner is not None
        while not forcing.is_stopped():
            expected = allowed(numpy.frombuffer(forcing.compute_bitmask(), numpy.int32))
            mask = numpy.frombuffer(matcher.inner.compute_bitmask(), numpy.int32)
            token = matcher.forced_token(mask)
            assert (allowed(mask) if token is None else [token]) == expected
            chosen = rng.choice(expected)
            forcing.consume_token(chosen)
            matcher.advance([chosen])
        assert matcher.inner.is_stopped()


def _text(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.source)
    return json_grammar(grammar.source)


def test_the_text_is_found_again_after_a_rollback(tokenizer: LLTokenizer) -> None:
    grammar = Grammar(kind="regex", source="(yes|no), because")
    matcher = GrammarMatcher(compile_grammar(tokenizer, grammar))
    yes, no = tokenizer.tokenize_str("yes"), tokenizer.tokenize_str("no")
    rest = tokenizer.tokenize_str(", because")
    matcher.advance(yes)
    assert matcher.forced_tokens() == rest
    matcher.advance(rest[:1])
    assert matcher.forced_tokens() == rest[1:]
    matcher.rollback(len(yes) + 1)
    matcher.advance(no)
    assert matcher.forced_tokens() == rest
    matcher.advance(rest)
    assert matcher.forced_tokens() == []


def test_the_choice_of_a_token_does_not_depend_on_what_is_known(tokenizer: LLTokenizer) -> None:
    text = "the other thing that they gathered there together " * 3
    grammar = compile_grammar(tokenizer, Grammar(kind="lark", source=f'start: "{text}"'))
    followed = GrammarMatcher(grammar)
    tokens: list[int] = []
    while followed.inner is not None and not followed.inner.is_stopped():
        fresh = GrammarMatcher(grammar)
        fresh.advance(tokens)
        assert fresh.inner is not None
        mask = numpy.frombuffer(followed.inner.compute_bitmask(), numpy.int32)
        token = followed.forced_token(mask)
        assert fresh.forced_token(mask) == token
        tokens.append(allowed(mask)[0] if token is None else token)
        followed.advance(tokens[-1:])
    assert tokens == tokenizer.tokenize_str(text)


def test_a_control_token_may_end_a_forced_text(tokenizer: LLTokenizer) -> None:
    grammar = Grammar(kind="lark", source='start: "ab" <|im_start|> "cd"')
    matcher = GrammarMatcher(compile_grammar(tokenizer, grammar))
    begin, end = tokenizer.tokenize_str("ab"), tokenizer.tokenize_str("cd")
    control = tokenizer.tokenize_str("<|im_start|>", parse_special=True)
    assert len(control) == 1 and matcher.forced_tokens() == [*begin, *control]
    matcher.advance(begin)
    assert matcher.forced_tokens() == control
    matcher.advance(control)
    assert matcher.forced_tokens() == end
