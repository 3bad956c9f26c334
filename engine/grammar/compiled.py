"""Grammars compiled by llguidance for one vocabulary."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from shared.bounded_schema import bounded
from shared.wire import Grammar

STACK_BYTES = 256 * 1024 * 1024
"""Stack size of threads that compile. llguidance recurses as deep as rules refer to each other, and
a source of `MAX_GRAMMAR_BYTES` needs more than the usual 8 MB. Only used pages take memory."""

MAX_MESSAGE_CHARS = 2000

HEAVY_S = 0.2
HEAVY_CHARS = 32 * 1024
"""A grammar counts as heavy if its compilation takes longer, or its source is longer."""

_JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n {0,20}"}
"""Whitespace allowed between JSON tokens: a space, or a line break and an indentation. If any
amount is allowed, some models never finish."""

_NO_FORCING = {"name": "no_forcing", "lark_grammar": 'start: ""\n%llguidance {"no_forcing": true}'}
"""A grammar that the others do not refer to; its option applies to them too. Without it each mask
walks over all the text that is forced at its position: see `engine.grammar.forced_text`."""

LIMITS = LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=50_000, verbose_errors=False)
"""A mask computes new states of the lexer for up to 7 ms. A state takes 0.3 to 2 kB."""
LIGHT = LLParserLimits(step_lexer_fuel=25_000, max_lexer_states=10_000, verbose_errors=False)
"""Ordinary grammars need no more. One that does is heavy."""

SLOW_MASK_S, PATIENCE_S = 0.02, 2.0
"""A grammar is too slow once its masks have taken this long in total, each without the first 20 ms.
Its sequences then fail: every step of the engine waits for a mask. `LIMITS` does not bound the time
in which an ambiguous grammar compares the ways to read a text, which grows with the text."""
FORGIVEN_SHARE = 0.01
"""The share of the time that masks may take like this for as long as the grammar is used: one that
is served for weeks may have a few slow masks an hour."""
SUSPECT_MASKS = 64
"""The number of masks after a slow one that are measured."""


class GrammarError(Exception):
    """A grammar cannot be compiled, or an output violates it."""

    def __init__(self, message: str, *, transient: bool = False, source: str | None = None) -> None:
        super().__init__(message)
        self.transient = transient  # whether a retry may succeed
        self.source = source
        """The source at fault, if known: that of the grammar or of one of its parts. Requests
        have the same source in different fields."""


class TokenizerSpec(msgspec.Struct, frozen=True):
    """The properties of a model that llguidance needs."""

    tokenizer_json: str  # the fast tokenizer
    vocab_size: int  # the width of the logits
    eos_token_ids: list[int]  # the tokens that end an answer; if empty, the tokenizer's

    def load(self) -> LLTokenizer:
        """Build the tokenizer (up to a second). Raises ValueError if llguidance does not support
        it."""
        ends = list(self.eos_token_ids) or None
        return LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size, eos_token=ends)


class MaskTime:
    """The time that the masks of one grammar have taken beyond `SLOW_MASK_S` each."""

    def __init__(self) -> None:
        self._excess_s, self._counted_at = 0.0, time.monotonic()
        self._suspicions = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count the time of ``count`` masks, or of as many tokens that were followed. Raises
        `GrammarError` if the grammar is too slow."""
        now = time.monotonic()
        kept_s = max(0.0, self._excess_s - FORGIVEN_SHARE * (now - self._counted_at))
        self._excess_s = kept_s + max(0.0, seconds - SLOW_MASK_S * max(1, count))
        self._counted_at = now
        self._suspicions = SUSPECT_MASKS if seconds > SLOW_MASK_S else max(0, self._suspicions - 1)
        self.check()

    def check(self) -> None:
        """Raise `GrammarError` if the grammar is too slow."""
        if self._excess_s > PATIENCE_S:
            raise GrammarError(
                "it takes too long to find which tokens it allows; make it less ambiguous"
            )

    def suspect(self) -> None:
        """Record that one of several masks was slow, which may be of this grammar."""
        self._suspicions = SUSPECT_MASKS

    @property
    def is_suspect(self) -> bool:
        """Whether its next mask should be computed alone, to see how long that takes."""
        return self._suspicions > 0


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A compiled grammar."""

    initial_matcher: LLMatcher  # a matcher in its initial state, copied for each sequence
    tokenizer: LLTokenizer
    heavy: bool = False  # whether it may take a hundred megabytes, or long masks
    mask_time: MaskTime = field(default_factory=MaskTime)  # of all its sequences

    @property
    def is_usable(self) -> bool:
        """False once its sequences, which share a lexer, have exceeded the limits of it."""
        matcher = self.initial_matcher.deep_copy()
        matcher.compute_bitmask()
        return not matcher.is_error()


def compile_grammar(
    tokenizer: LLTokenizer, grammar: Grammar, limits: LLParserLimits = LIMITS
) -> CompiledGrammar:
    """Compile ``grammar``. Raises `GrammarError` with llguidance's message.

    Some grammars take minutes, or more stack than there is: see `engine.grammar.checker`.
    """
    began = time.thread_time()
    whole = json.dumps({"grammars": [*_grammars(grammar), _NO_FORCING]})
    start = LLMatcher(tokenizer, whole, log_level=0, limits=limits)
    raise_if_error(start)
    start.compute_bitmask()  # copies keep it
    raise_if_error(start)
    long = time.thread_time() - began > HEAVY_S
    return CompiledGrammar(start, tokenizer, heavy=long or len(grammar.source) > HEAVY_CHARS)


def _grammars(grammar: Grammar) -> list[dict[str, Any]]:
    """Return the list of llguidance's grammars for ``grammar``. Raises `GrammarError`."""
    try:
        if grammar.kind == "json_schema":
            found: list[dict[str, Any]] = json.loads(json_grammar(grammar.source))["grammars"]
            return found
        if grammar.kind == "regex":
            # As in JavaScript, \\d matches ASCII digits only.
            return [{"lark_grammar": f"start: /{regex_to_lark(grammar.source, 'd')}/"}]
    except ValueError as error:
        raise GrammarError(str(error)) from None
    return [{"lark_grammar": grammar.source}]


def json_grammar(schema: str) -> str:
    """Return llguidance's grammar of JSON that is valid under ``schema``. Raises ValueError."""
    try:
        schema = json.dumps(bounded(json.loads(schema)))
    except RecursionError:
        pass  # llguidance refuses it
    return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS)


def raise_if_error(matcher: LLMatcher) -> None:
    """Raise `GrammarError` if ``matcher`` has failed, without llguidance's internal details."""
    if matcher.is_error():
        message = matcher.get_error()
        for inside in ("\n<state>", "\n<grammar>", "\n<backtrace>", "\n<non-verbose/>"):
            message = message.split(inside)[0]
        raise GrammarError(message.strip()[:MAX_MESSAGE_CHARS] or "it cannot be compiled")
