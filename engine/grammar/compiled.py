"""Grammars as llguidance compiles them, for one vocabulary."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from shared.wire import Grammar

STACK_BYTES = 256 * 1024 * 1024
"""Of threads that compile: llguidance recurses as deep as rules refer to each other, and of
a source of `MAX_GRAMMAR_BYTES` that is more than the usual 8 MB. Only what is used is real."""

MAX_MESSAGE_CHARS = 2000

HEAVY_S = 0.2
HEAVY_CHARS = 32 * 1024

_JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}"}
"""Between the tokens of JSON: as much as makes it readable. A model that may put any
amount of white space there does not always come to an end."""


class GrammarError(Exception):
    """A grammar that cannot be compiled, or that an output is not of. ``transient``: a
    later try may come out otherwise."""

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class TokenizerSpec(msgspec.Struct, frozen=True):
    """What llguidance has to know of a model: its fast tokenizer as JSON, the width of its
    logits, and the tokens that end an answer (none: as the tokenizer says)."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]

    def load(self) -> LLTokenizer:
        """Takes up to a second. Raises ValueError for a tokenizer of a kind it does not know."""
        return LLTokenizer(
            self.tokenizer_json,
            n_vocab=self.vocab_size,
            eos_token=list(self.eos_token_ids) or None,
        )


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """``initial_matcher`` is at the beginning, and copied for each sequence. A ``heavy`` one may
    hold a hundred megabytes."""

    initial_matcher: LLMatcher
    heavy: bool = False


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> CompiledGrammar:
    """Raises `GrammarError` with llguidance's message. There are grammars for which this
    takes minutes, or more stack than there is: see `engine.grammar.checker`."""
    began = time.thread_time()
    try:
        if grammar.kind == "json_schema":
            text = LLMatcher.grammar_from_json_schema(grammar.source, defaults=_JSON_OPTIONS)
        elif grammar.kind == "regex":
            # As in JavaScript, \\d are ten digits and not those of all scripts.
            text = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.source, 'd')}/")
        else:
            text = LLMatcher.grammar_from_lark(grammar.source)
    except ValueError as error:
        raise GrammarError(str(error)) from None
    limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
    start = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    raise_if_error(start)
    long = time.thread_time() - began > HEAVY_S
    return CompiledGrammar(start, heavy=long or len(grammar.source) > HEAVY_CHARS)


def raise_if_error(matcher: LLMatcher) -> None:
    """Raises `GrammarError` if ``matcher`` has one, without what it says of its inside."""
    if matcher.is_error():
        message = matcher.get_error()
        for inside in ("\n<state>", "\n<grammar>", "\n<backtrace>"):
            message = message.split(inside)[0]
        raise GrammarError(message.strip()[:MAX_MESSAGE_CHARS] or "it cannot be compiled")
