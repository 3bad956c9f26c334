"""A step of the batched executor on its way through the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from engine.executor.base import PendingStep
from engine.executor.decoding import DecodeRows
from engine.executor.guessing import Guesses
from engine.executor.line import DeviceLine, Piece
from engine.executor.prefill import BuiltPass, Prefill
from engine.executor.stopwatch import StepClock, Stopwatch
from engine.plan import Exported, Payload, Plan, PromptLogprobs, Slot, StepResult
from engine.sampling.sampler import SamplerOutput
from shared.wire import TokenLogprobs


@dataclass(eq=False)
class DecodeOutput:
    sampled: SamplerOutput
    rows: DecodeRows
    guesses: Guesses | None = None

    @cached_property
    def tokens(self) -> list[int]:
        """The samples of all rows. Waits for them."""
        tokens: list[int] = self.sampled.tokens.tolist()
        return tokens

    @cached_property
    def runs(self) -> list[range]:
        """The rows of each decode whose samples are its result. Waits for them if there
        are drafts."""
        if len(self.rows.decodes) == len(set(self.rows.order)):
            return self.rows.by_decode()
        return self.rows.runs(self.tokens, self.sampled.unverified)

    def read(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
        """Return tokens, lengths of runs and log-probabilities, as in `StepResult`."""
        order = self.rows.order
        runs = sorted(self.runs, key=lambda run: order[run.start])
        rows = [row for run in runs for row in run]
        lengths = () if len(rows) == len(runs) else tuple(map(len, runs))
        scores: dict[int, TokenLogprobs] = {}
        for pending in self.sampled.logprobs:
            scores |= zip(pending.rows, pending.read(), strict=True)
        return tuple(self.tokens[r] for r in rows), lengths, tuple(scores.get(r) for r in rows)

    def tokens_by_slot(self) -> dict[Slot, int]:
        """Return the token of each slot without drafts."""
        slots = (decode.slot for decode in self.rows.decodes)
        return dict(zip(slots, self.tokens, strict=True))


class LateResults:
    """Parts of plans whose results come later."""

    def __init__(self) -> None:
        self._exports: list[tuple[Piece | None, int, Callable[[], Payload]]] = []
        self._chunks: list[tuple[int, list[Piece]]] = []

    def add_export(self, piece: Piece | None, block: int, export: Callable[[], Payload]) -> None:
        """Return the bytes of ``block`` once ``piece`` is done."""
        self._exports.append((piece, block, export))

    def add_chunks(self, step: int, pieces: list[Piece]) -> None:
        """Record that the chunks of plan ``step`` are computed in ``pieces``."""
        self._chunks.append((step, pieces))

    def take_exports(self) -> tuple[Exported, ...]:
        ready = [one for one in self._exports if _is_done(one[0])]
        self._exports = [one for one in self._exports if not _is_done(one[0])]
        return tuple(Exported(block, export()) for _, block, export in ready)

    def take_chunk_times(self) -> tuple[tuple[int, float], ...]:
        ready = [one for one in self._chunks if all(map(_is_done, one[1]))]
        self._chunks = [one for one in self._chunks if one not in ready]
        return tuple((step, sum(p.elapsed_s or 0.0 for p in pieces)) for step, pieces in ready)


def _is_done(piece: Piece | None) -> bool:
    return piece is None or piece.elapsed_s is not None


@dataclass(eq=False)
class BatchedStep(PendingStep):
    """A plan whose decodes have been dispatched, followed by its chunks, one pass at a time."""

    plan: Plan
    ahead: bool  # whether dispatching returns without waiting for the device
    line: DeviceLine
    late: LateResults
    stopwatch: Stopwatch
    clock: StepClock
    started: float
    failed: list[tuple[Slot, str]]
    prefill: Prefill
    decoded: DecodeOutput | None = None
    unsent: list[list[Any]] = field(default_factory=list)  # to dispatch before the chunks
    unsent_kept: list[list[mx.array]] = field(default_factory=list)  # exports and snapshots
    save_chunks: Callable[[], Piece | None] = lambda: None
    """Saves and exports what the chunks computed."""
    piece: Piece | None = None  # with the decodes
    _built: BuiltPass | None = None
    _pieces: list[Piece] = field(default_factory=list)  # with the chunks
    _finished: bool = False
    _spent_s: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.may_wait = self.ahead and not self.prefill
        self._passes = self.prefill.build()

    def is_continued_by(self, plan: Plan) -> bool:
        """Return whether ``plan``, the next one, decodes some of the same sequences ahead."""
        if not self.ahead:
            return False
        slots = {decode.slot for decode in self.plan.decodes}
        return any(decode.slot in slots for decode in plan.decodes)

    def add_spent(self, spent_s: tuple[float, float]) -> None:
        """Add seconds of building and of sampling."""
        self._spent_s = self._spent_s[0] + spent_s[0], self._spent_s[1] + spent_s[1]

    def finish(self) -> None:
        self._send_decodes()
        if self._finished:
            return
        self._finished = True
        built, self._built = self._built or next(self._passes, None), None
        while built is not None:
            self._send_pass(built)
            built = next(self._passes, None)
        if (saved := self.save_chunks()) is not None:
            self._pieces.append(saved)
        if self.prefill and self.ahead:
            self.late.add_chunks(self.plan.step, list(dict.fromkeys(self._pieces)))

    def read(self, *, early: bool = False) -> StepResult:
        # Log-probabilities of a prompt must be known before its slot is reused.
        early = early and self.ahead and not self.prefill.scores
        if early:
            self._build_last_pass()
            if not _is_done(self.piece):
                self.line.wait()
        else:
            self.finish()
            self.line.wait()
        tokens, runs, logprobs = self.decoded.read() if self.decoded else ((), (), ())
        if self.ahead:
            elapsed_s = (self.piece.elapsed_s or 0.0) if self.piece else 0.0
        else:
            elapsed_s = self.clock.elapsed_s(self.started)
        return StepResult(
            step=self.plan.step,
            tokens=tokens,
            runs=runs,
            guesses=self._read_guesses(),
            logprobs=logprobs,
            prompt_logprobs=tuple(
                PromptLogprobs(c.slot, c.start, s.pack()) for c, s in self.prefill.logprobs
            ),
            exported=self.late.take_exports(),
            failed=tuple(self.failed),
            failed_pictures=tuple(self.prefill.failed_pictures),
            elapsed_s=elapsed_s,
            chunks_apart=self.ahead and bool(self.prefill),
            chunk_times=self.late.take_chunk_times(),
            build_s=self._spent_s[0],
            sample_s=self._spent_s[1],
        )

    def _read_guesses(self) -> tuple[tuple[int, ...], ...]:
        guesses = None if self.decoded is None else self.decoded.guesses
        return () if guesses is None else guesses.read(len(self.plan.decodes))

    def _send_decodes(self) -> None:
        for arrays in self.unsent:
            self.line.send(arrays)
        for arrays in self.unsent_kept:
            self.line.send(arrays, kept=True)
        self.unsent, self.unsent_kept = [], []

    def _build_last_pass(self) -> None:
        """Build all chunks, so that failures are known, and dispatch all passes except the last.

        With more than one pass, tokens are late: each pass waits for the previous one."""
        self._send_decodes()
        if self._finished or self._built is not None:
            return
        self.stopwatch.start()
        for built in self._passes:
            self._built = built
            if built.is_last:
                break
            self._built = None
            self._send_pass(built)
        self.add_spent(self.stopwatch.stop())

    def _send_pass(self, built: BuiltPass) -> None:
        if self.ahead:
            with self.stopwatch.waiting():
                self.line.wait_for_pages()
        with self.stopwatch.computing():
            self._pieces.append(self.line.send(built.arrays))
