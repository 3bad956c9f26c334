"""A draft model: a small model with the same vocabulary, in its own pages.

It is independent of the target's slots and plans. Each call compares its state of a sequence
with the text, so the state may be behind: after rejected drafts, after steps without drafts, or
when the sequence continues after a preemption."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from engine.executor.base import Executor, PendingStep
from engine.grammar.cache import GrammarCache
from engine.grammar.compiled import GrammarError
from engine.grammar.matcher import GrammarMatcher
from engine.plan import Chunk, Decode, Plan, Slot, fixed_pages
from engine.sampling.masks import GrammarMasker
from engine.speculation.source import BatchSource, DraftRequest

logger = logging.getLogger(__name__)

ROOM_TOKENS = 256
"""Room for tokens in a slot in addition to the context. A full slot starts again with the context,
so this makes the cost per token small."""
CATCH_UP_TOKENS = 256
"""Max prompt tokens computed in a call, because other sequences wait for it."""
FEW_TOKENS = 8
"""Catching up by this many tokens takes one pass, padded to the longest."""
MAX_FAILURES = 3


@dataclass(eq=False, slots=True)
class _Held:
    """A slot's part of a sequence: its tokens from number ``start`` on, the first ``computed``
    of which are computed, followed by drafts."""

    slot: Slot
    start: int = 0
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    has_ended: bool = False  # whether no token can follow them

    def follow(self, tokens: Sequence[int], count: int, context: int, capacity: int) -> None:
        """Count the drafts that became ``tokens`` as computed, except the last token. Start again
        if there is no room for ``count`` more, or if nearly nothing is kept."""
        last = len(tokens) - 1
        self.computed = min(self.computed, last - self.start)
        for draft in self.drafts:
            end = self.start + self.computed
            if end >= last or tokens[end] != draft:
                break
            self.computed += 1
        self.drafts.clear()
        self.has_ended = False
        is_far_behind = last - self.start - self.computed > context
        if is_far_behind or last + count - self.start > capacity:
            self.start, self.computed = max(0, len(tokens) - context), 0

    def history(self, request: DraftRequest) -> tuple[int, ...] | None:
        """Return the tokens of the slot before the last one, if sampling looks back."""
        if not request.sampling.needs_history:
            return None
        return tuple(request.tokens[self.start : -1])


_Member = tuple[DraftRequest, _Held]


class _Unread:
    """Steps whose results are not read yet, oldest first: prompts, and one draft of each member."""

    def __init__(self) -> None:
        self._steps: list[tuple[Sequence[_Member], PendingStep]] = []

    def add(self, members: Sequence[_Member], step: PendingStep) -> None:
        self._steps.append((members, step))

    def read(self, ends: Collection[int]) -> None:
        """Add the drafts of all steps. Those of ``ends`` end a grammar. Raises `RuntimeError` if a
        prompt could not be computed."""
        steps, self._steps = self._steps, []
        for members, step in steps:
            result = step.read()
            failed = dict(result.failed)
            if failed and not members:
                raise RuntimeError(*failed.values())
            for (request, mine), token in zip(members, result.tokens, strict=True):
                if mine.slot not in failed:
                    mine.drafts.append(token)
                is_bound = request.matcher is not None
                mine.has_ended = mine.slot in failed or (is_bound and token in ends)


class DraftModel(BatchSource):
    """Samples drafts like the target: with the request's temperature and filters, and the noise of
    its seed and position, so that both choose the same token more often. Penalties use the tokens
    in its slot, and grammars are followed with the requests' matchers."""

    NAME = "draft"

    def __init__(
        self,
        executor: Executor,
        wait: Callable[[], None],
        *,
        context_tokens: int,
        capacity: int,
        rows: int,
        page_tokens: int,
        vocab_size: int,
    ) -> None:
        """Use ``rows`` slots of ``capacity`` tokens, in pages of ``page_tokens``. ``wait`` is the
        target's `Executor.wait`.

        A sequence starts in a slot with its last ``context_tokens``. Nothing is drafted after
        tokens from ``vocab_size`` on, because the target may have more logits than tokens."""
        self.max_sequences = rows
        self.executor, self._wait = executor, wait
        self._context = context_tokens
        self._capacity, self._page_tokens = capacity, page_tokens
        self._vocab_size = vocab_size
        self._failures = 0
        self._masker: GrammarMasker | None = None
        self._ends: Collection[int] = ()
        self._begin()

    def use_grammars(self, grammars: GrammarCache) -> None:
        """Draft only what grammars allow, if a request has a matcher."""
        self._ends = grammars.eos_token_ids
        self._masker = GrammarMasker(grammars, self._vocab_size)
        self.executor.use_grammars(self._masker)

    @property
    def slots_bytes(self) -> int:
        """The memory of its slots."""
        spec = self.executor.spec
        return self.max_sequences * self._capacity * (spec.token_bytes + spec.unpacked_token_bytes)

    @property
    def is_usable(self) -> bool:
        return self._failures < MAX_FAILURES

    def prepare(self) -> None:
        """Wait for the target: its errors would otherwise be taken for errors of the draft model,
        and its time for that of drafts."""
        self._wait()

    def propose(self, asked: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        nothing: list[tuple[int, ...]] = [()] * len(asked)
        if not self.is_usable:
            return nothing
        try:
            found = self._propose(asked)
            self._failures = 0
            return found
        except Exception:  # raised by MLX, most likely because it is out of memory
            self._failures += 1
            logger.exception("the draft model failed")
        try:
            self._begin()
        except Exception:
            self._failures = MAX_FAILURES
            logger.exception("the draft model cannot be reset")
        if not self.is_usable:
            logger.error("there are no more drafts of the draft model")
        return nothing

    def _begin(self) -> None:
        self.executor.reset()
        self._steps = 0
        self._held: dict[object, _Held] = {}  # by sequence, least recently used first
        self._free: list[Slot] = list(range(self.max_sequences))
        unpacks = self.executor.spec.unpacked_token_bytes > 0
        rows, capacity = self.max_sequences, self._capacity
        begin = fixed_pages(rows, capacity, self._page_tokens, unpacks=unpacks)
        self._dispatch(begin).read()

    def _propose(self, asked: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        held = self._take_slots(asked)
        unread = _Unread()
        for plan in self._catch_up(asked, held):
            unread.add([], self._dispatch(plan))
        ready = [
            (request, mine)
            for request, mine in zip(asked, held, strict=True)
            if mine.start + mine.computed == len(request.tokens) - 1
            and request.tokens[-1] < self._vocab_size
        ]
        ready.sort(key=lambda pair: pair[1].slot)
        with self._following(ready):
            for number in range(max((request.limit for request, _ in ready), default=0)):
                members = [(r, m) for r, m in ready if r.limit > number and not m.has_ended]
                if members:
                    unread.add(members, self._dispatch(self._decodes(members, number)))
                if any(self._matcher_of(request) for request, _ in members):
                    unread.read(self._ends)  # the next mask depends on it
            unread.read(self._ends)
        found = {mine.slot: tuple(mine.drafts) for _, mine in ready}
        for _, mine in ready:  # the input of the first pass is computed, the last draft is not
            mine.computed += 1
            del mine.drafts[-1:]
        return [found.get(mine.slot, ()) for mine in held]

    @contextmanager
    def _following(self, ready: Sequence[_Member]) -> Iterator[None]:
        """Let the masker follow the grammars of ``ready``, and take their matchers back."""
        if (masker := self._masker) is None:
            yield
            return
        bound = [(r, m.slot, matcher) for r, m in ready if (matcher := self._matcher_of(r))]
        for _, slot, matcher in bound:
            masker.follow(slot, matcher)
        try:
            yield
        finally:
            masker.free_slots([slot for _, slot, _ in bound])
            for request, _, matcher in bound:
                with suppress(GrammarError):  # then it fails again when the text continues
                    matcher.return_to(len(request.tokens) - request.num_prompt_tokens)

    def _matcher_of(self, request: DraftRequest) -> GrammarMatcher | None:
        matcher = request.matcher if self._masker is not None else None
        return matcher if isinstance(matcher, GrammarMatcher) else None

    def _take_slots(self, asked: Sequence[DraftRequest]) -> list[_Held]:
        """Return the state of each sequence, updated to its tokens."""
        found = []
        for request in asked:
            mine = self._held.pop(request.key, None)
            if mine is None:
                slot = self._free.pop() if self._free else self._least_recent(asked)
                mine = _Held(slot, start=max(0, len(request.tokens) - self._context))
            self._held[request.key] = mine
            mine.follow(request.tokens, request.limit, self._context, self._capacity)
            found.append(mine)
        return found

    def _least_recent(self, asked: Sequence[DraftRequest]) -> Slot:
        keys = {request.key for request in asked}
        oldest = next(key for key in self._held if key not in keys)
        return self._held.pop(oldest).slot

    def _catch_up(self, asked: Sequence[DraftRequest], held: Sequence[_Held]) -> Iterator[Plan]:
        """Compute the missing tokens before the last one of each sequence, within the limits."""
        room, few = CATCH_UP_TOKENS, []
        for request, mine in zip(asked, held, strict=True):
            begin = mine.start + mine.computed
            tokens = tuple(request.tokens[begin : min(len(request.tokens) - 1, begin + room)])
            if not tokens or max(tokens) >= self._vocab_size:
                continue
            room -= len(tokens)
            chunk = Chunk(mine.slot, mine.computed, tokens)
            mine.computed += len(tokens)
            if len(tokens) <= FEW_TOKENS:
                few.append(chunk)
            else:
                yield Plan(step=self._steps, chunks=(chunk,))
        if few:
            yield Plan(step=self._steps, chunks=tuple(few))

    def _decodes(self, members: Sequence[_Member], number: int) -> Plan:
        """Return the plan that samples draft ``number`` of each of ``members``."""
        return Plan(
            step=self._steps,
            decodes=tuple(
                Decode(
                    slot=mine.slot,
                    position=mine.computed + number,
                    token_id=None if number else request.tokens[-1],
                    output_index=len(request.tokens) - request.num_prompt_tokens + number,
                    sampling=request.sampling,
                    history=None if number else mine.history(request),
                    constrained=self._matcher_of(request) is not None,
                )
                for request, mine in members
            ),
        )

    def _dispatch(self, plan: Plan) -> PendingStep:
        self._steps += 1
        step = self.executor.dispatch(plan)
        step.finish()
        return step
