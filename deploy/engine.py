"""Starts the engines of a container: those of `MODELS`, or the one of `MLX_LM_SERVER_MODEL`.

`MODELS` holds the models, or NAME=MODEL, with spaces or commas between them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

VARIABLE, CONFIG = "MODELS", "MLX_LM_SERVER_CONFIG"
ONE_MODEL = ("MLX_LM_SERVER_MODEL", "MLX_LM_SERVER_SERVED_MODEL_NAME")


def prepare(environment: MutableMapping[str, str], directory: Path) -> None:
    """Write a configuration of the models to ``directory``, if there are several."""
    models = environment.pop(VARIABLE, "").replace(",", " ").split()
    if not models:
        return
    if environment.get(CONFIG):
        raise SystemExit(f"{VARIABLE} and {CONFIG}: both name models")
    file = directory / "models.toml"
    file.write_text("".join(_tables(models)), encoding="utf-8")
    environment[CONFIG] = str(file)
    for name in ONE_MODEL:  # which makes no sense beside others
        environment.pop(name, None)


def _tables(models: Sequence[str]) -> Iterator[str]:
    for each in models:
        name, _, path = each.partition("=")
        # A string of JSON is one of TOML too.
        yield f"[[model]]\nid = {json.dumps(name)}\npath = {json.dumps(path or name)}\n"


if __name__ == "__main__":
    prepare(os.environ, Path(tempfile.mkdtemp(prefix="models-")))
    os.execvp("mlx-lm-server", ["mlx-lm-server", "engine", *sys.argv[1:]])
