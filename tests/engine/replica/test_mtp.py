"""Drafts from a model's own head on whole engines: the text is the one without them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from engine.backend.gpu_path import forced_gpu_path
from engine.speculation import accounts
from engine.speculation.speculator import SpeculationOptions, Speculator
from tests.engine.replica.test_drafts import start
from tests.engine.whole import Whole
from tests.mtp_checkpoints import HEAD_FILE, HEAD_KINDS, add_likely_head, models_with_heads
from tests.tiny_models import Kind

NAMES = ("greedy", "sampled", "penalized", "scored", "bound")
TOKENS = 12


@pytest.fixture(scope="module")
def path_of(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function for the directory of a tiny model with a head that is often right."""
    return models_with_heads(add_likely_head, tiny_model, tmp_path_factory.mktemp("heads"))


class Headed:
    """An engine that drafts with the head alone, and what one without drafts answers."""

    def __init__(self, path: Path, **settings: Any) -> None:
        given = {"block_size": 16, "no_ssd": True, "num_blocks": 400} | settings
        self.plain = Whole(path, spec_decode="none", **given)
        self.whole = Whole(path, spec_decode="auto", **given)
        for each in (self.plain, self.whole):
            each.use_grammars()
        start(self.plain, *NAMES, tokens=TOKENS)
        self.plain.run()

    def renew(self, look_ahead: bool = False, **config: Any) -> None:
        options = SpeculationOptions(tokens=3, largest_batch=16, adapts=False)
        speculator = Speculator(options, [], self.whole.executor.spec.guesses)
        self.whole.renew(look_ahead, speculator, **config)

    def check(self, *names: str) -> None:
        """Run requests together, all if none are named, and compare with the other engine."""
        start(self.whole, *(names or NAMES), tokens=TOKENS)
        self.whole.run()
        allowed = 0.0 if self.whole.executor.deterministic else 2e-4
        for name, tokens in self.whole.texts.items():
            assert tokens == self.plain.texts[name], name
            scores = pytest.approx(self.plain.scores(name), abs=allowed, rel=0)
            assert self.whole.scores(name) == scores
        assert set(self.whole.drafts) == {"mtp"}
        assert self.whole.drafts["mtp"].drafted > self.whole.drafts["mtp"].accepted > 10


@pytest.fixture(scope="module")
def headed(path_of: Callable[[Kind], Path]) -> Callable[..., Headed]:
    """Return a function that makes an engine once of each kind."""
    return cache(lambda kind, **settings: Headed(path_of(kind), **settings))


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_texts_are_those_without_a_head(headed: Callable[..., Headed], kind: Kind) -> None:
    """Greedy, sampled, penalized, with scores and grammars, all in one batch; and some again, when
    their prompts are in blocks. The KV cache of one has 8 bits."""
    engine = headed(kind, **({"kv_bits": 8, "kv_group_size": 16} if kind == "mimo" else {}))
    engine.renew()
    engine.check()
    engine.check("greedy", "sampled")


@pytest.mark.usefixtures("nothing_reserved")
def test_sequences_that_lose_their_slots_go_on_as_without_a_head(
    headed: Callable[..., Headed],
) -> None:
    engine = headed("qwen3_next")
    limit = engine.whole.replica.scheduler.config
    engine.renew(limit_bytes=2 * limit.page_bytes + limit.gather_bytes([2]) + 3 * limit.state_bytes)
    engine.check()
    assert engine.whole.scheduler.stats().preemptions_total


def test_texts_on_the_path_of_a_gpu_are_those_without_a_head(
    path_of: Callable[[Kind], Path],
) -> None:
    path = path_of("glm4_moe")
    with forced_gpu_path():
        engine = Headed(path)
        engine.renew(look_ahead=True)
        engine.check()


def test_auto_drafts_with_the_head(
    headed: Callable[..., Headed], monkeypatch: pytest.MonkeyPatch
) -> None:
    # To a tiny model a head's first guesses may cost more than a short request may lose.
    for name in ("EARLY_STEPS", "MAX_STEPS", "FIRST_STEPS"):
        monkeypatch.setattr(accounts, name, 1000.0)
    engine = headed("glm4_moe")
    engine.whole.renew(look_ahead=False)
    start(engine.whole, "greedy", "sampled", tokens=TOKENS)
    engine.whole.run()
    assert engine.whole.texts == {name: engine.plain.texts[name] for name in engine.whole.texts}
    assert engine.whole.drafts["mtp"].drafted > 0


def test_blocks_of_engines_with_and_without_a_head_are_not_mixed_up(
    headed: Callable[..., Headed],
) -> None:
    engine = headed("glm4_moe")
    ours, theirs = engine.whole, engine.plain
    assert ours.replica.namespace != theirs.replica.namespace
    assert ours.executor.spec.token_bytes * 4 == theirs.executor.spec.token_bytes * 5


def test_a_head_that_cannot_be_used_is_left_out_and_the_log_says_so(
    path_of: Callable[[Kind], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = shutil.copytree(path_of("mimo"), tmp_path / "model")
    weights = dict(mx.load(str(path / HEAD_FILE)).items())
    weights.pop("model.mtp_layers.0.mlp.up_proj.weight")
    mx.save_safetensors(str(path / HEAD_FILE), weights)
    whole = Whole(path, spec_decode="auto", no_ssd=True, num_blocks=50)
    assert "ignored the model's head for multi-token prediction: " in caplog.text
    assert len(whole.serve("greedy", [5, 6, 7], 5)) == 5 and not whole.executor.spec.guesses
