"""A page about one machine with a GPU: correctness, speed and memory beside mlx-lm.

Run once on a Mac, it gives figures that no other machine can. Without a GPU, the CPU follows the
GPU's code path: that shows that the page is correct, and says nothing about a GPU's speed."""

from __future__ import annotations

import gc
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from itertools import product
from typing import Any, Literal, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.models.cache import make_prompt_cache

from bench.engine import kernels
from bench.in_process import InProcessEngine
from bench.turns import in_turn, median_ratio
from engine.backend.gpu_path import forced_gpu_path
from engine.batch.gpu import query_heads
from engine.batch.metal.calls import can_attend
from engine.batch.metal.kernel import why_not
from engine.batch.metal.trial import (
    MAX_BYTES,
    AttentionShape,
    KernelChoice,
    KernelTrial,
    TimedAttention,
)
from engine.cache.graph_pages import GraphPages
from engine.cache.layout import probe_layout
from engine.cache.page_format import PageFormat
from engine.cache.quantization import Precision
from engine.executor.batched import BatchedExecutor
from engine.model.load import resolve
from engine.plan import FEWEST_PAGE_TOKENS
from engine.proving.oracle import Reference, compute_logits, logits_distance, make_reference
from engine.proving.proof import NOISE_MULTIPLE, TOLERANCE
from engine.proving.trial import Trial
from engine.replica.memory import device_memory_bytes

REFERENCE_TOKENS = (49, 3, 17, 1, 38)
REFERENCE_STEPS = 5
TEXTS = 8
TEXT_TOKENS = 32
MAX_PARTINGS = 3
"""Max number of different texts to analyse: each takes one pass per token."""
DECODE_ROWS = (1, 8, 16)
DECODE_PROMPT_TOKENS = 128
DECODE_STEPS = 32
WARM_UP_STEPS = 4
PREFILLS = ((1, 2048), (8, 512))
"""Rows, and tokens of each."""
MEMORY_ROWS = 8
MEMORY_TOKENS = 2048
ATTENTION_TOKENS = (1_024, 4_096, 16_384, 65_536)
GRAPH_LENGTHS = (1500,) * 8
MB = 1e6

KVBits = Literal[8, 16]


def metal(model: str, runs: int) -> None:
    """Print the page. Exits with code 1 if something is wrong."""
    path = str(resolve(model))
    gpu = mx.default_device() == mx.gpu
    wrong: list[str] = []
    with nullcontext() if gpu else forced_gpu_path():
        for bits in (16, 8):
            engine = InProcessEngine(path, kv_bits=bits)
            page = _Page(engine, runs, wrong)
            if (kept := engine.replica.executor.spec.kv_bits) != bits:
                wrong.append(f"the KV cache has {kept} bits instead of {bits} (the log says why)")
            if bits == 16:
                page.print_machine(model, gpu)
                page.print_logits()
                page.print_texts()
                if wrong:
                    break
            page.print_attention(bits)
            page.print_speed(bits)
            page.print_memory(bits)
            if bits == 16:
                page.print_graph()
            del page, engine
            gc.collect()
            mx.clear_cache()
    print(f"\n**{'WRONG: ' + '; '.join(wrong) if wrong else 'All is right.'}**", flush=True)
    if wrong:
        sys.exit(1)


class _NoEnd:
    """Replaces a tokenizer, so that mlx-lm's texts have the requested length."""

    eos_token_ids: tuple[int, ...] = ()

    def decode(self, tokens: Sequence[int]) -> str:
        return ""


class _Parting(NamedTuple):
    """The position where a text differs from mlx-lm's."""

    text: int
    token: int
    gap: float  # between mlx-lm's two most likely logits there
    noise: float  # the largest difference between mlx-lm's own two ways there

    @property
    def is_tie(self) -> bool:
        return self.gap <= NOISE_MULTIPLE * self.noise


