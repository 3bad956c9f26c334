"""`python -m bench lossless`: the same text with drafts as without, on the demo model.

Answers to 200 prompts without drafts are compared, token by token, with those of every source of
drafts in batches of 1 to 8, for each feature in turn and for all of them together. On a CPU a row
has the same bits whatever is computed with it, so no tie is excused.
Drafts of a model need ``--draft-model`` (`bench distill` makes one), and ``auto`` has them then. It
has those of the model's own head too, if there is one. Exits with 1 if an answer differs.

``--record FILE`` keeps what was compared, a piece of 36 prompts (batches of 1 to 8) at a time, and
the answers without drafts: the next call with the same code goes on behind it. ``--seconds`` ends
one.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import msgspec

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

from bench.in_process import InProcessEngine  # noqa: E402
from bench.speculation.repetitive import SCHEMA, WORKLOADS, code_edit, quote, records  # noqa: E402
from engine.replica.speculation import make_speculator  # noqa: E402
from engine.speculation.speculator import Speculator  # noqa: E402
from shared.wire import SamplingParams  # noqa: E402

PROMPTS, TOKENS, MAX_AT_ONCE, PIECE = 200, 32, 8, 36
SOURCES: dict[str, dict[str, Any]] = {
    "ngram": {"spec_decode": "ngram", "spec_decode_dynamic": False, "num_speculative_tokens": 16},
    "draft": {"spec_decode": "draft", "spec_decode_dynamic": False},
    "auto": {"spec_decode": "auto"},
    "unpredicted": {"spec_decode": "auto"},
}
"""Settings. All requests of ``auto`` also have a prediction, which is wrong in places."""
SHORT = 120
"""Characters of a text to repeat: long prompts would cost more than the comparison."""
TEXTS: dict[str, Callable[[int], str]] = {
    "code edit": partial(code_edit, most=SHORT),
    "quoting": partial(quote, most=SHORT),
    "JSON": partial(records, people=2),
    "chat": WORKLOADS["chat"].text,
}
SAMPLED = {"temperature": 0.9, "top_p": 0.95}
PENALIZED = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}


@dataclass(frozen=True)
class Case:
    """Features that are on."""

    sampling: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # of `Submit`
    config: dict[str, Any] = field(default_factory=dict)  # of the scheduler
    kv_bits: int = 16
    resumed: bool = False  # whether each answer is resumed after its first half
    slots: int = 0  # memory for only this many long sequences, if it is not 0

    @property
    def plain(self) -> Case:
        """The part of it that determines the text."""
        fields = {name: value for name, value in self.fields.items() if name != "logprobs"}
        return Case(self.sampling, fields, kv_bits=self.kv_bits)


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


class PlainPiece(msgspec.Struct, frozen=True, tag=True):
    """Answers to one piece of the prompts without drafts."""

    case: str  # the first one with these answers
    first: int  # number of the first prompt
    tokens: int  # of each answer
    answers: dict[int, list[int]]

    @property
    def piece(self) -> tuple[str, int, int, int]:
        return self.case, self.first, len(self.answers), self.tokens


class ComparedPiece(msgspec.Struct, frozen=True, tag=True):
    """The result of one piece of the prompts in one case, with drafts from one source."""

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

    def __init__(self, model: str, kv_bits: Any, tokens: int, draft_model: str | None) -> None:
        self._engine = InProcessEngine(
            model, kv_bits, deterministic=True, spec_decode="auto", draft_model_path=draft_model
        )
        self._engine.use_grammars()
        self._tokens = tokens

    def _prompt(self, number: int) -> list[int]:
        name, text = list(TEXTS.items())[number % len(TEXTS)]
        return self._engine.encode(
            f"{number}. {text(number // len(TEXTS))}", is_chat=WORKLOADS[name].is_chat
        )

    def plain(self, name: str, numbers: range) -> PlainPiece:
        answers = self.answers(CASES[name].plain, numbers)
        return PlainPiece(case=name, first=numbers.start, tokens=self._tokens, answers=answers)

    def check(
        self, name: str, expected: Mapping[int, list[int]], sources: Sequence[str]
    ) -> Iterator[ComparedPiece]:
        """Compare the ``expected`` answers to prompts with those of each of ``sources`` in case
        ``name``."""
        case, numbers = CASES[name], range(min(expected), max(expected) + 1)
        for source in sources:
            replica = self._engine.replica
            settings = replace(self._engine.settings, **SOURCES[source])
            draft_model = None if source == "ngram" else replica.draft_model
            speculator = make_speculator(settings, replica.executor.spec, draft_model)
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
        """Return the tokens of the answers to prompts ``numbers``. With those ``known`` they run
        in batches of 1 to 8 and may be resumed or preempted."""
        engine = self._engine
        config = dict(case.config)
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
    sizes = cycle(range(1, MAX_AT_ONCE + 1) if varied else [2 * MAX_AT_ONCE])
    first = numbers.start
    while first < numbers.stop:
        batch = range(first, min(numbers.stop, first + next(sizes)))
        yield batch
        first = batch.stop


def _nearly(tokens: Sequence[int], seed: int) -> list[int]:
    """Return ``tokens`` with some of them replaced, omitted, or repeated."""
    pick = random.Random(seed)
    changes: list[list[int]] = [[], [7], [5, 6]]
    nested = (pick.choice(changes) if pick.random() < 0.1 else [token] for token in tokens)
    return [token for part in nested for token in part]


class ComparedPieces:
    """The known results for one model, in memory and in a file if there is a ``path``."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.compared: dict[tuple[str, str, int, int, int], ComparedPiece] = {}
        self.plain: dict[tuple[str, int, int, int], PlainPiece] = {}
        if path is not None and path.exists():
            for line in path.read_bytes().splitlines():
                self._take(msgspec.json.decode(line, type=ComparedPiece | PlainPiece))

    def add(self, piece: ComparedPiece | PlainPiece) -> None:
        self._take(piece)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(piece) + b"\n")

    def _take(self, piece: ComparedPiece | PlainPiece) -> None:
        if isinstance(piece, ComparedPiece):
            self.compared[piece.piece] = piece
        else:
            self.plain[piece.piece] = piece


