"""An engine process that has everything but a model: `python -m tests.engine.io.thread_process`.

The IO thread is the real one. The main thread only runs the commands on its standard input, and
hangs between them.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import zmq

from engine.io.inbox import Inbox
from engine.io.status import EngineStatus
from engine.io.thread import IOThread
from shared import wire

ENGINE, INCARNATION = "engine-0", "first"
HELLO = wire.Hello(
    protocol=wire.PROTOCOL_VERSION,
    engine=ENGINE,
    incarnation=INCARNATION,
    model="none",
    aliases=[],
    fingerprint="none",
    context_length=64,
    vocab_size=320,
    block_size=16,
    total_blocks=4,
    max_sequences=4,
    max_batch_size=4,
    namespace=b"n" * 16,
    eos_token_ids=[2],
    files={},
)


def main() -> None:
    endpoint, stall_timeout_s, drain_timeout_s, tokenizer = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    status, inbox = EngineStatus(), Inbox()
    io_thread = IOThread(
        context=zmq.Context(),
        endpoint=endpoint,
        engine=ENGINE,
        incarnation=INCARNATION,
        inbox=inbox,
        status=status,
        supervisor=None,
        stall_timeout_s=float(stall_timeout_s),
        drain_timeout_s=float(drain_timeout_s),
    )
    io_thread.catch_signals()
    io_thread.start()
    answer("started")
    for line in sys.stdin:
        match line.split():
            case ["introduce"]:
                io_thread.introduce(HELLO, {"tokenizer.json": Path(tokenizer)})
            case ["phase", "loading" | "warming" | "ready" | "draining" as phase]:
                status.enter_phase(phase)
            case ["live"]:
                status.live = [wire.LiveRequest(request_id="r", attempt=0, generated=0)]
            case ["idle"]:
                status.live = []
            case ["progress"]:
                status.progress += 1
            case ["take"]:
                answer(*(type(item).__name__ for item in inbox.take(5)))
                continue
        answer("done")


def answer(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
