"""`python -m bench grammars`: answers of the model to JSON schemas, and the cost of masks.

Sends random schemas and some like those of clients (`bench.engine.schemas`) to a whole server,
eight at a time, and counts the answers that ended by themselves and are valid. Then runs eight
sequences with schemas, without a server, and measures the share of a step that their masks take.
Exits with 1 if fewer than 95 % ended, one that did is not valid, or masks take over 10 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from engine.backend.blas import load_fast_blas

load_fast_blas()  # before anything imports mlx

import jsonschema  # noqa: E402

from bench.client import complete  # noqa: E402
from bench.engine.schemas import COMMON, Schema, generate  # noqa: E402
from bench.in_process import InProcessEngine  # noqa: E402
from bench.servers import ours  # noqa: E402
from engine.grammar.cache import GrammarCache  # noqa: E402
from engine.replica.intake import tokenizer_spec_of  # noqa: E402
from engine.sampling.masks import GrammarMasker, TokenMasks  # noqa: E402
from shared.wire import Grammar, SamplingParams  # noqa: E402

MIN_ENDED = 0.95
MAX_SHARE_OF_STEP = 0.10
PROMPT = "Here is an example of the JSON that the program wrote:\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench grammars", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    random = generate(options.schemas - len(COMMON), options.seed)
    schemas = [*COMMON, *random][: options.schemas]
    with ours(options.model) as port:
        answers = asyncio.run(_answers(port, schemas, options.max_tokens, options.batch))
    ends = Counter(finish for finish, _ in answers)
    ended = [(s, text) for s, (end, text) in zip(schemas, answers, strict=True) if end == "stop"]
    wrong = [text for schema, text in ended if not _valid(schema, text)]
    valid = len(ended) - len(wrong)
    print(f"{len(schemas)} schemas: {dict(ends)}; {valid} valid {wrong[:3] or ''}")
    share = _share_of_a_step(options.model, options.batch)
    return int(len(ended) < MIN_ENDED * len(schemas) or bool(wrong) or share > MAX_SHARE_OF_STEP)


async def _answers(
    port: int, schemas: Sequence[Schema], max_tokens: int, at_once: int
) -> list[tuple[str | None, str]]:
    places = asyncio.Semaphore(at_once)

    async def ask(number: int, schema: Schema) -> tuple[str | None, str]:
        async with places:
            stream = await complete(
                port,
                PROMPT,
                max_tokens,
                temperature=0.8,
                seed=number,
                response_format={"type": "json_schema", "json_schema": {"schema": schema}},
            )
        return stream.error or stream.finish_reason, stream.text

    return await asyncio.gather(*(ask(number, schema) for number, schema in enumerate(schemas)))


def _valid(schema: Schema, text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


class _TimedMasker(GrammarMasker):
    """Measures how long masks take."""

    def __init__(self, grammars: GrammarCache, vocab_size: int) -> None:
        super().__init__(grammars, vocab_size)
        self.seconds: list[float] = []

    def _compute(self, constrained: Any, are_guesses: bool) -> TokenMasks:
        began = time.perf_counter()
        masks = super()._compute(constrained, are_guesses)
        self.seconds.append(time.perf_counter() - began)
        return masks


def _share_of_a_step(model: str, rows: int) -> float:
    """Return the time of masks as a fraction of the step."""
    engine = InProcessEngine(model, kv_bits=8)
    loaded, replica = engine.loaded, engine.replica
    masker = _TimedMasker(GrammarCache(tokenizer_spec_of(loaded).load()), loaded.vocab_size)
    replica.executor.use_grammars(masker)
    prompt = loaded.tokenizer.encode(PROMPT)
    for number, schema in enumerate(generate(rows, seed=1)):
        grammar = Grammar(kind="json_schema", source=json.dumps(schema))
        sampling = SamplingParams(seed=number, temperature=0.8)
        engine.submit(prompt, 100, loaded.eos_token_ids, sampling=sampling, grammar=grammar)
    steps: list[float] = []
    full: list[float] = []
    while not replica.scheduler.idle:
        plan = replica.scheduler.schedule()
        if plan is None:
            continue
        began, masks = time.perf_counter(), len(masker.seconds)
        replica.scheduler.apply(replica.executor.dispatch(plan).read())
        if len(plan.decodes) >= rows // 2 and len(masker.seconds) > masks and not plan.chunks:
            steps.append((time.perf_counter() - began) / len(plan.decodes))
            full.append(masker.seconds[-1] / len(plan.decodes))
    step, mask = statistics.mean(steps), statistics.mean(full)
    print(
        f"a token at {rows} rows: {1000 * step:.2f} ms of a step, of which its mask takes"
        f" {1000 * mask:.3f} ms: {mask / step:.1%}; longest mask {1000 * max(full):.2f} ms"
    )
    return mask / step


if __name__ == "__main__":
    sys.exit(main())
