"""A checkpoint's task, from the files of sentence-transformers and its architecture."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from engine.model.context import context_length
from engine.model.errors import ModelUnavailable
from shared.model_config import config_int
from shared.wire import Task

Pooling = Literal["cls", "mean", "max", "lasttoken", "weightedmean"]
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert")
"""Types of models that see a whole text at once, and so never generate text."""
_BIDIRECTIONAL = ("use_bidirectional_attention", "is_bidirectional")
_POOLINGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True)
class Dense:
    """A layer after pooling."""

    weights: Path
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, kw_only=True)
class TextCheckpoint:
    """How a checkpoint computes a vector or a score from a text."""

    path: Path
    config: dict[str, Any]
    pooling: Pooling
    dense: tuple[Dense, ...] = ()
    normalizes: bool = True
    prompts: Mapping[str, str]
    default_prompt: str | None = None
    max_tokens: int  # max tokens of a text
    causal: bool  # whether a token attends only to those before it

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def is_encoder(self) -> bool:
        return self.model_type in ENCODERS

    @property
    def fingerprint(self) -> str:
        """Identifies everything that affects vectors, except config and weights."""
        said = (self.pooling, self.normalizes, sorted(self.prompts.items()), self.default_prompt)
        digest = hashlib.sha256(repr(said).encode())
        for layer in self.dense:
            digest.update(layer.activation.encode() + layer.weights.read_bytes())
        return digest.hexdigest()[:16]


def task_of(path: Path) -> Task:
    """Return the task of the model in ``path``, as far as its files tell. Raises `ModelUnavailable`
    for an unsupported model."""
    config = _read(path / "config.json")
    architecture = _architecture(config)
    if architecture.endswith("ForSequenceClassification"):
        if _num_labels(config) != 1:
            raise ModelUnavailable(
                f"the model in {path} classifies texts into {_num_labels(config)} classes; a "
                "reranking model has one"
            )
        return "rerank"
    if (path / "modules.json").is_file() or config.get("model_type") in ENCODERS:
        return "embed"
    return "generate"


def read_checkpoint(path: Path) -> TextCheckpoint:
    """Return the settings from the files in ``path``. Raises `ModelUnavailable` for unsupported
    ones.

    If pooling is not specified, decoders use their last token, encoders use the mean, and vectors
    are normalized.
    """
    config = _read(path / "config.json")
    is_encoder = config.get("model_type") in ENCODERS
    said = _read(path / "config_sentence_transformers.json")
    prompts = {str(k): str(v) for k, v in (said.get("prompts") or {}).items() if isinstance(v, str)}
    default = said.get("default_prompt_name")
    found: dict[str, Any] = {
        "pooling": "mean" if is_encoder else "lasttoken",
        "max_tokens": _max_tokens(path, config),
    }
    if (path / "modules.json").is_file():
        found |= _modules(path, prompts)
    return TextCheckpoint(
        path=path,
        config=config,
        prompts=prompts,
        default_prompt=default if default in prompts else None,
        causal=not is_encoder and not any(config.get(name) for name in _BIDIRECTIONAL),
        **found,
    )


def _modules(path: Path, prompts: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings from ``modules.json``, which lists the steps in order."""
    dense: list[Dense] = []
    found: dict[str, Any] = {"normalizes": False}
    for module in _read_list(path / "modules.json"):
        kind, folder = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        config = _read(path / folder / "config.json") if folder else {}
        if kind == "Transformer":
            limit = _read(path / folder / "sentence_bert_config.json").get("max_seq_length")
            if isinstance(limit, int) and limit > 0:
                found["max_tokens"] = min(limit, _max_tokens(path, _read(path / "config.json")))
        elif kind == "Pooling":
            found["pooling"] = _pooling(config, path)
            if config.get("include_prompt") is False and any(prompts.values()):
                raise ModelUnavailable(
                    f"the model in {path} excludes its prompts from pooling, which is not supported"
                )
        elif kind == "Dense":
            dense.append(_dense(path / folder, config))
        elif kind == "Normalize":
            found["normalizes"] = True
        else:
            raise ModelUnavailable(
                f"the model in {path} has a module {kind or '?'}, which is not supported"
            )
    return found | {"dense": tuple(dense)}


def _pooling(config: Mapping[str, Any], path: Path) -> Pooling:
    name = config.get("pooling_mode")  # in newer checkpoints
    if name in _POOLINGS.values():
        return cast(Pooling, name)
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if len(chosen) == 1 and chosen[0] in _POOLINGS:
        return _POOLINGS[chosen[0]]
    what = name or ", ".join(chosen) or "none"
    raise ModelUnavailable(f"the model in {path} pools by {what}, which is not supported")


def _dense(folder: Path, config: Mapping[str, Any]) -> Dense:
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2].lower()
    weights = folder / "model.safetensors"
    if activation not in ("identity", "tanh") or not weights.is_file():
        raise ModelUnavailable(
            f"{folder} has no model.safetensors, or an unsupported activation {activation}"
        )
    return Dense(weights, "tanh" if activation == "tanh" else "identity")


def _max_tokens(path: Path, config: Mapping[str, Any]) -> int:
    """Return the max tokens of a text for the model itself, and for its tokenizer."""
    found = context_length(dict(config))
    if config.get("model_type") in ("roberta", "xlm-roberta"):
        found -= (
            config_int(dict(config), "pad_token_id") + 1
        )  # positions begin after the padding index
    limit = _read(path / "tokenizer_config.json").get("model_max_length")
    return min(found, int(limit)) if isinstance(limit, int) and limit > 0 else found


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _num_labels(config: Mapping[str, Any]) -> int:
    labels = config.get("id2label")
    if isinstance(labels, dict):
        return len(labels)
    count = config.get("num_labels")
    return count if isinstance(count, int) else 2  # transformers' value for no limit


def _read(path: Path) -> dict[str, Any]:
    found = _json(path)
    return found if isinstance(found, dict) else {}


def _read_list(path: Path) -> list[dict[str, Any]]:
    found = _json(path)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ModelUnavailable(f"{path} is not a list of modules")
    return found


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnavailable(f"cannot read {path}: {error}") from None
