"""A device that computes nothing, for schedulers at the sizes of real models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.plan import Exported, Plan, StepResult
from engine.scheduler import Scheduler, SchedulerConfig
from shared import wire
from tests.engine.scheduler.harness import request


class Device:
    """Answers plans as a device does, and fetches as a kvstore that loses nothing."""

    def __init__(self, settings: SchedulerConfig, token_s: float = 1e-3) -> None:
        """``token_s``: the time of a token of a prompt."""
        self.token_s = token_s
        self.scheduler = Scheduler(settings, lambda: 0.0)
        self.usages: dict[str, wire.Usage] = {}
        self.refusals: list[wire.Refused] = []
        self.stored: set[bytes] = set()
        self.computed = 0
        self.most_running = self.most_used_bytes = self.most_pages = 0
        self._passes: dict[int, list[int]] = {}

    def submit(self, name: str, tokens: Sequence[int], max_tokens: int = 60, **more: Any) -> None:
        self.scheduler.submit(request(name, list(tokens), max_tokens=max_tokens, **more))

    def run(self) -> None:
        """Run until nothing is left."""
        idle = 0
        while idle < 3:
            plan = self.scheduler.schedule()
            outputs = self.scheduler.take_outputs()
            self.refusals += [m for m in outputs.messages if isinstance(m, wire.Refused)]
            self.usages |= {d.request_id: d.usage for d in outputs.deltas if d.finish and d.usage}
            self.stored.update(store.hash for store in outputs.stores)
            for fetch in outputs.fetches:
                known = [h in self.stored for h in fetch.hashes]
                count = known.index(False) if False in known else len(known)
                self.scheduler.on_fetched(fetch.ticket, [(b"x",)] * count)
            idle = idle + 1 if plan is None else 0
            if plan is not None:
                self._apply(plan)

    def _apply(self, plan: Plan) -> None:
        stats = self.scheduler.stats()
        self.most_running = max(self.most_running, stats.running)
        self.most_used_bytes = max(self.most_used_bytes, stats.unevictable_bytes)
        pages = self.scheduler.memory.pages
        self.most_pages = max(self.most_pages, len(pages) - pages.num_cached)
        layers = self.scheduler.config.layers
        ends = {stretch.number: stretch.end for stretch in plan.stretches}
        if plan.chunks:
            tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
            self.computed += tokens
            self._passes[plan.step] = [tokens, 0]
            ends.setdefault(plan.step, layers)
        seconds = 0.0
        for number, end in ends.items():
            tokens, done = self._passes[number]
            seconds += (min(end, layers) - done) * tokens * self.token_s / layers
            self._passes[number][1] = end
        exports = (*plan.exports_first, *plan.exports)
        self.scheduler.apply(
            StepResult(
                step=plan.step,
                tokens=(7,) * len(plan.decodes),
                exported=tuple(Exported(one.block_id, (b"x",)) for one in exports),
                elapsed_s=0.02,
                chunks_apart=bool(ends),
                chunk_times=((plan.step, seconds),) if ends else (),
            )
        )

    def serve(self, name: str, tokens: Sequence[int], max_tokens: int = 60) -> wire.Usage:
        self.submit(name, tokens, max_tokens)
        self.run()
        return self.usages[name]
