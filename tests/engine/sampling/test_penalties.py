"""Penalties and biases against mlx-lm's processors, with the tokens on the device."""

import math
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from engine.plan import Decode, Slot
from engine.sampling.history import TokenHistory
from engine.sampling.penalties import process_logits
from shared.wire import SamplingParams

VOCAB = 60
PROMPT = [5, 9, 9, 3, 17, 5, 22, 40]
OUTPUT = [9, 11, 11, 12, 11, 3, 50, 9, 9, 2]


def decode(
    slot: Slot, tokens: list[int], prompt_length: int, fresh: bool, **controls: Any
) -> Decode:
    """Return the decode for the output that follows ``tokens``."""
    sampling, position = SamplingParams(seed=1, **controls), len(tokens) - 1
    history = tuple(tokens[:-1]) if fresh else None
    return Decode(slot, position, None, len(tokens) - prompt_length, sampling, history=history)


def logits_of(seed: int, rows: int = 1) -> mx.array:
    return mx.random.normal((rows, VOCAB), key=mx.random.key(seed)) * 3


def mlx_lm_logits(
    logits: mx.array, tokens: list[int], prompt_length: int, controls: dict[str, Any]
) -> mx.array:
    """Return one row (vocab,): repetition counts all tokens, other penalties the output."""
    output = tokens[prompt_length:]
    everything = make_logits_processors(
        dict(controls.get("logit_bias", [])),
        controls.get("repetition_penalty"),
        controls.get("repetition_context_size", 20),
    )
    generated = make_logits_processors(
        None,
        presence_penalty=controls.get("presence_penalty"),
        presence_context_size=1000,
        frequency_penalty=controls.get("frequency_penalty"),
        frequency_context_size=1000,
    )
    logits = mx.array(logits)[None]
    for processors, seen in ((everything, tokens), (generated, output)):
        for process in processors:
            logits = process(mx.array(seen), logits) if seen else logits
    return logits[0]


CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "repetition_context_size": 3},
    {"repetition_penalty": 1.3, "repetition_context_size": 0},
    {"repetition_penalty": 1.3, "repetition_context_size": 500},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.4},
    {"presence_penalty": -1.5, "frequency_penalty": 2.0, "repetition_penalty": 1.1},
    {"logit_bias": [(3, 5.0), (59, -100.0)]},
    {"logit_bias": [(9, 2.5)], "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {},
]


@pytest.mark.parametrize("controls", CONTROLS, ids=str)
def test_a_sequence_is_penalized_as_by_mlx_lm_at_each_of_its_tokens(
    controls: dict[str, Any],
) -> None:
    """The host sends only the prompt. Every later token comes from the device."""
    history = TokenHistory()
    slot = 3
    for count in range(len(OUTPUT)):
        tokens = PROMPT + OUTPUT[:count]
        logits = logits_of(count)
        part = decode(slot, tokens, len(PROMPT), fresh=count == 0, **controls)
        history.record([part], mx.array([tokens[-1]]))
        ours = process_logits(logits, [part], history)
        assert mx.array_equal(ours[0], mlx_lm_logits(logits[0], tokens, len(PROMPT), controls))


def test_rows_are_penalized_each_by_its_own_controls_and_tokens() -> None:
    """Rows of all lengths in one batch give the same logits as each of them alone."""
    history = TokenHistory()
    logits = logits_of(1, len(CONTROLS))
    lengths = [len(PROMPT) + i for i in range(len(CONTROLS))]
    sequences = [(PROMPT + OUTPUT)[i:n] or [1] for i, n in enumerate(lengths)]
    parts = [
        decode(i, tokens, 6, fresh=True, **controls)
        for i, (tokens, controls) in enumerate(zip(sequences, CONTROLS, strict=True))
    ]
    history.record(parts, mx.array([tokens[-1] for tokens in sequences]))
    together = process_logits(logits, parts, history)
    for row, (tokens, controls) in enumerate(zip(sequences, CONTROLS, strict=True)):
        assert mx.array_equal(together[row], mlx_lm_logits(logits[row], tokens, 6, controls)), (
            controls
        )


def test_the_history_grows_for_long_sequences_and_many_slots() -> None:
    controls = {"repetition_penalty": 1.5, "repetition_context_size": 0}
    history = TokenHistory()
    sequences = [[(i * j) % VOCAB for j in range(1 + 90 * i)] for i in range(20)]
    parts = [decode(i, s, 1, True, **controls) for i, s in enumerate(sequences)]
    for at in range(0, 20, 5):
        tokens = [s[-1] for s in sequences[at : at + 5]]
        history.record(parts[at : at + 5], mx.array(tokens))
    logits = logits_of(3, 20)
    ours = process_logits(logits, parts, history)
    for row, tokens in enumerate(sequences):
        assert mx.array_equal(ours[row], mlx_lm_logits(logits[row], tokens, 1, controls))
    history.free_slots(range(20))
    for part in parts:
        with pytest.raises(KeyError):
            history.recent([part], [1])


def test_a_bias_does_not_allow_a_forbidden_token() -> None:
    part = Decode(0, 4, 5, 0, SamplingParams(seed=1, logit_bias=[(3, 100.0)]), forbidden=(3, 10**9))
    (row,) = process_logits(logits_of(4), [part], TokenHistory()).tolist()
    assert row[3] == -math.inf and min(row[:3] + row[4:]) > -math.inf


def test_logits_without_controls_stay_the_same_array() -> None:
    logits = logits_of(5)
    assert process_logits(logits, [decode(0, PROMPT, 8, False)], TokenHistory()) is logits
