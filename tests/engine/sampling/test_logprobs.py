"""Log-probabilities against a direct computation."""

import mlx.core as mx
import pytest

from engine.backend import arrays
from engine.plan import Decode
from engine.sampling.logprobs import gather_logprobs
from engine.sampling.sampler import Sampler
from shared.wire import SamplingParams, TokenLogprobs


@pytest.fixture(params=["host", "device"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "device":
        monkeypatch.setattr(arrays, "array_namespace", lambda: mx)


def direct(logits: mx.array, chosen: int, count: int) -> TokenLogprobs:
    logprobs = (logits - mx.logsumexp(logits)).tolist()
    order = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[:count]
    return TokenLogprobs(
        chosen=logprobs[chosen], top_ids=tuple(order), top=tuple(logprobs[i] for i in order)
    )


def assert_same(ours: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert ours.top_ids == expected.top_ids
    assert [ours.chosen, *ours.top] == pytest.approx([expected.chosen, *expected.top], abs=1e-5)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("vocab", [1, 30, 64, 1000, 1088])
def test_each_row_gets_as_many_alternatives_as_it_asks_for(vocab: int) -> None:
    logits = mx.random.normal((5, vocab), key=mx.random.key(vocab)) * 3
    chosen = [0, vocab - 1, vocab // 2, vocab // 3, 0]
    counts = [0, 1, 20, 5, 3]
    found = gather_logprobs(logits, mx.array(chosen), range(5), counts).read()
    for row, ours in enumerate(found):
        assert_same(ours, direct(logits[row], chosen[row], counts[row]))


@pytest.mark.usefixtures("library")
def test_logprobs_are_those_of_the_model_whatever_the_controls() -> None:
    logits = mx.random.normal((3, 200), key=mx.random.key(1)) * 2
    best = int(mx.argmax(logits[0]))
    greedy = SamplingParams(seed=1, logit_bias=[(best, -100.0)])
    drawn = SamplingParams(seed=3, temperature=1.7, top_k=9, frequency_penalty=1.0)
    decodes = [
        Decode(0, 4, 5, 0, greedy, logprobs=2),
        Decode(1, 4, 5, 0, SamplingParams(seed=1)),
        Decode(2, 4, 5, 3, drawn, (), 4, (1, 2, 3, 4)),
    ]
    sampled = Sampler().sample(logits, decodes, mx.array([5, 5, 5]))
    (scored,) = sampled.logprobs
    assert scored.rows == [0, 2]
    tokens = sampled.tokens.tolist()
    assert tokens[0] != best
    for row, ours in zip(scored.rows, scored.read(), strict=True):
        assert_same(ours, direct(logits[row], tokens[row], decodes[row].logprobs or 0))


NAMED = (150, 3, 77, 199)


def scored(logits: mx.array, decodes: list[Decode]) -> dict[int, TokenLogprobs]:
    sampled = Sampler().sample(logits, decodes, mx.array([5] * len(decodes)))
    return {
        row: ours
        for each in sampled.logprobs
        for row, ours in zip(each.rows, each.read(), strict=True)
    }


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rows_that_name_tokens_get_theirs_with_the_same_bits_in_every_batch(
    dtype: mx.Dtype,
) -> None:
    logits = (mx.random.normal((40, 200), key=mx.random.key(2)) * 4).astype(dtype)
    greedy = SamplingParams(seed=1)
    names = [Decode(n, 4, 5, 0, greedy, logprobs=0, logprob_token_ids=NAMED) for n in range(40)]
    mixed = [*names[:3], Decode(3, 4, 5, 0, greedy, logprobs=2), Decode(4, 4, 5, 0, greedy)]
    alone = {row: scored(logits[row : row + 1], [names[row]])[0] for row in range(40)}
    assert scored(logits, names) == alone
    found = scored(logits[:5], mixed)
    assert {row: found[row] for row in range(3)} == {row: alone[row] for row in range(3)}
    assert len(found) == 4 and len(found[3].top_ids) == 2
    exact = logits[1].astype(mx.float32)
    logprobs = (exact - mx.logsumexp(exact)).tolist()
    assert alone[1].top_ids == NAMED
    assert list(alone[1].top) == pytest.approx([logprobs[token] for token in NAMED], abs=1e-5)
