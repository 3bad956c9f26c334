"""The cache of compiled grammars."""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakValueDictionary

from llguidance import LLTokenizer

from engine.grammar.compiled import CompiledGrammar, GrammarError, compile_grammar
from shared.wire import Grammar

CAPACITY = 64
"""Each grows with the texts of its sequences, usually by kilobytes and by 20 MB at worst."""
HEAVY_CAPACITY = 8
"""Limit for grammars that may take a hundred megabytes each."""

GrammarKey = tuple[str, str]
"""Equal for grammars that compile to the same result."""


def grammar_key(grammar: Grammar) -> GrammarKey:
    return grammar.kind, grammar.source


class GrammarCache:
    """Outcomes of grammars, with LRU eviction.

    It keeps `CAPACITY` outcomes, including `HEAVY_CAPACITY` heavy ones. A compiled grammar is found
    as long as anything refers to it. Errors are kept too. Used by the main thread only.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._recent: OrderedDict[GrammarKey, CompiledGrammar | GrammarError] = OrderedDict()
        self._in_use: WeakValueDictionary[GrammarKey, CompiledGrammar] = WeakValueDictionary()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that a grammar allows where an output may end."""
        return tuple(self._tokenizer.eos_tokens)

    @property
    def vocab_size(self) -> int:
        """The number of tokens that a mask covers."""
        return self._tokenizer.vocab_size

    def find(self, grammar: Grammar) -> CompiledGrammar | GrammarError | None:
        """Return the outcome of ``grammar``, None if it must be compiled (again)."""
        found = self._known(grammar)
        if isinstance(found, CompiledGrammar):
            try:
                found.mask_time.check()
            except GrammarError as error:
                self.add(grammar, error)
                return error
        if isinstance(found, CompiledGrammar) and not found.is_usable:
            key = grammar_key(grammar)
            self._recent.pop(key, None)
            self._in_use.pop(key, None)
            return None
        return found

    def _known(self, grammar: Grammar) -> CompiledGrammar | GrammarError | None:
        key = grammar_key(grammar)
        found = self._recent.get(key) or self._in_use.get(key)
        if found is not None:
            self.add(grammar, found)
        return found

    def add(self, grammar: Grammar, outcome: CompiledGrammar | GrammarError) -> None:
        key = grammar_key(grammar)
        if isinstance(outcome, CompiledGrammar):
            # Of two that were compiled at the same time, the one in use stays findable.
            outcome = self._in_use.setdefault(key, outcome)
        self._recent[key] = outcome
        self._recent.move_to_end(key)
        if len(self._recent) > CAPACITY:
            self._recent.popitem(last=False)
        heavy = [k for k, g in self._recent.items() if isinstance(g, CompiledGrammar) and g.heavy]
        for key in heavy[:-HEAVY_CAPACITY]:
            del self._recent[key]

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Return a compiled grammar; compile it if it is missing. Raises `GrammarError`."""
        # It is missing if the executor runs the plans of another process.
        found = self._known(grammar)
        if isinstance(found, GrammarError):
            raise found
        if found is None:
            found = compile_grammar(self._tokenizer, grammar)
            self.add(grammar, found)
        return found
