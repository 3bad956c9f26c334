"""Finds the grammars of requests, and those that wait for one."""

from __future__ import annotations

from typing import Protocol

from engine.grammar.cache import GrammarCache, GrammarKey, grammar_key
from engine.grammar.compiled import CompiledGrammar, GrammarError
from engine.grammar.compiler import CompileOutcome
from engine.scheduler.sequences.sequence import Sequence
from shared import wire


class CompilerProtocol(Protocol):
    """The part of `engine.grammar.compiler.GrammarCompiler` that the queue uses."""

    def compile(self, grammar: wire.Grammar, group: str = "") -> None: ...

    def cancel(self, grammar: wire.Grammar) -> None: ...

    def close(self) -> None: ...


class GrammarQueue:
    """Finds grammars, and compiles those that are not known yet.

    Each grammar is compiled once, for all requests that use it. Without ``compiler`` and
    ``grammars`` every grammar is refused, because llguidance does not support the model's
    tokenizer. Used by the main thread only.
    """

    def __init__(self, compiler: CompilerProtocol | None, grammars: GrammarCache | None) -> None:
        self._compiler = compiler
        self._grammars = grammars
        self._waiting: dict[GrammarKey, list[Sequence]] = {}
        self.capabilities = () if compiler is None else ("structured-output",)

    def find(self, seq: Sequence) -> CompiledGrammar | wire.Refused | None:
        """Return the grammar of a request that has one, or its refusal; None if it waits for
        `on_compiled`."""
        request, grammar = seq.request, seq.request.grammar
        assert grammar is not None
        if self._compiler is None or self._grammars is None:
            why = "grammars are not supported with the tokenizer of this model"
            return wire.Refused.of(request, "unsupported", why, grammar.param)
        if any(len(g.source.encode()) > wire.MAX_GRAMMAR_BYTES for g in (grammar, *grammar.parts)):
            return wire.Refused.of(request, "too_large", "the grammar is too large", grammar.param)
        found = self._grammars.find(grammar)
        if found is not None:
            return _compiled_or_refused(request, found)
        waiting = self._waiting.setdefault(grammar_key(grammar), [])
        if all(other.request.group != request.group for other in waiting):
            self._compiler.compile(grammar, request.group)
        waiting.append(seq)
        return None

    def on_compiled(
        self, grammar: wire.Grammar, outcome: CompileOutcome
    ) -> list[tuple[Sequence, CompiledGrammar | wire.Refused]]:
        """Record the outcome of a grammar, and return it for each that waited for it."""
        assert self._grammars is not None
        # A transient error is not cached: other work may have slowed down the compiler.
        if isinstance(outcome, CompiledGrammar) or (
            isinstance(outcome, GrammarError) and not outcome.transient
        ):
            self._grammars.add(grammar, outcome)
        waiting = self._waiting.pop(grammar_key(grammar), [])
        return [
            (seq, _compiled_or_refused(seq.request, outcome))
            for seq in waiting
            if not seq.is_finished
        ]

    def cancel_abandoned(self) -> None:
        """Stop compiling what nobody waits for any more: each grammar may occupy its compiler for
        ten seconds."""
        for key, waiting in list(self._waiting.items()):
            if all(seq.is_finished for seq in waiting):
                grammar = waiting[0].request.grammar
                assert self._compiler is not None and grammar is not None
                self._compiler.cancel(grammar)
                del self._waiting[key]

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


def _compiled_or_refused(
    request: wire.Submit, outcome: CompileOutcome
) -> CompiledGrammar | wire.Refused:
    if isinstance(outcome, CompiledGrammar):
        return outcome
    grammar = request.grammar
    assert grammar is not None
    if not isinstance(outcome, GrammarError):
        return wire.Refused.of(request, "full", str(outcome), grammar.param)
    param = next((each.param for each in grammar.parts if each.source == outcome.source), None)
    param = param or grammar.param
    message = f"Invalid '{param or 'grammar'}': {outcome}"
    return wire.Refused.of(request, "invalid", message, param)
