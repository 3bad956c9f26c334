"""Which pictures are encoded next, and how far chunks go until then."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from msgspec import structs

from engine.scheduler.planning.pictures import (
    MAX_GROUP_S,
    PictureTable,
    WholePictures,
    axes_of,
    position_shift,
    shown_parts,
)
from engine.scheduler.sequences.sequence import Sequence, SequencePicture
from engine.vision.pixels import PixelStore, TooLarge
from shared.wire import BACKGROUND_PRIORITY, ArraySpec, ImagePart
from tests.engine.scheduler.harness import Client, Engine, config, request, sequence

SIZE = 16
TOKEN_BYTES = 8
LONG = {"blocks": 900, "context_length": 1500, "prefill_chunk_tokens": 400, "layers": 30}
"""Changes of an engine for a prompt whose passes are divided."""


def picture(number: int, start: int, tokens: int) -> SequencePicture:
    places = tuple(range(start, start + tokens))
    ids = (7,) * tokens
    return SequencePicture(bytes([number]) * 32, start, start + tokens, places, ids, 1000)


def showing(*pictures: SequencePicture) -> Sequence:
    """Return a sequence with these pictures in its prompt."""
    return sequence([7] * 400, SIZE, pictures=pictures)


def table(tokens: int, layers: int = 2) -> PictureTable:
    """Return a table with room for so many embeddings."""
    return PictureTable(
        replace(
            config(block_size=SIZE),
            picture_bytes=tokens * TOKEN_BYTES,
            picture_token_bytes=TOKEN_BYTES,
            picture_layers=layers,
        )
    )


def encode(pictures: PictureTable, one: SequencePicture) -> None:
    pictures.begin(one, {one.digest})
    while not pictures.is_ready(one.digest):
        pictures.encode(one, 1)


def test_pictures_of_a_whole_chunk_are_encoded_before_it() -> None:
    pictures, seq = table(400), showing(picture(1, 20, 30), picture(2, 90, 30))
    first, second = seq.pictures
    assert pictures.missing(seq, 399).picture is first
    encode(pictures, first)
    assert pictures.missing(seq, 399).picture is second
    encode(pictures, second)
    assert pictures.missing(seq, 399) == (None, 399)


def test_a_chunk_ends_before_a_picture_that_does_not_fit_beside_its_own() -> None:
    pictures, seq = table(50), showing(picture(1, 20, 30), picture(2, 90, 30))
    encode(pictures, seq.pictures[0])
    assert pictures.missing(seq, 399) == (None, 80)
    seq.num_computed_tokens = 80
    assert pictures.missing(seq, 399).picture is seq.pictures[1]
    encode(pictures, seq.pictures[1])
    assert pictures.take_dropped() == [seq.pictures[0].digest]


def test_a_picture_of_the_next_block_may_take_the_room_of_a_later_one() -> None:
    pictures, seq = table(50), showing(picture(1, 20, 30), picture(2, 90, 30))
    encode(pictures, seq.pictures[1])
    seq.num_computed_tokens = SIZE
    assert pictures.missing(seq, 399).picture is seq.pictures[0]


def test_a_picture_waits_while_others_are_encoded_in_all_of_the_room() -> None:
    pictures = table(40)
    for number in range(4):
        pictures.begin(picture(number, 0, 10), set())
    seq = showing(picture(9, 0, 10))
    assert pictures.missing(seq, 399) == (None, 0)
    encode(pictures, picture(0, 0, 10))
    assert pictures.missing(seq, 399).picture is seq.pictures[0]


def test_what_is_being_encoded_makes_no_room_for_others() -> None:
    pictures, first, second = table(40), picture(1, 0, 10), picture(2, 0, 10)
    pictures.begin(first, set())
    for one in (second, picture(3, 0, 10), picture(4, 0, 10)):
        encode(pictures, one)
    pictures.begin(picture(5, 0, 10), set())
    assert pictures.take_dropped() == [second.digest]
    assert pictures.used_bytes == 40 * TOKEN_BYTES


def engine_with_pictures(room: int, **changes: Any) -> Engine:
    """Return an engine with room for so many embeddings, which token 7 stands for. It caches no
    blocks: the fake executor does not know their names."""
    fields = {"image_token_id": 7, "picture_token_bytes": 1, "prefix_cache": False}
    return Engine(config(picture_bytes=room, **fields, **changes))


def image(number: int, start: int, length: int = 2) -> ImagePart:
    """Return a picture with an embedding for each of its tokens."""
    spec = ArraySpec(name="pixel_values", dtype="uint8", shape=(1,))
    return ImagePart(digest=bytes([number]) * 32, start=start, length=length, arrays=(spec,))


def fail_picture(engine: Engine) -> None:
    """Take in the oldest result as one whose picture could not be encoded."""
    (op,) = engine.plans[-1].encodes
    failed = ((op.digest, "why"),)
    engine.results[0] = structs.replace(engine.results[0], failed_pictures=failed)
    engine.apply()


def test_a_prompt_with_more_pictures_than_there_is_room_for_keeps_within_it() -> None:
    engine = engine_with_pictures(8)
    images = tuple(image(number, 4 * number) for number in range(9))
    client = engine.submit(request("a", [7, 7, 1, 2] * 9, images=images))
    while engine.turn():
        assert engine.scheduler.stats().image_bytes <= 8
    engine.assert_right(client)
    assert sum(len(plan.encodes) for plan in engine.plans) == len(images)


def test_a_picture_that_cannot_be_encoded_counts_as_none() -> None:
    engine = engine_with_pictures(8)
    client = engine.submit(request("a", [7, 7, 1, 2], images=(image(1, 0),)))
    engine.schedule()
    fail_picture(engine)
    assert client.error
    engine.finish()
    stats = engine.scheduler.stats()
    assert (stats.images_total, stats.encoded_images_total, stats.image_bytes) == (1, 0, 0)


def test_a_picture_that_fails_leaves_no_pass_open_of_another_that_needs_it() -> None:
    engine = engine_with_pictures(8, **LONG)
    long = engine.submit(request("long", [1] * 1200 + [7, 7, 1], images=(image(1, 1200),)))
    engine.run_until(lambda: engine.executor.passes)
    short = engine.submit(request("short", [7, 7, 2], images=(image(1, 0),)))
    while engine.schedule() and not engine.plans[-1].encodes:
        engine.apply()
    assert engine.executor.passes
    fail_picture(engine)
    engine.run()
    assert long.error and short.error and not engine.executor.passes
    engine.assert_nothing_left()


def test_prompts_that_overtake_are_charged_for_their_pictures() -> None:
    engine = engine_with_pictures(40, **LONG)
    engine.submit(request("long", [1] * 1203))
    engine.turn()
    (begun,) = engine.executor.passes
    engine.scheduler.planner.pictures.observe(1.0, 10.0)  # seconds of one
    for number in (1, 2):
        engine.submit(request(str(number), [7, 7, 2], images=(image(number, 0),)))
    engine.turn()
    assert engine.plans[-1].encodes
    engine.turn()
    assert [stretch.number for stretch in engine.plans[-1].stretches] == [begun]
    engine.run()


def test_streams_of_the_background_wait_for_a_picture() -> None:
    engine = engine_with_pictures(8, blocks=300)
    stream = engine.stream(request("b", [1] * 6, max_tokens=60, priority=BACKGROUND_PRIORITY))
    asked = engine.submit(request("a", [7, 7, 1, 2], images=(image(1, 0),)))
    engine.finish(stream, asked)
    assert not any(plan.encodes and plan.decodes for plan in engine.plans)


def with_new_pictures(engine: Engine, *numbers: int) -> list[Client]:
    """Submit a prompt about each picture."""
    return [
        engine.submit(request(str(n), [7, 7, 1, n], max_tokens=4, images=(image(n, 0),)))
        for n in numbers
    ]


def encoded_and_begun(engine: Engine) -> list[str]:
    """Return which pictures were encoded, and how many chunks began, in order."""
    found = []
    for plan in engine.plans:
        found += [str(op.digest[0]) for op in plan.encodes if op.is_last]
        found += ["chunk"] * bool(plan.chunks)
    return found


@pytest.mark.parametrize(
    ("room", "asked", "first"), [(40, 3, 3), (8, 5, 4)], ids=["all", "fitting"]
)
def test_pictures_of_prompts_that_wait_are_encoded_before_the_first_one_streams(
    room: int, asked: int, first: int
) -> None:
    """Unless they would take the room of its own."""
    engine = engine_with_pictures(room, picture_layers=2)
    engine.finish(*with_new_pictures(engine, *range(1, asked + 1)))
    encoded = [str(number) for number in range(1, first + 1)]
    assert encoded_and_begun(engine)[: first + 1] == [*encoded, "chunk"]
    assert engine.scheduler.stats().encoded_images_total == asked


def test_beside_streams_a_prompt_waits_for_its_own_pictures_only() -> None:
    engine = engine_with_pictures(40, blocks=300)
    engine.stream(request("s", [1] * 6, max_tokens=200))
    with_new_pictures(engine, 1, 2)
    engine.run()
    assert encoded_and_begun(engine)[1:] == ["1", "chunk", "2", "chunk"]


def test_a_prompt_waits_for_pictures_of_others_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_with_pictures(40)
    monkeypatch.setattr(PictureTable, "layer_s", lambda *_: 0.4 * MAX_GROUP_S)
    with_new_pictures(engine, 1, 2, 3, 4)
    engine.run()
    assert encoded_and_begun(engine)[:4] == ["1", "2", "3", "chunk"]


def test_nobody_waits_for_pictures_of_the_background() -> None:
    engine = engine_with_pictures(40)
    with_new_pictures(engine, 1)
    engine.submit(request("b", [7, 7, 1, 2], images=(image(2, 0),), priority=BACKGROUND_PRIORITY))
    engine.run()
    assert encoded_and_begun(engine)[:2] == ["1", "chunk"]


@pytest.mark.parametrize("seed", range(20))
def test_no_chunk_divides_a_picture_that_has_to_be_whole(seed: int) -> None:
    draw, longest = Random(seed), 48
    engine = engine_with_pictures(
        400,
        prefill_chunk_tokens=draw.choice((4, 16, 48)),
        whole_picture_tokens=longest,
        context_length=600,
        blocks=300,
    )
    spans: list[tuple[int, int]] = []
    prompt: list[int] = []
    for _ in range(draw.randint(1, 9)):
        prompt += [1] * draw.randint(0, 9)
        spans.append((len(prompt), len(prompt) + draw.randint(1, longest)))
        prompt += [7] * (spans[-1][1] - spans[-1][0])
    images = tuple(image(n, first, end - first) for n, (first, end) in enumerate(spans))
    engine.serve(request("a", [*prompt, 1, 2], images=images))
    ends = {chunk.start + len(chunk.token_ids) for chunk in engine.chunks}
    assert not any(first < end < last for end in ends for first, last in spans)
    assert max(len(chunk.token_ids) for chunk in engine.chunks) <= longest


def test_a_picture_that_is_too_long_for_a_chunk_is_refused() -> None:
    engine = engine_with_pictures(400, whole_picture_tokens=8)
    for length, refusal in ((8, None), (9, ("too_large", "images"))):
        client = engine.submit(
            request(f"{length}", [7] * 9 + [1, 2], images=(image(1, 0, length),))
        )
        assert client.refusal == refusal
        engine.run()


def test_prefixes_end_before_a_picture_that_has_to_be_whole() -> None:
    """And chunks after it, if they are not too long then."""
    seq = showing(picture(1, 20, 30), picture(2, 52, 30))
    whole = WholePictures(replace(config(block_size=SIZE), whole_picture_tokens=64))
    assert [whole.restorable_blocks(seq, n) for n in range(7)] == [0, 1, 1, 1, 1, 1, 6]
    assert (whole.chunk_end(seq, 32), whole.chunk_end(seq, 60)) == (50, 52)
    seq = showing(picture(1, 0, 30), picture(2, 34, 30))
    assert [whole.restorable_blocks(seq, n) for n in range(5)] == [0, 0, 2, 2, 4]
    cut = WholePictures(config(block_size=SIZE))
    assert cut.restorable_blocks(seq, 1) == 1


def test_what_was_begun_and_nobody_needs_any_more_is_dropped() -> None:
    pictures, one = table(400), picture(1, 20, 30)
    seq = showing(one)
    cases: list[list[Sequence]] = [[showing(picture(2, 20, 30))], [seq], []]
    for others in cases:
        pictures.begin(one, set())
        pictures.drop_abandoned([seq])
        assert pictures.used_bytes
        seq.num_computed_tokens = one.end  # restored from what another has computed
        pictures.drop_abandoned(others)
        assert pictures.used_bytes == 0 and pictures.take_dropped() == [one.digest]
        seq.num_computed_tokens = 0


def test_a_grid_is_that_of_all_of_a_picture() -> None:
    engine = engine_with_pictures(40)
    cases = [("right", (1, 1, 2), 0), ("more", (1, 2, 2), 0), ("beside", (1, 1, 1), 1)]
    for name, grid, start in cases:
        shown = structs.replace(image(1, start), grid=grid)
        client = engine.submit(request(name, [7, 7, 1, 2], images=(shown,)))
        assert client.refusal == (None if name == "right" else ("invalid", "images"))
    engine.run()


def test_a_grid_that_came_with_a_request_is_not_believed() -> None:
    store, shown = PixelStore(100), structs.replace(image(1, 0), grid=(1, 5, 7))
    submit = request("a", [7, 7, 1, 2], images=(shown,))
    assert store.hold(submit, [b"1"])
    assert store.with_grids(submit).images[0].grid is None


def test_arrays_that_are_there_need_no_room() -> None:
    store = PixelStore(1)
    first, again, other = (
        request(name, [7, 7, 1, 2], images=(image(number, 0),))
        for name, number in (("a", 1), ("b", 1), ("c", 2))
    )
    assert store.hold(first, [b"1"]) and store.hold(again, [b"1"])
    assert not store.hold(other, [b"1"])
    with pytest.raises(TooLarge):
        PixelStore(0).hold(other, [b"1"])


def test_a_chunk_has_its_part_of_a_picture() -> None:
    seq = showing(picture(1, 20, 30))
    (part,) = shown_parts(seq, 32, 48)
    assert (part.first, part.places) == (12, tuple(range(16)))
    assert shown_parts(seq, 0, 16) == ()


def test_positions_do_not_depend_on_where_chunks_end() -> None:
    seq = showing(
        replace(picture(1, 3, 6), grid=(1, 2, 3)), replace(picture(2, 11, 4), grid=(1, 4, 1))
    )
    whole = axes_of(seq, 0, 20)
    assert whole[1] == (0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
    for cut in range(1, 20):
        parts = [axes_of(seq, *ends) or _of_text(seq, *ends) for ends in ((0, cut), (cut, 20))]
        assert tuple(a + b for a, b in zip(*parts, strict=True)) == whole


def _of_text(seq: Sequence, start: int, end: int) -> tuple[tuple[int, ...], ...]:
    shift = position_shift(seq, start)
    return (tuple(range(start + shift, end + shift)),) * 3
