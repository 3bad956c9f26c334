"""The threads that compile grammars."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLTokenizer

from engine.grammar.cache import GrammarKey, grammar_key
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


@dataclass(eq=False)
class _Compilation:
    """The work of a thread for one grammar. Another thread may do the same for later requests."""

    key: GrammarKey
    is_abandoned: bool = False
    """Whether nothing waits for it any more."""


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
        self._waiting: OrderedDict[GrammarKey, Grammar] = OrderedDict()
        self._runs: list[_Compilation] = []
        self._lock = threading.Lock()
        """Guards the two above."""
        self._work = threading.Semaphore(0)
        """Number of grammars put into `_waiting`, including cancelled ones."""
        self._closed = False
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
        with self._lock:
            self._waiting[grammar_key(grammar)] = grammar
        self._work.release()

    def cancel(self, grammar: Grammar) -> None:
        """Record that nothing waits for ``grammar`` any more. Its outcome is passed on only if it
        is compiled anyway."""
        key = grammar_key(grammar)
        with self._lock:
            self._waiting.pop(key, None)
            for run in self._runs:
                run.is_abandoned |= run.key == key

    def close(self) -> None:
        """Stop the checkers. ``on_done`` is not called any more."""
        self._on_done = lambda grammar, outcome: None
        self._closed = True
        self._work.release(len(self._threads))
        for checker in self._checkers:
            checker.close()

    def _run(self, checker: GrammarChecker) -> None:
        while self._work.acquire() and not self._closed:
            with self._lock:
                if not self._waiting:
                    continue  # it was cancelled
                key, grammar = self._waiting.popitem(last=False)
                run = _Compilation(key)
                self._runs.append(run)
            outcome = self._outcome(checker, grammar, run)
            with self._lock:
                self._runs.remove(run)
            if not run.is_abandoned or isinstance(outcome, CompiledGrammar):
                self._on_done(grammar, outcome)

    def _outcome(
        self, checker: GrammarChecker, grammar: Grammar, run: _Compilation
    ) -> CompileOutcome:
        try:
            checker.check(grammar, lambda: not run.is_abandoned)
            return compile_grammar(self._tokenizer, grammar)
        except (GrammarError, CheckerUnavailable) as error:
            return error
        except Exception as error:
            logger.exception("failed to compile a grammar")
            return GrammarError(f"{type(error).__name__}: {error}")
