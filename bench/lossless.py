"""`python -m bench.lossless`: the same text with drafts as without, on the demo model.

Answers to 200 prompts without drafts are compared, token by token, with those of every source of
drafts in batches of 1 to 8, for each feature in turn and for all of them together. With
``--deterministic`` a row has the same bits whatever is computed with it, so no tie is excused.
Exits with 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

from bench.in_process import InProcessEngine  # noqa: E402
from bench.repetitive import SCHEMA, WORKLOADS  # noqa: E402
from engine.replica.speculation import make_speculator  # noqa: E402
from engine.speculation.speculator import Speculator  # noqa: E402
from shared.wire import SamplingParams  # noqa: E402

PROMPTS, TOKENS, MOST_AT_ONCE = 200, 32, 8
SOURCES: dict[str, dict[str, Any]] = {
    "ngram": {"spec_decode": "ngram", "spec_decode_dynamic": False, "num_speculative_tokens": 16},
    "auto": {"spec_decode": "auto"},
}
"""Settings. All requests of ``auto`` have a prediction too, wrong in places."""
SAMPLED = {"temperature": 0.9, "top_p": 0.95}
PENALIZED = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}


@dataclass(frozen=True)
class Case:
    """Features that are on."""

    sampling: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # of `Submit`
    config: dict[str, Any] = field(default_factory=dict)  # of the scheduler
    kv_bits: int = 16
    resumed: bool = False  # whether each answer goes on after its first half
    slots: int = 0  # memory for so many long sequences only, if it is not 0


CASES = {
    "greedy": Case(),
    "sampled": Case(SAMPLED),
    "penalties": Case(PENALIZED),
    "scores": Case(fields={"logprobs": 3}),
    "grammar": Case(fields={"grammar": SCHEMA}),
    "short chunks": Case(config={"prefill_chunk_tokens": 32}),
    "no cache": Case(config={"prefix_cache": False}),
    "little memory": Case(slots=3),
    "resumed": Case(resumed=True),
    "8 bits": Case(kv_bits=8),
    "together": Case(
        SAMPLED | PENALIZED,
        {"logprobs": 3, "grammar": SCHEMA},
        {"prefill_chunk_tokens": 32},
        kv_bits=8,
        resumed=True,
        slots=3,
    ),
}


class Checker:
    """Answers of one engine."""

    def __init__(self, model: str, kv_bits: Any, prompts: int, tokens: int) -> None:
        self._engine = InProcessEngine(model, kv_bits, deterministic=True)
        self._engine.use_grammars()
        self._tokens = tokens
        self._prompts = [self._prompt(number) for number in range(prompts)]

    def _prompt(self, number: int) -> list[int]:
        workloads = list(WORKLOADS.values())
        workload = workloads[number % len(workloads)]
        text = f"{number}. {workload.text(number // len(workloads))}"
        return self._engine.encode(text, is_chat=workload.is_chat)

    def check(self, case: Case, source: str, expected: list[list[int]]) -> tuple[int, str]:
        """Return how many answers differ from those ``expected``, and what was drafted."""
        settings = replace(self._engine.settings, **SOURCES[source])
        speculator = make_speculator(settings, self._engine.replica.executor.spec)
        assert speculator is not None
        found = self.answers(case, speculator, expected, predicts=source == "auto")
        stats = speculator.stats()
        drafted = ", ".join(
            f"{name} {counts.accepted}/{counts.drafted}" for name, counts in stats.sources.items()
        )
        wrong = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
        preempted = self._engine.replica.scheduler.stats().preemptions_total
        return wrong, drafted + (f"; {preempted} preempted" if preempted else "")

    def answers(
        self,
        case: Case,
        speculator: Speculator | None = None,
        known: list[list[int]] | None = None,
        predicts: bool = False,
    ) -> list[list[int]]:
        """Return the tokens of all answers. With those ``known`` they come in batches of 1 to 8 and
        may be resumed or preempted."""
        engine = self._engine
        config = dict(case.config) if known else {}
        if known and case.slots:
            one = engine.replica.scheduler.config.slab_bytes(1, 1024)
            config["limit_bytes"] = case.slots * one
        engine.renew(speculator, **config)
        answers: list[list[int]] = []
        for batch in _batches(len(self._prompts), varied=known is not None):
            names: dict[str, list[int]] = {}
            for number in batch:
                fields: dict[str, Any] = dict(case.fields)
                begun = known[number][: self._tokens // 2] if known and case.resumed else []
                if predicts and known:
                    fields["prediction"] = _nearly(known[number], number)
                name = engine.submit(
                    self._prompts[number],
                    self._tokens,
                    generated=begun,
                    sampling=SamplingParams(seed=number, **case.sampling),
                    **fields,
                )
                names[name] = list(begun)
            while not engine.replica.scheduler.idle:
                for delta in engine.step():
                    if delta.finish == "error":
                        raise RuntimeError(f"a request failed: {delta}")
                    names[delta.request_id] += delta.token_ids
            answers += names.values()
        return answers


def _batches(count: int, varied: bool) -> Iterator[range]:
    sizes = cycle(range(1, MOST_AT_ONCE + 1)) if varied else cycle([MOST_AT_ONCE])
    first = 0
    while first < count:
        batch = range(first, min(count, first + next(sizes)))
        yield batch
        first = batch.stop


def _nearly(tokens: Sequence[int], seed: int) -> list[int]:
    """Return ``tokens`` with some of them replaced, left out, or twice."""
    pick = random.Random(seed)
    changes: list[list[int]] = [[], [7], [5, 6]]
    nested = (pick.choice(changes) if pick.random() < 0.1 else [token] for token in tokens)
    return [token for part in nested for token in part]


def check(model: str, names: Sequence[str], prompts: int, tokens: int) -> int:
    """Print the outcome of each case. Return how many answers differ."""
    checkers: dict[int, Checker] = {}
    wrong = 0
    for name in names:
        case = CASES[name]
        if case.kv_bits not in checkers:
            checkers.clear()  # one engine at a time
            checkers[case.kv_bits] = Checker(model, case.kv_bits, prompts, tokens)
        checker = checkers[case.kv_bits]
        began = time.perf_counter()
        expected = checker.answers(case)
        for source in SOURCES:
            differ, drafted = checker.check(case, source, expected)
            print(f"{name:14} {source:6} {prompts - differ}/{prompts} the same  ({drafted})")
            wrong += differ
        print(f"{'':14} {time.perf_counter() - began:.0f} s", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lossless", description=__doc__)
    parser.add_argument("--model", default="demo-fp32")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    return int(check(options.model, options.cases, options.prompts, options.tokens) > 0)


if __name__ == "__main__":
    sys.exit(main())
