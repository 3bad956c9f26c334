"""`python -m bench.lossless`: the same text with drafts as without, on the demo model.

Answers to 200 prompts without drafts are compared, token by token, with those of every source of
drafts in batches of 1 to 8, for each feature in turn and for all of them together. With
``--deterministic`` a row has the same bits whatever is computed with it, so no tie is excused.
Exits with 1 if an answer differs. ``--record FILE`` keeps what was compared, a piece of 36 prompts
(batches of 1 to 8) at a time: the next call goes on behind it, and ``--seconds`` ends one.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import msgspec

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

from bench.in_process import InProcessEngine  # noqa: E402
from bench.repetitive import SCHEMA, WORKLOADS  # noqa: E402
from engine.replica.speculation import make_speculator  # noqa: E402
from engine.speculation.speculator import Speculator  # noqa: E402
from shared.wire import SamplingParams  # noqa: E402

PROMPTS, TOKENS, MOST_AT_ONCE, PIECE = 200, 32, 8, 36
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


class ComparedPiece(msgspec.Struct, frozen=True):
    """What came of one piece of the prompts in one case, with drafts of one source."""

    case: str
    source: str
    first: int  # number of the first prompt
    prompts: int
    tokens: int  # of each answer
    wrong: int  # answers that differ
    drafted: dict[str, tuple[int, int]]  # accepted and drafted tokens
    preempted: int

    @property
    def piece(self) -> tuple[str, str, int, int, int]:
        return self.case, self.source, self.first, self.prompts, self.tokens


class Checker:
    """Answers of one engine."""

    def __init__(self, model: str, kv_bits: Any, tokens: int) -> None:
        self._engine = InProcessEngine(model, kv_bits, deterministic=True)
        self._engine.use_grammars()
        self._tokens = tokens

    def _prompt(self, number: int) -> list[int]:
        workloads = list(WORKLOADS.values())
        workload = workloads[number % len(workloads)]
        text = f"{number}. {workload.text(number // len(workloads))}"
        return self._engine.encode(text, is_chat=workload.is_chat)

    def check(self, name: str, numbers: range, sources: Sequence[str]) -> Iterator[ComparedPiece]:
        """Compare the answers to prompts ``numbers`` in case ``name`` with those of each of
        ``sources``."""
        case = CASES[name]
        expected = self.answers(case, numbers)
        for source in sources:
            settings = replace(self._engine.settings, **SOURCES[source])
            speculator = make_speculator(settings, self._engine.replica.executor.spec)
            assert speculator is not None
            found = self.answers(case, numbers, speculator, expected, predicts=source == "auto")
            stats = speculator.stats().sources
            yield ComparedPiece(
                case=name,
                source=source,
                first=numbers.start,
                prompts=len(numbers),
                tokens=self._tokens,
                wrong=sum(found[number] != expected[number] for number in numbers),
                drafted={name: (each.accepted, each.drafted) for name, each in stats.items()},
                preempted=self._engine.replica.scheduler.stats().preemptions_total,
            )

    def answers(
        self,
        case: Case,
        numbers: range,
        speculator: Speculator | None = None,
        known: Mapping[int, list[int]] | None = None,
        predicts: bool = False,
    ) -> dict[int, list[int]]:
        """Return the tokens of the answers to prompts ``numbers``. With those ``known`` they come
        in batches of 1 to 8 and may be resumed or preempted."""
        engine = self._engine
        config = dict(case.config) if known else {}
        if known and case.slots:
            one = engine.replica.scheduler.config.slab_bytes(1, 1024)
            config["limit_bytes"] = case.slots * one
        engine.renew(speculator, **config)
        answers: dict[int, list[int]] = {}
        for batch in _batches(numbers, varied=known is not None):
            names: dict[str, list[int]] = {}
            for number in batch:
                fields: dict[str, Any] = dict(case.fields)
                begun = known[number][: self._tokens // 2] if known and case.resumed else []
                if predicts and known:
                    fields["prediction"] = _nearly(known[number], number)
                name = engine.submit(
                    self._prompt(number),
                    self._tokens,
                    generated=begun,
                    sampling=SamplingParams(seed=number, **case.sampling),
                    **fields,
                )
                names[name] = answers[number] = list(begun)
            while not engine.replica.scheduler.idle:
                for delta in engine.step():
                    if delta.finish == "error":
                        raise RuntimeError(f"a request failed: {delta}")
                    names[delta.request_id] += delta.token_ids
        return answers


def _batches(numbers: range, varied: bool) -> Iterator[range]:
    sizes = cycle(range(1, MOST_AT_ONCE + 1)) if varied else cycle([MOST_AT_ONCE])
    first = numbers.start
    while first < numbers.stop:
        batch = range(first, min(numbers.stop, first + next(sizes)))
        yield batch
        first = batch.stop


def _nearly(tokens: Sequence[int], seed: int) -> list[int]:
    """Return ``tokens`` with some of them replaced, left out, or twice."""
    pick = random.Random(seed)
    changes: list[list[int]] = [[], [7], [5, 6]]
    nested = (pick.choice(changes) if pick.random() < 0.1 else [token] for token in tokens)
    return [token for part in nested for token in part]


def check(
    model: str,
    names: Sequence[str],
    prompts: int,
    tokens: int,
    record: Path | None = None,
    seconds: float = math.inf,
) -> int:
    """Compare what ``record`` lacks, for ``seconds`` at most. Print the outcome of each case, and
    return how many answers differ."""
    known = {} if record is None else {each.piece: each for each in _read(record)}
    checkers: dict[int, Checker] = {}
    ends = time.monotonic() + seconds
    for name, first in product(names, range(0, prompts, PIECE)):
        numbers = range(first, min(prompts, first + PIECE))
        keys = {source: (name, source, first, len(numbers), tokens) for source in SOURCES}
        missing = [source for source, key in keys.items() if key not in known]
        if not missing or time.monotonic() > ends:
            continue
        bits = CASES[name].kv_bits
        if bits not in checkers:
            checkers.clear()  # one engine at a time
            checkers[bits] = Checker(model, bits, tokens)
        for outcome in checkers[bits].check(name, numbers, missing):
            known[outcome.piece] = outcome
            if record is not None:
                with record.open("ab") as file:
                    file.write(msgspec.json.encode(outcome) + b"\n")
    found = [each for each in known.values() if each.tokens == tokens]
    for name, source in product(names, SOURCES):
        _show(name, source, [each for each in found if (each.case, each.source) == (name, source)])
    return sum(each.wrong for each in found)


def _read(record: Path) -> list[ComparedPiece]:
    if not record.exists():
        return []
    lines = record.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=ComparedPiece) for line in lines]


def _show(name: str, source: str, outcomes: Sequence[ComparedPiece]) -> None:
    drafted: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for outcome in outcomes:
        for kind, counts in outcome.drafted.items():
            drafted[kind] = [old + new for old, new in zip(drafted[kind], counts, strict=True)]
    of_all = sum(each.prompts for each in outcomes)
    preempted = sum(each.preempted for each in outcomes)
    print(
        f"{name:14} {source:6} {of_all - sum(each.wrong for each in outcomes)}/{of_all} the same  ("
        + ", ".join(f"{kind} {accepted}/{all_}" for kind, (accepted, all_) in drafted.items())
        + (f"; {preempted} preempted)" if preempted else ")"),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lossless", description=__doc__)
    parser.add_argument("--model", default="demo-fp32")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--record", type=Path, help="JSON lines of what was compared")
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    wrong = check(
        options.model,
        options.cases,
        options.prompts,
        options.tokens,
        options.record,
        options.seconds,
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
