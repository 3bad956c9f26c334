"""Writes ``references.json``: what transformers computes, on PyTorch, with the tiny checkpoints.

    python -m tests.engine.embedding.make_references

It needs an environment of its own with torch, transformers, tokenizers and safetensors.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch
import transformers

from tests.text_models import (
    KINDS,
    REFERENCES,
    VOCAB_SIZE,
    Kind,
    dense_weight,
    make_tokenizer,
    weights,
)

LENGTHS = (1, 2, 7, 33, 130, 512)


def texts(name: str) -> list[list[int]]:
    random = np.random.default_rng(len(name))
    return [random.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def reference(name: str, kind: Kind) -> dict[str, Any]:
    config = {key: value for key, value in kind.config.items() if key != "id2label"}
    labels = {"num_labels": 1} if "SequenceClassification" in kind.architecture else {}
    loaded = transformers.AutoConfig.for_model(
        config.pop("model_type"), **config, **labels, attn_implementation="eager"
    )
    model = getattr(transformers, kind.architecture)(loaded).eval()
    shapes = {
        key: list(value.shape)
        for key, value in model.state_dict().items()
        if not key.endswith(("position_ids", "token_type_ids", "lm_head.weight"))
    }
    given = {key: torch.tensor(value) for key, value in weights(kind, shapes).items()}
    missing = model.load_state_dict(given, strict=False).missing_keys
    assert all(key.endswith("lm_head.weight") for key in missing), missing
    if missing:
        model.tie_weights()
    rows = []
    second = [length // 2 if kind.ranks and length > 2 else 0 for length in LENGTHS]
    for ids, start in zip(texts(name), second, strict=True):
        rows.append(_row(kind, model, ids, start).astype("<f4"))
    return {
        "shapes": shapes,
        "texts": texts(name),
        "second_starts": second,
        "rows": base64.b64encode(np.stack(rows).tobytes()).decode(),
        "width": len(rows[0]),
    }


@torch.no_grad()  # type: ignore[untyped-decorator]
def _row(kind: Kind, model: Any, ids: list[int], start: int) -> np.ndarray[Any, Any]:
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    if kind.config.get("type_vocab_size") == 2 and start:
        inputs["token_type_ids"] = (torch.arange(len(ids)) >= start).long()[None]
    found = model(**inputs)
    if kind.architecture.endswith("CausalLM"):
        yes, no = found.logits[
            0, -1, [make_tokenizer("decoder").token_to_id(w) for w in ("yes", "no")]
        ]
        return np.array([torch.sigmoid(yes - no)])
    if kind.ranks:
        return torch.sigmoid(found.logits[0]).numpy()
    states = found.last_hidden_state[0]
    vector = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}[kind.pooling]
    for number, _ in enumerate(kind.dense):
        vector = torch.tensor(dense_weight(kind, number)) @ vector
    if kind.normalizes:
        vector = torch.nn.functional.normalize(vector, dim=0)
    return np.asarray(vector)


if __name__ == "__main__":
    found = {name: reference(name, kind) for name, kind in KINDS.items()}
    REFERENCES.write_text(json.dumps(found, separators=(",", ":")) + "\n")
