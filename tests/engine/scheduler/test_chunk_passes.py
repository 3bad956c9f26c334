"""A plan has a stretch of one pass."""

import pytest

from tests.engine.scheduler.harness import Engine, config, request


@pytest.mark.parametrize(
    ("batches_chunks", "scored", "most"), [(True, None, 2), (False, None, 1), (True, 0, 1)]
)
def test_beside_decodes_there_is_one_pass_of_chunks(
    batches_chunks: bool, scored: int | None, most: int
) -> None:
    fields = {"look_ahead": True, "batches_chunks": batches_chunks, "prefill_chunk_tokens": 64}
    engine = Engine(config(blocks=300, **fields))
    stream = engine.submit(request("streams", [1, 2, 3], max_tokens=150))
    while not stream.tokens:
        engine.turn()
    for number in (4, 5):
        prompt = [number + i % 3 for i in range(29)]
        engine.submit(request(f"joins {number}", prompt, prompt_logprobs=scored))
    engine.run()
    beside = [len(plan.chunks) for plan in engine.plans if plan.decodes and plan.chunks]
    assert max(beside) == most and sum(beside) == 2
    for client in engine.clients.values():
        engine.assert_right(client)


@pytest.mark.parametrize("look_ahead", [False, True])
def test_chunks_that_cannot_share_a_pass_are_in_plans_of_their_own(look_ahead: bool) -> None:
    engine = Engine(config(look_ahead=look_ahead, batches_chunks=False, prefill_chunk_tokens=32))
    for number in (4, 5):
        engine.submit(request(f"r{number}", [number + i % 3 for i in range(14)]))
    engine.run()
    assert [len(plan.chunks) for plan in engine.plans if plan.chunks] == [1, 1]
