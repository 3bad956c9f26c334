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
from tests.engine.vision_requests import Request, VisionOracle
from tests.engine.whole import Whole
from tests.vision_models import FAMILIES, make_vision_model, needs_mlx_vlm, picture

needs_mlx_vlm()

TOKENS = 8
SIZE = 4
LAYERS_OF_MLX = ("gemma4", "kimi_vl")
"""Families whose towers compute indices or complex numbers, which ONNX Runtime's graphs do not."""
BLOCK_OF = {"block_size": SIZE, "no_ssd": True, "num_blocks": 800}


class Seeing:
    """An engine, and mlx-vlm beside it, on the same weights."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.whole = Whole(path, **{**BLOCK_OF, **settings})
        assert self.whole.replica.vision is not None
        self.vision = self.whole.replica.vision.vision
        self.oracle = VisionOracle(path, self.vision)
        scale = FAMILIES[self.vision.model_type].scale
        one, wide, other = (
            picture(seed, scale * width, scale * 20) for seed, width in ((1, 30), (2, 50), (3, 30))
        )
        self.requests = {
            "text": self.oracle.request("hello there"),
            "one": self.oracle.request("what is <> this?", one),
            "two": self.oracle.request("first <> and <> then", wide, other),
            "twice": self.oracle.request("is <> the same as <>?", one, one),
        }
        self.alone = {name: self.bits(name) for name in self.requests}

    def renew(self, **changes: Any) -> None:
        self.whole.renew(self.whole.executor.spec.look_ahead, **changes)

    def bits(self, name: str) -> list[float]:
        """Return the scores of a request that an engine computes alone, from nothing."""
        self.renew()
        self.run(name)
        return self.scores(name)

    def start(self, *names: str) -> None:
        for name in names:
            self.submit(name, self.requests[name])

    def run(self, *names: str) -> None:
        self.start(*names)
        self.whole.run()

    def submit(self, name: str, request: Request, max_tokens: int = TOKENS, **fields: Any) -> None:
        given = {"logprobs": 3, **request.fields, **fields}
        self.whole.submit(name, request.token_ids, max_tokens, **given)

    def scores(self, name: str) -> list[float]:
        assert self.whole.ends[name].error is None
        return [one.chosen for one in self.whole.logprobs[name]]

    def assert_oracles(self, name: str, request: Request, allowed: float = 2e-5) -> None:
        """Show that each token was the best one of mlx-vlm's, or as good, with its score."""
        answer = self.whole.texts[name]
        expected = self.oracle.logprobs(request, answer)
        chosen = expected[np.arange(len(answer)), answer]
        assert np.abs(chosen - self.scores(name)).max() < allowed
        assert (expected.max(-1) - chosen).max() < allowed

    def assert_same(self, *names: str) -> None:
        """Show that answers have the bits that they have alone, where the engine promises that, and
        elsewhere about these scores."""
        allowed = 0 if self.whole.executor.deterministic else 2e-5
        for name in names:
            same = pytest.approx(self.alone[name], abs=allowed, rel=0)
            assert self.scores(name)[:TOKENS] == same, name

    def cached(self, name: str) -> int:
        usage = self.whole.ends[name].usage
        assert usage is not None
        return usage.cached_ram_tokens + usage.cached_ssd_tokens

    @property
    def encoded(self) -> int:
        return self.whole.scheduler.stats().encoded_images_total


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
    one.start(*one.requests)  # text and pictures in one batch
    one.whole.run()
    for name, request in one.requests.items():
        one.assert_oracles(name, request)
    one.assert_same(*one.requests)
    assert one.whole.replica.vision is not None
    host = one.whole.replica.vision.encoder.host
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
    one.submit("turn", turn)
    one.whole.run()
    assert one.encoded == 2
    assert one.cached("turn") >= (len(first.token_ids) + TOKENS - 1) // SIZE * SIZE
    cached = one.scores("turn")
    one.renew()
    one.submit("turn", turn)
    one.whole.run()
    allowed = 0 if one.whole.executor.deterministic else 2e-5
    assert one.scores("turn") == pytest.approx(cached, abs=allowed, rel=0)


@pytest.mark.parametrize("family", ["idefics3", "gemma4"])
def test_prefixes_with_pictures_come_back_from_the_store(
    seeing: Callable[..., Seeing], family: str
) -> None:
    one = seeing(family)
    one.renew(store_enabled=True, store_policy="write_through")
    one.start("two")
    for _ in range(60):  # until all is stored
        one.whole.turn()
    stored = one.whole.stored
    one.renew(store_enabled=True, store_policy="write_through")  # as after a restart
    one.whole.stored = stored
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
        one.submit(str(number), request)
        one.whole.run()
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
    one.submit("one", one.requests["one"], prompt_logprobs=0)
    one.whole.run()
    one.assert_same("one")


def test_a_request_that_goes_on_elsewhere_gives_the_same_text(
    seeing: Callable[..., Seeing],
) -> None:
    """As after a kill: another attempt, with all pictures again and what was generated."""
    one = seeing()
    one.submit("one", one.requests["one"], sampling=SamplingParams(seed=3, temperature=1.0))
    one.whole.run()
    whole = one.whole.texts["one"]
    one.renew()
    one.submit(
        "one",
        one.requests["one"],
        sampling=SamplingParams(seed=3, temperature=1.0),
        attempt=1,
        generated=whole[:3],
    )
    one.whole.texts["one"] = whole[:3]
    one.whole.run()
    assert one.whole.texts["one"] == whole


class Plans:
    """Collects what an engine plans."""

    def __init__(self, one: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[Plan] = []
        dispatch = one.whole.executor.dispatch

        def collect(plan: Plan) -> Any:
            self.all.append(plan)
            return dispatch(plan)

        monkeypatch.setattr(one.whole.executor, "dispatch", collect)


def test_streams_go_on_between_the_layers_of_an_encoder(
    seeing: Callable[..., Seeing], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = seeing()
    plans = Plans(one, monkeypatch)
    one.whole.submit("stream", [5, 6, 7], 200)
    for _ in range(12):
        one.whole.turn()
    first = len(plans.all)
    one.run("one")
    kinds = ["encode" if p.encodes else "decode" if p.decodes else "" for p in plans.all[first:]]
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
        one.submit(str(number), request)
        one.whole.run()
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
    broken = good.images[0].__class__(
        digest=bytes(32), start=good.images[0].start, length=good.images[0].length, arrays=(spec,)
    )
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
    assert one.whole.replica.vision is not None
    sizes = {name: sum(map(len, r.frames)) for name, r in one.requests.items()}
    most = max(sizes["one"], sizes["two"])
    monkeypatch.setattr(one.whole.replica.vision.pixels, "_max_bytes", most)
    one.run("one", "two")
    assert one.whole.refused["two"].reason == "full"
    one.assert_same("one")
    monkeypatch.setattr(one.whole.replica.vision.pixels, "_max_bytes", sizes["two"] - 1)
    one.submit("more", one.requests["two"])
    one.whole.run()
    assert one.whole.refused["more"].reason == "too_large"


def test_pictures_of_requests_that_ended_are_forgotten(seeing: Callable[..., Seeing]) -> None:
    one = seeing()
    one.start("one", "two")
    one.whole.turn()
    assert one.whole.replica.vision is not None
    pixels = one.whole.replica.vision.pixels
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
    assert "pip install 'mlx-lm-server[vision]'" in caplog.text
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
