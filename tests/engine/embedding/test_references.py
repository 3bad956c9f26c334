"""Tiny checkpoints of each kind against transformers' own computation of the same weights."""

from __future__ import annotations

import base64
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import device
from engine.embedding.build import load_text_model
from engine.embedding.checkpoint import task_of
from engine.embedding.heads import HeadedModel
from engine.model.encoder import Text
from tests.text_models import KINDS, REFERENCES, make_text_model

FOUND = json.loads(REFERENCES.read_text())
WAYS = ("packed", "padded")


def loaded(name: str, path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> HeadedModel:
    """Load a checkpoint for the task that its files name, or as one that ranks by its text."""
    if way == "padded":
        monkeypatch.setenv(device.HOST_VARIABLE, "0")
    folder = make_text_model(name, path / name)
    task, kind = task_of(folder), KINDS[name]
    wanted = "generate" if kind.task != "auto" else "rerank" if kind.ranks else "embed"
    assert task == wanted
    task = "rerank" if task == "generate" else task
    return load_text_model(folder, task, cpu_precision="auto", memory_bytes=1 << 33).model


def result(work: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def texts_of(name: str) -> list[Text]:
    found = FOUND[name]
    pairs = zip(found["texts"], found["second_starts"], strict=True)
    return [Text(tuple(ids), start) for ids, start in pairs]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_rows_are_those_of_transformers(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a packed row do not depend on the other texts."""
    model, texts = loaded(name, tmp_path, monkeypatch, way), texts_of(name)
    wanted = np.frombuffer(base64.b64decode(FOUND[name]["rows"]), "<f4")
    wanted = wanted.reshape(-1, FOUND[name]["width"])
    rows = result(model.compute(texts[::-1]))[::-1]
    assert rows.shape == wanted.shape
    for row, other in zip(rows, wanted, strict=True):
        assert np.allclose(row, other, atol=2e-4), np.abs(row - other).max()
        if len(row) > 1:
            cosine = row @ other / np.linalg.norm(row) / np.linalg.norm(other)
            assert cosine > 0.9999
    if way == "packed":
        alone = [result(model.compute([text]))[0].tobytes() for text in texts]
        assert alone == [row.tobytes() for row in rows]
