"""An engine process that has everything but a model: `python -m tests.engine.io.thread_process`.

The IO thread is the real one. The main thread only runs the commands on its standard input, and
hangs between them.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import zmq

from engine.io.inbox import Inbox, InboxMessage, NewRouter
from engine.io.router_links import RouterLinks
from engine.io.status import EngineStatus
from engine.io.thread import IOThread
from shared import wire
from tests.shared import submits

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
    endpoints, stall_timeout_s, drain_timeout_s, tokenizer = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    status, inbox = EngineStatus(), Inbox()
    io_thread = IOThread(
        links=RouterLinks(context, dict.fromkeys(endpoints.split(","))),
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
            case ["lose"]:
                replacement = os.open("/", os.O_RDONLY)  # which cannot be read
                os.dup2(replacement, io_thread._tokenizer_files["tokenizer.json"].fileno())
            case ["phase", "loading" | "warming" | "ready" | "draining" as phase]:
                status.enter_phase(phase)
            case ["live", *names]:
                status.live = [
                    wire.LiveRequest(request_id=name, attempt=3, generated=0)
                    for name in names or ["r"]
                ]
            case ["tokens", *names]:
                io_thread.send([wire.Tokens(deltas=[delta(name) for name in names])])
            case ["idle"]:
                status.live = []
            case ["progress"]:
                status.progress += 1
            case ["take"]:
                answer(*map(describe, inbox.take(5)))
                continue
        answer("done")


def submit(request_id: str = "r") -> wire.Submit:
    return submits.submit(request_id, attempt=3)


def delta(name: str) -> wire.Delta:
    return wire.Delta(request_id=name, attempt=3, index=0, token_ids=[5])


def describe(item: InboxMessage) -> str:
    """Return the type of a message, and what it is about where tests ask for it."""
    if isinstance(item, NewRouter):
        return "NewRouter:" + ",".join(sorted(name for name, _ in item.requests))
    if isinstance(item, wire.Submit):
        return f"Submit:{item.request_id}"
    return type(item).__name__


def answer(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