def check(
    model: str,
    names: Sequence[str],
    prompts: int,
    tokens: int,
    path: Path | None = None,
    seconds: float = math.inf,
    draft_model: str | None = None,
) -> int:
    """Compare what is missing in the record at ``path``, for at most ``seconds``. Print the
    outcome of each case, and return how many answers differ."""
    record = ComparedPieces(path)
    sources = [source for source in SOURCES if draft_model or source != "draft"]
    checkers: dict[int, Checker] = {}
    ends = time.monotonic() + seconds
    for first, name in product(range(0, prompts, PIECE), names):
        numbers = range(first, min(prompts, first + PIECE))
        same = next(known for known, case in CASES.items() if case.plain == CASES[name].plain)
        piece = first, len(numbers), tokens
        missing = [source for source in sources if (name, source, *piece) not in record.compared]
        bits = CASES[name].kv_bits
        while missing and time.monotonic() < ends:
            if bits not in checkers:
                checkers.clear()  # one engine at a time
                checkers[bits] = Checker(model, bits, tokens, draft_model)
            if (same, *piece) not in record.plain:
                record.add(checkers[bits].plain(same, numbers))
            expected = record.plain[same, *piece].answers
            for outcome in checkers[bits].check(name, expected, [missing.pop(0)]):
                record.add(outcome)
    found = [each for each in record.compared.values() if each.tokens == tokens]
    for name, source in product(names, sources):
        _show(name, source, [each for each in found if (each.case, each.source) == (name, source)])
    return sum(each.wrong for each in found)


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
    parser = argparse.ArgumentParser(prog="python -m bench lossless", description=__doc__)
    parser.add_argument("--model", default="demo-fp32")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--draft-model", help="a model's folder")
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
        options.draft_model,
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
