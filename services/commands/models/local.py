"""The models on this machine: the demo model, and those in the Hugging Face cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.model.demo import made_demo_model
from engine.model.errors import ModelUnavailable
from engine.model.load import DEMOS, keeps_codes
from engine.model.multimodal import serves_pictures
from services.processes.model_files import problems, weights_in
from services.supervision.fleet.memory import model_directory
from shared.imports.transformers_index import remember_transformers
from shared.settings import Settings

if TYPE_CHECKING:  # it imports MLX
    from engine.replica.forecast import MemoryForecast

_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """A model, complete or not, and the context that fits in an engine."""

    name: str
    path: Path
    weights_bytes: int  # on disk
    takes_images: bool = False
    """Whether it accepts images if the extra ``vision`` is installed."""
    trouble: str = ""
    """The reason why it cannot be served."""
    forecast: MemoryForecast | None = None


def local_models() -> Iterator[tuple[str, Path]]:
    """Yield name and directory of each model, the demo model first."""
    if (made := directory_of("demo")) is not None:
        yield "demo", made
    yield from sorted(_cached())


def directory_of(model: str) -> Path | None:
    """Return the directory of ``model`` on this machine, complete or not; None if there is none."""
    if model in DEMOS:
        return made_demo_model(quantized=keeps_codes(model))
    return model_directory(model)


def _cached() -> Iterator[tuple[str, Path]]:
    """Yield the models in the Hugging Face cache that mlx-lm may load; a model must
    have a config."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in found.repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        named = [each for each in repo.revisions if "main" in each.refs]
        newest = max(named or repo.revisions, key=lambda each: each.last_modified)
        if (newest.snapshot_path / _CONFIG).exists():
            yield repo.repo_id, newest.snapshot_path


def examined(name: str, path: Path, settings: Settings) -> LocalModel:
    """Return the model in ``path`` with the context that fits in an engine with ``settings``."""
    try:
        size = weights_in(path)
    except (OSError, ValueError):
        size = 0
    if wrong := problems(path):
        return LocalModel(name=name, path=path, weights_bytes=size, trouble="; ".join(wrong))
    remember_transformers()
    from engine.replica.forecast import forecast  # imports MLX and transformers

    try:
        found = forecast(path, settings)
    except ModelUnavailable as error:
        return LocalModel(name=name, path=path, weights_bytes=size, trouble=str(error))
    return LocalModel(
        name=name,
        path=path,
        weights_bytes=size,
        takes_images=serves_pictures(json.loads((path / _CONFIG).read_bytes())),
        forecast=found,
    )
