"""What a checkpoint's files say of its task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.embedding.build import load_text_model
from engine.embedding.checkpoint import read_checkpoint, task_of
from engine.model.errors import ModelUnavailable
from tests.text_models import make_text_model
from tests.tiny_models import make_tiny


def test_a_chat_model_generates(tmp_path: Path) -> None:
    assert task_of(make_tiny("llama", tmp_path / "model")) == "generate"


def test_a_classifier_of_several_classes_is_refused(tmp_path: Path) -> None:
    path = make_text_model("bert_reranker", tmp_path / "model", id2label={"0": "no", "1": "yes"})
    with pytest.raises(ModelUnavailable, match="2 classes"):
        task_of(path)


def test_what_is_said_nowhere_has_a_default(tmp_path: Path) -> None:
    path = make_text_model("bert_reranker", tmp_path / "model")
    found = read_checkpoint(path)
    assert (found.pooling, found.normalizes, found.causal) == ("mean", True, False)
    found = read_checkpoint(make_tiny("qwen3", tmp_path / "chat"))
    assert (found.pooling, found.normalizes, found.causal) == ("lasttoken", True, True)


def test_positions_of_roberta_begin_after_the_padding(tmp_path: Path) -> None:
    path = make_text_model("xlm_roberta", tmp_path / "model")
    (path / "tokenizer_config.json").write_text("{}")
    assert read_checkpoint(path).max_tokens == 520


def test_the_limit_of_sentence_transformers_holds(tmp_path: Path) -> None:
    path = make_text_model("bert", tmp_path / "model")
    modules = json.loads((path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (path / "0_Transformer").mkdir()
    (path / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 99}')
    (path / "modules.json").write_text(json.dumps(modules))
    assert read_checkpoint(path).max_tokens == 99


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("modules.json", "{}", "is not a list of modules"),
        ("modules.json", "[", "cannot read"),
        ("modules.json", [{"type": "x.CNN", "path": ""}], "a module CNN"),
        ("1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}, "pools by"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False},
         "excludes its prompts"),
        ("config.json", {"model_type": "bert", "position_embedding_type": "relative_key"},
         "relative_key"),
        ("config.json", {"model_type": "bert"}, "num_hidden_layers"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_said(
    file: str, content: Any, reason: str, tmp_path: Path
) -> None:
    path = make_text_model("bert", tmp_path / "model")
    text = content if isinstance(content, str) else json.dumps(content)
    (path / file).write_text(text)
    with pytest.raises(ModelUnavailable, match=reason):
        load_text_model(path, "embed", cpu_precision="auto", memory_bytes=1 << 33)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    path = make_text_model("bert", tmp_path / "model", num_hidden_layers=4)
    with pytest.raises(ModelUnavailable, match=r"layers\.3.* is missing"):
        load_text_model(path, "embed", cpu_precision="auto", memory_bytes=1 << 33)


def test_other_prompts_are_another_model(tmp_path: Path) -> None:
    path = make_text_model("bert", tmp_path / "model")
    before = read_checkpoint(path).fingerprint
    (path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    assert read_checkpoint(path).fingerprint != before
