"""A process that tests grammars before the engine compiles them.

Compiling a grammar of a hundred bytes can take minutes and gigabytes, and one with deep references
can crash the process. That must not happen to the engine. `python -m engine.grammar.checker` reads
from standard input and replies on standard output. A frame is a length (8 bytes) and msgpack. The
process exits at the end of its input.
"""

from __future__ import annotations

import os
import queue
import random
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

import msgspec
import numpy
from llguidance import LLTokenizer

from engine.grammar.compiled import (
    LIGHT,
    STACK_BYTES,
    CompiledGrammar,
    GrammarError,
    TokenizerSpec,
    compile_grammar,
    raise_if_error,
)
from engine.grammar.locate import locate
from shared.sandbox.memory_limit import MemoryLimit
from shared.sandbox.pipe_frames import read_frame, write_frames
from shared.sandbox.worker_process import WorkerLost, WorkerProcess
from shared.wire import Grammar

TIME_LIMIT_S = 10.0
START_LIMIT_S = 60.0
MAX_ANSWER_BYTES = 1 << 20
MEMORY_LIMIT_BYTES = 4 * 1024**3
"""Memory limit in addition to what the process uses when it is ready."""
PROCESSES_LOST = 2
"""Processes that a grammar may cost before it is rejected, which is remembered: the first may have
been killed for another reason."""
TRIED_TOKENS = 16
HEAVY_TOKENS, HEAVY_WALK_S = 128, 0.25
"""A grammar is heavy if it exceeds `LIGHT` within so many random tokens, or these take longer."""
_CANNOT_START = "cannot start the process that checks grammars"


class CheckerUnavailable(Exception):
    """The process cannot be started, so nothing is known about the grammar."""


class GrammarChecker:
    """The engine's side. Used by one thread; starts the process on demand."""

    def __init__(self, tokenizer_spec: TokenizerSpec, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._tokenizer_spec = tokenizer_spec
        self._time_limit_s = time_limit_s
        self._worker = WorkerProcess("engine.grammar.checker")

    @property
    def pid(self) -> int | None:
        """The process id; None if it is not running."""
        return self._worker.pid

    def check(self, grammar: Grammar, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Return whether ``grammar`` is heavy. Raise `GrammarError` if it is invalid or exceeds the
        limits, or once it is not wanted any more; `CheckerUnavailable`."""
        for _ in range(PROCESSES_LOST):
            self._start()
            try:
                answer = self._ask(msgspec.msgpack.encode(grammar), self._time_limit_s, is_wanted)
                break
            except WorkerLost as lost:
                if lost.is_late:
                    why = f"compiling it takes longer than {self._time_limit_s:g} s"
                    raise GrammarError(why, transient=True) from None
            except OSError as error:  # closed in the meantime
                raise CheckerUnavailable(str(error)) from error
        else:
            raise GrammarError("it is too deep or too large to compile")
        message, number, heavy = msgspec.msgpack.decode(answer, type=tuple[str, int, bool])
        if message:
            raise GrammarError(message, source=(*grammar.parts, grammar)[number].source)
        return heavy

    def close(self) -> None:
        """Stop the process permanently, even while it compiles. Any thread may call it."""
        self._worker.close()

    def _start(self) -> None:
        try:
            if self._worker.start():
                self._ask(msgspec.msgpack.encode(self._tokenizer_spec), START_LIMIT_S)
        except WorkerLost as lost:
            why = f"no answer within {START_LIMIT_S:g} s" if lost.is_late else "it exited"
            raise CheckerUnavailable(f"{_CANNOT_START}: {why}") from None
        except OSError as error:
            raise CheckerUnavailable(f"{_CANNOT_START}: {error}") from error

    def _ask(
        self, frame: bytes, limit_s: float, is_wanted: Callable[[], bool] = lambda: True
    ) -> memoryview:
        deadline = time.monotonic() + limit_s
        with self._worker.working():
            self._worker.write(deadline, frame)
            return self._worker.read(deadline, MAX_ANSWER_BYTES, is_wanted)


def main() -> None:
    """Check grammars until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    grammars: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = msgspec.msgpack.decode(read_frame(sys.stdin.buffer), type=TokenizerSpec).load()
    limit = MemoryLimit(MEMORY_LIMIT_BYTES)
    write_frames(answers, b"")
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_serve, args=(tokenizer, grammars, limit, answers), daemon=True).start()
    threading.stack_size(0)
    while True:  # a separate thread, which notices the end of the input even during a compilation
        grammars.put(read_frame(sys.stdin.buffer))


def _serve(
    tokenizer: LLTokenizer,
    grammars: queue.SimpleQueue[bytes],
    limit: MemoryLimit,
    answers: IO[bytes],
) -> None:
    while True:
        whole = msgspec.msgpack.decode(grammars.get(), type=Grammar)
        faults = (_fault(tokenizer, grammar) for grammar in (*whole.parts, whole))
        try:
            with limit.applied():
                began = time.thread_time()
                faulty = ((fault, number) for number, fault in enumerate(faults) if fault)
                fault, number = next(faulty, ("", 0))
                long = time.thread_time() - began > HEAVY_WALK_S
                heavy = not fault and (long or _is_heavy(tokenizer, whole))
        except BaseException:  # out of memory, for example: a lost process is not waited for
            os._exit(1)
        write_frames(answers, msgspec.msgpack.encode((fault, number, heavy)))


def _fault(tokenizer: LLTokenizer, grammar: Grammar) -> str:
    """Return the error in ``grammar`` and its position; empty if it is valid."""
    try:
        _walk(compile_grammar(tokenizer, grammar), TRIED_TOKENS)  # some only then become too large
    except GrammarError as error:
        message = str(error)
        where = ""
        if grammar.kind == "json_schema":
            where = locate(tokenizer, grammar.source, message)
        return f"at {where}: {message}" if where else message
    return ""


def _is_heavy(tokenizer: LLTokenizer, grammar: Grammar) -> bool:
    """Return whether more steps of a valid ``grammar`` take much time or memory."""
    began = time.thread_time()
    try:
        _walk(compile_grammar(tokenizer, grammar, LIGHT), HEAVY_TOKENS)
    except GrammarError:
        return True
    return time.thread_time() - began > HEAVY_WALK_S


def _walk(grammar: CompiledGrammar, count: int) -> None:
    """Follow up to ``count`` random tokens. Raises `GrammarError`."""
    matcher, rng = grammar.initial_matcher, random.Random(0)
    for _ in range(count):
        mask = numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8)
        raise_if_error(matcher)
        allowed = numpy.flatnonzero(numpy.unpackbits(mask, bitorder="little"))
        if matcher.is_stopped():
            return
        if not len(allowed):
            raise GrammarError("no text matches this grammar")
        matcher.consume_token(int(rng.choice(allowed)))
        raise_if_error(matcher)


if __name__ == "__main__":
    main()
