"""Decoders in NumPy against the same models in MLX, by logits."""

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE
from mlx_lm.tuner.utils import linear_to_lora_layers

from engine import device
from engine.batch import ragged
from engine.batch.ragged import Row
from engine.cache.layout import probe_layout
from engine.cpu.attention.host_batch import HostBatch
from engine.cpu.decoder import decoder
from engine.cpu.decoder.decoder import DecoderBatch
from engine.cpu.decoder.rotary import Rotary
from engine.cpu.onnx import graphs
from engine.cpu.onnx.graphs import Unsupported
from engine.executor.batched import BatchedExecutor
from engine.proving.choose import choose_executor
from engine.proving.proof import NotBatchable, proof_references, prove
from tests.engine.conftest import Wrap
from tests.engine.cpu.attention.paged import host_slots
from zoo.build import build
from zoo.configs import config

pytestmark = pytest.mark.skipif(mx.default_device() == mx.gpu, reason="for CPUs")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "tied, pairs of neighbours": ("llama", {"tie_word_embeddings": True, "rope_traditional": True}),
    "biases": ("llama", {"attention_bias": True}),
    "llama 3's positions": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "windows": (
        "llama",
        {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "layers without positions": ("smollm3", {}),
    "half of each head rotated": ("phi3", {"partial_rotary_factor": 0.5}),
    "multipliers": ("granite", {}),
    "norms after": ("olmo2", {}),
    "scores within bounds": ("gemma2", {"attn_logit_softcapping": 2.0}),
    "two kinds of positions": ("gemma3_text", {}),
    "experts": ("qwen3_moe", {"norm_topk_prob": True}),
    "shares of less than one": ("qwen3_moe", {"norm_topk_prob": False}),
    "mixtral": ("mixtral", {}),
    "sinks, experts with biases": ("gpt_oss", {}),
}


@pytest.fixture(autouse=True)
def _ours_in_place() -> None:
    ragged.install()


def tiny(name: str, **changes: Any) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config(name) | changes))
    model.update(tree_map(with_noise, model.parameters()))
    mx.eval(model.parameters())
    return model


def with_noise(weight: mx.array) -> mx.array:
    """Change norms and biases, which start as ones and zeros and would hide mistakes."""
    plain = weight.ndim == 1 or not weight.any()
    return weight + 0.1 * mx.random.normal(weight.shape) if plain else weight


def of_kind(kind: str) -> Any:
    name, changes = KINDS[kind]
    return tiny(name, **changes)


def bound(model: Any) -> type[DecoderBatch]:
    found = decoder.bind(model, probe_layout(model))
    assert found is not None
    return found


def prompt(seed: int, length: int) -> list[int]:
    return mx.random.randint(3, 90, (length,), key=mx.random.key(seed)).tolist()


@pytest.mark.parametrize("what", KINDS)
def test_uneven_rows_and_then_a_token_each_give_the_logits_of_mlx(what: str) -> None:
    model = of_kind(what)
    layout, kind = probe_layout(model), bound(model)
    slots = host_slots(layout, 5, 160, unpacked=[3])
    prompts = [prompt(i, length) for i, length in enumerate((97, 1, 38))]
    caches = [make_prompt_cache(model) for _ in prompts]
    alone = [model(mx.array([p]), cache=c)[0] for p, c in zip(prompts, caches, strict=True)]

    rows = [Row(slot, 0, len(p)) for slot, p in zip((0, 3, 4), prompts, strict=True)]
    padded = mx.array([p + [0] * (97 - len(p)) for p in prompts])
    together = kind(layout, slots, rows).logits(model, padded)
    for logits, expected in zip(together, alone, strict=True):
        assert mx.allclose(logits[: len(expected)], expected, rtol=1e-3, atol=1e-3)

    for step in range(3):
        rows = [Row(r.slot, r.start + r.width, r.start + r.width + 1) for r in rows]
        tokens = [[5 + step], [6], [7]]
        together = kind(layout, slots, rows).logits(model, mx.array(tokens))
        for logits, token, cache in zip(together, tokens, caches, strict=True):
            assert mx.allclose(logits, model(mx.array([token]), cache=cache)[0], 1e-3, 1e-3)


