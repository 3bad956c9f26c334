"""The random encoder that is compared with other servers: the same weights in both formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.engine import bert


def test_the_gguf_has_the_weights_and_words_of_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = {"LAYERS": 2, "HIDDEN": 24, "WIDE": 48, "HEADS": 2, "POSITIONS": 16, "WORDS": 30}
    for name, size in small.items():
        monkeypatch.setattr(bert, name, size)
    folder = bert.make_base(tmp_path / "base")
    bert.write_gguf(folder, tmp_path / "base.gguf")
    tensors: dict[str, mx.array]
    facts: dict[str, Any]
    tensors, facts = mx.load(str(tmp_path / "base.gguf"), return_metadata=True)
    weights = load_file(folder / "model.safetensors")
    assert len(tensors) == len(weights)
    for ours, theirs in (
        ("embeddings.position_embeddings.weight", "position_embd.weight"),
        ("encoder.layer.1.attention.self.value.bias", "blk.1.attn_v.bias"),
        ("encoder.layer.1.output.dense.weight", "blk.1.ffn_down.weight"),
        ("encoder.layer.0.output.LayerNorm.weight", "blk.0.layer_output_norm.weight"),
    ):
        assert np.array_equal(np.array(tensors[theirs]), weights[ours]), ours
    assert facts["general.architecture"] == "bert"
    assert facts["bert.block_count"].item() == 2 and not facts["bert.attention.causal"].item()
    assert facts["tokenizer.ggml.tokens"][:2] == ["[PAD]", "\u2581w0"]
