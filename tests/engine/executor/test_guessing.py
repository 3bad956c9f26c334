"""What an executor guesses with a model's head, compared with the head applied plainly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from engine.backend.gpu_path import forced_gpu_path
from engine.mtp.head import MTPHead, embed, last_layer
from engine.mtp.weights import head_files, load_head
from engine.plan import (
    Chunk,
    Decode,
    RestoreState,
    SaveState,
    Slot,
    StepResult,
    Table,
)
from engine.sampling.sampler import sample_tokens
from shared.wire import SamplingParams
from tests.engine.executor.by_hand import GREEDY, PlanRunner
from tests.engine.whole import Whole
from tests.mtp_checkpoints import add_head, models_with_heads
from tests.tiny_models import VOCAB_SIZE, Kind

PLACES = ("deepseek_v3", "mimo", "qwen3_next", "glm4_moe on a GPU", "qwen3_next on a GPU")
CAPACITY = 128
SAMPLED = SamplingParams(seed=5, temperature=0.8, top_k=40)


class Bench(PlanRunner):
    """An executor with a head, driven by plans, and what it should guess."""

    def __init__(self, path: Path) -> None:
        whole = Whole(path, spec_decode="auto", no_ssd=True, num_blocks=200)
        self.model = whole.loaded.model
        assert whole.executor.spec.guesses == "mtp"
        self._head: MTPHead = load_head(self.model, head_files(self.model, path))
        self.texts: dict[Slot, list[int]] = {}
        """All tokens of each slot, the one that was sampled last included."""
        super().__init__(whole.executor, 4, CAPACITY)

    def run(self, **parts: Any) -> StepResult:
        step = self.dispatch(**parts)
        result = step.read()
        step.finish()
        assert not result.failed
        return result

    def prefill(self, slot: Slot, tokens: Sequence[int], *ends: int, start: int = 0) -> None:
        """Compute all but the last of ``tokens`` from ``start`` on, in chunks to ``ends``."""
        self.texts[slot] = list(tokens)
        for end in (*ends, len(tokens) - 1):
            if start < end:
                self.run(chunks=(Chunk(slot, start, tuple(tokens[start:end])),))
            start = end

    def decode(
        self, *decodes: tuple[Slot, SamplingParams, Sequence[int], int]
    ) -> list[tuple[int, ...]]:
        """Decode slots with drafts, and return the guesses of each."""
        made = []
        for slot, sampling, drafts, guesses in decodes:
            end = len(self.texts[slot])
            at = slot, end - 1, self.texts[slot][-1], end
            made.append(Decode(*at, sampling, drafts=tuple(drafts), guesses=guesses))
        result = self.run(decodes=tuple(made))
        tokens = iter(result.tokens)
        for (slot, *_), length in zip(decodes, result.run_lengths, strict=True):
            self.texts[slot] += [next(tokens) for _ in range(length)]
        return list(result.guesses)

    def expected(
        self, slot: Slot, sampling: SamplingParams, count: int, unknown: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Return what the head guesses, without the hidden states before position 0 and before
        ``unknown`` positions."""
        tokens = self.texts[slot]
        hidden = self.model.model(mx.array([tokens[:-1]]))
        hidden = mx.concatenate([mx.zeros_like(hidden[:, :1]), hidden], axis=1)
        for position in unknown:
            hidden[:, position] = 0
        cache = KVCache()
        hidden = self._head(embed(self.model, mx.array([tokens])), hidden, cache)[:, -1:]
        found: list[int] = []
        for number in range(count):
            decode = Decode(slot, 0, 0, len(tokens) + number, sampling)
            logits = last_layer(self.model, hidden)[:, -1]
            found += sample_tokens(logits, [decode]).tolist()
            hidden = self._head(embed(self.model, mx.array([found[-1:]])), hidden, cache)
        return tuple(found)


@pytest.fixture(scope="module")
def with_head(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function for the directory of a tiny model with a head."""
    return models_with_heads(add_head, tiny_model, tmp_path_factory.mktemp("heads"))


def prompt(length: int, seed: int = 1) -> list[int]:
    return [3 + (seed * 37 + i * 53) % 300 for i in range(length)]


@pytest.fixture(scope="module", params=PLACES)
def bench(with_head: Callable[[Kind], Path], request: pytest.FixtureRequest) -> Any:
    kind, _, on_gpu = request.param.partition(" on ")
    with forced_gpu_path() if on_gpu else nullcontext():
        yield Bench(with_head(kind))


A, B, C = 0, 2, 3


def test_guesses_are_those_of_the_head_applied_again_and_again(bench: Bench) -> None:
    """Of rows of several lengths, greedy and sampled, prefilled in chunks, some longer than what is
    kept of hidden states, with drafts that are accepted and such that are not."""
    bench.prefill(A, prompt(50, 2), 7, 8, 45)
    bench.prefill(B, prompt(1, 3))
    bench.prefill(C, prompt(12, 4), 5)
    rows = {A: GREEDY, B: SAMPLED, C: GREEDY}
    wanted = {A: 3, B: 2, C: 0}
    guessed: dict[Slot, tuple[int, ...]] = {A: (), B: (), C: ()}
    for turn in range(3):
        lengths = {slot: len(bench.texts[slot]) for slot in rows}
        answers = bench.decode(*((s, rows[s], guessed[s][:2], wanted[s]) for s in rows))
        for slot, guesses in zip(rows, answers, strict=True):
            assert guesses == bench.expected(slot, rows[slot], wanted[slot]), (slot, turn)
            assert 1 <= len(bench.texts[slot]) - lengths[slot] <= 3
        guessed = dict(zip(rows, answers, strict=True))
        if turn == 1:  # a draft that is right, and one that is not
            tokens = bench.texts[A]
            right = int(mx.argmax(bench.model(mx.array([tokens]))[0, -1]).item())
            guessed[A] = (right, (right + 1) % VOCAB_SIZE)


def test_a_slot_without_room_for_them_gets_fewer_guesses(bench: Bench) -> None:
    bench.prefill(A, prompt(CAPACITY - 3, 5))
    (guesses,) = bench.decode((A, GREEDY, (), 5))
    assert guesses == bench.expected(A, GREEDY, 3)
    (fewer,) = bench.decode((A, GREEDY, guesses[:1], 5))
    assert len(fewer) == CAPACITY + 1 - len(bench.texts[A]) < 3


def test_a_shared_prefix_lacks_one_hidden_state(bench: Bench) -> None:
    """That of its last position, which no page keeps; that of the slot's last sequence is not
    taken for it. The heads' keys and values are in the pages."""
    size = bench.executor.spec.page_tokens
    tokens = prompt(size + 9, 7)
    save: dict[str, Any] = {}
    restore: dict[str, Any] = {"freed_slots": (B,)}
    if bench.executor.spec.state_bytes:
        save["state_saves"] = (SaveState(slot=A, position=size, snapshot_id=3),)
        restore["state_restores"] = (RestoreState(slot=B, position=size, snapshot_id=3),)
    own = bench.executor._slots.tables[B]
    bench.prefill(B, prompt(size + 1, 8))  # its last state would fit
    bench.run(chunks=(Chunk(A, 0, tuple(tokens[:size])),), **save)
    bench.run(**restore, tables=(Table(B, 0, own),))
    bench.share(A, B, 1)
    bench.prefill(B, tokens, start=size)
    (guesses,) = bench.decode((B, GREEDY, (), 3))
    assert guesses == bench.expected(B, GREEDY, 3, unknown=[size])
