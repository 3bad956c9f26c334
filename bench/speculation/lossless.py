"""`python -m bench lossless`: the same text with drafts as without, on the demo model.

Answers to 200 prompts without drafts are compared, token by token, with those of every source of
drafts in batches of 1 to 8, for each feature in turn and for all of them together. On a CPU a row
has the same bits whatever is computed with it, so no tie is excused.
Drafts of a model need ``--draft-model``; ``auto`` then has them too, and those of the model's own
head if there is one. Exits with 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

from bench.in_process import InProcessEngine  # noqa: E402
from bench.speculation.repetitive import SCHEMA, WORKLOADS, code_edit, quote, records  # noqa: E402
from engine.replica.speculation import make_speculator  # noqa: E402
from engine.speculation.speculator import Speculator  # noqa: E402
from shared.wire import SamplingParams  # noqa: E402

PROMPTS, TOKENS, MAX_AT_ONCE = 200, 32, 8
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


class ComparedCase(NamedTuple):
    """How many answers in one case differ with drafts from one source."""

    wrong: int
    drafted: dict[str, tuple[int, int]]  # accepted and drafted tokens
    preempted: int


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

    def check(self, case: Case, source: str, expected: Mapping[int, list[int]]) -> ComparedCase:
        """Compare the ``expected`` answers with those with drafts from ``source``."""
        replica = self._engine.replica
        settings = replace(self._engine.settings, **SOURCES[source])
        draft_model = None if source == "ngram" else replica.draft_model
        speculator = make_speculator(settings, replica.executor.spec, draft_model)
        assert speculator is not None
        numbers = range(len(expected))
        found = self.answers(case, numbers, speculator, expected, predicts=source == "auto")
        stats = speculator.stats().sources
        return ComparedCase(
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
            one = 1024 // 16 * engine.replica.scheduler.config.block_bytes
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


def check(
    model: str, names: Sequence[str], prompts: int, tokens: int, draft_model: str | None = None
) -> int:
    """Print the result of each case and source. Return how many answers differ."""
    sources = [source for source in SOURCES if draft_model or source != "draft"]
    wrong = 0
    for bits in sorted({CASES[name].kv_bits for name in names}):
        checker = Checker(model, bits, tokens, draft_model)
        plain: list[tuple[Case, dict[int, list[int]]]] = []
        for name in names:
            case = CASES[name]
            if case.kv_bits != bits:
                continue
            expected = next((known for same, known in plain if same == case.plain), None)
            if expected is None:
                expected = checker.answers(case.plain, range(prompts))
                plain.append((case.plain, expected))
            for source in sources:
                found = checker.check(case, source, expected)
                wrong += found.wrong
                _show(name, source, prompts, found)
    return wrong


def _show(name: str, source: str, prompts: int, found: ComparedCase) -> None:
    drafted = ", ".join(f"{kind} {some}/{of_all}" for kind, (some, of_all) in found.drafted.items())
    preempted = f"; {found.preempted} preempted" if found.preempted else ""
    same = f"{prompts - found.wrong}/{prompts} the same"
    print(f"{name:14} {source:6} {same}  ({drafted}{preempted})", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench lossless", description=__doc__)
    parser.add_argument("--model", default="demo-fp32")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--draft-model", help="a model's folder")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    wrong = check(
        options.model, options.cases, options.prompts, options.tokens, options.draft_model
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
