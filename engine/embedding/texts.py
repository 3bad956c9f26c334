"""The queue of texts, and the selection of those that a pass computes. No MLX.

Texts belong to groups: the tenants that requested them. A pass begins with the texts of the group
that has not been served for the longest time. Texts of other groups join as long as the pass stays
small: a single text should not wait for the many texts of another group. Texts that arrive during a
long pass may be computed between two of its layers.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from engine.io.inbox import RequestKey
from engine.model.encoder import Text
from shared.wire import Encode

_MAX_GROUPS = 1024


@dataclass(eq=False)
class Job:
    """One `Encode` until its rows are computed."""

    message: Encode
    arrived_at: float
    rows: list[bytes | None]
    missing: int
    begun_at: float | None = None

    @property
    def key(self) -> RequestKey:
        return self.message.request_id, self.message.attempt


@dataclass(eq=False)
class _Wanted:
    """A queued or running text, with all jobs that need it."""

    text: Text
    wanted_by: list[tuple[Job, int]] = field(default_factory=list)
    is_computed: bool = False


class TextQueue:
    """The jobs of an engine. Equal texts are computed once."""

    def __init__(self) -> None:
        self._jobs: dict[RequestKey, Job] = {}
        self._wanted: dict[Text, _Wanted] = {}
        self._waiting: dict[str, dict[Text, None]] = {}
        """By group: the queued texts, oldest first."""
        self._served: dict[str, int] = {}
        """By group: the number of its last turn."""
        self._turns = 0
        self.num_texts = self.num_shared = 0
        """Total number of texts, and of those equal to one in flight."""
        self.changes = 0
        """Number of jobs added or removed so far."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> Iterable[Job]:
        return self._jobs.values()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, message: Encode) -> None:
        """Add a job."""
        starts = message.second_starts or [0] * len(message.token_ids)
        texts = [Text(tuple(ids), at) for ids, at in zip(message.token_ids, starts, strict=True)]
        job = Job(message, time.monotonic(), [None] * len(texts), len(texts))
        self._jobs[job.key] = job
        self.changes += 1
        for number, text in enumerate(texts):
            self.num_texts += 1
            wanted = self._wanted.get(text)
            if wanted is None:
                wanted = self._wanted[text] = _Wanted(text)
            else:
                self.num_shared += 1
            wanted.wanted_by.append((job, number))
            if not wanted.is_computed:
                self._waiting.setdefault(message.group, {})[text] = None

    def take(
        self,
        budget_tokens: int,
        small_tokens: int,
        *,
        but_of: Collection[str] = (),
        at_least: int | None = None,
        longest: int | None = None,
    ) -> dict[Text, str]:
        """Return texts for the next pass with their groups: at most ``budget_tokens`` unless the
        first text is longer, all of one priority, and none of the groups ``but_of`` or of a
        priority below ``at_least``. At exactly that priority, none is longer than ``longest``.
        Groups share a pass of up to ``small_tokens``, or of twice the tokens of the first group:
        its texts then take at most twice as long as alone."""
        lanes = self._lanes(but_of, at_least, longest)
        priorities = {group: max(map(self.priority_of, lane)) for group, lane in lanes.items()}
        if not priorities:
            return {}
        highest = max(priorities.values())
        groups = [group for group, priority in priorities.items() if priority == highest]
        groups.sort(key=lambda group: self._served.get(group, -1))
        taken: dict[Text, str] = {}
        tokens, limit = 0, budget_tokens
        for number, group in enumerate(groups):
            for text in lanes[group]:
                if taken and tokens + len(text) > limit:
                    break
                if self.priority_of(text) < highest:
                    continue
                taken[text] = group
                tokens += len(text)
            if number == 0:
                limit = max(tokens, min(budget_tokens, max(small_tokens, 2 * tokens)))
        for group in dict.fromkeys(taken.values()):
            self._turns += 1
            self._served.pop(group, None)
            self._served[group] = self._turns
        while len(self._served) > _MAX_GROUPS:
            del self._served[next(iter(self._served))]
        now = time.monotonic()
        for text in taken:
            wanted = self._wanted[text]
            wanted.is_computed = True
            for job, _ in wanted.wanted_by:
                job.begun_at = job.begun_at or now
                self._leave(job.message.group, text)
        return taken

    def _lanes(
        self, but_of: Collection[str], at_least: int | None, longest: int | None
    ) -> dict[str, list[Text]]:
        """Return the texts from which `take` may choose, by group."""

        def may_go(text: Text) -> bool:
            priority = self.priority_of(text)
            if at_least is None or priority > at_least:
                return True
            return priority == at_least and (longest is None or len(text) <= longest)

        found = {
            group: [text for text in lane if may_go(text)]
            for group, lane in self._waiting.items()
            if group not in but_of
        }
        return {group: lane for group, lane in found.items() if lane}

    def has_waiting(self, groups: Collection[str]) -> bool:
        """Return whether texts of one of ``groups`` are queued."""
        return any(group in self._waiting for group in groups)

    def priority_of(self, text: Text) -> int:
        """Return the highest priority of an unfinished text."""
        found = (job.message.priority for job, _ in self._wanted[text].wanted_by)
        return max(found, default=0)

    def done(self, text: Text, row: bytes) -> list[Job]:
        """Add ``row`` to all jobs that need ``text``. Return the jobs that this completes."""
        complete = []
        for job, number in self._wanted.pop(text).wanted_by:
            job.rows[number] = row
            job.missing -= 1
            if not job.missing:
                complete.append(job)
                self._jobs.pop(job.key, None)
        return complete

    def fail(self, text: Text) -> list[Job]:
        """Remove all jobs that need ``text``, and return them."""
        jobs = list(dict.fromkeys(job for job, _ in self._wanted[text].wanted_by))
        for job in jobs:
            self.drop(job.key)
        self._wanted.pop(text, None)
        return jobs

    def drop(self, key: RequestKey) -> None:
        """Drop a job, if it exists. Texts that no other job needs are removed from the queue."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        self.changes += 1
        starts = job.message.second_starts or [0] * len(job.message.token_ids)
        for ids, start in zip(job.message.token_ids, starts, strict=True):
            text = Text(tuple(ids), start)
            wanted = self._wanted.get(text)
            if wanted is None:
                continue
            wanted.wanted_by = [each for each in wanted.wanted_by if each[0] is not job]
            group = job.message.group
            if all(each.message.group != group for each, _ in wanted.wanted_by):
                self._leave(group, text)
            if not wanted.wanted_by and not wanted.is_computed:
                del self._wanted[text]

    def is_wanted(self, text: Text) -> bool:
        """Return whether a job waits for ``text``, which a pass computes."""
        return bool(self._wanted[text].wanted_by)

    def forget(self, texts: Iterable[Text]) -> None:
        """Remove texts that a pass no longer computes, and nobody wants."""
        for text in texts:
            del self._wanted[text]

    def find(self, request_id: str, attempt: int | None) -> list[RequestKey]:
        return [key for key in self._jobs if key[0] == request_id and attempt in (None, key[1])]

    def _leave(self, group: str, text: Text) -> None:
        lane = self._waiting.get(group)
        if lane is not None:
            lane.pop(text, None)
            if not lane:
                del self._waiting[group]
