"""Models that clients pull and delete: which are allowed, and how they are served."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from engine.model.load import DEMOS, HUB_ID
from shared.paths import user_path
from shared.settings import ModelEntry, Settings
from shared.settings.adapters import AdapterSettings
from shared.settings.groups import ModelSettings
from shared.settings.speculation import SpeculationSettings

MAX_PULLED = 64


def pull_refusal(name: str, served: Iterable[ModelEntry], pulled: Iterable[ModelEntry]) -> str:
    """Return the reason why the model ``name``, which is not served under this name yet, cannot be
    pulled; "" if it can. ``pulled`` are the models pulled before, a subset of those ``served``."""
    if name not in DEMOS and (HUB_ID.fullmatch(name) is None or name.startswith(".")):
        return f"'{name}' is not a Hugging Face model id (OWNER/MODEL)"
    if _exists(name):  # and an engine would load that path
        return f"'{name}' is a path on the server, not a Hugging Face model id"
    for entry in served:
        if entry.settings.model.casefold() == name.casefold():
            return f"{name} is already served here as {entry.id}"
    if len(list(pulled)) >= MAX_PULLED:
        return f"{MAX_PULLED} models have been pulled already; delete one first"
    return ""


def delete_refusal(name: str, served: Iterable[ModelEntry], pulled: Iterable[ModelEntry]) -> str:
    """Return the reason why the model ``name`` cannot be deleted; "" if it can."""
    if all(name != entry.id for entry in pulled):
        return f"{name} is a configured model, or belongs to another server"
    for entry in served:
        if entry.id != name and any(_is_of(name, path) for path in _files_of(entry.settings)):
            return f"{entry.id} is served from its files"
    return ""


def pulled_entry(settings: Settings, name: str) -> ModelEntry:
    """Return how the pulled model ``name`` is served: with ``settings``, except those made for
    another model. Code that comes with it is never run."""
    defaults = Settings()
    own = {
        field.name
        for group in (ModelSettings, AdapterSettings, SpeculationSettings)
        for field in dataclasses.fields(group)
    } - {"idle_unload_s", "cpu_precision", "prove"}
    values = {field: getattr(defaults, field) for field in own}
    values |= {"model": name, "served_model_name": (name,)}
    given = settings.given - own | {"model", "served_model_name"}
    return ModelEntry(settings=dataclasses.replace(settings, **values, given=given))


def _exists(name: str) -> bool:
    try:
        return user_path(name).exists()
    except OSError:
        return False


def _files_of(settings: Settings) -> list[str]:
    """Return the ids and paths from which an engine with ``settings`` loads weights."""
    found = [settings.model, settings.draft_model_path, settings.adapter_path]
    return [str(path) for path in found if path is not None]


def _is_of(name: str, path: str) -> bool:
    """Return whether ``path`` is the Hugging Face model ``name``, or a path into its files."""
    from huggingface_hub.constants import HF_HUB_CACHE

    # Names that differ only in case share a folder if the file system ignores case.
    if path.casefold() == name.casefold():
        return True
    folder = Path(HF_HUB_CACHE) / "--".join(["models", *name.split("/")])
    try:
        return user_path(path).resolve().is_relative_to(folder.resolve())
    except OSError:
        return False
