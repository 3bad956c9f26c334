"""Engines without a model: `python -m bench.router.engines ADDRESS MODEL_DIRECTORY`.

They speak the real wire protocol over ZeroMQ sockets, one each. Every sequence gets one token
per step, at a steady rate, from a repeated text; each engine's step is one message, as in a real
one. All run in one process, because only the router is measured."""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import zmq
from tokenizers import Tokenizer

from shared import wire

TEXT = (
    "A router takes requests, finds an engine for each, and makes text of the tokens that come"
    " back. It does so for many streams at once, and none of them may wait for another. "
)
MAX_SEQUENCES = 64
CONTEXT = 1_000_000
HEARTBEAT_INTERVAL_S = 0.5


class FakeEngine:
    """One engine. Its sequences end when they have ``max_tokens``, or are aborted."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, name: str, model: str
    ) -> None:
        self.name, self.model = name, model
        self.incarnation = uuid.uuid4().hex
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self._running: dict[str, tuple[wire.Submit, int]] = {}
        """Each sequence, with the number of its tokens so far."""
        self._heartbeats = 0

    def heartbeat(self) -> None:
        self._heartbeats += 1
        live = [
            wire.LiveRequest(
                request_id=request_id, attempt=submit.attempt, generated=count, accepted=True
            )
            for request_id, (submit, count) in self._running.items()
        ]
        self._send(
            wire.Heartbeat(
                engine=self.name,
                incarnation=self.incarnation,
                number=self._heartbeats,
                phase="ready",
                phase_s=1.0,
                stalled_s=0.0,
                live=live,
                stats=_stats(self._heartbeats, len(live)),
            )
        )

    def receive(self, files: dict[str, bytes], vocab_size: int) -> None:
        """Answer the messages that have arrived."""
        while self.socket.poll(0):
            message, _ = wire.decode(self.socket.recv_multipart(), wire.ToEngine)
            match message:
                case wire.Ping():
                    self._send(self._hello(files, vocab_size))
                case wire.FilesWanted(names=names):
                    self._send(wire.Files(names=names), *(files[name] for name in names))
                case wire.Submit(request_id=request_id, attempt=attempt):
                    self._running[request_id] = (message, len(message.generated))
                    self._send(wire.Accepted(request_id=request_id, attempt=attempt))
                case wire.Abort(request_id=request_id):
                    if (found := self._running.pop(request_id, None)) is not None:
                        self._send(wire.Tokens(deltas=[_delta(*found, [], "abort")]))

    def step(self, text: Sequence[int]) -> None:
        """Give each sequence its next token of ``text``, in one message."""
        deltas = []
        for request_id, (submit, count) in list(self._running.items()):
            is_last = count + 1 >= submit.max_tokens
            token = text[count % len(text)]
            deltas.append(_delta(submit, count, [token], "length" if is_last else None))
            self._running[request_id] = (submit, count + 1)
            if is_last:
                del self._running[request_id]
        if deltas:
            self._send(wire.Tokens(deltas=deltas))

    def _send(self, message: wire.Message, *frames: bytes) -> None:
        self.socket.send_multipart(wire.encode(message, *frames))

    def _hello(self, files: dict[str, bytes], vocab_size: int) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            engine=self.name,
            incarnation=self.incarnation,
            model=self.model,
            aliases=[],
            fingerprint="0123456789abcdef",
            context_length=CONTEXT,
            vocab_size=vocab_size,
            block_size=16,
            total_blocks=1_000_000,
            max_sequences=MAX_SEQUENCES,
            max_batch_size=MAX_SEQUENCES,
            namespace=b"n" * 16,
            eos_token_ids=[],
            files={name: hashlib.sha256(found).hexdigest() for name, found in files.items()},
        )


def _stats(heartbeats: int, running: int) -> wire.EngineStats:
    """Return figures that change with each heartbeat, as in a busy engine."""
    return wire.EngineStats(
        running=running,
        steps_total=10 * heartbeats,
        step_seconds_total=0.04 * heartbeats,
        batch_rows_total=97 * heartbeats,
        generated_tokens_total=97 * heartbeats,
        prompt_tokens_total=1003 * heartbeats,
        cached_ram_tokens_total=500 * heartbeats,
        cached_ssd_tokens_total=101 * heartbeats,
        prefill_tokens_total=402 * heartbeats,
        limit_bytes=10**10,
        unevictable_bytes=10**6 * heartbeats,
        active_memory_bytes=10**9 + 10**3 * heartbeats,
        total_blocks=10**6,
        used_blocks=7 * heartbeats,
        free_blocks=10**6 - 7 * heartbeats,
    )


def _delta(
    submit: wire.Submit, count: int, tokens: list[int], finish: wire.FinishReason | None
) -> wire.Delta:
    ended = wire.Usage(prompt_tokens=len(submit.token_ids), completion_tokens=count + len(tokens))
    return wire.Delta(
        request_id=submit.request_id,
        attempt=submit.attempt,
        index=count,
        token_ids=tokens,
        finish=finish,
        usage=ended if finish is not None or (tokens and not count) else None,
    )


def run(address: str, directory: Path, engines: int, models: int, rate: float) -> None:
    """Serve until the process is stopped. The steps of engines are spread over their interval."""
    names = [name for name in wire.TOKENIZER_FILES if (directory / name).is_file()]
    files = {name: (directory / name).read_bytes() for name in names}
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = tokenizer.encode(TEXT, add_special_tokens=False).ids
    size = tokenizer.get_vocab_size()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    fleet = [
        FakeEngine(context, address, f"engine-{n}", f"model-{n % models}") for n in range(engines)
    ]
    by_socket = {engine.socket: engine for engine in fleet}
    poller = zmq.Poller()
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    began = time.monotonic()
    steps = heartbeats = 0  # of all engines together
    while True:
        elapsed_s = time.monotonic() - began
        while steps < elapsed_s * rate * engines:
            fleet[steps % engines].step(text)
            steps += 1
        while heartbeats < elapsed_s / HEARTBEAT_INTERVAL_S * engines:
            fleet[heartbeats % engines].heartbeat()
            heartbeats += 1
        wait_s = began + steps / (rate * engines) - time.monotonic()
        for socket, _ in poller.poll(max(0, round(1000 * wait_s))):
            by_socket[socket].receive(files, size)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.router.engines", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--engines", type=int, default=50)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each sequence")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    run(options.address, options.directory, options.engines, options.models, options.rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
