"""Pictures on whole engines: the answers are mlx-vlm's, whatever is computed beside them."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from mlx import nn

from engine import device
from engine.backend.gpu_path import forced_gpu_path
from engine.cpu.onnx import graphs
from engine.plan import Plan
from engine.replica.memory import HEADROOM_BYTES
from engine.replica.vision import served_vision, vision_bytes
from engine.vision.encoder import VisionEncoder
from router.images.processor import PreparedImage
from shared.wire import ImagePart, SamplingParams
from tests.engine.conftest import Wrap
from tests.engine.guesses import guessing
from tests.engine.stream_errors import BrokenPiece
from tests.engine.vision_requests import BLOCK_OF, SIZE, TOKENS, Request, Seeing
from tests.engine.whole import Whole, noted_plans
from tests.vision_models import FAMILIES, make_vision_model, needs_mlx_vlm, picture

needs_mlx_vlm()

LAYERS_OF_MLX = ("gemma4", "kimi_vl")
"""Families whose towers compute indices or complex numbers, which ONNX Runtime's graphs do not."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Seeing]:
    """Return a function that makes an engine once of each kind."""

    @cache
    def make(family: str, **settings: Any) -> Seeing:
        path = tmp_path_factory.mktemp("models") / family
        return Seeing(make_vision_model(family, path), **settings)

    return make


@pytest.fixture
def one(seeing: Callable[..., Seeing], request: pytest.FixtureRequest) -> Seeing:
    """An engine with nothing cached, of the family that the test names, or of the first."""
    found = seeing(getattr(request, "param", "idefics3"))
    found.renew()
    return found