@pytest.mark.parametrize(
    ("name", "in_mlx"),
    [
        ("qwen3", False),
        ("windows", False),
        ("windows", True),
        ("scores within bounds", False),
        ("sinks, experts with biases", False),
        ("sinks, experts with biases", True),
    ],
)
def test_rows_of_few_tokens_attend_together_and_give_the_logits_of_mlx(
    name: str, in_mlx: bool
) -> None:
    """As rows with drafts do; their windows are shorter than the texts."""
    model = of_kind(name)
    layout = probe_layout(model)
    kind: type[HostBatch] = HostBatch if in_mlx else bound(model)
    slots = host_slots(layout, 6, 160, unpacked=(1, 5))
    rows = [Row(slot, 0, 0) for slot in (0, 1, 4, 5)]
    caches = [make_prompt_cache(model) for _ in rows]
    for widths in ((90, 1, 38, 5), (5, 1, 17, 4), (1, 1, 2, 16), (3, 3, 3, 3)):
        rows = [Row(row.slot, row.end, row.end + w) for row, w in zip(rows, widths, strict=True)]
        tokens = [prompt(i, width) for i, width in enumerate(widths)]
        padded = mx.array([each + [0] * (max(widths) - len(each)) for each in tokens])
        batch = kind(layout, slots, rows)
        assert batch.by_token == (max(widths) < 90)
        for logits, given, cache in zip(batch.logits(model, padded), tokens, caches, strict=True):
            expected = model(mx.array([given]), cache=cache)[0]
            assert mx.allclose(logits[: len(given)], expected, rtol=1e-3, atol=1e-3)


def test_the_proof_notices_a_wrong_position(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    layout, kind, tables = probe_layout(model), bound(model), Rotary.tables
    monkeypatch.setattr(Rotary, "tables", lambda self, at: tables(self, at // 2))
    with pytest.raises(NotBatchable):
        prove(model, layout, kind, proof_references(model, layout, 90))


def test_the_proof_notices_a_stale_row(wrap: Wrap) -> None:
    model = tiny("llama")
    layout, kind = probe_layout(model), bound(model)

    @wrap(DecoderBatch, "store")
    def late(store: Any, batch: DecoderBatch, layer: int, keys: Any, values: Any) -> None:
        store(batch, layer, np.roll(keys, 1, axis=0) if batch.decoding else keys, values)

    with pytest.raises(NotBatchable):
        prove(model, layout, kind, proof_references(model, layout, 90))


def test_a_pass_without_logits_stores_the_same_kv() -> None:
    model = of_kind("windows")
    layout, kind, row = probe_layout(model), bound(model), [Row(0, 0, 70)]
    kept = []
    for silent in (False, True):
        slots = host_slots(layout, 1, 80)
        kind(layout, slots, row).logits(model, mx.array([prompt(1, 70)]), kv_only=silent)
        arrays = range(len(layout.arrays))
        kept.append([np.array(slots.pages.read(n, slots.tables[0], 70).array) for n in arrays])
    assert all(np.array_equal(a, b) and a.any() for a, b in zip(*kept, strict=True))


@pytest.mark.parametrize(("bits", "in_file"), [(None, False), (None, True), (4, True)])
@pytest.mark.parametrize(
    "what",
    [
        *("llama", "tied, pairs of neighbours", "half of each head rotated"),
        *("experts", "sinks, experts with biases"),
    ],
)
def test_weights_are_kept_once_when_the_model_has_given_them_up(
    what: str, bits: int | None, in_file: bool, tmp_path: Path
) -> None:
    """Rows of the embedding are looked up, in its file if that is known."""
    model = of_kind(what)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), dict(tree_flatten(model.parameters())))
    layout, kind = probe_layout(model), bound(model)
    before = nbytes(model)
    slots, rows, tokens = host_slots(layout, 1, 16), [Row(0, 0, 2)], mx.array([[5, 6]])
    logits = kind(layout, slots, rows).logits(model, tokens)
    kind.release_weights([file] if in_file else [])
    assert bool(model.model.embed_tokens.parameters()) != in_file
    others = nbytes(model) - nbytes(model.model.embed_tokens)
    assert others < before / (10 if bits is None else 2), "scales stay"
    assert mx.array_equal(kind(layout, slots, rows).logits(model, tokens), logits)


def nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def test_without_onnx_runtime_mlx_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    monkeypatch.setattr(graphs, "unusable", lambda: "there is no module named 'onnxruntime'")
    (only,) = device.batch_classes(model, probe_layout(model))
    assert only is HostBatch
    assert "no module named 'onnxruntime'" in caplog.text


def test_models_and_layers_of_another_kind_are_left_to_mlx() -> None:
    others = [build(name) for name in ("olmoe", "deepseek_v3", "mamba")]
    adapted, half = tiny("llama"), tiny("llama")
    adapted.model.layers[1].mlp.up_proj = nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    half.set_dtype(mx.float16)
    for model in (*others, adapted, half):
        assert decoder.bind(model, probe_layout(model)) is None, type(model)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_adapters_over_some_layers_give_the_logits_of_mlx(name: str, bits: int | None) -> None:
    """Over two of three layers with one input, and over experts."""
    model = tiny(name)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    tokens = mx.array([prompt(1, 40)])
    plain = model(tokens)
    keys = {"self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.router"}
    keys |= {f"mlp.experts.{part}_proj" for part in ("gate", "down")}
    linear_to_lora_layers(model, 3, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys})
    model.update(tree_map(with_noise, model.parameters()))
    model.eval()
    expected, layout = model(tokens), probe_layout(model)
    kind, slots = bound(model), host_slots(layout, 1, 48)
    found = kind(layout, slots, [Row(0, 0, 40)]).logits(model, tokens)
    assert not mx.allclose(plain, expected, 1e-1, 1e-1)
    assert mx.allclose(found, expected, 1e-3, 1e-3)
    kind.release_weights()
    again = kind(layout, slots, [Row(0, 0, 40)]).logits(model, tokens)
    assert mx.array_equal(again, found)


