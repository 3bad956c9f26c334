"""`deploy/engine.py`: which models the engines of a container serve."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from shared.settings import ModelEntry, parse_models

SCRIPT = Path(__file__).parents[2] / "deploy" / "engine.py"
IMAGE = {"MLX_LM_SERVER_ENGINE_SOCKET": "ipc:///run/engines", "MLX_LM_SERVER_MODEL": "demo"}


@pytest.fixture(scope="module")
def prepare() -> Any:
    return runpy.run_path(str(SCRIPT))["prepare"]


def models_of(environment: dict[str, str]) -> list[tuple[str, str]]:
    _, entries = parse_models([], environment, "engine")
    assert all(isinstance(entry, ModelEntry) for entry in entries)
    return [(entry.id, entry.settings.model) for entry in entries]


@pytest.mark.parametrize("models", ["", " ", ","])
def test_without_models_there_is_one(prepare: Any, tmp_path: Path, models: str) -> None:
    environment = IMAGE | {"MODELS": models}
    prepare(environment, tmp_path)
    assert models_of(environment) == [("demo", "demo")]


def test_several_models_are_served_by_their_names(prepare: Any, tmp_path: Path) -> None:
    environment = IMAGE | {"MODELS": 'small=org/small-4bit, org/other\n"odd"'}
    prepare(environment, tmp_path)
    names = [("small", "org/small-4bit"), ("org/other", "org/other"), ('"odd"', '"odd"')]
    assert models_of(environment) == names


def test_models_beside_a_configuration_are_refused(prepare: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="both name models"):
        prepare({"MODELS": "a b", "MLX_LM_SERVER_CONFIG": "models.toml"}, tmp_path)
