"""`python -m bench ngram-rules`: rules by which other servers draft from earlier text, replayed on
the same tokens as ours: answers of the demo model, several sets of each kind of text. ``--answers
FILE`` keeps them, or has them.

vLLM's (its page on n-gram speculation, `vllm/v1/spec_decode/ngram_proposer.py`): of the longest
n-gram at the end that occurred before, the first place; what follows there, up to the end of the
text. llama.cpp's `llama-lookup` (`common/ngram-cache.cpp`, without files of statistics): the most
frequent token after the longest n-gram that was seen often enough, one after the other. Its
server's `ngram-simple` (`common/ngram-map.cpp`): what followed the last 12 tokens where they
occurred last, if that is 12 tokens or more. Its `ngram-mod`: the token that last followed each 12
tokens, of all requests, one after the other.
vLLM's suffix decoding (Oliaro et al. 2024, by its page on it): after the longest match of up to 24
tokens the most frequent token, one after the other, while the product of their frequencies is 0.1,
and no more tokens than have matched; of the request's own text, or of answers to earlier requests
where these match longer.
"""

from __future__ import annotations

import argparse
import random
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from bench.in_process import InProcessEngine
from bench.speculation.repetitive import WORKLOADS
from engine.speculation.batch_costs import PLAIN_FIRST
from engine.speculation.ngram import MOST_AT_ONCE, NgramSource
from engine.speculation.source import Proposal
from engine.speculation.speculator import DraftRow, SpeculationOptions, Speculator
from shared.wire import SamplingParams, Submit

Transcript = tuple[list[int], list[int]]
"""A prompt and its answer."""
MOST = 16
"""Drafts of a step: llama.cpp's default, and the most of ours."""
TOKEN_COSTS = (0.1, 0.2, 0.4)
"""What a further token adds to a step, in steps of one token. On a CPU it is about the first."""
CONTEXT_TOKENS, PROMPT_TOKENS = 32_000, 20_000


