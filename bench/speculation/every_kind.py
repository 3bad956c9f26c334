"""`python -m bench every-kind`: sixty prompts of twenty kinds with drafts and without, in turn.

Each prompt is answered by two engines that share their weights, a step of each in turn, one of them
with ``--spec-decode auto``. With several streams as many requests of the kind run at once, the same
prompt with other seeds where it is sampled. Ratios are of tokens a second while all of them decode,
and of tokens a second of the processor.

``--record FILE`` stores results; the next call continues from them. ``--seconds`` ends one. All
stored results are printed at the end.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

from bench.speculation.drafts import Comparison  # noqa: E402
from bench.speculation.kinds_of_text import KINDS, TOKENS  # noqa: E402
from bench.speculation.repetitive import Workload  # noqa: E402
from engine.speculation.speculator import Speculator  # noqa: E402

PROMPTS = len(TOKENS)
WORST_KIND, WORST_PROMPT = 0.98, 0.95


class TimedPair(msgspec.Struct, frozen=True):
    """One prompt with drafts and without."""

    kind: str
    prompt: int
    streams: int
    repeat: int
    tokens: int  # of the longest answer
    ratio: float  # of tokens a second
    cpu_ratio: float  # of tokens a second of the processor
    same: bool  # whether all texts are
    drafted: int = 0
    accepted: int = 0
    choosing_s: float = 0.0  # processor time of looking for drafts

    @property
    def what(self) -> tuple[str, int, int, int]:
        return self.kind, self.prompt, self.streams, self.repeat


def measure(
    model: str,
    kinds: Sequence[str],
    streams: Sequence[int],
    repeats: int,
    path: Path | None = None,
    seconds: float = math.inf,
    prompts: Sequence[int] = range(PROMPTS),
) -> list[TimedPair]:
    """Return what the record at ``path`` has, after adding to it for so many ``seconds``."""
    lines = path.read_bytes().splitlines() if path is not None and path.exists() else []
    found = [msgspec.json.decode(line, type=TimedPair) for line in lines]
    known = {each.what for each in found}
    every = ((k, p, s, r) for r, s, k, p in product(range(repeats), streams, kinds, prompts))
    missing = [each for each in every if each not in known]
    if not missing:
        return found
    ends = time.monotonic() + seconds
    both = Comparison(model, max(TOKENS))
    drafts = both.speculator("auto")
    both.in_turn(KINDS["chat"], [0], 16, drafts)  # the first request of a server
    for kind, prompt, at_once, repeat in missing:
        if time.monotonic() > ends:
            break
        tokens = TOKENS[prompt]
        workload = _one_prompt(KINDS[kind], prompt)
        numbers = [prompt + PROMPTS * (at_once * repeat + i) for i in range(at_once)]
        stop = tuple(both.plain.loaded.eos_token_ids)
        before = _totals(drafts)
        plain, drafted = both.in_turn(workload, numbers, tokens, drafts, stop)
        counts = [now - then for now, then in zip(_totals(drafts), before, strict=True)]
        pair = TimedPair(
            kind,
            prompt,
            at_once,
            repeat,
            max(map(len, plain.texts.values())),
            round(drafted.rate / plain.rate, 4),
            round(drafted.cpu_rate / plain.cpu_rate, 4),
            plain.texts == drafted.texts,
            round(counts[0]),
            round(counts[1]),
            round(counts[2], 4),
        )
        found.append(pair)
        if path is not None:
            with path.open("ab") as file:
                file.write(msgspec.json.encode(pair) + b"\n")
    return found


def _totals(speculator: Speculator) -> tuple[float, float, float]:
    """Return drafts, accepted drafts and seconds of looking for them, of all sources so far."""
    counts = speculator.stats().sources.values()
    return (
        sum(each.drafted for each in counts),
        sum(each.accepted for each in counts),
        sum(each.spent_s for each in counts),
    )


def _one_prompt(workload: Workload, prompt: int) -> Workload:
    """Return ``workload`` with the text of one prompt, whatever the number."""
    return replace(workload, text=lambda number: workload.text(prompt))


def _mean(ratios: Iterable[float]) -> float:
    return statistics.geometric_mean(ratios)


def show(pairs: Sequence[TimedPair]) -> None:
    """Print the medians of the repeats of each prompt, and the means of these by kind."""
    of_prompts: dict[tuple[str, int], dict[int, list[TimedPair]]] = defaultdict(dict)
    for pair in pairs:
        of_prompts[pair.kind, pair.streams].setdefault(pair.prompt, []).append(pair)
    for at_once in sorted({pair.streams for pair in pairs}):
        print(f"\n{at_once} at once: each prompt, mean, of the processor, drafts accepted")
        kinds: dict[str, float] = {}
        prompts: list[float] = []
        for (kind, streams), by_prompt in of_prompts.items():
            if streams != at_once:
                continue
            each = [statistics.median(p.ratio for p in by_prompt[i]) for i in sorted(by_prompt)]
            cpu = [statistics.median(p.cpu_ratio for p in one) for one in by_prompt.values()]
            kinds[kind] = _mean(each)
            prompts += each
            shown = " ".join(f"{ratio:.2f}" for ratio in each)
            of_kind = [pair for one in by_prompt.values() for pair in one]
            accepted = sum(pair.accepted for pair in of_kind)
            drafted = f"{accepted}/{sum(pair.drafted for pair in of_kind)}"
            print(f"{kind:18} {shown:16} {kinds[kind]:5.2f} {_mean(cpu):5.2f} {drafted:>12}")
        print(
            f"mean {_mean(prompts):.3f} of {len(prompts)} prompts;"
            f" {sum(ratio < WORST_KIND for ratio in kinds.values())} kinds below {WORST_KIND},"
            f" {sum(ratio < WORST_PROMPT for ratio in prompts)} prompts below {WORST_PROMPT}"
        )
    print(f"texts: {sum(pair.same for pair in pairs)} of {len(pairs)} pairs are the same")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench every-kind", description=__doc__)
    parser.add_argument("--model", default="demo-fp32")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--prompts", nargs="+", type=int, default=list(range(PROMPTS)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", type=Path, help="JSON lines of what was measured")
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()
    show(
        measure(
            options.model,
            options.kinds,
            options.streams,
            options.repeats,
            options.record,
            options.seconds,
            options.prompts,
        )
    )


if __name__ == "__main__":
    main()
