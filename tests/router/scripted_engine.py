"""The engine's side of the wire, with a script instead of a model.

It uses a real ZeroMQ socket on its own thread. Its output is a function of the request. Tests can
delay it, cut it off, and make it send wrong messages.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import zmq
from tokenizers import Tokenizer

from shared import wire
from shared.network.curve import EngineKeys
from tests.packed_logprobs import packed

TOLD = ("phase", "stalled_s", "stats", "store")
"""What heartbeats say of an engine's behaviour."""
VOCAB = 265
EOS = 1
END = "<|im_end|>"
"""The end token of tokenizers for chats (`tests.router.chat_tokenizer`)."""

Frame = bytes | memoryview
M = TypeVar("M", bound=wire.Message)


@dataclass
class Running:
    submit: wire.Submit
    script: list[int]
    sent: int = 0
    prompt_told: bool = False


def make_hello(name: str, *, max_sequences: int = 4, **fields: Any) -> wire.Hello:
    usual: dict[str, Any] = {"protocol": wire.PROTOCOL_VERSION, "version": "test"}
    usual |= {"incarnation": "0", "model": "tiny", "aliases": [], "files": {}}
    usual |= {"fingerprint": "0123456789abcdef", "namespace": b"n" * 16, "eos_token_ids": [EOS]}
    usual |= {"context_length": 512, "vocab_size": VOCAB, "block_size": 16, "total_blocks": 64}
    usual |= {"max_sequences": max_sequences, "max_batch_size": max_sequences}
    return wire.Hello(engine=name, **{**usual, **fields})


def make_submit(request_id: str, **fields: Any) -> wire.Submit:
    """Return a request for 8 tokens after one."""
    usual = {"attempt": 0, "token_ids": [1], "max_tokens": 8, "stop_token_ids": []}
    sampling = wire.SamplingParams(seed=0)
    return wire.Submit(request_id=request_id, **{"sampling": sampling, **usual, **fields})


def names_of(submit: wire.Submit) -> dict[str, Any]:
    """Return the fields with which an answer names a request."""
    return {"request_id": submit.request_id, "attempt": submit.attempt}


def make_refusal(submit: wire.Submit, **fields: Any) -> wire.Refused:
    return wire.Refused(**names_of(submit), **fields)


def adapter_ref(name: str, digest: str = "d") -> wire.AdapterRef:
    return wire.AdapterRef(name=name, path=f"/adapters/{name}", digest=digest, rank=4)


def make_heartbeat(engine: str, incarnation: str, number: int, **fields: Any) -> wire.Heartbeat:
    usual = {"phase": "ready", "phase_s": 1.0, "stalled_s": 0.0, "stats": wire.EngineStats()}
    fields = {"live": [], **usual, **fields}
    return wire.Heartbeat(engine=engine, incarnation=incarnation, number=number, **fields)


def scores_of(token: int, position: int, count: int) -> wire.TokenLogprobs:
    """Return the log-probabilities of ``token``. Even tokens are the likeliest."""
    others = [2 * token + 5 * i + 40 for i in range(count)]
    ids = [token, *others][:count] if token % 2 == 0 else others
    top = [-0.25 * (i + 1) for i in range(count)]
    chosen = -0.25 if ids[:1] == [token] else -3.0 - position / 8
    return wire.TokenLogprobs(chosen=chosen, top_ids=tuple(i % VOCAB for i in ids), top=tuple(top))


@dataclass
class Behaviour:
    """The settings of an engine that a test may change while it runs."""

    script: Callable[[wire.Submit], list[int]] = lambda submit: [EOS]
    """Returns the output tokens of a request. The end token ends it early."""
    tokens_per_step: int = 1
    step_s: float = 0.002
    hold_tokens_after: int | None = None
    """The number of tokens after which every request stops; None for no limit."""
    accept: bool = True
    refuse: Callable[[wire.Submit], wire.Refused | None] = lambda submit: None
    check: Callable[[wire.CheckAdapter], wire.AdapterChecked | None] = lambda asked: None
    heartbeats: bool = True
    phase: str = "ready"
    stalled_s: float = 0.0
    stats: wire.EngineStats = field(default_factory=wire.EngineStats)
    store: wire.StoreStats | None = None
    answer_aborts: bool = True
    cached_tokens: int = 0
    computed_prompt_tokens: int | None = None
    """What heartbeats say of every request."""
    forget: bool = False
    """Forget every request: generate nothing, and do not mention it in heartbeats."""
    omit_logprobs: bool = False
    """Report no log-probabilities, as an engine of another release might."""
    label_logprobs: Callable[[wire.Submit], Sequence[float]] = lambda submit: [
        -1.0 - number for number in range(len(submit.logprob_token_ids))
    ]
    """Returns the log-probabilities of the tokens that a request names."""
    ignores_named_tokens: bool = False
    """Report the most likely tokens in their place, as an engine of an older release does."""
    skip_token: bool = False
    """Lose one token of every request."""