class Rule(ABC):
    """Drafts for one transcript."""

    @abstractmethod
    def propose(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the drafts after ``tokens``."""

    def verified(self, tokens: Sequence[int], accepted: int) -> None:
        """Note how many drafts were accepted, which ``tokens`` include."""
        return


class VllmRule(Rule):
    def __init__(self, smallest: int, largest: int, most: int) -> None:
        self._sizes, self._most = range(largest, smallest - 1, -1), most

    def propose(self, tokens: Sequence[int]) -> Sequence[int]:
        for size in self._sizes:
            end = list(tokens[-size:])
            for start in range(len(tokens) - size):
                if tokens[start : start + size] == end:
                    return tokens[start + size : start + size + self._most]
        return ()


class LlamaLookupRule(Rule):
    LEAST_SEEN = (2, 2, 1, 1)
    LEAST_PERCENT = (66, 50, 50, 50)

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        self._entered = 0

    def propose(self, tokens: Sequence[int]) -> Sequence[int]:
        sizes = range(1, len(self.LEAST_SEEN) + 1)
        for index in range(max(1, self._entered), len(tokens)):
            for size in sizes:
                if size <= index:
                    self._seen[tuple(tokens[index - size : index])][tokens[index]] += 1
        self._entered = len(tokens)
        found = list(tokens[-sizes.stop :])
        start = len(found)
        while len(found) - start < MOST and (token := self._likely(found)) is not None:
            found.append(token)
        return found[start:]

    def _likely(self, tokens: Sequence[int]) -> int | None:
        for size in range(len(self.LEAST_SEEN), 0, -1):
            counts = self._seen.get(tuple(tokens[-size:]))
            if counts is None or len(tokens) < size:
                continue
            ((token, count),) = counts.most_common(1)
            total = counts.total()
            if total < self.LEAST_SEEN[size - 1]:
                continue
            if 100 * count >= self.LEAST_PERCENT[size - 1] * total:
                return token
        return None


class LlamaSimpleRule(Rule):
    SIZE, LONGEST = 12, 48

    def propose(self, tokens: Sequence[int]) -> Sequence[int]:
        size, end = self.SIZE, list(tokens[-self.SIZE :])
        if len(tokens) <= size + self.LONGEST + 1:
            return ()
        for start in range(len(tokens) - size - 1, 0, -1):
            if tokens[start : start + size] == end:
                found = tokens[start + size : start + size + self.LONGEST]
                return found[:MOST] if len(found) >= size else ()
        return ()


class LlamaModRule(Rule):
    SIZE = 12

    def __init__(self, followed: dict[tuple[int, ...], int]) -> None:
        """``followed`` is for all requests."""
        self._followed, self._entered = followed, 0

    def propose(self, tokens: Sequence[int]) -> Sequence[int]:
        for index in range(max(self.SIZE, self._entered), len(tokens)):
            self._followed[tuple(tokens[index - self.SIZE : index])] = tokens[index]
        self._entered = len(tokens)
        found = list(tokens[-self.SIZE :])
        while len(found) < self.SIZE + MOST:
            token = self._followed.get(tuple(found[-self.SIZE :]))
            if token is None:
                break
            found.append(token)
        return found[self.SIZE :]


class SuffixCounts:
    """How often each token followed each run of up to `LONGEST` tokens."""

    LONGEST = 24

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def enter(self, tokens: Sequence[int], first: int) -> None:
        """Count the tokens from index ``first`` on."""
        for index in range(max(1, first), len(tokens)):
            for size in range(1, min(self.LONGEST, index) + 1):
                self.after[tuple(tokens[index - size : index])][tokens[index]] += 1

    def draft(self, tokens: Sequence[int]) -> tuple[int, list[int], float]:
        """Return the length of the match, what follows, and a score: the expected tokens."""
        most = min(self.LONGEST, len(tokens))
        sizes = (n for n in range(most, 0, -1) if tuple(tokens[-n:]) in self.after)
        matched = next(sizes, 0)
        found = list(tokens[-matched:]) if matched else []
        chance, score = 1.0, 0.0
        while matched and len(found) < matched + min(matched, MOST):
            counts = self.after.get(tuple(found[-self.LONGEST :]))
            if not counts:
                break
            ((token, count),) = counts.most_common(1)
            chance *= count / counts.total()
            if chance < SuffixRule.LEAST_CHANCE:
                break
            score += chance
            found.append(token)
        return matched, found[matched:], score


class SuffixRule(Rule):
    LEAST_CHANCE = 0.1

    def __init__(self, earlier: SuffixCounts | None) -> None:
        """``earlier`` are answers of other requests."""
        self._own, self._earlier, self._entered = SuffixCounts(), earlier, 0

    def propose(self, tokens: Sequence[int]) -> Sequence[int]:
        self._own.enter(tokens, self._entered)
        self._entered = len(tokens)
        drafts = [self._own.draft(tokens)]
        if self._earlier is not None:
            drafts.append(self._earlier.draft(tokens))
        return max(drafts, key=lambda draft: draft[2])[1]


class OurRule(Rule):
    """Our n-grams, with the control of `Speculator` or without."""

    def __init__(
        self,
        speculator: Speculator,
        prompt: list[int],
        answer: list[int],
        token_cost: float = 0.0,
    ) -> None:
        """A further token makes a step longer by ``token_cost`` of its time."""
        self._speculator, self._token_cost = speculator, token_cost
        drafts = speculator.begin(_request(prompt, len(answer)), None)
        assert drafts is not None
        self._row = DraftRow(drafts, (), speculator.options.tokens)
        self._proposal: Proposal | None = None

    @staticmethod
    def speculator(
        most: int, token_cost: float | None = None, sizes: tuple[int, int] = (1, 4)
    ) -> Speculator:
        """Return what drafts where each further token makes a step longer by ``token_cost`` of
        its time; without it always ``most`` tokens. ``sizes``: of the n-grams."""
        options = SpeculationOptions(tokens=most, adapts=token_cost is not None)
        made = Speculator(options, [lambda request, grammar: _source(request, *sizes)])
        for drafts in (*range(most + 1), *[0] * PLAIN_FIRST):
            made.observe_step(1, drafts, 1 + (token_cost or 0) * drafts)
        return made

    def propose(self, tokens: Sequence[int]) -> Sequence[int]:
        self._row = self._row._replace(tokens=tokens)
        (self._proposal,) = self._speculator.choose(1, [self._row])
        found = self._proposal.tokens if self._proposal else ()
        step_s = 1 + self._token_cost * len(found)
        self._speculator.observe_step(1, len(found), step_s, [self._row.drafts])
        return found

    def verified(self, tokens: Sequence[int], accepted: int) -> None:
        assert self._proposal is not None
        self._speculator.verified(self._row._replace(tokens=tokens), self._proposal, accepted)


def _source(request: Submit, smallest: int, largest: int) -> NgramSource:
    expected = len(request.token_ids) + request.max_tokens
    return NgramSource(smallest, largest, first=0, expected_tokens=expected)


def _request(prompt: list[int], max_tokens: int) -> Submit:
    return Submit(
        request_id="",
        attempt=0,
        token_ids=prompt,
        sampling=SamplingParams(seed=0),
        max_tokens=max_tokens,
        stop_token_ids=[],
    )


def replay(rule: Rule, prompt: Sequence[int], answer: Sequence[int]) -> tuple[int, int, int]:
    """Return the steps that ``answer`` takes after its first token, the drafts that are verified,
    and how many of them are accepted."""
    steps = drafted = accepted = 0
    done = 1
    while done < len(answer):
        tokens = [*prompt, *answer[:done]]
        drafts = list(rule.propose(tokens))[: len(answer) - done - 1]
        pairs = zip(drafts, answer[done:], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        done += right + 1
        steps, drafted, accepted = steps + 1, drafted + len(drafts), accepted + right
        if drafts:
            rule.verified([*prompt, *answer[:done]], right)
    return steps, drafted, accepted


def rules(transcripts: Iterable[Transcript]) -> dict[str, list[tuple[int, int, int]]]:
    """Return what `replay` does of each transcript by each rule. Ours learn from one to the
    next."""
    costs: dict[str, float] = {}
    ours = {f"ours, {most}": OurRule.speculator(most) for most in (5, MOST)}
    for cost in TOKEN_COSTS:
        name = f"ours, auto, cost {cost}"
        ours[name], costs[name] = OurRule.speculator(MOST, cost), cost
    long = LlamaSimpleRule.SIZE
    ours[f"ours, {long}-{long}, {MOST}"] = OurRule.speculator(MOST, sizes=(long, long))
    for cost in (TOKEN_COSTS[0], TOKEN_COSTS[-1]):
        name = f"ours, {long}-{long}, cost {cost}"
        ours[name], costs[name] = OurRule.speculator(MOST, cost, sizes=(long, long)), cost
    found: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    followed: dict[tuple[int, ...], int] = {}
    earlier = SuffixCounts()
    for prompt, answer in transcripts:
        each: dict[str, Rule] = {
            name: OurRule(speculator, prompt, answer, costs.get(name, 0.0))
            for name, speculator in ours.items()
        }
        each |= {
            "vLLM, 1-4, 5": VllmRule(1, 4, 5),
            "vLLM, 2-5, 5": VllmRule(2, 5, 5),
            "vLLM, 2-5, 16": VllmRule(2, 5, MOST),
            "llama-lookup": LlamaLookupRule(),
            "ngram-simple": LlamaSimpleRule(),
            "ngram-mod": LlamaModRule(followed),
            "suffix, own text": SuffixRule(None),
            "suffix": SuffixRule(earlier),
        }
        for name, rule in each.items():
            found[name].append(replay(rule, prompt, answer))
        earlier.enter(answer, 0)
    return found


def index_cost() -> None:
    """Print what our index costs at 32,000 tokens."""
    pick = random.Random(0)
    tokens = [pick.randrange(3000) for _ in range(CONTEXT_TOKENS)]
    source = NgramSource(1, 4, first=0, expected_tokens=CONTEXT_TOKENS)
    text, pieces = tokens[:PROMPT_TOKENS], []
    for _ in range(PROMPT_TOKENS // MOST_AT_ONCE + 1):
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


def compare_rules(transcripts: Mapping[str, Sequence[Transcript]]) -> None:
    """Print for each kind of text tokens per step, accepted drafts per verified one, and tokens in
    the time of a step of one token, where each further one adds `TOKEN_COSTS`'s first to it."""
    results = {name: rules(each) for name, each in transcripts.items()}
    print(f"\n{'a step, accepted, speed':23}" + "".join(f"{name:>22}" for name in results))
    for rule in next(iter(results.values())):
        cells = []
        for found in results.values():
            steps, drafted, accepted = (sum(column) for column in zip(*found[rule], strict=True))
            part = f"{accepted / drafted:.3f}" if drafted else "-"
            speed = (steps + accepted) / (steps + TOKEN_COSTS[0] * drafted)
            cells.append(f"{(steps + accepted) / steps:8.2f} {part:>7} {speed:5.2f}")
        print(f"{rule:23}" + "".join(cells), flush=True)


def transcripts(
    model: str, sets: int, texts: int, tokens: int
) -> Iterator[dict[str, list[Transcript]]]:
    """Yield sets of so many transcripts of each kind."""
    engine = InProcessEngine(model)
    engine.use_grammars()
    for number in range(sets):
        found: dict[str, list[Transcript]] = {}
        for name, workload in WORKLOADS.items():
            engine.renew(None)
            answers: dict[str, list[int]] = {}
            prompts: dict[str, list[int]] = {}
            for text in range(texts * number, texts * (number + 1)):
                prompt = engine.encode(workload.text(text), is_chat=workload.is_chat)
                request = engine.submit(prompt, tokens, **workload.fields(text))
                prompts[request], answers[request] = prompt, []
            while not engine.replica.scheduler.idle:
                for delta in engine.step():
                    answers[delta.request_id] += delta.token_ids
            found[name] = [(prompts[request], answers[request]) for request in prompts]
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench ngram-rules", description=__doc__)
    parser.add_argument("--model", default="demo-fp32")
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--answers", type=Path)
    options = parser.parse_args()
    path: Path | None = options.answers
    if path is not None and path.exists():
        known = msgspec.json.decode(path.read_bytes(), type=list[dict[str, list[Transcript]]])
    else:
        known = list(transcripts(options.model, options.sets, options.texts, options.tokens))
        if path is not None:
            path.write_bytes(msgspec.json.encode(known))
    for each in known:
        compare_rules(each)


if __name__ == "__main__":
    main()