def of_families(*families: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("one", families, indirect=True)


@of_families(*FAMILIES)
def test_answers_are_mlx_vlms(one: Seeing) -> None:
    one.run(*one.requests)  # text and pictures in one batch
    for name, request in one.requests.items():
        one.assert_oracles(name, request)
    one.assert_same(*one.requests)
    host = one.serving.encoder.host
    assert (host is not None) == (device.uses_host() and not graphs.unusable())
    family = one.serving.vision.model_type
    assert host is None or bool(host.refused) == (family in LAYERS_OF_MLX)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma4", "qwen3_5", "kimi_vl"])
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
    one = seeing("idefics3", kv_bits=8, kv_group_size=16)
    one.renew()
    one.run(*one.requests)
    for name, request in one.requests.items():
        expected = one.oracle.logprobs(request, one.whole.texts[name])
        chosen = expected[np.arange(TOKENS), one.whole.texts[name]]
        assert np.abs(chosen - one.scores(name)).max() < 0.05
    one.assert_same(*one.requests)


@of_families("idefics3", "qwen3_vl", "gemma4", "qwen3_5", "glm4v")
@pytest.mark.parametrize("tokens", [SIZE, 3 * SIZE])
def test_bits_do_not_depend_on_where_chunks_end(one: Seeing, tokens: int) -> None:
    one.renew(prefill_chunk_tokens=tokens)
    one.run(*one.requests)
    one.assert_same(*one.requests)


@of_families("idefics3", "qwen3_vl", "gemma3", "gemma4")
def test_the_next_turn_encodes_nothing_and_computes_no_old_token(one: Seeing) -> None:
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


@of_families("idefics3", "gemma4")
def test_prefixes_with_pictures_come_back_from_the_store(one: Seeing) -> None:
    one.whole.renew_with_store()
    one.start("two")
    one.whole.turns(60)  # until all is stored
    one.whole.renew_with_store(one.whole.stored)  # as after a restart
    one.start("two", "one")
    one.whole.turns(60)
    end = (len(one.requests["two"].token_ids) - 1) // 64 * 64  # whole pages
    found = one.whole.usage("two").cached_ssd_tokens
    divides = not one.whole.scheduler.config.whole_picture_tokens
    assert found == end or (not divides and 0 < found < end)
    assert one.encoded == 1 or found < end  # that of the other
    one.assert_same("two", "one")


def test_another_picture_of_the_same_size_is_never_a_hit(one: Seeing) -> None:
    same = [one.oracle.request("what is <> this?", picture(seed)) for seed in (1, 9)]
    assert same[0].token_ids == same[1].token_ids
    for number, request in enumerate(same):
        one.serve(str(number), request)
    assert one.cached("1") == same[0].images[0].start // SIZE * SIZE
    for number, request in enumerate(same):
        one.assert_oracles(str(number), request)


def test_requests_at_once_with_a_new_picture_encode_it_once(one: Seeing) -> None:
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


@of_families("idefics3", "gemma3", "qwen3_5", "glm4v", "kimi_vl")
@pytest.mark.usefixtures("nothing_reserved")
def test_sequences_that_lose_their_slots_go_on_with_the_same_bits(one: Seeing) -> None:
    config = one.whole.replica.scheduler.config
    longest = max(len(request.token_ids) for request in one.requests.values()) + 40
    preemptions = 0
    for more in (0, 1):  # a page more than the longest needs alone
        pages = -(-longest // config.page_tokens) + more
        one.renew(
            limit_bytes=pages * config.page_bytes
            + config.gather_bytes([pages])
            + 3 * config.state_bytes
        )
        for name, request in one.requests.items():
            one.submit(name, request, 40)
        one.whole.run()
        preemptions += one.whole.scheduler.stats().preemptions_total
        one.assert_same(*one.requests)
    assert preemptions


def test_a_step_that_fails_loses_nothing(one: Seeing, wrap: Wrap) -> None:
    one.start(*one.requests)
    one.whole.turn_until(lambda: one.encoded)
    failures = iter([MemoryError("out of memory")])

    @wrap(one.whole.executor, "dispatch")
    def fail_once(dispatch: Callable[[Plan], Any], plan: Plan) -> Any:
        for error in failures:
            raise error
        return dispatch(plan)

    one.whole.run()
    one.assert_same(*one.requests)


def test_a_picture_does_not_take_the_error_of_the_step_in_flight(
    tmp_path: Path, wrap: Wrap
) -> None:
    """mlx-vlm reads values while a picture is encoded, which raises what failed before."""
    path = make_vision_model("idefics3", tmp_path / "model")
    with forced_gpu_path():
        one = Seeing(path)
        one.renew()
        broken = BrokenPiece(one.whole, tmp_path / "broken.npy", wrap)

        @wrap(VisionEncoder, "begin")
        def reads_values(begin: Callable[..., Any], *given: Any) -> Any:
            broken.send()
            assert (mx.ones(2) + 1).tolist() == [2, 2]
            return begin(*given)

        one.start("text")
        one.whole.turns(3)
        one.run("one")
        broken.check()
        one.assert_same("text", "one")


def test_a_reset_leaves_nothing_of_a_picture_that_was_begun(one: Seeing) -> None:
    executor: Any = one.whole.executor
    begun = executor._passes.pictures._begun
    one.start("one")
    one.whole.turn_until(lambda: begun)
    (left,) = map(weakref.ref, begun.values())
    one.whole.executor.reset()
    gc.collect()
    assert left() is None


@of_families("idefics3", "qwen3_vl", "gemma4")
def test_drafts_change_nothing(one: Seeing) -> None:
    one.run(*one.requests)
    texts = dict(one.whole.texts)
    one.renew(
        speculator=guessing(
            lambda sent: [*one.requests[sent.request_id].token_ids, *texts[sent.request_id]]
        )
    )
    one.run(*one.requests)
    assert one.whole.drafts["guesses"].accepted
    one.assert_same(*one.requests)


def test_prompts_are_scored_with_pictures(one: Seeing) -> None:
    one.serve("one", one.requests["one"], prompt_logprobs=0)
    one.assert_same("one")


def test_a_request_that_goes_on_elsewhere_gives_the_same_text(one: Seeing) -> None:
    """As after a kill: another attempt, with all pictures again and what was generated."""
    sampling = SamplingParams(seed=3, temperature=1.0)
    one.serve("one", one.requests["one"], sampling=sampling)
    whole = one.whole.texts["one"]
    one.renew()
    one.serve("one", one.requests["one"], sampling=sampling, attempt=1, generated=whole[:3])
    assert one.whole.texts["one"] == whole


def test_streams_go_on_between_the_layers_of_an_encoder(one: Seeing, wrap: Wrap) -> None:
    plans = noted_plans(one.whole, wrap)
    one.whole.submit("stream", [5, 6, 7], 200)
    one.whole.turns(12)
    first = len(plans)
    one.run("one")
    kinds = ["encode" if p.encodes else "decode" if p.decodes else "" for p in plans[first:]]
    places = [number for number, kind in enumerate(kinds) if kind == "encode"]
    assert len(places) > 1
    assert all("decode" in kinds[a:b] for a, b in pairwise(places))
    one.assert_same("one")


def test_embeddings_make_room_for_others(one: Seeing) -> None:
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


def test_a_picture_that_cannot_be_encoded_fails_its_own_requests(one: Seeing) -> None:
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
    one: Seeing, changes: dict[str, Any], reason: str
) -> None:
    changes = dict(changes)
    frames = changes.pop("frames", one.requests["one"].frames)
    one.renew(**changes)
    one.submit("one", one.requests["one"], frames=frames)
    one.run("text")
    assert one.whole.refused["one"].reason == reason
    assert one.whole.refused["one"].param == "images"
    one.assert_same("text")


def test_pictures_that_do_not_fit_into_memory_wait_elsewhere(
    one: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: sum(map(len, r.frames)) for name, r in one.requests.items()}
    most = max(sizes["one"], sizes["two"])
    monkeypatch.setattr(one.serving.pixels, "_max_bytes", most)
    one.run("one", "two")
    assert one.whole.refused["two"].reason == "full"
    one.assert_same("one")
    monkeypatch.setattr(one.serving.pixels, "_max_bytes", sizes["two"] - 1)
    one.serve("more", one.requests["two"])
    assert one.whole.refused["more"].reason == "too_large"


@pytest.mark.parametrize("family", ["qwen2_vl", "pixtral"])
def test_a_picture_to_which_attention_takes_too_much_memory_is_refused(
    tmp_path: Path, family: str
) -> None:
    """On a CPU the scores of all pairs of patches are in memory at once. These would end the
    process."""
    whole = Whole(make_vision_model(family, tmp_path / "model"), **BLOCK_OF, memory_gb=4)
    for name, side in (("small", 20), ("large", 160)):
        if family == "pixtral":
            shape, size = (1, 3, 4 * side, 4 * side), [[4 * side, 4 * side]]
            arrays = {"pixel_values": np.zeros(shape, np.float32), "image_sizes": np.array(size)}
        else:
            arrays = {"pixel_values": np.zeros((side**2, 96), np.float32)}
            arrays["image_grid_thw"] = np.array([[1, side, side]])
        length = side**2 // 4 if family == "qwen2_vl" else side**2
        prepared = PreparedImage(name.encode().ljust(32), [], arrays)
        shown = ImagePart(digest=prepared.digest, start=1, length=length, arrays=prepared.specs)
        assert whole.replica.vision is not None
        token = whole.replica.vision.vision.image_token_id
        frames = tuple(map(bytes, prepared.frames))
        whole.submit(name, [5, *[token] * length, 6], 1, images=(shown,), frames=frames)
    whole.run()
    assert whole.texts["small"] and not whole.texts["large"]
    refusal = whole.refused["large"]
    assert (refusal.reason, refusal.param) == ("too_large", "images")
    assert "25600 patches" in refusal.message and "10.5 GB" in refusal.message


def test_scores_are_kept_free_beyond_what_each_step_has(one: Seeing) -> None:
    assert vision_bytes(None) == 0
    assert vision_bytes(one.serving) == one.serving.bytes
    large = replace(one.serving, scores_bytes=3 * HEADROOM_BYTES)
    assert vision_bytes(large) == one.serving.bytes + 2 * HEADROOM_BYTES


def test_pictures_of_requests_that_ended_are_forgotten(one: Seeing) -> None:
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


@of_families("idefics3", "qwen3_vl")
def test_without_mlx_vlm_text_is_served_and_a_line_says_what_is_missing(
    one: Seeing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "mlx_vlm")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    blind = Whole(one.whole.loaded.path, **BLOCK_OF)
    assert blind.replica.vision is None
    assert "install the extra 'vision'" in caplog.text
    blind.serve("text", one.requests["text"].token_ids, TOKENS, logprobs=3)
    assert blind.scores("text") == one.alone["text"]


def test_models_whose_pictures_are_not_served_need_no_embeddings_where_others_have_them(
    one: Seeing, caplog: pytest.LogCaptureFixture
) -> None:
    whole = one.whole
    config = {**whole.loaded.config, "model_type": "gemma3n"}
    unknown = replace(whole.loaded, model=nn.Module(), config=config)
    assert served_vision(whole.executor, unknown, whole.settings, 1 << 30, None) is None
    assert "those of gemma3n are not supported yet" in caplog.text


@of_families("qwen2_vl")
def test_a_model_that_turns_otherwise_is_served_without_pictures(
    one: Seeing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(model: Any, pairs: int) -> None:
        raise ValueError("a YarnRoPE has no positions in three axes")

    monkeypatch.setattr("engine.replica.vision.take_axes", refuse)
    blind = Whole(one.whole.loaded.path, **BLOCK_OF)
    assert blind.replica.vision is None
    assert "without pictures: a YarnRoPE" in caplog.text
