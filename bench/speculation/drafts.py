"""`python -m bench speculation`: the same requests with drafts and without, a step of each in turn.

Two engines share their weights, one drafts: what else happens on the machine slows both. Tokens
are counted, and steps timed, while all requests decode: after the step in which the last has begun,
to that in which the first ends.
Drafts are those of ``--spec-decode auto``, what was learned in earlier runs included, as at a
server; "misses" has a source that is always wrong, "nothing" one that has no drafts. Ratios are of
tokens a second, and a second one of tokens a second of the processor, which other programs on the
machine change less.
Last comes the cost of the n-gram index alone.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

from bench.in_process import InProcessEngine  # noqa: E402
from bench.speculation.repetitive import WORKLOADS, Workload  # noqa: E402
from engine.replica.speculation import make_speculator  # noqa: E402
from engine.speculation.ngram import MAX_AT_ONCE, NgramSource  # noqa: E402
from engine.speculation.source import DraftSource, Proposal  # noqa: E402
from engine.speculation.speculator import Speculator  # noqa: E402
from shared.wire import DraftStats, Submit  # noqa: E402

BATCHES, TOKENS = (1, 4, 16), 128
MISSES, NOTHING = "misses", "nothing"
CONTEXT_TOKENS, PROMPT_TOKENS, MOST = 32_000, 20_000, 16
"""For measuring the cost of the index."""


class TimedRun:
    """Requests that an engine computes, step by step, and the times of its steps."""

    def __init__(
        self,
        engine: InProcessEngine,
        workload: Workload,
        numbers: Sequence[int],
        tokens: int,
        drafts: Speculator | None,
        stop: Sequence[int] = (),
    ) -> None:
        """``stop`` are tokens that end an answer."""
        self._engine = engine
        engine.renew(drafts)
        prompts = {
            number: engine.encode(workload.text(number), is_chat=workload.is_chat)
            for number in numbers
        }
        engine.texts(list(prompts.values()), 1)  # so that all begin at nearly the same time
        self._names = {
            engine.submit(prompt, tokens, stop, **workload.fields(number)): number
            for number, prompt in prompts.items()
        }
        self.texts: dict[int, list[int]] = {number: [] for number in numbers}
        self._counts = True
        self._tokens = 0
        self._seconds = self._cpu_seconds = 0.0

    @property
    def is_running(self) -> bool:
        return not self._engine.replica.scheduler.idle

    @property
    def rate(self) -> float:
        """Tokens per second, of all requests."""
        return self._tokens / self._seconds

    @property
    def cpu_rate(self) -> float:
        """Tokens per second of the processor."""
        return self._tokens / self._cpu_seconds

    def step(self) -> None:
        all_decode = all(self.texts.values())
        began, cpu_began = time.perf_counter(), time.process_time()
        deltas = self._engine.step()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        for delta in deltas:
            if delta.finish == "error":
                raise RuntimeError(f"a request failed: {delta}")
            self.texts[self._names[delta.request_id]] += delta.token_ids
        if all_decode and self._counts:
            self._tokens += sum(len(delta.token_ids) for delta in deltas)
            self._seconds += seconds
            self._cpu_seconds += cpu_seconds
        if any(delta.finish for delta in deltas):
            self._counts = False


class AlwaysWrong(DraftSource):
    """Proposes tokens other than the next ones, and claims to be certain."""

    def __init__(self, right: Sequence[int], num_prompt_tokens: int) -> None:
        self._right, self._first = right, num_prompt_tokens

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        done = len(tokens) - self._first
        wrong = tuple(token + 1 for token in self._right[done : done + count])
        return Proposal(wrong, MISSES, likely=(0.9,)) if wrong else None


class NeverProposes(DraftSource):
    """Has no drafts: what is left is the cost of looking for them."""

    def propose(self, tokens: Sequence[int], count: int) -> Proposal | None:
        return None


class Comparison:
    """Runs requests on two engines, one with drafts."""

    def __init__(self, model: str, tokens: int, **settings: Any) -> None:
        self.engine = InProcessEngine(model, **{"spec_decode": "auto", **settings})
        # Weights of its own would lie elsewhere in memory: equal steps then differ by up to 8 %.
        self.plain = self.engine.with_same_weights()
        for engine in (self.plain, self.engine):
            engine.use_grammars()
        gc.collect()
        gc.freeze()  # as in an engine: otherwise a collection of everything falls into some step
        self._tokens = tokens
        self._known: dict[int, list[int]] = {}

    def speculator(self, name: str) -> Speculator:
        replica = self.engine.replica
        made = make_speculator(self.engine.settings, replica.executor.spec, replica.draft_model)
        if made is None:
            raise SystemExit("this model's requests are computed one by one: no drafts")
        if name == NOTHING:
            return Speculator(made.options, [lambda request, grammar: NeverProposes()])
        return Speculator(made.options, [self._wrong]) if name == MISSES else made

    def _wrong(self, request: Submit, grammar: object) -> DraftSource:
        right = self._known[request.sampling.seed]
        return AlwaysWrong(right, len(request.token_ids))

    def pair(
        self, name: str, batch: int, drafts: Speculator, number: int
    ) -> tuple[TimedRun, TimedRun]:
        """Return a run without ``drafts`` and one with them."""
        workload = WORKLOADS["chat" if name in (MISSES, NOTHING) else name]
        numbers = range(number * batch, (number + 1) * batch)
        if name == MISSES and not set(numbers) <= set(self._known):
            known = TimedRun(self.plain, workload, numbers, self._tokens, None)
            while known.is_running:
                known.step()
            self._known |= known.texts
        return self.in_turn(workload, numbers, self._tokens, drafts)

    def in_turn(
        self,
        workload: Workload,
        numbers: Sequence[int],
        tokens: int,
        drafts: Speculator,
        stop: Sequence[int] = (),
    ) -> tuple[TimedRun, TimedRun]:
        """Run requests without drafts and with them, a step of each in turn."""
        plain = TimedRun(self.plain, workload, numbers, tokens, None, stop)
        drafted = TimedRun(self.engine, workload, numbers, tokens, drafts, stop)
        order = [plain, drafted]
        while plain.is_running or drafted.is_running:
            for run in order:
                if run.is_running:
                    run.step()
            order.reverse()
        return plain, drafted


def compare(
    model: str,
    runs: int,
    names: Sequence[str],
    batches: Sequence[int],
    tokens: int,
    **settings: Any,
) -> None:
    """Print the ratios. ``settings`` are further settings of the server."""
    both = Comparison(model, tokens, **settings)
    speculators = {name: both.speculator(name) for name in names}
    for name in names:  # first requests of a server: it learns costs
        both.pair(name, 1, speculators[name], 0)
    print(
        "workload   requests   without      with   ratio   CPU  (each)            accepted  texts"
    )
    for name in names:
        for batch in batches:
            before = speculators[name].stats()
            pairs = [both.pair(name, batch, speculators[name], run) for run in range(runs)]
            ratios = [drafted.rate / plain.rate for plain, drafted in pairs]
            of_cpu = [drafted.cpu_rate / plain.cpu_rate for plain, drafted in pairs]
            same = sum(
                plain.texts[n] == drafted.texts[n] for plain, drafted in pairs for n in plain.texts
            )
            print(
                f"{name:10} {batch:8}"
                f" {statistics.median(plain.rate for plain, _ in pairs):8.1f}"
                f" {statistics.median(drafted.rate for _, drafted in pairs):9.1f} tok/s"
                f" {statistics.median(ratios):5.2f} {statistics.median(of_cpu):5.2f}"
                f"  {' '.join(f'{ratio:.2f}' for ratio in ratios):16}"
                f" {_accepted(before, speculators[name].stats()):>9}"
                f"  {same}/{batch * runs}",
                flush=True,
            )
    index_cost()


def index_cost() -> None:
    """Print the cost of the n-gram index at 32,000 tokens."""
    pick = random.Random(0)
    tokens = [pick.randrange(3000) for _ in range(CONTEXT_TOKENS)]
    source = NgramSource(1, 4, first=0, expected_tokens=CONTEXT_TOKENS)
    text, pieces = tokens[:PROMPT_TOKENS], []
    for _ in range(PROMPT_TOKENS // MAX_AT_ONCE + 1):
        began = time.thread_time()
        source.propose(text, MOST)
        pieces.append(time.thread_time() - began)
    began = time.thread_time()
    for token in tokens[PROMPT_TOKENS:]:
        text.append(token)
        source.propose(text, MOST)
    token_s = (time.thread_time() - began) / (CONTEXT_TOKENS - PROMPT_TOKENS)
    print(
        f"index: {1e6 * token_s:.1f} us a token up to {CONTEXT_TOKENS} tokens; a prompt of"
        f" {PROMPT_TOKENS} in {len(pieces)} calls, {1e3 * sum(pieces):.1f} ms together,"
        f" {1e3 * max(pieces):.1f} the longest; {source.nbytes / 1e6:.1f} MB"
    )


def _accepted(before: DraftStats, after: DraftStats) -> str:
    """Return how many of the drafts verified between two points were accepted."""

    def total(stats: DraftStats) -> tuple[int, int]:
        counts = stats.sources.values()
        return sum(c.accepted for c in counts), sum(c.drafted for c in counts)

    (old, old_of), (new, new_of) = total(before), total(after)
    return f"{new - old}/{new_of - old_of}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench speculation", description=__doc__)
    parser.add_argument("--model", default="demo-fp32")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS, MISSES, NOTHING])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--draft-model", help="a model's folder")
    parser.add_argument("--spec-decode", choices=("ngram", "draft", "auto"), default="auto")
    parser.add_argument("--always", action="store_true", help="draft whatever it costs")
    options = parser.parse_args()
    compare(
        options.model,
        options.runs,
        options.workloads,
        options.batches,
        options.tokens,
        spec_decode=options.spec_decode,
        spec_decode_dynamic=not options.always,
        draft_model_path=options.draft_model,
    )


if __name__ == "__main__":
    main()
