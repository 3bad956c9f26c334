"""The grammars that are compiled."""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakValueDictionary

from llguidance import LLTokenizer

from engine.grammar.compiled import CompiledGrammar, GrammarError, compile_grammar
from shared.wire import Grammar

CAPACITY = 256
HEAVY_CAPACITY = 8

GrammarKey = tuple[str, str]
"""What is the same in all grammars that compile to the same."""


def grammar_key(grammar: Grammar) -> GrammarKey:
    return grammar.kind, grammar.source


class GrammarCache:
    """The `CAPACITY` used last, of heavy ones `HEAVY_CAPACITY`, and all that somebody still
    holds; also what could not be compiled, and why. Only the main thread calls this."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._recent: OrderedDict[GrammarKey, CompiledGrammar | GrammarError] = OrderedDict()
        self._in_use: WeakValueDictionary[GrammarKey, CompiledGrammar] = WeakValueDictionary()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that a grammar allows at its end."""
        return tuple(self._tokenizer.eos_tokens)

    @property
    def vocab_size(self) -> int:
        """How many tokens a mask is for."""
        return self._tokenizer.vocab_size

    def find(self, grammar: Grammar) -> CompiledGrammar | GrammarError | None:
        key = grammar_key(grammar)
        found = self._recent.get(key) or self._in_use.get(key)
        if found is not None:
            self.add(grammar, found)
        return found

    def add(self, grammar: Grammar, outcome: CompiledGrammar | GrammarError) -> None:
        key = grammar_key(grammar)
        self._recent[key] = outcome
        self._recent.move_to_end(key)
        if isinstance(outcome, CompiledGrammar):
            self._in_use[key] = outcome
        if len(self._recent) > CAPACITY:
            self._recent.popitem(last=False)
        heavy = [
            k
            for k, each in self._recent.items()
            if isinstance(each, CompiledGrammar) and each.heavy
        ]
        for key in heavy[:-HEAVY_CAPACITY]:
            del self._recent[key]

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Compiles what is not there: for who runs plans that somebody else has made.
        Raises `GrammarError`."""
        found = self.find(grammar)
        if isinstance(found, GrammarError):
            raise found
        if found is None:
            found = compile_grammar(self._tokenizer, grammar)
            self.add(grammar, found)
        return found
