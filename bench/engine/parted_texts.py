"""How often greedy texts part on MLX's graph: a sequence alone, beside the same one among others.

Tiny random models of twenty architectures, as the zoo builds them: llamas, windows, sinks,
experts, latents, recurrent layers and hybrids. The demo, which is trained, parts more often
(docs/benchmarks.md).
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from engine.device import HOST_VARIABLE
from engine.plan import Chunk, Decode, Plan, fixed_tables
from shared.wire import SamplingParams

if TYPE_CHECKING:  # imports mlx
    from engine.executor.base import Executor

NAMES = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "cohere2", "olmo2"),
    *("gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "ernie4_5_moe"),
    *("deepseek_v2", "deepseek_v3", "minicpm3"),
    *("jamba", "qwen3_next", "falcon_h1", "nemotron_h", "lfm2", "recurrent_gemma"),
)
KV_BITS = (16, 8)
ROWS, TEXTS, TOKENS, LONGEST_PROMPT = 8, 16, 32, 90
GREEDY = SamplingParams(temperature=0.0, seed=1)

Prompts = Sequence[Sequence[int]]
Texts = list[list[int]]


def parted_texts(model: str, runs: int) -> None:
    """Print how many of the texts of each architecture part, with each `KV_BITS`, and in all.

    ``model`` is not used. Each of the ``runs`` has other prompts."""
    os.environ[HOST_VARIABLE] = "0"  # before batches are chosen
    columns = {bits: [0, 0] for bits in KV_BITS}
    print(f"{'':16}" + "".join(f"  {f'{bits} bits':>10}" for bits in KV_BITS), flush=True)
    for name in NAMES:
        print(f"{name:16}", end="", flush=True)
        prompts = _prompts(name, runs * TEXTS)
        for bits, column in columns.items():
            parted = _parted(name, bits, prompts)
            if parted is not None:
                column[0] += parted
                column[1] += len(prompts)
            print(f"  {'-' if parted is None else parted:>10}", end="", flush=True)
        print(flush=True)
    shares = (f"{parted} of {texts}" for parted, texts in columns.values())
    print(f"{'all':16}" + "".join(f"  {each:>10}" for each in shares), flush=True)


def _prompts(name: str, count: int) -> Prompts:
    from zoo.common import VOCAB_SIZE

    pick = random.Random(name)
    lengths = [pick.randrange(5, LONGEST_PROMPT) for _ in range(count)]
    return [[pick.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def _parted(name: str, bits: int, prompts: Prompts) -> int | None:
    """Return how many continuations of ``prompts`` differ between a batch of `ROWS` and a sequence
    alone; None if the architecture has no batches, or no keys and values of so many ``bits``."""
    from engine import device
    from engine.cache.quantization import Precision
    from engine.proving.choose import choose_executor
    from engine.proving.trial import PAGE_TOKENS
    from zoo.build import build
    from zoo.common import VOCAB_SIZE
    from zoo.configs import config

    device.prepare()
    model = build(name)
    vocab_size = config(name).get("vocab_size", VOCAB_SIZE)
    precision = Precision() if bits == 16 else Precision(8)
    executor = choose_executor(model, vocab_size, PAGE_TOKENS, precision).executor
    if not executor.spec.batches_decodes or executor.spec.kv_bits != bits:
        return None
    alone = [text for prompt in prompts for text in _texts(executor, [prompt])]
    together: Texts = []
    for first in range(0, len(prompts), ROWS):
        together += _texts(executor, prompts[first : first + ROWS])
    return sum(one != other for one, other in zip(alone, together, strict=True))


def _texts(executor: Executor, prompts: Prompts) -> Texts:
    """Return the greedy continuations of ``prompts``, all computed at once."""
    steps = count(1)
    slots = range(len(prompts))
    size = executor.spec.page_tokens
    tables = fixed_tables(len(prompts), LONGEST_PROMPT + TOKENS + 16, size)
    pairs = list(zip(slots, prompts, strict=True))
    chunks = tuple(Chunk(slot, 0, tuple(prompt[:-1])) for slot, prompt in pairs)
    num_pages = sum(len(table.pages) for table in tables)
    begin = Plan(step=next(steps), num_pages=num_pages, tables=tables, chunks=chunks)
    executor.dispatch(begin).read()
    texts: Texts = [[] for _ in prompts]
    for number in range(TOKENS):
        decodes = tuple(
            Decode(slot, len(prompt) - 1 + number, [*prompt[-1:], *text][-1], number, GREEDY)
            for (slot, prompt), text in zip(pairs, texts, strict=True)
        )
        result = executor.dispatch(Plan(step=next(steps), decodes=decodes)).read()
        for text, token in zip(texts, result.tokens, strict=True):
            text.append(token)
    executor.dispatch(Plan(step=next(steps), freed_slots=tuple(slots))).read()
    return texts
