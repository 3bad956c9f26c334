"""The threads that compile grammars."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from llguidance import LLTokenizer

from engine.grammar.checker import CheckerUnavailable, GrammarChecker
from engine.grammar.compiled import (
    STACK_BYTES,
    CompiledGrammar,
    GrammarError,
    TokenizerSpec,
    compile_grammar,
)
from shared.wire import Grammar

logger = logging.getLogger(__name__)

THREADS = 2

CompileOutcome = CompiledGrammar | GrammarError | CheckerUnavailable


class GrammarCompiler:
    """Compiles grammars on `THREADS` threads, which call ``on_done`` with each outcome.

    Every thread has a `GrammarChecker` of its own, so that a slow grammar occupies one of them.
    """

    def __init__(
        self,
        tokenizer_spec: TokenizerSpec,
        tokenizer: LLTokenizer,
        on_done: Callable[[Grammar, CompileOutcome], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._on_done = on_done
        self._work: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._checkers = [GrammarChecker(tokenizer_spec) for _ in range(THREADS)]
        self._threads = [
            threading.Thread(target=self._run, args=(c,), name="grammars", daemon=True)
            for c in self._checkers
        ]
        usual = threading.stack_size(STACK_BYTES)
        try:
            for thread in self._threads:
                thread.start()
        finally:
            threading.stack_size(usual)

    def compile(self, grammar: Grammar) -> None:
        self._work.put(grammar)

    def close(self) -> None:
        """End the checkers. ``on_done`` is not called any more."""
        self._on_done = lambda grammar, outcome: None
        for _ in self._threads:
            self._work.put(None)
        for checker in self._checkers:
            checker.close()

    def _run(self, checker: GrammarChecker) -> None:
        while (grammar := self._work.get()) is not None:
            self._on_done(grammar, self._outcome(checker, grammar))

    def _outcome(self, checker: GrammarChecker, grammar: Grammar) -> CompileOutcome:
        try:
            checker.check(grammar)
            return compile_grammar(self._tokenizer, grammar)
        except (GrammarError, CheckerUnavailable) as error:
            return error
        except Exception as error:
            logger.exception("a grammar could not be compiled")
            return GrammarError(f"{type(error).__name__}: {error}")
