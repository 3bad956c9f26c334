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
import select
import subprocess
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
from shared.sandbox.pipe_frames import LENGTH, read_frame, write_frames
from shared.sandbox.worker_process import running_pid, start_worker
from shared.wire import Grammar

TIME_LIMIT_S = 10.0
START_LIMIT_S = 60.0
ABANDON_EVERY_S = 0.5
"""Interval for checking whether anyone still wants the grammar. Not immediately: restarting a
killed process takes longer than compiling most grammars."""
MEMORY_LIMIT_BYTES = 4 * 1024**3
"""Memory limit in addition to what the process uses when it is ready."""
PROCESSES_LOST = 2
"""Processes that a grammar may cost before it is rejected, which is remembered: the first may have
been killed for another reason."""
TRIED_TOKENS = 16
HEAVY_TOKENS, HEAVY_WALK_S = 128, 0.25
"""A grammar is heavy if it exceeds `LIGHT` within so many random tokens, or these take longer."""


class CheckerUnavailable(Exception):
    """The process cannot be started, so nothing is known about the grammar."""


class GrammarChecker:
    """The engine's side. Used by one thread; starts the process on demand."""

    def __init__(self, tokenizer_spec: TokenizerSpec, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._tokenizer_spec = tokenizer_spec
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id; None if it is not running."""
        return running_pid(self._process)

    def check(self, grammar: Grammar, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Return whether ``grammar`` is heavy. Raise `GrammarError` if it is invalid or exceeds the
        limits, or once it is not wanted any more; `CheckerUnavailable`."""
        for _ in range(PROCESSES_LOST):
            answer = self._try(grammar, is_wanted)
            if answer is not None:
                break
        else:
            raise GrammarError("it is too deep or too large to compile")
        message, number, heavy = msgspec.msgpack.decode(answer, type=tuple[str, int, bool])
        if message:
            raise GrammarError(message, source=(*grammar.parts, grammar)[number].source)
        return heavy

    def _try(self, grammar: Grammar, is_wanted: Callable[[], bool]) -> bytes | None:
        """Return the reply, None if the process exited."""
        process = self._running_process()
        try:
            assert process.stdin is not None
            write_frames(process.stdin, msgspec.msgpack.encode(grammar))
            answer = self._answer(process, self._time_limit_s, is_wanted)
        except BrokenPipeError:
            answer = None
        except TimeoutError:
            self._kill()
            why = f"compiling it takes longer than {self._time_limit_s:g} s"
            raise GrammarError(why, transient=True) from None
        if answer is None:
            self._kill()
        return answer

    def close(self) -> None:
        """Stop the process permanently, even while it compiles. Any thread may call it."""
        self._closed = True
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self.pid is not None:
            return self._process
        self._kill()
        if self._closed:
            raise CheckerUnavailable("the engine is shutting down")
        try:
            process = self._process = start_worker("engine.grammar.checker")
            assert process.stdin is not None
            write_frames(process.stdin, msgspec.msgpack.encode(self._tokenizer_spec))
            if self._answer(process, START_LIMIT_S) is None:
                raise OSError("it exited")
        except (OSError, TimeoutError) as error:
            self._kill()
            raise CheckerUnavailable(
                f"cannot start the process that checks grammars: {error}"
            ) from error
        return process

    def _answer(
        self,
        process: subprocess.Popen[bytes],
        limit_s: float,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bytes | None:
        """Return the next reply, None if the process exited. Raises TimeoutError."""
        assert process.stdout is not None
        left, last = limit_s, time.monotonic()
        data = b""
        while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
            ready = select.select([process.stdout], [], [], max(0, min(left, ABANDON_EVERY_S)))[0]
            now = time.monotonic()
            # A longer wait is a machine that slept, on which the process did not run either.
            left, last = left - min(now - last, 2 * ABANDON_EVERY_S), now
            if not ready:
                if left <= 0:
                    raise TimeoutError(f"no answer within {limit_s:g} s")
                if not is_wanted():
                    raise TimeoutError("no request waits for it")
                continue
            more = os.read(process.stdout.fileno(), 65536)
            if not more:
                return None
            data += more
        return data[LENGTH.size :]


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
        _try_out(tokenizer, grammar)
    except GrammarError as error:
        message = str(error)
        where = ""
        if grammar.kind == "json_schema":
            where = locate(tokenizer, grammar.source, message)
        return f"at {where}: {message}" if where else message
    return ""


def _try_out(tokenizer: LLTokenizer, grammar: Grammar) -> None:
    """Compile ``grammar`` and take a few random steps, because some become too large only then."""
    _walk(compile_grammar(tokenizer, grammar), TRIED_TOKENS)


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
