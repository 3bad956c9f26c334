"""Prefixes of models with recurrent layers, through a whole replica.

A reused prefix gives the same logits as a computed one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from engine.plan import Decode
from engine.proving.oracle import logits_distance
from engine.scheduler.planning.plan_builder import PlanBuilder
from tests.engine.conftest import Wrap
from tests.engine.whole import Whole, random_tokens

KINDS = ("mamba", "qwen3_next")
"""Without and with keys and values beside the state."""
BLOCK, PAGE = 16, 64
TOLERANCE = 1e-4


class Observed(Whole):
    """Compares the logits of each decode with mlx-lm's for the same sequence in one pass."""

    def __init__(self, path: Path, **settings: object) -> None:
        super().__init__(path, **settings)
        self.executor.logits_observer = self._observe
        self.forget()

    def forget(self) -> None:
        """Drop the logits recorded so far."""
        self._ours: dict[str, list[mx.array]] = {}
        self._prompts: dict[str, list[int]] = {}

    def submit(self, name: str, prompt: list[int], max_tokens: int, **fields: object) -> None:
        super().submit(name, prompt, max_tokens, **fields)
        self._prompts[name] = prompt
        self._ours[name] = []

    @property
    def unit(self) -> int:
        """Snapshots are taken at multiples of this position."""
        return PAGE if self.scheduler.config.keeps_kv else BLOCK

    def reused(self, name: str) -> int:
        return self.usage(name).cached_ram_tokens

    def assert_right(self) -> None:
        for name, prompt in self._prompts.items():
            said = self.texts[name]
            assert len(self._ours[name]) >= len(said) > 0
            cache: Any = make_prompt_cache(self.loaded.model)
            tokens = mx.array([[*prompt, *said[:-1]]])
            theirs = self.loaded.model(tokens, cache=cache)[0, len(prompt) - 1 :]
            for ours, expected in zip(self._ours[name], theirs, strict=False):
                assert logits_distance(ours, expected) < TOLERANCE, name

    def _observe(self, decodes: Sequence[Decode], logits: mx.array) -> None:
        live = {
            seq.slot: name
            for name, seq in self.scheduler.sequences.live.items()
            if seq.slot is not None
        }
        for decode, row in zip(decodes, logits, strict=True):
            ours = self._ours[live[decode.slot]]
            del ours[decode.output_index :]  # a preempted one does not decode anything twice
            ours.append(row)


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., Path]) -> Callable[[str], Observed]:
    """Return a function that makes an engine once of each kind."""
    return cache(lambda kind: Observed(tiny_model(kind)))


@pytest.fixture(params=KINDS)
def whole(request: pytest.FixtureRequest, engine: Callable[[str], Observed]) -> Observed:
    """A replica that has served other tests, with other prompts."""
    found = engine(request.param)
    found.forget()
    return found


@pytest.mark.parametrize("whole", [*KINDS, "jamba", "nemotron_h"], indirect=True)
def test_a_prompt_continues_from_a_snapshot_as_if_it_were_computed(whole: Observed) -> None:
    prompt = random_tokens(1, 88)
    first = whole.serve("first", prompt)
    assert whole.serve("again", prompt) == first
    whole.serve("longer", [*prompt, *random_tokens(2, 50)])
    assert whole.reused("again") == whole.reused("longer") == 64
    whole.assert_right()


def test_every_turn_computes_its_new_tokens_and_little_more(whole: Observed) -> None:
    history = random_tokens(3, 40)
    for turn in range(3):
        said = whole.serve(f"turn {turn}", history, max_tokens=24)
        if turn:
            known = len(history) - 9
            assert known - whole.reused(f"turn {turn}") <= whole.unit
        history = [*history, *said, *random_tokens(turn, 9)]
    whole.assert_right()


def test_requests_that_arrive_together_compute_their_prefix_once(whole: Observed) -> None:
    prefix = random_tokens(4, 80)
    for number in range(3):
        whole.submit(f"{number}", [*prefix, *random_tokens(number, 10 + number)], 6)
    whole.run()
    assert [whole.reused(f"{number}") >= 64 for number in range(3)] == [False, True, True]
    whole.assert_right()


def test_a_preempted_sequence_continues_from_a_snapshot(whole: Observed, wrap: Wrap) -> None:
    planner = whole.scheduler.planner
    preempted: list[object] = []

    @wrap(planner, "fill")
    def preempt(fill: Callable[..., None], builder: PlanBuilder) -> None:
        seq = whole.scheduler.sequences.live.get("0")
        if not preempted and seq is not None and seq.num_output_tokens == 30:
            preempted.append(seq)
            planner.preempt(seq, builder)
        fill(builder)

    before = whole.scheduler.stats().prefill_tokens_total
    for number in range(3):
        whole.submit(f"{number}", random_tokens(10 + number, 45), 40)
    whole.run()
    assert preempted
    assert whole.scheduler.stats().prefill_tokens_total - before <= 3 * 44 + BLOCK
    whole.assert_right()


@pytest.mark.parametrize("kept", [0, 2])
def test_a_prefix_whose_snapshot_was_evicted_is_computed_again(
    tiny_model: Callable[..., Path], kept: int
) -> None:
    whole = Observed(tiny_model("nemotron_h"), sequence_cache_size=kept)
    for turn in range(2):
        for number in range(2):
            whole.serve(f"{number}, turn {turn}", random_tokens(number, 60), max_tokens=20)
        assert whole.scheduler.stats().kept_states == kept
    assert whole.reused("1, turn 1") == 0
    whole.assert_right()
