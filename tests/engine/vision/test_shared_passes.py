"""Prompts with pictures in one pass: the bits that each has alone, also if it starts again."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from engine import device
from engine.scheduler.planning import pictures
from tests.engine.conftest import Wrap
from tests.engine.vision_requests import Seeing
from tests.engine.whole import noted_plans
from tests.vision_models import make_vision_model, needs_mlx_vlm

needs_mlx_vlm()

NAMES = ("one", "two", "twice")
WHOLE = {"prefill_chunk_tokens": 512}
"""All prompts fit into one pass, however slow this machine is."""


@pytest.fixture(scope="module", params=["idefics3", "qwen3_vl"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    path = tmp_path_factory.mktemp("models") / request.param
    return Seeing(make_vision_model(request.param, path))


@pytest.fixture
def seeing(engine: Seeing, monkeypatch: pytest.MonkeyPatch) -> Seeing:
    monkeypatch.setattr(pictures, "MAX_GROUP_S", 1000.0)
    engine.renew(**WHOLE)
    return engine


def test_prompts_with_pictures_share_a_pass(seeing: Seeing, wrap: Wrap) -> None:
    executor: Any = seeing.whole.executor
    plans, given = noted_plans(seeing.whole, wrap), []

    @wrap(executor.batch_class, "logits")
    def observed(compute: Any, batch: Any, *args: Any, **kwargs: Any) -> mx.array:
        if kwargs.get("given") is not None:
            given.append(len(batch.rows))
        return compute(batch, *args, **kwargs)

    seeing.run(*NAMES)
    assert max(sum(bool(c.pictures) for c in plan.chunks) for plan in plans) == len(NAMES)
    assert max(given) == (len(NAMES) if device.uses_host() else 1)
    seeing.assert_same(*NAMES)
    for name in NAMES:
        seeing.assert_oracles(name, seeing.requests[name])


@pytest.mark.skipif(not device.uses_host(), reason="elsewhere each has a pass of its own")
def test_a_shared_pass_that_starts_again_needs_no_embeddings_from_elsewhere(
    seeing: Seeing, wrap: Wrap
) -> None:
    executor: Any = seeing.whole.executor
    failures = []

    @wrap(executor.batch_class, "logits")
    def fail_shared(compute: Any, batch: Any, *args: Any, **kwargs: Any) -> mx.array:
        if kwargs.get("given") is not None and len(batch.rows) > 1:
            failures.append(len(batch.rows))
            executor._passes.pictures._done.clear()  # as if a later plan had dropped them
            raise ValueError("one of them is wrong")
        return compute(batch, *args, **kwargs)

    seeing.run(*NAMES[:2])  # the third has another chunk
    assert failures == [2]
    seeing.assert_same(*NAMES[:2])
