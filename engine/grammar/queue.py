"""Where requests wait until their grammars are compiled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.grammar.cache import GrammarCache, GrammarKey, grammar_key
from engine.grammar.compiled import CompiledGrammar, GrammarError
from engine.grammar.compiler import CompileOutcome
from shared import wire


class CompilerProtocol(Protocol):
    """What `engine.grammar.compiler.GrammarCompiler` is to the queue."""

    def compile(self, grammar: wire.Grammar) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ReadyRequest:
    """``request`` may go on. ``grammar`` is to be held as long as the request lives."""

    request: wire.Submit
    grammar: CompiledGrammar | None = None


ReadyOrRefused = ReadyRequest | wire.Refused


class GrammarQueue:
    """Requests without a grammar, or with one that is known, pass at once. The others wait,
    and each grammar is compiled once, however many wait for it.

    ``compiler`` and ``grammars`` None: the model's tokenizer is one that llguidance does
    not know, and every grammar is refused. Only the main thread calls this.
    """

    def __init__(self, compiler: CompilerProtocol | None, grammars: GrammarCache | None) -> None:
        self._compiler = compiler
        self._grammars = grammars
        self._waiting: dict[GrammarKey, list[wire.Submit]] = {}
        self.capabilities = () if compiler is None else ("structured-output",)

    def add(self, request: wire.Submit) -> ReadyOrRefused | None:
        """None: it waits, and comes out of `on_compiled`."""
        self._forget(request.request_id, before=request.attempt)
        grammar = request.grammar
        if grammar is None:
            return ReadyRequest(request)
        if self._compiler is None or self._grammars is None:
            return _refused(
                request,
                "unsupported",
                "grammars are not supported with the tokenizer of this model",
            )
        if len(grammar.source.encode()) > wire.MAX_GRAMMAR_BYTES:
            return _refused(request, "too_large", "the grammar is too large")
        found = self._grammars.find(grammar)
        if found is not None:
            return _ready_or_refused(request, found)
        key = grammar_key(grammar)
        if key not in self._waiting:
            self._waiting[key] = []
            self._compiler.compile(grammar)
        self._waiting[key].append(request)
        return None

    def on_compiled(self, grammar: wire.Grammar, outcome: CompileOutcome) -> list[ReadyOrRefused]:
        """Takes in what became of a grammar; returns what that means for those who wait."""
        assert self._grammars is not None
        # What took too long may have been held up by other work: the next one tries again.
        if isinstance(outcome, CompiledGrammar) or (
            isinstance(outcome, GrammarError) and not outcome.transient
        ):
            self._grammars.add(grammar, outcome)
        waiting = self._waiting.pop(grammar_key(grammar), [])
        return [_ready_or_refused(request, outcome) for request in waiting]

    def abort(self, request_id: str, attempt: int | None) -> None:
        self._forget(request_id, only=attempt)

    def clear(self) -> None:
        """Nobody waits any more. What is being compiled is kept for whoever comes."""
        for waiting in self._waiting.values():
            waiting.clear()

    def refuse_all(self) -> list[wire.Refused]:
        """Everybody who waits is refused."""
        waiting = [request for requests in self._waiting.values() for request in requests]
        self.clear()
        return [_refused(request, "draining", "the engine is draining") for request in waiting]

    def live(self) -> Iterable[wire.LiveRequest]:
        return (
            wire.LiveRequest(
                request_id=request.request_id,
                attempt=request.attempt,
                generated=len(request.generated),
                accepted=False,
            )
            for requests in self._waiting.values()
            for request in requests
        )

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    def _forget(
        self, request_id: str, *, only: int | None = None, before: int | None = None
    ) -> None:
        for waiting in self._waiting.values():
            waiting[:] = [
                request
                for request in waiting
                if request.request_id != request_id
                or (only is not None and request.attempt != only)
                or (before is not None and request.attempt >= before)
            ]


def _ready_or_refused(request: wire.Submit, outcome: CompileOutcome) -> ReadyOrRefused:
    if isinstance(outcome, CompiledGrammar):
        return ReadyRequest(request, outcome)
    if isinstance(outcome, GrammarError):
        param = request.grammar.param if request.grammar else None
        return _refused(request, "invalid", f"Invalid '{param or 'grammar'}': {outcome}")
    return _refused(request, "full", str(outcome))


def _refused(request: wire.Submit, reason: wire.RefusalReason, message: str) -> wire.Refused:
    return wire.Refused(
        request_id=request.request_id,
        attempt=request.attempt,
        reason=reason,
        message=message,
        param=request.grammar.param if request.grammar else None,
    )
