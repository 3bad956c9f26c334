import math
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from engine.backend import arrays
from engine.plan import Decode
from engine.sampling import noise
from engine.sampling.sampler import Sampler, sample_tokens
from shared.wire import SamplingParams

VOCAB = 50


def decode(
    row: int = 0, index: int = 0, forbidden: tuple[int, ...] = (), **controls: Any
) -> Decode:
    sampling = SamplingParams(**{"seed": 1} | controls)
    slot, history = row, (4,) * index
    return Decode(slot, index + 5, None, index, sampling, forbidden, history=history)


def sample(logits: mx.array, rows: list[Decode]) -> list[int]:
    return Sampler().sample(logits, rows, mx.arange(len(rows))).tokens.tolist()


@pytest.fixture
def logits() -> mx.array:
    return mx.random.normal((8, VOCAB), key=mx.random.key(3)) * 3


ROWS = [
    decode(0, temperature=1.0, seed=7),
    decode(1),
    decode(2, temperature=0.7, top_p=0.8, seed=2**64 - 1, xtc_probability=0.9),
    decode(3, temperature=1.5, top_k=5, min_p=0.01, seed=9, logit_bias=[(3, 4.0)]),
    decode(4, temperature=2.0, min_p=0.2, seed=0),
    decode(5, 3, temperature=1.0, seed=7, frequency_penalty=1.0),
    decode(6, 9, repetition_penalty=1.5),
    decode(7, 2, temperature=1.9, xtc_probability=1.0, xtc_threshold=0.01, top_k=30),
]


def test_temperature_zero_takes_the_most_likely_token(logits: mx.array) -> None:
    filters: dict[str, Any] = {"top_p": 0.5, "top_k": 3, "min_p": 0.3, "xtc_probability": 1.0}
    tokens = sample(logits, [decode(i, **filters) for i in range(8)])
    assert tokens == mx.argmax(logits, axis=-1).tolist()


def test_a_row_draws_the_same_token_whatever_else_is_in_the_batch(logits: mx.array) -> None:
    together = sample(logits, ROWS)
    alone = [
        Sampler().sample(logits[i : i + 1], [row], mx.array([i])) for i, row in enumerate(ROWS)
    ]
    assert together == [one.tokens.item() for one in alone]
    backwards = Sampler().sample(logits[::-1], ROWS[::-1], mx.arange(8)[::-1])
    assert together == backwards.tokens.tolist()[::-1]