class _Page:
    def __init__(self, engine: InProcessEngine, runs: int, wrong: list[str]) -> None:
        self._engine, self._runs, self._wrong = engine, runs, wrong
        self._model = engine.loaded.model
        self._rng = random.Random(1)
        self._longest = engine.loaded.context_length // 2
        self._weight_bytes = sum(a.nbytes for _, a in tree_flatten(self._model.parameters()))

    def print_machine(self, model: str, gpu: bool) -> None:
        info = mx.device_info()
        spec = self._engine.replica.executor.spec
        print(f"### {model} on {info.get('device_name') or info.get('architecture')}\n")
        if not gpu:
            print("**Computed on a CPU, as for a GPU. The ratios say nothing of a GPU.**\n")
        memory_gb = device_memory_bytes() / 1e9
        print(f"* {platform.platform()}, Python {platform.python_version()}")
        print(f"* {', '.join(f'{name} {version(name)}' for name in ('mlx', 'mlx-lm'))}")
        print(f"* memory of the device (on Metal, the recommended working set): {memory_gb:.1f} GB")
        print(f"* weights: {self._weight_bytes / MB:,.0f} MB, logits in {self._logits_dtype}")
        print(f"* sequences are computed {spec.batching}; look-ahead: {spec.look_ahead}")
        print(f"* attention reads pages by {spec.attends_by or 'gathering'}")
        if not isinstance(self._engine.replica.executor, BatchedExecutor):
            self._wrong.append("the model is not batched (the log says why)")

    @property
    def _logits_dtype(self) -> mx.Dtype:
        return self._model(mx.array([[1]]), cache=make_prompt_cache(self._model)).dtype

    # -- correctness -----------------------------------------------------------

    def print_logits(self) -> None:
        """Compare all logits with mlx-lm's, in every situation that a scheduler creates."""
        vocab_size = self._engine.loaded.vocab_size
        references = [
            make_reference(self._model, length, REFERENCE_STEPS, vocab_size, seed)
            for seed, length in enumerate(REFERENCE_TOKENS)
        ]
        executor = self._engine.replica.executor
        trial = Trial(executor)
        trial.run_all(references)
        executor.logits_observer = None
        executor.reset()
        noise = max(_own_distance(one) for one in references)
        step = max(one.largest_step(one.expected[0].dtype) for one in references)
        found = trial.max_difference
        print("\n### Logits, in standard deviations\n")
        print(f"* largest difference from mlx-lm: {found:.2g} ({trial.worst_stage})")
        print(f"* of mlx-lm's own two ways from each other: {noise:.2g}; one step: {step:.2g}")
        if not found <= max(TOLERANCE, NOISE_MULTIPLE * max(noise, step)):
            self._wrong.append(f"logits differ by {found:.2g}")

    def print_texts(self) -> None:
        """Compare greedy texts of simultaneous prompts with those that mlx-lm gives for each
        alone."""
        prompts = [self._prompt(5 + 19 * number) for number in range(TEXTS)]
        ours = self._engine.texts(prompts, TEXT_TOKENS)
        alone = [self._alone(prompt) for prompt in prompts]
        batched = batch_generate(
            self._model, _NoEnd(), prompts, max_tokens=TEXT_TOKENS, return_token_ids=True
        ).token_ids
        pairs = enumerate(zip(prompts, ours, alone, strict=True))
        different = [(number, each) for number, each in pairs if each[1] != each[2]]
        partings = [
            self._parting(number, prompt, mine, theirs)
            for number, (prompt, mine, theirs) in different[:MAX_PARTINGS]
        ]
        same = sum(a == b for a, b in zip(batched, alone, strict=True))
        print(f"\n### Texts, {TEXT_TOKENS} greedy tokens after random ones\n")
        print(f"* the same as mlx-lm's alone: {TEXTS - len(different)} of {TEXTS}")
        print(f"* `mlx_lm.batch_generate`, for comparison: {same} of {TEXTS}")
        for parting in partings:
            what = "a tie" if parting.is_tie else "NO TIE"
            print(
                f"* text {parting.text} parts at token {parting.token}, {what}: "
                f"gap {parting.gap:.2g}, noise {parting.noise:.2g}"
            )
        if not all(parting.is_tie for parting in partings):
            self._wrong.append("texts differ where the next token is clear")

    def _alone(self, prompt: list[int]) -> list[int]:
        found = generate_step(mx.array(prompt), self._model, max_tokens=TEXT_TOKENS)
        return [int(token) for token, _ in found]

    def _parting(
        self, text: int, prompt: list[int], ours: Sequence[int], theirs: Sequence[int]
    ) -> _Parting:
        pairs = enumerate(zip(ours, theirs, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        tokens = (*prompt, *theirs[:place])
        ways = [
            compute_logits(self._model, make_prompt_cache(self._model), tokens, len(tokens), at)[-1]
            for at in (len(tokens), 1)
        ]
        one, other = (way.astype(mx.float32) for way in ways)
        best = mx.sort(one)[-2:]
        noise = mx.max(mx.abs(one - other))
        return _Parting(text, place, float((best[1] - best[0]).item()), float(noise.item()))

    def _prompt(self, length: int) -> list[int]:
        length = min(length, self._longest)
        return [self._rng.randrange(3, self._engine.loaded.vocab_size) for _ in range(length)]

    # -- speed and memory ------------------------------------------------------

    def print_attention(self, bits: KVBits) -> None:
        """Print the time of attention of a decode over one layer of each kind."""
        layout = probe_layout(self._model).with_precision(Precision(bits))
        heads = query_heads(self._model, layout, FEWEST_PAGE_TOKENS)
        forms = GraphPages(layout, FEWEST_PAGE_TOKENS).formats
        kinds = {forms[layer]: count for layer, count in heads.items() if can_attend(forms[layer])}
        for form, count in kinds.items():
            trial = KernelTrial(form, count)
            print(f"\n### ms of attention of a layer, {bits} bits, {_described(form, count)}\n")
            print(
                "| | kernel | gathering and MLX's | MLX's over values |\n| --- | --- | --- | --- |"
            )
            way = KernelChoice(reason=why_not()) if why_not() else trial.run()
            longest = max(n for n in ATTENTION_TOKENS if trial.gathered_bytes(n, 1) <= MAX_BYTES)
            pool = mx.zeros((longest // form.page_tokens * form.page_words,), mx.uint32)
            for tokens, rows in product(ATTENTION_TOKENS, (1, 8)):
                if trial.gathered_bytes(tokens, rows) <= MAX_BYTES:
                    case = TimedAttention(trial, pool, AttentionShape(tokens, rows, 1))
                    nearest = way.nearest(tokens, rows, 1)
                    variant = None if nearest is None else nearest.variant
                    kernel_s = None if variant is None else case.kernel_s(variant)
                    times = kernel_s, case.gathering_s(way.gathers), case.values_s()
                    cells = ["-" if each is None else f"{1e3 * each:.3f}" for each in times]
                    print(f"| {rows} x {tokens} tokens | {' | '.join(cells)} |", flush=True)

    def print_speed(self, bits: KVBits) -> None:
        print(f"\n### Tokens per second, {bits} bits, medians of {self._runs} alternating runs\n")
        print("| | ours | mlx_lm.batch_generate | ratio |\n| --- | --- | --- | --- |")
        for rows in DECODE_ROWS:
            what = f"decode, {rows} x {DECODE_PROMPT_TOKENS} tokens"
            self._compare(what, rows, DECODE_PROMPT_TOKENS, self._our_decode, _their_decode)
        for rows, length in PREFILLS:
            length = min(length, self._longest)
            what = f"prefill, {rows} x {length} tokens"
            self._compare(what, rows, length, self._our_prefill, _their_prefill)

    def _compare(
        self, what: str, rows: int, length: int, ours: Callable[..., float], theirs: _Rate
    ) -> None:
        """Print the median rates, and the median of the pairs' ratios. The first pair is a warm-up:
        a GPU compiles its kernels."""

        def prompts() -> list[list[int]]:
            return [self._prompt(length) for _ in range(rows)]

        measures = (lambda _: ours(prompts()), lambda _: theirs(self._model, prompts()))
        rates = in_turn(measures, self._runs, warm_up=1)
        mine, others = map(statistics.median, rates)
        print(f"| {what} | {mine:,.1f} | {others:,.1f} | {median_ratio(*rates):.2f} |", flush=True)

    def _our_decode(self, prompts: list[list[int]]) -> float:
        return len(prompts) / self._engine.step_s(prompts, DECODE_STEPS, WARM_UP_STEPS)

    def _our_prefill(self, prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        self._engine.texts(prompts, 1)
        return sum(map(len, prompts)) / (time.perf_counter() - started)

    def print_memory(self, bits: KVBits) -> None:
        """Compare MLX's peak memory with the scheduler's ledger."""
        length = min(MEMORY_TOKENS, self._longest)
        prompts = [self._prompt(length) for _ in range(MEMORY_ROWS)]
        ledger = self._engine.replica.scheduler.memory.ledger
        gc.collect()
        mx.clear_cache()
        other_bytes = mx.get_active_memory() - self._weight_bytes - ledger.used_bytes
        known = beyond = 0

        def watch() -> None:
            nonlocal known, beyond
            mx.synchronize()
            known = max(known, ledger.used_bytes)
            held = mx.get_active_memory() - self._weight_bytes - other_bytes
            beyond = max(beyond, held - ledger.used_bytes)

        mx.reset_peak_memory()
        self._engine.texts(prompts, TEXT_TOKENS, watch)
        peak = mx.get_peak_memory() - self._weight_bytes - other_bytes
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        batch_generate(self._model, _NoEnd(), prompts, max_tokens=TEXT_TOKENS)
        theirs = mx.get_peak_memory() - before
        print(f"\n### Memory with {bits} bits, {MEMORY_ROWS} x {length} tokens, beside weights\n")
        print(f"* ledger: {known / MB:,.1f} MB at most")
        print(f"* MLX after a step: {beyond / MB:,.1f} MB more than the ledger, at most")
        print(f"* MLX within a step: {peak / MB:,.1f} MB at most")
        print(f"* `mlx_lm.batch_generate`: {theirs / MB:,.1f} MB at most", flush=True)

    def print_graph(self) -> None:
        """Count the primitives of a decode step, each of which is at least one kernel on a GPU."""
        layout = probe_layout(self._model)
        if not layout.layers or layout.states:
            return
        steps = [kernels.theirs(self._model, layout, GRAPH_LENGTHS, 1)]
        steps += [kernels.ours(self._model, layout, GRAPH_LENGTHS, 1, bits) for bits in (16, 8)]
        costs = kernels.measure(steps, len(layout.layers), self._runs)
        print(f"\n### Graph of a decode step, {len(GRAPH_LENGTHS)} x {GRAPH_LENGTHS[0]} tokens\n")
        print("| | mlx-lm's batch cache | 16 bits | 8 bits |\n| --- | --- | --- | --- |")
        counts, times = ([cost[i] for cost in costs] for i in (0, 1))
        print("| primitives a layer | " + " | ".join(f"{count:.1f}" for count in counts) + " |")
        print("| ms to build | " + " | ".join(f"{ms:.1f}" for ms in times) + " |", flush=True)


_Rate = Callable[[Any, list[list[int]]], float]
"""Returns the tokens per second of a model on prompts."""


def _their_decode(model: Any, prompts: list[list[int]]) -> float:
    count = DECODE_STEPS + WARM_UP_STEPS
    stats = batch_generate(model, _NoEnd(), prompts, max_tokens=count).stats
    return float(stats.generation_tps)


def _their_prefill(model: Any, prompts: list[list[int]]) -> float:
    started = time.perf_counter()
    batch_generate(model, _NoEnd(), prompts, max_tokens=1)
    return sum(map(len, prompts)) / (time.perf_counter() - started)


def _described(form: PageFormat, query_heads: int) -> str:
    return f"{query_heads} heads on {form.heads}, keys of {form.keys.dim}"


def _own_distance(one: Reference) -> float:
    """Return the distance between the two expected ways of computing ``one``."""
    return max(logits_distance(a, b) for a, b in zip(*one.expected, strict=True))
