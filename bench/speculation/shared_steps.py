"""`python -m bench shared-steps ANSWERS`: several requests that draft in the same steps, replayed.

``ANSWERS`` is a file of `bench ngram-rules --answers`. Requests of one kind run at once, and a
draft of any adds ``--draft`` of a step to it. Shown are tokens in the time of a step without
drafts, of all requests and of the one that has the fewest; with ``--spec-decode auto``, and where
the most tokens of all together count and no request is protected.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from bench.speculation.ngram_rules import MOST, Transcript
from engine.speculation.batch_costs import PLAIN_FIRST
from engine.speculation.ngram import NgramSource
from engine.speculation.speculator import DraftRow, SpeculationOptions, Speculator
from shared.wire import SamplingParams, Submit

STEP_S = 0.03


def _speculator(protects: bool, draft: float) -> Speculator:
    """Return one that knows steps of one request, as after the first at a server."""

    def source(request: Submit, grammar: object) -> NgramSource:
        whole = len(request.token_ids) + request.max_tokens
        return NgramSource(1, 4, first=0, expected_tokens=whole)

    options = SpeculationOptions(tokens=MOST, largest_batch=MOST, protects=protects)
    made = Speculator(options, [source])
    for drafted in (*range(MOST + 1), *[0] * PLAIN_FIRST):
        made.observe_step(1, drafted, STEP_S * (1 + draft * drafted))
    return made


def replay_together(
    transcripts: Sequence[Transcript], draft: float, protects: bool
) -> tuple[float, float]:
    """Return the tokens of a request in the time of a step without drafts, until one of them ends:
    the mean, and the fewest."""
    spec, steps = _speculator(protects, draft), 0.0
    length = min(len(answer) for _, answer in transcripts)
    done, sequences = [1] * len(transcripts), []
    for prompt, answer in transcripts:
        sampling = SamplingParams(seed=0)
        request = Submit("", 0, prompt, sampling, max_tokens=len(answer), stop_token_ids=[])
        drafts = spec.begin(request, None)
        assert drafts is not None
        sequences.append(drafts)
    while max(done) < length:
        rows = [
            DraftRow(drafts, [*prompt, *answer[:number]], length - number - 1)
            for drafts, (prompt, answer), number in zip(sequences, transcripts, done, strict=True)
        ]
        found = spec.choose(len(rows), rows)
        drafted = sum(len(proposal.tokens) for proposal in found if proposal)
        steps += 1 + draft * drafted
        spec.observe_step(len(rows), drafted, STEP_S * (1 + draft * drafted), sequences)
        for index, (row, proposal) in enumerate(zip(rows, found, strict=True)):
            prompt, answer = transcripts[index]
            pairs = zip(proposal.tokens if proposal else (), answer[done[index] :], strict=False)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            done[index] += right + 1
            if proposal:
                tokens = [*prompt, *answer[: done[index]]]
                spec.verified(row._replace(tokens=tokens), proposal, right)
    return statistics.mean(done) / steps, min(done) / steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench shared-steps", description=__doc__)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--requests", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--draft", type=float, default=0.028, help="what one adds, in steps")
    options = parser.parse_args()
    sets = msgspec.json.decode(options.answers.read_bytes(), type=list[dict[str, list[Transcript]]])
    for protects in (True, False):
        print("auto" if protects else "\nthe most tokens of all")
        for name in sets[0]:
            shown = []
            for count in options.requests:
                groups = [
                    (each[name] + sets[(number + 1) % len(sets)][name])[:count]
                    for number, each in enumerate(sets)
                ]
                ratios = [replay_together(group, options.draft, protects) for group in groups]
                mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
                worst = min(fewest for _, fewest in ratios)
                shown.append(f"{count} at once: {mean:.2f}, the least {worst:.2f}")
            print(f"{name:12} {'   '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