def test_both_array_libraries_draw_the_same(
    logits: mx.array, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = sample(logits, ROWS)
    monkeypatch.setattr(arrays, "array_namespace", lambda: mx)
    assert sample(logits, ROWS) == host


def test_logits_in_16_bits_give_the_tokens_of_fp32(logits: mx.array) -> None:
    short = logits.astype(mx.bfloat16)
    assert sample(short, ROWS) == sample(short.astype(mx.float32), ROWS)


def test_noise_depends_on_seed_and_position() -> None:
    keys = [noise.key(s, i) for s in (0, 1, 2**63) for i in (0, 1, 70_000)]
    assert len(set(keys)) == len(keys)
    assert noise.key(1, 5) == noise.key(1, 5)
    coins = [noise.coin(s, i) for s in (0, 1, 2**63) for i in (0, 1, 70_000)]
    assert len(set(coins)) == len(coins) and all(0 <= coin < 1 for coin in coins)


def test_forbidden_tokens_are_never_chosen(logits: mx.array) -> None:
    best = int(mx.argmax(logits[0]))
    second = int(mx.argsort(-logits[0])[1])
    tokens = sample(logits[:2], [decode(forbidden=(best, 10**9)), decode(1)])
    assert tokens == [second, int(mx.argmax(logits[1]))]


def test_a_tiny_temperature_takes_the_most_likely_token(logits: mx.array) -> None:
    rows = [decode(i, temperature=10.0 ** -(3 + 40 * (i % 2)), seed=i) for i in range(8)]
    assert sample(logits, rows) == mx.argmax(logits, axis=-1).tolist()


def chi_square(rows: list[Decode], logits: mx.array, probabilities: list[float]) -> float:
    tokens = sample_tokens(mx.broadcast_to(logits, (len(rows), logits.shape[-1])), rows).tolist()
    seen = Counter(tokens)
    assert all(p > 0 for t, p in enumerate(probabilities) if seen[t])
    expected = ((t, p * len(rows)) for t, p in enumerate(probabilities) if p > 0)
    return sum((seen[t] - e) ** 2 / e for t, e in expected)


TEN = mx.random.normal((1, 10), key=mx.random.key(1))
# The 99.9th percentile of chi-square, by degrees of freedom.
LIMIT = {4: 18.5, 9: 27.9}


def softmax_of(kept: list[int], temperature: float) -> list[float]:
    logits = [TEN[0, t].item() if t in kept else -math.inf for t in range(10)]
    return mx.softmax(mx.array(logits) / temperature).tolist()


@pytest.mark.parametrize("seeds", [True, False], ids=["by seed", "by position"])
def test_draws_follow_the_distribution(seeds: bool) -> None:
    """There are 4,000 draws at fixed seeds."""
    rows = [
        decode(0, 0 if seeds else i, temperature=0.8, seed=i if seeds else 5) for i in range(4000)
    ]
    assert chi_square(rows, TEN, softmax_of(list(range(10)), 0.8)) < LIMIT[9]


def test_draws_follow_what_the_filters_leave() -> None:
    order = mx.argsort(-TEN[0]).tolist()
    rows = [decode(0, i, temperature=1.2, seed=3, top_k=5) for i in range(4000)]
    assert chi_square(rows, TEN, softmax_of(order[:5], 1.2)) < LIMIT[4]


def test_xtc_excludes_tokens_with_its_probability() -> None:
    """With probability 0.3 only the least likely of the tokens over the threshold stays."""
    order = mx.argsort(-TEN[0]).tolist()
    chances = mx.softmax(TEN[0]).tolist()
    over = [t for t in order if chances[t] > 0.1]
    assert len(over) == 3
    without = softmax_of(order[len(over) - 1 :], 1.0)
    expected = [0.7 * p + 0.3 * q for p, q in zip(chances, without, strict=True)]
    rows = [decode(0, i, temperature=1.0, seed=8, xtc_probability=0.3) for i in range(4000)]
    assert chi_square(rows, TEN, expected) < LIMIT[9]


def test_guesses_are_the_samples_that_come_if_they_are_right() -> None:
    """With noise, penalties and biases; what wrong ones leave in the history is replaced."""
    sampling = SamplingParams(
        seed=4, temperature=0.8, presence_penalty=1.5, repetition_penalty=1.4, logit_bias=[(3, 1.0)]
    )
    history = (5, 6, 7)
    steps = [
        Decode(0, 3 + n, None, 1 + n, sampling, history=None if n else history) for n in range(6)
    ]
    logits = mx.random.normal((6, 20), key=mx.random.key(1)) * 2

    def run(sampler: Sampler, token: int, guesses: bool) -> list[int]:
        found = [token]
        for number, step in enumerate(steps):
            row, inputs = logits[number : number + 1], mx.array([found[-1]])
            if guesses:
                found.append(sampler.guess(row, [step], inputs).item())
            else:
                found.append(sampler.sample(row, [step], inputs).tokens.item())
        return found

    sampler, plain = Sampler(), Sampler()
    assert run(sampler, 2, guesses=True) == run(plain, 2, guesses=False)
    run(sampler, 8, guesses=True)
    assert run(sampler, 2, guesses=False) == run(plain, 2, guesses=False)


def test_a_slot_that_begins_in_mid_sequence_looks_back_to_its_beginning() -> None:
    """Of 50 outputs it has three: what lies beyond is not taken from elsewhere."""
    sampling = SamplingParams(seed=1, presence_penalty=100.0)
    decode = Decode(0, 3, None, 50, sampling, history=(5, 6, 7))
    logits = mx.zeros((1, 8)) + mx.array([0.1, 0, 0, 0, 0, 9, 9, 9])
    found = Sampler().guess(logits, [decode], mx.array([4]))
    assert found.item() == 0
