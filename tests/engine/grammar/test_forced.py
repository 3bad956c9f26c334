"""Tokens that a grammar forces, as drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llguidance import LLTokenizer

from engine.grammar.compiled import compile_grammar
from engine.grammar.forced import ForcedSource
from engine.speculation.sequence_drafts import DraftRow
from engine.speculation.source import DraftSource, Proposal
from engine.speculation.speculator import SpeculationOptions, Speculator
from shared import wire
from shared.wire import Grammar
from tests.shared.submits import submit

SOURCE = "(yes|no), because of its age"
PROMPT = [9, 8]


def source_of(tokenizer: LLTokenizer, **fields: Any) -> ForcedSource:
    grammar = Grammar(kind="regex", source=SOURCE, **fields)
    source = ForcedSource.of(request_with(grammar), compile_grammar(tokenizer, grammar))
    assert source is not None
    return source


def request_with(grammar: Grammar) -> wire.Submit:
    return submit("a", PROMPT, grammar=grammar)


def test_tokens_are_proposed_where_only_one_text_is_allowed(tokenizer: LLTokenizer) -> None:
    source = source_of(tokenizer)
    assert source.propose(PROMPT, 5) is None
    begun = [*PROMPT, *tokenizer.tokenize_str("yes")]
    rest = tokenizer.tokenize_str(", because of its age")
    proposal = source.propose(begun, 100)
    assert proposal is not None and list(proposal.tokens) == rest
    proposal = source.propose([*begun, *rest[:3]], 2)
    assert proposal is not None and list(proposal.tokens) == rest[3:5]


def test_drafts_of_others_end_where_the_grammar_does_not_allow_them(
    tokenizer: LLTokenizer,
) -> None:
    source = source_of(tokenizer)
    right, wrong = tokenizer.tokenize_str("no, because"), tokenizer.tokenize_str("x")
    source.propose(PROMPT, 5)
    assert source.num_possible(right) == len(right)
    assert source.num_possible([*right, *wrong, *right]) == len(right)

    class Repeated(DraftSource):
        def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
            return Proposal((*right, *wrong), "repeated")

    options = SpeculationOptions(tokens=9, adapts=False)
    speculator = Speculator(options, [lambda *_: Repeated(), lambda *_: source])
    drafts = speculator.begin(request_with(Grammar(kind="regex", source=SOURCE)), None)
    assert drafts is not None
    proposal = speculator.propose(DraftRow(drafts, PROMPT, 9))
    assert proposal is not None and list(proposal.tokens) == right


def test_nothing_is_proposed_before_the_grammar_applies_nor_after_an_error(
    tokenizer: LLTokenizer,
) -> None:
    (mark,) = tokenizer.tokenize_str("x")
    source = source_of(tokenizer, after=[mark])
    begun = [*PROMPT, *tokenizer.tokenize_str("n")]
    assert source.propose(begun, 5) is None
    begun += [mark, *tokenizer.tokenize_str("n")]
    assert source.propose(begun, 5) is not None
    assert source.propose([*begun, mark], 5) is None
    assert source.propose([*begun, mark], 5) is None


def test_grammars_that_may_be_large_get_no_second_matcher(tokenizer: LLTokenizer) -> None:
    grammar = Grammar(kind="regex", source=SOURCE)
    heavy = replace(compile_grammar(tokenizer, grammar), heavy=True)
    request = request_with(grammar)
    assert ForcedSource.of(request, heavy) is None
    assert ForcedSource.of(request, None) is None
