"""The threads that compile grammars."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

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

SLOW_S, SLOW_FOR_S = 1.0, 600.0
"""After a grammar that takes longer, its group compiles one grammar at a time for so long."""
MAX_SLOW_GROUPS = 256
"""The one that was slow the longest ago is forgotten above this number."""

CompileOutcome = CompiledGrammar | GrammarError | CheckerUnavailable


@dataclass(eq=False)
class _Compilation:
    """The work of a thread for one grammar. Another thread may do the same for later requests."""

    group: str
    grammar: Grammar
    began: float = field(default_factory=time.monotonic)
    is_abandoned: bool = False
    """Whether nothing waits for it any more."""

    @property
    def key(self) -> GrammarKey:
        return grammar_key(self.grammar)


class _Waiting:
    """Grammars to compile, by group. Groups take turns."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, OrderedDict[GrammarKey, Grammar]] = OrderedDict()

    def add(self, group: str, grammar: Grammar) -> None:
        self._groups.setdefault(group, OrderedDict()).setdefault(grammar_key(grammar), grammar)

    def take(self, busy: Collection[str]) -> _Compilation | None:
        """Remove and return the next grammar, of a group that is not ``busy``; None if there is
        none."""
        group = next((group for group in self._groups if group not in busy), None)
        if group is None:
            return None
        self._groups.move_to_end(group)
        grammar = next(iter(self._groups[group].values()))
        self.remove(grammar_key(grammar))
        return _Compilation(group, grammar)

    def remove(self, key: GrammarKey) -> None:
        for group, grammars in list(self._groups.items()):
            grammars.pop(key, None)
            if not grammars:
                del self._groups[group]


class GrammarCompiler:
    """Compiles grammars on `THREADS` threads, which call ``on_done`` with each outcome.

    Every thread has a `GrammarChecker` of its own, so that a slow grammar occupies one of them. A
    group of requests, those of one tenant, cannot occupy all for long: groups take turns, and one
    with slow grammars has one thread at a time.
    """

    def __init__(
        self,
        tokenizer_spec: TokenizerSpec,
        tokenizer: LLTokenizer,
        on_done: Callable[[Grammar, CompileOutcome], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._on_done = on_done
        self._waiting = _Waiting()
        self._runs: list[_Compilation] = []
        self._slow: OrderedDict[str, float] = OrderedDict()
        """Groups with slow grammars, and when the last one ended."""
        self._closed = False
        self._changed = threading.Condition()
        """Guards the above. Notified when there may be work for a thread."""
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

    def compile(self, grammar: Grammar, group: str = "") -> None:
        """Compile ``grammar`` when it is the turn of ``group``, or of another that wants the same
        one."""
        key = grammar_key(grammar)
        with self._changed:
            if all(run.is_abandoned or run.key != key for run in self._runs):
                self._waiting.add(group, grammar)
                self._changed.notify()

    def cancel(self, grammar: Grammar) -> None:
        """Record that nothing waits for ``grammar`` any more. Its outcome is passed on only if it
        is compiled anyway."""
        key = grammar_key(grammar)
        with self._changed:
            self._waiting.remove(key)
            for run in self._runs:
                run.is_abandoned |= run.key == key

    def close(self) -> None:
        """Stop the checkers. ``on_done`` is not called any more."""
        self._on_done = lambda grammar, outcome: None
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for checker in self._checkers:
            checker.close()

    def _run(self, checker: GrammarChecker) -> None:
        while (run := self._next()) is not None:
            outcome = self._outcome(checker, run)
            self._ended(run)
            if not run.is_abandoned or isinstance(outcome, CompiledGrammar):
                self._on_done(run.grammar, outcome)

    def _next(self) -> _Compilation | None:
        """Wait for a grammar, and return it; None once the compiler is closed."""
        with self._changed:
            while not self._closed:
                since = time.monotonic() - SLOW_FOR_S
                busy = [run.group for run in self._runs if self._slow.get(run.group, 0.0) > since]
                if (run := self._waiting.take(busy)) is not None:
                    self._runs.append(run)
                    return run
                self._changed.wait()
        return None

    def _ended(self, run: _Compilation) -> None:
        now = time.monotonic()
        with self._changed:
            self._runs.remove(run)
            if run.group and now - run.began > SLOW_S:  # without keys, nobody is another
                self._slow[run.group] = now
                self._slow.move_to_end(run.group)
                if len(self._slow) > MAX_SLOW_GROUPS:
                    self._slow.popitem(last=False)
            self._changed.notify()

    def _outcome(self, checker: GrammarChecker, run: _Compilation) -> CompileOutcome:
        try:
            heavy = checker.check(run.grammar, lambda: not run.is_abandoned)
            compiled = compile_grammar(self._tokenizer, run.grammar)
            return replace(compiled, heavy=heavy or compiled.heavy)
        except (GrammarError, CheckerUnavailable) as error:
            return error
        except Exception as error:
            logger.exception("failed to compile a grammar")
            return GrammarError(f"{type(error).__name__}: {error}")
