"""A model for the replay of agents' sessions: small, but with a long context and tools."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

CONTEXT = 131_072
_TEMPLATES = Path(__file__).parent / "templates"


def template(name: str) -> str:
    """Return the chat template ``name``. Its rendered text ends where a reply begins."""
    return (_TEMPLATES / f"{name}.jinja").read_text().rstrip("\n")


def make_short_demo(demo: Path, path: Path, layers: int) -> Path:
    """Write the first ``layers`` layers of the demo model into the directory ``path``, with
    Qwen3's template. Return ``path``. Its text means nothing, but takes as long as a model's."""
    path.mkdir(parents=True, exist_ok=True)
    weights = mx.load(str(demo / "model.safetensors"))
    assert isinstance(weights, dict)
    kept = {name: array for name, array in weights.items() if _layer(name) < layers}
    mx.save_safetensors(str(path / "model.safetensors"), kept, metadata={"format": "mlx"})
    config = json.loads((demo / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "max_position_embeddings": CONTEXT}
    (path / "config.json").write_text(json.dumps(config))
    settings = json.loads((demo / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template("qwen3"), "model_max_length": CONTEXT}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "tokenizer.json").symlink_to(demo / "tokenizer.json")
    return path


def _layer(name: str) -> int:
    words = name.split(".")
    return int(words[words.index("layers") + 1]) if "layers" in words else -1
