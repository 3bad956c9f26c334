from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from engine.mtp.head import MTPHead, embed, last_layer
from engine.mtp.weights import HeadUnusable, head_files, load_head
from tests.engine.mtp.reference import ReferenceHead
from tests.mtp_checkpoints import HEAD_FILE, HEAD_KINDS, add_head, prefix_of
from tests.tiny_models import Kind

TOKENS = mx.array([[5, 9, 200, 31, 7, 118, 64, 3, 250, 12, 90]])


@pytest.fixture
def checkpoint(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[[Kind], Path]:
    """Return a function that copies a tiny model, so that files can be added."""
    return lambda kind: shutil.copytree(tiny_model(kind), tmp_path / kind)


def has_groups(name: str, module: nn.Module) -> bool:
    """Return whether ``module`` can have codes in groups of 32."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def hidden_states(count: int) -> mx.array:
    return mx.random.normal((1, count, 64), key=mx.random.key(3))


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_head_computes_what_a_plain_implementation_does(
    checkpoint: Callable[[Kind], Path], kind: Kind
) -> None:
    """In one pass, and in pieces of several tokens and of one."""
    path = checkpoint(kind)
    weights = add_head(kind, path)
    model, config = load_model(path)
    head = load_head(model, head_files(model, path))
    hidden, embedded = hidden_states(TOKENS.size), embed(model, TOKENS)
    cache = KVCache()
    found = []
    for start, end in ((0, 5), (5, 10), (10, 11)):
        found.append(head(embedded[:, start:end], hidden[:, start:end], cache))
    whole = head(embedded, hidden, KVCache())
    expected = ReferenceHead(kind, config, weights)(np.array(embedded[0]), np.array(hidden[0]))
    np.testing.assert_allclose(np.array(whole[0]), expected, atol=2e-4)
    np.testing.assert_allclose(np.array(mx.concatenate(found, axis=1)[0]), expected, atol=2e-4)
    assert expected.std() > 0.1
    assert last_layer(model, whole).shape == (1, TOKENS.size, config["vocab_size"])


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_the_last_layer_is_the_models_own(tiny_model: Callable[..., Path], kind: Kind) -> None:
    model, _ = load_model(tiny_model(kind))
    logits = last_layer(model, model.model(TOKENS))
    assert mx.array_equal(logits, model(TOKENS)).item()


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_head_with_codes_computes_with_them(
    checkpoint: Callable[[Kind], Path], kind: Kind
) -> None:
    """As a converted checkpoint has them: experts are joined, and norms are whole."""
    path = checkpoint(kind)
    add_head(kind, path)
    model, config = load_model(path)
    plain = load_head(model, head_files(model, path))
    nn.quantize(plain, 32, 8, class_predicate=has_groups)
    names = {value: key for key, value in plain.kind.parts.items()}
    prefix = prefix_of(kind, config)
    stored = {}
    for name, weight in tree_flatten(plain.parameters()):
        part, _, end = name.rpartition(".")
        own = next((theirs for theirs, ours in names.items() if ours == part), None)
        layer = plain.kind.block + name.removeprefix("layer.")
        stored[prefix + (layer if own is None else f"{own}.{end}")] = weight
    mx.save_safetensors(str(path / HEAD_FILE), stored)
    found = load_head(model, head_files(model, path))
    hidden, embedded = hidden_states(TOKENS.size), embed(model, TOKENS)
    ours, theirs = (each(embedded, hidden, KVCache()) for each in (found, plain))
    assert any(type(module) is nn.QuantizedLinear for module in found.modules())
    assert mx.array_equal(ours, theirs).item()


def test_a_head_in_fp8_is_widened(checkpoint: Callable[[Kind], Path]) -> None:
    """As DeepSeek publishes its models: all matrices of the layer, with a scale for each block."""
    path = checkpoint("deepseek_v3")
    weights = add_head("deepseek_v3", path)
    model, config = load_model(path)
    stored, values = {}, dict(weights)
    for name, weight in weights.items():
        stored[name] = weight
        if "_proj." in name and "eh_proj" not in name:
            stored[name] = mx.to_fp8(weight * 2)
            stored[name.replace("weight", "weight_scale_inv")] = mx.array([[0.5]])
            values[name] = mx.from_fp8(stored[name], dtype=mx.float32) / 2
    mx.save_safetensors(str(path / HEAD_FILE), stored)
    head = load_head(model, head_files(model, path))
    head.set_dtype(mx.float32)
    hidden, embedded = hidden_states(TOKENS.size), embed(model, TOKENS)
    found = head(embedded, hidden, KVCache())
    reference = ReferenceHead("deepseek_v3", config, values)
    expected = reference(np.array(embedded[0]), np.array(hidden[0]))
    np.testing.assert_allclose(np.array(found[0]), expected, atol=2e-4)


def test_only_the_heads_weights_are_read(checkpoint: Callable[[Kind], Path]) -> None:
    """The copies of embedding and last layer are not, though they are in the same file."""
    path = checkpoint("glm4_moe")
    weights = add_head("glm4_moe", path)
    copies = [name for name in weights if name.endswith(("embed_tokens.weight", "head.weight"))]
    for name in copies:  # so large that what other tests left does not matter
        weights[name] = mx.zeros((16_384, weights[name].shape[1]))
    mx.save_safetensors(str(path / HEAD_FILE), weights)
    model, _ = load_model(path)
    gc.collect()
    before = mx.get_active_memory()
    head = load_head(model, head_files(model, path))
    read = mx.get_active_memory() - before
    own = sum(weight.nbytes for _, weight in tree_flatten(head.parameters()))
    assert len(copies) == 2 and own < weights[copies[0]].nbytes / 8
    assert own <= read < own + weights[copies[0]].nbytes / 8


@pytest.mark.parametrize("kind", ["llama", "mimo"])
def test_a_checkpoint_without_a_head_has_no_files_of_one(
    tiny_model: Callable[..., Path], kind: Kind
) -> None:
    path = tiny_model(kind)
    assert head_files(load_model(path)[0], path) == []


def test_a_head_that_lacks_weights_is_refused_in_one_line(
    checkpoint: Callable[[Kind], Path],
) -> None:
    path = checkpoint("mimo")
    weights = add_head("mimo", path)
    del weights["model.mtp_layers.0.self_attn.q_proj.weight"]
    mx.save_safetensors(str(path / HEAD_FILE), weights)
    model, _ = load_model(path)
    with pytest.raises(HeadUnusable, match="q_proj") as caught:
        load_head(model, head_files(model, path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["glm4_moe", "mimo"])
def test_a_head_among_the_models_own_weights_is_found(
    checkpoint: Callable[[Kind], Path], kind: Kind
) -> None:
    """Where mlx-lm leaves it out when it loads the model."""
    path = checkpoint(kind)
    add_head(kind, path, file="model-head.safetensors")
    (path / "broken.safetensors").write_bytes(b"not what its name says")
    model, _ = load_model(path)
    files = head_files(model, path)
    assert [file.name for file in files] == ["model-head.safetensors"]
    assert isinstance(load_head(model, files), MTPHead)
    assert json.loads((path / "config.json").read_text())["model_type"] == kind