class ScriptedEngine:
    def __init__(
        self,
        address: str,
        directory: Path,
        *,
        name: str = "engine-0",
        keys: EngineKeys | None = None,
        says: str | None = None,
        **options: Any,
    ) -> None:
        """``options`` are fields of its `Behaviour`, or of its `wire.Hello`."""
        self.address = address
        self.name = name
        self._keys = keys
        self.incarnation = uuid.uuid4().hex
        settings = [each.name for each in fields(Behaviour) if each.name in options]
        self.behaviour = Behaviour(**{name: options.pop(name) for name in settings})
        self.received: list[wire.Message] = []
        self.frames: dict[tuple[str, int], list[bytes]] = {}
        """The raw frames of each attempt at a request."""
        self._directory = directory
        if says is not None:
            self.says(says)
        self._running: dict[str, Running] = {}
        self._outgoing: list[list[Frame]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._bye = False
        contents = {p.name: p.read_bytes() for p in sorted(directory.iterdir()) if p.is_file()}
        self._contents = contents
        digests = {file: hashlib.sha256(data).hexdigest() for file, data in contents.items()}
        self.hello = make_hello(name, incarnation=self.incarnation, files=digests, **options)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- for tests -------------------------------------------------------------

    def kill(self) -> None:
        """Stop without a `Bye`."""
        self._stop.set()
        self._thread.join(60)

    def leave(self) -> None:
        self._bye = True
        self.kill()

    def say(self, *frames: Frame) -> None:
        """Send raw frames."""
        with self._lock:
            self._outgoing.append(list(frames))

    def got(self, kind: type[M]) -> list[M]:
        return [message for message in list(self.received) if isinstance(message, kind)]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._directory / "tokenizer.json"))

    def says(self, text: str) -> None:
        """Answer every request with ``text``, and end it."""
        end = self.tokenizer.token_to_id(END) or EOS
        ids = [*self.tokenizer.encode(text).ids, end]
        self.behaviour.script = lambda _: ids

    @property
    def last_prompt(self) -> str:
        """The text of the last prompt that the engine received."""
        submit = self.got(wire.Submit)[-1]
        return str(self.tokenizer.decode(submit.token_ids, skip_special_tokens=False))

    @property
    def running(self) -> list[str]:
        return list(self._running)

    @property
    def sent_counts(self) -> list[int]:
        """The number of tokens sent, by running request."""
        return [running.sent for running in list(self._running.values())]

    def run_unasked(self, request_id: str, submit: wire.Submit, script: list[int]) -> None:
        """Mention a request in heartbeats that the router did not send."""
        self._running[request_id] = Running(submit, script)

    # -- the engine ------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 200 if self._bye else 0)
        socket.setsockopt(zmq.IPV6, int("[" in self.address))
        if self._keys is not None:
            self._keys.protect(socket)
        socket.connect(self.address)
        heartbeat_at, number = 0.0, 0
        try:
            while not self._stop.is_set():
                now = time.monotonic()
                if self.behaviour.heartbeats and now >= heartbeat_at:
                    number += 1
                    with suppress(zmq.Again):  # while the router refuses its keys
                        socket.send_multipart(wire.encode(self._heartbeat(number)), zmq.NOBLOCK)
                    heartbeat_at = now + 0.1
                if socket.poll(max(1, int(self.behaviour.step_s * 1000))):
                    message, payload = wire.decode(socket.recv_multipart(), wire.ToEngine)
                    if isinstance(message, wire.Submit):
                        self.frames[message.request_id, message.attempt] = payload
                    self.received.append(message)
                    for answer in self._answer(message):
                        socket.send_multipart(answer)
                    continue
                with self._lock:
                    outgoing, self._outgoing = self._outgoing, []
                for frames in outgoing:
                    socket.send_multipart(frames)
                deltas = self._step()
                if deltas:
                    socket.send_multipart(wire.encode(wire.Tokens(deltas=deltas)))
            if self._bye:
                socket.setsockopt(zmq.LINGER, 500)
                bye = wire.Bye(engine=self.name, incarnation=self.incarnation)
                socket.send_multipart(wire.encode(bye))
        finally:
            socket.close()
            context.term()

    def _heartbeat(self, number: int) -> wire.Heartbeat:
        computed = self.behaviour.computed_prompt_tokens
        live = [
            wire.LiveRequest(
                **names_of(running.submit),
                generated=running.sent,
                computed_prompt_tokens=computed,
                cached_prompt_tokens=self.behaviour.cached_tokens,
            )
            for running in self._running.values()
        ]
        told = {name: getattr(self.behaviour, name) for name in TOLD}
        return make_heartbeat(self.name, self.incarnation, number, live=live, **told)

    def _answer(self, message: wire.Message) -> list[list[Frame]]:
        match message:
            case wire.Ping():
                return [wire.encode(self.hello)]
            case wire.CheckAdapter():
                checked = self.behaviour.check(message)
                return [] if checked is None else [wire.encode(checked)]
            case wire.FilesWanted(names=names):
                contents = (self._contents[name] for name in names)
                return [wire.encode(wire.Files(names=names), *contents)]
            case wire.Submit():
                refusal = self.behaviour.refuse(message)
                if refusal is not None:
                    return [wire.encode(refusal)]
                if self.behaviour.forget:
                    return []
                script = self.behaviour.script(message)[: message.max_tokens]
                self._running[message.request_id] = Running(message, script, len(message.generated))
                if not self.behaviour.accept:
                    return []
                return [wire.encode(wire.Accepted(**names_of(message)))]
            case wire.Abort(request_id=request_id, attempt=attempt):
                running = self._running.get(request_id)
                if running is None or attempt not in (None, running.submit.attempt):
                    return []
                del self._running[request_id]
                if not self.behaviour.answer_aborts:
                    return []
                return [wire.encode(wire.Tokens(deltas=[self._delta(running, [], "abort")]))]
            case _:
                return []

    def _step(self) -> list[wire.Delta]:
        deltas: list[wire.Delta] = []
        limit = self.behaviour.hold_tokens_after
        for request_id, running in list(self._running.items()):
            if running.submit.prompt_logprobs is not None and not running.prompt_told:
                running.prompt_told = True
                deltas += self._prompt_deltas(running.submit)
                continue
            end = running.sent + self.behaviour.tokens_per_step
            if limit is not None:
                end = min(end, limit)
            ids = running.script[running.sent : end]
            if not ids and running.sent < len(running.script):
                continue
            if any(token in running.submit.stop_token_ids for token in ids):
                stop = next(i for i, t in enumerate(ids) if t in running.submit.stop_token_ids)
                ids = ids[: stop + 1]
                deltas.append(self._delta(running, ids, "stop", ids[-1]))
            elif running.sent + len(ids) >= len(running.script):
                deltas.append(self._delta(running, ids, "length"))
            else:
                deltas.append(self._delta(running, ids))
            running.sent += len(ids)
            if deltas[-1].finish is not None:
                del self._running[request_id]
        return deltas

    def _delta(
        self, running: Running, ids: list[int], finish: Any = None, stop_token: int | None = None
    ) -> wire.Delta:
        usage = None
        if finish is not None:
            usage = wire.Usage(
                prompt_tokens=len(running.submit.token_ids),
                completion_tokens=running.sent + len(ids),
                cached_ram_tokens=self.behaviour.cached_tokens,
            )
        count, logprobs = running.submit.logprobs, None
        named = running.submit.logprob_token_ids
        if named and not self.behaviour.ignores_named_tokens:
            top = tuple(self.behaviour.label_logprobs(running.submit))
            logprobs = [wire.TokenLogprobs(chosen=-9.0, top_ids=named, top=top) for _ in ids]
        elif count is not None and not self.behaviour.omit_logprobs:
            logprobs = [scores_of(token, running.sent + i, count) for i, token in enumerate(ids)]
        skipped = 1 if self.behaviour.skip_token and running.sent else 0
        end: dict[str, Any] = {"finish": finish, "stop_token": stop_token, "usage": usage}
        tokens: dict[str, Any] = {"index": running.sent + skipped, "token_ids": ids}
        return wire.Delta(**names_of(running.submit), **tokens, logprobs=logprobs, **end)

    def _prompt_deltas(self, submit: wire.Submit) -> list[wire.Delta]:
        """Return the prompt's log-probabilities, in two parts."""
        if self.behaviour.omit_logprobs:
            return []
        scores = prompt_scores_of(submit)
        fields: dict[str, Any] = {"index": len(submit.generated), "token_ids": []}
        return [
            wire.Delta(**names_of(submit), **fields, prompt_logprobs=packed(part))
            for part in (scores[:3], scores[3:])
        ]


def prompt_scores_of(submit: wire.Submit) -> list[wire.TokenLogprobs]:
    count = submit.prompt_logprobs or 0
    return [scores_of(t, i, count) for i, t in enumerate(submit.token_ids[1:])]