class Odd(nn.Module):
    """Positions that are not a rotation."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        return x * (1 + offset)


def test_positions_of_another_kind_are_left_to_mlx() -> None:
    with pytest.raises(Unsupported):
        Rotary(Odd(), 16)
    assert not Rotary(nn.RoPE(16), 16).same_as(nn.RoPE(16, base=500_000))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("turned", [16, 8])
def test_far_positions_are_rotated_like_near_ones(traditional: bool, turned: int) -> None:
    rope = nn.RoPE(turned, traditional=traditional)
    rotary = Rotary(rope, 16)
    assert (rotary.turned, rotary.neighbours) == (turned, traditional)
    (cosines,), (sines,) = rotary.tables(np.array([9_999]))
    x = np.zeros(16, np.float32)
    x[0] = 1
    expected = np.asarray(rope(mx.array(x).reshape(1, 1, 1, 16), offset=9_999)).reshape(16)
    assert np.allclose(
        [cosines[0], sines[0]],
        [expected[0], expected[1 if traditional else turned // 2]],
        atol=1e-4,
    )


@pytest.mark.parametrize("context", [1000, 4500])
def test_no_table_is_longer_than_the_context_by_which_dynamic_ntk_rotates(context: int) -> None:
    rope = DynamicNTKScalingRoPE(16, context, traditional=False, base=10_000.0, factor=2.0)
    rotary = Rotary(rope, 16)
    before = [each.copy() for each in rotary.tables(np.arange(900))]
    after = rotary.tables(np.arange(context))
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old, new[:900])
    x = np.eye(1, 16, dtype=np.float32)
    for at in (1, context - 1):
        expected = np.asarray(rope(mx.array(x).reshape(1, 1, 1, 16), offset=at)).reshape(16)
        assert np.allclose([after[0][at][0], after[1][at][0]], expected[[0, 8]], atol=1e-4)


def test_the_decoder_is_chosen_on_the_cpu_unless_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("qwen3")
    classes = device.batch_classes(model, probe_layout(model))
    assert issubclass(classes[0], DecoderBatch) and classes[1:] == [HostBatch]
    choice = choose_executor(model, 90, 16)
    assert isinstance(choice.executor, BatchedExecutor) and not choice.reason
    assert issubclass(choice.executor.batch_class, DecoderBatch)
    monkeypatch.setenv(device.HOST_VARIABLE, "0")
    (stock,) = device.batch_classes(model, probe_layout(model))
    assert not issubclass(stock, HostBatch)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_with_codes_made_fp32_a_row_has_the_same_bits_alone_and_among_others(name: str) -> None:
    """As with the weights of a model in fp32; experts included."""
    model = tiny(name)
    nn.quantize(model, 32, 4)
    device.move_layers(model, "auto", 1 << 40)
    bound = decoder.bind(model, probe_layout(model))
    assert bound is not None and bound.decoder.same_bits == "any"
    random = np.random.default_rng(0)
    for stretch in bound.decoder.stretches:
        given = [random.standard_normal(x.shape, np.float32) for x in stretch.zeros(130)]
        among = stretch(*given)
        for rows in (1, 3, 129):
            alone = stretch(*(x[1 : 1 + rows] for x in given))
            for found, expected in zip(alone, among, strict=True):
                assert np.array_equal(found, expected[1 : 1 + rows]), rows
