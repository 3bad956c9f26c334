"""A process that tries grammars out before the engine compiles them.

A grammar of a hundred bytes can take minutes to compile, and gigabytes, and one that
refers deep enough can end the process that does it. This one may be ended for it.
`python -m engine.grammar.checker` reads from its standard input and answers on its
standard output, in frames of a length (4 bytes) and msgpack; the end of the input ends it.
"""

from __future__ import annotations

import os
import queue
import random
import resource
import select
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import msgspec
import numpy
from llguidance import LLTokenizer

from engine.grammar.compiled import (
    STACK_BYTES,
    GrammarError,
    TokenizerSpec,
    compile_grammar,
    raise_if_error,
)
from engine.grammar.locate import locate
from shared.wire import Grammar

TIME_LIMIT_S = 10.0
START_LIMIT_S = 60.0
MEMORY_LIMIT_BYTES = 4 * 1024**3
"""Beyond what the process has mapped when it is ready."""
TRIED_TOKENS = 16

_LENGTH = struct.Struct("<I")


class CheckerUnavailable(Exception):
    """The process cannot be started: nothing is known of the grammar."""


class GrammarChecker:
    """The engine's end. Used by one thread; starts the process when it is first needed."""

    def __init__(self, tokenizer_spec: TokenizerSpec, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._tokenizer_spec = tokenizer_spec
        self._time_limit_s = time_limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, grammar: Grammar) -> None:
        """Raises `GrammarError` for one that is wrong, or that cannot be compiled within
        the limits, and `CheckerUnavailable`."""
        process = self._running_process()
        try:
            _write(process.stdin, msgspec.msgpack.encode(grammar))
            answer = self._answer(process, self._time_limit_s)
        except BrokenPipeError:
            answer = None
        except TimeoutError:
            self._kill()
            raise GrammarError(
                f"it takes longer than {self._time_limit_s:g} s to compile", transient=True
            ) from None
        if answer is None:
            self._kill()
            raise GrammarError("it is too deep or too large to compile")
        if message := msgspec.msgpack.decode(answer, type=str):
            raise GrammarError(message)

    def close(self) -> None:
        """Ends the process for good, whatever it does. Any thread may call it."""
        self._closed = True
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        if self._closed:
            raise CheckerUnavailable("the engine ends")
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.grammar.checker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # Rust tells of its panics there
                start_new_session=True,  # a ^C is for the supervisor
                bufsize=0,
            )
            _write(process.stdin, msgspec.msgpack.encode(self._tokenizer_spec))
            if self._answer(process, START_LIMIT_S) is None:
                raise OSError("it ended")
        except (OSError, TimeoutError) as error:
            self._kill()
            raise CheckerUnavailable(f"no process to check grammars: {error}") from error
        return process

    def _answer(self, process: subprocess.Popen[bytes], limit_s: float) -> bytes | None:
        """None when the process ends instead. Raises TimeoutError."""
        assert process.stdout is not None
        deadline = time.monotonic() + limit_s
        data = b""
        while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise TimeoutError(f"no answer within {limit_s:g} s")
            more = os.read(process.stdout.fileno(), 65536)
            if not more:
                return None
            data += more
        return data[_LENGTH.size :]


def main() -> None:
    """Serves until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    grammars: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = msgspec.msgpack.decode(_read(sys.stdin.buffer), type=TokenizerSpec).load()
    if sys.platform == "linux":
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _write(answers, b"")
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_serve, args=(tokenizer, grammars, answers), daemon=True).start()
    while True:  # this thread is free to see the end of the input while the other compiles
        grammars.put(_read(sys.stdin.buffer))


def _serve(tokenizer: LLTokenizer, grammars: queue.SimpleQueue[bytes], answers: IO[bytes]) -> None:
    while True:
        grammar = msgspec.msgpack.decode(grammars.get(), type=Grammar)
        try:
            _try_out(tokenizer, grammar)
            message = ""
        except GrammarError as error:
            message = str(error)
            if grammar.kind == "json_schema":
                where = locate(tokenizer, grammar.source, message)
                message = f"at {where}: {message}" if where else message
        _write(answers, msgspec.msgpack.encode(message))


def _try_out(tokenizer: LLTokenizer, grammar: Grammar) -> None:
    """Compiles it and goes a few steps at random, as some get too large only then."""
    matcher = compile_grammar(tokenizer, grammar).initial_matcher
    chance = random.Random(0)
    for _ in range(TRIED_TOKENS):
        mask = numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8)
        raise_if_error(matcher)
        allowed = numpy.flatnonzero(numpy.unpackbits(mask, bitorder="little"))
        if matcher.is_stopped():
            return
        if not len(allowed):
            raise GrammarError("no text is of this grammar")
        matcher.consume_token(int(chance.choice(allowed)))
        raise_if_error(matcher)


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[pipe.write(rest) :]


def _read(pipe: IO[bytes]) -> bytes:
    """Ends the process when the input ends, and whatever it does with it."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        os._exit(0)
    return pipe.read(_LENGTH.unpack(header)[0])


if __name__ == "__main__":
    main()
