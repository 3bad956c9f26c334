"""A whole engine in this process: model, executor, scheduler and core, without a router."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from engine import device
from engine.adapters.queue import AdapterQueue
from engine.core import EngineCore
from engine.grammar.cache import GrammarCache
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.queue import GrammarQueue
from engine.intake import Intake
from engine.io.inbox import Inbox, PicturedSubmit
from engine.io.status import EngineStatus
from engine.io.store.client import StoreClient
from engine.io.thread import IOThread
from engine.model.load import load
from engine.parallel.leader import LeadingExecutor
from engine.plan import Cancellation, Payload, Plan, StateSearch, StoreRoom
from engine.replica.build import build_replica
from engine.replica.intake import tokenizer_spec_of
from engine.replica.speculation import make_speculator
from engine.sampling.masks import GrammarMasker
from engine.scheduler import Scheduler
from engine.speculation.speculator import Speculator
from shared import wire
from shared.settings import Settings
from tests.engine.conftest import Wrap
from tests.shared.submits import submit
from tests.tiny_models import VOCAB_SIZE


def random_tokens(seed: int, count: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(3, VOCAB_SIZE) for _ in range(count)]


class Whole:
    """An engine whose outputs are collected in its attributes."""

    def __init__(self, path: Path, **settings: object) -> None:
        """``settings`` are those of the server, by default without drafts, and ``proofs`` and
        ``leader`` of `build_replica`."""
        proofs: Any = settings.pop("proofs", None)
        leader: Any = settings.pop("leader", None)
        device.prepare()
        gc.collect()
        self.before_bytes = mx.get_active_memory()
        self.loaded = load(path, group=leader and leader.group.mlx)
        self.settings = Settings(**{"kv_bits": 16, "spec_decode": "none"} | settings)  # type: ignore[arg-type]
        self.replica = build_replica(self.loaded, self.settings, proofs, leader)
        self.executor = self.replica.executor
        self.grammars: GrammarCache | None = None
        self.renew(self.executor.spec.look_ahead)

    def use_grammars(self) -> None:
        """Take requests with grammars from now on."""
        self.grammars = GrammarCache(tokenizer_spec_of(self.loaded).load())
        self.executor.use_grammars(GrammarMasker(self.grammars, self.loaded.vocab_size))
        if self.replica.draft_model is not None:
            self.replica.draft_model.use_grammars(self.grammars)
        self.intake.grammars = self._grammar_queue()

    def _grammar_queue(self) -> GrammarQueue:
        if self.grammars is None:
            return GrammarQueue(None, None)
        return GrammarQueue(cast(GrammarCompiler, self), self.grammars)  # it never compiles any

    def renew(self, look_ahead: bool, speculator: Speculator | None = None, **config: Any) -> None:
        """Put the engine in the state of a new one, with changes of the scheduler's ``config``, and
        perhaps with another ``speculator`` than that of its settings."""
        if not isinstance(self.executor, LeadingExecutor):  # which cannot begin again
            self.executor.reset()
        self.executor.spec = replace(self.executor.spec, look_ahead=look_ahead)
        config = {"look_ahead": look_ahead, **config}
        changed = replace(self.replica.scheduler.config, **config)
        if speculator is None:
            speculator = make_speculator(
                self.settings, self.executor.spec, self.replica.draft_model
            )
        self.scheduler = Scheduler(changed, speculator=speculator)
        self.stored: dict[bytes, Payload] = {}  # blocks that were sent to the kvstore
        self.texts: dict[str, list[int]] = {}  # the outputs of each request
        self.logprobs: dict[str, list[wire.TokenLogprobs]] = {}  # the same, where asked for
        self.ends: dict[str, wire.Delta] = {}  # the last delta of each request
        self.refused: dict[str, wire.Refused] = {}
        self.cached: set[bytes] = set()  # the hashes that a router believes to be in memory
        self.after_step: Callable[[], None] = lambda: None  # called after each turn
        self.inbox, adapters = Inbox(), self.replica.adapters
        self.adapters = (
            adapters.open_queue(self.inbox.put) if adapters else AdapterQueue(None, None)
        )
        self.intake = Intake(self.scheduler, self._grammar_queue(), self.adapters)
        self.core = EngineCore(
            scheduler=self.scheduler,
            executor=self.executor,
            inbox=self.inbox,
            io_thread=cast(IOThread, self),
            status=EngineStatus(),
            store=cast(StoreClient, self),
            intake=self.intake,
            pixels=None if self.replica.vision is None else self.replica.vision.pixels,
            check_integrity=True,
        )

    def renew_with_store(self, stored: dict[bytes, Payload] | None = None) -> None:
        """Put the engine in the state of a new one that stores its blocks, and finds ``stored``."""
        look_ahead = self.executor.spec.look_ahead
        self.renew(look_ahead, store_enabled=True, store_policy="write_through")
        self.stored = dict(stored or {})

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self.loaded.model.parameters()))

    @property
    def kept_bytes(self) -> int:
        """The bytes that MLX holds of this engine beside its weights."""
        return mx.get_active_memory() - self.before_bytes - self.weight_bytes

    def submit(self, name: str, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        frames: tuple[bytes, ...] | None = fields.pop("frames", None)  # of pictures
        self.texts[name], self.logprobs[name] = [*fields.get("generated", ())], []
        fields = {"max_tokens": max_tokens, "sampling": wire.SamplingParams(seed=7)} | fields
        sent = submit(name, prompt, **fields)
        known = None  # keeps it alive until the request has it
        if sent.grammar is not None and self.grammars is not None:
            known = self.grammars.get(sent.grammar)
        if frames is not None:
            self.inbox.put(PicturedSubmit(sent, frames))
            return
        self.intake.submit(sent)
        del known

    def serve(self, name: str, prompt: list[int], max_tokens: int = 20, **fields: Any) -> list[int]:
        """Submit a request, and run until nothing is left to do. Return its outputs."""
        self.submit(name, prompt, max_tokens, **fields)
        self.run()
        return self.texts[name]

    def turn(self) -> bool:
        """Run one turn of the engine's loop; return False if there was nothing to run."""
        worked = self.core.run_once()
        self.after_step()
        return worked

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def turn_until(self, condition: Callable[[], object]) -> None:
        """Run turns until ``condition`` is true."""
        while not condition():
            self.turn()

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self.turn() or self.adapters.is_waiting:
            pass
        assert self.scheduler.idle

    def usage(self, name: str) -> wire.Usage:
        usage = self.ends[name].usage
        assert usage is not None
        return usage

    def scores(self, name: str) -> list[float]:
        """Return the log-probability of each output."""
        return [one.chosen for one in self.logprobs[name]]

    @property
    def drafts(self) -> dict[str, wire.DraftCounts]:
        """What was drafted so far, by source."""
        stats = self.scheduler.stats().drafts
        assert stats is not None
        return stats.sources

    def fetch(
        self,
        ticket: int,
        hashes: Sequence[bytes],
        states: StateSearch | None,
        cancellation: Cancellation,
    ) -> None:
        """Answer a fetch from ``stored``, in place of the kvstore; it has no states."""
        found = list(takewhile(lambda block: block in self.stored, hashes))
        self.scheduler.on_fetched(ticket, [self.stored[block] for block in found])

    def store(self, block_hash: bytes, payload: Payload, is_state: bool = False) -> bool:
        if not is_state:
            self.stored[block_hash] = tuple(bytes(part) for part in payload)
        return True

    def room(self) -> StoreRoom:
        return StoreRoom(256, 2**28)

    def touch(self, hashes: Sequence[bytes], states: Sequence[bytes] = ()) -> None:
        """Do nothing: what is stored here has no order of use."""

    def send(self, messages: Sequence[wire.Message]) -> None:
        """Collect ``messages``, in place of the IO thread."""
        for message in messages:
            if isinstance(message, wire.Refused):
                self.refused[message.request_id] = message
            elif isinstance(message, wire.CacheEvents):
                kept = set() if message.snapshot else self.cached
                self.cached = (kept | set(message.added)) - set(message.removed)
            elif isinstance(message, wire.Tokens):
                for delta in message.deltas:
                    assert delta.index == len(self.texts[delta.request_id])
                    self.texts[delta.request_id] += delta.token_ids
                    self.logprobs.setdefault(delta.request_id, []).extend(delta.logprobs or ())
                    if delta.finish is not None:
                        self.ends[delta.request_id] = delta


def noted_plans(whole: Whole, wrap: Wrap) -> list[Plan]:
    """Return a list to which each plan is added when it is dispatched."""
    plans: list[Plan] = []

    @wrap(whole.executor, "dispatch")
    def noted(dispatch: Callable[[Plan], Any], plan: Plan) -> Any:
        plans.append(plan)
        return dispatch(plan)

    return plans
