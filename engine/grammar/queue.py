"""The queue of requests whose grammars are being compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.grammar.cache import GrammarCache, GrammarKey, grammar_key
from engine.grammar.compiled import CompiledGrammar, GrammarError
from engine.grammar.compiler import CompileOutcome
from shared import wire


class CompilerProtocol(Protocol):
    """The part of `engine.grammar.compiler.GrammarCompiler` that the queue uses."""

    def compile(self, grammar: wire.Grammar, group: str = "") -> None: ...

    def cancel(self, grammar: wire.Grammar) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ReadyRequest:
    """A request ready for the scheduler."""

    request: wire.Submit
    grammar: CompiledGrammar | None = None  # keeps it alive as long as the request


ReadyOrRefused = ReadyRequest | wire.Refused


class GrammarQueue:
    """Passes on requests without a grammar or with a known one immediately; the others wait.

    Each grammar is compiled once, for all requests that use it. Without ``compiler`` and
    ``grammars`` every grammar is refused, because llguidance does not support the model's
    tokenizer. Used by the main thread only.
    """

    def __init__(self, compiler: CompilerProtocol | None, grammars: GrammarCache | None) -> None:
        self._compiler = compiler
        self._grammars = grammars
        self._waiting: dict[GrammarKey, list[wire.Submit]] = {}
        self.capabilities = () if compiler is None else ("structured-output",)

    def add(self, request: wire.Submit) -> ReadyOrRefused | None:
        """Return the request, or its refusal; None if it waits for `on_compiled`."""
        self._forget(request.request_id, before=request.attempt)
        grammar = request.grammar
        if grammar is None:
            return ReadyRequest(request)
        if self._compiler is None or self._grammars is None:
            why = "grammars are not supported with the tokenizer of this model"
            return _refused(request, "unsupported", why)
        if any(len(g.source.encode()) > wire.MAX_GRAMMAR_BYTES for g in (grammar, *grammar.parts)):
            return _refused(request, "too_large", "the grammar is too large")
        found = self._grammars.find(grammar)
        if found is not None:
            return _ready_or_refused(request, found)
        waiting = self._waiting.setdefault(grammar_key(grammar), [])
        if all(other.group != request.group for other in waiting):
            self._compiler.compile(grammar, request.group)
        waiting.append(request)
        return None

    def on_compiled(self, grammar: wire.Grammar, outcome: CompileOutcome) -> list[ReadyOrRefused]:
        """Record the outcome of a grammar, and return the requests that waited for it."""
        assert self._grammars is not None
        # A transient error is not cached: other work may have slowed down the compiler.
        if isinstance(outcome, CompiledGrammar) or (
            isinstance(outcome, GrammarError) and not outcome.transient
        ):
            self._grammars.add(grammar, outcome)
        waiting = self._waiting.pop(grammar_key(grammar), [])
        return [_ready_or_refused(request, outcome) for request in waiting]

    def abort(self, request_id: str, attempt: int | None) -> None:
        self._forget(request_id, only=attempt)

    def clear(self) -> None:
        """Drop all waiting requests."""
        self._drop(lambda request: True)

    def refuse_all(self) -> list[wire.Refused]:
        """Refuse all waiting requests."""
        waiting = [request for requests in self._waiting.values() for request in requests]
        self.clear()
        return [_refused(request, "draining", "the engine is draining") for request in waiting]

    def live(self) -> Iterable[wire.LiveRequest]:
        return (request.waiting for requests in self._waiting.values() for request in requests)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    def _forget(self, request_id: str, only: int | None = None, before: int | None = None) -> None:
        self._drop(
            lambda request: (
                request.request_id == request_id
                and (only is None or request.attempt == only)
                and (before is None or request.attempt < before)
            )
        )

    def _drop(self, is_dropped: Callable[[wire.Submit], bool]) -> None:
        """Drop queued requests, and the grammars for which no other request waits: each may occupy
        its compiler for ten seconds."""
        for key, waiting in list(self._waiting.items()):
            grammars = [request.grammar for request in waiting if request.grammar is not None]
            waiting[:] = [request for request in waiting if not is_dropped(request)]
            if grammars and not waiting and self._compiler is not None:
                self._compiler.cancel(grammars[0])
                del self._waiting[key]


def _ready_or_refused(request: wire.Submit, outcome: CompileOutcome) -> ReadyOrRefused:
    if isinstance(outcome, CompiledGrammar):
        return ReadyRequest(request, outcome)
    if isinstance(outcome, GrammarError):
        parts = request.grammar.parts if request.grammar else ()
        param = next((each.param for each in parts if each.source == outcome.source), None)
        param = param or (request.grammar.param if request.grammar else None)
        message = f"Invalid '{param or 'grammar'}': {outcome}"
        return _refused(request, "invalid", message, param)
    return _refused(request, "full", str(outcome))


def _refused(
    request: wire.Submit, reason: wire.RefusalReason, message: str, param: str | None = None
) -> wire.Refused:
    param = param or (request.grammar.param if request.grammar else None)
    return wire.Refused.of(request, reason, message, param)
