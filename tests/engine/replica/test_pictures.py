"""Pictures on whole engines: the answers are mlx-vlm's, whatever is computed beside them."""

from __future__ import annotations

import gc
import importlib.util
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from mlx import nn

from engine.backend import graphs
from engine.backend.gpu_path import forced_gpu_path
from engine.batch import device
from engine.plan import Plan
from engine.replica.vision import served_vision
from shared.wire import SamplingParams
from tests.engine.guesses import guessing
from tests.engine.vision_requests import BLOCK_OF, SIZE, TOKENS, Request, Seeing
from tests.engine.whole import Whole, noted_plans
from tests.vision_models import FAMILIES, make_vision_model, needs_mlx_vlm, picture

needs_mlx_vlm()

LAYERS_OF_MLX = ("gemma4", "kimi_vl")
"""Families whose towers compute indices or complex numbers, which ONNX Runtime's graphs do not."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Seeing]:
    """Return a function that makes an engine once of each kind."""
    made: dict[tuple[str, str], Seeing] = {}

    def make(family: str = "idefics3", **settings: Any) -> Seeing:
        key = family, repr(settings)
        if key not in made:
            path = tmp_path_factory.mktemp("models") / family
            made[key] = Seeing(make_vision_model(family, path), **settings)
        made[key].renew()
        return made[key]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_mlx_vlms(seeing: Callable[..., Seeing], family: str) -> None:
    one = seeing(family)
    one.run(*one.requests)  # text and pictures in one batch
    for name, request in one.requests.items():
        one.assert_oracles(name, request)
    one.assert_same(*one.requests)
    host = one.serving.encoder.host
    assert (host is not None) == (device.uses_host() and not graphs.unusable())
    assert host is None or bool(host.refused) == (family in LAYERS_OF_MLX)


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl", "gemma4", "qwen3_5", "kimi_vl"])
def test_answers_on_the_path_of_a_gpu_are_mlx_vlms(tmp_path: Path, family: str) -> None:
    path = make_vision_model(family, tmp_path / "model")
    with forced_gpu_path():
        one = Seeing(path)
        one.renew()
        one.run(*one.requests)
        assert one.whole.executor.spec.look_ahead
    for name, request in one.requests.items():
        one.assert_oracles(name, request, 2e-4)


def test_keys_in_8_bits_change_little(seeing: Callable[..., Seeing]) -> None:
    one = seeing(kv_bits=8, kv_group_size=16)
    one.run(*one.requests)
    for name, request in one.requests.items():
        expected = one.oracle.logprobs(request, one.whole.texts[name])
        chosen = expected[np.arange(TOKENS), one.whole.texts[name]]
        assert np.abs(chosen - one.scores(name)).max() < 0.05
    one.assert_same(*one.requests)


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl", "gemma4", "qwen3_5", "glm4v"])
@pytest.mark.parametrize("tokens", [SIZE, 3 * SIZE, 64])
def test_bits_do_not_depend_on_where_chunks_end(
    seeing: Callable[..., Seeing], family: str, tokens: int
) -> None:
    one = seeing(family)
    one.renew(prefill_chunk_tokens=tokens)
    one.run(*one.requests)
    one.assert_same(*one.requests)


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl", "gemma3", "gemma4"])
def test_the_next_turn_encodes_nothing_and_computes_no_old_token(
    seeing: Callable[..., Seeing], family: str
) -> None:
    one = seeing(family)
    first = one.requests["two"]
    one.run("two")
    answer = one.whole.texts["two"]
    more = one.oracle.request("and what else").token_ids
    token_ids = [*first.token_ids, *answer, *more]
    turn = Request("", first.pictures, token_ids, first.images, first.frames)
    one.serve("turn", turn)
    assert one.encoded == 2
    assert one.cached("turn") >= (len(first.token_ids) + TOKENS - 1) // SIZE * SIZE
    cached = one.scores("turn")
    one.renew()
    one.serve("turn", turn)
    assert one.scores("turn") == one.as_good_as(cached)


@pytest.mark.parametrize("family", ["idefics3", "gemma4"])
def test_prefixes_with_pictures_come_back_from_the_store(
    seeing: Callable[..., Seeing], family: str
) -> None:
    one = seeing(family)
    one.whole.renew_with_store()
    one.start("two")
    for _ in range(60):  # until all is stored
        one.whole.turn()
    one.whole.renew_with_store(one.whole.stored)  # as after a restart
    one.start("two", "one")
    for _ in range(60):
        one.whole.turn()
    usage = one.whole.ends["two"].usage
    length = len(one.requests["two"].token_ids)
    assert usage is not None and usage.cached_ssd_tokens == (length - 1) // SIZE * SIZE
    assert one.encoded == 1  # that of the other
    one.assert_same("two", "one")


def test_another_picture_of_the_same_size_is_never_a_hit(seeing: Callable[..., Seeing]) -> None:
    one = seeing()
    same = [one.oracle.request("what is <> this?", picture(seed)) for seed in (1, 9)]
    assert same[0].token_ids == same[1].token_ids
    for number, request in enumerate(same):
        one.serve(str(number), request)
    assert one.cached("1") == same[0].images[0].start // SIZE * SIZE
    for number, request in enumerate(same):
        one.assert_oracles(str(number), request)


def test_requests_at_once_with_a_new_picture_encode_it_once(seeing: Callable[..., Seeing]) -> None:
    one = seeing()
    texts = ("a", "some words before", "other words that come before", "b")
    requests = [one.oracle.request(f"{text} <> this?", picture(1)) for text in texts]
    for number in range(8):
        one.submit(str(number), requests[number % 4])
    one.whole.run()
    stats = one.whole.scheduler.stats()
    assert (stats.images_total, stats.encoded_images_total) == (8, 1)
    assert stats.image_hits_total == 7
    for number in range(8):
        one.assert_oracles(str(number), requests[number % 4])


@pytest.mark.parametrize("family", ["idefics3", "gemma4", "qwen3_5"])
def test_sequences_that_lose_their_slots_go_on_with_the_same_bits(
    seeing: Callable[..., Seeing], family: str
) -> None:
    one = seeing(family)
    config = one.whole.replica.scheduler.config
    one.renew(limit_bytes=config.slab_bytes(3, 64))
    for name, request in one.requests.items():
        one.submit(name, request, 40)
    one.whole.run()
    assert one.whole.scheduler.stats().preemptions_total
    one.assert_same(*one.requests)


def test_a_step_that_fails_loses_nothing(
    seeing: Callable[..., Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = seeing()
    one.start(*one.requests)
    while not one.encoded:
        one.whole.turn()
    failures = iter([MemoryError("out of memory")])
    dispatch = one.whole.executor.dispatch

    def fail_once(plan: Plan) -> Any:
        for error in failures:
            raise error
        return dispatch(plan)

    monkeypatch.setattr(one.whole.executor, "dispatch", fail_once)
    one.whole.run()
    one.assert_same(*one.requests)


def test_a_reset_leaves_nothing_of_a_picture_that_was_begun(
    seeing: Callable[..., Seeing],
) -> None:
    one = seeing()
    executor: Any = one.whole.executor
    begun = executor._passes.pictures._begun
    one.start("one")
    while not begun:
        one.whole.turn()
    (left,) = map(weakref.ref, begun.values())
    one.whole.executor.reset()
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl", "gemma4", "qwen3_5"])
def test_drafts_change_nothing(seeing: Callable[..., Seeing], family: str) -> None:
    one = seeing(family)
    one.run(*one.requests)
    texts = dict(one.whole.texts)
    one.renew(
        speculator=guessing(
            lambda sent: [*one.requests[sent.request_id].token_ids, *texts[sent.request_id]]
        )
    )
    one.run(*one.requests)
    drafts = one.whole.scheduler.stats().drafts
    assert drafts is not None and drafts.sources["guesses"].accepted
    one.assert_same(*one.requests)


def test_prompts_are_scored_with_pictures(seeing: Callable[..., Seeing]) -> None:
    one = seeing()
    one.serve("one", one.requests["one"], prompt_logprobs=0)
    one.assert_same("one")


def test_a_request_that_goes_on_elsewhere_gives_the_same_text(
    seeing: Callable[..., Seeing],
) -> None:
    """As after a kill: another attempt, with all pictures again and what was generated."""
    one = seeing()
    sampling = SamplingParams(seed=3, temperature=1.0)
    one.serve("one", one.requests["one"], sampling=sampling)
    whole = one.whole.texts["one"]
    one.renew()
    one.submit("one", one.requests["one"], sampling=sampling, attempt=1, generated=whole[:3])
    one.whole.texts["one"] = whole[:3]
    one.whole.run()
    assert one.whole.texts["one"] == whole


def test_streams_go_on_between_the_layers_of_an_encoder(
    seeing: Callable[..., Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = seeing()
    plans = noted_plans(one.whole, monkeypatch)
    one.whole.submit("stream", [5, 6, 7], 200)
    for _ in range(12):
        one.whole.turn()
    first = len(plans)
    one.run("one")
    kinds = ["encode" if p.encodes else "decode" if p.decodes else "" for p in plans[first:]]
    places = [number for number, kind in enumerate(kinds) if kind == "encode"]
    assert len(places) > 1
    assert all("decode" in kinds[a:b] for a, b in pairwise(places))
    one.assert_same("one")


def test_embeddings_make_room_for_others(seeing: Callable[..., Seeing]) -> None:
    one = seeing()
    config = one.whole.replica.scheduler.config
    largest = max(image.length for r in one.requests.values() for image in r.images)
    one.renew(picture_bytes=4 * largest * config.picture_token_bytes, prefix_cache=False)
    requests = [one.oracle.request(f"{n} <>?", picture(n)) for n in (1, 2, 3, 4, 5, 6, 1)]
    for number, request in enumerate(requests):
        one.serve(str(number), request)
        stats = one.whole.scheduler.stats()
        assert stats.image_bytes <= one.whole.scheduler.config.picture_bytes
    for number, request in enumerate(requests):
        one.assert_oracles(str(number), request)


def test_a_picture_that_cannot_be_encoded_fails_its_own_requests(
    seeing: Callable[..., Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = seeing()
    good = one.requests["one"]
    spec = good.images[0].arrays[1]
    broken = msgspec.structs.replace(good.images[0], digest=bytes(32), arrays=(spec,))
    bad = Request(good.text, good.pictures, good.token_ids, (broken,), good.frames[1:])
    one.submit("bad", bad)
    one.run("text", "one")
    assert one.whole.ends["bad"].finish == "error"
    assert "picture" in (one.whole.ends["bad"].error or "")
    one.assert_same("text", "one")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"frames": ()}, "invalid"),
        ({"frames": (b"1",)}, "invalid"),
        ({"picture_bytes": 64}, "too_large"),
        ({"image_token_id": None}, "unsupported"),
        ({"image_token_id": 3}, "invalid"),
    ],
)
def test_pictures_that_cannot_be_served_are_refused(
    seeing: Callable[..., Seeing], changes: dict[str, Any], reason: str
) -> None:
    one = seeing()
    changes = dict(changes)
    frames = changes.pop("frames", one.requests["one"].frames)
    one.renew(**changes)
    one.submit("one", one.requests["one"], frames=frames)
    one.run("text")
    assert one.whole.refused["one"].reason == reason
    assert one.whole.refused["one"].param == "images"
    one.assert_same("text")


def test_pictures_that_do_not_fit_into_memory_wait_elsewhere(
    seeing: Callable[..., Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = seeing()
    sizes = {name: sum(map(len, r.frames)) for name, r in one.requests.items()}
    most = max(sizes["one"], sizes["two"])
    monkeypatch.setattr(one.serving.pixels, "_max_bytes", most)
    one.run("one", "two")
    assert one.whole.refused["two"].reason == "full"
    one.assert_same("one")
    monkeypatch.setattr(one.serving.pixels, "_max_bytes", sizes["two"] - 1)
    one.serve("more", one.requests["two"])
    assert one.whole.refused["more"].reason == "too_large"


def test_pictures_of_requests_that_ended_are_forgotten(seeing: Callable[..., Seeing]) -> None:
    one = seeing()
    one.start("one", "two")
    one.whole.turn()
    pixels = one.serving.pixels
    assert pixels.nbytes
    one.whole.scheduler.abort("one")
    one.whole.scheduler.abort("two")
    one.whole.run()
    one.whole.turn()
    assert pixels.is_empty and pixels.nbytes == 0
    assert one.whole.scheduler.stats().image_bytes == 0


@pytest.mark.parametrize("family", ["idefics3", "llava", "qwen3_vl"])
def test_without_mlx_vlm_text_is_served_and_a_line_says_what_is_missing(
    seeing: Callable[..., Seeing],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
) -> None:
    path = seeing(family).whole.loaded.path
    monkeypatch.delitem(sys.modules, "mlx_vlm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        blind = Whole(path, **BLOCK_OF)
    assert blind.replica.vision is None
    assert "install the extra 'vision'" in caplog.text
    request = seeing(family).requests["text"]
    blind.submit("text", request.token_ids, TOKENS, logprobs=3)
    blind.run()
    assert [one.chosen for one in blind.logprobs["text"]] == seeing(family).alone["text"]


def test_models_whose_pictures_are_not_served_need_no_embeddings_where_others_have_them(
    seeing: Callable[..., Seeing], caplog: pytest.LogCaptureFixture
) -> None:
    whole = seeing().whole
    config = {**whole.loaded.config, "model_type": "gemma3n"}
    unknown = replace(whole.loaded, model=nn.Module(), config=config)
    with caplog.at_level(logging.WARNING):
        assert served_vision(whole.executor, unknown, whole.settings, 1 << 30, None) is None
    assert "those of gemma3n are not supported yet" in caplog.text


def test_a_model_that_turns_otherwise_is_served_without_pictures(
    seeing: Callable[..., Seeing],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = seeing("qwen2_vl").whole.loaded.path

    def refuse(model: Any, pairs: int) -> None:
        raise ValueError("a YarnRoPE has no positions in three axes")

    monkeypatch.setattr("engine.replica.vision.take_axes", refuse)
    with caplog.at_level(logging.WARNING):
        blind = Whole(path, **BLOCK_OF)
    assert blind.replica.vision is None
    assert "without pictures: a YarnRoPE" in caplog.text
