"""The loop of an engine around scheduler and fake executor, with a simulated router and kvstore."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from engine.plan import (
    Chunk,
    FoundPart,
    FoundState,
    PartSearch,
    Payload,
    Plan,
    StateSearch,
    StepResult,
    StoreRoom,
)
from engine.scheduler import Scheduler, SchedulerConfig
from engine.scheduler.outputs import Fetch
from engine.scheduler.sequences import sequence as sequences
from engine.speculation.source import Proposal
from engine.speculation.speculator import Speculator
from shared import wire
from tests.engine.scheduler.fake_executor import (
    FakeExecutor,
    StepRaised,
    content_of,
    expected,
    prompt_logprobs_of,
)

BLOCK_BYTES = 1000
SHARED = [position * position % 19 for position in range(100)]
"""A prompt."""


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * position) % 20 for position in range(length)]


def config(**changes: Any) -> SchedulerConfig:
    """Return the configuration of a small engine: ``blocks`` blocks (64) of 4 tokens, in pages of
    four."""
    blocks = changes.pop("blocks", 64)
    fields: dict[str, Any] = {
        "block_size": 4,
        "block_bytes": BLOCK_BYTES,
        "page_tokens": changes.pop("blocks_per_page", 4) * changes.get("block_size", 4),
        "limit_bytes": blocks * BLOCK_BYTES,
        "context_length": 200,
        "max_batch_size": 4,
        "prefill_batch_size": 2,
        "completion_batch_size": 8,
        "prefill_chunk_tokens": 16,
        "namespace": b"test",
        "look_ahead": False,
    }
    return SchedulerConfig(**(fields | changes))


RECURRENT = {
    "hybrid": {"state_bytes": 2500, "max_snapshots": 12},
    "recurrent": {"state_bytes": 2500, "max_snapshots": 12, "keeps_kv": False, "block_bytes": 4},
}
"""Additions to `config` for models that also have recurrent layers, or only those."""


def request(name: str, prompt: list[int], **changes: Any) -> wire.Submit:
    fields: dict[str, Any] = {
        "request_id": name,
        "attempt": 1,
        "token_ids": prompt,
        "sampling": wire.SamplingParams(seed=7),
        "max_tokens": 5,
        "stop_token_ids": [],
    }
    return wire.Submit(**(fields | changes))


def sequence(tokens: list[int], block_size: int, **fields: Any) -> sequences.Sequence:
    """Return a sequence that has not begun."""
    return sequences.Sequence(
        request=request("a", tokens, max_tokens=1),
        arrival=0,
        parent_hash=bytes(16),
        block_size=block_size,
        token_ids=list(tokens),
        max_tokens=1,
        submitted_s=0.0,
        **fields,
    )


@dataclass
class Client:
    """What a router has received of one request."""

    request: wire.Submit
    answer: wire.Accepted | wire.Refused | None = None
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[wire.TokenLogprobs] = field(default_factory=list)
    end: wire.Delta | None = None
    started_step: int | None = None

    @property
    def error(self) -> str | None:
        """Why it failed; None if it did not."""
        return self.end.error if self.end is not None and self.end.finish == "error" else None

    @property
    def refusal(self) -> tuple[str, str | None] | None:
        """The reason for which it was refused, and the field at fault; None if it was not."""
        answer = self.answer
        return (answer.reason, answer.param) if isinstance(answer, wire.Refused) else None

    @property
    def usage(self) -> wire.Usage:
        assert self.end is not None and self.end.usage is not None
        return self.end.usage

    @property
    def cached(self) -> tuple[int, int]:
        """The tokens of its prompt that came from RAM and from the SSD."""
        return self.usage.cached_ram_tokens, self.usage.cached_ssd_tokens


class Engine:
    """Drives a scheduler as the engine's core does, and checks its integrity at every turn."""

    def __init__(self, settings: SchedulerConfig, speculator: Speculator | None = None) -> None:
        self.config = settings
        self.now_s = 0.0
        self.scheduler = Scheduler(settings, lambda: self.now_s, speculator)
        self.executor = FakeExecutor(settings)
        self.recoveries = 0
        self.fail_next_plan = False
        """Let the next plan with decodes raise while it is made, where drafts are chosen: their
        source uses the device."""
        self._choose = self.scheduler._drafting.choose
        self.scheduler._drafting.choose = self._choose_drafts  # type: ignore[method-assign]
        self.results: deque[StepResult] = deque()
        self.plans: list[Plan] = []
        self.clients: dict[tuple[str, int], Client] = {}
        self.fetches: deque[Fetch] = deque()
        self.stored: dict[bytes, Payload] = {}
        self.stored_states: dict[bytes, Payload] = {}
        self.cached: set[bytes] = set()
        self.store_answers = True
        self.store_room: StoreRoom | None = None

    def submit(self, message: wire.Submit) -> Client:
        client = self.clients.setdefault((message.request_id, message.attempt), Client(message))
        self.scheduler.submit(message)
        self.collect()
        return client

    def schedule(self) -> Plan | None:
        """Make a plan and run it; its result waits for `apply`."""
        plan = None
        try:
            plan = self.scheduler.schedule(self.store_room)
            if plan is not None:
                self.plans.append(plan)
                self.results.append(self.executor.run(plan))
        except StepRaised:
            self.results.clear()
            self.executor.reset()
            self.scheduler.recover("the step raised", out_of_memory=True)
            self.recoveries += 1
            self.check()
            return plan
        if plan is not None:
            result = self.results[-1]
            self.now_s += result.elapsed_s + sum(seconds for _, seconds in result.chunk_times)
        self.check()
        return plan

    def _choose_drafts(self, rows: Sequence[Any]) -> dict[Any, Proposal]:
        if self.fail_next_plan:
            self.fail_next_plan = False
            raise StepRaised
        return self._choose(rows)

    def apply(self) -> None:
        self.scheduler.apply(self.results.popleft())
        self.check()

    def answer_store(self) -> None:
        """Answer the oldest fetch with the stored pages up to the first that is missing."""
        ticket, hashes, search, _ = self.fetches.popleft()
        run = list(takewhile(self.stored.__contains__, hashes))
        found: FoundState | FoundPart | None = None
        if isinstance(search, StateSearch):
            found = self._find_state(search, len(run))
            end = max(
                (count for count in search.in_ram if count <= search.num_ready + len(run)),
                default=0,
            )
            run = run[: max(0, max(end, found.end if found else 0) - search.num_ready)]
        elif search is not None:
            found = self._find_part(search, len(run))
        self.scheduler.on_fetched(ticket, [self.stored[block_hash] for block_hash in run], found)
        self.check()

    def _find_part(self, search: PartSearch, run: int) -> FoundPart | None:
        blocks = search.hashes[run * search.page_blocks :][: search.page_blocks - 1]
        for count in range(len(blocks), 0, -1):
            if payload := self.stored.get(blocks[count - 1]):
                return FoundPart(count, payload)
        return None

    def _find_state(self, states: StateSearch, run: int) -> FoundState | None:
        for count in range(states.num_ready + run, 0, -1):
            if count in states.in_ram:
                return None
            if payload := self.stored_states.get(states.hashes[count - 1]):
                return FoundState(count, payload)
        return None

    def turn(self) -> bool:
        """Do one turn of the loop. Return False if there is nothing left to do."""
        while self.store_answers and self.fetches:
            self.answer_store()
        recoveries = self.recoveries
        plan = self.schedule()
        if self.recoveries > recoveries:
            return True
        if self.results and (len(self.results) > self.config.look_ahead or plan is None):
            self.apply()
            return True
        return plan is not None

    def run(self, turns: int = 5000) -> None:
        """Do turns until nothing is left. Raises: AssertionError if that does not end."""
        for _ in range(turns):
            if not self.turn() and not (self.store_answers and self.fetches):
                return
        raise AssertionError(f"still busy after {turns} turns: {self.scheduler.live()}")

    def run_turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def run_until(self, condition: Callable[[], object]) -> None:
        """Do turns until ``condition`` is true. Raises: AssertionError if that never happens."""
        for _ in range(20_000):
            if condition():
                return
            self.turn()
        raise AssertionError("it never happened")

    def stream(self, message: wire.Submit) -> Client:
        """Submit a request, and run until its first token."""
        client = self.submit(message)
        self.run_until(lambda: client.tokens)
        return client

    def answer(self, message: wire.Submit) -> Client:
        """Submit a request, and run until its end, whatever else runs."""
        client = self.submit(message)
        self.run_until(lambda: client.end)
        return client

    def finish(self, *clients: Client) -> None:
        """Run until nothing is left, and check that ``clients`` got their texts."""
        self.run()
        for client in clients:
            self.assert_right(client)
        self.assert_nothing_left()

    def serve(self, message: wire.Submit) -> Client:
        """Submit a request, and `finish` it."""
        client = self.submit(message)
        self.finish(client)
        return client

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks that were planned so far."""
        return [chunk for plan in self.plans for chunk in plan.chunks]

    @property
    def computed(self) -> int:
        """The tokens of prompts that were computed so far."""
        return sum(self.executor.chunk_tokens)

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.collect()
        memory, settled = self.scheduler.memory, not self.results
        contents = {page.content for page in memory.pages}
        assert {*memory.backlog} <= {*contents, *memory.snapshots}
        self.executor.check_memory(memory.used_slots - {*self.scheduler.sequences.vacated})
        for page in memory.pages:
            for end, block_hash in page.names.items():
                self.executor.check_named(block_hash, page.number, end, settled=settled)
        for snapshot in memory.snapshots:
            if memory.snapshots.is_published(snapshot):
                self.executor.check_snapshot(snapshot.id, snapshot.hash, settled=settled)
        assert self.cached == set(self.scheduler.cached_hashes())

    def collect(self) -> None:
        outputs = self.scheduler.take_outputs()
        for answer in outputs.messages:
            self.clients[answer.request_id, answer.attempt].answer = answer
        for delta in outputs.deltas:
            client = self.clients[delta.request_id, delta.attempt]
            assert isinstance(client.answer, wire.Accepted) and client.end is None
            assert delta.index == len(client.request.generated) + len(client.tokens)
            client.prompt_logprobs.extend(delta.prompt_logprobs or ())
            client.tokens.extend(delta.token_ids)
            if delta.token_ids and not client.request.generated:
                assert client.prompt_logprobs == prompt_logprobs_of(client.request)
            if client.started_step is None:
                client.started_step = self.executor.steps
            if delta.finish is not None:
                client.end = delta
        self.fetches.extend(outputs.fetches)
        for block_hash, payload, is_state in outputs.stores:
            self.executor.check_content(block_hash, content_of(payload))
            (self.stored_states if is_state else self.stored)[block_hash] = payload
        assert self.cached.isdisjoint(outputs.cache_added)
        assert self.cached.issuperset(outputs.cache_removed)
        self.cached = (self.cached | set(outputs.cache_added)) - set(outputs.cache_removed)

    @property
    def longest(self) -> int:
        """The max tokens of a sequence."""
        return min(self.config.context_length, self.config.capacity)

    def assert_right(self, client: Client) -> None:
        """Check that ``client`` got exactly its text, and that its usage is right."""
        end = client.end
        assert end is not None and end.usage is not None, client
        tokens, finish = expected(client.request, self.longest)
        assert [*client.request.generated, *client.tokens] == tokens
        assert end.finish == finish
        assert end.stop_token == (tokens[-1] if finish == "stop" else None)
        usage = end.usage
        assert usage.prompt_tokens == len(client.request.token_ids)
        assert usage.completion_tokens == len(tokens)
        assert 0 <= usage.cached_ram_tokens + usage.cached_ssd_tokens <= usage.prompt_tokens
        assert min(usage.queue_s, usage.prefill_s, usage.decode_s) >= 0

    def assert_nothing_left(self) -> None:
        scheduler = self.scheduler
        assert scheduler.idle and not scheduler.live()
        stats = scheduler.stats()
        assert (stats.running, stats.waiting, stats.unevictable_bytes) == (0, 0, 0)
        memory = scheduler.memory
        assert not memory.backlog.num_exported
        assert self.executor.num_pages == memory.pages.num_pages
        assert len(memory.pages) == memory.pages.num_cached
        assert set(self.executor.snapshots) == {snapshot.id for snapshot in memory.snapshots}
        assert len(memory.snapshots.published_hashes()) == len(memory.snapshots)
