"""Attention in tiles: the same bits alone and among others, and mlx-lm's results."""

import importlib
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from engine.batch import ragged
from engine.batch.ragged import Row
from engine.cache.layout import probe_layout
from engine.cpu.decoder import decoder
from engine.cpu.layers import Layers
from engine.plan import Decode, Slot
from engine.scheduler import memory
from tests.engine.cpu.attention.paged import host_slots
from tests.engine.whole import Whole
from tests.tiny_models import VOCAB_SIZE
from zoo.build import build
from zoo.configs import config

pytestmark = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="for CPUs")

LENGTH = 300
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "groups of queries": ("llama", {}),
    "a query for each head of keys": ("llama", {"num_key_value_heads": 4}),
    "scores within bounds": ("gemma2", {"attn_logit_softcapping": 2.0}),
    "windows": ("gemma3_text", {}),
    "sinks": ("gpt_oss", {}),
    "experts": ("qwen3_moe", {}),
    "4 bits": ("llama", {}),
    "4 bits, activations in 8": ("llama", {}),
}


@pytest.mark.parametrize("what", KINDS)
def test_a_token_has_the_same_bits_whatever_chunk_or_batch_it_is_in(what: str) -> None:
    name, changes = KINDS[what]
    ragged.install()
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config(name) | changes))
    if "4 bits" in what:
        nn.quantize(model, group_size=32, bits=4)
        Layers(model, "fast" if "8" in what else "compact", dense=False)
    mx.eval(model.parameters())
    layout = probe_layout(model)
    kind = decoder.bind(model, layout)
    assert kind is not None and kind.make_deterministic()
    slots = host_slots(layout, 8, LENGTH, unpacked=(1, 2, 5))
    texts = np.random.default_rng(0).integers(3, 90, (8, LENGTH))

    def computed(number: int, slot: Slot, chunks: Sequence[int]) -> Any:
        ends = np.cumsum(chunks).tolist()
        parts = []
        for start, end in zip([0, *ends], ends, strict=False):
            tokens = mx.array(texts[number][None, start:end])
            parts.append(kind(layout, slots, [Row(slot, start, end)]).logits(model, tokens)[0])
        return np.concatenate(parts)

    alone = [computed(number, number, [LENGTH - number]) for number in range(8)]
    theirs = model(mx.array(texts[:1]), cache=make_prompt_cache(model))[0]
    near = 0.2 if "activations in 8" in what else 1e-3
    assert np.allclose(alone[0], theirs, near, near)
    for chunks in ([*[1] * 8, 110, *[1] * 30], [2, 7, 130, 161], [64, 200, 36]):
        assert np.array_equal(computed(0, 0, chunks), alone[0][: sum(chunks)])
    ends = [LENGTH - 37 * number - 1 for number in range(8)]
    rows = [Row(number, end, end + 1) for number, end in enumerate(ends)]
    tokens = mx.array([[int(texts[number][end])] for number, end in enumerate(ends)])
    together = np.asarray(kind(layout, slots, rows).logits(model, tokens))[:, 0]
    for number, end in enumerate(ends):
        assert np.array_equal(together[number], alone[number][end])


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_preempted_or_cached_sequence_has_the_bits_of_one_alone(
    llama: Path, kv_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows are unpacked, and some are not."""
    monkeypatch.setattr(memory, "RESERVED_TOKENS", 4)
    pick = random.Random(3)
    shared = [pick.randrange(3, VOCAB_SIZE) for _ in range(100)]
    requests = {}
    for number in range(12):
        own = [pick.randrange(3, VOCAB_SIZE) for _ in range(pick.randrange(1, 60))]
        requests[f"r{number}"] = shared[: pick.choice([0, 40, 100])] + own, pick.randrange(20, 70)

    def scores(whole: Whole, names: Sequence[str]) -> set[bytes]:
        """Return the logits of every token of these requests, sent at once."""
        seen: set[bytes] = set()

        def observe(_: Sequence[Decode], logits: mx.array) -> None:
            seen.update(row.tobytes() for row in np.asarray(logits))

        whole.executor.logits_observer = observe
        for name in names:
            whole.submit(name, *requests[name])
        whole.run()
        return seen

    roomy = Whole(llama, kv_bits=kv_bits)
    alone = set()
    for name in requests:
        roomy.renew(look_ahead=False)  # nothing is cached
        alone |= scores(roomy, [name])
    options = {"num_blocks": 40, "max_batch_size": 16, "prefill_chunk_tokens": 24}
    pressed = Whole(llama, kv_bits=kv_bits, **options)
    assert scores(pressed, list(requests)) == alone
    assert pressed.scheduler.stats().preemptions_total > 0
    assert scores(pressed, ["r3", "r4"]) <= alone  # with prefixes from memory


def test_a_model_that_mlx_computes_cannot_be_deterministic(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        Whole(tiny_model("mamba"))
    assert "a token's scores may depend on the batch" in caplog.text


def test_experts_with_codes_cannot_be_deterministic() -> None:
    model = build("qwen3_moe")
    nn.quantize(model, group_size=32, bits=4)
    Layers(model, "compact", dense=False)
    kind = decoder.bind(model, probe_layout(model))
    assert kind is not None and not kind.make_deterministic() and not kind.deterministic
