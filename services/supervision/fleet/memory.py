"""The memory that models need, known before they are loaded, and the budgets of their engines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.model.load import DEMOS
from engine.model.multimodal import serves_pictures
from services.processes.model_files import weights_in
from shared.machine_memory import usable_bytes
from shared.paths import user_cache, user_path
from shared.settings import ModelEntry, Settings

logger = logging.getLogger(__name__)

DARWIN_SHARE = 0.75
"""Roughly Metal's recommended working set, until an engine has reported it."""
OVERLAP_SHARE = 0.7
"""While engines are restarted, the weights of all of them may use this fraction of the memory."""
_WEIGHTS_FACTOR = 1.5
_MIN_BESIDE_WEIGHTS = 2 << 30


def weights_bytes(model: str) -> int | None:
    """Return the size of the weights of ``model``, from the headers of its files.

    None if it is not on this machine, or is not a model.
    """
    try:
        directory = model_directory(model)
        return (weights_in(directory) or None) if directory is not None else None
    except Exception as error:  # an untrusted file may contain anything
        logger.debug("cannot determine the size of the weights of %s: %s", model, error)
        return None


def entry_bytes(entry: ModelEntry) -> int | None:
    """Return the size of the weights that an engine of ``entry`` loads: its model and, if set, its
    draft model. None if one of them is unknown."""
    settings = entry.settings
    found = [weights_bytes(settings.model)]
    if settings.draft_model_path is not None and settings.spec_decode in ("draft", "auto"):
        found.append(weights_bytes(settings.draft_model_path))
    known = [size for size in found if size is not None]
    return sum(known) if len(known) == len(found) else None


def model_directory(model: str) -> Path | None:
    """Return the directory of ``model`` on this machine, complete or not; None if there is none."""
    if model in DEMOS:  # created when it is first loaded
        return max((user_cache() / "models").glob("SmolLM2*"), default=None)
    path = user_path(model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def known_files(settings: Settings) -> dict[str, Any]:
    """Return the directory of a model on this machine, and whether it will take pictures."""
    directory = model_directory(settings.model)
    if directory is None:
        return {}
    takes_images = False
    with suppress(Exception):  # an untrusted file may contain anything
        config = json.loads((directory / "config.json").read_bytes())
        can_encode = settings.ranks == 1 and find_spec("mlx_vlm") is not None
        takes_images = can_encode and serves_pictures(config)
    return {"directory": str(directory), "takes_images": takes_images}


def engines_bytes() -> int:
    """Return the memory that engines may use on this machine, as far as known without MLX."""
    total = usable_bytes()
    return int(total * DARWIN_SHARE) if sys.platform == "darwin" else total


def total_bytes(settings: Settings, device_bytes: int | None) -> int:
    """Return the memory of all engines together; ``device_bytes`` is what an engine reported."""
    if settings.fleet_memory_gb is not None:
        return int(settings.fleet_memory_gb * 1e9)
    return device_bytes or engines_bytes()


def budgets(entries: Sequence[ModelEntry], weights: Sequence[int | None], total: int) -> list[int]:
    """Return the bytes that one engine of each of ``entries`` may use, including weights.

    ``--memory-gb`` or ``memory_gb`` takes precedence, up to ``total``. If all models fit at once,
    each gets its weights and an equal share of the rest. Otherwise each gets its weights and half
    as much again, at least 2 GiB, so that others fit next to it. A model of unknown size gets an
    equal share of the memory.
    """
    engines = sum(entry.settings.engines for entry in entries)
    known = [size or 0 for size in weights]
    needed = sum(e.settings.engines * size for e, size in zip(entries, known, strict=True))
    all_fit = None not in weights and needed * _WEIGHTS_FACTOR <= total
    found = []
    for entry, size in zip(entries, weights, strict=True):
        if entry.settings.memory_gb is not None:
            found.append(min(total, int(entry.settings.memory_gb * 1e9)))
        elif size is None:
            found.append(total // engines)
        elif all_fit:
            found.append(size + (total - needed) // engines)
        else:
            least = size + _MIN_BESIDE_WEIGHTS
            found.append(min(total, max(int(size * _WEIGHTS_FACTOR), least)))
    return found


def placed_bytes(entry: ModelEntry, weights: int | None) -> int:
    """Return the bytes that a machine needs for an engine of ``entry``: 0 if its model is not on
    this machine and ``--memory-gb`` is not set."""
    if entry.settings.memory_gb is not None:
        return int(entry.settings.memory_gb * 1e9)
    if weights is None:
        return 0
    return max(int(weights * _WEIGHTS_FACTOR), weights + _MIN_BESIDE_WEIGHTS)
